"""Draft, refine, verify, commit as in `decode`, but decided on the device: nothing in a cycle waits for the host.

One cycle, on one stream:

    verify    the target over [anchor, draft] of every slot; `accept` decides what it commits
    draft     the drafter over the rows that were committed, then the refiner's passes: the next cycle's draft

and beside it, on a second stream, the committed tokens travel to pinned memory. The host enqueues cycle i, then reads
what cycle i - 1 committed: it is one cycle late, and a request that has ended runs one cycle more, which nobody reads.
A device that has finished when `enqueue` returns (`is_late` False) is heard at once.
In a fused bundle the whole cycle is one graph, `step`.

A request with a sampler needs the host: a batch that holds one stops after the target, the host chooses the tokens,
and the device goes on from there. Both kinds of cycle leave the same state, so a batch may change between them.

A batch is drafted alike: as many refine passes as any of its slots asks for. How many of its drafts a slot may accept
is its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from xpress_export import names
from xpress_export.runtime.decode import Slot, Times
from xpress_export.runtime.device import Array, Bound, Buffer, Device, Event, Program
from xpress_export.runtime.resident_memory import Report, ResidentMemory, Shape
from xpress_export.runtime.trace import Tracer

_MOST_BOUND = 64
_TIMES = {"draft": "draft_ms", "refine": "refine_ms"}
"""The field of `Times` that a label counts for; all others are part of verifying."""


@dataclass(frozen=True)
class _Pending:
    """An enqueued cycle that the host has not heard of. slots: those of its rows."""

    report: Report
    slots: tuple[Slot, ...]
    width: int


class ResidentDecoder:
    """The verbs of the algorithm on a device; the scheduler drives it as it drives `decode.Decoder`.

    programs: target and accept, drafter and refiner where there are such; or step alone.
    """

    def __init__(self, device: Device, programs: Mapping[str, Program], shape: Shape) -> None:
        self._device, self._programs, self._shape = device, programs, shape
        self._is_fused = names.STEP in programs
        self.memory, self.times = ResidentMemory(device, programs, shape), Times()
        self._compute, self._copier = self.memory.stream, device.stream("copy")
        self._pending: list[_Pending] = []
        self._bound: dict[Hashable, Bound] = {}
        if not self._is_fused:
            self._reserve_scratch()

    def _reserve_scratch(self) -> None:
        """What one graph of a split cycle hands to the next, and what the host reads to choose tokens."""
        shape, scratch, programs, batch = self._shape, self.memory.scratch, self._programs, self._shape.num_slots
        rows, drafts = max(batch * shape.width, shape.chunk), batch * shape.num_drafts

        def floats(role: str, name: str, count: int) -> int:
            if role not in programs or name not in programs[role].outputs:
                return 0
            size = programs[role].size(name, 2) or 0
            scratch.reserve(name, count * size, shape.dtype)
            return size

        self._vocab = floats(names.TARGET, names.LOGITS, rows)
        floats(names.TARGET, names.TARGET_HIDDEN, rows)
        floats(names.DRAFTER, names.DRAFT_LOGITS, drafts)
        floats(names.DRAFTER, names.DRAFT_HIDDEN, batch * shape.num_block)
        floats(names.REFINER, names.REFINED_LOGITS, drafts)
        for name, count in (
            (names.ANCHOR, batch),
            (names.PREVIOUS, batch),
            (names.DRAFT_TOKENS, drafts),
            (names.REFINED_TOKENS, drafts),
        ):
            scratch.reserve(name, max(1, count), np.int64)
        self._host_logits = self._device.pinned("pinned logits", (batch * shape.width, self._vocab), shape.dtype)
        self._host_ids = self._device.pinned("pinned ids", (batch, shape.width), np.int64)

    # The algorithm

    def prefill(self, slot: Slot, chunk: Sequence[int], *, is_last: bool) -> None:
        """Append a chunk of the prompt to the slot's caches; after the last one there is a draft too."""
        memory, b, size = self.memory, slot.index, len(chunk)
        uploads = [(memory.prompt_ids[:size], list(chunk)), (memory.prompt_given, [size])]
        if slot.stats.num_prefilled_tokens == 0:
            uploads += memory.start(b, self._most_accepted(slot))
        memory.reserve(size + self._shape.width, [b])
        memory.uploads.send(self._compute, uploads)
        report = memory.prompt_report
        self._verify(b, b + 1, memory.prompt_ids[:size].reshape(1, size), memory.prompt_given, report)
        if is_last:
            self._send_first(slot, size)
        self._draft(b, b + 1, size, report, slot.refine_passes if is_last else 0, drafts=slot.speculates)
        memory.settle(b)
        memory.advance(b, size)
        slot.stats.num_prefilled_tokens += size
        self._count(self._device.take_spent(), "prefill_ms")

    def first(self, slot: Slot) -> int:
        """The first token of the answer, right after the last chunk of the prompt; it becomes the anchor."""
        report = self.memory.prompt_report
        self._hear_of(report.copied, "prefill_ms")
        token = int(report.host_next_token.read()[0])
        if slot.sampler is not None:  # drafts after another anchor are of no use; the next verify step says so
            (token,) = slot.sampler.choose(self._host_logits[:1].read(), [])
            state, b = self.memory.states[self.memory.reads], slot.index
            anchors = [(state.ids[b : b + 1, :1], [token]), (state.first_ids[b : b + 1], [token])]
            self.memory.uploads.send(self._compute, anchors)
        slot.num_left -= 1
        return token

    def cycle(self, slots: Sequence[Slot]) -> list[list[int] | Exception]:
        """Enqueue one step of slots 0 .. B - 1; what each has committed as far as the host knows, or an error."""
        if any(slot.sampler is not None for slot in slots):
            return self._cycle_with_host(slots)
        memory, batch, width, passes = self.memory, len(slots), self._width(slots), _passes(slots)
        memory.reserve((1 + len(self._pending)) * self._shape.width, range(batch))
        state, report = memory.states[memory.reads], memory.reports[memory.reads]
        ids = self._ids(batch, width)
        key = (batch, width, passes, memory.reads, memory.caches.version)
        self._compute.repeat(("verify", *key), lambda: self._verify(0, batch, ids, state.num_given[:batch], report))
        self._compute.record(report.verified)
        self._send(report, batch, width)
        if not self._is_fused:
            self._compute.repeat(
                ("draft", *key), lambda: self._draft(0, batch, width, report, passes, drafts=width > 1)
            )
        memory.reads = 1 - memory.reads
        self._pending.append(_Pending(report, tuple(slots), width))
        heard = self._hear(slots, but=1 if self._device.is_late else 0)
        for slot in slots:
            slot.stats.num_refine_passes += passes
        self._count(self._device.take_spent())
        return list(heard)

    def _verify(self, first: int, last: int, ids: Buffer, num_given: Buffer, report: Report) -> None:
        """The target over `ids` [B, S] of some slots, and what it commits; in a fused bundle all of the cycle."""
        if not self._is_fused:
            self._run_target(first, last, ids, report)
        memory, (batch, rows) = self.memory, ids.shape
        state, after = memory.states[memory.reads], memory.states[1 - memory.reads]

        def buffers() -> dict[str, Buffer]:
            handed_on = () if self._is_fused else (names.ANCHOR, names.PREVIOUS)
            return {
                names.INPUT_IDS: ids,
                names.NUM_GIVEN: num_given,
                names.MAX_ACCEPT: memory.max_accept[first:last],
                names.WRITE_INDEX: state.write_index[first:last],
                names.BLOCK_IDS: memory.block_ids[first:last],
                names.NEXT_TOKEN: report.next_token[: batch * rows].reshape(batch, rows),
                names.NUM_COMMITTED: report.num_committed[:batch],
                names.NEXT_IDS: after.ids[first:last],
                names.NEXT_GIVEN: after.num_given[first:last],
                names.NEXT_WRITE_INDEX: after.write_index[first:last],
                **{name: memory.scratch.get(name, batch) for name in handed_on},
            }

        role, label = (names.STEP, "step") if self._is_fused else (names.ACCEPT, "accept")
        self._run(role, label, first, last, (rows, report is memory.prompt_report), buffers)

    def _run_target(self, first: int, last: int, ids: Buffer, report: Report) -> None:
        memory, (batch, rows) = self.memory, ids.shape

        def buffers() -> dict[str, Buffer]:
            return {
                names.INPUT_IDS: ids,
                names.WRITE_INDEX: memory.states[memory.reads].write_index[first:last],
                names.NEXT_TOKEN: report.next_token[: batch * rows].reshape(batch, rows),
                **self._floats(names.TARGET, batch, rows),
            }

        self._run(names.TARGET, "verify", first, last, (rows, report is memory.prompt_report), buffers)

    def _draft(self, first: int, last: int, rows: int, report: Report, passes: int, *, drafts: bool) -> None:
        """The next state's ids: the anchor, and a draft after it that `passes` Jacobi passes refined."""
        if self._is_fused:
            return
        memory, batch, n = self.memory, last - first, self._shape.num_drafts
        after, scratch, compute = memory.states[1 - memory.reads], memory.scratch, self._compute
        anchors = scratch.get(names.ANCHOR, batch)
        compute.copy(after.ids[first:last, :1], anchors.reshape(batch, 1), "draft")
        compute.copy(after.first_ids[first:last], anchors.reshape(batch, 1), "draft")
        if not drafts:
            return
        compute.copy(memory.block_ids[first:last, :1], anchors.reshape(batch, 1), "draft")
        tokens, refined = (scratch.get(name, batch, n) for name in (names.DRAFT_TOKENS, names.REFINED_TOKENS))

        def of_drafter() -> dict[str, Buffer]:
            return {
                **self._floats(names.TARGET, batch, rows),
                **self._floats(names.DRAFTER, batch, n),
                names.NUM_COMMITTED: report.num_committed[:batch],
                names.WRITE_INDEX: memory.states[memory.reads].write_index[first:last],
                names.BLOCK_IDS: memory.block_ids[first:last],
                names.DRAFT_TOKENS: tokens,
            }

        def of_refiner() -> dict[str, Buffer]:
            return {
                **self._floats(names.DRAFTER, batch, n),
                **self._floats(names.REFINER, batch, n),
                names.ANCHOR: anchors,
                names.PREVIOUS: scratch.get(names.PREVIOUS, batch),
                names.DRAFT_TOKENS: tokens,
                names.REFINED_TOKENS: refined,
            }

        self._run(names.DRAFTER, "draft", first, last, (rows, report is memory.prompt_report), of_drafter)
        for i in range(passes if names.REFINER in self._programs else 0):
            self._run(names.REFINER, "refine", first, last, (i % 2,), of_refiner)
            tokens, refined = refined, tokens
        compute.copy(after.ids[first:last, 1:], tokens, "draft")

    # The host's part

    def _send(self, report: Report, batch: int, width: int) -> None:
        """Have what a cycle committed travel to the host, beside whatever comes next."""
        self._copier.wait(report.verified)
        self._copier.copy(report.host_next_token[: batch * width], report.next_token[: batch * width], "copy")
        self._copier.copy(report.host_num_committed[:batch], report.num_committed[:batch], "copy")
        self._copier.record(report.copied)

    def _send_first(self, slot: Slot, size: int) -> None:
        report = self.memory.prompt_report
        self._compute.record(report.verified)
        self._copier.wait(report.verified)
        self._copier.copy(report.host_next_token, report.next_token[size - 1 : size], "copy")
        if slot.sampler is not None:
            logits = self.memory.scratch.get(names.LOGITS, size, self._vocab)
            self._copier.copy(self._host_logits[:1], logits[size - 1 :], "copy")
        self._copier.record(report.copied)

    def _hear(self, slots: Sequence[Slot], but: int) -> list[list[int]]:
        """What all enqueued cycles but the last `but` committed, for those of `slots` that took part."""
        heard: dict[Slot, list[int]] = {slot: [] for slot in slots}
        while len(self._pending) > but:
            cycle = self._pending.pop(0)
            self._hear_of(cycle.report.copied, "verify_ms")
            counts = cycle.report.host_num_committed.read()
            tokens = cycle.report.host_next_token.read()
            for row, slot in enumerate(cycle.slots):
                if slot in heard:
                    start = row * cycle.width
                    heard[slot] += self._commit(slot, tokens[start : start + counts[row]].tolist())
        return [heard[slot] for slot in slots]

    def _commit(self, slot: Slot, tokens: list[int]) -> list[int]:
        """Count a step that committed `tokens`, and leave out what is beyond the slot's budget."""
        self.memory.advance(slot.index, len(tokens))
        if slot.num_left <= 0:
            return []
        drafted = min(self._most_accepted(slot), slot.num_left - 1)
        slot.stats.count_step(drafted, min(drafted, len(tokens) - 1))
        kept = tokens[: slot.num_left]
        slot.num_left -= len(kept)
        return kept

    def _cycle_with_host(self, slots: Sequence[Slot]) -> list[list[int] | Exception]:
        """One step in which the host chooses the tokens, from the target's logits."""
        memory, batch, width, passes = self.memory, len(slots), self._width(slots), _passes(slots)
        heard = self._hear(slots, but=0)
        memory.reserve(2 * self._shape.width, range(batch))
        report = memory.reports[memory.reads]
        self._run_target(0, batch, self._ids(batch, width), report)
        self._compute.record(report.verified)
        self._copier.wait(report.verified)
        logits = memory.scratch.get(names.LOGITS, batch * width, self._vocab)
        self._copier.copy(self._host_logits[: batch * width], logits, "copy")
        self._copier.copy(self._host_ids[:batch], memory.states[memory.reads].ids[:batch], "copy")
        self._copier.record(report.copied)
        self._hear_of(report.copied, "verify_ms")
        rows = self._host_logits[: batch * width].read().reshape(batch, width, self._vocab)
        ids = self._host_ids[:batch].read()
        chosen = [self._choose(slot, rows[b], ids[b, 1:width].tolist()) for b, slot in enumerate(slots)]
        self._decide(
            slots, [[int(ids[b, 0])] if isinstance(c, Exception) else c for b, c in enumerate(chosen)], ids, report
        )
        self._draft(0, batch, width, report, passes, drafts=width > 1)
        memory.reads = 1 - memory.reads
        self._count(self._device.take_spent())
        committed: list[list[int] | Exception] = []
        for slot, before, tokens in zip(slots, heard, chosen, strict=True):
            slot.stats.num_refine_passes += passes
            committed.append(tokens if isinstance(tokens, Exception) else before + self._commit(slot, tokens))
        return committed

    def _choose(self, slot: Slot, logits: Array, ids: list[int]) -> list[int] | Exception:
        """The tokens of a step, from the target's logits [1 + n, V] and the draft [n]."""
        draft = ids[: max(0, min(self._most_accepted(slot), slot.num_left - 1))]
        if slot.sampler is not None and slot.num_left > 0:
            try:
                return slot.sampler.choose(logits[: 1 + len(draft)], draft)
            except Exception as error:  # whatever a user's logits processor raises is that request's alone
                return error
        tokens: list[int] = logits[: 1 + len(draft)].argmax(-1).tolist()
        num_accepted = next((i for i, token in enumerate(draft) if token != tokens[i]), len(draft))
        return tokens[: num_accepted + 1]

    def _decide(self, slots: Sequence[Slot], chosen: Sequence[list[int]], ids: Array, report: Report) -> None:
        """Put on the device what `accept` would have."""
        memory, batch = self.memory, len(slots)
        after, scratch = memory.states[1 - memory.reads], memory.scratch
        counts = [len(tokens) for tokens in chosen]
        memory.uploads.send(
            self._compute,
            [
                (report.num_committed[:batch], counts),
                (scratch.get(names.ANCHOR, batch), [tokens[-1] for tokens in chosen]),
                (scratch.get(names.PREVIOUS, batch), [[ids[b, 0], *tokens][-2] for b, tokens in enumerate(chosen)]),
                (after.num_given[:batch], [1] * batch),
                (after.write_index[:batch], [memory.rows(b) + count for b, count in enumerate(counts)]),
            ],
        )

    def trace(self, tracer: Tracer | None) -> None:
        """Have the device note all work from now on, or no longer."""
        self._device.trace(tracer)

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that were captured."""
        return self._device.num_graphs

    def recover(self) -> None:
        """Forget the cycles under way, after one failed. Raises EngineError where the device is lost."""
        self._pending.clear()
        self._device.synchronize()
        self._bound.clear()

    def close(self) -> None:
        """Wait for what is under way and give the device back."""
        self._device.synchronize()
        self._device.close()

    # Small parts

    def _run(
        self,
        role: str,
        label: str,
        first: int,
        last: int,
        variant: tuple[Hashable, ...],
        buffers: Callable[[], Mapping[str, Buffer]],
    ) -> None:
        """Enqueue a graph over slots first .. last - 1, bound the first time to `buffers` and the slots' caches.

        variant: what tells the buffers of one role and range apart.
        """
        key = (role, first, last, *variant, self.memory.reads, self.memory.caches.version)
        bound = self._bound.pop(key, None)
        if bound is None:
            program = self._programs[role]
            known = {**buffers(), **self.memory.caches.of(program, first, last)}
            bound = program.bind({name: known[name] for name in (*program.inputs, *program.outputs)})
        self._bound[key] = bound
        while len(self._bound) > _MOST_BOUND:  # the one not used for longest
            del self._bound[next(iter(self._bound))]
        self._compute.run(bound, label)

    def _floats(self, role: str, batch: int, rows: int) -> dict[str, Buffer]:
        """Where a model of a split cycle leaves its logits and hidden states, [batch, rows, size] each."""
        program, scratch = self._programs[role], self.memory.scratch
        found = {}
        for name in program.outputs:
            if name in scratch and name not in {names.DRAFT_TOKENS, names.REFINED_TOKENS}:
                num_rows = self._shape.num_block if name == names.DRAFT_HIDDEN else rows
                found[name] = scratch.get(name, batch, num_rows, program.size(name, 2) or 0)
        return found

    def _ids(self, batch: int, width: int) -> Buffer:
        state = self.memory.states[self.memory.reads]
        return state.ids[:batch] if width == self._shape.width else state.first_ids[:batch]

    def _width(self, slots: Sequence[Slot]) -> int:
        """Rows of the next verify step: one where no slot ever drafts."""
        return self._shape.width if self._is_fused or any(slot.speculates for slot in slots) else 1

    def _most_accepted(self, slot: Slot) -> int:
        return min(slot.num_drafts, self._shape.num_drafts) if slot.speculates else 0

    def _hear_of(self, event: Event, times: str) -> None:
        """Wait for an event; the wait counts as engine time."""
        start = time.perf_counter()
        event.synchronize()
        setattr(self.times, times, getattr(self.times, times) + 1e3 * (time.perf_counter() - start))

    def _count(self, spent: Mapping[str, float], everything: str | None = None) -> None:
        for label, milliseconds in spent.items():
            name = everything or _TIMES.get(label, "verify_ms")
            setattr(self.times, name, getattr(self.times, name) + milliseconds)


def _passes(slots: Sequence[Slot]) -> int:
    return max(slot.refine_passes for slot in slots)
