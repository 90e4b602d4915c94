"""Adaptive speculation: the policy against a simulated machine, and its outputs and statistics in a runtime."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from xpress_export.runtime import Runtime, SamplingParams, Stats
from xpress_export.runtime.decode import Slot, Times
from xpress_export.runtime.speculation import Choice, Cost, Speculation

MOST = Choice(4, 2)


@dataclass
class Machine:
    """Milliseconds: verify a + b rows, draft, refine per pass. rates[k]: acceptance of each position after k passes."""

    verify: tuple[float, float] = (25.0, 1.5)
    draft: float = 8.0
    refine: float = 1.5
    rates: tuple[float, float, float] = (0.5, 0.55, 0.6)

    def speed(self, choice: Choice, batch: int) -> float:
        n, k = choice.num_drafts, choice.refine_passes
        expected = 1 + sum(self.rates[k] ** j for j in range(1, n + 1))
        return batch * expected / self.time(choice, batch)

    def time(self, choice: Choice, batch: int) -> float:
        n, k = choice.num_drafts, choice.refine_passes
        return self.verify[0] + self.verify[1] * batch * (1 + n) + (self.draft + self.refine * k if n else 0)

    def best(self, batch: int = 1) -> Choice:
        everything = [Choice(0, 0)] + [Choice(n, k) for n in range(1, 5) for k in range(3)]
        return max(everything, key=lambda choice: self.speed(choice, batch))


def run(policy: Speculation, machine: Machine, slots: list[Slot], num_cycles: int, seed: int = 0) -> list[Choice]:
    rng, chosen = np.random.default_rng(seed), []
    for _ in range(num_cycles):
        choice = policy.choose(slots)
        n, k = choice.num_drafts, choice.refine_passes
        outcomes = []
        for slot in slots:
            slot.num_drafts, slot.refine_passes = n, k
            hits = rng.random(n) < machine.rates[k]
            outcomes.append((n, int(hits.cumprod().sum())))
        noise = rng.normal(1, 0.05)
        rows = len(slots) * (1 + n)
        times = Times(
            draft_ms=machine.draft * noise if n else 0,
            refine_ms=machine.refine * k * noise,
            verify_ms=(machine.verify[0] + machine.verify[1] * rows) * noise,
        )
        policy.learn(slots, outcomes, times)
        chosen.append(choice)
    return chosen


def new_slots(count: int) -> list[Slot]:
    return [Slot(index=i, speculates=True, sampler=None, stats=Stats(), num_left=99) for i in range(count)]


MACHINES = {
    "drafts pay": (Machine(rates=(0.7, 0.75, 0.8)), 1),
    "drafts pay a little": (Machine(), 1),
    "refining costs more than it gains": (Machine(rates=(0.7, 0.71, 0.71), refine=6), 1),
    "drafts are worthless": (Machine(rates=(0.05, 0.05, 0.05)), 1),
    "rows are dear": (Machine(verify=(10, 8), rates=(0.5, 0.55, 0.6)), 8),
    "rows are cheap": (Machine(verify=(25, 0.05), rates=(0.5, 0.6, 0.7)), 8),
}


@pytest.mark.parametrize("name", MACHINES)
def test_it_settles_near_the_best_choice(name: str) -> None:
    """Within 7 % of the tokens that the best choice would have made, once it has settled."""
    machine, batch = MACHINES[name]
    policy = Speculation(MOST, 1)
    chosen = run(policy, machine, new_slots(batch), 600)[200:]
    made = np.mean([machine.speed(choice, batch) for choice in chosen])
    assert made >= 0.93 * machine.speed(machine.best(batch), batch), Counter(chosen).most_common(4)


def test_it_switches_off_when_drafts_lose_and_on_again_when_they_win() -> None:
    policy, slots = Speculation(MOST, 1), new_slots(1)
    good, bad = Machine(rates=(0.7, 0.75, 0.8)), Machine(rates=(0.02, 0.02, 0.02))
    for machine, expected in ((good, False), (bad, True), (good, False)):
        late = run(policy, machine, slots, 500)[400:]
        share = np.mean([choice.num_drafts == 0 for choice in late])
        assert (share > 0.85) == expected and (share < 0.15) == (not expected)


def test_a_request_of_a_fixed_mode_in_the_batch_does_not_keep_the_others_from_trying() -> None:
    """Whatever is chosen, the batch drafts a whole block, because one of its requests says so."""
    policy, slots, machine = Speculation(MOST, 1), new_slots(2), Machine(rates=(0.7, 0.75, 0.8))
    chosen = []
    for _ in range(60):
        chosen.append(policy.choose(slots))
        for slot in slots:
            slot.num_drafts, slot.refine_passes = MOST.num_drafts, MOST.refine_passes
        times = Times(draft_ms=8, refine_ms=3, verify_ms=machine.time(MOST, 2) - 11)
        policy.learn(slots, [(MOST.num_drafts, 3)] * 2, times)
    assert {choice.num_drafts for choice in chosen} > {0}
    assert Counter(choice.num_drafts == 0 for choice in chosen).most_common(1)[0][0] is False


def test_a_new_request_starts_from_what_others_taught() -> None:
    policy = Speculation(MOST, 1)
    run(policy, Machine(rates=(0.02, 0.02, 0.02)), new_slots(1), 300)
    chosen = run(policy, Machine(rates=(0.02, 0.02, 0.02)), new_slots(1), 20)
    assert sum(choice.num_drafts == 0 for choice in chosen) >= 16


def test_a_cost_is_the_median_and_interpolates() -> None:
    cost = Cost()
    assert cost(3) == 0
    for ms in (10, 11, 900):
        cost.learn(1, ms)
    assert (cost(0), cost(1), cost(5)) == (11, 11, 11)
    cost.learn(5, 19)
    assert (cost(1), cost(3), cost(5), cost(50)) == (11, 15, 19, 19)


@pytest.mark.parametrize("num_right", [0, 6])
def test_the_runtime_is_exact_and_says_what_it_did(
    scripted_bundle: Any, stories: Any, num_right: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine where every engine call takes one second."""
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr("xpress_export.runtime.decode.time", clock)
    bundle = scripted_bundle(stories[0].script([num_right] * len(stories[0].ids)))
    with Runtime.open(bundle, num_threads=1) as runtime:
        params = SamplingParams(max_new_tokens=380, ignore_eos=True)
        result = runtime.generate(stories[0].ids[:30], params).result()
    stats = result.stats
    assert list(result.token_ids) == stories[0].expected(30, 380)
    assert stats.mode == "adaptive"
    assert stats.num_plain_steps >= 2, "every choice is tried"
    if num_right == 0:
        assert stats.num_plain_steps > 0.6 * stats.num_verify_steps
        assert stats.speculation_off == "plain decoding was measured to be faster"
    else:
        assert stats.num_plain_steps < 0.4 * stats.num_verify_steps
        assert stats.tau > 3


def test_why_nothing_is_drafted(tiny_bundle: Path, stories: Any) -> None:
    with Runtime.open(tiny_bundle, num_threads=1) as runtime:
        for params, mode, reason in (
            ({"mode": "target"}, "target", "mode target was asked for"),
            ({"num_draft_tokens": 0}, "xpress", "num_draft_tokens is 0"),
            ({"mode": "dflash"}, "dflash", None),
        ):
            result = runtime.generate(stories[0].ids[:20], SamplingParams(max_new_tokens=6, **params)).result()
            assert (result.stats.mode, result.stats.speculation_off) == (mode, reason)
