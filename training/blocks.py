"""Many draft blocks of a sequence in one forward: anchors, validity, block-diagonal masks.

A training batch, with S sequences, A anchors each, T context rows, N slots and J = N - first_slot predictions:

    name           dtype   shape           what it is
    features       float   [S, T, K*E]     target_hidden of the sequence, row t for token t
    block_ids      int64   [S, A, N]       the anchor, then mask ids
    anchors        int64   [S, A]          position of the anchor; rows before it are its context
    previous       int64   [S, A]          the token before the anchor
    labels         int64   [S, A, J]       tokens after the anchor, unshifted: labels[..., k] is token anchor+1+k
    valid          bool    [S, A, J]       a prefix of each block: false from the first missing label on
    final_hidden   float   [S, A, J, E]    the target's post-norm state that predicts each label, or None

The layers are those of `exporter.modules.Drafter`; only the batching differs from its `forward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from xpress_export.exporter.modules import Drafter, additive


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sequence. tokens: int64 [P + R], prompt then answer. num_prompt: P.

    features: [>= P + R - 1, K*E]. final_hidden: [>= P + R - 1, E] or None.
    """

    tokens: Tensor
    num_prompt: int
    features: Tensor
    final_hidden: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class BlockBatch:
    """See the module docstring."""

    features: Tensor
    block_ids: Tensor
    anchors: Tensor
    previous: Tensor
    labels: Tensor
    valid: Tensor
    final_hidden: Tensor | None = None


def draw_anchors(sample: Sample, count: int, generator: torch.Generator, first: int | None = None) -> Tensor:
    """`count` anchor positions (fewer if there are not as many), sorted, each with a label to predict.

    first: the earliest anchor; by default the first token of the answer.
    """
    start = max(1, sample.num_prompt if first is None else first)
    choices = torch.arange(start, len(sample.tokens) - 1)
    order = torch.randperm(len(choices), generator=generator)[:count]
    return choices[order].sort().values


def build_batch(
    samples: Sequence[Sample],
    anchors: Sequence[Tensor],
    block_size: int,
    mask_token_id: int,
    first_slot: int = 1,
) -> BlockBatch:
    """Pad `samples` and their `anchors` to one batch; padding is invalid and sees nothing but its own block."""
    num_anchors = max(len(a) for a in anchors)
    num_labels = block_size - first_slot
    rows = max(int(a[-1]) if len(a) else 0 for a in anchors)
    features = torch.stack([_padded(s.features[:rows], rows) for s in samples])
    padded = torch.stack([_padded(a, num_anchors) for a in anchors])  # (S, A), padding is anchor 0
    real = torch.stack([torch.arange(num_anchors) < len(a) for a in anchors])
    wanted = padded.unsqueeze(-1) + 1 + torch.arange(num_labels)  # (S, A, J) positions of the labels
    lengths = torch.tensor([len(s.tokens) for s in samples])
    valid = real.unsqueeze(-1) & (wanted < lengths[:, None, None])
    tokens = torch.stack([_padded(s.tokens, int(lengths.max())) for s in samples])
    labels = _gather(tokens, wanted.clamp(max=tokens.shape[1] - 1)).masked_fill(~valid, 0)
    block_ids = torch.full((*padded.shape, block_size), mask_token_id)
    block_ids[..., 0] = _gather(tokens, padded)
    return BlockBatch(
        features=features,
        block_ids=block_ids,
        anchors=padded,
        previous=_gather(tokens, (padded - 1).clamp(min=0)),
        labels=labels,
        valid=valid,
        final_hidden=_label_states(samples, wanted - 1),
    )


def _padded(rows: Tensor, length: int) -> Tensor:
    """`rows` [n, ...] with zero rows appended up to `length`."""
    if len(rows) >= length:
        return rows[:length]
    return torch.cat((rows, rows.new_zeros(length - len(rows), *rows.shape[1:])))


def _gather(tokens: Tensor, positions: Tensor) -> Tensor:
    """`tokens` [S, n] at `positions` [S, ...]."""
    return tokens.gather(1, positions.flatten(1)).view(positions.shape)


def _label_states(samples: Sequence[Sample], positions: Tensor) -> Tensor | None:
    """The target's post-norm states at `positions` [S, A, J] -> [S, A, J, E]; None unless all samples have them."""
    states = [s.final_hidden for s in samples]
    if any(state is None for state in states):
        return None
    pairs = zip(states, positions, strict=True)
    return torch.stack([state[at.clamp(max=len(state) - 1)] for state, at in pairs if state is not None])


def block_mask(
    anchors: Tensor, num_rows: int, block_size: int, causal: bool, window: int | None = None
) -> Tensor:
    """True where a slot may attend: bool [S, A*N, T + A*N].

    A slot sees the context rows before its own anchor and the slots of its own block (earlier ones and itself
    if `causal`); never another block, never a row from the anchor on.
    """
    num_anchors = anchors.shape[1]
    slot = torch.arange(block_size, device=anchors.device).repeat(num_anchors)  # (A*N,)
    owner = torch.arange(num_anchors, device=anchors.device).repeat_interleave(block_size)
    anchor = anchors.repeat_interleave(block_size, dim=1).unsqueeze(-1)  # (S, A*N, 1)
    row = torch.arange(num_rows, device=anchors.device)
    context = row < anchor
    block = owner.unsqueeze(1) == owner
    if causal:
        block = block & (slot <= slot.unsqueeze(1))
    if window is not None:
        context = context & (anchor + slot.unsqueeze(-1) - row < window)
        block = block & (slot.unsqueeze(1) - slot < window)
        if not causal:
            block = block & (slot - slot.unsqueeze(1) < window)
    return torch.cat((context, block.expand(anchors.shape[0], -1, -1)), dim=2)


def draft_blocks(drafter: Drafter, batch: BlockBatch) -> Tensor:
    """Post-norm hidden states of every block, [S, A, N, E], as `Drafter.forward` gives them one at a time."""
    hidden = drafter.embed_tokens(batch.block_ids).flatten(1, 2)  # (S, A*N, E)
    dtype, block_size, num_rows = hidden.dtype, batch.block_ids.shape[2], batch.features.shape[1]
    features = drafter.context(batch.features, dtype)
    row = torch.arange(num_rows, device=hidden.device).expand(len(features), -1)
    slot = batch.anchors.unsqueeze(-1) + torch.arange(block_size, device=hidden.device)
    context_rope, block_rope = drafter.rope(row, dtype), drafter.rope(slot.flatten(1), dtype)
    kinds = list(zip(drafter.config.causal_layers, drafter.config.decoder.layer_windows, strict=True))
    masks = {kind: _additive_mask(batch, kind, dtype) for kind in dict.fromkeys(kinds)}
    for layer, kind in zip(drafter.layers, kinds, strict=True):
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        context_keys, context_values = attention.keys_values(features, context_rope)
        block_keys, block_values = attention.keys_values(normed, block_rope)
        keys = torch.cat((context_keys, block_keys), dim=2)
        values = torch.cat((context_values, block_values), dim=2)
        groups = drafter.config.decoder.num_heads // drafter.config.decoder.num_kv_heads
        keys, values = (
            x.repeat_interleave(groups, dim=1) for x in (keys, values)
        )  # fast kernels want equal heads
        hidden = hidden + attention(normed, block_rope, keys, values, masks[kind])
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return drafter.norm(hidden).unflatten(1, batch.block_ids.shape[1:])  # type: ignore[no-any-return]


def _additive_mask(batch: BlockBatch, kind: tuple[bool, int | None], dtype: torch.dtype) -> Tensor:
    size = batch.block_ids.shape[2]
    return additive(block_mask(batch.anchors, batch.features.shape[1], size, *kind), dtype)
