"""tau without decoding: walk the draft loop over answers that are already there.

Draft, refine, verify, commit on a stored answer needs no target call: a draft token is accepted while it equals
the answer's own token. On greedy answers that is the greedy loop, on sampled ones the loop with a greedy draft and
point-mass rejection. Every position is drafted in one batch; the walk then jumps from anchor to anchor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from xpress_export.exporter.modules import Drafter, Refiner
from xpress_export.training.blocks import BlockBatch, Sample, build_batch, draft_blocks

ANCHORS_PER_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class Walk:
    """One answer. tokens, steps: committed, and verify calls that committed them.

    drafted, accepted: per draft slot, how many verify calls offered it and how many accepted it.
    """

    source: str
    tokens: int
    steps: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Score:
    """tau over several answers with the half-width of its 95 % interval, and acceptance per draft slot."""

    tau: float
    half_width: float
    num_answers: int
    num_steps: int
    per_slot: tuple[float, ...]


@dataclass
class Tally:
    """Walks by source."""

    walks: list[Walk] = field(default_factory=list)

    def score(self, source: str | None = None) -> Score:
        """The score of one source, or of all answers together."""
        return score([walk for walk in self.walks if source in {None, walk.source}])

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(walk.source for walk in self.walks))

    @property
    def mean_tau(self) -> float:
        """tau averaged over the sources, each counting the same."""
        return sum(self.score(source).tau for source in self.sources) / max(1, len(self.sources))


def score(walks: Sequence[Walk]) -> Score:
    """tau is the ratio of the sums; its interval takes answers as independent (linearised ratio)."""
    tokens, steps = sum(w.tokens for w in walks), sum(w.steps for w in walks)
    tau = tokens / max(1, steps)
    spread = math.sqrt(sum((w.tokens - tau * w.steps) ** 2 for w in walks)) / max(1, steps)
    drafted = [sum(column) for column in zip(*(w.drafted for w in walks), strict=True)]
    accepted = [sum(column) for column in zip(*(w.accepted for w in walks), strict=True)]
    per_slot = tuple(a / max(1, d) for a, d in zip(accepted, drafted, strict=True))
    return Score(tau=tau, half_width=1.96 * spread, num_answers=len(walks), num_steps=steps, per_slot=per_slot)


@torch.no_grad()
def walk_answer(
    drafter: Drafter, refiner: Refiner | None, sample: Sample, source: str, num_passes: int, block_size: int
) -> Walk | None:
    """The loop over one answer; None if it is too short to draft for. num_passes 0: the bare drafter."""
    first, last = sample.num_prompt, len(sample.tokens) - 1
    if first >= last:
        return None
    correct: list[Tensor] = []
    for start in range(first, last, ANCHORS_PER_BATCH):
        anchors = torch.arange(start, min(start + ANCHORS_PER_BATCH, last))
        config = drafter.config
        batch = build_batch([sample], [anchors], block_size, config.mask_token_id, config.first_slot)
        drafts = draft_tokens(drafter, refiner, batch, num_passes)
        correct.append((drafts == batch.labels[0]) & batch.valid[0])
    return _walk(torch.cat(correct), source)


def draft_tokens(drafter: Drafter, refiner: Refiner | None, batch: BlockBatch, num_passes: int) -> Tensor:
    """Draft tokens int64 [A, J] of the blocks of a batch with one sequence, after `num_passes` Jacobi passes."""
    weight = drafter.norm.weight
    batch = batch.to(weight.device, weight.dtype)
    states = draft_blocks(drafter, batch)[0]  # (A, N, E)
    logits = drafter.lm_head(states[:, drafter.config.first_slot :])
    tokens: Tensor = drafter.vocab(logits.argmax(dim=-1))
    for _ in range(num_passes if refiner is not None else 0):
        assert refiner is not None
        refined = refiner(logits, tokens, batch.block_ids[0, :, 0], batch.previous[0], states)
        after: Tensor = refiner.vocab(refined.argmax(dim=-1))
        if torch.equal(after, tokens):
            break
        tokens = after
    return tokens.cpu()


def _walk(correct: Tensor, source: str) -> Walk:
    """correct: bool [A, J], whether the j-th draft at each anchor is the answer's token."""
    num_accepted = correct.long().cumprod(dim=1).sum(dim=1).tolist()
    total, num_slots = correct.shape
    drafted, accepted = [0] * num_slots, [0] * num_slots
    at = steps = 0
    while at < total:
        steps += 1
        for slot in range(min(num_slots, total - at)):
            drafted[slot] += 1
            accepted[slot] += slot < num_accepted[at]
        at += num_accepted[at] + 1
    return Walk(source=source, tokens=total, steps=steps, drafted=tuple(drafted), accepted=tuple(accepted))


def evaluate(
    drafter: Drafter,
    refiner: Refiner | None,
    samples: Iterable[tuple[str, Sample]],
    *,
    num_passes: int | None = None,
    block_size: int | None = None,
) -> Tally:
    """Walk every (source, sample). num_passes: None is one per draft token, exactly left to right."""
    block_size = block_size or drafter.config.block_size
    passes = block_size - drafter.config.first_slot if num_passes is None else num_passes
    walks = (walk_answer(drafter, refiner, s, source, passes, block_size) for source, s in samples)
    return Tally([walk for walk in walks if walk is not None])


def as_json(tally: Tally) -> dict[str, Any]:
    """Plain numbers by source, and the mean over the sources."""
    scores = {source: tally.score(source) for source in tally.sources}
    table: dict[str, Any] = {
        source: {
            "tau": round(s.tau, 4),
            "half_width": round(s.half_width, 4),
            "num_answers": s.num_answers,
            "per_slot": [round(x, 4) for x in s.per_slot],
        }
        for source, s in scores.items()
    }
    return table | {"mean_tau": round(tally.mean_tau, 4)}
