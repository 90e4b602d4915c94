"""Is the written graph still the model? Each graph is run on ONNX Runtime CPU against an independent reference.

    graph     reference                                        compared
    target    transformers' own class on the same weights      tapped hidden states, next tokens
    drafter   this package's PyTorch module, eager, float32    draft hidden states, draft tokens
    refiner   the same                                         refined tokens after one pass and after two
    accept    its definition, token by token                   all outputs

Floats are compared by relative error, |a - b| / |b| over the whole tensor. Tokens must be equal wherever the
reference's best two logits are further apart than the tolerance allows to confuse. Calls are chosen to hurt:
two slots at different positions, rows overwritten after a rejection, only some rows committed, a short block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xpress_export import names
from xpress_export.errors import MissingDependencyError, ParityError
from xpress_export.exporter.configs import DecoderConfig, DrafterConfig
from xpress_export.exporter.modules import Drafter, Refiner

TOLERANCE = {"fp32": 2e-4, "fp16": 1e-2}
"""Relative error allowed, by precision of the graph. The references run in float32."""

_CAPACITY = 64
_NUMPY = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Check:
    """One comparison: `value` is the relative error, or the share of clear-cut tokens that differ."""

    graph: str
    against: str
    measure: str
    value: float
    tolerance: float
    rows: int

    def require(self) -> Check:
        """Return self, or raise if the value is beyond the tolerance (a NaN is)."""
        if not self.value <= self.tolerance:
            raise ParityError(
                f"the {self.graph} graph does not reproduce {self.against}: {self.measure} is {self.value:.3g} "
                f"over {self.rows} rows, allowed {self.tolerance:.3g}; nothing was written. "
                f"Please report it with the checkpoint's config.json"
            )
        return self


class GraphRunner:
    """A graph on ONNX Runtime CPU with its cache, of `capacity` rows, kept between calls."""

    def __init__(self, path: Path, batch: int = 2, capacity: int = _CAPACITY) -> None:
        try:
            import onnxruntime as ort
        except ImportError as err:
            raise MissingDependencyError("onnxruntime", "check the exported graphs", "cpu") from err
        options = ort.SessionOptions()
        options.log_severity_level = 3
        # Session-wide optimisation is the backend's business; parity wants the graph as written.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.inputs = {i.name: _NUMPY[i.type] for i in self.session.get_inputs()}
        self.outputs = [o.name for o in self.session.get_outputs()]
        self.cache: Arrays = {
            i.name: np.zeros((batch, i.shape[1], capacity, i.shape[3]), _NUMPY[i.type])
            for i in self.session.get_inputs()
            if names.is_past(i.name)
        }

    def __call__(self, **feeds: Tensor) -> dict[str, Tensor]:
        arrays = {name: feeds[name].numpy().astype(dtype) for name, dtype in self.inputs.items() if name in feeds}
        values = dict(zip(self.outputs, self.session.run(None, arrays | self.cache), strict=True))
        self.cache = {name: values.pop(names.present_of(name)) for name in self.cache}
        return {name: torch.from_numpy(np.asarray(v)) for name, v in values.items()}


def form_of(path: Path) -> str:
    """What a report adds of a graph that is not the native one."""
    return " (decomposed)" if path.stem.endswith(".decomposed") else ""


def relative_error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|, Frobenius norms in float64; infinite if any number is a NaN."""
    got, expected = got.double(), expected.double()
    error = float((got - expected).norm() / expected.norm().clamp_min(1e-30))
    return math.inf if math.isnan(error) else error  # `max` over several calls would lose a NaN


def is_clear(logits: Tensor, tolerance: float) -> Tensor:
    """Which rows are no near-tie: their best two logits are ten tolerances apart, times the spread of the row."""
    best = logits.float().topk(2, dim=-1).values
    return (best[..., 0] - best[..., 1]) > tolerance * logits.float().std(-1) * 10


def token_mismatch(
    calls: Sequence[tuple[Tensor, Tensor]],
    tolerance: float,
    to_target: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> float:
    """Share of tokens that differ from the argmax of their logits over all `calls`, near-ties left out.

    Infinite if nothing else was there to compare. `to_target` maps rows of a reduced draft vocabulary to the target's
    ids, in which the tokens speak.
    """
    got, logits = (torch.cat([call[i].flatten(0, 1) for call in calls]) for i in range(2))
    clear = is_clear(logits, tolerance)
    wrong = (got != to_target(logits.argmax(-1))) & clear
    return float(wrong.sum() / clear.sum()) if clear.any() else math.inf


def check_target(
    path: Path, reference: torch.nn.Module, config: DecoderConfig, taps: tuple[int, ...], precision: str
) -> list[Check]:
    """Compare a target graph with a transformers causal LM that holds the same weights in float32."""
    tolerance, against = TOLERANCE[precision], f"transformers {type(reference).__name__}"
    ids = torch.randint(0, config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(0))
    hidden, logits = _transformers_run(reference, ids, taps)
    graph = GraphRunner(path)
    graph(input_ids=ids[:, :16].flip(1), write_index=torch.tensor([0, 0]))  # rows a rejection leaves behind
    calls = [(0, 0, 16), (16, 12, 8), (20, 20, 1)]  # where each of the two slots writes, and how many rows
    errors, tokens, rows = [], [], 0
    for first, second, length in calls:
        starts = torch.tensor([first, second])
        span = starts[:, None] + torch.arange(length)
        out = graph(input_ids=ids.gather(1, span), write_index=starts)
        rows += 2 * length
        tokens.append((out[names.NEXT_TOKEN], _rows(logits, span)))
        if taps:
            errors.append(relative_error(out[names.TARGET_HIDDEN], _rows(hidden, span)))
        errors.append(relative_error(out[names.LOGITS], _rows(logits, span)))
    share = token_mismatch(tokens, tolerance)
    checks = [
        Check(names.TARGET, against, "share of wrong tokens", share, 0.0, rows),
        Check(names.TARGET, against, "relative error", max(errors), tolerance, rows),
    ]
    return [check.require() for check in checks]


def _rows(values: Tensor, span: Tensor) -> Tensor:
    return torch.stack([row[index] for row, index in zip(values, span, strict=True)])


def _transformers_run(model: torch.nn.Module, ids: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Tapped hidden states [B, S, K*E] and logits [B, S, V] of a whole sequence; layer i is `hidden_states[i + 1]`."""
    with torch.inference_mode():
        out = model(ids, output_hidden_states=True, use_cache=False)
    tapped = torch.cat([out.hidden_states[i + 1] for i in taps], dim=-1) if taps else torch.zeros(0)
    return tapped, out.logits


def check_drafter(path: Path, module: Drafter, config: DrafterConfig, precision: str) -> list[Check]:
    """Compare a drafter graph with the eager float32 module over a short conversation of calls."""
    tolerance = TOLERANCE[precision]
    graph, decoder, generator = GraphRunner(path), config.decoder, torch.Generator().manual_seed(1)
    shape = (2, decoder.num_kv_heads, _CAPACITY, decoder.head_dim)
    cache = [torch.zeros(shape) for _ in range(2 * decoder.num_layers)]
    width = len(config.target_layer_ids) * config.target_hidden_size
    errors, tokens, rows = [], [], 0
    written = torch.tensor([0, 0])
    for num_rows, committed, slots in (
        (12, (12, 7), config.block_size),
        (5, (1, 5), config.block_size),
        (5, (4, 2), 2),
    ):
        feeds = {
            names.TARGET_HIDDEN: torch.randn(2, num_rows, width, generator=generator),
            names.NUM_COMMITTED: torch.tensor(committed),
            names.WRITE_INDEX: written,
            names.BLOCK_IDS: torch.full((2, slots), config.mask_token_id),
        }
        feeds[names.BLOCK_IDS][:, 0] = torch.randint(0, decoder.vocab_size, (2,), generator=generator)
        with torch.inference_mode():
            hidden, logits, cache = module(*feeds.values(), cache)
        out = graph(**feeds)
        rows += 2 * slots
        written = written + torch.tensor(committed)
        tokens.append((out[names.DRAFT_TOKENS], logits))
        if names.DRAFT_HIDDEN in out:
            errors.append(relative_error(out[names.DRAFT_HIDDEN], hidden))
        errors.append(relative_error(out[names.DRAFT_LOGITS], logits))
    share = token_mismatch(tokens, tolerance, module.vocab)
    checks = [
        Check(names.DRAFTER, "the PyTorch module", "share of wrong tokens", share, 0.0, rows),
        Check(names.DRAFTER, "the PyTorch module", "relative error", max(errors), tolerance, rows),
    ]
    return [check.require() for check in checks]


def check_refiner(path: Path, module: Refiner, precision: str) -> list[Check]:
    """Compare a refiner graph with the eager float32 module over two passes."""
    tolerance, config = TOLERANCE[precision], module.config
    graph, generator = GraphRunner(path), torch.Generator().manual_seed(2)
    drafts = config.block_size - module.first_slot
    feeds: dict[str, Tensor] = {
        names.DRAFT_LOGITS: torch.randn(2, drafts, config.draft_vocab_size, generator=generator) * 3,
        names.DRAFT_TOKENS: torch.randint(0, config.vocab_size, (2, drafts), generator=generator),
        names.ANCHOR: torch.tensor([1, 2]),
        names.PREVIOUS: torch.tensor([3, 0]),
        names.DRAFT_HIDDEN: torch.randn(2, config.block_size, config.hidden_size, generator=generator),
    }
    calls, errors, rows = [], [], 4 * drafts
    for _ in range(2):
        with torch.inference_mode():
            logits = module(*feeds.values())
        out = graph(**feeds)
        calls.append((out[names.REFINED_TOKENS], logits))
        errors.append(relative_error(out[names.REFINED_LOGITS], logits))
        feeds[names.DRAFT_TOKENS] = out[names.REFINED_TOKENS]
    share = token_mismatch(calls, tolerance, module.vocab)
    checks = [
        Check(names.REFINER, "the PyTorch module", "share of wrong tokens", share, 0.0, rows),
        Check(names.REFINER, "the PyTorch module", "relative error", max(errors), tolerance, rows),
    ]
    return [check.require() for check in checks]


def check_accept(path: Path) -> Check:
    """Compare an accept graph with what it is to decide, on given prefixes, agreeing drafts and idle slots."""
    graph, generator = GraphRunner(path), torch.Generator().manual_seed(4)
    wrong, rows, slots = 0, 0, 16
    for length in (1, 2, 9):
        for _ in range(8):
            feeds = {
                name: torch.randint(0, 2, (slots, length), generator=generator)  # few tokens, so that they often agree
                for name in (names.INPUT_IDS, names.NEXT_TOKEN)
            }
            feeds[names.NUM_GIVEN] = torch.randint(0, length + 1, (slots,), generator=generator)
            feeds[names.MAX_ACCEPT] = torch.randint(0, length + 1, (slots,), generator=generator)
            feeds[names.WRITE_INDEX] = torch.randint(0, 99, (slots,), generator=generator)
            out = graph(**feeds)
            for slot in range(slots):
                given: list[Any] = [feeds[name][slot].tolist() for name in feeds]
                expected = _accepted(*given)
                wrong += any(int(out[name][slot]) != value for name, value in expected.items())
            rows += slots
    return Check(
        names.ACCEPT, f"its definition{form_of(path)}", "share of wrong slots", wrong / rows, 0.0, rows
    ).require()


def _accepted(ids: list[int], next_token: list[int], given: int, may: int, written: int) -> dict[str, int]:
    """The outputs of accept for one slot; an idle one has no anchor."""
    count = given
    while given and count < min(len(ids), given + may) and ids[count] == next_token[count - 1]:
        count += 1
    expected = {names.NUM_COMMITTED: count, names.NEXT_WRITE_INDEX: written + count, names.NEXT_GIVEN: min(given, 1)}
    if given:
        expected |= {names.ANCHOR: next_token[count - 1], names.PREVIOUS: ids[count - 1]}
    return expected
