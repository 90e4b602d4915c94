"""One runtime over many requests: nothing leaks from one to the next, and its memory stays where it is.

Caches are updated in place: ONNX Runtime says so when they are not, buffers keep their addresses, and a step
allocates less than the smallest of them.
"""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xpress_export.errors import RequestError
from xpress_export.runtime import Generation, Runtime, SamplingParams

MODES = ("target", "dflash", "xpress")


@pytest.fixture
def runtime(tiny_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(tiny_bundle, num_threads=1, prefill_chunk=16) as opened:
        yield opened


@pytest.fixture(scope="module")
def mixed_bundle(scripted_bundle: Any, stories: Any) -> Path:
    """Drafts of the first story with 0 to 7 right tokens: steps of every size."""
    rights = np.random.default_rng(0).integers(0, 8, len(stories[0].ids)).tolist()
    bundle: Path = scripted_bundle(stories[0].script(rights))
    return bundle


def start(runtime: Runtime, story: Any, num_prompt: int, num_tokens: int, mode: str) -> Generation:
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, mode=mode)
    return runtime.generate(story.ids[:num_prompt], params)


def all_arrays(slot: Any) -> dict[str, np.ndarray]:
    """Every array of a request's memory."""
    found = {}
    for name, part in vars(slot).items():
        holders = {name: part, f"{name}.cache": getattr(part, "cache", None)}
        for where, holder in holders.items():
            for key, value in vars(holder).items() if holder is not None else ():
                items = value.items() if isinstance(value, dict) else [("", value)]
                found |= {f"{where}.{key}.{k}": v for k, v in items if isinstance(v, np.ndarray)}
    return found


@pytest.mark.parametrize("mode", MODES)
def test_point_9_requests_one_after_the_other_share_one_memory(runtime: Runtime, stories: Any, mode: str) -> None:
    """A long request, then shorter and longer ones, over what the one before left behind."""
    for which, num_prompt, num_tokens in ((0, 300, 40), (1, 3, 50), (0, 7, 60), (2, 8, 50), (0, 300, 40)):
        result = start(runtime, stories[which], num_prompt, num_tokens, mode).result()
        assert list(result.token_ids) == stories[which].expected(num_prompt, num_tokens)
    assert len(runtime._free) == 1


def test_point_9_rows_that_are_not_committed_are_never_seen(runtime: Runtime, stories: Any) -> None:
    start(runtime, stories[0], 20, 5, "xpress").result()
    noise = np.random.default_rng(0)
    for name, array in all_arrays(runtime._free[0]).items():
        if ".cache." in name:
            array[:] = 10 * noise.standard_normal(array.shape)
    for mode in MODES:
        got = start(runtime, stories[1], 3, 60, mode).result().token_ids
        assert list(got) == stories[1].expected(3, 60)


@pytest.mark.parametrize("modes", [*itertools.combinations_with_replacement(MODES, 2)])
def test_two_generations_in_turns(runtime: Runtime, stories: Any, modes: tuple[str, str]) -> None:
    first = start(runtime, stories[0], 40, 50, modes[0])
    second = start(runtime, stories[3], 20, 30, modes[1])
    for _ in itertools.zip_longest(first, second):
        pass
    assert first.token_ids == stories[0].expected(40, 50)
    assert second.token_ids == stories[3].expected(20, 30)
    assert len(runtime._free) == 2


def test_many_threads(runtime: Runtime, stories: Any) -> None:
    requests = [
        (which, stories[which].start + extra, 30, mode)
        for which, extra, mode in itertools.product(range(4), (0, 5), MODES)
    ]

    def run(request: tuple[int, int, int, str]) -> list[int]:
        which, *rest = request
        return list(start(runtime, stories[which], *rest).result().token_ids)

    with ThreadPoolExecutor(4) as pool:
        for request, got in zip(requests, pool.map(run, requests), strict=True):
            assert got == stories[request[0]].expected(*request[1:3])
    assert len(runtime._free) <= 4


@pytest.mark.parametrize(("leave", "mode"), [*itertools.product(("close", "raise"), MODES), ("forget", "xpress")])
def test_a_generation_left_early_gives_its_memory_back(runtime: Runtime, stories: Any, leave: str, mode: str) -> None:
    generation = start(runtime, stories[0], 40, 50, mode)
    for _ in range(3):
        next(generation)
    assert not runtime._free
    if leave == "close":
        generation.close()
        assert list(generation) == []
    elif leave == "forget":
        del generation
        gc.collect()
    else:
        with pytest.raises(ZeroDivisionError):
            for _ in generation:
                1 / 0  # noqa: B018
        generation.close()
    assert len(runtime._free) == 1
    after = start(runtime, stories[1], 3, 40, mode).result()
    assert list(after.token_ids) == stories[1].expected(3, 40)


def test_a_generation_that_was_never_started_holds_nothing(runtime: Runtime, stories: Any) -> None:
    start(runtime, stories[0], 40, 50, "target").close()
    assert not runtime._free
    assert list(start(runtime, stories[0], 40, 9, "target").result().token_ids) == stories[0].expected(40, 9)


@pytest.mark.parametrize("mode", [None, *MODES])
def test_a_closed_runtime_refuses(tiny_bundle: Path, mode: str | None) -> None:
    runtime = Runtime.open(tiny_bundle, num_threads=1)
    runtime.close()
    runtime.close()
    with pytest.raises(RequestError, match="the runtime is closed"):
        runtime.generate([1, 2], SamplingParams(mode=mode)).result()


def test_closing_ends_a_running_generation_with_an_error(runtime: Runtime, stories: Any) -> None:
    generation = start(runtime, stories[0], 40, 50, "dflash")
    next(generation)
    runtime.close()
    with pytest.raises(RequestError, match="closed while this request was running"):
        list(generation)
    assert not runtime._free


def test_a_generation_made_before_closing_does_not_start_after(runtime: Runtime, stories: Any) -> None:
    generation = start(runtime, stories[0], 40, 50, "dflash")
    runtime.close()
    with pytest.raises(RequestError, match="the runtime is closed"):
        next(generation)


IN_PLACE = """
    import sys
    import numpy as np
    import onnxruntime as ort
    from xpress_export.runtime import Runtime, SamplingParams, slot

    open_session, alive = ort.InferenceSession, []

    def loud(path, options, **others):
        options.log_severity_level = 1
        return open_session(path, options, **others)

    def bind_copies(cache):
        for name, array in cache._arrays.items():
            alive.append(np.empty_like(array))
            cache._call.bind_input(name, array)
            cache._call.bind_output(name.replace("past_", "present_"), alive[-1])

    ort.InferenceSession = loud
    if sys.argv[2] == "copies":
        slot.KVCache._bind = bind_copies
    with Runtime.open(sys.argv[1], num_threads=1, prefill_chunk=16) as runtime:
        for mode in runtime.modes:
            params = SamplingParams(max_new_tokens=30, ignore_eos=True, mode=mode)
            print(runtime.generate([1] * 245, params).result().finish_reason)  # grows past 256 rows
"""


@pytest.mark.parametrize(("how", "warned"), [("as it is", False), ("copies", True)])
def test_onnx_runtime_confirms_that_caches_are_updated_in_place(mixed_bundle: Path, how: str, warned: bool) -> None:
    """With a control: bound to other buffers, the same run must make it warn."""
    command = [sys.executable, "-c", textwrap.dedent(IN_PLACE), str(mixed_bundle), how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["length"] * 3
    assert "Session successfully initialized" in done.stderr, "the log was not captured"
    assert ("in-place optimization not activated" in done.stderr) == warned


def test_present_is_past_before_and_after_growth(runtime: Runtime, stories: Any) -> None:
    start(runtime, stories[0], 1, 1, "xpress").result()
    slot, capacities = runtime._free[0], set()
    for _ in start(runtime, stories[0], 200, 150, "xpress"):
        for part in (slot.target, slot.drafter):
            bound = part._call._bound
            capacities.add(part.cache.capacity)
            for name, array in part.cache._arrays.items():
                address = array.ctypes.data
                assert bound["in", name] == (address, array.shape)
                assert bound["out", name.replace("past_", "present_")] == (address, array.shape)
    assert slot is runtime._free[0]
    assert capacities == {256, 512}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_allocates_no_array(mixed_bundle: Path, stories: Any, mode: str) -> None:
    """Buffers keep their addresses; what Python allocates in a step is smaller than any array of the vocabulary."""
    with Runtime.open(mixed_bundle, num_threads=1, prefill_chunk=16) as runtime:
        start(runtime, stories[0], 100, 20, mode).result()
        arrays = all_arrays(runtime._free[0])
        addresses = {name: array.ctypes.data for name, array in arrays.items()}
        assert len(addresses) > 15
        generation = start(runtime, stories[0], 100, 100, mode)
        for _ in range(6):
            next(generation)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            for _ in range(8):
                next(generation)
            peak = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        generation.close()
        again = {name: array.ctypes.data for name, array in all_arrays(runtime._free[0]).items()}
    assert again == addresses
    smallest = min(array.nbytes for name, array in arrays.items() if ".cache." in name or "logits" in name)
    assert peak < smallest, f"{peak} bytes in 8 steps; the smallest buffer has {smallest}"
