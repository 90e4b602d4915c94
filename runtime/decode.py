"""Draft, refine, verify, commit: one cycle of the algorithm over all slots that decode. Lossless.

Invariant before every draft, per slot: target rows == drafter rows + rows that wait for the drafter == position of
the anchor. Only committed rows count as context; rejected ones are overwritten by the next call.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from xpress_export.runtime.device import Array
from xpress_export.runtime.sampling import Distribution, Sampler
from xpress_export.runtime.slots import Slots
from xpress_export.runtime.stats import Stats
from xpress_export.runtime.trace import Tracer

_MANY_WAITING = 16  # rows; more than these are taken into the drafter's context alone, not padded over the batch


@dataclass(kw_only=True, eq=False)
class Slot:
    """One request as the loop sees it; slot `index` of the memory is its own.

    num_drafts, refine_passes: of the next cycle. speculates: whether it may ever draft, so that the drafter has to
    follow. sampler: None where the target's largest logit is all that counts. num_left: tokens it may still get.
    """

    index: int
    speculates: bool
    sampler: Sampler | None
    stats: Stats
    num_left: int
    num_drafts: int = 0
    refine_passes: int = 0
    anchor: int = -1
    previous: int = -1


@dataclass
class Drafts:
    """Draft tokens of a batch, int64 [B, n], of which slot b has the first `lengths[b]`; q of sampled ones."""

    tokens: Array
    lengths: list[int]
    q: dict[int, list[Distribution]] = field(default_factory=dict)


@dataclass
class Times:
    """Milliseconds inside engine calls since the last `clear`. tracer: where each of them is noted too."""

    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    refine_ms: float = 0.0
    verify_ms: float = 0.0
    tracer: Tracer | None = None

    def clear(self) -> None:
        self.prefill_ms = self.draft_ms = self.refine_ms = self.verify_ms = 0.0

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block to the field `name`."""
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        setattr(self, name, getattr(self, name) + 1e3 * (end - start))
        if self.tracer is not None:
            self.tracer.add("engines", name.removesuffix("_ms"), start, end)


class Decoder:
    """The verbs of the algorithm. `draft_ids`: token id of each row of the drafter's head, int64 [Vd]."""

    def __init__(self, memory: Slots, first_slot: int, draft_ids: Array) -> None:
        self.memory, self.times = memory, Times()
        self._target, self._drafter, self._refiner = memory.target, memory.drafter, memory.refiner
        self._first_slot = first_slot
        self._draft_order = np.argsort(draft_ids)
        self._draft_ids = draft_ids[self._draft_order]

    def prefill(self, slot: Slot, chunk: Sequence[int], *, is_last: bool) -> None:
        """Append a chunk of the prompt to the slot's caches; nothing more is due after the last one."""
        with self.times.timed("prefill_ms"):
            self._target.run(slot.index, np.array([chunk], np.int64))
            self._commit(slot, 0, len(chunk))
        slot.previous = chunk[-1]
        slot.stats.num_prefilled_tokens += len(chunk)

    def first(self, slot: Slot) -> int:
        """The first token of the answer, right after the last chunk of the prompt; it becomes the anchor."""
        if slot.sampler is None:
            slot.anchor = int(self._target.next_token[0, -1])
        else:
            (slot.anchor,) = slot.sampler.choose(self._target.logits[0, -1:], [])
        slot.num_left -= 1
        return slot.anchor

    def cycle(self, slots: Sequence[Slot]) -> list[list[int] | Exception]:
        """One step of slots 0 .. B - 1: the tokens that each commits, or what its own sampler raised."""
        drafts = self.draft(slots)
        drafts = self.refine(slots, drafts)
        return self.verify(slots, drafts)

    def draft(self, slots: Sequence[Slot]) -> Drafts:
        """One block after each anchor, for as many tokens as the slot asks for and may still commit."""
        num_drafts = max(slot.num_drafts for slot in slots)
        lengths = [max(0, min(slot.num_drafts, slot.num_left - 1)) for slot in slots]
        if self._drafter is None or not any(lengths):
            return Drafts(np.zeros((len(slots), 0), np.int64), [0] * len(slots))
        anchors = np.array([slot.anchor for slot in slots])
        with self.times.timed("draft_ms"):
            if len(slots) > 1:
                self._drafter.flush_longer_than(_MANY_WAITING)
            tokens = self._drafter.run(0, anchors, num_drafts + self._first_slot)
        return self._redraw(slots, Drafts(tokens, lengths), self._drafter.draft_logits)

    def refine(self, slots: Sequence[Slot], drafts: Drafts) -> Drafts:
        """Jacobi passes, as many as each slot asks for; a pass that changes nothing has reached the fixed point."""
        passes = np.array([slot.refine_passes if n else 0 for slot, n in zip(slots, drafts.lengths, strict=True)])
        if self._refiner is None or not passes.any():
            return drafts
        anchors, previous = np.array([(slot.anchor, slot.previous) for slot in slots]).T
        for i in range(passes.max()):
            refining = i < passes
            with self.times.timed("refine_ms"):
                refined = self._refiner.run(drafts.tokens, anchors, previous)
            tokens = np.where(refining[:, None], refined, drafts.tokens)
            before, drafts = drafts, Drafts(tokens, drafts.lengths, drafts.q)
            drafts = self._redraw(slots, drafts, self._refiner.logits, refining)
            for slot, is_refining in zip(slots, refining, strict=True):
                slot.stats.num_refine_passes += int(is_refining)
            if np.array_equal(drafts.tokens, before.tokens):
                break
        return drafts

    def verify(self, slots: Sequence[Slot], drafts: Drafts) -> list[list[int] | Exception]:
        """One target call over [anchor, draft] of each slot: the correct prefix and the target's own next token."""
        ids = np.zeros((len(slots), 1 + max(drafts.lengths)), np.int64)
        ids[:, 0] = [slot.anchor for slot in slots]
        ids[:, 1:] = drafts.tokens[:, : ids.shape[1] - 1]
        with self.times.timed("verify_ms"):
            self._target.run(0, ids)
        return [self._accept(slot, drafts) for slot in slots]

    def trace(self, tracer: Tracer | None) -> None:
        """Note every engine call from now on, or no longer."""
        self.times.tracer = tracer

    @property
    def num_graphs(self) -> int:
        """CUDA graphs that were captured: none here."""
        return 0

    def recover(self) -> None:
        """After a failed call; nothing outlives a call here."""

    def close(self) -> None:
        """Nothing but memory is held here."""

    def _accept(self, slot: Slot, drafts: Drafts) -> list[int] | Exception:
        b = slot.index
        draft = drafts.tokens[b, : drafts.lengths[b]]
        if slot.sampler is None:
            predicted = self._target.next_token[b, : 1 + draft.size]
            wrong = np.flatnonzero(draft != predicted[:-1])
            num_accepted = int(wrong[0]) if wrong.size else draft.size
            committed: list[int] = predicted[: num_accepted + 1].tolist()  # accepted drafts equal the predictions
        else:
            logits = self._target.logits[b, : 1 + draft.size]
            try:
                committed = slot.sampler.choose(logits, draft.tolist(), drafts.q.get(b, ()))
            except Exception as error:  # whatever a user's logits processor raises is that request's alone
                return error
        slot.stats.count_step(draft.size, len(committed) - 1)
        slot.previous, slot.anchor = [slot.anchor, *committed][-2:]
        slot.num_left -= len(committed)
        with self.times.timed("draft_ms") if slot.speculates else nullcontext():  # the drafter may have to run
            self._commit(slot, b, len(committed))
        return committed

    def _redraw(self, slots: Sequence[Slot], drafts: Drafts, logits: Array, among: Array | None = None) -> Drafts:
        """Replace the likeliest tokens by drawn ones in the slots that ask for sampled drafts."""
        for slot in slots:
            b = slot.index
            if slot.sampler is not None and slot.sampler.draws_drafts and (among is None or among[b]):
                q = slot.sampler.draw_draft(logits[b][:, self._draft_order], self._draft_ids)
                drafts.tokens[b] = slot.sampler.draft_tokens(q)
                drafts.q[b] = q[: drafts.lengths[b]]
        return drafts

    def _commit(self, slot: Slot, row: int, num_committed: int) -> None:
        """The first rows that the last target call wrote for the slot are the conversation now; the rest never was."""
        self._target.write_index[slot.index] += num_committed
        if self._drafter is not None and slot.speculates:
            self._drafter.wait(slot.index, self._target.target_hidden[row, :num_committed])
