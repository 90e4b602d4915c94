"""The device-decided loop on the simulated device: no order changes a token, and no wait of it can be left out."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from xpress_export.errors import EngineError
from xpress_export.runtime import Generation, Runtime, SamplingParams
from xpress_export.runtime.device import Buffer
from xpress_export.runtime.device_cpu import CpuBound
from xpress_export.runtime.schedules import RandomOrder
from xpress_export.runtime.simulator import SimulatedDevice, Site

LAYOUTS = ("split", "fused")
SLOTS = 4
PATIENCE_S = 60.0


@dataclass(frozen=True)
class Job:
    """A request for `num_tokens` tokens after the first `num_prompt` tokens of a story."""

    num_prompt: int
    num_tokens: int
    mode: str
    temperature: float = 0.0

    def submit(self, runtime: Runtime, story: Any) -> Generation:
        given = {"temperature": self.temperature, "seed": 7} if self.temperature else {}
        params = SamplingParams(max_new_tokens=self.num_tokens, mode=self.mode, ignore_eos=True, **given)
        return runtime.submit(story.ids[: self.num_prompt], params)


WAVES = {
    "split": (
        (
            Job(250, 24, "xpress"),  # read in many chunks while nothing else runs; its cache grows
            Job(3, 12, "target"),
            Job(20, 5, "dflash", temperature=1.0),  # the host chooses for the batch while it lasts
            Job(40, 30, "xpress"),
            Job(9, 3, "dflash"),
            Job(5, 1, "target"),
            Job(70, 8, "dflash"),
        ),
        (Job(4, 9, "target"), Job(6, 3, "target")),  # the cache shrinks; nobody drafts
        (Job(10, 9, "dflash"), Job(33, 5, "xpress")),
    ),
    "fused": (
        (
            Job(250, 24, "xpress"),
            Job(3, 12, "target"),
            Job(40, 30, "xpress"),
            Job(9, 3, "xpress"),
            Job(5, 1, "target"),
            Job(70, 8, "xpress"),
        ),
        (Job(4, 9, "target"), Job(33, 5, "xpress")),
    ),
}
"""What is submitted at once; the next when all have ended."""


@pytest.fixture(scope="module")
def bundles(tiny_fused_bundle: Path, scripted_bundle: Any, stories: Any) -> dict[str, Path]:
    """By layout; the split one drafts up to seven right tokens."""
    rng = random.Random(0)
    script = stories[0].script([rng.choice((0, 1, 3, 7)) for _ in stories[0].ids])
    return {"split": scripted_bundle(script, original=tiny_fused_bundle), "fused": tiny_fused_bundle}


@pytest.fixture(scope="module")
def expected(tiny_fused_bundle: Path, stories: Any) -> dict[Job, list[int]]:
    """What the CPU answers to each job, alone and where the host decides."""
    found = {}
    with Runtime.open(tiny_fused_bundle, device="cpu", layout="split", num_threads=1, num_slots=1) as runtime:
        for job in {job for waves in WAVES.values() for wave in waves for job in wave}:
            found[job] = list(job.submit(runtime, stories[0]).result(PATIENCE_S).token_ids)
            if not job.temperature:
                assert found[job] == stories[0].expected(job.num_prompt, job.num_tokens)
    return found


def open_on(device: SimulatedDevice, bundle: Path, layout: str) -> Runtime:
    return Runtime.open(bundle, device=device, layout=layout, num_slots=SLOTS, prefill_chunk=16)


def submit(runtime: Runtime, device: SimulatedDevice, jobs: Sequence[Job], story: Any) -> list[Generation]:
    """All of them before the first is read, so that the batches are the same each time."""
    with device.lock:
        return [job.submit(runtime, story) for job in jobs]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_order_changes_a_token(
    layout: str, bundles: dict[str, Path], expected: dict[Job, list[int]], stories: Any
) -> None:
    device = SimulatedDevice()
    with open_on(device, bundles[layout], layout) as runtime:
        for seed in range(12):
            device.order = RandomOrder(seed)
            for wave in WAVES[layout]:
                handles = submit(runtime, device, wave, stories[0])
                found = [list(handle.result(PATIENCE_S).token_ids) for handle in handles]
                assert found == [expected[job] for job in wave], f"order {seed}"
    assert device.hazards == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_that_leave_early_disturb_nobody(
    layout: str, bundles: dict[str, Path], expected: dict[Job, list[int]], stories: Any
) -> None:
    device = SimulatedDevice()
    wave = WAVES[layout][0]
    with open_on(device, bundles[layout], layout) as runtime:
        for seed in range(6):
            device.order, rng = RandomOrder(seed), random.Random(seed)
            handles = submit(runtime, device, wave, stories[0])
            gone = set(rng.sample(range(len(wave)), 3))
            for i in gone:
                if rng.random() < 0.7:
                    next(handles[i], None)
                handles[i].cancel()
            for i, (handle, job) in enumerate(zip(handles, wave, strict=True)):
                found = list(handle.result(PATIENCE_S).token_ids)
                wanted = expected[job]
                assert found == (wanted[: len(found)] if i in gone else wanted), f"order {seed}, {job}"
    assert device.hazards == []


def test_a_failed_graph_ends_what_ran_and_leaves_no_hazard(
    bundles: dict[str, Path], expected: dict[Job, list[int]], stories: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails late: the host has enqueued the next cycle by then."""
    device, calls, run = SimulatedDevice(), count(), CpuBound.run
    wave = WAVES["fused"][0]

    def fail_once(bound: CpuBound) -> None:
        if next(calls) == 30:
            raise EngineError("the graph failed")
        run(bound)

    monkeypatch.setattr(CpuBound, "run", fail_once)
    with open_on(device, bundles["fused"], "fused") as runtime:
        with pytest.raises(EngineError, match="the graph failed"):
            for handle in submit(runtime, device, wave, stories[0]):
                handle.result(PATIENCE_S)
        for seed in range(4):
            device.order = RandomOrder(seed)
            handles = submit(runtime, device, wave, stories[0])
            assert [list(handle.result(PATIENCE_S).token_ids) for handle in handles] == [expected[job] for job in wave]
    assert device.hazards == []


def hazards_without(site: Site | None, bundle: Path, layout: str, story: Any) -> SimulatedDevice:
    """Run the layout's workload with one call of the loop left out; the device, which kept what it found."""
    device = SimulatedDevice(without=site)
    with open_on(device, bundle, layout) as runtime:
        for wave in WAVES[layout]:
            for handle in submit(runtime, device, wave, story):
                try:
                    handle.result(PATIENCE_S)
                except Exception:
                    assert device.hazards, "something else failed"
            if device.hazards:
                break
    return device


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_wait_that_is_left_out_is_found(layout: str, bundles: dict[str, Path], stories: Any) -> None:
    whole = hazards_without(None, bundles[layout], layout, stories[0])
    assert whole.hazards == []
    assert {site.call for site in whole.sites} == {"record", "wait", "synchronize"}
    assert {site.where.split(":")[0] for site in whole.sites} == {"resident.py", "resident_memory.py"}
    missed = [str(s) for s in whole.sites if not hazards_without(s, bundles[layout], layout, stories[0]).hazards]
    assert missed == [], "either the loop does not need them, or the simulator does not see why it does"
    assert len(whole.sites) >= 20


def test_what_is_remembered_does_not_grow_with_an_answer(bundles: dict[str, Path], stories: Any) -> None:
    """Of each buffer, a few accesses that the host has not heard of."""
    device = SimulatedDevice()
    memories: list[Any] = []
    allocate: Callable[..., Buffer] = device._allocate

    def remembered(*args: Any, **options: Any) -> Buffer:
        memories.append(allocate(*args, **options).memory)
        return Buffer.whole(memories[-1], *args[1:])

    device._allocate = remembered  # type: ignore[method-assign]
    with open_on(device, bundles["split"], "split") as runtime:
        sizes = []
        for num_tokens in (20, 200):
            Job(10, num_tokens, "target").submit(runtime, stories[0]).result(PATIENCE_S)
            sizes.append(max(len(memory.history) for memory in memories))
    assert sizes[1] <= sizes[0] + 2 < 40
