"""The terms of a step: Jacobi rounds, the Markov head as a special case, what is trained and what is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from xpress_export.exporter.configs import RefinerConfig
from xpress_export.exporter.modules import Refiner
from xpress_export.exporter.target_checkpoint import read_target
from xpress_export.training.blocks import BlockBatch, Sample, build_batch, draft_blocks
from xpress_export.training.config import DrafterOptions, LossOptions, RefinerOptions
from xpress_export.training.errors import TrainingError
from xpress_export.training.evaluate import draft_tokens, evaluate
from xpress_export.training.models import (
    bigram_factors,
    drafter_config,
    new_drafter,
    new_refiner,
    refiner_config,
    unused_id,
)
from xpress_export.training.objective import Objective

OPTIONS = LossOptions(tv=0.9, ce=0.1, kl=0.0, jacobi_rounds=3)
DRAFTER = DrafterOptions(intermediate_size=64, block_size=5)


class Parts:
    """A fresh drafter of the tiny target, a head, and a batch for them."""

    def __init__(self, trio: Any, make_sample: Callable[..., Sample], kind: str, first_slot: int = 1) -> None:
        self.target = read_target(str(trio.target))
        options = replace(DRAFTER, first_slot=first_slot)
        self.config = drafter_config(options, self.target.config, (1, 0), 317)
        self.drafter = new_drafter(self.config, self.target, None, seed=0)
        self.head_config = refiner_config(RefinerOptions(kind=kind, rank=8), self.config)
        self.refiner = new_refiner(self.head_config, first_slot, None, 1, None)
        with torch.no_grad():
            for parameter in self.refiner.parameters():
                parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(3))
        self.samples = [make_sample(self.config, seed) for seed in range(2)]
        anchors = [torch.tensor([6, 9, 17])] * 2
        self.batch: BlockBatch = build_batch(
            self.samples, anchors, self.config.block_size, self.config.mask_token_id, first_slot
        )

    def objective(self, refiner: Refiner | None, options: LossOptions = OPTIONS, **changes: Any) -> Objective:
        counts = torch.arange(self.config.decoder.vocab_size)
        return Objective(self.drafter, refiner, options, token_counts=counts, **{"train_drafter": True} | changes)


@pytest.mark.parametrize("first_slot", [0, 1])
@pytest.mark.parametrize("kind", ["xpress", "markov"])
def test_terms_are_those_of_the_modules(
    tiny_trio: Any, make_sample: Callable[..., Sample], kind: str, first_slot: int
) -> None:
    """Every term recomputed with `Refiner.forward`, whole logits and the written-out loss."""
    parts = Parts(tiny_trio, make_sample, kind, first_slot)
    batch, refiner, head = parts.batch, parts.refiner, parts.drafter.lm_head.weight
    states = draft_blocks(parts.drafter, batch).detach()
    logits = (states[:, :, first_slot:] @ head.T).flatten(0, 1)
    anchor, previous = batch.block_ids[..., 0].flatten(), batch.previous.flatten()
    target = torch.softmax(batch.final_hidden @ head.T, dim=-1).flatten(0, 1)  # type: ignore[operator]

    def loss(given: Tensor) -> float:
        p, log_p = torch.softmax(given, dim=-1), torch.log_softmax(given, dim=-1)
        ce = -log_p.gather(-1, batch.labels.flatten(0, 1).unsqueeze(-1)).squeeze(-1)
        rows = 0.9 * (p - target).abs().sum(-1) + 0.1 * ce
        weights = torch.exp(-torch.arange(rows.shape[1]) / 4.0) * batch.valid.flatten(0, 1)
        return float((rows * weights).sum() / weights.sum())

    with torch.no_grad():
        expected = {"base": loss(logits)}
        teacher = refiner(logits, batch.labels.flatten(0, 1), anchor, previous, states.flatten(0, 1))
        expected["teacher_forced"] = loss(teacher)
        tokens = logits.argmax(-1)
        for j in range(3):
            refined = refiner(logits, tokens, anchor, previous, states.flatten(0, 1))
            expected[f"jacobi_{j + 1}"], tokens = loss(refined), refined.argmax(-1)
    found = parts.objective(refiner)(batch, 0.5)
    assert found.parts == pytest.approx(expected, rel=1e-4)
    rounds = sum(found.parts[f"jacobi_{j}"] for j in (1, 2, 3)) / 3
    total = found.parts["teacher_forced"] + 0.3 * rounds + 0.5 * found.parts["base"]
    assert float(found.total.detach()) == pytest.approx(total, rel=1e-5)


def test_an_xpress_head_started_from_bigrams_is_the_markov_head(
    tiny_trio: Any, make_sample: Callable[..., Sample]
) -> None:
    parts = Parts(tiny_trio, make_sample, "xpress")
    size = parts.config.decoder.vocab_size
    factors = bigram_factors([(1, 2, 3, 1, 2, 4, 1, 2)], torch.arange(size), size, 8, 1.0)
    heads = {}
    for kind in ("xpress", "markov"):
        config = refiner_config(RefinerOptions(kind=kind, rank=8), parts.config)
        heads[kind] = new_refiner(config, 1, None, 0, factors)
    with torch.no_grad():
        heads["xpress"].in_proj.weight[:, :16] = 0  # the parts that read hidden states start small, not at zero
    states, previous = torch.randn(3, 5, 48), torch.randint(0, 300, (3, 5))
    biases = [head.bias(states, previous) for head in heads.values()]
    torch.testing.assert_close(biases[0], biases[1])
    following = biases[1].new_zeros(size) + heads["markov"].w1.weight[1] @ heads["markov"].w2.weight.T
    assert int(following.argmax()) == 2


def test_a_frozen_drafter_is_not_trained(tiny_trio: Any, make_sample: Callable[..., Sample]) -> None:
    parts = Parts(tiny_trio, make_sample, "xpress")
    objective = parts.objective(parts.refiner, train_drafter=False)
    loss = objective(parts.batch, 0.5)
    assert "base" not in loss.parts
    loss.total.backward()
    trained = {name for name, p in objective.named_parameters() if p.grad is not None}
    assert trained and all(name.startswith(("refiner.", "w2")) for name in trained)


def test_embedding_and_head_stay_the_targets(tiny_trio: Any, make_sample: Callable[..., Sample]) -> None:
    parts = Parts(tiny_trio, make_sample, "xpress")
    objective = parts.objective(None)
    objective(parts.batch, 1.0).total.backward()
    without = {name for name, p in parts.drafter.named_parameters() if p.grad is None}
    assert without == {"embed_tokens.weight", "lm_head.weight"}


def test_a_sampled_vocabulary_keeps_every_label(tiny_trio: Any, make_sample: Callable[..., Sample]) -> None:
    parts = Parts(tiny_trio, make_sample, "xpress")
    objective = parts.objective(None, replace(OPTIONS, sampled_vocab=10))
    labels = torch.tensor([3, 3, 200])
    vocabulary = objective.vocabulary(labels)
    assert torch.equal(vocabulary.rows[vocabulary.place[labels]], labels)
    assert set(vocabulary.rows.tolist()) == {3, 200, *range(310, 320)}


def test_bfloat16_products_train_the_float32_weights(tiny_trio: Any, make_sample: Callable[..., Sample]) -> None:
    parts = Parts(tiny_trio, make_sample, "xpress")
    batch = parts.batch.to(torch.device("cpu"), torch.bfloat16)
    loss = parts.objective(parts.refiner, dtype=torch.bfloat16)(batch, 0.5)
    loss.total.backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in parts.drafter.parameters())
    exact = parts.objective(new_refiner_like(parts), dtype=torch.float32)(parts.batch, 0.5)
    assert float(loss.total.detach()) == pytest.approx(float(exact.total.detach()), rel=0.05)


def new_refiner_like(parts: Parts) -> Refiner:
    """The head of `parts` again: an objective takes its W2 away."""
    refiner = Refiner(parts.head_config, 1)
    with torch.no_grad():
        for parameter in refiner.parameters():
            parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(3))
    return refiner


@pytest.mark.parametrize("first_slot", [0, 1])
def test_one_batch_can_be_learned_by_heart(tiny_trio: Any, make_sample: Callable[..., Sample], first_slot: int) -> None:
    """Then every block is accepted whole: tau is the draft length plus one."""
    parts = Parts(tiny_trio, make_sample, "xpress", first_slot)
    num_labels = parts.config.num_draft_tokens
    sample = parts.samples[0]
    anchors = torch.arange(sample.num_prompt, len(sample.tokens) - 1)
    batch = build_batch([sample], [anchors], parts.config.block_size, parts.config.mask_token_id, first_slot)
    objective = parts.objective(None, LossOptions(ce=1.0, kl=0.0))
    optimizer = torch.optim.AdamW([p for p in parts.drafter.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        objective(batch, 1.0).total.backward()
        optimizer.step()
    drafts = draft_tokens(parts.drafter, None, batch, 0)
    assert torch.equal(drafts[batch.valid[0]], batch.labels[0][batch.valid[0]])
    walk = evaluate(parts.drafter, None, [("x", sample)]).walks[0]
    assert walk.tokens == len(sample.tokens) - 1 - sample.num_prompt
    assert walk.steps == -(-walk.tokens // (num_labels + 1))


def test_head_config_of_a_reduced_vocabulary(tiny_trio: Any) -> None:
    target = read_target(str(tiny_trio.target))
    config = drafter_config(replace(DRAFTER, draft_vocab_size=50), target.config, (1, 0), 317)
    head: RefinerConfig = refiner_config(RefinerOptions(rank=4), config)
    assert (config.draft_vocab_size, head.draft_vocab_size, head.vocab_size) == (50, 50, 320)


def test_the_mask_is_a_token_that_the_data_never_holds() -> None:
    assert unused_id(torch.tensor([4, 0, 2, 0, 1])) == 3
    with pytest.raises(TrainingError, match=r"set drafter\.mask_token_id"):
        unused_id(torch.ones(3))
