"""The decode loop loses nothing: every mode, plan and drafter gives what transformers' greedy `generate` gives.

The 17 points of the checklist in facts/drafter.md (8.1), and the tests that hold them:

    1   tap is hidden_states[id + 1], in order         exporter/test_modules.py, exporter/test_export.py; end to end
                                                       test_points_1_to_5_drafts_are_those_of_a_drafter_without_a_cache
    2   context rows == position of the anchor         the same, and test_points_2_3_4_8_caches_hold_committed_rows
    3   only committed rows become features            the same two
    4   the anchor is never in its own context         the same two
    5   slot 0 is discarded, B - 1 drafts              the first of them; test_point_17_*
    6   mask id required, in range, never stripped     exporter/test_checkpoints_drafter.py;
                                                       test_point_6_the_mask_id_is_an_ordinary_token_of_the_answer
    7   stop token anywhere; budgets                   test_stopping.py: test_point_7_*; test_point_7_any_budget
    8   KV rows after rollback == len(seq) - 1         test_points_2_3_4_8_caches_hold_committed_rows
    9   second request on the same object              test_lifecycle.py: test_point_9_*
    10  rows of a batch that accept differently        exporter/test_export.py: test_point_10_*
    11  sampling against the target's distribution     test_sampling.py
    12  fp16 overflow in fc                            exporter/test_export.py: test_point_12_*
    13  prompt shorter than a block, longer than a     test_point_13_prompts_of_any_length (the first drafter layer
        window                                         has a window of 24 rows)
    14  tied and untied heads; mismatches refused      exporter/test_export.py: test_point_14_*;
                                                       exporter/test_checkpoints_{target,drafter}.py
    15  block size nested or not; three formats        exporter/test_checkpoints_drafter.py
    16  whole characters; stop strings across blocks   test_text.py; test_stopping.py: test_point_16_*
    17  oracle drafts: tau = B; wrong drafts: tau = 1  test_point_17_*
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from xpress_export.runtime import Result, Runtime, SamplingParams
from xpress_export.runtime.decode import Decoder
from xpress_export.runtime.slots import Slots

BLOCK = 8
MODES = ("target", "dflash", "xpress")
ROUNDING = 1e-4  # relative, float32, between ONNX Runtime and PyTorch over a few layers


@pytest.fixture(scope="module")
def runtimes(tiny_bundle: Any, scripted_bundle: Any, stories: Any) -> Iterator[dict[str, Runtime]]:
    """The real trio, and scripted ones on the first story: all right, all wrong, right for a while, three right."""
    story, length = stories[0], len(stories[0].ids)
    mixed = np.random.default_rng(0).integers(0, BLOCK, length).tolist()
    rights = {"right": [BLOCK] * length, "wrong": [0] * length, "mixed": mixed, "three": [3] * length}
    bundles = {name: scripted_bundle(story.script(right)) for name, right in rights.items()}
    bundles |= {"real": tiny_bundle, "oracle refiner": scripted_bundle(story.script(rights["wrong"], refiner=True))}
    opened = {name: Runtime.open(path, num_threads=1, prefill_chunk=16) for name, path in bundles.items()}
    yield opened
    for runtime in opened.values():
        runtime.close()


def generate(runtime: Runtime, prompt: Sequence[int], num_tokens: int, **params: Any) -> Result:
    params = {"ignore_eos": True, **params}
    return runtime.generate(prompt, SamplingParams(max_new_tokens=num_tokens, **params)).result()


def simulate(
    num_right: Sequence[int], num_prompt: int, num_tokens: int, most: int = BLOCK - 1
) -> list[tuple[int, int]]:
    """Drafted and accepted tokens of each verify step, by the definition: nothing of the runtime is used."""
    steps, anchor = [], num_prompt  # the prefill gives the token at this position
    while anchor < num_prompt + num_tokens - 1:
        drafted = min(most, num_prompt + num_tokens - 2 - anchor)
        steps.append((drafted, min(num_right[anchor], drafted)))
        anchor += steps[-1][1] + 1
    return steps


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", range(4))
def test_every_mode_writes_what_transformers_writes(
    runtimes: dict[str, Runtime], stories: Any, which: int, mode: str
) -> None:
    story = stories[which]
    result = generate(runtimes["real"], story.ids[: story.start], 100, mode=mode)
    assert list(result.token_ids) == story.expected(story.start, 100)
    assert result.finish_reason == "length"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_prompt", [1, 2, BLOCK - 1, BLOCK, 16, 17, 100, 255, 256, 257, 400, 520])
def test_point_13_prompts_of_any_length(runtimes: dict[str, Runtime], stories: Any, num_prompt: int, mode: str) -> None:
    """Shorter than a block, exactly a prefill chunk and one more, beyond window and first cache capacity."""
    prompt = stories[0].ids[:num_prompt]
    for name in ("real", "mixed"):
        result = generate(runtimes[name], prompt, 20, mode=mode)
        assert list(result.token_ids) == stories[0].expected(num_prompt, 20)


@pytest.mark.parametrize(("name", "mode"), [("real", "target"), ("mixed", "dflash"), ("real", "xpress")])
def test_answers_outgrow_the_first_two_cache_capacities(
    runtimes: dict[str, Runtime], stories: Any, name: str, mode: str
) -> None:
    num_tokens = len(stories[0].ids) - 1
    assert num_tokens > 512
    assert list(generate(runtimes[name], stories[0].ids[:1], num_tokens, mode=mode).token_ids) == stories[0].expected(
        1, num_tokens
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, BLOCK, BLOCK + 1, 33])
def test_point_7_any_budget(runtimes: dict[str, Runtime], stories: Any, num_tokens: int, mode: str) -> None:
    for name in ("real", "right", "wrong", "mixed"):
        result = generate(runtimes[name], stories[0].ids[:30], num_tokens, mode=mode)
        assert list(result.token_ids) == stories[0].expected(30, num_tokens)
        assert result.stats.num_generated_tokens == num_tokens


@pytest.mark.parametrize("num_draft_tokens", range(BLOCK))
def test_any_number_of_passes_and_drafts_gives_the_same_tokens(
    runtimes: dict[str, Runtime], stories: Any, num_draft_tokens: int
) -> None:
    for name in ("real", "three"):
        for refine_passes in range(BLOCK):
            result = generate(
                runtimes[name],
                stories[0].ids[:30],
                12,
                mode="xpress",
                refine_passes=refine_passes,
                num_draft_tokens=num_draft_tokens,
            )
            assert list(result.token_ids) == stories[0].expected(30, 12)
            assert len(result.stats.acceptance_histogram) <= num_draft_tokens + 1


@settings(max_examples=80, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_request_is_lossless_and_counted_right(
    runtimes: dict[str, Runtime], stories: Any, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["real", "right", "wrong", "mixed", "three"]))
    mode = data.draw(st.sampled_from(MODES))
    num_prompt = data.draw(st.integers(1, 150))
    num_tokens = data.draw(st.integers(1, 60))
    most = data.draw(st.integers(0, BLOCK - 1))
    passes = data.draw(st.integers(0, BLOCK - 1))
    prompt = stories[0].ids[:num_prompt]
    result = generate(runtimes[name], prompt, num_tokens, mode=mode, num_draft_tokens=most, refine_passes=passes)
    stats, histogram = result.stats, result.stats.acceptance_histogram
    assert list(result.token_ids) == stories[0].expected(num_prompt, num_tokens)
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (num_prompt, num_tokens)
    assert sum(histogram) == stats.num_verify_steps
    assert sum(accepted * steps for accepted, steps in enumerate(histogram)) == stats.num_accepted
    assert num_tokens == 1 + stats.num_accepted + stats.num_verify_steps
    if stats.num_verify_steps:
        assert stats.tau == pytest.approx((num_tokens - 1) / stats.num_verify_steps)
    assert bool(stats.num_refine_passes) == (mode == "xpress" and passes > 0 and stats.num_draft_tokens > 0)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_acceptance_is_that_of_the_script(runtimes: dict[str, Runtime], stories: Any, data: st.DataObject) -> None:
    num_right = np.random.default_rng(0).integers(0, BLOCK, len(stories[0].ids)).tolist()
    num_prompt = data.draw(st.integers(1, 150))
    num_tokens = data.draw(st.integers(1, 60))
    most = data.draw(st.integers(0, BLOCK - 1))
    prompt = stories[0].ids[:num_prompt]
    stats = generate(runtimes["mixed"], prompt, num_tokens, mode="dflash", num_draft_tokens=most).stats
    steps = simulate(num_right, num_prompt, num_tokens, most)
    accepted = Counter(accepted for _, accepted in steps)
    assert stats.num_verify_steps == len(steps)
    assert stats.num_draft_tokens == sum(drafted for drafted, _ in steps)
    assert stats.acceptance_histogram == [accepted[n] for n in range(max(accepted, default=-1) + 1)]


@pytest.mark.parametrize("num_right", [1, 2, 5])
def test_point_17_k_right_drafts_give_tau_k_plus_1(scripted_bundle: Any, stories: Any, num_right: int) -> None:
    script = stories[0].script([num_right] * len(stories[0].ids))
    num_tokens = 1 + 4 * (num_right + 1)
    with Runtime.open(scripted_bundle(script), num_threads=1) as runtime:
        result = generate(runtime, stories[0].ids[:50], num_tokens, mode="dflash")
    assert list(result.token_ids) == stories[0].expected(50, num_tokens)
    # the last step may not draft more than the budget allows: k tokens, all right
    assert result.stats.acceptance_histogram == [0] * num_right + [4]
    assert result.stats.tau == num_right + 1


@pytest.mark.parametrize("mode", ["dflash", "xpress"])
def test_point_17_right_drafts_fill_every_block(runtimes: dict[str, Runtime], stories: Any, mode: str) -> None:
    result = generate(runtimes["right"], stories[0].ids[:50], 1 + 6 * BLOCK, mode=mode)
    assert list(result.token_ids) == stories[0].expected(50, 1 + 6 * BLOCK)
    assert result.stats.acceptance_histogram == [0] * (BLOCK - 1) + [6]
    assert result.stats.tau == BLOCK


def test_point_17_wrong_drafts_cost_nothing_but_time(runtimes: dict[str, Runtime], stories: Any) -> None:
    result = generate(runtimes["wrong"], stories[0].ids[:50], 40, mode="dflash")
    assert list(result.token_ids) == stories[0].expected(50, 40)
    assert result.stats.acceptance_histogram == [39]
    assert result.stats.tau == 1
    assert result.text == generate(runtimes["right"], stories[0].ids[:50], 40, mode="dflash").text


@pytest.mark.parametrize("passes", range(BLOCK))
def test_each_refine_pass_fixes_one_more_slot(runtimes: dict[str, Runtime], stories: Any, passes: int) -> None:
    """A perfect refiner on drafts that are all wrong: after k passes the first k are right, never fewer.

    It sees the two tokens before a slot, so this also holds `anchor` and `previous` to what they should be.
    """
    num_steps = 3
    num_tokens = 1 + num_steps * (passes + 1)
    pairs = list(zip(stories[0].ids, stories[0].ids[1:], strict=False))
    occurs, span = Counter(pairs), 3 * BLOCK + 3
    at = next(n for n in range(100, 500) if all(occurs[pair] == 1 for pair in pairs[n - 2 : n + span]))
    result = generate(runtimes["oracle refiner"], stories[0].ids[:at], num_tokens, mode="xpress", refine_passes=passes)
    assert list(result.token_ids) == stories[0].expected(at, num_tokens)
    assert result.stats.tau == passes + 1
    assert result.stats.num_refine_passes == num_steps * passes


def test_refining_ends_when_a_pass_changes_nothing(runtimes: dict[str, Runtime], stories: Any) -> None:
    result = generate(runtimes["right"], stories[0].ids[:50], 1 + 4 * BLOCK, mode="xpress", refine_passes=BLOCK - 1)
    assert result.stats.num_refine_passes == result.stats.num_verify_steps == 4


@dataclasses.dataclass
class Step:
    """One drafted block as the loop saw it: copies of what the engines read and wrote."""

    position: int
    anchor: int
    previous: int
    drafted: list[int]
    refined: list[int]
    draft_hidden: torch.Tensor
    draft_logits: torch.Tensor


@pytest.fixture
def record_steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """A list that every block drafted from now on is added to."""
    steps: list[Step] = []
    refine: Callable[..., Any] = Decoder.refine

    def recorded(decoder: Decoder, slots: Any, drafts: Any) -> Any:
        drafter, (slot,), (length,) = decoder.memory.drafter, slots, drafts.lengths
        if not length:
            return refine(decoder, slots, drafts)
        drafted = drafts.tokens[0, :length].tolist()
        hidden, logits = (torch.from_numpy(a.copy()) for a in (drafter.draft_hidden, drafter.draft_logits))
        refined = refine(decoder, slots, drafts)
        tokens = refined.tokens[0, :length].tolist()
        position = int(drafter.write_index[0])
        steps.append(Step(position, slot.anchor, slot.previous, drafted, tokens, hidden, logits))
        return refined

    monkeypatch.setattr(Decoder, "refine", recorded)
    return steps


def test_as_many_passes_as_drafts_equal_left_to_right_decoding(
    runtimes: dict[str, Runtime], tiny_bundle: Any, stories: Any, record_steps: list[Step]
) -> None:
    """Left to right: one slot at a time, each from the tokens before it; later slots hold garbage meanwhile."""
    from xpress_export.exporter.parity import GraphRunner

    generate(runtimes["real"], stories[0].ids[:50], 25, mode="xpress", refine_passes=BLOCK - 1)
    graph = GraphRunner(tiny_bundle / "graphs" / "refiner.onnx")
    changed = 0
    for step in record_steps:
        tokens = torch.zeros(1, BLOCK - 1, dtype=torch.int64)
        for slot in range(BLOCK - 1):
            out = graph(
                draft_logits=step.draft_logits,
                draft_hidden=step.draft_hidden,
                draft_tokens=tokens,
                anchor=torch.tensor([step.anchor]),
                previous=torch.tensor([step.previous]),
            )
            tokens[0, slot] = out["refined_tokens"][0, slot]
        assert step.refined == tokens[0, : len(step.refined)].tolist()
        changed += step.refined != step.drafted
    assert changed > len(record_steps) / 2, "a refiner that changes nothing tests nothing"


def context_features(model: Any, ids: Sequence[int], taps: Sequence[int]) -> torch.Tensor:
    """Tapped hidden states of every token, [1, S, K*E], as transformers counts them."""
    with torch.inference_mode():
        states = model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    return torch.cat([states[i + 1] for i in taps], dim=-1)


@pytest.mark.parametrize("name", ["real", "mixed"])
def test_points_1_to_5_drafts_are_those_of_a_drafter_without_a_cache(
    runtimes: dict[str, Runtime], tiny_trio: Any, stories: Any, record_steps: list[Step], name: str
) -> None:
    """At every step, redraft from nothing: transformers' features of exactly the tokens before the anchor."""
    generate(runtimes[name], stories[0].ids[:45], 40, mode="dflash")
    module = tiny_trio.drafter_module
    features = context_features(tiny_trio.model, stories[0].ids[:100], module.config.target_layer_ids)
    for step in record_steps:
        assert stories[0].ids[step.position] == step.anchor
        assert stories[0].ids[step.position - 1] == step.previous
        block = torch.full((1, BLOCK), module.config.mask_token_id)
        block[0, 0] = step.anchor
        cache = [torch.zeros(1, 2, step.position, 16) for _ in range(4)]
        position = torch.tensor([step.position])
        with torch.inference_mode():
            hidden, logits, _ = module(features[:, : step.position], position, torch.tensor([0]), block, cache)
        assert_close(step.draft_hidden, hidden)
        if name == "real":
            assert_close(step.draft_logits, logits)
            assert step.drafted == logits[0, : len(step.drafted)].argmax(-1).tolist()
    assert len({step.position for step in record_steps}) == len(record_steps) > 5


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    error = (got - expected).abs()
    assert got.shape == expected.shape
    assert error.norm() <= ROUNDING * expected.norm(), f"max {error.max():.3g}, mean {error.mean():.3g}"


@pytest.mark.parametrize("name", ["real", "right", "mixed"])
def test_points_2_3_4_8_caches_hold_committed_rows(
    runtimes: dict[str, Runtime], tiny_trio: Any, stories: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last step the target has every token but the last, and the drafter what the last draft saw."""
    num_prompt, num_tokens = 45, 40
    reset, rows = Slots.reset, []

    def recorded(memory: Slots, index: int) -> None:
        rows.append((memory, *(int(part.write_index[index]) for part in (memory.target, memory.drafter))))
        reset(memory, index)

    monkeypatch.setattr(Slots, "reset", recorded)
    generate(runtimes[name], stories[0].ids[:num_prompt], num_tokens, mode="dflash")
    memory, num_rows, drafted = rows[-1]
    assert num_rows == num_prompt + num_tokens - 1
    ids = torch.tensor([stories[0].ids[:num_rows]])
    with torch.inference_mode():
        cache = tiny_trio.model(ids, use_cache=True).past_key_values
    for i, layer in enumerate(cache.layers):
        for kind, expected in (("key", layer.keys), ("value", layer.values)):
            got = memory.target.cache._arrays[f"past_{kind}_{i}"][:1, :, :num_rows]
            assert_close(torch.from_numpy(got), expected)
    module = tiny_trio.drafter_module
    features = context_features(tiny_trio.model, stories[0].ids[:drafted], module.config.target_layer_ids)
    empty = [torch.zeros(1, 2, drafted, 16) for _ in range(4)]
    with torch.inference_mode():
        *_, present = module(features, torch.tensor([drafted]), torch.tensor([0]), torch.tensor([[1, 1]]), empty)
    for i, expected in enumerate(present):
        got = memory.drafter.cache._arrays[f"past_{('key', 'value')[i % 2]}_{i // 2}"][:1, :, :drafted]
        assert_close(torch.from_numpy(got), expected)
    assert num_rows - BLOCK <= drafted < num_rows


def test_times_add_up(runtimes: dict[str, Runtime], stories: Any) -> None:
    result = generate(runtimes["mixed"], stories[0].ids[:50], 60, mode="xpress")
    stats, told = result.stats, result.stats.to_dict()
    assert min(stats.prefill_ms, stats.draft_ms, stats.refine_ms, stats.verify_ms, stats.host_ms) > 0
    parts = (stats.draft_ms, stats.refine_ms, stats.verify_ms, stats.stall_ms, stats.host_ms)
    assert stats.decode_ms == pytest.approx(sum(parts))
    assert 0 <= stats.queue_ms < stats.ttft_ms
    assert stats.stall_ms == 0
    assert stats.tokens_per_s == pytest.approx(59_000 / stats.decode_ms)
    assert json.loads(json.dumps(told)) == told
    assert told["tau"] == stats.tau
    assert {"num_verify_steps", "num_draft_tokens", "num_accepted", "acceptance_histogram"} < told.keys()


def test_point_6_the_mask_id_is_an_ordinary_token_of_the_answer(runtimes: dict[str, Runtime], stories: Any) -> None:
    story, mask = stories[0], runtimes["right"].manifest.draft.mask_token_id
    at = story.ids.index(mask, 12)
    for name in ("real", "right", "wrong"):
        for mode in MODES:
            result = generate(runtimes[name], story.ids[: at - 10], 24, mode=mode)
            assert list(result.token_ids) == story.expected(at - 10, 24)
            assert mask in result.token_ids
