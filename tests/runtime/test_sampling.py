"""Sampling is that of the target: the decoder's own loop, over engines that are tables, against exact probabilities.

Distances are total variation between the pairs of tokens that many seeds gave and their exact probabilities. The
floor is the distance of as many draws from the exact probabilities themselves; broken rules must lie far above it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpress_export.runtime import Runtime, SamplingParams, Stats
from xpress_export.runtime.decode import Decoder, Drafts, Slot
from xpress_export.runtime.sampling import Distribution, Sampler, Uniforms, distribution, log_probabilities

V, NUM_DRAFTS, NUM_SEEDS = 5, 3, 2000
PROMPT = [3, 1, 3]
_RNG = np.random.default_rng(0)
TARGET = _RNG.normal(0, 1.5, (V, V)).astype(np.float32)  # logits of the token after each token
DRAFTER = (_RNG.normal(0, 1.2, (NUM_DRAFTS, V, V)) + TARGET / 2).astype(np.float32)  # per slot, after each anchor
REFINER = (0.6 * TARGET + _RNG.normal(0, 0.8, (V, V))).astype(np.float32)  # after the token before the slot


class TableTarget:
    """Predicts from the last token alone; counts rows as the real one does."""

    def __init__(self) -> None:
        self.write_index = np.zeros(NUM_SEEDS, np.int64)

    def run(self, first: int, input_ids: np.ndarray) -> None:
        self.logits = TARGET[input_ids]
        self.next_token = self.logits.argmax(-1)
        self.target_hidden = np.zeros((*input_ids.shape, 1), np.float32)


class TableDrafter:
    """`ids`: token of each row of its head."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def run(self, first: int, anchors: np.ndarray, num_block: int) -> np.ndarray:
        self.draft_logits = DRAFTER[: num_block - 1, anchors].transpose(1, 0, 2)[..., self.ids]
        return self.ids[self.draft_logits.argmax(-1)]

    def wait(self, slot: int, rows: np.ndarray) -> None: ...

    def flush_longer_than(self, most: int) -> None: ...


class TableRefiner:
    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def run(self, tokens: np.ndarray, anchors: np.ndarray, previous: np.ndarray) -> np.ndarray:
        before = np.concatenate((anchors[:, None], tokens[:, :-1]), axis=1)
        self.logits = REFINER[before][..., self.ids]
        return self.ids[self.logits.argmax(-1)]


def pairs_drawn(
    params: dict[str, Any], refine_passes: int, decoder: type[Decoder] = Decoder, ids: Sequence[int] = range(V)
) -> np.ndarray:
    """Share of each pair of tokens after the prompt, [V, V], over NUM_SEEDS seeds in one batch."""
    rows = np.array(ids)
    memory: Any = SimpleNamespace(target=TableTarget(), drafter=TableDrafter(rows), refiner=TableRefiner(rows))
    slots = [
        Slot(
            index=seed,
            speculates=True,
            sampler=Sampler(SamplingParams(seed=seed, **params), PROMPT, V),
            stats=Stats(),
            num_left=NUM_DRAFTS + 1,
            num_drafts=NUM_DRAFTS,
            refine_passes=refine_passes,
            anchor=PROMPT[-1],
            previous=PROMPT[-2],
        )
        for seed in range(NUM_SEEDS)
    ]
    loop, found = decoder(memory, 1, rows), [[] for _ in slots]
    while short := [slot for slot in slots if len(found[slot.index]) < 2]:
        for slot, tokens in zip(slots, loop.cycle(slots), strict=True):
            assert not isinstance(tokens, Exception), tokens
            found[slot.index] += tokens
        assert len(short) <= NUM_SEEDS
    counts = np.zeros((V, V))
    np.add.at(counts, tuple(np.array([tokens[:2] for tokens in found]).T), 1)
    return counts / NUM_SEEDS


def shaped(logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """The documented order of processors, one token at a time, in plain Python."""
    values = [float(x) + params.logit_bias.get(i, 0) for i, x in enumerate(logits)]
    for i in range(len(values)):
        if i in prompt or i in answer:
            values[i] = (
                values[i] / params.repetition_penalty if values[i] > 0 else values[i] * params.repetition_penalty
            )
        values[i] -= params.presence_penalty * (i in answer) + params.frequency_penalty * list(answer).count(i)
    if params.logits_processor:
        values = list(params.logits_processor([*prompt, *answer], np.array(values, np.float32)))
    weights = [np.exp((x - max(values)) / params.temperature) for x in values]
    total = sum(weights)
    kept = [(w / total, i) for i, w in enumerate(weights) if w >= params.min_p * max(weights)]
    kept = sorted(kept, reverse=True)[: params.top_k]
    total = sum(p for p, _ in kept)
    result, reached = np.zeros(len(values)), 0.0
    for p, i in kept:
        if reached < params.top_p * total:
            result[i] = p
            reached += p
    return result / result.sum()


def pairs_exact(params: dict[str, Any]) -> np.ndarray:
    given = SamplingParams(**params)
    first = shaped(TARGET[PROMPT[-1]], given, PROMPT, [])
    return np.array([first[t] * shaped(TARGET[t], given, PROMPT, [t]) for t in range(V)])


def distance(shares: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(shares - exact).sum() / 2)


def floor(exact: np.ndarray) -> float:
    """The largest of 60 distances of NUM_SEEDS draws from the exact probabilities."""
    draws = np.random.default_rng(1).multinomial(NUM_SEEDS, exact.reshape(-1), size=60) / NUM_SEEDS
    return max(distance(draw, exact.reshape(-1)) for draw in draws)


def no_repeat(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
    logits[ids[-1]] -= 2
    return logits


PROCESSORS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.5": {"temperature": 0.5},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.2, "top_p": 0.7},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "repetition": {"temperature": 1.0, "repetition_penalty": 1.8},
    "presence": {"temperature": 1.0, "presence_penalty": 1.5},
    "frequency": {"temperature": 1.0, "frequency_penalty": -1.5},
    "bias": {"temperature": 1.0, "logit_bias": {0: 2.0, 4: -3.0}},
    "own processor": {"temperature": 1.0, "logits_processor": no_repeat},
    "all": {
        "temperature": 1.3,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {2: 1.0},
    },
}


@pytest.mark.parametrize("draft_sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_point_11_pairs_of_tokens_are_distributed_as_the_targets(name: str, draft_sampling: str) -> None:
    params = {**PROCESSORS[name], "draft_sampling": draft_sampling}
    exact = pairs_exact(params)
    assert distance(pairs_drawn(params, 1), exact) <= 1.2 * floor(exact)


@pytest.mark.parametrize("refine_passes", [0, 2, 3])
def test_any_number_of_passes_keeps_the_distribution(refine_passes: int) -> None:
    params = {"temperature": 1.0, "draft_sampling": "sampled"}
    exact = pairs_exact(params)
    assert distance(pairs_drawn(params, refine_passes), exact) <= 1.2 * floor(exact)


@pytest.mark.parametrize("draft_sampling", ["greedy", "sampled"])
def test_a_reduced_draft_vocabulary_keeps_the_distribution(draft_sampling: str) -> None:
    """Rows in an order of their own, most tokens missing: those can only be the target's own choice."""
    params = {"temperature": 1.0, "draft_sampling": draft_sampling}
    exact = pairs_exact(params)
    assert distance(pairs_drawn(params, 1, ids=[4, 0, 2]), exact) <= 1.2 * floor(exact)


class RescoresTheFinalBlock(Decoder):
    """Broken: q of another pass than the one that produced the tokens."""

    def refine(self, slots: Sequence[Slot], drafts: Drafts) -> Drafts:
        refined = super().refine(slots, drafts)
        anchors, previous = np.array([(slot.anchor, slot.previous) for slot in slots]).T
        logits_of = self.memory.refiner
        assert logits_of is not None
        logits_of.run(refined.tokens, anchors, previous)
        for slot in slots:
            assert slot.sampler is not None
            refined.q[slot.index] = slot.sampler.draw_draft(logits_of.logits[slot.index], np.arange(V))
        return refined


class JudgesGreedyDraftsByRatio(Decoder):
    """Broken: p/q for tokens that were not drawn from q."""

    def refine(self, slots: Sequence[Slot], drafts: Drafts) -> Drafts:
        refined = super().refine(slots, drafts)
        for slot in slots:
            refined.tokens[slot.index] = [q.ids[q.probs.argmax()] for q in refined.q[slot.index]]
        return refined


@pytest.mark.parametrize("broken", [RescoresTheFinalBlock, JudgesGreedyDraftsByRatio])
def test_a_broken_rule_is_seen(broken: type[Decoder]) -> None:
    params = {"temperature": 1.0, "draft_sampling": "sampled"}
    exact = pairs_exact(params)
    assert distance(pairs_drawn(params, 1, broken), exact) > 2 * floor(exact)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_the_shaped_distribution_is_the_documented_one(data: st.DataObject) -> None:
    logits = np.array(data.draw(st.lists(st.integers(-40, 40), min_size=2, max_size=30, unique=True)), np.float32) / 7
    params = SamplingParams(
        temperature=data.draw(st.floats(0.2, 3)),
        top_k=data.draw(st.none() | st.integers(1, 35)),
        top_p=data.draw(st.floats(0.05, 1)),
        min_p=data.draw(st.floats(0, 0.9)),
    )
    found, exact = distribution(logits, params), shaped(logits, params, [], [])
    got = np.array([found.prob(i) for i in range(logits.size)])
    assert list(found.ids) == list(np.flatnonzero(exact))
    np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-7)


def test_a_nucleus_larger_than_the_first_guess() -> None:
    """Flat logits need more tokens than are looked at first."""
    logits = np.linspace(0, 1, 5000, dtype=np.float32)
    found = distribution(logits, SamplingParams(temperature=1.0, top_p=0.9))
    weights = np.exp(logits.astype(np.float64))[::-1]
    assert found.ids.size == int(np.searchsorted(np.cumsum(weights), 0.9 * weights.sum())) + 1


def test_drawing_inverts_the_cumulative_probabilities() -> None:
    found = Distribution(np.array([2, 5, 9]), np.array([1.0, 2.0, 1.0]))
    assert [found.draw(u) for u in (0, 0.249, 0.251, 0.749, 0.751, 0.9999999999999999)] == [2, 2, 5, 5, 9, 9]
    assert [found.prob(i) for i in (2, 5, 9, 3, 10)] == [0.25, 0.5, 0.25, 0, 0]


def test_random_numbers_are_those_of_seed_stream_and_position() -> None:
    forward = [Uniforms(7, 1)[i] for i in range(200)]
    again = Uniforms(7, 1)
    assert [again[i] for i in reversed(range(200))] == forward[::-1]
    assert len({Uniforms(seed, stream)[0] for seed in (0, 7, 2**64 - 1) for stream in range(3)}) == 9
    assert 0.4 < np.mean(forward) < 0.6


def test_log_probabilities() -> None:
    row = np.array([1, 3, 2, 3], np.float32)
    expected = row - np.log(np.exp(row).sum())
    found = log_probabilities(row, 2, 3)
    assert found.token_id == 2
    assert found.logprob == pytest.approx(expected[2], abs=1e-6)
    assert found.top == tuple((i, pytest.approx(expected[i], abs=1e-6)) for i in (1, 3, 2))
    assert log_probabilities(row, 0, 0).top == ()
    assert [i for i, _ in log_probabilities(row, 0, 20).top] == [1, 3, 2, 0]


# Through the runtime


@pytest.fixture(scope="module")
def runtime(tiny_bundle: Path) -> Any:
    with Runtime.open(tiny_bundle, num_threads=1) as opened:
        yield opened


def sample(runtime: Runtime, prompt: Sequence[int], **params: Any) -> list[int]:
    given = {"ignore_eos": True, "max_new_tokens": 24, "temperature": 1.0, **params}
    return list(runtime.generate(prompt, SamplingParams(**given)).result().token_ids)


def test_a_seed_gives_one_answer_in_every_mode_and_company(runtime: Runtime, stories: Any) -> None:
    prompt = stories[0].ids[:30]
    for name, params in PROCESSORS.items():
        alone = sample(runtime, prompt, seed=5, mode="target", **params)
        assert alone != sample(runtime, prompt, seed=6, mode="target", **params) or name == "temperature 0.5"
        company = [
            runtime.generate(
                stories[i].ids[: 20 + i], SamplingParams(max_new_tokens=30, temperature=2.0, mode=mode, ignore_eos=True)
            )
            for i, mode in enumerate(("target", "xpress", None))
        ]
        for mode in ("dflash", "xpress", None):
            assert sample(runtime, prompt, seed=5, mode=mode, **params) == alone, (name, mode)
        for other in company:
            other.cancel()


def test_sampled_drafts_repeat_with_their_seed(runtime: Runtime, stories: Any) -> None:
    prompt = stories[0].ids[:30]
    for mode in ("dflash", "xpress", None):
        first, again = (sample(runtime, prompt, seed=5, mode=mode, draft_sampling="sampled") for _ in range(2))
        assert first == again


def test_without_a_seed_one_is_drawn_and_told(runtime: Runtime, stories: Any) -> None:
    params = SamplingParams(max_new_tokens=20, temperature=1.0, ignore_eos=True)
    results = [runtime.generate(stories[0].ids[:30], params).result() for _ in range(2)]
    assert results[0].token_ids != results[1].token_ids
    again = sample(runtime, stories[0].ids[:30], max_new_tokens=20, seed=results[0].stats.seed)
    assert tuple(again) == results[0].token_ids
    assert runtime.generate([1], SamplingParams(max_new_tokens=1)).result().stats.seed is None


@pytest.mark.parametrize("draft_sampling", ["greedy", "sampled"])
def test_first_tokens_of_a_model_are_distributed_as_transformers_says(
    runtime: Runtime, tiny_trio: Any, stories: Any, draft_sampling: str
) -> None:
    import torch

    prompt, num_seeds = stories[0].ids[:20], 400
    params = SamplingParams(temperature=0.7, top_k=3)
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(2):
        longer = {}
        for answer, prob in exact.items():
            with torch.inference_mode():
                logits = tiny_trio.model(torch.tensor([[*prompt, *answer]])).logits[0, -1].numpy()
            for token, p in enumerate(shaped(logits, params, prompt, answer)):
                longer |= {(*answer, token): prob * p} if p > 0 else {}
        exact = longer
    handles = [
        runtime.submit(
            prompt,
            SamplingParams(
                temperature=0.7,
                top_k=3,
                seed=seed,
                max_new_tokens=2,
                ignore_eos=True,
                mode="xpress",
                draft_sampling=draft_sampling,
            ),
        )
        for seed in range(num_seeds)
    ]
    drawn = [handle.result().token_ids for handle in handles]
    assert set(drawn) <= exact.keys()
    probs = np.array([*exact.values()])
    shares = np.array([drawn.count(pair) for pair in exact]) / num_seeds
    floors = np.random.default_rng(2).multinomial(num_seeds, probs, size=60) / num_seeds
    assert distance(shares, probs) <= 1.2 * max(distance(draw, probs) for draw in floors)


def test_greedy_with_penalties_equals_plain_decoding_and_differs_from_greedy(runtime: Runtime, stories: Any) -> None:
    prompt = stories[0].ids[:30]
    params = {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "max_new_tokens": 60}
    plain = sample(runtime, prompt, mode="target", **params)
    assert plain != stories[0].expected(30, 60)
    assert all(sample(runtime, prompt, mode=mode, **params) == plain for mode in ("dflash", "xpress", None))


def test_a_processor_is_called_once_per_token_in_order(scripted_bundle: Any, stories: Any) -> None:
    """Also where a draft is accepted, and never for tokens that were drafted in vain."""
    bundle = scripted_bundle(stories[0].script([i % 8 for i in range(len(stories[0].ids))]))
    calls: list[int] = []

    def count(ids: Sequence[int], logits: np.ndarray) -> np.ndarray:
        calls.append(len(ids))
        return logits

    with Runtime.open(bundle, num_threads=1) as opened:
        params = SamplingParams(max_new_tokens=60, ignore_eos=True, mode="dflash", logits_processor=count)
        result = opened.generate(stories[0].ids[:30], params).result()
    assert list(result.token_ids) == stories[0].expected(30, 60)
    assert result.stats.tau > 3
    assert calls == list(range(30, 90))


def test_logprobs_are_those_of_transformers(runtime: Runtime, tiny_trio: Any, stories: Any) -> None:
    import torch

    prompt, params = stories[0].ids[:30], {"max_new_tokens": 20, "logprobs": 4, "ignore_eos": True}
    for mode, temperature in itertools.product(("target", "xpress"), (0.0, 1.5)):
        generation = runtime.generate(prompt, SamplingParams(mode=mode, temperature=temperature, seed=1, **params))
        chunks = list(generation)
        result = generation.result()
        assert [entry for chunk in chunks for entry in chunk.logprobs] == list(result.logprobs)
        assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
        with torch.inference_mode():
            logits = tiny_trio.model(torch.tensor([[*prompt, *result.token_ids]])).logits[0, 29:-1]
        expected = logits.log_softmax(-1)
        for row, entry in zip(expected, result.logprobs, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
            assert [i for i, _ in entry.top] == row.topk(4).indices.tolist()
            assert [p for _, p in entry.top] == pytest.approx(row.topk(4).values.tolist(), abs=1e-3)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.1}, "temperature must be between 0 and 100, got -0.1"),
    ({"temperature": float("nan")}, "temperature must be a number, got nan"),
    ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ({"temperature": True}, "temperature must be a number, got True"),
    ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0"),
    ({"top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
    ({"top_k": 0}, "top_k must be at least 1, got 0"),
    ({"top_k": 2.5}, "top_k must be an integer, got 2.5"),
    ({"min_p": 2}, "min_p must be between 0 and 1, got 2"),
    ({"seed": -1}, "seed must be at least 0, got -1"),
    ({"seed": 2**64}, f"seed must be at most {2**64 - 1}, got {2**64}"),
    ({"repetition_penalty": 0}, "repetition_penalty must be above 0 and at most 100, got 0"),
    ({"presence_penalty": 2.5}, "presence_penalty must be between -2 and 2, got 2.5"),
    ({"frequency_penalty": -3}, "frequency_penalty must be between -2 and 2, got -3"),
    ({"logit_bias": {-1: 0}}, "logit_bias has the key -1, which is no token id"),
    ({"logit_bias": {"1": 0}}, "logit_bias has the key '1', which is no token id"),
    ({"logit_bias": {1: 101}}, "logit_bias of token 1 must be a number between -100 and 100, got 101"),
    ({"logit_bias": [1]}, "logit_bias must map token ids to numbers, got list"),
    ({"logit_bias": {i: 0 for i in range(1025)}}, "logit_bias holds 1025 ids; at most 1024 are allowed"),
    ({"logprobs": 21}, "logprobs must be at most 20, got 21"),
    ({"draft_sampling": "mixed"}, "draft_sampling must be one of greedy, sampled, got 'mixed'"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids must be a list of token ids, got [1.5]"),
    ({"stop_token_ids": range(300)}, "stop_token_ids holds 300 ids; at most 256 are allowed"),
    ({"stop": "end"}, "stop must be a list of strings, got str"),
    ({"stop": ["x"] * 17}, "stop holds 17 strings; at most 16 are allowed"),
    ({"stop": ["a", ""]}, "stop[1] has 0 characters; it must have 1 to 256"),
    ({"stop": ["\ud800"]}, "stop[0] holds a lone surrogate at character 0, which is not valid Unicode text"),
    ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
    ({"logits_processor": 3}, "logits_processor must be callable"),
]


@pytest.mark.parametrize(("params", "message"), WRONG, ids=[json.dumps(case[1])[:40] for case in WRONG])
def test_wrong_parameters_name_their_field(params: dict[str, Any], message: str) -> None:
    from xpress_export.errors import RequestError

    with pytest.raises(RequestError) as caught:
        SamplingParams(**params)
    assert str(caught.value) == message
    assert caught.value.field is not None
    assert caught.value.field.partition("[")[0] == next(iter(params))


def test_a_bias_for_a_token_that_does_not_exist_is_refused(runtime: Runtime) -> None:
    from xpress_export.errors import RequestError

    with pytest.raises(RequestError, match="logit_bias token 0 is 99999; the vocabulary has ids 0 to"):
        runtime.generate([1], SamplingParams(logit_bias={99999: 1.0}))
