"""Many blocks at once draft what the drafter drafts one block at a time, and never see more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from xpress_export.exporter.modules import Drafter
from xpress_export.training.blocks import BlockBatch, Sample, build_batch, draft_blocks, draw_anchors, drop_features

FLOAT_TOLERANCE = 2e-5  # float32, products summed in another order


@pytest.fixture
def drafter(tiny_trio: Any) -> Drafter:
    return tiny_trio.drafter_module  # layer 0 is causal with a window, layer 1 bidirectional


def batch_of(drafter: Drafter, samples: list[Sample], anchors: list[list[int]]) -> BlockBatch:
    config = drafter.config
    return build_batch(
        samples, [torch.tensor(a) for a in anchors], config.block_size, config.mask_token_id, config.first_slot
    )


def one_block(drafter: Drafter, sample: Sample, anchor: int) -> torch.Tensor:
    """The block at `anchor` by the module's own forward, with a cache of exactly the context."""
    decoder, size = drafter.config.decoder, drafter.config.block_size
    shape = (1, decoder.num_kv_heads, anchor, decoder.head_dim)
    cache = [torch.zeros(shape) for _ in range(2 * decoder.num_layers)]
    ids = torch.full((1, size), drafter.config.mask_token_id)
    ids[0, 0] = sample.tokens[anchor]
    rows = sample.features[:anchor].unsqueeze(0)
    states, _, _ = drafter(rows, torch.tensor([anchor]), torch.tensor([0]), ids, cache)
    return states[0]


@torch.no_grad()
def test_many_blocks_are_the_single_blocks(drafter: Drafter, make_sample: Callable[..., Sample]) -> None:
    samples = [make_sample(drafter.config, 0, num_prompt=30), make_sample(drafter.config, 1)]
    anchors = [[30, 33, 41], [6, 7, 18]]
    states = draft_blocks(drafter, batch_of(drafter, samples, anchors))
    for i, sample in enumerate(samples):
        for j, anchor in enumerate(anchors[i]):
            expected = one_block(drafter, sample, anchor)
            assert (states[i, j] - expected).abs().max() < FLOAT_TOLERANCE * expected.abs().max()


@torch.no_grad()
def test_a_block_sees_nothing_from_its_anchor_on(drafter: Drafter, make_sample: Callable[..., Sample]) -> None:
    sample = make_sample(drafter.config, 0)
    tokens, features = sample.tokens.clone(), sample.features.clone()
    tokens[11:] = (tokens[11:] + 1) % 200
    features[10:] += 100.0
    changed = replace(sample, tokens=tokens, features=features)
    before, after = (draft_blocks(drafter, batch_of(drafter, [s], [[8, 10, 15]]))[0] for s in (sample, changed))
    assert torch.equal(before[:2], after[:2])
    assert not torch.equal(before[2], after[2])


@torch.no_grad()
def test_a_block_sees_no_other_block(drafter: Drafter, make_sample: Callable[..., Sample]) -> None:
    batch = batch_of(drafter, [make_sample(drafter.config, 0)], [[8, 9, 15]])
    block_ids = batch.block_ids.clone()
    block_ids[0, 1] = 5
    before, after = draft_blocks(drafter, batch)[0], draft_blocks(drafter, replace(batch, block_ids=block_ids))[0]
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert not torch.equal(before[1], after[1])


@torch.no_grad()
def test_padding_changes_nothing(drafter: Drafter, make_sample: Callable[..., Sample]) -> None:
    short, long = make_sample(drafter.config, 0), make_sample(drafter.config, 1, num_response=40)
    alone = draft_blocks(drafter, batch_of(drafter, [short], [[8, 10]]))
    padded = draft_blocks(drafter, batch_of(drafter, [short, long], [[8, 10], [8, 10, 30]]))
    assert (alone[0] - padded[0, :2]).abs().max() < FLOAT_TOLERANCE * alone.abs().max()


@pytest.mark.parametrize("first_slot", [0, 1])
def test_labels_are_the_tokens_after_the_anchor(
    drafter: Drafter, make_sample: Callable[..., Sample], first_slot: int
) -> None:
    sample = make_sample(drafter.config, 0)
    batch = build_batch([sample], [torch.tensor([7, 17])], 4, 319, first_slot)
    tokens = sample.tokens
    assert batch.labels[0, 0].tolist() == tokens[8 : 8 + 4 - first_slot].tolist()
    assert batch.block_ids[0, 0].tolist() == [int(tokens[7]), 319, 319, 319]
    assert batch.previous[0].tolist() == tokens[[6, 16]].tolist()
    assert batch.final_hidden is not None and sample.final_hidden is not None
    assert torch.equal(batch.final_hidden[0, 0], sample.final_hidden[7 : 7 + 4 - first_slot])


def test_valid_is_a_prefix_of_each_block(drafter: Drafter, make_sample: Callable[..., Sample]) -> None:
    samples = [make_sample(drafter.config, seed, num_response=5 + seed) for seed in range(4)]
    anchors = [torch.arange(s.num_prompt, len(s.tokens) - 1) for s in samples]
    batch = build_batch(samples, anchors, 8, 319)
    valid = batch.valid.long()
    assert torch.equal(valid, valid.cumprod(dim=-1))
    for i, sample in enumerate(samples):
        left = [min(7, len(sample.tokens) - 1 - int(a)) for a in anchors[i]]
        assert valid[i].sum(dim=-1).tolist() == left + [0] * (valid.shape[1] - len(left))


def test_anchors_are_answer_tokens_with_something_after_them(
    make_sample: Callable[..., Sample], drafter: Drafter
) -> None:
    sample = make_sample(drafter.config, 0)
    drawn = draw_anchors(sample, 100, torch.Generator().manual_seed(0))
    assert drawn.tolist() == list(range(sample.num_prompt, len(sample.tokens) - 1))
    few = draw_anchors(sample, 3, torch.Generator().manual_seed(1))
    assert len(few) == 3 and few.tolist() == sorted(set(few.tolist()))


def test_anchors_in_the_prompt_are_drawn_beside_those_in_the_answer(
    make_sample: Callable[..., Sample], drafter: Drafter
) -> None:
    sample, generator = make_sample(drafter.config, 0), torch.Generator().manual_seed(0)
    drawn = draw_anchors(sample, 2, generator, in_prompt=100, first=3)
    assert drawn[:-2].tolist() == list(range(3, sample.num_prompt)) and (drawn[-2:] >= sample.num_prompt).all()
    assert len(draw_anchors(sample, 2, generator, in_prompt=4, first=sample.num_prompt)) == 2


def test_dropped_features_keep_their_mean() -> None:
    features = torch.ones(100, 200, dtype=torch.bfloat16)
    dropped = drop_features(features, 0.25, torch.Generator().manual_seed(0))
    assert dropped.dtype == torch.bfloat16
    assert dropped.unique().tolist() == [0.0, pytest.approx(4 / 3, rel=1e-2)]
    assert float(dropped.float().mean()) == pytest.approx(1, abs=0.02)
    assert torch.equal(drop_features(features, 0.0, torch.Generator()), features)
