"""Perplexity and greedy match rate of a target against its float graph, on held-out text.

A *passage* is a prompt in the chat format and the float target's own greedy answer. Every target reads the same
passages, a known token at a time, so one early difference does not make the rest incomparable:

    perplexity     exp of the mean negative log-likelihood of the prompt's own text (not of what all prompts share)
    match rate     share of the answer's tokens that the target would have chosen too
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xpress_export import names
from xpress_export.calibration.runtimes import answer
from xpress_export.manifest import Manifest
from xpress_export.runtime import Runtime
from xpress_export.runtime.backend import Graph
from xpress_export.runtime.device import DTYPES

Array = NDArray[Any]
_CHUNK = 64


@dataclass(frozen=True)
class Passage:
    """ids[:start] is shared by all prompts, ids[start:end] is the prompt's own, ids[end:] the answer."""

    ids: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Score:
    """One target on one passage: total negative log-likelihood of `num_text` tokens, matches of `num_answer`."""

    nll: float
    num_text: int
    matches: int
    num_answer: int


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """A target against the float one. Half-widths are of 95% confidence intervals over passages.

    ratio: its perplexity over the float target's, minus one; with its interval, from paired differences.
    """

    perplexity: float
    ratio: float
    ratio_ci95: float
    match_rate: float
    match_ci95: float
    num_passages: int
    num_text_tokens: int
    num_answer_tokens: int


def make_passages(runtime: Runtime, prompts: Sequence[str], max_new_tokens: int) -> Iterator[Passage]:
    """Passages of the runtime's target, one at a time."""
    encoded = [runtime.encode(prompt) for prompt in prompts]
    shared = len(list(itertools.takewhile(lambda column: len(set(column)) == 1, zip(*encoded, strict=False))))
    for ids, prompt in zip(encoded, prompts, strict=True):
        start = max(1, shared if len(prompts) > 1 else 1)
        yield Passage((*ids, *answer(runtime, prompt, max_new_tokens).token_ids), min(start, len(ids) - 1), len(ids))


def score(
    graph: Graph, manifest: Manifest, passages: Sequence[Passage], advance: Callable[[float], None] = lambda _: None
) -> list[Score]:
    """Scores of a target graph, one per passage."""
    found = []
    for passage in passages:
        nll, best = _read(graph, manifest, passage)
        text = slice(passage.start, passage.end)
        written = passage.ids[passage.end :]
        chosen = best[passage.end - 1 : -1]
        found.append(
            Score(
                nll=float(nll[passage.start - 1 : passage.end - 1].sum()),
                num_text=len(passage.ids[text]),
                matches=int((chosen == np.array(written, np.int64)).sum()),
                num_answer=len(written),
            )
        )
        advance(1)
    return found


def _read(graph: Graph, manifest: Manifest, passage: Passage) -> tuple[Array, Array]:
    """Run a passage through the graph: the negative log-likelihood of each next token, float64 [S-1], and the
    token that the target prefers after each one, int64 [S]."""
    ids = np.array([passage.ids], np.int64)
    length, call = ids.shape[1], graph.call()
    cache: dict[str, Array] = {
        value.name: np.zeros((1, int(value.shape[1]), length, int(value.shape[3])), DTYPES[value.dtype])
        for value in manifest.graphs[names.TARGET].inputs
        if names.is_past(value.name)
    }
    for name, array in cache.items():
        call.bind_input(name, array)
        call.bind_output(names.present_of(name), array)
    write_index = np.zeros(1, np.int64)
    call.bind_input(names.WRITE_INDEX, write_index)
    outputs = {value.name: value for value in manifest.graphs[names.TARGET].outputs}
    nll, best = np.zeros(length - 1), np.zeros(length, np.int64)
    for begin in range(0, length, _CHUNK):
        chunk = np.ascontiguousarray(ids[:, begin : begin + _CHUNK])
        rows = chunk.shape[1]
        logits: Array = np.zeros((1, rows, manifest.target.vocab_size), DTYPES[outputs[names.LOGITS].dtype])
        call.bind_input(names.INPUT_IDS, chunk)
        write_index[0] = begin
        call.bind_output(names.LOGITS, logits)
        call.run()
        wide = logits[0].astype(np.float64)
        best[begin : begin + rows] = wide.argmax(axis=1)
        following = ids[0, begin + 1 : begin + 1 + rows]
        nll[begin : begin + len(following)] = _nll(wide[: len(following)], following)
    return nll, best


def _nll(logits: Array, tokens: Array) -> Array:
    greatest = logits.max(axis=1)
    total = np.log(np.exp(logits - greatest[:, None]).sum(axis=1)) + greatest
    result: Array = total - logits[np.arange(len(tokens)), tokens]
    return result


def compare(scores: Sequence[Score], reference: Sequence[Score]) -> Accuracy:
    """A target's scores against the float target's on the same passages."""
    tokens = np.array([s.num_text for s in scores], float)
    nll, base = (np.array([s.nll for s in each]) for each in (scores, reference))
    log_ratio, log_error = ratio_of_sums(nll - base, tokens)
    matches, answers = (np.array([getattr(s, key) for s in scores], float) for key in ("matches", "num_answer"))
    match_rate, match_error = ratio_of_sums(matches, answers)
    return Accuracy(
        perplexity=math.exp(nll.sum() / tokens.sum()),
        ratio=math.expm1(log_ratio),
        ratio_ci95=math.exp(log_ratio) * log_error,
        match_rate=match_rate,
        match_ci95=match_error,
        num_passages=len(scores),
        num_text_tokens=int(tokens.sum()),
        num_answer_tokens=int(answers.sum()),
    )


def ratio_of_sums(values: Array, sizes: Array) -> tuple[float, float]:
    """sum(values) / sum(sizes) over independent samples, and the half-width of its 95% confidence interval."""
    ratio = float(values.sum() / sizes.sum())
    if len(values) < 2:
        return ratio, 0.0
    spread = float(np.sqrt(((values - ratio * sizes) ** 2).sum() * len(values) / (len(values) - 1)))
    return ratio, 1.96 * spread / float(sizes.sum())
