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
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from xpress_export.exporter.modules import Attention, Drafter, additive
from xpress_export.exporter.ops import rotate


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

    def to(self, device: torch.device, dtype: torch.dtype) -> BlockBatch:
        """The batch on `device`, its hidden states in `dtype`."""
        found = ((f.name, getattr(self, f.name)) for f in fields(self))
        moved = {name: t.to(device, dtype if t.is_floating_point() else t.dtype) for name, t in found if t is not None}
        return BlockBatch(**moved)


def draw_anchors(
    sample: Sample, count: int, generator: torch.Generator, *, in_prompt: int = 0, first: int = 1
) -> Tensor:
    """Up to `count` anchor positions in the answer and `in_prompt` in the prompt from `first` on, sorted.

    Each has a label to predict; there are fewer where a part is too short.
    """
    answer = _draw(max(1, sample.num_prompt), len(sample.tokens) - 1, count, generator)
    if not in_prompt:
        return answer
    prompt = _draw(max(1, first), min(sample.num_prompt, len(sample.tokens) - 1), in_prompt, generator)
    return torch.cat((prompt, answer))


def _draw(start: int, stop: int, count: int, generator: torch.Generator) -> Tensor:
    """Up to `count` different numbers of start..stop - 1, ascending."""
    choices = torch.arange(start, max(start, stop))
    order = torch.randperm(len(choices), generator=generator)[:count]
    return choices[order].sort().values


def drop_features(features: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """`features` with a random `share` of its numbers set to zero and the rest scaled up, in steps of 1/256."""
    cut = round(256 * share)
    draws = torch.empty(features.shape, dtype=torch.uint8).random_(generator=generator)
    return features * (draws >= cut) * (256 / (256 - cut))


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


def block_mask(anchors: Tensor, num_rows: int, block_size: int, causal: bool, window: int | None = None) -> Tensor:
    """True where a slot may attend: bool [S, A*N, T + N], context rows, then the slots of its own block.

    A slot sees the context rows before its own anchor and the slots of its own block (earlier ones and itself
    if `causal`); never a row from the anchor on.
    """
    slot = torch.arange(block_size, device=anchors.device)
    query = (anchors.unsqueeze(-1) + slot).unsqueeze(-1)  # (S, A, N, 1) positions
    row = torch.arange(num_rows, device=anchors.device)
    context = (row < anchors[:, :, None, None]).expand(-1, -1, block_size, -1)
    block = torch.ones(block_size, block_size, dtype=torch.bool, device=anchors.device)
    if causal:
        block = slot <= slot.unsqueeze(1)
    if window is not None:
        context = context & (query - row < window)
        block = block & (slot.unsqueeze(1) - slot < window)
        if not causal:
            block = block & (slot - slot.unsqueeze(1) < window)
    return torch.cat((context, block.expand(*anchors.shape, -1, -1)), dim=-1).flatten(1, 2)


def draft_blocks(drafter: Drafter, batch: BlockBatch) -> Tensor:
    """Post-norm hidden states of every block, [S, A, N, E], as `Drafter.forward` gives them one at a time."""
    hidden = drafter.embed_tokens(batch.block_ids).flatten(1, 2)  # (S, A*N, E)
    dtype, block_size, num_rows = hidden.dtype, batch.block_ids.shape[2], batch.features.shape[1]
    features = drafter.context(batch.features, dtype)
    row = torch.arange(num_rows, device=hidden.device).expand(len(features), -1)
    slot = batch.anchors.unsqueeze(-1) + torch.arange(block_size, device=hidden.device)
    context_rope, block_rope = drafter.rope(row, dtype), drafter.rope(slot.flatten(1), dtype)
    kinds = list(zip(drafter.config.causal_layers, drafter.config.decoder.layer_windows, strict=True))
    masks = {
        kind: additive(block_mask(batch.anchors, num_rows, block_size, *kind), dtype) for kind in dict.fromkeys(kinds)
    }
    for layer, kind in zip(drafter.layers, kinds, strict=True):
        normed = layer.input_layernorm(hidden)
        hidden = hidden + _attention(layer.self_attn, normed, block_rope, features, context_rope, masks[kind])
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return _split(drafter.norm(hidden), 1, block_size)


def _attention(
    attention: Attention,
    normed: Tensor,
    block_rope: tuple[Tensor, Tensor],
    features: Tensor,
    context_rope: tuple[Tensor, Tensor],
    mask: Tensor,
) -> Tensor:
    """Attend from every slot to its context and its block, [S, A*N, E]; `mask` [S, 1, A*N, T + N].

    Scores against the context are one product per sequence, those within a block one small product per block,
    so the cost does not grow with the square of the number of blocks.
    """
    context_keys, context_values = attention.keys_values(features, context_rope)  # (S, H, T, D)
    keys, values = attention.keys_values(normed, block_rope)  # (S, H, A*N, D)
    query = attention._heads(attention.q_proj(normed), attention.q_norm)
    query = rotate(query, *block_rope)  # (S, Hq, A*N, D)
    num_rows, head_dim = context_keys.shape[2:]
    size = mask.shape[-1] - num_rows
    query = _split(query, 1, query.shape[1] // keys.shape[1]) * head_dim**-0.5  # (S, H, G, A*N, D)
    context_scores = query.flatten(2, 3) @ context_keys.transpose(2, 3)  # (S, H, G*A*N, T)
    blocks = _split(query, 3, size).transpose(2, 3).flatten(3, 4)  # (S, H, A, G*N, D)
    block_scores = blocks @ _split(keys, 2, size).transpose(3, 4)  # (S, H, A, G*N, N)
    block_scores = _split(block_scores, 3, size).transpose(2, 3).flatten(3, 4)  # (S, H, G, A*N, N)
    scores = torch.cat((context_scores.view(*block_scores.shape[:-1], num_rows), block_scores), dim=-1)
    weights = torch.softmax(scores + mask.unsqueeze(1), dim=-1)
    out = (weights[..., :num_rows].flatten(2, 3) @ context_values).view_as(query)
    within = _split(weights[..., num_rows:], 3, size).transpose(2, 3).flatten(3, 4)  # (S, H, A, G*N, N)
    mixed = _split(within @ _split(values, 2, size), 3, size)  # (S, H, A, G, N, D)
    out = out + mixed.transpose(2, 3).flatten(3, 4)
    return attention.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def _split(x: Tensor, axis: int, size: int) -> Tensor:
    """`x` with `axis` split in two, the inner one of `size`."""
    return x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
