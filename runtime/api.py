"""Open a bundle and generate from it: the public face of the runtime.

    with Runtime.open("bundles/smollm2-135m") as rt:
        generation = rt.generate("Why is the sky blue?", SamplingParams(max_new_tokens=200))
        for chunk in generation:
            print(chunk.text, end="", flush=True)
        print(generation.stats.tau)

Any number of threads and asyncio tasks may use one `Runtime`. Requests run together, up to `num_slots` at a time,
on one thread of the runtime's own; the rest wait in line. No module state.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from xpress_export import names
from xpress_export.errors import BundleError, RequestError
from xpress_export.manifest import Manifest, read_manifest, verify_files, verify_sizes
from xpress_export.precision import Precision
from xpress_export.runtime import devices
from xpress_export.runtime.backend import Graph
from xpress_export.runtime.decode import Decoder
from xpress_export.runtime.device import Device
from xpress_export.runtime.params import SamplingParams
from xpress_export.runtime.requests import Generation, Plan, Request, closed
from xpress_export.runtime.resident import ResidentDecoder
from xpress_export.runtime.resident_memory import Shape
from xpress_export.runtime.scheduler import ADAPTIVE, Scheduler
from xpress_export.runtime.slots import Block, Slots
from xpress_export.runtime.speculation import Choice, Speculation
from xpress_export.runtime.stats import RuntimeStats, Stats
from xpress_export.runtime.text import TextCodec, TextStream
from xpress_export.runtime.trace import Tracer

PREFILL_CHUNK = 128
NUM_SLOTS = devices.NUM_SLOTS

Messages = Sequence[Mapping[str, Any]]
_Loaded = TypeVar("_Loaded")

logger = logging.getLogger(__name__)


class Runtime:
    """A bundle, loaded. Use as a context manager, or call `close`.

    decoder: what runs its cycles. num_slots: requests that run together. prefill_chunk: prompt tokens per target
    call. max_queue: requests that may wait for a slot, None: any number. kv_budget_bytes: most the KV caches may
    take, None: half of the memory. device: what it runs on, as `open` takes it. layout: split or fused.
    """

    def __init__(
        self,
        manifest: Manifest,
        codec: TextCodec,
        decoder: Decoder | ResidentDecoder,
        *,
        num_slots: int = NUM_SLOTS,
        prefill_chunk: int = PREFILL_CHUNK,
        max_queue: int | None = None,
        kv_budget_bytes: int | None = None,
        device: str = devices.CPU,
        layout: str = names.LAYOUT_SPLIT,
    ) -> None:
        self.manifest, self.codec, self.device, self.layout = manifest, codec, device, layout
        self._host_decides = isinstance(decoder, Decoder)
        self._max_context = min(manifest.max_context, decoder.memory.max_context)
        self._max_drafts = decoder.memory.max_drafts
        self._kv_budget = _memory_bytes() // 2 if kv_budget_bytes is None else kv_budget_bytes
        draft = manifest.draft
        self._scheduler = Scheduler(
            decoder,
            Speculation(Choice(self._max_drafts, draft.refine_passes), draft.first_slot)
            if draft and self.adapts
            else None,
            num_slots=num_slots,
            max_queue=max_queue,
            kv_budget_bytes=self._kv_budget,
            prefill_chunk=prefill_chunk,
            vocab_size=manifest.target.vocab_size,
        )
        self._close = weakref.finalize(self, self._scheduler.close)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        device: str | Device = devices.AUTO,
        backend: str = devices.AUTO,
        layout: str | None = None,
        precision: Precision = None,
        num_slots: int | None = None,
        num_threads: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        max_draft_tokens: int | None = None,
        max_queue: int | None = None,
        kv_budget_bytes: int | None = None,
        on_verify: Callable[[int], None] | None = None,
    ) -> Self:
        """Load a bundle while every file of it is checked against the manifest.

        device: "auto", "cpu", "cuda:0", or a `Device` of one's own. backend: "auto", "onnxruntime", "tensorrt" or
        "tensorrt-rtx". layout: "split" or "fused", None: as the bundle was built.
        precision: one, or one for each of some models ({"target": "int8"}); None: what the bundle was built to run
        in. A model without a variant in a single precision runs in the bundle's own.
        num_slots: None, eight, or as many as engines were compiled for. num_threads: of the CPU backend, None: one per
        core. max_draft_tokens: most that a cycle drafts, and where the device decides (GPU, fused) what every cycle
        drafts; None: all of the drafter's block. on_verify: called with the number of bytes checked since the last
        call. The others are the class's.
        Raises BundleError if anything differs from the manifest, naming it; EngineError for a device that is not there.
        """
        _at_least_one(num_slots=num_slots, prefill_chunk=prefill_chunk)
        folder = Path(folder)
        manifest = read_manifest(folder)
        verify_sizes(folder, manifest)
        layout = _layout(manifest, layout)
        _check_drafts(manifest, max_draft_tokens)
        precisions = devices.role_precisions(manifest, precision, layout)
        given = device if isinstance(device, Device) else None
        choice = devices.choose(manifest, given or device, backend, precisions, layout)
        logger.info("running on %s with %s, layout %s: %s", choice.name, choice.backend, layout, choice.why)
        found = devices.find(folder, manifest, choice, precisions, layout)
        shape = found.shape(manifest, num_slots=num_slots, chunk=prefill_chunk, max_drafts=max_draft_tokens)
        with ExitStack() as stack, ThreadPoolExecutor() as pool:  # hashing takes as long as loading
            intact = pool.submit(verify_files, folder, manifest, on_verify)
            codec = pool.submit(TextCodec.open, folder / manifest.text.folder)
            if given is None and choice.index is None and layout == names.LAYOUT_SPLIT:
                models = {role: found.files[role] for role in manifest.roles}
                graphs = _load(pool, lambda path, role: Graph(path, role, num_threads), models)
                decoder: Decoder | ResidentDecoder = host_decoder(folder, manifest, graphs, shape)
            else:
                opened = given or devices.open_device(choice, num_threads, found.engines)
                stack.callback(opened.close)
                devices.require_memory(manifest, opened, choice, found, precision, layout, shape)
                decoder = ResidentDecoder(opened, _load(pool, opened.load, found.files), shape)
            intact.result()  # nothing of a damaged bundle is returned
            sizes = {"num_slots": shape.num_slots, "prefill_chunk": shape.chunk}
            queue: dict[str, Any] = {"max_queue": max_queue, "kv_budget_bytes": kv_budget_bytes}
            runtime = cls(manifest, codec.result(), decoder, device=choice.name, layout=layout, **sizes, **queue)
            stack.pop_all()  # what was opened is the runtime's now
        return runtime

    @property
    def max_context(self) -> int:
        """Most tokens of a request, prompt and answer together: the bundle's, or what its engines were compiled for."""
        return self._max_context

    @property
    def modes(self) -> tuple[str, ...]:
        """Decoding modes this bundle supports, plain decoding first."""
        roles = (
            (names.MODE_TARGET, names.TARGET),
            (names.MODE_DFLASH, names.DRAFTER),
            (names.MODE_XPRESS, names.REFINER),
        )
        found = tuple(mode for mode, role in roles if role in self.manifest.roles)
        return found if self.layout == names.LAYOUT_SPLIT else (found[0], found[-1])

    @property
    def adapts(self) -> bool:
        """Whether a request that names no mode drafts as much as is measured to be fastest."""
        return self._host_decides and len(self.modes) > 1

    @property
    def closed(self) -> bool:
        return not self._close.alive

    @property
    def stats(self) -> RuntimeStats:
        """What the runtime is doing, and what it did since it was opened: a snapshot."""
        return self._scheduler.stats()

    def trace(self, tracer: Tracer | None) -> None:
        """Note what runs, and where and when, in `tracer` from now on; None: no longer."""
        self._scheduler.trace(tracer)

    def encode(self, prompt: str | Messages | Sequence[int], **template_args: Any) -> list[int]:
        """Token ids of a prompt: text is one user message where the model has a chat template, else raw.

        A list of messages goes through the chat template, a list of ints is taken as it is.
        """
        if isinstance(prompt, str):
            if self.codec.config.chat_template is None:
                return self.codec.encode(prompt)
            return self.codec.encode_chat([{"role": "user", "content": prompt}], **template_args)
        if prompt and all(isinstance(token, int) for token in prompt):
            return self._checked_ids(prompt)  # type: ignore[arg-type]
        return self.codec.encode_chat(prompt, **template_args)  # type: ignore[arg-type]

    def submit(
        self,
        prompt: str | Messages | Sequence[int],
        params: SamplingParams | None = None,
        **template_args: Any,
    ) -> Generation:
        """Start a request and return its handle: iterate over it (plain or async) for chunks, or ask its `result()`.

        Raises RequestError for a request that cannot be honoured, with the field's name where it is one's fault;
        QueueFullError if `max_queue` requests wait; ClosedError. The runtime stays usable.
        """
        if self.closed:
            raise closed()
        params = params or SamplingParams()
        ids = self.encode(prompt, **template_args)
        plan = self._plan(len(ids), params)
        stops = (*params.stop_token_ids, *(() if params.ignore_eos else self.codec.stop_token_ids))
        request = Request(
            prompt=ids,
            params=params,
            plan=plan,
            stream=TextStream(self.codec, stop_strings=params.stop, stop_token_ids=stops),
            stats=Stats(num_prompt_tokens=len(ids), mode=plan.mode, speculation_off=plan.speculation_off),
        )
        self._scheduler.submit(request)
        return Generation(request, self, self._scheduler.cancel)

    generate = submit

    def close(self) -> None:
        """End all requests with ClosedError and stop; the memory is freed with the object."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _checked_ids(self, ids: Sequence[int], field: str = "prompt") -> list[int]:
        limit = self.manifest.target.vocab_size
        for position, token in enumerate(ids):
            if not 0 <= token < limit:
                raise RequestError(
                    f"{field} token {position} is {token}; the vocabulary has ids 0 to {limit - 1}", field
                )
        return list(ids)

    def _plan(self, num_prompt: int, params: SamplingParams) -> Plan:
        self._check_device(params)
        context = self.max_context
        if num_prompt == 0:
            raise RequestError("the prompt is empty", "prompt")
        if num_prompt >= context:
            of_engines = context < self.manifest.max_context
            whose, change = ("the engines", "compile") if of_engines else ("this bundle", "rebuild")
            raise RequestError(
                f"the prompt has {num_prompt} tokens and the context of {whose} {context}, "
                f"which must also hold at least one new token; shorten it or {change} with a larger --max-context",
                "prompt",
            )
        room = context - num_prompt
        if params.max_new_tokens is not None and params.max_new_tokens > room:
            raise RequestError(
                f"max_new_tokens is {params.max_new_tokens}, but after the prompt's {num_prompt} tokens "
                f"the context of {context} has room for {room}",
                "max_new_tokens",
            )
        self._checked_ids([*params.logit_bias], "logit_bias")
        max_new_tokens = params.max_new_tokens or room
        self._check_memory(num_prompt + max_new_tokens)
        mode = self._mode(params)
        num_drafts = 0 if mode == names.MODE_TARGET else self._num_drafts(params)
        refines = num_drafts and (mode == names.MODE_XPRESS or (mode == ADAPTIVE and names.MODE_XPRESS in self.modes))
        return Plan(
            mode=mode,
            num_drafts=num_drafts,
            refine_passes=self._passes(params) if refines else 0,
            max_new_tokens=max_new_tokens,
            num_rows=num_prompt + max_new_tokens,
            speculation_off=None if num_drafts else _why_plain(mode, params),
        )

    def _check_device(self, params: SamplingParams) -> None:
        """Refuse what a device that decides by itself cannot do."""
        if self._host_decides:
            return
        if params.temperature > 0 and params.draft_sampling == "sampled":
            raise RequestError(
                f"draft_sampling 'sampled' draws drafts on the host, and on {self.device} with layout {self.layout} "
                f"they stay on the device; use 'greedy', which is lossless too",
                "draft_sampling",
            )
        if self.layout == names.LAYOUT_SPLIT:
            return
        if params.needs_sampler:
            raise RequestError(
                "the fused layout takes the target's likeliest token inside the graph: temperature, penalties, biases, "
                "processors and logprobs need a runtime opened with layout 'split'"
            )
        unrolled = self.manifest.draft.refine_passes if self.manifest.draft else 0
        if params.refine_passes not in {None, unrolled}:
            raise RequestError(
                f"refine_passes is {params.refine_passes}, and the fused step of this bundle has {unrolled} built in; "
                f"open the runtime with layout 'split' to choose",
                "refine_passes",
            )

    def _check_memory(self, num_rows: int) -> None:
        most = self._scheduler.max_rows
        if num_rows > most:
            raise RequestError(
                f"prompt and max_new_tokens come to {num_rows} tokens, but the KV budget of {self._kv_budget} bytes "
                f"holds {most}; ask for fewer tokens or open the runtime with a larger kv_budget_bytes",
                "max_new_tokens",
            )

    def _mode(self, params: SamplingParams) -> str:
        """The mode asked for; left open, adaptive where there is something to choose and nothing is prescribed."""
        if params.mode is None:
            if self.manifest.draft is None:
                return names.MODE_TARGET
            prescribed = (
                not self._host_decides or params.num_draft_tokens is not None or params.refine_passes is not None
            )
            depends_on_mode = params.temperature > 0 and params.draft_sampling == "sampled"
            return self.modes[-1] if prescribed or depends_on_mode else ADAPTIVE
        if params.mode not in self.modes and self.layout == names.LAYOUT_FUSED:
            raise RequestError(
                f"mode {params.mode!r}: the fused step does {self.modes[-1]} and nothing less; "
                f"open the runtime with layout 'split' for the others",
                "mode",
            )
        if params.mode not in self.modes:
            raise RequestError(
                f"mode {params.mode!r} needs a {'refiner' if params.mode == names.MODE_XPRESS else 'drafter'}, "
                f"which this bundle lacks; it supports {', '.join(self.modes)}",
                "mode",
            )
        return params.mode

    def _num_drafts(self, params: SamplingParams) -> int:
        most = self._max_drafts
        if params.num_draft_tokens is not None and params.num_draft_tokens > most:
            raise RequestError(
                f"num_draft_tokens is {params.num_draft_tokens}, this runtime drafts at most {most}",
                "num_draft_tokens",
            )
        return most if params.num_draft_tokens is None else params.num_draft_tokens

    def _passes(self, params: SamplingParams) -> int:
        assert self.manifest.draft is not None
        most, asked = self.manifest.draft.num_draft_tokens, params.refine_passes
        if asked is not None and asked > most:
            raise RequestError(
                f"refine_passes is {asked}; after {most} passes, one per draft token, a block no longer changes",
                "refine_passes",
            )
        return self.manifest.draft.refine_passes if asked is None else asked


def _at_least_one(**limits: int | None) -> None:
    for name, value in limits.items():
        if value is not None and value < 1:
            raise RequestError(f"{name} must be at least 1, got {value}", name)


def _load(
    pool: ThreadPoolExecutor, load: Callable[[Path, str], _Loaded], files: Mapping[str, Path]
) -> dict[str, _Loaded]:
    """All files at a time, by role."""
    loading = {role: pool.submit(load, path, role) for role, path in files.items()}
    return {role: loaded.result() for role, loaded in loading.items()}


def host_decoder(folder: Path, manifest: Manifest, graphs: Mapping[str, Graph], shape: Shape) -> Decoder:
    """The loop in which the host decides, on ONNX Runtime's CPU. graphs: one for each model of the bundle."""
    draft = manifest.draft
    block = Block(draft.block_size, draft.first_slot, draft.mask_token_id) if draft else None
    memory = Slots(graphs, shape.dtype, shape.num_slots, shape.max_context, max(shape.chunk, shape.width), block)
    memory.max_drafts = shape.num_drafts
    draft_ids = read_draft_ids(folder, manifest)
    if draft_ids is None:
        draft_ids = np.arange(manifest.target.vocab_size)
    return Decoder(memory, shape.first_slot, draft_ids)


def _layout(manifest: Manifest, asked: str | None) -> str:
    layout = manifest.layout if asked is None else asked
    if layout not in names.LAYOUTS:
        raise RequestError(f"layout should be {' or '.join(names.LAYOUTS)}, got {layout!r}", "layout")
    return layout


def _check_drafts(manifest: Manifest, asked: int | None) -> None:
    most = manifest.draft.num_draft_tokens if manifest.draft else None
    if asked is not None and (asked < 1 or (most is not None and asked > most)):
        limit = "at least 1" if most is None else f"1 to {most}, as the drafter's block yields"
        raise RequestError(f"max_draft_tokens is {asked}; it should be {limit}", "max_draft_tokens")


def _why_plain(mode: str, params: SamplingParams) -> str:
    if params.num_draft_tokens == 0:
        return "num_draft_tokens is 0"
    return "mode target was asked for" if params.mode == mode else "the bundle has no drafter"


def read_draft_ids(folder: Path, manifest: Manifest) -> np.ndarray | None:
    """The target's token id of each row of a reduced draft vocabulary."""
    if manifest.draft is None or manifest.draft.vocab_file is None:
        return None
    path = folder / manifest.draft.vocab_file
    ids: np.ndarray = np.load(path, allow_pickle=False)
    expected = (manifest.draft.draft_vocab_size,)
    if ids.dtype != np.int64 or ids.shape != expected or ids.min() < 0 or ids.max() >= manifest.target.vocab_size:
        raise BundleError(f"{path} should hold {expected[0]} token ids as int64, got {ids.dtype} {list(ids.shape)}")
    return ids


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
