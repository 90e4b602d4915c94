"""Answers of the OpenAI-compatible routes: whole ones, events of a stream, usage and errors, as JSON-ready objects.

Usage has one object more than OpenAI's, `xpress`: the request's draft statistics, as `runtime.stats` defines them.
Log-probabilities of minus infinity, which JSON lacks, are reported as -9999.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from xpress_export.runtime.text import StreamDecoder, TextCodec

if TYPE_CHECKING:
    from xpress_export.runtime.requests import Chunk, Result
    from xpress_export.runtime.sampling import TokenLogprobs
    from xpress_export.runtime.stats import Stats

Json = dict[str, Any]
LEAST_LOGPROB = -9999.0
_REPORTED = (
    *("mode", "seed", "speculation_off", "num_draft_tokens", "num_accepted", "num_verify_steps", "num_plain_steps"),
    "num_refine_passes",
)
_ROUNDED = (
    *("tau", "queue_ms", "ttft_ms", "prefill_ms", "stall_ms", "decode_ms", "draft_ms", "refine_ms", "verify_ms"),
    "host_ms",
)
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"
"""A comment, which every SSE client skips; it keeps proxies from closing a quiet connection."""


def as_json(body: Json) -> bytes:
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def event(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + as_json(body) + b"\n\n"


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> Json:
    """The shape of every error. kind: OpenAI's `type`, e.g. "invalid_request_error"."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def usage(stats: Stats) -> Json:
    """Token counts, and under `xpress` what drafting did; times in milliseconds."""
    return {
        "prompt_tokens": stats.num_prompt_tokens,
        "completion_tokens": stats.num_generated_tokens,
        "total_tokens": stats.num_prompt_tokens + stats.num_generated_tokens,
        "xpress": {
            **{name: getattr(stats, name) for name in _REPORTED},
            **{name: round(getattr(stats, name), 3) for name in _ROUNDED},
            "cycle_ms": round(stats.decode_ms / stats.num_verify_steps, 3) if stats.num_verify_steps else 0.0,
        },
    }


class Reply(ABC):
    """One answer under way. Subclasses give the two OpenAI shapes; both hold one choice, number 0."""

    prefix: str
    whole_kind: str
    part_kind: str

    def __init__(self, codec: TextCodec, model: str, fingerprint: str, *, logprobs: bool, with_usage: bool) -> None:
        self._codec, self._logprobs, self._with_usage = codec, logprobs, with_usage
        self._decoder, self._offset = StreamDecoder(codec), 0
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {"id": self.id, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}

    def opening(self) -> list[Json]:
        """Events before the first token."""
        return []

    def part(self, chunk: Chunk) -> list[Json]:
        """Events of one chunk: none if it has nothing to show yet."""
        if not chunk.text and not (self._logprobs and chunk.token_ids):
            return []
        return [self._event([self._choice(chunk.text, chunk.logprobs, None)])]

    def closing(self, finish_reason: str, stats: Stats) -> list[Json]:
        """Events after the last token."""
        events = [self._event([self._choice("", (), finish_reason)])]
        if self._with_usage:
            events.append({**self._event([]), "usage": usage(stats)})
        return events

    def whole(self, result: Result) -> Json:
        """The answer in one piece."""
        choice = self._whole_choice(result)
        return {**self._head, "object": self.whole_kind, "choices": [choice], "usage": usage(result.stats)}

    def _event(self, choices: list[Json]) -> Json:
        event = {**self._head, "object": self.part_kind, "choices": choices}
        return {**event, "usage": None} if self._with_usage else event

    @abstractmethod
    def _choice(self, text: str, logprobs: Sequence[TokenLogprobs], finish_reason: str | None) -> Json:
        """One choice of an event."""

    @abstractmethod
    def _whole_choice(self, result: Result) -> Json:
        """The choice of an answer in one piece."""

    def _token(self, token_id: int) -> str:
        """What a token adds to a text, with marks for unfinished characters; of a special token, its name."""
        piece = self._codec.pieces.get(token_id, first=False)
        return self._codec.spelling(token_id) if piece is None else piece.decode("utf-8", "replace")


class ChatReply(Reply):
    """/v1/chat/completions."""

    prefix, whole_kind, part_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [self._event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])]

    def _choice(self, text: str, logprobs: Sequence[TokenLogprobs], finish_reason: str | None) -> Json:
        delta = {} if finish_reason else {"content": text}
        shown = self._shown(logprobs) if self._logprobs and not finish_reason else None
        return {"index": 0, "delta": delta, "logprobs": shown, "finish_reason": finish_reason}

    def _whole_choice(self, result: Result) -> Json:
        message = {"role": "assistant", "content": result.text, "refusal": None}
        shown = self._shown(result.logprobs) if self._logprobs else None
        return {"index": 0, "message": message, "logprobs": shown, "finish_reason": result.finish_reason}

    def _shown(self, logprobs: Sequence[TokenLogprobs]) -> Json:
        content = []
        for one in logprobs:
            top = [self._entry(token_id, logprob) for token_id, logprob in one.top]
            content.append({**self._entry(one.token_id, one.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> Json:
        """bytes: what joins to the text; null of a special token, which adds nothing to it."""
        piece = self._codec.pieces.get(token_id, first=False)
        return {
            "token": self._token(token_id),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": None if piece is None else list(piece),
        }


class CompletionReply(Reply):
    """/v1/completions."""

    prefix, whole_kind, part_kind = "cmpl", "text_completion", "text_completion"

    def _choice(self, text: str, logprobs: Sequence[TokenLogprobs], finish_reason: str | None) -> Json:
        shown = self._shown(logprobs) if self._logprobs and not finish_reason else None
        return {"index": 0, "text": text, "logprobs": shown, "finish_reason": finish_reason}

    def _whole_choice(self, result: Result) -> Json:
        shown = self._shown(result.logprobs) if self._logprobs else None
        return {"index": 0, "text": result.text, "logprobs": shown, "finish_reason": result.finish_reason}

    def _shown(self, logprobs: Sequence[TokenLogprobs]) -> Json:
        """text_offset: characters of the answer's text before each token."""
        offsets = []
        for one in logprobs:
            offsets.append(self._offset)
            self._offset += len(self._decoder.push((one.token_id,)))
        return {
            "tokens": [self._token(one.token_id) for one in logprobs],
            "token_logprobs": [max(one.logprob, LEAST_LOGPROB) for one in logprobs],
            "top_logprobs": [self._alternatives(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _alternatives(self, one: TokenLogprobs) -> dict[str, float]:
        """Of tokens that read the same (bytes of unfinished characters), the likeliest is shown."""
        found: dict[str, float] = {}
        for token_id, logprob in (*one.top, (one.token_id, one.logprob)):
            found.setdefault(self._token(token_id), max(logprob, LEAST_LOGPROB))
        return found
