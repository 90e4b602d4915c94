"""Request bodies of the server: what is understood, and that every refusal names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xpress_export.errors import RequestError
from xpress_export.runtime.server_requests import ChatBody, CompletionBody, parse

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Any:
    return parse(ChatBody, json.dumps({"messages": HI, **fields}).encode())


def completion(**fields: Any) -> Any:
    return parse(CompletionBody, json.dumps({"prompt": "hi", **fields}).encode())


def test_defaults_are_openais() -> None:
    asked = chat()
    assert (asked.params.temperature, asked.params.max_new_tokens, asked.params.mode) == (1.0, None, None)
    assert (asked.stream, asked.include_usage, asked.num_top_logprobs) == (False, False, None)
    assert asked.prompt == HI
    assert completion().params.max_new_tokens == 16
    assert completion().prompt == "hi"


def test_every_option_arrives() -> None:
    options = dict(temperature=0.5, top_p=0.9, seed=7, presence_penalty=0.1, frequency_penalty=0.2, mode="target")
    options |= dict(refine_passes=2, num_draft_tokens=3, draft_sampling="sampled", top_k=5, min_p=0.1)
    options |= dict(repetition_penalty=1.1, ignore_eos=True, stop_token_ids=[3, 4])
    for asked in (chat(**options), completion(**options)):
        for name, value in options.items():
            got = getattr(asked.params, name)
            assert (list(got) if name == "stop_token_ids" else got) == value, name


def test_null_is_absent_and_stop_has_two_spellings() -> None:
    nulls = dict.fromkeys(("temperature", "max_tokens", "stop", "seed", "logprobs", "stream", "stream_options", "n"))
    assert chat(**nulls) == chat()
    assert tuple(chat(stop="x").params.stop) == tuple(chat(stop=["x"]).params.stop) == ("x",)


def test_biases_logprobs_limits_and_stream_options() -> None:
    assert dict(chat(logit_bias={"5": -100, "6": 1.5}).params.logit_bias) == {5: -100.0, 6: 1.5}
    assert chat(logprobs=True).num_top_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).num_top_logprobs == 20
    assert chat(logprobs=False).num_top_logprobs is None
    assert completion(logprobs=3).params.logprobs == 3
    assert chat(max_completion_tokens=9).params.max_new_tokens == chat(max_tokens=9).params.max_new_tokens == 9
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage


def test_contents_in_parts_are_joined_and_prompts_unwrapped() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    asked = chat(messages=[{"role": "user", "content": parts, "name": None}], chat_template_kwargs={"a": 1})
    assert asked.prompt == [{"role": "user", "content": "one two"}]
    assert asked.template_args == {"a": 1}
    assert completion(prompt=["hi"]).prompt == "hi"
    assert completion(prompt=[1, 2]).prompt == completion(prompt=[[1, 2]]).prompt == [1, 2]


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"messages": "hi"}, "messages", "must be a valid array"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "text parts"),
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"tools": []}, "tools", "no such option"),
        ({"n": 2}, "n", "n is 2"),
        ({"temperature": -1}, "temperature", "between 0 and 100, got -1"),
        ({"temperature": "hot"}, "temperature", "must be a valid number, got 'hot'"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"seed": -1}, "seed", "at least 0"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be at least 1"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens", "one of them"),
        ({"max_tokens": True}, "max_tokens", "valid integer"),
        ({"stop": [""]}, "stop", "characters"),
        ({"stop": ["x"] * 1000}, "stop", "at most"),
        ({"stop": 5}, "stop", "list of strings"),
        ({"stop_token_ids": [1] * 1000}, "stop_token_ids", "at most 256"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "between -100 and 100"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1", "valid number"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be at most 20"),
        ({"logprobs": 2}, "logprobs", "valid boolean"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not constrained"),
        ({"mode": "fast"}, "mode", "one of target, dflash, xpress"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"stream": True, "stream_options": {"x": True}}, "stream_options.x", "unknown"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
        ({"chat_template_kwargs": {"params": 1}}, "chat_template_kwargs.params", "cannot be set"),
    ],
)
def test_refusals_of_the_chat_route(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        chat(**fields)
    assert message in str(refused.value)
    assert refused.value.field is not None
    assert refused.value.field.startswith(field)


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"prompt": ["a", "b"]}, "prompt", "holds 2 prompts"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [1, "a"]}, "prompt", "prompts"),
        ({"prompt": [1, True]}, "prompt", "token ids"),
        ({"prompt": {}}, "prompt", "text or a list"),
        ({"echo": True}, "echo", "not supported"),
        ({"best_of": 2}, "best_of", "only 1"),
        ({"logprobs": 6}, "logprobs", "at most 5"),
        ({"logprobs": -1}, "logprobs", "at least 0"),
        ({"suffix": "x"}, "suffix", "unknown"),
        ({"messages": []}, "messages", "unknown"),
    ],
)
def test_refusals_of_the_completion_route(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(RequestError) as refused:
        completion(**fields)
    assert (refused.value.field, message in str(refused.value)) == (field, True), refused.value


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe", b'{"messages": "\xc3"}', b'{"messages": "\\ud800"}', b"[" * 100_000],
    ids=["empty", "cut", "not-utf8", "cut-utf8", "lone-surrogate", "deep"],
)
def test_what_is_not_json_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(RequestError, match="not valid JSON in UTF-8") as refused:
        parse(ChatBody, data)
    assert refused.value.field is None


def test_a_body_that_is_no_object_or_lacks_its_prompt() -> None:
    with pytest.raises(RequestError, match="one JSON object, got list"):
        parse(ChatBody, b"[]")
    with pytest.raises(RequestError, match="messages is missing"):
        parse(ChatBody, b"{}")
