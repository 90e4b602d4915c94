"""What one request asks for."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xpress_export import names
from xpress_export.errors import RequestError
from xpress_export.runtime.text import check_stop_strings

MAX_STOP_TOKENS = 256
MAX_BIASES = 1024
MAX_LOGPROBS = 20
DRAFT_SAMPLINGS = ("greedy", "sampled")

LogitsProcessor = Callable[[Sequence[int], NDArray[np.float32]], NDArray[np.float32]]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one generation; the defaults are greedy decoding with adaptive speculation.

    Ending
        max_new_tokens: at most this many tokens; None: until the context is full.
        stop: strings that end the generation; the text is cut exactly before the first of them.
        stop_token_ids: further ids that end it, beside the model's own.
        ignore_eos: the model's own stop tokens do not end it (for benchmarks).
    Choosing a token, applied in this order to the target's logits
        logit_bias: added to the logit of a token id, -100 to 100.
        repetition_penalty: of every token of prompt and answer, positive logits are divided and negative ones
            multiplied by it. presence_penalty, frequency_penalty: subtracted once, and once per occurrence, from
            the logits of the answer's tokens, -2 to 2.
        logits_processor: last, any function of (prompt and answer so far, logits float32 [V]) that returns logits;
            called exactly once per token of the answer, in order.
        temperature: 0 takes the largest logit; above, the logits are divided by it.
        min_p, top_k, top_p: keep tokens with at least min_p times the largest probability, of those the top_k
            likeliest, of those the fewest whose probabilities reach top_p.
        seed: 0 to 2**64 - 1; None draws one, which the stats name. The same seed gives the same answer whatever
            mode it runs in and whatever runs beside it (sampled drafts aside, see below).
    Reporting
        logprobs: report the log-probability of each token, and of this many likeliest ones, under the target's own
            distribution, before any of the above.
    Speculation. It never changes what is generated at temperature 0, nor the distribution above 0.
        mode: "target" (plain decoding), "dflash" (drafter) or "xpress" (drafter and refiner); None: where the host
            decides, what is fastest at every step by the runtime's own measurements, elsewhere all that there is.
        refine_passes: Jacobi passes of the refiner, 0 to the number of draft tokens; None: the bundle's default.
        num_draft_tokens: draft tokens verified per step; None: in a mode that was asked for, as many as there may be.
        draft_sampling: above temperature 0, "greedy" proposes the likeliest tokens; "sampled" draws them, which is
            accepted more often at high temperatures, but makes the answer to a seed depend on the mode.
    """

    max_new_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logits_processor: LogitsProcessor | None = None
    temperature: float = 0.0
    min_p: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int | None = None
    logprobs: int | None = None
    mode: str | None = None
    refine_passes: int | None = None
    num_draft_tokens: int | None = None
    draft_sampling: str = "greedy"

    def __post_init__(self) -> None:
        _integer(self, "max_new_tokens", least=1)
        _integer(self, "seed", most=2**64 - 1)
        _integer(self, "logprobs", most=MAX_LOGPROBS)
        _integer(self, "top_k", least=1)
        _integer(self, "refine_passes")
        _integer(self, "num_draft_tokens")
        _real(self, "temperature", 0, 100)
        _real(self, "min_p", 0, 1)
        _real(self, "top_p", 0, 1, open_below=True)
        _real(self, "repetition_penalty", 0, 100, open_below=True)
        _real(self, "presence_penalty", -2, 2)
        _real(self, "frequency_penalty", -2, 2)
        _one_of(self, "mode", (None, *names.MODES))
        _one_of(self, "draft_sampling", DRAFT_SAMPLINGS)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be true or false, got {self.ignore_eos!r}", "ignore_eos")
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise RequestError("logits_processor must be callable", "logits_processor")
        object.__setattr__(self, "stop", check_stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))

    @property
    def reshapes(self) -> bool:
        """Whether anything but the largest logit of the target decides on a token."""
        penalised = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return self.temperature > 0 or penalised or bool(self.logit_bias) or self.logits_processor is not None

    @property
    def needs_sampler(self) -> bool:
        """Whether the host has to see the target's logits."""
        return self.reshapes or self.logprobs is not None


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)


def _integer(params: SamplingParams, name: str, least: int = 0, most: int | None = None) -> None:
    value = getattr(params, name)
    if value is None:
        return
    if not _is_integer(value):
        raise RequestError(f"{name} must be an integer, got {value!r}", name)
    if value < least:
        raise RequestError(f"{name} must be at least {least}, got {value}", name)
    if most is not None and value > most:
        raise RequestError(f"{name} must be at most {most}, got {value}", name)


def _real(params: SamplingParams, name: str, least: float, most: float, *, open_below: bool = False) -> None:
    value: Any = getattr(params, name)
    if not _is_number(value):
        raise RequestError(f"{name} must be a number, got {value!r}", name)
    if not (least < value if open_below else least <= value) or value > most:
        bounds = f"above {least} and at most {most}" if open_below else f"between {least} and {most}"
        raise RequestError(f"{name} must be {bounds}, got {value}", name)


def _one_of(params: SamplingParams, name: str, allowed: Sequence[str | None]) -> None:
    value = getattr(params, name)
    if value not in allowed:
        shown = ", ".join(option for option in allowed if option is not None)
        raise RequestError(f"{name} must be one of {shown}, got {value!r}", name)


def _token_ids(ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not all(_is_integer(i) and i >= 0 for i in ids):
        raise RequestError(f"stop_token_ids must be a list of token ids, got {ids!r:.80}", "stop_token_ids")
    if len(ids) > MAX_STOP_TOKENS:
        raise RequestError(
            f"stop_token_ids holds {len(ids)} ids; at most {MAX_STOP_TOKENS} are allowed", "stop_token_ids"
        )
    return tuple(int(i) for i in ids)


def _biases(biases: Any) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {type(biases).__name__}", "logit_bias")
    if len(biases) > MAX_BIASES:
        raise RequestError(f"logit_bias holds {len(biases)} ids; at most {MAX_BIASES} are allowed", "logit_bias")
    for token, bias in biases.items():
        if not _is_integer(token) or token < 0:
            raise RequestError(f"logit_bias has the key {token!r}, which is no token id", "logit_bias")
        if not _is_number(bias) or not -100 <= bias <= 100:
            raise RequestError(
                f"logit_bias of token {token} must be a number between -100 and 100, got {bias!r}", "logit_bias"
            )
    return {int(token): float(bias) for token, bias in biases.items()}
