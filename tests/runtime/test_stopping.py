"""Where a generation ends: stop tokens and strings at every offset of a block, budgets, the end of the context.

Every case runs with drafts that are all right (whole blocks are committed at once, so the end lies inside one),
with mixed ones, and without a drafter, and must give the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from xpress_export.errors import RequestError
from xpress_export.runtime import Result, Runtime, SamplingParams

BLOCK = 8
NAMES = ("right", "mixed", "plain")


@pytest.fixture(scope="module")
def runtimes(tiny_bundle: Any, scripted_bundle: Any, stories: Any) -> Iterator[dict[str, Runtime]]:
    story, length = stories[0], len(stories[0].ids)
    mixed = np.random.default_rng(0).integers(0, BLOCK, length).tolist()
    bundles = {
        "right": scripted_bundle(story.script([BLOCK] * length)),
        "mixed": scripted_bundle(story.script(mixed)),
        "plain": tiny_bundle,
    }
    opened = {name: Runtime.open(path, num_threads=1, prefill_chunk=16) for name, path in bundles.items()}
    yield opened
    for runtime in opened.values():
        runtime.close()


@pytest.fixture(scope="module")
def text_of(tiny_bundle: Any) -> Any:
    """What the tokenizers library makes of token ids."""
    tokenizer = Tokenizer.from_file(str(tiny_bundle / "tokenizer" / "tokenizer.json"))
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def generate(runtimes: dict[str, Runtime], name: str, prompt: Sequence[int], **params: Any) -> Result:
    mode = "target" if name == "plain" else "dflash"
    generation = runtimes[name].generate(prompt, SamplingParams(mode=mode, **params))
    chunks = list(generation)
    assert "".join(chunk.text for chunk in chunks) == generation.text
    assert [token for chunk in chunks for token in chunk.token_ids] == generation.token_ids
    return generation.result()


def first_distinct(ids: Sequence[int], start: int, num_tokens: int) -> int:
    """The first position from `start` on where `num_tokens` tokens are all different."""
    return next(n for n in range(start, len(ids)) if len(set(ids[n : n + num_tokens])) == num_tokens)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("offset", range(2 * BLOCK + 1))
def test_point_7_a_stop_token_at_every_offset(
    runtimes: dict[str, Runtime], stories: Any, text_of: Any, offset: int, name: str
) -> None:
    """0: the token of the prefill. Drafts all right: 1 to BLOCK - 1 are accepted drafts, BLOCK is the bonus."""
    at = first_distinct(stories[0].ids, 40, 2 * BLOCK + 1)
    expected = stories[0].expected(at, 2 * BLOCK + 1)
    result = generate(
        runtimes,
        name,
        stories[0].ids[:at],
        max_new_tokens=100,
        ignore_eos=True,
        stop_token_ids=(expected[offset],),
    )
    assert list(result.token_ids) == expected[: offset + 1]
    assert result.finish_reason == "stop"
    assert result.text == text_of(expected[:offset])
    assert result.stats.num_generated_tokens == offset + 1


@pytest.mark.parametrize("offset", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_the_models_own_stop_tokens_and_the_users_are_united(scripted_bundle: Any, stories: Any, offset: int) -> None:
    story = stories[0]
    at = first_distinct(story.ids, 40, 2 * BLOCK + 1)
    expected = story.expected(at, 2 * BLOCK + 1)
    own = sorted({expected[offset], expected[offset + 3]})
    bundle = scripted_bundle(story.script([BLOCK] * len(story.ids)), text={"stop_token_ids": own})
    with Runtime.open(bundle, num_threads=1) as runtime:

        def run(**params: Any) -> list[int]:
            request = SamplingParams(max_new_tokens=2 * BLOCK + 1, mode="dflash", **params)
            return list(runtime.generate(story.ids[:at], request).result().token_ids)

        assert run() == expected[: offset + 1]
        assert run(stop_token_ids=(expected[offset + 1],)) == expected[: offset + 1]
        assert run(ignore_eos=True) == expected
        assert run(ignore_eos=True, stop_token_ids=(expected[offset + 1],)) == expected[: offset + 2]


def test_a_stop_token_as_the_last_token_of_the_budget_is_a_stop(runtimes: dict[str, Runtime], stories: Any) -> None:
    at = first_distinct(stories[0].ids, 40, BLOCK)
    expected = stories[0].expected(at, BLOCK)
    for name in NAMES:
        for num_tokens in range(1, BLOCK + 1):
            stop = (expected[num_tokens - 1],)
            prompt, params = stories[0].ids[:at], {"max_new_tokens": num_tokens, "ignore_eos": True}
            result = generate(runtimes, name, prompt, stop_token_ids=stop, **params)
            assert (result.finish_reason, list(result.token_ids)) == ("stop", expected[:num_tokens])


def naive_stop(text_of: Any, ids: Sequence[int], stops: Sequence[str], stop_ids: Sequence[int] = ()) -> tuple[str, int]:
    """Text and number of tokens by the definition: the first token that is a stop, or completes a stop string."""
    for count in range(1, len(ids) + 1):
        if ids[count - 1] in stop_ids:
            return text_of(ids[: count - 1]), count
        text = text_of(ids[:count])
        starts = [text.index(stop) for stop in stops if stop in text]
        if starts:
            return text[: min(starts)], count
    return text_of(ids), len(ids)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1, 2, 5])
def test_point_16_stop_strings_at_every_offset(
    runtimes: dict[str, Runtime], stories: Any, text_of: Any, length: int, name: str
) -> None:
    """Every substring of an answer of three blocks, so also those that begin in one block and end in the next."""
    num_tokens, edge = 3 * BLOCK, 1 + BLOCK  # where the second block of right drafts begins
    num_prompt = next(n for n in range(20, 500) if text_of(stories[0].ids[n + edge - 2 :][:4]).isalnum())
    ids = stories[0].expected(num_prompt, num_tokens)
    text = text_of(ids)
    crossed, tried = 0, 0
    for start in range(len(text) - length + 1):
        stop = text[start : start + length]
        if "\ufffd" in stop:  # not a character yet when the text ends here
            continue
        expected, count = naive_stop(text_of, ids, [stop])
        request = {"max_new_tokens": num_tokens, "ignore_eos": True, "stop": (stop,)}
        result = generate(runtimes, name, stories[0].ids[:num_prompt], **request)
        assert (result.text, len(result.token_ids)) == (expected, count), stop
        assert list(result.token_ids) == ids[:count]
        assert result.finish_reason == "stop"
        began = next(n for n in range(count + 1) if len(text_of(ids[:n])) > len(expected))
        crossed += began <= edge < count
        tried += 1
    assert tried > 8
    assert crossed or length == 1


def test_point_16_of_two_stop_strings_in_one_token_the_earlier_wins(
    runtimes: dict[str, Runtime], stories: Any, text_of: Any
) -> None:
    at = next(n for n in range(20, 500) if len(text_of(stories[0].ids[n : n + 1]).strip()) > 4)
    piece = text_of(stories[0].ids[at : at + 1])
    for stop in ((piece[-2:], piece[-4:]), (piece[-4:], piece[-2:])):
        for name in NAMES:
            result = generate(runtimes, name, stories[0].ids[: at - 3], max_new_tokens=9, ignore_eos=True, stop=stop)
            assert result.text == text_of(stories[0].ids[at - 3 : at]) + piece[:-4]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_point_16_any_stop_strings_and_tokens(
    runtimes: dict[str, Runtime], stories: Any, text_of: Any, data: st.DataObject
) -> None:
    """Whatever ends it, drafting changes neither tokens, text nor reason, and the end is where it should be."""
    num_prompt = data.draw(st.integers(1, 150))
    num_tokens = data.draw(st.integers(1, 40))
    ids = stories[0].expected(num_prompt, num_tokens)
    text = text_of(ids)
    pieces = st.integers(0, len(text)).flatmap(
        lambda start: st.integers(start + 1, start + 9).map(lambda end: text[start:end] or "x")
    )
    stop = tuple(data.draw(st.lists(pieces, max_size=3)))
    tokens = tuple(data.draw(st.lists(st.sampled_from(ids), max_size=2)))
    request = {"max_new_tokens": num_tokens, "stop": stop, "stop_token_ids": tokens}
    request["ignore_eos"] = data.draw(st.booleans())
    results = [generate(runtimes, name, stories[0].ids[:num_prompt], **request) for name in NAMES]
    seen = {(result.text, result.token_ids, result.finish_reason) for result in results}
    assert len(seen) == 1
    got_text, got_ids, reason = seen.pop()
    assert list(got_ids) == ids[: len(got_ids)]
    assert not any(piece in got_text for piece in stop)
    assert reason == "stop" or len(got_ids) == num_tokens
    if not any("\ufffd" in piece for piece in stop):  # which a prefix shows where the whole has a character
        stop_ids = (*tokens, *(() if request["ignore_eos"] else (2,)))
        assert (got_text, len(got_ids)) == naive_stop(text_of, ids, stop, stop_ids)


@pytest.mark.parametrize("name", NAMES)
def test_text_of_a_whole_answer(runtimes: dict[str, Runtime], stories: Any, text_of: Any, name: str) -> None:
    """Hundreds of tokens, many of them parts of no valid character: the stream shows what one decode shows."""
    result = generate(runtimes, name, stories[0].ids[:20], max_new_tokens=300, ignore_eos=True)
    assert result.text == text_of(result.token_ids)
    assert result.text.count("\ufffd") > 20


@pytest.fixture(scope="module")
def small_context(scripted_bundle: Any, stories: Any) -> Iterator[Runtime]:
    """All drafts right, a context of 64."""
    bundle = scripted_bundle(stories[0].script([BLOCK] * len(stories[0].ids)), max_context=64)
    with Runtime.open(bundle, num_threads=1, prefill_chunk=16) as runtime:
        yield runtime


@pytest.mark.parametrize("mode", ["target", "dflash", "xpress"])
@pytest.mark.parametrize("num_prompt", [1, 40, 56, 57, 62, 63])
def test_a_full_context_ends_the_answer_at_its_last_row(
    small_context: Runtime, stories: Any, num_prompt: int, mode: str
) -> None:
    prompt, room = stories[0].ids[:num_prompt], 64 - num_prompt
    for budget in (None, room):
        params = SamplingParams(max_new_tokens=budget, ignore_eos=True, mode=mode)
        result = small_context.generate(prompt, params).result()
        assert list(result.token_ids) == stories[0].expected(num_prompt, room)
        assert result.finish_reason == "length"


REFUSED = [
    ([], {}, "messages is empty"),
    ("context", {}, "the prompt has 64 tokens and the context of this bundle 64, .*rebuild with a larger"),
    ([1] * 40, {"max_new_tokens": 25}, "max_new_tokens is 25, .* 40 tokens the context of 64 has room for 24"),
    ([1, 320], {}, "prompt token 1 is 320; the vocabulary has ids 0 to 319"),
    ([-1], {}, "prompt token 0 is -1"),
    ([1], {"refine_passes": BLOCK}, "refine_passes is 8; after 7 passes"),
    ([1], {"num_draft_tokens": BLOCK}, "num_draft_tokens is 8, this runtime drafts at most 7"),
    ([1], {"stop": ("",)}, r"stop\[0\] has 0 characters"),
    ([1], {"stop": ("x",) * 17}, "stop holds 17 strings; at most 16"),
    ([1], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    ([1], {"mode": "fast"}, "mode must be one of target, dflash, xpress, got 'fast'"),
    ([1], {"refine_passes": -1}, "refine_passes must be at least 0, got -1"),
    ([1], {"num_draft_tokens": -1}, "num_draft_tokens must be at least 0, got -1"),
    ([{"role": "user"}], {}, r"messages\[0\].content is missing"),
]


@pytest.mark.parametrize(("prompt", "params", "message"), REFUSED, ids=[case[2][:30] for case in REFUSED])
def test_a_refused_request_says_why_and_the_next_one_works(
    small_context: Runtime, stories: Any, prompt: Any, params: dict[str, Any], message: str
) -> None:
    prompt = stories[0].ids[:64] if prompt == "context" else prompt
    with pytest.raises(RequestError, match=message):
        small_context.generate(prompt, SamplingParams(**params)).result()
    after = small_context.generate(stories[0].ids[:9], SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert list(after.result().token_ids) == stories[0].expected(9, 5)


def test_an_empty_raw_prompt_is_refused(scripted_bundle: Any) -> None:
    with (
        Runtime.open(scripted_bundle(text={"chat_template": None}), num_threads=1) as runtime,
        pytest.raises(RequestError, match="the prompt is empty"),
    ):
        runtime.generate("")


@pytest.mark.parametrize("missing", [("refiner",), ("drafter", "refiner")])
def test_a_mode_the_bundle_lacks_is_refused(scripted_bundle: Any, stories: Any, missing: tuple[str, ...]) -> None:
    needs = {"refiner": "xpress", "drafter": "dflash"}
    expected = stories[0].expected(9, 5)
    with Runtime.open(scripted_bundle(without=missing), num_threads=1) as runtime:
        assert runtime.modes == ("target", "dflash", "xpress")[: 3 - len(missing)]
        for role in missing:
            with pytest.raises(RequestError, match=f"mode '{needs[role]}' needs a {role}, .* supports target"):
                runtime.generate([1], SamplingParams(mode=needs[role]))
        for mode in (None, *runtime.modes):
            params = SamplingParams(max_new_tokens=5, ignore_eos=True, mode=mode)
            assert list(runtime.generate(stories[0].ids[:9], params).result().token_ids) == expected
