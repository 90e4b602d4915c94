"""Drafters and refiners to train: new ones, ones read from a checkpoint, and back into the public formats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xpress_export.exporter.configs import DecoderConfig, DrafterConfig, RefinerConfig, RopeConfig
from xpress_export.exporter.drafter_checkpoint import DrafterCheckpoint
from xpress_export.exporter.formats import write_drafter, write_refiner
from xpress_export.exporter.modules import Drafter, Refiner
from xpress_export.exporter.refiner_checkpoint import RefinerCheckpoint
from xpress_export.exporter.target_checkpoint import TargetCheckpoint
from xpress_export.training.config import DrafterOptions, RefinerOptions
from xpress_export.training.errors import TrainingError

STD = 0.02
START_NORM = 0.2
"""Scale of the final norm at the start, relative to the target's. A tied head would otherwise score the anchor
itself far above everything else, since the anchor's embedding is what the residual stream starts from."""

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
BORROWED = ("embed_tokens.weight", "lm_head.weight", "vocab.target_ids")
SMALL_OUTPUTS = ("o_proj.weight", "down_proj.weight")


def unused_id(token_counts: Tensor) -> int:
    """The last token that the data never holds: a mask that no text is mistaken for."""
    unused = (token_counts == 0).nonzero()
    if not len(unused):
        raise TrainingError("every token occurs in the data; set drafter.mask_token_id to one that is not text")
    return int(unused[-1])


def drafter_config(
    options: DrafterOptions, target: DecoderConfig, taps: tuple[int, ...], mask_token_id: int
) -> DrafterConfig:
    """The configuration of a new drafter; what `options` leaves open follows the target."""
    head_dim = options.head_dim or target.head_dim
    decoder = DecoderConfig(
        family="qwen3",
        hidden_size=target.hidden_size,
        intermediate_size=options.intermediate_size,
        num_layers=options.num_layers,
        num_heads=options.num_heads or target.num_heads,
        num_kv_heads=options.num_kv_heads or target.num_kv_heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        rms_norm_eps=1e-6,
        rope=RopeConfig(inv_freq=_inv_freq(options.rope_theta, head_dim)),
        max_positions=target.max_positions,
        tied_head=False,
        qk_norm=True,
    )
    size = options.draft_vocab_size
    return DrafterConfig(
        decoder=decoder,
        block_size=options.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=taps,
        target_hidden_size=target.hidden_size,
        first_slot=options.first_slot,
        causal_layers=(options.causal,) * options.num_layers,
        draft_vocab_size=None if size is None or size >= target.vocab_size else size,
        num_target_layers=target.num_layers,
    )


def _inv_freq(theta: float, head_dim: int) -> tuple[float, ...]:
    return tuple(theta ** (-2 * i / head_dim) for i in range(head_dim // 2))


def frequent_ids(token_counts: Tensor, size: int | None) -> Tensor | None:
    """The `size` most frequent target ids, ascending; None where the whole vocabulary is drafted."""
    if size is None or size >= len(token_counts):
        return None
    return token_counts.argsort(descending=True, stable=True)[:size].sort().values


def new_drafter(config: DrafterConfig, target: TargetCheckpoint, ids: Tensor | None, seed: int) -> Drafter:
    """A drafter with random layers; embedding and head rows `ids` are the target's, and frozen."""
    drafter = Drafter(config)
    _randomize(drafter, seed)
    _borrow(drafter, target, ids)
    drafter.norm.weight.data.copy_(target.weights.read(NORM).float() * START_NORM)
    return drafter


def load_drafter(checkpoint: DrafterCheckpoint, target: TargetCheckpoint) -> Drafter:
    """The drafter of a checkpoint in float32, with what it borrows from the target."""
    drafter = Drafter(checkpoint.config)
    _borrow(drafter, target, checkpoint.draft_to_target)
    state = {name: checkpoint.weights.read(name).float() for name in checkpoint.weights.names()}
    drafter.load_state_dict(state, strict=False)
    return drafter


def _borrow(drafter: Drafter, target: TargetCheckpoint, ids: Tensor | None) -> None:
    embedding = target.weights.read(EMBEDDING).float()
    head = embedding if target.config.tied_head else target.weights.read(HEAD).float()
    drafter.embed_tokens.weight = nn.Parameter(embedding.clone(), requires_grad=False)
    rows = head if ids is None else head[ids]
    drafter.lm_head.weight = nn.Parameter(rows.clone(), requires_grad=False)
    if ids is not None:
        drafter.vocab.target_ids = ids


def _randomize(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            std = STD / 2 if name.endswith(SMALL_OUTPUTS) else STD
            nn.init.normal_(parameter, std=std, generator=generator)


def refiner_config(options: RefinerOptions, drafter: DrafterConfig) -> RefinerConfig:
    """The configuration of a new head on `drafter`."""
    return RefinerConfig(
        kind=options.kind,
        rank=options.rank,
        hidden_size=drafter.decoder.hidden_size,
        vocab_size=drafter.decoder.vocab_size,
        draft_vocab_size=drafter.draft_vocab_size or drafter.decoder.vocab_size,
        block_size=drafter.block_size,
        num_passes=drafter.num_draft_tokens if options.kind == "markov" else options.num_passes,
        mlp_hidden=options.mlp_ratio * options.rank if options.kind == "xpress" else 0,
    )


def new_refiner(
    config: RefinerConfig,
    first_slot: int,
    ids: Tensor | None,
    seed: int,
    bigrams: tuple[Tensor, Tensor] | None,
) -> Refiner:
    """A head with random weights, or one that starts as the Markov head of `bigrams` = (W1, W2)."""
    refiner = Refiner(config, first_slot)
    _randomize(refiner, seed)
    if ids is not None:
        refiner.vocab.target_ids = ids
    if bigrams is not None:
        refiner.w1.weight.data.copy_(bigrams[0])
        refiner.w2.weight.data.copy_(bigrams[1])
        if config.kind == "xpress":  # pass the latent of the previous token through
            refiner.in_proj.weight.data[:, 2 * config.rank :] = torch.eye(config.rank)
            nn.init.zeros_(refiner.mlp.down_proj.weight)
    return refiner


def load_refiner(checkpoint: RefinerCheckpoint, drafter: DrafterCheckpoint) -> Refiner:
    """The head of a checkpoint in float32."""
    refiner = Refiner(checkpoint.config, drafter.config.first_slot)
    state = {name: checkpoint.weights.read(name).float() for name in checkpoint.weights.names()}
    refiner.load_state_dict(state, strict=False)
    if drafter.draft_to_target is not None:
        refiner.vocab.target_ids = drafter.draft_to_target
    return refiner


def bigram_factors(
    responses: Iterable[tuple[int, ...]], draft_ids: Tensor, num_rows: int, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    """W1 [V, r] and W2 [Vd, r] whose product is the best rank-r fit of the positive log-odds of token pairs.

    log-odds of (a, b): log of how much likelier b is after a than anywhere. draft_ids: int64 [V], -1 for tokens
    outside the drafter's vocabulary of `num_rows` rows. scale: factor of the product.
    """
    pairs = torch.cat([torch.tensor(r).unfold(0, 2, 1) for r in responses if len(r) > 1])
    pairs = torch.stack((pairs[:, 0], draft_ids[pairs[:, 1]]))
    pairs, counts = torch.unique(pairs[:, pairs[1] >= 0], dim=1, return_counts=True)
    counts = counts.double()
    before = torch.zeros(len(draft_ids), dtype=torch.float64).index_add_(0, pairs[0], counts)
    after = torch.zeros(num_rows, dtype=torch.float64).index_add_(0, pairs[1], counts)
    odds = (counts * counts.sum() / (before[pairs[0]] * after[pairs[1]])).log().clamp(min=0)
    odds = odds * counts / (counts + 2)  # rare pairs say little
    table = torch.sparse_coo_tensor(pairs, odds.float(), (len(draft_ids), num_rows), check_invariants=True)
    table = table.coalesce()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # svd_lowrank draws its test vectors from the global generator
        u, s, v = torch.svd_lowrank(table, q=rank, niter=4)
    root = (scale * s).sqrt()
    return u * root, v * root


def trained_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """The drafter's tensors as its folder stores them: what it borrows left out, `d2t` added."""
    tensors = {name: t for name, t in drafter.state_dict().items() if name not in BORROWED}
    if drafter.vocab.target_ids is not None:
        ids = drafter.vocab.target_ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
    return tensors


def save_drafter(folder: Path, drafter: Drafter, rope_theta: float, dtype: torch.dtype = torch.float16) -> None:
    """Write the drafter as a z-lab folder."""
    write_drafter(folder, drafter.config, _stored(trained_tensors(drafter), dtype), _rope(rope_theta))


def save_refiner(
    folder: Path,
    config: RefinerConfig,
    state: Mapping[str, Tensor],
    first_slot: int,
    dtype: torch.dtype = torch.float16,
) -> None:
    """Write the head as an xPress (or Markov) serving folder of its own."""
    kept = {name: t for name, t in state.items() if name != "vocab.target_ids"}
    write_refiner(folder, config, _stored(kept, dtype), first_slot)


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


def _stored(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
