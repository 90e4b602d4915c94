"""Continuous batching: requests join and leave between cycles, on one thread that owns the decoder.

Each round of the loop:

    admit     waiting requests, first come first served, while there are slots and KV memory for them
    prefill   one chunk of the oldest prompt that is not read yet; a smaller one while others decode
    cycle     draft, refine, verify for all slots that decode

Slots 0 .. B - 1 decode; the one request that is being prefilled holds slot B. When a request leaves, the last
decoding slot takes its place, so a call always covers slots side by side. Readers are never waited for: chunks
queue in their request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import replace

from xpress_export.errors import EngineError, QueueFullError, XpressExportError
from xpress_export.runtime.decode import Decoder, Slot
from xpress_export.runtime.requests import Chunk, Request, closed, failed
from xpress_export.runtime.resident import ResidentDecoder
from xpress_export.runtime.sampling import Sampler, TokenLogprobs
from xpress_export.runtime.speculation import Speculation
from xpress_export.runtime.stats import RuntimeStats
from xpress_export.runtime.trace import HOST, Tracer

logger = logging.getLogger(__name__)

ADAPTIVE = "adaptive"
_PLAIN_IS_FASTER = "plain decoding was measured to be faster"
_BUSY_CHUNK = 32  # prompt tokens per round while others decode: about what a cycle costs


class Scheduler:
    """Runs requests on a decoder. All public methods may be called from any thread."""

    def __init__(
        self,
        decoder: Decoder | ResidentDecoder,
        speculation: Speculation | None,
        *,
        num_slots: int,
        max_queue: int | None,
        kv_budget_bytes: int,
        prefill_chunk: int,
        vocab_size: int,
    ) -> None:
        self._decoder, self._speculation = decoder, speculation
        self._num_slots, self._max_queue = num_slots, max_queue
        self._budget_rows = kv_budget_bytes // decoder.memory.bytes_per_row
        self._chunk, self._vocab_size = prefill_chunk, vocab_size
        self._lock = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._closing = False
        self._lost: XpressExportError | None = None
        self._tracer: Tracer | None = None
        self._decoding: list[tuple[Request, Slot]] = []
        self._prefilling: tuple[Request, Slot] | None = None
        self._stats = RuntimeStats(num_slots=num_slots)
        self._thread: threading.Thread | None = None

    # Any thread

    @property
    def max_rows(self) -> int:
        """KV rows that one request may have at most, if it runs alone."""
        return self._budget_rows

    def submit(self, request: Request) -> None:
        """Queue a request. QueueFullError if as many wait as may; ClosedError after `close`."""
        with self._lock:
            if self._closing:
                raise closed()
            if self._lost is not None:
                raise type(self._lost)(f"the runtime takes no more requests: {self._lost}")
            if self._max_queue is not None and len(self._waiting) >= max(self._max_queue, self._num_free()):
                raise QueueFullError(
                    f"the queue is full: {len(self._waiting)} waiting, as many as max_queue allows; try again later"
                )
            self._waiting.append(request)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="xpress-export-scheduler", daemon=True)
                self._thread.start()
            self._lock.notify()

    def cancel(self, request: Request) -> None:
        """End a request before its next step; nothing happens if it has ended."""
        with self._lock:
            request.cancelled = True
            self._lock.notify()

    def close(self) -> None:
        """End every request with ClosedError and the thread with it."""
        with self._lock:
            was_closing, self._closing = self._closing, True
            self._lock.notify()
            never_ran = self._thread is None and not was_closing
        if never_ran:
            self._close_decoder()
        elif self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def trace(self, tracer: Tracer | None) -> None:
        """Note every round and all that it runs from now on, or no longer; meant for while no request runs."""
        with self._lock:
            self._tracer = tracer
            self._decoder.trace(tracer)

    def stats(self) -> RuntimeStats:
        """A snapshot."""
        with self._lock:
            memory, running = self._decoder.memory, self._num_running()
            return replace(
                self._stats,
                num_running=running,
                num_waiting=len(self._waiting),
                kv_rows_used=sum(memory.rows(i) for i in range(self._num_slots)),
                kv_capacity=memory.capacity,
                kv_bytes=memory.capacity * memory.bytes_per_row * self._num_slots,
                num_graphs=self._decoder.num_graphs,
            )

    def _num_running(self) -> int:
        return len(self._decoding) + (self._prefilling is not None)

    def _num_free(self) -> int:
        return self._num_slots - self._num_running()

    # The scheduler's thread

    def _run(self) -> None:
        while self._wait_for_work():
            started = time.perf_counter()
            times = self._decoder.times
            times.clear()
            try:
                self._drop_cancelled()
                self._admit()
                self._prefill()
                self._decode()
            except Exception as error:  # an engine call failed: nothing in the batch can be trusted
                self._fail_running(_as_ours(error))
                self._recover()
            ended = time.perf_counter()
            self._count_time(1e3 * (ended - started))
            if self._tracer is not None:
                self._tracer.add(HOST, "cycle", started, ended, decoding=len(self._decoding))
        end = self._lost or closed()
        self._fail_running(end)
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
        for request in waiting:
            request.emit(None, error=end)
        self._close_decoder()

    def _close_decoder(self) -> None:
        try:
            self._decoder.close()
        except XpressExportError as error:  # every request has ended; there is nobody left to tell
            logger.warning("closing the device: %s", error)

    def _recover(self) -> None:
        """After a failed call: go on with the requests that wait, or refuse all work on a device that is lost."""
        try:
            self._decoder.recover()
        except Exception as error:
            with self._lock:
                self._lost = _as_ours(error)

    def _wait_for_work(self) -> bool:
        """Sleep while there is nothing to do; False once the runtime closes."""
        with self._lock:
            while not (self._closing or self._lost or self._waiting or self._num_running()):
                self._lock.wait()
            return not self._closing and self._lost is None

    def _drop_cancelled(self) -> None:
        with self._lock:
            gone = [request for request in self._waiting if request.cancelled]
            self._waiting = deque(request for request in self._waiting if not request.cancelled)
        for request in gone:
            self._stats.num_cancelled += 1
            request.emit(None, "cancelled")
        if self._prefilling is not None and self._prefilling[0].cancelled:
            self._leave(*self._prefilling, finish_reason="cancelled")
        for request, slot in [pair for pair in self._decoding if pair[0].cancelled]:
            self._leave(request, slot, finish_reason="cancelled")

    def _admit(self) -> None:
        """Give the oldest waiting request the next slot, if its rows fit beside those of all others."""
        if self._prefilling is not None or self._num_free() == 0:
            return
        with self._lock:
            if not self._waiting:
                return
            plans = [request.plan for request, _ in self._decoding] + [self._waiting[0].plan]
            if len(plans) > 1 and len(plans) * max(plan.num_rows for plan in plans) > self._budget_rows:
                return  # slots share one capacity, so the longest request counts for each of them
            request = self._waiting.popleft()
        index = len(self._decoding)
        if index == 0:
            self._decoder.memory.shrink()
        self._decoder.memory.reset(index)
        request.stats.queue_ms = 1e3 * (time.perf_counter() - request.submitted)
        self._prefilling = (request, self._slot(request, index))

    def _slot(self, request: Request, index: int) -> Slot:
        plan, params, stats = request.plan, request.params, request.stats
        sampler = None
        if params.needs_sampler:
            sampler = Sampler(params, request.prompt, self._vocab_size)
            stats.seed = sampler.seed if params.temperature > 0 else None
        return Slot(
            index=index,
            speculates=plan.num_drafts > 0,
            sampler=sampler,
            stats=stats,
            num_left=plan.max_new_tokens,
            num_drafts=plan.num_drafts,
            refine_passes=plan.refine_passes,
        )

    def _prefill(self) -> None:
        if self._prefilling is None:
            return
        request, slot = self._prefilling
        start = request.stats.num_prefilled_tokens
        size = min(self._chunk, _BUSY_CHUNK) if self._decoding else self._chunk
        chunk = request.prompt[start : start + size]
        self._decoder.prefill(slot, chunk, is_last=start + len(chunk) == len(request.prompt))
        spent = self._decoder.times.prefill_ms
        request.stats.prefill_ms += spent
        for other, _ in self._decoding:
            other.stats.stall_ms += spent
        if request.stats.num_prefilled_tokens < len(request.prompt):
            return
        try:
            token = self._decoder.first(slot)
        except Exception as error:  # a user's logits processor
            self._leave(request, slot, error=failed(error))
            return
        request.first_token = time.perf_counter()
        request.stats.ttft_ms = 1e3 * (request.first_token - request.submitted)
        with self._lock:
            self._stats.num_prompt_tokens += len(request.prompt)
            self._decoding.append((request, slot))
            self._prefilling = None
        self._commit(request, slot, [token])

    def _decode(self) -> None:
        if not self._decoding:
            return
        pairs = list(self._decoding)
        slots = [slot for _, slot in pairs]
        self._choose()
        before = [(slot.stats.num_draft_tokens, slot.stats.num_accepted) for slot in slots]
        committed = self._decoder.cycle(slots)
        times = self._decoder.times
        outcomes = [
            (slot.stats.num_draft_tokens - drafted, slot.stats.num_accepted - accepted)
            for slot, (drafted, accepted) in zip(slots, before, strict=True)
        ]
        if self._speculation is not None:
            self._speculation.learn(slots, outcomes, times)
        self._count_cycle(outcomes)
        for (request, slot), tokens in zip(pairs, committed, strict=True):
            for name in ("draft_ms", "refine_ms", "verify_ms"):
                setattr(request.stats, name, getattr(request.stats, name) + getattr(times, name))
            if isinstance(tokens, Exception):
                self._leave(request, slot, error=failed(tokens))
            else:
                self._commit(request, slot, tokens)

    def _choose(self) -> None:
        """Set what the adaptive requests draft in the next cycle."""
        adaptive = [(request, slot) for request, slot in self._decoding if request.plan.mode == ADAPTIVE]
        if not adaptive or self._speculation is None:
            return
        choice = self._speculation.choose([slot for _, slot in self._decoding])
        for request, slot in adaptive:
            if request.plan.num_drafts:
                slot.num_drafts, slot.refine_passes = choice.num_drafts, choice.refine_passes
                request.stats.speculation_off = None if choice.num_drafts else _PLAIN_IS_FASTER

    def _commit(self, request: Request, slot: Slot, tokens: list[int]) -> None:
        """Pass committed tokens on, and end the request where they end it."""
        stats, step = request.stats, request.stream.push(tokens)
        kept = tuple(tokens[: step.num_kept])
        now = time.perf_counter()
        stats.num_generated_tokens += len(kept)
        stats.decode_ms = 1e3 * (now - request.first_token)
        with self._lock:
            self._stats.num_generated_tokens += len(kept)
        text, finish_reason = step.text, "stop" if step.finished else None
        if finish_reason is None and slot.num_left <= 0:
            text, finish_reason = text + request.stream.flush(), "length"
        chunk = Chunk(text, kept, self._logprobs(slot, len(tokens), len(kept)))
        if finish_reason is None:
            request.emit(chunk)
        else:
            self._leave(request, slot, chunk=chunk, finish_reason=finish_reason)

    def _logprobs(self, slot: Slot, num_new: int, num_kept: int) -> tuple[TokenLogprobs, ...]:
        if slot.sampler is None or not slot.sampler.logprobs:
            return ()
        new = slot.sampler.logprobs[-num_new:]
        return tuple(new[:num_kept])

    def _leave(
        self,
        request: Request,
        slot: Slot,
        *,
        chunk: Chunk | None = None,
        finish_reason: str | None = None,
        error: XpressExportError | None = None,
    ) -> None:
        """Take a request out, close the gap it leaves, and tell its reader."""
        memory, index = self._decoder.memory, slot.index
        with self._lock:
            if self._prefilling is not None and self._prefilling[1] is slot:
                self._prefilling = None
                memory.reset(index)
            else:
                self._decoding.remove((request, slot))
                self._fill_gap(index)
            for name, happened in (
                ("num_failed", error is not None),
                ("num_cancelled", finish_reason == "cancelled"),
                ("num_finished", finish_reason in {"stop", "length"}),
            ):
                setattr(self._stats, name, getattr(self._stats, name) + happened)
        if self._speculation is not None:
            self._speculation.forget(slot)
        request.emit(chunk, finish_reason, error)

    def _fill_gap(self, index: int) -> None:
        """Move the last decoding slot to `index`, and the one that is prefilled next to what is then the last."""
        memory, last = self._decoder.memory, len(self._decoding)
        for _, other in self._decoding:
            if other.index == last:
                memory.move(last, index)
                other.index = index
        self._decoding.sort(key=lambda pair: pair[1].index)
        memory.reset(last)
        if self._prefilling is not None:
            slot = self._prefilling[1]
            memory.move(slot.index, last)
            slot.index = last

    def _fail_running(self, error: XpressExportError) -> None:
        running = [*self._decoding, *([self._prefilling] if self._prefilling else [])]
        for request, slot in reversed(running):  # from the last slot on, so that none has to move
            self._leave(request, slot, error=error)

    def _count_cycle(self, outcomes: list[tuple[int, int]]) -> None:
        with self._lock:
            self._stats.num_cycles += 1
            self._stats.num_verify_steps += len(outcomes)
            self._stats.num_draft_tokens += sum(drafted for drafted, _ in outcomes)
            self._stats.num_accepted += sum(accepted for _, accepted in outcomes)

    def _count_time(self, total_ms: float) -> None:
        times, engines = self._decoder.times, 0.0
        with self._lock:
            for name in ("prefill_ms", "draft_ms", "refine_ms", "verify_ms"):
                spent = getattr(times, name)
                setattr(self._stats, name, getattr(self._stats, name) + spent)
                engines += spent
            self._stats.host_ms += total_ms - engines


def _as_ours(error: Exception) -> XpressExportError:
    if isinstance(error, XpressExportError):
        return error
    return EngineError(f"decoding failed with {type(error).__name__}: {error}")
