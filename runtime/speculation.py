"""Adaptive speculation: how many tokens to draft and how often to refine them, decided before every cycle.

A draft costs the drafter, the refiner and a wider verify step; it gains what of it is accepted. Both are measured
as the runtime works: acceptance per request, per draft position and number of refine passes; cost per engine as a
function of the rows a call processes. The choice is the one with the most expected tokens per millisecond:

    E(n, K) = sum over slots of 1 + r_1 + r_1 r_2 + ... + r_1 ... r_n      r_j: acceptance of draft token j
    T(n, K) = verify(B (1 + n)) + draft(B N) + refine_K(B n)                no draft: E = B, T = verify(B)

A batch is one call of one shape, so n and K are chosen for the slots together. What is not chosen is tried now and
then, the more rarely the worse it looked, so that speculation comes back when it pays again. Outputs do not depend
on any of this.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from xpress_export.runtime.decode import Slot, Times

_REMEMBERED = 40  # outcomes behind an acceptance rate; older ones fade
_PRIOR_COUNTS = 8  # outcomes that the acceptance of all requests counts as in that of one
_FIRST_TRIES = 2  # of every choice, before costs are compared
_PROBE_EVERY = 24  # cycles between two tries of a choice that looks as good as the best
_DECIDE_EVERY = 4  # cycles between two comparisons of the choices
_CURIOSITY = 0.5  # how much too high a rate is put that nobody has measured


@dataclass(frozen=True)
class Choice:
    """Draft tokens and refine passes of a cycle; 0 draft tokens is plain decoding."""

    num_drafts: int
    refine_passes: int


class Cost:
    """Milliseconds of a call by the rows it processes: the median of the last few, interpolated."""

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=7))
        self._curve: tuple[list[int], list[float]] = ([], [])

    def learn(self, rows: int, ms: float) -> None:
        self._seen[rows].append(ms)
        known = sorted(self._seen)
        self._curve = (known, [median(self._seen[x]) for x in known])

    def __call__(self, rows: int) -> float:
        """Expected milliseconds; 0 before anything was measured, the nearest measurement outside their range."""
        known, ms = self._curve
        right = bisect(known, rows)
        if right == 0 or right == len(known):
            return ms[min(right, len(known) - 1)] if known else 0.0
        share = (rows - known[right - 1]) / (known[right] - known[right - 1])
        return ms[right - 1] + share * (ms[right] - ms[right - 1])


class Rates:
    """Acceptance of each draft position, given that all before it were accepted, [n], per number of refine passes.

    seen: how many outcomes stand behind each, at most as many as are remembered.
    """

    def __init__(self, most: Choice) -> None:
        self.rates = np.zeros((most.refine_passes + 1, most.num_drafts))
        self.seen = np.zeros_like(self.rates)

    def learn(self, passes: int, num_drafted: int, num_accepted: int) -> None:
        passes = min(passes, len(self.rates) - 1)
        rates, seen = self.rates[passes], self.seen[passes]
        for j in range(min(num_accepted + 1, num_drafted)):
            seen[j] = min(seen[j] + 1, _REMEMBERED)
            rates[j] += ((j < num_accepted) - rates[j]) / seen[j]

    def blended(self, prior: Rates) -> NDArray[np.float64]:
        """With what others taught, which counts as a few outcomes; a little too high where little was seen."""
        known = prior.rates + _CURIOSITY / np.sqrt(1 + prior.seen)
        rates = (self.rates * self.seen + known * _PRIOR_COUNTS) / (self.seen + _PRIOR_COUNTS)
        return np.minimum(rates, 1)


class Speculation:
    """The policy of one runtime. most: draft tokens and refine passes a cycle may have."""

    def __init__(self, most: Choice, first_slot: int) -> None:
        self._first_slot = first_slot
        self._most = most
        self._arms = [Choice(0, 0)] + [Choice(most.num_drafts, k) for k in range(most.refine_passes + 1)]
        self._prior = Rates(most)
        self._rates: dict[Slot, Rates] = {}
        self._verify, self._draft = Cost(), Cost()
        self._refine: dict[int, Cost] = defaultdict(Cost)
        self._speed: dict[Choice, float] = {}
        self._batch = self._cycle = 0
        self._last_tried: dict[Choice, int] = {}
        self._num_tried: dict[Choice, int] = defaultdict(int)

    def choose(self, slots: Sequence[Slot]) -> Choice:
        """What the adaptive slots among these should do in the next cycle."""
        choice = self._choose(slots)
        # Noted here, not when it has run: a batch drafts what its other requests ask for too.
        arm = Choice(self._most.num_drafts, choice.refine_passes) if choice.num_drafts else choice
        self._last_tried[arm] = self._cycle
        self._num_tried[arm] += 1
        return choice

    def _choose(self, slots: Sequence[Slot]) -> Choice:
        self._cycle += 1
        untried = [arm for arm in self._arms if self._num_tried[arm] < _FIRST_TRIES]
        if untried:
            return untried[0]
        if self._cycle % _DECIDE_EVERY == 0 or len(slots) != self._batch:
            self._speed, self._batch = self._speeds(slots), len(slots)
        speed = self._speed
        best = max(speed, key=lambda choice: speed[choice])
        for arm in self._arms:
            loss = speed[best] / max(speed[arm], 1e-9)
            if self._cycle - self._last_tried[arm] > _PROBE_EVERY * loss**2:
                return arm
        return best

    def learn(self, slots: Iterable[Slot], outcomes: Iterable[tuple[int, int]], times: Times) -> None:
        """After a cycle: draft tokens verified and accepted per slot, and the time of its engine calls."""
        slots, outcomes = list(slots), list(outcomes)
        batch, drafted = len(slots), max(drafted for drafted, _ in outcomes)
        passes = max(slot.refine_passes for slot in slots) if drafted else 0
        self._verify.learn(batch * (1 + drafted), times.verify_ms)
        if drafted:
            block = max(slot.num_drafts for slot in slots)
            self._draft.learn(batch * (block + self._first_slot), times.draft_ms)
            if passes:
                self._refine[passes].learn(batch * block, times.refine_ms)
        for slot, (num_drafted, num_accepted) in zip(slots, outcomes, strict=True):
            if num_drafted:
                own = self._rates.get(slot) or self._rates.setdefault(slot, Rates(self._most))
                for rates in (own, self._prior):
                    rates.learn(slot.refine_passes, num_drafted, num_accepted)

    def forget(self, slot: Slot) -> None:
        """The slot's request has ended."""
        self._rates.pop(slot, None)

    def _speeds(self, slots: Sequence[Slot]) -> dict[Choice, float]:
        """Expected tokens per millisecond of every choice."""
        batch = len(slots)
        speeds = {Choice(0, 0): batch / max(self._verify(batch), 1e-9)}
        unknown = Rates(self._most)
        rates = np.array([self._rates.get(slot, unknown).blended(self._prior) for slot in slots])  # [B, K, n]
        for k in range(self._most.refine_passes + 1):
            accepted = np.cumsum(np.cumprod(rates[:, k], axis=1).sum(axis=0))  # [n - 1]: of all slots, by n drafts
            for n in range(1, self._most.num_drafts + 1):
                ms = self._verify(batch * (1 + n)) + self._draft(batch * (n + self._first_slot))
                ms += self._refine[k](batch * n) if k else 0.0
                speeds[Choice(n, k)] = (batch + float(accepted[n - 1])) / max(ms, 1e-9)
        return speeds
