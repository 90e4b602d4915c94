"""The graphs of a trio: each model wrapped to the graph contract, traced, and written with its weights.

Every function takes configs and a `WeightFile`, and returns nothing but files; names are `xpress_export.names`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from xpress_export import names
from xpress_export.exporter.configs import DecoderConfig, DrafterConfig, RefinerConfig
from xpress_export.exporter.modules import Accept, Drafter, Refiner, Target
from xpress_export.exporter.trace import Binding, trace

# Example sizes for tracing. Dynamic dimensions must differ from each other and from 0 and 1, or they specialise.
_B, _S, _C = 2, 5, 32


class _TargetGraph(nn.Module):
    def __init__(self, model: Target) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, write_index: Tensor, cache: list[Tensor]) -> tuple[Tensor, ...]:
        logits, tapped, present = self.model(input_ids, write_index, cache)
        taps = () if tapped is None else (tapped,)
        return (logits.argmax(-1), *taps, logits, *present)


class _DrafterGraph(nn.Module):
    def __init__(self, model: Drafter, for_refiner: bool) -> None:
        super().__init__()
        self.model, self.for_refiner = model, for_refiner

    def forward(
        self,
        target_hidden: Tensor,
        num_committed: Tensor,
        write_index: Tensor,
        block_ids: Tensor,
        cache: list[Tensor],
    ) -> tuple[Tensor, ...]:
        hidden, logits, present = self.model(target_hidden, num_committed, write_index, block_ids, cache)
        states = (hidden,) if self.for_refiner else ()
        return (self.model.vocab(logits.argmax(-1)), *states, logits, *present)


class _RefinerGraph(nn.Module):
    def __init__(self, model: Refiner) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        draft_logits: Tensor,
        draft_tokens: Tensor,
        anchor: Tensor,
        previous: Tensor,
        draft_hidden: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        logits = self.model(draft_logits, draft_tokens, anchor, previous, draft_hidden)
        return self.model.vocab(logits.argmax(-1)), logits


def _cache(decoder: DecoderConfig, dtype: torch.dtype) -> list[Binding]:
    shape = (_B, decoder.num_kv_heads, _C, decoder.head_dim)
    return [
        Binding(name(i), torch.zeros(shape, dtype=dtype), {0: "B", 2: "C"})
        for i in range(decoder.num_layers)
        for name in (names.past_key, names.past_value)
    ]


def _present(num_layers: int) -> list[str]:
    return [name(i) for i in range(num_layers) for name in (names.present_key, names.present_value)]


@contextlib.contextmanager
def _building(dtype: torch.dtype) -> Iterator[None]:
    """Modules made inside have shapes and names but no memory, in `dtype` unless they insist on another."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode():
            yield
    finally:
        torch.set_default_dtype(default)


def _int64(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def trace_target(config: DecoderConfig, target_layer_ids: tuple[int, ...], dtype: torch.dtype) -> ir.Model:
    """Trace the target; taps are an output only when a drafter listens to them."""
    with _building(dtype):
        model = Target(config, target_layer_ids)
        inputs: list[Binding | list[Binding]] = [
            Binding(names.INPUT_IDS, _int64(_B, _S), {0: "B", 1: "S"}),
            Binding(names.WRITE_INDEX, _int64(_B), {0: "B"}),
            _cache(config, dtype),
        ]
        outputs = [names.NEXT_TOKEN]
        outputs += [names.TARGET_HIDDEN] if target_layer_ids else []
        outputs.append(names.LOGITS)
        return trace(_TargetGraph(model), inputs, outputs + _present(config.num_layers))


def trace_drafter(config: DrafterConfig, dtype: torch.dtype, *, for_refiner: bool) -> ir.Model:
    """Trace the drafter; hidden states are an output only when a refiner reads them."""
    with _building(dtype):
        model = Drafter(config)
        width = len(config.target_layer_ids) * config.target_hidden_size
        inputs: list[Binding | list[Binding]] = [
            Binding(names.TARGET_HIDDEN, torch.zeros((_B, _S, width), dtype=dtype), {0: "B", 1: "S"}),
            Binding(names.NUM_COMMITTED, _int64(_B), {0: "B"}),
            Binding(names.WRITE_INDEX, _int64(_B), {0: "B"}),
            Binding(names.BLOCK_IDS, _int64(_B, config.block_size), {0: "B", 1: "N"}),
            _cache(config.decoder, dtype),
        ]
        outputs = [names.DRAFT_TOKENS]
        outputs += [names.DRAFT_HIDDEN] if for_refiner else []
        outputs.append(names.DRAFT_LOGITS)
        return trace(_DrafterGraph(model, for_refiner), inputs, outputs + _present(config.decoder.num_layers))


def trace_refiner(config: RefinerConfig, first_slot: int, dtype: torch.dtype) -> ir.Model:
    """Trace one Jacobi pass of the refiner."""
    drafts = config.block_size - first_slot
    slots = "N-1" if first_slot else "N"
    with _building(dtype):
        model = Refiner(config, first_slot, folded=True)
        inputs: list[Binding | list[Binding]] = [
            Binding(
                names.DRAFT_LOGITS,
                torch.zeros((_B, drafts, config.draft_vocab_size), dtype=dtype),
                {0: "B", 1: slots},
            ),
            Binding(names.DRAFT_TOKENS, _int64(_B, drafts), {0: "B", 1: slots}),
            Binding(names.ANCHOR, _int64(_B), {0: "B"}),
            Binding(names.PREVIOUS, _int64(_B), {0: "B"}),
        ]
        if config.kind == "xpress":
            hidden = torch.zeros((_B, config.block_size, config.hidden_size), dtype=dtype)
            inputs.append(Binding(names.DRAFT_HIDDEN, hidden, {0: "B", 1: "N"}))
        return trace(_RefinerGraph(model), inputs, [names.REFINED_TOKENS, names.REFINED_LOGITS])


def trace_accept() -> ir.Model:
    """Trace what decides how much a cycle commits; it has no weights."""
    tokens, slots = {0: "B", 1: "S"}, {0: "B"}
    with _building(torch.float32):
        inputs: list[Binding | list[Binding]] = [
            Binding(names.INPUT_IDS, _int64(_B, _S), tokens),
            Binding(names.NEXT_TOKEN, _int64(_B, _S), tokens),
            Binding(names.NUM_GIVEN, _int64(_B), slots),
            Binding(names.MAX_ACCEPT, _int64(_B), slots),
            Binding(names.WRITE_INDEX, _int64(_B), slots),
        ]
        outputs = [names.NUM_COMMITTED, names.ANCHOR, names.PREVIOUS, names.NEXT_WRITE_INDEX, names.NEXT_GIVEN]
        return trace(Accept(), inputs, outputs)
