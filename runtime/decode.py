"""Draft, refine, verify, commit: the decode loop of one request, greedy and lossless.

Invariant before every draft: target rows == drafter rows + rows waiting in `target_hidden` == position of the anchor.
Only committed rows count as context; rejected ones are overwritten by the next call, so nothing is rolled back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from xpress_export.runtime.backend import Array
from xpress_export.runtime.slot import Slot
from xpress_export.runtime.stats import Stats

_NO_DRAFT = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to decode: slots per draft block (0: plain decoding), refine passes, prefill chunk, token budget."""

    num_slots: int
    refine_passes: int
    prefill_chunk: int
    max_new_tokens: int


def decode(slot: Slot, prompt: Sequence[int], plan: Plan, stats: Stats) -> Iterator[list[int]]:
    """Yield the generated tokens as they are committed, a list per step; the caller decides when to stop."""
    loop = _Loop(slot, plan, stats)
    with stats.timed("prefill_ms"):
        anchor = loop.prefill(prompt)
    previous, num_left = prompt[-1], plan.max_new_tokens - 1
    yield [anchor]
    while num_left > 0:
        with stats.timed("decode_ms"):
            draft = loop.draft(anchor, num_left - 1)
            draft = loop.refine(draft, anchor, previous)
            committed = loop.verify(anchor, draft)
        previous, anchor = ([anchor, *committed])[-2:]
        num_left -= len(committed)
        yield committed


class _Loop:
    """The verbs of the algorithm over one slot."""

    def __init__(self, slot: Slot, plan: Plan, stats: Stats) -> None:
        self.target, self.plan, self.stats = slot.target, plan, stats
        self.drafter = slot.drafter if plan.num_slots else None
        self.refiner = slot.refiner if plan.refine_passes else None
        self.waiting_rows = 0  # rows of target_hidden that the drafter has not taken in
        slot.reset()

    def prefill(self, prompt: Sequence[int]) -> int:
        """Run the prompt through the target in chunks, all but the last also into the drafter; the first token."""
        for start in range(0, len(prompt), self.plan.prefill_chunk):
            if start:
                self._append_context()
            chunk = prompt[start : start + self.plan.prefill_chunk]
            self._run_target(chunk, num_committed=len(chunk))
            self.stats.num_prefilled_tokens += len(chunk)
        return int(self.target.next_token[0, self.waiting_rows - 1])

    def draft(self, anchor: int, limit: int) -> Array:
        """Draft one block after `anchor`, cut to at most `limit` tokens; int64 [n], a view of the slot's buffer."""
        if self.drafter is None or limit == 0:
            return _NO_DRAFT
        self.drafter.block_ids[0, 0] = anchor
        with self.stats.timed("draft_ms"):
            draft = self._run_drafter(self.plan.num_slots)
        return draft[:limit]

    def refine(self, draft: Array, anchor: int, previous: int) -> Array:
        """Jacobi passes over the whole block; a pass that changes nothing has reached the fixed point."""
        if self.refiner is None or draft.size == 0:
            return draft
        self.refiner.anchor[0], self.refiner.previous[0] = anchor, previous
        with self.stats.timed("refine_ms"):
            for i in range(self.plan.refine_passes):
                before, after = self.refiner.run(i, self.plan.num_slots)
                self.stats.num_refine_passes += 1
                if np.array_equal(before, after):
                    break
        return after[0, : draft.size]

    def verify(self, anchor: int, draft: Array) -> list[int]:
        """One target call over [anchor, draft]: the longest correct prefix and the target's own token after it."""
        ids = self.target.input_ids
        ids[0, 0], ids[0, 1 : 1 + draft.size] = anchor, draft
        with self.stats.timed("verify_ms"):
            self.target.run(1 + draft.size)
        predicted = self.target.next_token[0, : 1 + draft.size]
        wrong = np.flatnonzero(draft != predicted[:-1])
        num_accepted = int(wrong[0]) if wrong.size else draft.size
        self._commit(num_accepted + 1, 1 + draft.size)
        self.stats.count_step(draft.size, num_accepted)
        committed: list[int] = predicted[: num_accepted + 1].tolist()  # accepted drafts equal the predictions
        return committed

    def _run_target(self, tokens: Sequence[int], num_committed: int) -> None:
        self.target.input_ids[0, : len(tokens)] = tokens
        self.target.run(len(tokens))
        self._commit(num_committed, len(tokens))

    def _commit(self, num_committed: int, num_rows: int) -> None:
        """The first `num_committed` of the call's rows are the conversation now; the rest never was."""
        self.target.write_index[0] += num_committed
        self.waiting_rows = num_rows
        if self.drafter is not None:
            self.drafter.num_committed[0] = num_committed

    def _append_context(self) -> None:
        """Take waiting rows into the drafter's context without wanting a draft: the smallest block will do."""
        if self.drafter is not None:
            self._run_drafter(2)

    def _run_drafter(self, num_slots: int) -> Array:
        assert self.drafter is not None
        draft = self.drafter.run(self.target.target_hidden[:, : self.waiting_rows], num_slots)
        assert self.drafter.write_index[0] == self.target.write_index[0], "drafter and target rows differ"
        return draft
