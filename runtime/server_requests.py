"""Bodies of the OpenAI-compatible routes: JSON in, a prompt and `SamplingParams` out, or a `RequestError` that names
the field.

A field that is null counts as left out. What OpenAI's interface has and this server cannot honour is refused, never
ignored; four fields that change no answer are accepted: `user`, `metadata`, `safety_identifier`, `prompt_cache_key`.

    field beyond OpenAI's                                meaning
    mode, refine_passes, num_draft_tokens,               as in `SamplingParams`
    draft_sampling, top_k, min_p, repetition_penalty,
    ignore_eos, stop_token_ids
    chat_template_kwargs                                 variables for the chat template, e.g. enable_thinking
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from xpress_export.errors import RequestError
from xpress_export.runtime.params import SamplingParams

DEFAULT_TEMPERATURE = 1.0
"""OpenAI's, not the library's: without `temperature` the server samples."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, of /v1/completions alone; a chat answer may fill the context."""
MAX_COMPLETION_LOGPROBS = 5

_SAME_NAME = (
    *("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "mode", "refine_passes"),
    *("num_draft_tokens", "draft_sampling", "top_k", "min_p", "repetition_penalty", "ignore_eos", "stop_token_ids"),
)
_STREAM_OPTIONS = ("include_usage", "include_obfuscation")


class Body(BaseModel):
    """What both routes take. Types are checked here, ranges by `SamplingParams`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    prompt_field: ClassVar[str]
    tokens_field: ClassVar[str] = "max_tokens"

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: Any = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    mode: str | None = None
    refine_passes: int | None = None
    num_draft_tokens: int | None = None
    draft_sampling: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `SamplingParams`; a subclass adds its own."""
        given = {name: getattr(self, name) for name in _SAME_NAME if getattr(self, name) is not None}
        given.setdefault("temperature", DEFAULT_TEMPERATURE)
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else self.stop
        if self.logit_bias is not None:
            given["logit_bias"] = _token_biases(self.logit_bias)
        return given

    def check(self) -> None:
        """Refuse what this server has no answer for."""
        if self.n not in (None, 1):
            raise RequestError(f"n is {self.n}; one answer per request is given: send the request n times", "n")
        for key, value in (self.stream_options or {}).items():
            where = f"stream_options.{key}"
            if key not in _STREAM_OPTIONS:
                raise RequestError(f"{where} is unknown; expected {' or '.join(_STREAM_OPTIONS)}", where)
            if not isinstance(value, bool):
                raise RequestError(f"{where} must be true or false, got {value!r:.80}", where)
        if self.stream_options and not self.stream:
            raise RequestError("stream_options is only for requests with stream: true", "stream_options")


class ChatBody(Body):
    """POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"

    messages: list[Any]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def options(self) -> dict[str, Any]:
        given = super().options()
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if most is not None:
            given["max_new_tokens"] = most
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        return given

    def check(self) -> None:
        super().check()
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise RequestError(
                "max_tokens and max_completion_tokens mean the same here; give one of them", "max_completion_tokens"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if self.response_format not in (None, {"type": "text"}):
            raise RequestError(
                'response_format must be {"type": "text"}: answers are not constrained to JSON or a schema here',
                "response_format",
            )


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt_field: ClassVar[str] = "prompt"

    prompt: Any
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None

    def options(self) -> dict[str, Any]:
        given = super().options()
        given["max_new_tokens"] = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
        return given

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, 1):
            raise RequestError(f"best_of is {self.best_of}; only 1 is supported", "best_of")
        if self.echo:
            raise RequestError("echo is not supported: the answer holds new text only", "echo")
        if self.logprobs is not None and self.logprobs > MAX_COMPLETION_LOGPROBS:
            raise RequestError(
                f"logprobs must be at most {MAX_COMPLETION_LOGPROBS}, got {self.logprobs}; "
                "the chat route gives up to 20",
                "logprobs",
            )


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request, checked. prompt: messages of a chat, or text or token ids of a completion."""

    prompt: str | list[Any]
    params: SamplingParams
    template_args: Mapping[str, Any]
    model: str | None
    stream: bool
    include_usage: bool
    num_top_logprobs: int | None
    is_chat: bool


def parse(kind: type[ChatBody] | type[CompletionBody], data: bytes) -> Asked:
    """Read a body. Raises RequestError with `.field` set to the JSON field that is wrong, None for no JSON at all."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as error:
        raise _explained(error, kind) from error
    body.check()
    try:
        params = SamplingParams(**body.options())
    except RequestError as error:
        raise in_body_terms(error, body) from error
    return Asked(
        prompt=_messages(body.messages) if isinstance(body, ChatBody) else _prompt(body.prompt),
        params=params,
        template_args=_template_args(body),
        model=body.model,
        stream=bool(body.stream),
        include_usage=bool((body.stream_options or {}).get("include_usage")),
        num_top_logprobs=params.logprobs,
        is_chat=isinstance(body, ChatBody),
    )


def in_body_terms(error: RequestError, body: Body | type[Body]) -> RequestError:
    """The same error in the words of the route: a field that the body has, under the name it has there."""
    kind = body if isinstance(body, type) else type(body)
    spelled = {"max_new_tokens": "max_tokens", "prompt": kind.prompt_field}
    if isinstance(body, ChatBody):
        spelled["logprobs"] = "top_logprobs"
        if body.max_completion_tokens is not None:
            spelled["max_new_tokens"] = "max_completion_tokens"
    message = str(error)
    field = error.field or _leading_field(message, kind) or kind.prompt_field
    if field in spelled:
        message = message if field == "prompt" else message.replace(field, spelled[field])
        field = spelled[field]
    return RequestError(message, field)


def _leading_field(message: str, kind: type[Body]) -> str | None:
    """Messages about a list begin with the place in it: `stop[3] has ...`."""
    place = re.match(r"(\w+)[\w.\[\]]*", message)
    if place is None or place[1] not in {*kind.model_fields, "max_new_tokens"}:
        return None
    return place[0]


def _explained(error: ValidationError, kind: type[Body]) -> RequestError:
    first = error.errors(include_url=False, include_input=True)[0]
    field = _place(first["loc"])
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON in UTF-8: {first['ctx']['error']}")
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(field, kind.model_fields, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "this server has no such option"
        return RequestError(f"{field} is unknown; {hint}", field)
    if first["type"] == "missing":
        return RequestError(f"{field} is missing", field)
    if not field:
        return RequestError(f"the body must be one JSON object, got {type(first['input']).__name__}")
    reason = first["msg"].replace("Input should be", "must be")
    return RequestError(f"{field} {reason}, got {first['input']!r:.80}", field)


def _place(loc: Sequence[int | str]) -> str:
    """`messages[0].role`"""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc]
    return "".join(parts).lstrip(".")


def _template_args(body: Body) -> Mapping[str, Any]:
    given = body.chat_template_kwargs if isinstance(body, ChatBody) else None
    reserved = sorted({"messages", "prompt", "params"} & set(given or ()))
    if reserved:
        where = f"chat_template_kwargs.{reserved[0]}"
        raise RequestError(f"{where} cannot be set: the request's own fields say it", where)
    return given or {}


def _messages(messages: list[Any]) -> list[Any]:
    """The conversation with contents as plain text, which is what chat templates of text models take."""
    flat = []
    for i, message in enumerate(messages):
        given = message
        if isinstance(message, dict):
            given = {key: value for key, value in message.items() if value is not None}
            if isinstance(given.get("content"), list):
                given["content"] = _joined(given["content"], f"messages[{i}].content")
        flat.append(given)
    return flat


def _joined(parts: list[Any], where: str) -> str:
    texts = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{i}] is of type {kind!r}; this model reads text parts only", f"{where}[{i}]")
        texts.append(part["text"])
    return "".join(texts)


def _prompt(prompt: Any) -> str | list[Any]:
    """Text or token ids; a list of one prompt is that prompt."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and any(isinstance(item, str | list) for item in prompt):
        raise RequestError(f"prompt holds {len(prompt)} prompts; send one per request", "prompt")
    if not isinstance(prompt, list) or any(type(item) is not int for item in prompt):
        raise RequestError("prompt must be text or a list of token ids", "prompt")
    if not prompt:
        raise RequestError("prompt is empty", "prompt")
    return prompt


def _token_biases(biases: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError as error:
        raise RequestError(f"logit_bias: its keys are token ids, {error}", "logit_bias") from error
