"""One runtime over many requests: nothing leaks from one to the next, and its memory stays where it is.

Caches are updated in place: ONNX Runtime says so when they are not, and buffers keep their addresses.
"""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xpress_export.errors import ClosedError, RequestError
from xpress_export.runtime import Generation, Runtime, SamplingParams
from xpress_export.runtime.backend import Call

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


def memory_of(runtime: Runtime) -> Any:
    return runtime._scheduler._decoder.memory


def all_arrays(memory: Any) -> dict[str, np.ndarray]:
    """Every array of the runtime's memory, views aside."""
    found: dict[str, np.ndarray] = {}
    for name in ("target", "drafter", "refiner"):
        part = getattr(memory, name)
        holders = {name: vars(part), f"{name}.buffers": part._buffers._flat}
        if hasattr(part, "cache"):
            holders[f"{name}.cache"] = part.cache._arrays
        for where, values in holders.items():
            own = {k: v for k, v in values.items() if isinstance(v, np.ndarray) and v.base is None}
            found |= {f"{where}.{k}": v for k, v in own.items()}
    return found


def wait_until_idle(runtime: Runtime) -> None:
    for _ in range(500):
        if runtime.stats.num_running == runtime.stats.num_waiting == 0:
            return
        time.sleep(0.01)
    raise AssertionError(f"still busy: {runtime.stats}")


@pytest.mark.parametrize("mode", MODES)
def test_point_9_requests_one_after_the_other_share_one_memory(runtime: Runtime, stories: Any, mode: str) -> None:
    """A long request, then shorter and longer ones, over what the one before left behind."""
    for which, num_prompt, num_tokens in ((0, 300, 40), (1, 3, 50), (0, 7, 60), (2, 8, 50), (0, 300, 40)):
        result = start(runtime, stories[which], num_prompt, num_tokens, mode).result()
        assert list(result.token_ids) == stories[which].expected(num_prompt, num_tokens)
    assert runtime.stats.kv_rows_used == 0


def test_point_9_rows_that_are_not_committed_are_never_seen(runtime: Runtime, stories: Any) -> None:
    start(runtime, stories[0], 20, 5, "xpress").result()
    noise = np.random.default_rng(0)
    for name, array in all_arrays(memory_of(runtime)).items():
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


@pytest.mark.parametrize(("leave", "mode"), [*itertools.product(("close", "raise"), MODES), ("forget", "xpress")])
def test_a_generation_left_early_gives_its_memory_back(runtime: Runtime, stories: Any, leave: str, mode: str) -> None:
    generation = start(runtime, stories[0], 40, 50, mode)
    for _ in range(3):
        next(generation)
    if leave == "close":
        generation.close()
        assert len(list(generation)) < 50
        assert generation.finish_reason == "cancelled"
    elif leave == "forget":
        del generation
        gc.collect()
    else:
        with pytest.raises(ZeroDivisionError):
            for _ in generation:
                1 / 0  # noqa: B018
        generation.close()
    wait_until_idle(runtime)
    assert runtime.stats.kv_rows_used == 0
    after = start(runtime, stories[1], 3, 40, mode).result()
    assert list(after.token_ids) == stories[1].expected(3, 40)


def test_a_generation_that_nobody_read_holds_nothing(runtime: Runtime, stories: Any) -> None:
    start(runtime, stories[0], 40, 50, "target").close()
    wait_until_idle(runtime)
    assert list(start(runtime, stories[0], 40, 9, "target").result().token_ids) == stories[0].expected(40, 9)


@pytest.mark.parametrize("mode", [None, *MODES])
def test_a_closed_runtime_refuses(tiny_bundle: Path, mode: str | None) -> None:
    runtime = Runtime.open(tiny_bundle, num_threads=1)
    runtime.close()
    runtime.close()
    with pytest.raises(RequestError, match="the runtime is closed"):
        runtime.generate([1, 2], SamplingParams(mode=mode)).result()


@pytest.mark.parametrize("num_read", [0, 1])
def test_closing_ends_running_and_waiting_generations_with_an_error(
    tiny_bundle: Path, stories: Any, num_read: int
) -> None:
    runtime = Runtime.open(tiny_bundle, num_threads=1, num_slots=2)
    generations = [start(runtime, stories[0], 1, 500, "dflash") for _ in range(4)]
    for generation in generations[:num_read]:
        next(generation)
    runtime.close()
    for generation in generations:
        with pytest.raises(ClosedError, match="the runtime is closed"):
            list(generation)
        assert generation.finish_reason is None


SHARED_POOL = """
    import sys
    import onnxruntime as ort
    from xpress_export.runtime import Runtime, SamplingParams

    def session(own):
        options = ort.SessionOptions()
        options.use_per_session_threads = own
        return ort.InferenceSession(sys.argv[1] + "/graphs/refiner.onnx", options, providers=["CPUExecutionProvider"])

    if sys.argv[2] == "theirs first":
        ort.set_global_thread_pool_sizes(1, 1)
        session(False)
    with Runtime.open(sys.argv[1]) as runtime:
        print(runtime.generate([1, 2], SamplingParams(max_new_tokens=9, ignore_eos=True)).result().finish_reason)
    if sys.argv[2] == "ours first":
        session(True)
"""


@pytest.mark.parametrize("order", ["theirs first", "ours first"])
def test_other_users_of_onnxruntime_in_the_process(tiny_bundle: Path, order: str) -> None:
    """Where the process shares one thread pool, that is used; and none is forced on anybody."""
    command = [sys.executable, "-c", textwrap.dedent(SHARED_POOL), str(tiny_bundle), order]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.returncode) == (["length"], 0), done.stderr


IN_PLACE = """
    import sys
    import numpy as np
    import onnxruntime as ort
    from xpress_export.runtime import Runtime, SamplingParams, slots

    open_session, alive = ort.InferenceSession, []

    def loud(path, options, **others):
        options.log_severity_level = 1
        return open_session(path, options, **others)

    def bind_copies(cache, call, first, last):
        for name, array in cache._arrays.items():
            alive.append(np.empty_like(array[first:last]))
            call.bind_input(name, array[first:last])
            call.bind_output(name.replace("past_", "present_"), alive[-1])

    ort.InferenceSession = loud
    if sys.argv[2] == "copies":
        slots.KVCache.bind = bind_copies
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


def test_present_is_past_before_and_after_growth(
    runtime: Runtime, stories: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, capacities, memory = Call.run, set(), memory_of(runtime)

    def checked(call: Call) -> None:
        part = {"target": memory.target, "drafter": memory.drafter}.get(call.graph.role)
        if part is not None:
            capacities.add(part.cache.capacity)
            for name, array in part.cache._arrays.items():
                used = array[:1]
                assert call._bound["in", name] == (used.ctypes.data, used.shape)
                assert call._bound["out", name.replace("past_", "present_")] == (used.ctypes.data, used.shape)
        run(call)

    monkeypatch.setattr(Call, "run", checked)
    start(runtime, stories[0], 200, 150, "xpress").result()
    assert capacities == {256, 512}


@pytest.mark.parametrize("mode", MODES)
def test_buffers_stay_where_they_are(mixed_bundle: Path, stories: Any, mode: str) -> None:
    """A second request like the first finds all its memory made."""
    with Runtime.open(mixed_bundle, num_threads=1, prefill_chunk=16) as runtime:
        start(runtime, stories[0], 100, 100, mode).result()
        addresses = {name: array.ctypes.data for name, array in all_arrays(memory_of(runtime)).items()}
        assert len(addresses) > 15
        start(runtime, stories[0], 100, 100, mode).result()
        assert {name: array.ctypes.data for name, array in all_arrays(memory_of(runtime)).items()} == addresses


def test_memory_of_a_long_request_is_given_back(runtime: Runtime, stories: Any) -> None:
    start(runtime, stories[0], 300, 40, "xpress").result()
    assert runtime.stats.kv_capacity == 512
    start(runtime, stories[0], 3, 4, "xpress").result()
    assert runtime.stats.kv_capacity == 256
