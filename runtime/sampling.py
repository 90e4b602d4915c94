"""How the target's own token is chosen, and how a draft is judged by it.

Two rules, both lossless. `tokens` of a position are numbered from the first of the answer, 0.

Greedy drafts. The target draws its token at every position with that position's random number; a draft token is
accepted while it is the token drawn. So a draft token d is accepted with probability p(d), and what replaces it has
the distribution p without d: point-mass rejection. The answer to a seed does not depend on the drafts at all.

Sampled drafts. The draft token of a position is drawn from q with that position's draft number, the same in every
refine pass, and q is taken from the pass that produced the tokens. It is accepted with probability min(1, p(d)/q(d)),
otherwise a token is drawn from max(p - q, 0) (Leviathan et al., arXiv 2211.17192).

Every row of logits is shaped by what precedes it, and only rows whose drafts were accepted so far are looked at.
So each row that is looked at yields exactly one token of the answer, in order, which is why penalties and stateful
processors need no special case.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from xpress_export.runtime.params import SamplingParams

Floats = NDArray[np.floating]
_DRAW, _DRAFT, _ACCEPT = range(3)  # independent streams of random numbers
_BLOCK = 64


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of the target's own probabilities, before any shaping: the token's, and the likeliest."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Uniforms:
    """Random numbers in [0, 1) by position, a Philox counter keyed by (seed, stream); any order, always the same."""

    def __init__(self, seed: int, stream: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=np.array([seed, stream], np.uint64)))
        self._drawn = np.zeros(0)

    def __getitem__(self, position: int) -> float:
        while position >= self._drawn.size:
            self._drawn = np.concatenate((self._drawn, self._generator.random(_BLOCK)))
        return float(self._drawn[position])


class Distribution:
    """Probabilities of some token ids, float64, adding up to 1; ids ascend, all others have none."""

    def __init__(self, ids: NDArray[np.int64], weights: Floats) -> None:
        self.ids = ids
        self._cumulative = np.cumsum(weights, dtype=np.float64)
        self.probs = weights / self._cumulative[-1]

    def draw(self, uniform: float) -> int:
        """The token at `uniform` of the cumulative probabilities."""
        index = int(np.searchsorted(self._cumulative, uniform * self._cumulative[-1], side="right"))
        return int(self.ids[min(index, self.ids.size - 1)])

    def prob(self, token: int) -> float:
        index = int(np.searchsorted(self.ids, token))
        return float(self.probs[index]) if index < self.ids.size and self.ids[index] == token else 0.0


class Sampler:
    """Chooses the tokens of one request. Rows of logits go in, in the order of the answer."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab_size: int) -> None:
        self.seed = int.from_bytes(os.urandom(8), "little") if params.seed is None else int(params.seed)
        self.logprobs: list[TokenLogprobs] = []
        self.draws_drafts = params.temperature > 0 and params.draft_sampling == "sampled"
        self._params = params
        self._num_prompt = len(prompt)
        self._text = list(prompt)  # prompt and answer
        self._in_text = np.zeros(vocab_size, bool)
        self._in_text[self._text] = True
        self._counts = np.zeros(vocab_size, np.int32)  # occurrences in the answer
        self._draws, self._drafts, self._accepts = (Uniforms(self.seed, stream) for stream in (_DRAW, _DRAFT, _ACCEPT))
        self._bias_ids = np.array([*params.logit_bias], np.int64)
        self._biases = np.array([*params.logit_bias.values()], np.float32)

    @property
    def num_chosen(self) -> int:
        return len(self._text) - self._num_prompt

    def choose(self, logits: Floats, draft: Sequence[int], q: Sequence[Distribution] = ()) -> list[int]:
        """The accepted prefix of `draft` and the target's own token after it.

        logits: [1 + len(draft), V], row j follows draft[:j]. q: what each sampled draft token was drawn from,
        nothing for greedy drafts.
        """
        chosen: list[int] = []
        for row, proposed, proposal in zip(
            logits, [*draft, None], [*q, *[None] * (1 + len(draft) - len(q))], strict=True
        ):
            token = self._judge(row, proposed, proposal)
            self._take(row, token)
            chosen.append(token)
            if token != proposed:
                break
        return chosen

    def draw_draft(self, logits: Floats, ids: NDArray[np.int64]) -> list[Distribution]:
        """The distributions q of a block's draft tokens: logits [n, Vd] of the token ids `ids` [Vd], ascending."""
        rows = logits.astype(np.float32) / np.float32(self._params.temperature)
        return [Distribution(ids, np.exp(row - row.max())) for row in rows]

    def draft_tokens(self, q: Sequence[Distribution]) -> list[int]:
        """A token of each distribution, by the draft numbers of the next positions."""
        return [dist.draw(self._drafts[self.num_chosen + j]) for j, dist in enumerate(q)]

    def _judge(self, row: Floats, proposed: int | None, proposal: Distribution | None) -> int:
        shaped = self._shape(row)
        if self._params.temperature == 0:
            return int(shaped.argmax())
        position, p = self.num_chosen, distribution(shaped, self._params)
        if proposed is None or proposal is None:
            return p.draw(self._draws[position])
        if self._accepts[position] * proposal.prob(proposed) < p.prob(proposed):
            return proposed
        return residual(p, proposal).draw(self._draws[position])

    def _shape(self, row: Floats) -> NDArray[np.float32]:
        """Bias and penalties, on a copy."""
        params, logits = self._params, row.astype(np.float32)
        if self._bias_ids.size:
            logits[self._bias_ids] += self._biases
        if params.repetition_penalty != 1:
            seen = logits[self._in_text]
            logits[self._in_text] = np.where(
                seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty
            )
        if params.presence_penalty or params.frequency_penalty:
            logits -= np.float32(params.presence_penalty) * (self._counts > 0)
            logits -= np.float32(params.frequency_penalty) * self._counts
        if params.logits_processor is not None:
            logits = np.asarray(params.logits_processor(tuple(self._text), logits), np.float32)
            if logits.shape != row.shape:
                raise ValueError(f"logits_processor returned shape {logits.shape}, expected {row.shape}")
        if not np.isfinite(logits.max()):
            raise ValueError(f"the largest logit of token {self.num_chosen} of the answer is {logits.max()}")
        return logits

    def _take(self, row: Floats, token: int) -> None:
        if self._params.logprobs is not None:
            self.logprobs.append(log_probabilities(row, token, self._params.logprobs))
        self._text.append(token)
        self._in_text[token] = True
        self._counts[token] += 1


def distribution(logits: NDArray[np.float32], params: SamplingParams) -> Distribution:
    """The shaped distribution of one row [V]: temperature, then min_p, top_k, top_p. Ties with the last kept stay."""
    weights = np.exp((logits - logits.max()) / np.float32(params.temperature))  # the largest is 1
    least = params.min_p
    if params.top_k is not None and params.top_k < weights.size:
        least = max(least, np.partition(weights, -params.top_k)[-params.top_k])
    kept = np.flatnonzero(weights >= max(least, np.finfo(np.float32).tiny))
    if params.top_p < 1:
        kept = kept[_nucleus(weights[kept], params.top_p)]
    return Distribution(kept, weights[kept])


def _nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.bool_]:
    """Which of `weights` are at least as large as the last of the fewest that reach `top_p` of their sum."""
    wanted = top_p * weights.sum(dtype=np.float64)
    size = min(256, weights.size)
    while True:  # a sort of everything is rarely needed
        largest = np.sort(np.partition(weights, -size)[-size:])[::-1]
        cumulative = np.cumsum(largest, dtype=np.float64)
        if cumulative[-1] >= wanted or size == weights.size:
            last = largest[min(int(np.searchsorted(cumulative, wanted)), size - 1)]
            return np.asarray(weights >= last)
        size = min(8 * size, weights.size)


def residual(p: Distribution, q: Distribution) -> Distribution:
    """max(p - q, 0), made a distribution; p itself where nothing is left, which only rounding can bring about."""
    index = np.searchsorted(q.ids, p.ids).clip(max=q.ids.size - 1)
    left = np.maximum(p.probs - np.where(q.ids[index] == p.ids, q.probs[index], 0), 0)
    return Distribution(p.ids, left) if left.sum() > 0 else p


def log_probabilities(row: Floats, token: int, num_top: int) -> TokenLogprobs:
    """Of one row of logits [V]; the likeliest first, ties by id."""
    logits = row.astype(np.float32)
    highest = logits.max()
    total = highest + np.log(np.exp(logits - highest).sum(dtype=np.float64))
    num_top = min(num_top, logits.size)
    top = np.argpartition(logits, -num_top)[-num_top:] if num_top else np.zeros(0, np.int64)
    top = top[np.lexsort((top, -logits[top]))]
    return TokenLogprobs(token, float(logits[token] - total), tuple((int(i), float(logits[i] - total)) for i in top))
