"""Cycles that the device decides write what transformers writes, in both layouts, and behave like the host's loop.

Here the device is the CPU, which does everything at once; `test_simulator` runs the same loop in any order that is
allowed, `test_device_cuda` on doubles of CUDA and TensorRT.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xpress_export import names
from xpress_export.errors import BundleError, EngineError, RequestError
from xpress_export.runtime import Runtime, SamplingParams
from xpress_export.runtime.device import Bound, Buffer
from xpress_export.runtime.device_cpu import CpuDevice, CpuStream

BLOCK = 8
LAYOUTS = (names.LAYOUT_SPLIT, names.LAYOUT_FUSED)


def open_resident(bundle: Path, layout: str, **options: Any) -> Runtime:
    """The device-decided loop on the CPU."""
    return Runtime.open(bundle, device=CpuDevice(1), layout=layout, **{"prefill_chunk": 16, "num_slots": 4, **options})


@pytest.fixture(scope="module")
def resident(tiny_fused_bundle: Path) -> Iterator[dict[str, Runtime]]:
    opened = {layout: open_resident(tiny_fused_bundle, layout) for layout in LAYOUTS}
    yield opened
    for runtime in opened.values():
        runtime.close()


@pytest.fixture(scope="module")
def host(tiny_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(tiny_bundle, device="cpu", num_threads=1, prefill_chunk=16, num_slots=4) as opened:
        yield opened


def params(num_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, **{"ignore_eos": True, **changes})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_prompt", [1, 2, BLOCK, 16, 17, 100, 255, 256, 400])
def test_prompts_of_any_length(resident: dict[str, Runtime], stories: Any, layout: str, num_prompt: int) -> None:
    """Shorter than a block, a whole number of chunks and one more, across the first growth of the caches."""
    prompt = stories[0].ids[:num_prompt]
    result = resident[layout].generate(prompt, params(30)).result()
    assert list(result.token_ids) == stories[0].expected(num_prompt, 30)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_tokens", [1, 2, BLOCK, BLOCK + 1, 33])
def test_any_budget(resident: dict[str, Runtime], stories: Any, layout: str, num_tokens: int) -> None:
    result = resident[layout].generate(stories[0].ids[:30], params(num_tokens)).result()
    assert list(result.token_ids) == stories[0].expected(30, num_tokens)
    assert result.finish_reason == "length"
    assert result.stats.num_generated_tokens == num_tokens


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_requests_that_join_and_leave(resident: dict[str, Runtime], stories: Any, layout: str) -> None:
    """More than there are slots, plain and drafting, of different lengths; some are cancelled on the way."""
    rng = np.random.default_rng(0)
    modes = (names.MODE_TARGET, resident[layout].modes[-1], None)
    running = []
    for i in range(24):
        story = stories[i % len(stories)]
        num_prompt, num_tokens = story.start + int(rng.integers(0, 40)), int(rng.integers(1, 60))
        generation = resident[layout].generate(story.ids[:num_prompt], params(num_tokens, mode=modes[i % 3]))
        running.append((generation, story.expected(num_prompt, num_tokens)))
    for generation, _ in running[5::7]:
        generation.cancel()
    for generation, expected in running:
        result = generation.result()
        assert list(result.token_ids) == expected[: len(result.token_ids)]
        assert result.finish_reason == "cancelled" or len(result.token_ids) == len(expected)


@pytest.mark.parametrize("mode", names.MODES)
def test_acceptance_is_that_of_the_host_loop(
    resident: dict[str, Runtime], host: Runtime, stories: Any, mode: str
) -> None:
    for runtime in (host, resident[names.LAYOUT_SPLIT]):
        result = runtime.generate(stories[1].ids[: stories[1].start], params(80, mode=mode)).result()
        if runtime is host:
            expected = result
    same = ("num_verify_steps", "num_draft_tokens", "num_accepted", "acceptance_histogram")
    assert [getattr(result.stats, name) for name in same] == [getattr(expected.stats, name) for name in same]


@pytest.mark.parametrize(("right", "tau"), [(BLOCK, BLOCK), (0, 1)])
def test_right_drafts_are_all_accepted_and_wrong_ones_never(
    scripted_bundle: Any, stories: Any, right: int, tau: int
) -> None:
    bundle = scripted_bundle(stories[0].script([right] * len(stories[0].ids)))
    with open_resident(bundle, names.LAYOUT_SPLIT) as runtime:
        result = runtime.generate(stories[0].ids[:30], params(1 + 5 * BLOCK, mode="dflash")).result()
    assert list(result.token_ids) == stories[0].expected(30, 1 + 5 * BLOCK)
    assert result.stats.tau == tau


@pytest.mark.parametrize("num_tokens", [2, BLOCK - 1, BLOCK + 2, 3 * BLOCK])
def test_a_step_beyond_the_budget_is_cut(scripted_bundle: Any, stories: Any, num_tokens: int) -> None:
    """Of drafts that are all right, in the middle of a step; counted as the host's loop counts it."""
    bundle = scripted_bundle(stories[0].script([BLOCK] * len(stories[0].ids)))
    found = []
    for device in ("cpu", CpuDevice(1)):
        with Runtime.open(bundle, device=device, num_slots=1) as runtime:
            result = runtime.generate(stories[0].ids[:30], params(num_tokens, mode="dflash")).result()
        assert list(result.token_ids) == stories[0].expected(30, num_tokens)
        found.append((result.stats.num_draft_tokens, result.stats.acceptance_histogram))
    assert found[0] == found[1]


def test_a_refiner_is_told_the_same_by_host_and_device(scripted_bundle: Any, stories: Any) -> None:
    """One that knows a token by the two before it: a step that the host decides has to hand on both."""
    bundle = scripted_bundle(stories[0].script([0] * len(stories[0].ids), refiner=True))
    taus = []
    for device, logprobs in (("cpu", None), (CpuDevice(1), None), (CpuDevice(1), 0)):
        with Runtime.open(bundle, device=device, num_slots=1) as runtime:
            more = {"mode": "xpress", "refine_passes": BLOCK - 1, "logprobs": logprobs}
            result = runtime.generate(stories[0].ids[:30], params(60, **more)).result()
        assert list(result.token_ids) == stories[0].expected(30, 60)
        taus.append(result.stats.tau)
    assert taus[0] == taus[1] == taus[2] > 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_device_that_is_never_late_runs_no_cycle_for_nobody(
    tiny_fused_bundle: Path, stories: Any, layout: str
) -> None:
    with open_resident(tiny_fused_bundle, layout) as runtime:
        result = runtime.generate(stories[0].ids[:20], params(40)).result()
        assert runtime.stats.num_cycles == result.stats.num_verify_steps


def test_the_host_chooses_for_a_batch_with_a_sampled_request(
    resident: dict[str, Runtime], host: Runtime, stories: Any
) -> None:
    """The same seed gives the same answer as in the host's loop, and its greedy neighbours are untouched."""
    prompt = stories[2].ids[: stories[2].start]
    sampled = params(40, temperature=0.8, seed=5, repetition_penalty=1.1)
    expected = host.generate(prompt, sampled).result()
    neighbours = [resident[names.LAYOUT_SPLIT].generate(s.ids[: s.start], params(70)) for s in stories[:2]]
    result = resident[names.LAYOUT_SPLIT].generate(prompt, sampled).result()
    assert result.token_ids == expected.token_ids
    for story, neighbour in zip(stories, neighbours, strict=False):
        assert list(neighbour.result().token_ids) == story.expected(story.start, 70)


def test_a_failing_processor_ends_its_own_request_alone(resident: dict[str, Runtime], stories: Any) -> None:
    def broken(tokens: Any, logits: Any) -> Any:
        if len(tokens) > stories[1].start + 5:
            raise ValueError("broken on purpose")
        return logits

    runtime, story = resident[names.LAYOUT_SPLIT], stories[0]
    neighbour = runtime.generate(story.ids[: story.start], params(60))
    failing = runtime.generate(stories[1].ids[: stories[1].start], params(60, logits_processor=broken))
    with pytest.raises(RequestError, match="broken on purpose"):
        failing.result()
    assert list(neighbour.result().token_ids) == story.expected(story.start, 60)


def test_fewer_draft_tokens_may_be_asked_of_the_runtime_and_of_a_request(tiny_fused_bundle: Path, stories: Any) -> None:
    story = stories[0]
    for layout in LAYOUTS:
        with open_resident(tiny_fused_bundle, layout, max_draft_tokens=3) as runtime:
            result = runtime.generate(story.ids[: story.start], params(40, num_draft_tokens=2)).result()
            assert list(result.token_ids) == story.expected(story.start, 40)
            assert result.stats.num_draft_tokens <= 2 * result.stats.num_verify_steps
            with pytest.raises(RequestError, match="num_draft_tokens is 4, this runtime drafts at most 3"):
                runtime.generate(story.ids[:5], params(4, num_draft_tokens=4))


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("fused", {"temperature": 0.5}, "layout 'split'"),
        ("fused", {"logprobs": 2}, "layout 'split'"),
        ("fused", {"refine_passes": 1}, "refine_passes is 1"),
        ("fused", {"mode": "dflash"}, "mode 'dflash'"),
        ("split", {"temperature": 0.5, "draft_sampling": "sampled"}, "draft_sampling"),
    ],
)
def test_what_the_device_cannot_decide_is_refused(
    resident: dict[str, Runtime], layout: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        resident[layout].generate([1, 2, 3], params(4, **changes))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"device": "gpu"}, RequestError, "device should be auto, cpu or cuda:N, got 'gpu'"),
        ({"backend": "torch"}, RequestError, "backend should be auto, onnxruntime"),
        ({"device": "cpu", "backend": "tensorrt"}, RequestError, "runs on a GPU"),
        ({"device": "cuda:7"}, EngineError, "no such GPU or no driver"),
        ({"layout": "merged"}, RequestError, "layout should be split or fused"),
        ({"layout": "fused"}, BundleError, "build --layout fused"),
        ({"device": "cpu", "layout": "split", "max_draft_tokens": 0}, RequestError, "max_draft_tokens"),
    ],
)
def test_devices_and_layouts_that_are_not_there_are_refused(
    tiny_bundle: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Runtime.open(tiny_bundle, **options)


def test_a_bundle_runs_in_the_layout_it_was_built_for(tiny_bundle: Path, tiny_fused_bundle: Path, stories: Any) -> None:
    story = stories[0]
    for bundle, layout in ((tiny_bundle, "split"), (tiny_fused_bundle, "fused")):
        with Runtime.open(bundle, num_threads=1) as runtime:
            assert (runtime.layout, runtime.device) == (layout, "cpu")
            result = runtime.generate(story.ids[: story.start], params(20)).result()
            assert list(result.token_ids) == story.expected(story.start, 20)


class Faulty(CpuDevice):
    """Fails the runs named in `fails`, as a queue refuses work; `lost`: and never works again."""

    def __init__(self, *, lost: bool = False) -> None:
        super().__init__(1)
        self.lost, self.num_runs, self.fails = lost, 0, {-1}

    def stream(self, name: str) -> CpuStream:
        device = self

        class FaultyStream(CpuStream):
            def run(self, bound: Bound, label: str) -> None:
                device.num_runs += 1
                if device.num_runs in device.fails or (device.lost and device.num_runs > min(device.fails) > 0):
                    raise EngineError(f"{label}: enqueue was refused")
                super().run(bound, label)

            def copy(self, to: Buffer, source: Buffer, label: str) -> None:
                if device.lost and device.num_runs >= min(device.fails) > 0:
                    raise EngineError(f"{label}: the device is lost")
                super().copy(to, source, label)

        return FaultyStream(self, name)

    def synchronize(self) -> None:
        if self.lost and self.num_runs >= min(self.fails) > 0:
            raise EngineError("the device is lost")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_a_refused_call_the_next_request_runs(tiny_fused_bundle: Path, stories: Any, layout: str) -> None:
    device, story = Faulty(), stories[0]
    with Runtime.open(tiny_fused_bundle, device=device, layout=layout, num_slots=2) as runtime:
        runtime.generate(story.ids[:20], params(3)).result()
        both = [runtime.generate(s.ids[: s.start], params(95)) for s in stories[:2]]
        for generation in both:
            next(generation)
        device.fails = {device.num_runs + 5}
        for generation in both:
            with pytest.raises(EngineError, match="enqueue was refused"):
                generation.result(timeout=30)
        result = runtime.generate(story.ids[: story.start], params(40)).result(timeout=30)
        assert list(result.token_ids) == story.expected(story.start, 40)
        assert runtime.stats.num_failed == 2


def test_a_lost_device_refuses_all_further_work_and_nothing_hangs(tiny_fused_bundle: Path, stories: Any) -> None:
    device = Faulty(lost=True)
    with Runtime.open(tiny_fused_bundle, device=device, layout="split", num_slots=2) as runtime:
        device.fails = {device.num_runs + 9}
        many = [runtime.generate(s.ids[: s.start], params(60)) for s in stories[:4]]
        for generation in many:
            with pytest.raises(EngineError, match=r"refused|lost"):
                generation.result(timeout=30)
        with pytest.raises(EngineError, match="takes no more requests: the device is lost"):
            runtime.generate(stories[0].ids[:20], params(3)).result(timeout=30)
