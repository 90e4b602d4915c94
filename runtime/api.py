"""Open a bundle and generate from it: the public face of the runtime.

    with Runtime.open("bundles/smollm2-135m") as rt:
        generation = rt.generate("Why is the sky blue?", SamplingParams(max_new_tokens=200))
        for chunk in generation:
            print(chunk.text, end="", flush=True)
        print(generation.stats.tau)

A `Runtime` may be used from several threads; each generation has its own memory. No module state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from xpress_export import names
from xpress_export.errors import RequestError
from xpress_export.manifest import Manifest, open_bundle
from xpress_export.runtime.backend import Graph
from xpress_export.runtime.decode import Plan, decode
from xpress_export.runtime.params import SamplingParams
from xpress_export.runtime.slot import Block, Slot
from xpress_export.runtime.stats import Stats
from xpress_export.runtime.text import TextCodec, TextStream

PREFILL_CHUNK = 128

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Chunk:
    """What one step added: text that will not change (may be empty) and the tokens committed."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """A finished generation. finish_reason: "stop" (stop token or string) or "length" (budget or context full)."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stats: Stats


class Runtime:
    """A bundle, loaded. Use as a context manager, or call `close`."""

    def __init__(self, manifest: Manifest, codec: TextCodec, graphs: dict[str, Graph], prefill_chunk: int) -> None:
        self.manifest, self.codec = manifest, codec
        self._graphs, self._chunk = graphs, prefill_chunk
        draft = manifest.draft
        self._block = Block(draft.block_size, draft.first_slot, draft.mask_token_id) if draft else None
        self._free: list[Slot] = []
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        num_threads: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        on_verify: Callable[[int], None] | None = None,
    ) -> Self:
        """Check every file of the bundle against its manifest, then load it.

        num_threads: of the CPU backend, None: one per core. prefill_chunk: prompt tokens per target call.
        on_verify: called with the number of bytes checked since the last call.
        Raises BundleError if anything differs from the manifest, naming it.
        """
        if prefill_chunk < 1:
            raise RequestError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
        folder = Path(folder)
        manifest = open_bundle(folder, on_verify)
        codec = TextCodec.open(folder / manifest.text.folder)
        graphs = {role: Graph(folder / record.file, role, num_threads) for role, record in manifest.graphs.items()}
        return cls(manifest, codec, graphs, prefill_chunk)

    @property
    def modes(self) -> tuple[str, ...]:
        """Decoding modes this bundle supports, plain decoding first."""
        roles = (
            (names.MODE_TARGET, names.TARGET),
            (names.MODE_DFLASH, names.DRAFTER),
            (names.MODE_XPRESS, names.REFINER),
        )
        return tuple(mode for mode, role in roles if role in self._graphs)

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

    def generate(
        self,
        prompt: str | Messages | Sequence[int],
        params: SamplingParams | None = None,
        **template_args: Any,
    ) -> Generation:
        """Start generating; iterate over the result for chunks, or call its `result()`.

        Raises RequestError for a request that cannot be honoured; the runtime stays usable.
        """
        self._check_open()
        params = params or SamplingParams()
        ids = self.encode(prompt, **template_args)
        return Generation(self, ids, params, self._plan(len(ids), params))

    def close(self) -> None:
        """Free the graphs and all buffers; running generations end with an error at their next step."""
        with self._lock:
            self._closed = True
            self._graphs, self._free = {}, []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the runtime is closed")

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        limit = self.manifest.target.vocab_size
        for position, token in enumerate(ids):
            if not 0 <= token < limit:
                raise RequestError(f"prompt token {position} is {token}; the vocabulary has ids 0 to {limit - 1}")
        return list(ids)

    def _plan(self, num_prompt: int, params: SamplingParams) -> Plan:
        context = self.manifest.max_context
        if num_prompt == 0:
            raise RequestError("the prompt is empty")
        if num_prompt >= context:
            raise RequestError(
                f"the prompt has {num_prompt} tokens and the context of this bundle {context}, "
                f"which must also hold at least one new token; shorten it or rebuild with a larger --max-context"
            )
        room = context - num_prompt
        if params.max_new_tokens is not None and params.max_new_tokens > room:
            raise RequestError(
                f"max_new_tokens is {params.max_new_tokens}, but after the prompt's {num_prompt} tokens "
                f"the context of {context} has room for {room}"
            )
        mode = self._mode(params)
        num_slots = self._num_slots(params) if mode != names.MODE_TARGET else 0
        passes = self._passes(params, num_slots) if mode == names.MODE_XPRESS else 0
        return Plan(
            num_slots=num_slots,
            refine_passes=passes,
            prefill_chunk=self._chunk,
            max_new_tokens=params.max_new_tokens or room,
        )

    def _mode(self, params: SamplingParams) -> str:
        mode = params.mode or self.modes[-1]
        if mode not in self.modes:
            raise RequestError(
                f"mode {mode!r} needs a {'refiner' if mode == names.MODE_XPRESS else 'drafter'}, "
                f"which this bundle lacks; it supports {', '.join(self.modes)}"
            )
        return mode

    def _num_slots(self, params: SamplingParams) -> int:
        assert self._block is not None
        most = self._block.num_draft_tokens
        drafts = most if params.num_draft_tokens is None else params.num_draft_tokens
        if drafts > most:
            raise RequestError(f"num_draft_tokens is {drafts}, the drafter's block yields at most {most}")
        return drafts + self._block.first_slot if drafts else 0

    def _passes(self, params: SamplingParams, num_slots: int) -> int:
        assert self._block is not None and self.manifest.draft is not None
        most = self._block.num_draft_tokens
        asked = params.refine_passes
        if asked is not None and asked > most:
            raise RequestError(
                f"refine_passes is {asked}; after {most} passes, one per draft token, a block no longer changes"
            )
        if num_slots == 0:
            return 0
        return self.manifest.draft.refine_passes if asked is None else asked

    def _acquire(self) -> Slot:
        with self._lock:
            self._check_open()
            if self._free:
                return self._free.pop()
            float_dtype = next(
                t.dtype for t in self.manifest.graphs[names.TARGET].inputs if t.name == names.past_key(0)
            )
            most_rows = max(self._chunk, 1 + (self._block.num_draft_tokens if self._block else 0))
            return Slot(self._graphs, float_dtype, self.manifest.max_context, most_rows, self._block)

    def _release(self, slot: Slot) -> None:
        with self._lock:
            if not self._closed:
                self._free.append(slot)


class Generation:
    """One running request: an iterator of `Chunk`; `token_ids`, `text`, `stats` grow with it.

    finish_reason is None until it ends. Leaving the iteration early and calling `close` frees its memory.
    """

    def __init__(self, runtime: Runtime, prompt: Sequence[int], params: SamplingParams, plan: Plan) -> None:
        self.stats = Stats(num_prompt_tokens=len(prompt))
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        stops = params.stop_token_ids + (() if params.ignore_eos else runtime.codec.stop_token_ids)
        self._stream = TextStream(runtime.codec, stop_strings=params.stop, stop_token_ids=stops)
        self._runtime = runtime
        self._chunks = self._run(list(prompt), plan)

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def result(self) -> Result:
        """Run to the end and return everything."""
        for _ in self:
            pass
        assert self.finish_reason is not None
        return Result(self.text, tuple(self.token_ids), self.finish_reason, self.stats)

    def close(self) -> None:
        """Stop here and free the request's memory."""
        self._chunks.close()  # type: ignore[attr-defined]

    def _run(self, prompt: list[int], plan: Plan) -> Iterator[Chunk]:
        slot = self._runtime._acquire()
        try:
            for committed in decode(slot, prompt, plan, self.stats):
                step = self._stream.push(committed)
                chunk = self._add(step.text, committed[: step.num_kept])
                if step.finished:
                    self.finish_reason = "stop"
                yield chunk
                if step.finished:
                    return
                if self._runtime._closed:
                    raise RequestError("the runtime was closed while this request was running")
            self.finish_reason = "length"
            yield self._add(self._stream.flush(), [])
        finally:
            self._runtime._release(slot)

    def _add(self, text: str, token_ids: list[int]) -> Chunk:
        self.text += text
        self.token_ids += token_ids
        self.stats.num_generated_tokens = len(self.token_ids)
        return Chunk(text, tuple(token_ids))
