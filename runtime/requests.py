"""A request from both ends: what the scheduler fills, and the handle that its owner reads."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from xpress_export.errors import ClosedError, RequestError, XpressExportError
from xpress_export.runtime.params import SamplingParams
from xpress_export.runtime.sampling import TokenLogprobs
from xpress_export.runtime.stats import Stats
from xpress_export.runtime.text import TextStream


@dataclass(frozen=True)
class Chunk:
    """What one step added: text that will not change (may be empty), the tokens committed, their logprobs if asked."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Result:
    """An ended generation.

    finish_reason: "stop" (stop token or string), "length" (budget or context full) or "cancelled".
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stats: Stats
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Limits of one request after all defaults: draft tokens and refine passes per step, budget, KV rows."""

    mode: str
    num_drafts: int
    refine_passes: int
    max_new_tokens: int
    num_rows: int
    speculation_off: str | None = None


@dataclass(eq=False)
class Request:
    """What the scheduler knows of a request. `chunks` and the fields after it are shared, under `changed`."""

    prompt: Sequence[int]
    params: SamplingParams
    plan: Plan
    stream: TextStream
    stats: Stats
    submitted: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0
    chunks: deque[Chunk] = field(default_factory=deque)
    finish_reason: str | None = None
    error: XpressExportError | None = None
    cancelled: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)
    listeners: list[Callable[[], None]] = field(default_factory=list)

    def emit(
        self, chunk: Chunk | None, finish_reason: str | None = None, error: XpressExportError | None = None
    ) -> None:
        """Hand over a chunk, or the end, and wake whoever waits."""
        with self.changed:
            if chunk is not None:
                self.chunks.append(chunk)
            self.finish_reason, self.error = finish_reason, error
            listeners, self.listeners = self.listeners, []
            self.changed.notify_all()
        for listener in listeners:
            listener()

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class Generation:
    """A running request: an iterator of `Chunk`, plain or async; `token_ids`, `text`, `logprobs` grow as it is read.

    The runtime works ahead of its reader. finish_reason is None until the end has been read. Leaving the iteration
    early and calling `cancel`, or dropping the object, frees the request's memory; so does cancelling the asyncio
    task that reads it.
    """

    def __init__(self, request: Request, owner: object, cancel: Callable[[Request], None]) -> None:
        """owner: what must not be closed by the garbage collector while this is being read."""
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self._request, self._owner = request, owner
        self._cancel = weakref.finalize(self, cancel, request)
        self._cancel.atexit = False

    @property
    def stats(self) -> Stats:
        """Counts and times so far."""
        return self._request.stats

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        return self._next(None)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        loop = asyncio.get_running_loop()
        while (chunk := self._take()) is None:
            if self.finish_reason is not None:
                raise StopAsyncIteration
            news = loop.create_future()
            self._listen(functools.partial(_wake, loop, news))
            try:
                await news
            except asyncio.CancelledError:
                self.cancel()
                raise
        return chunk

    def result(self, timeout: float | None = None) -> Result:
        """Read to the end and return everything. timeout: seconds in all; TimeoutError then, the request goes on."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                self._next(deadline)
            except StopIteration:
                return self._result()

    async def aresult(self) -> Result:
        """`result`, for asyncio."""
        async for _ in self:
            pass
        return self._result()

    def cancel(self) -> None:
        """Stop at the next step and free the request's memory. What was committed before can still be read."""
        self._cancel()

    close = cancel

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def _result(self) -> Result:
        assert self.finish_reason is not None
        return Result(self.text, tuple(self.token_ids), self.finish_reason, self.stats, tuple(self.logprobs))

    def _next(self, deadline: float | None) -> Chunk:
        request = self._request
        with request.changed:
            while not request.chunks and not request.ended:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError("the generation did not end in time; it goes on")
                request.changed.wait(left)
        if (chunk := self._take()) is None:
            raise StopIteration
        return chunk

    def _take(self) -> Chunk | None:
        """The next chunk that is there; at the end, sets finish_reason or raises what went wrong."""
        request = self._request
        with request.changed:
            if request.chunks:
                chunk = request.chunks.popleft()
            elif request.error is not None:
                raise request.error
            else:
                self.finish_reason = request.finish_reason
                return None
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        return chunk

    def _listen(self, listener: Callable[[], None]) -> None:
        with self._request.changed:
            if not self._request.chunks and not self._request.ended:
                self._request.listeners.append(listener)
                return
        listener()


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    """Settle a future of `loop` from any thread; the loop may be gone."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(_settle, future)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def closed() -> ClosedError:
    return ClosedError("the runtime is closed")


def failed(error: Exception) -> XpressExportError:
    """What a request reports when its own sampler or text raised `error`."""
    if isinstance(error, XpressExportError):
        return error
    return RequestError(f"choosing a token failed with {type(error).__name__}: {error}")
