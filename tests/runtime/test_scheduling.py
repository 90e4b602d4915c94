"""Many requests on one runtime: each gets what it would get alone, whatever joins, leaves, fails or is slow."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from xpress_export.errors import ClosedError, EngineError, QueueFullError, RequestError
from xpress_export.runtime import Generation, Runtime, SamplingParams
from xpress_export.runtime.backend import Call
from xpress_export.runtime.decode import Decoder
from xpress_export.runtime.stats import Stats

MODES = ("target", "dflash", "xpress", None)


@pytest.fixture(scope="module")
def runtime(tiny_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(tiny_bundle, num_threads=1, num_slots=8, prefill_chunk=16) as opened:
        yield opened


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slots each cycle of the test was for."""
    counts: list[int] = []
    cycle = Decoder.cycle
    monkeypatch.setattr(Decoder, "cycle", lambda self, slots: (counts.append(len(slots)), cycle(self, slots))[1])
    return counts


def wait_until_idle(runtime: Runtime) -> None:
    for _ in range(1000):
        if runtime.stats.num_running == runtime.stats.num_waiting == 0:
            return
        time.sleep(0.01)
    raise AssertionError(f"still busy: {runtime.stats}")


def greedy(runtime: Runtime, story: Any, num_prompt: int, num_tokens: int, **params: Any) -> Generation:
    given = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, **params)
    return runtime.submit(story.ids[:num_prompt], given)


def test_200_requests_on_8_slots_equal_each_one_alone(
    runtime: Runtime, tiny_bundle: Path, stories: Any, scripted_bundle: Any
) -> None:
    """Mixed lengths, modes, seeds, penalties; one in eight is cancelled or dropped while it runs."""
    rng = random.Random(0)
    requests: list[tuple[list[int], dict[str, Any]]] = []
    for _ in range(200):
        story = rng.choice(stories)
        prompt = story.ids[: rng.randint(1, 90)]
        params: dict[str, Any] = {"max_new_tokens": rng.randint(1, 40), "mode": rng.choice(MODES), "ignore_eos": True}
        if rng.random() < 0.4:
            params |= {"temperature": rng.choice([0.6, 1.0, 1.5]), "seed": rng.randint(0, 9), "top_p": 0.9}
        if rng.random() < 0.1:
            params |= {"draft_sampling": "sampled"}
        if rng.random() < 0.2:
            params |= {"repetition_penalty": 1.2, "logprobs": 1}
        requests.append((prompt, params))
    handles = [runtime.submit(prompt, SamplingParams(**params)) for prompt, params in requests]
    gone = set(rng.sample(range(200), 25))
    for i in gone:
        next(handles[i])
        if i % 2:
            handles[i].cancel()
        else:
            handles[i] = None  # type: ignore[call-overload]
    found = {i: handle.result() for i, handle in enumerate(handles) if i not in gone}
    wait_until_idle(runtime)
    with Runtime.open(tiny_bundle, num_threads=1, num_slots=1, prefill_chunk=16) as alone:
        for i, result in found.items():
            prompt, params = requests[i]
            expected = alone.generate(prompt, SamplingParams(**params)).result()
            assert result.token_ids == expected.token_ids, requests[i]
            assert (result.text, result.finish_reason) == (expected.text, expected.finish_reason)
            if params["mode"] is not None:
                assert result.stats.acceptance_histogram == expected.stats.acceptance_histogram


def test_slots_fill_up_and_the_rest_waits_in_line(
    runtime: Runtime, stories: Any, at_once: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Stats] = []
    first = Decoder.first
    monkeypatch.setattr(Decoder, "first", lambda self, slot: (served.append(slot.stats), first(self, slot))[1])
    handles = [greedy(runtime, stories[0], 20, 60, mode="target") for _ in range(20)]
    assert all(list(handle.result().token_ids) == stories[0].expected(20, 60) for handle in handles)
    assert max(at_once) == 8
    assert [id(stats) for stats in served] == [id(handle.stats) for handle in handles], "first come, first served"


def test_a_long_prompt_is_read_in_chunks_between_the_cycles_of_others(
    runtime: Runtime, stories: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    for name in ("prefill", "cycle"):
        verb = getattr(Decoder, name)
        monkeypatch.setattr(
            Decoder, name, lambda *args, verb=verb, name=name, **more: (log.append(name), verb(*args, **more))[1]
        )
    short = greedy(runtime, stories[1], 3, 90, mode="target")
    next(short)
    long = greedy(runtime, stories[0], 300, 5, mode="xpress")
    assert list(long.result().token_ids) == stories[0].expected(300, 5)
    assert list(short.result().token_ids) == stories[1].expected(3, 90)
    assert log.count("prefill") == 1 + -(-300 // 16)
    assert ("prefill", "prefill") not in itertools.pairwise(log)
    assert short.stats.stall_ms > 0
    assert long.stats.stall_ms == 0


def test_a_reader_that_does_not_read_stalls_nobody(runtime: Runtime, stories: Any) -> None:
    slow = greedy(runtime, stories[0], 20, 100)
    others = [greedy(runtime, stories[i % 4], stories[i % 4].start, 40) for i in range(12)]
    for i, other in enumerate(others):
        assert list(other.result(timeout=60).token_ids) == stories[i % 4].expected(stories[i % 4].start, 40)
    assert slow.token_ids == []
    assert list(slow.result().token_ids) == stories[0].expected(20, 100)


def test_one_failure_touches_nobody_else(runtime: Runtime, stories: Any) -> None:
    def broken(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        if len(ids) > 25:
            raise ZeroDivisionError("mine")
        return logits

    def wrong_shape(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        return logits[:-1]

    def not_a_number(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        return logits * np.nan

    before = runtime.stats.num_failed
    good = [greedy(runtime, stories[0], 20, 50, mode=mode) for mode in MODES]
    bad = [
        (greedy(runtime, stories[0], 20, 50, mode="dflash", logits_processor=processor), message)
        for processor, message in (
            (broken, "failed with ZeroDivisionError: mine"),
            (wrong_shape, "logits_processor returned shape"),
            (not_a_number, "the largest logit of token 0 of the answer is nan"),
        )
    ]
    for handle, message in bad:
        with pytest.raises(RequestError, match=message):
            handle.result()
        with pytest.raises(RequestError, match=message):
            next(handle)
    assert bad[0][0].token_ids == stories[0].expected(20, 50)[:6]
    for handle in good:
        assert list(handle.result().token_ids) == stories[0].expected(20, 50)
    assert runtime.stats.num_failed == before + 3


def test_an_engine_that_fails_ends_the_batch_and_the_runtime_goes_on(
    runtime: Runtime, stories: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = Call.run, 0

    def failing(call: Call) -> None:
        nonlocal calls
        calls += 1
        if calls == 30:
            raise EngineError("the target graph failed: out of memory")
        run(call)

    monkeypatch.setattr(Call, "run", failing)
    handles = [greedy(runtime, stories[0], 20, 60, mode="xpress") for _ in range(3)]
    for handle in handles:
        with pytest.raises(EngineError, match="out of memory"):
            handle.result(timeout=60)
    wait_until_idle(runtime)
    assert list(greedy(runtime, stories[1], 3, 50).result().token_ids) == stories[1].expected(3, 50)


def test_dropped_handles_are_cancelled(runtime: Runtime, stories: Any) -> None:
    before = runtime.stats.num_cancelled
    handles = [greedy(runtime, stories[0], 1, 500, mode="target") for _ in range(12)]
    for handle in handles[:4]:
        next(handle)
    del handles, handle
    gc.collect()
    wait_until_idle(runtime)
    assert runtime.stats.num_cancelled == before + 12


def test_leaving_a_for_loop_early_frees_the_request(runtime: Runtime, stories: Any) -> None:
    before = runtime.stats.num_cancelled
    for _ in greedy(runtime, stories[0], 1, 500, mode="target"):
        break
    gc.collect()
    wait_until_idle(runtime)
    assert runtime.stats.num_cancelled == before + 1


def test_the_queue_is_bounded_where_asked(tiny_bundle: Path, stories: Any) -> None:
    with Runtime.open(tiny_bundle, num_threads=1, num_slots=1, max_queue=2) as small:
        running = greedy(small, stories[0], 1, 500, mode="target")
        next(running)
        waiting = [greedy(small, stories[1], 3, 4) for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 waiting, as many as max_queue allows; try again later"):
            greedy(small, stories[1], 3, 4)
        running.cancel()
        assert [list(handle.result().token_ids) for handle in waiting] == [stories[1].expected(3, 4)] * 2
        assert list(greedy(small, stories[1], 3, 4).result().token_ids) == stories[1].expected(3, 4)


def test_requests_are_admitted_by_kv_memory(tiny_bundle: Path, stories: Any, at_once: list[int]) -> None:
    """A budget of 300 rows: one request of 200 rows runs alone, five of 60 together."""
    with Runtime.open(tiny_bundle, num_threads=1) as opened:
        per_row = opened.stats.kv_bytes // (opened.stats.num_slots * opened.stats.kv_capacity)
    with Runtime.open(tiny_bundle, num_threads=1, kv_budget_bytes=300 * per_row) as small:
        for num_tokens, together in ((180, 1), (40, 5)):
            at_once.clear()
            handles = [greedy(small, stories[0], 20, num_tokens, mode="target") for _ in range(7)]
            assert all(list(h.result().token_ids) == stories[0].expected(20, num_tokens) for h in handles)
            assert max(at_once) == together
        with pytest.raises(
            RequestError, match=r"come to 301 tokens, but the KV budget of \d+ bytes holds 300"
        ) as caught:
            greedy(small, stories[0], 1, 300)
        assert caught.value.field == "max_new_tokens"


def test_result_can_be_waited_for_in_vain(runtime: Runtime, stories: Any) -> None:
    handle = greedy(runtime, stories[0], 1, 400, mode="target")
    with pytest.raises(TimeoutError, match="did not end in time; it goes on"):
        handle.result(timeout=0.001)
    assert list(handle.result(timeout=60).token_ids) == stories[0].expected(1, 400)


def test_a_handle_is_a_context(runtime: Runtime, stories: Any) -> None:
    with greedy(runtime, stories[0], 1, 500, mode="target") as handle:
        next(handle)
    assert handle.result(timeout=60).finish_reason == "cancelled"
    assert len(handle.token_ids) < 500


def test_asyncio(runtime: Runtime, stories: Any) -> None:
    async def stream(story: Any) -> list[int]:
        tokens: list[int] = []
        async for chunk in greedy(runtime, story, story.start, 40):
            tokens += chunk.token_ids
        return tokens

    async def cancelled() -> str | None:
        handle = greedy(runtime, stories[0], 1, 500, mode="target")
        task = asyncio.create_task(handle.aresult())
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return (await handle.aresult()).finish_reason

    async def main() -> None:
        found = await asyncio.gather(*(stream(story) for story in stories), cancelled())
        assert found[:-1] == [story.expected(story.start, 40) for story in stories]
        assert found[-1] == "cancelled"
        with pytest.raises(RequestError, match="messages is empty"):
            runtime.submit([])

    asyncio.run(main())


def test_a_closed_runtime_refuses_and_joins_its_thread(tiny_bundle: Path, stories: Any) -> None:
    before = threading.active_count()
    opened = Runtime.open(tiny_bundle, num_threads=1)
    assert threading.active_count() == before, "no thread before the first request"
    handle = greedy(opened, stories[0], 1, 500, mode="target")
    next(handle)
    opened.close()
    assert threading.active_count() == before
    assert opened.closed
    with pytest.raises(ClosedError, match="the runtime is closed"):
        handle.result()
    with pytest.raises(ClosedError, match="the runtime is closed"):
        greedy(opened, stories[0], 1, 5)


def test_a_runtime_that_is_forgotten_ends(tiny_bundle: Path, stories: Any) -> None:
    """A handle keeps its runtime; without handles it goes, and its thread with it."""
    before = threading.active_count()
    handle = greedy(Runtime.open(tiny_bundle, num_threads=1), stories[0], 20, 30)
    gc.collect()
    assert list(handle.result().token_ids) == stories[0].expected(20, 30)
    del handle
    gc.collect()
    assert threading.active_count() == before


def test_stats_add_up(tiny_bundle: Path, stories: Any) -> None:
    with Runtime.open(tiny_bundle, num_threads=1) as opened:
        results = [
            handle.result()
            for handle in [greedy(opened, stories[i % 4], stories[i % 4].start, 30, mode="xpress") for i in range(10)]
        ]
        wait_until_idle(opened)
        total = opened.stats
    assert (total.num_finished, total.num_failed, total.num_cancelled) == (10, 0, 0)
    for name in ("num_prompt_tokens", "num_generated_tokens", "num_verify_steps", "num_draft_tokens", "num_accepted"):
        assert getattr(total, name) == sum(getattr(result.stats, name) for result in results), name
    assert total.num_cycles < total.num_verify_steps, "requests share cycles"
    assert total.prefill_ms == pytest.approx(sum(result.stats.prefill_ms for result in results))
    assert min(total.draft_ms, total.refine_ms, total.verify_ms, total.host_ms) > 0
    assert total.tau == pytest.approx(1 + total.num_accepted / total.num_verify_steps)
