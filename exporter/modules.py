"""The three models of a trio as PyTorch modules that follow the graph contract of `xpress_export.names`, and `Accept`.

One decoder block serves target and drafter; the Markov head is a branch of the refiner, not a second class.
Parameter names are those of the public checkpoints, so a state dict loads without renaming:
Hugging Face's for the target, z-lab's for the drafter, the xPress serving names (prefix removed) for the refiner.

Sources: dFlash, arXiv 2602.06036 and z-lab/dflash; xPress, arXiv 2608.02438. Maths only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from xpress_export.exporter.configs import DecoderConfig, DrafterConfig, RefinerConfig, RopeConfig
from xpress_export.exporter.ops import MASK_VALUE, attend, rms_norm, rotate, write_rows


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Rope(nn.Module):
    """cos and sin of positions [B, S] int64 -> 2 x [B, S, D/2], computed in float32 and cast to `dtype`."""

    inv_freq: Tensor

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor(config.inv_freq, dtype=torch.float32), persistent=False)
        self.attention_scaling = config.attention_scaling

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions.unsqueeze(-1).float() * self.inv_freq
        cos, sin = torch.cos(angles), torch.sin(angles)
        if self.attention_scaling != 1.0:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        return cos.to(dtype), sin.to(dtype)


class Attention(nn.Module):
    """Grouped-query attention whose keys and values the caller provides.

    `keys_values` projects rows into rotated keys and values; `forward` attends over whatever the caller
    assembled (target: the cache; drafter: the cache and the block).
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def _heads(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        heads = x.reshape(*x.shape[:-1], -1, self.head_dim)  # (B, S, H, D)
        if norm is not None:
            heads = norm(heads)
        return heads.transpose(1, 2)  # (B, H, S, D)

    def keys_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """`x` [B, S, E] -> keys (normed, rotated) and values, each [B, H, S, D]."""
        return rotate(self._heads(self.k_proj(x), self.k_norm), *rope), self._heads(self.v_proj(x), None)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        query = rotate(self._heads(self.q_proj(x), self.q_norm), *rope)
        out = attend(query, keys, values, mask, self.head_dim**-0.5)  # (B, Hq, S, D)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class SwiGLU(nn.Module):
    def __init__(self, size: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, hidden, bias=bias)
        self.up_proj = nn.Linear(size, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, config.mlp_bias)


class Blocks(nn.ModuleList):
    """The layers of a decoder; iteration knows what they are."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(Block(config) for _ in range(config.num_layers))

    def __iter__(self) -> Iterator[Block]:
        return cast(Iterator[Block], super().__iter__())


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean [B, S, T] (True: attend) into the additive mask [B, 1, S, T]."""
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, torch.full_like(zero, MASK_VALUE)).unsqueeze(1)


def positions_from(start: Tensor, length: int) -> Tensor:
    """`start` [B] -> [B, length]: start, start + 1, ..."""
    return start.unsqueeze(1) + torch.arange(length, device=start.device)


class Backbone(nn.Module):
    """Embedding, layers and final norm, under Hugging Face's names."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = Blocks(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Target(nn.Module):
    """The target LLM: a causal decoder that keeps its cache in place and reports the hidden states it is tapped for.

    target_layer_ids: layers whose output is tapped, in this order; empty: no tap output.
    """

    def __init__(self, config: DecoderConfig, target_layer_ids: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.config = config
        self.target_layer_ids = target_layer_ids
        self.model = Backbone(config)
        self.rope = Rope(config.rope)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.model.embed_tokens.weight

    def _masks(self, positions: Tensor, capacity: int, dtype: torch.dtype) -> dict[int | None, Tensor]:
        column = torch.arange(capacity, device=positions.device)
        visible = column <= positions.unsqueeze(-1)  # (B, S, C)
        return {
            window: additive(
                visible if window is None else visible & (column > positions.unsqueeze(-1) - window), dtype
            )
            for window in dict.fromkeys(self.config.layer_windows)
        }

    def forward(
        self, input_ids: Tensor, write_index: Tensor, cache: list[Tensor]
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """One call over S tokens.

        input_ids: int64 [B, S]. write_index: int64 [B], rows already committed.
        cache: key and value of each layer, alternating, [B, H, C, D].
        Returns logits [B, S, V], target_hidden [B, S, K*E] or None, and the updated cache.
        """
        hidden = self.model.embed_tokens(input_ids)
        positions = positions_from(write_index, input_ids.shape[1])
        rope = self.rope(positions, hidden.dtype)
        masks = self._masks(positions, cache[0].shape[2], hidden.dtype)
        taps = {-1: hidden} if -1 in self.target_layer_ids else {}
        present: list[Tensor] = []
        for i, layer in enumerate(self.model.layers):
            normed = layer.input_layernorm(hidden)
            keys, values = layer.self_attn.keys_values(normed, rope)
            keys = write_rows(cache[2 * i], keys, write_index)
            values = write_rows(cache[2 * i + 1], values, write_index)
            present += [keys, values]
            mask = masks[self.config.layer_windows[i]]
            hidden = hidden + layer.self_attn(normed, rope, keys, values, mask)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            if i in self.target_layer_ids:
                taps[i] = hidden
        hidden = self.model.norm(hidden)
        if self.config.num_layers - 1 in taps:  # transformers' last hidden state is normalised, and drafters learn it
            taps[self.config.num_layers - 1] = hidden
        tapped = torch.cat([taps[i] for i in self.target_layer_ids], dim=-1) if self.target_layer_ids else None
        return self.lm_head(hidden), tapped, present


class DraftVocab(nn.Module):
    """Row of the drafter's head -> token id of the target; the identity unless the head is reduced.

    `target_ids` is int64 [Vd], absolute ids (speculators checkpoints store offsets, the reader adds the row).
    """

    target_ids: Tensor | None

    def __init__(self, draft_vocab_size: int, vocab_size: int) -> None:
        super().__init__()
        reduced = draft_vocab_size != vocab_size
        self.register_buffer("target_ids", torch.zeros(draft_vocab_size, dtype=torch.int64) if reduced else None)

    def forward(self, rows: Tensor) -> Tensor:
        return rows if self.target_ids is None else F.embedding(rows, self.target_ids.unsqueeze(1)).squeeze(-1)


class Drafter(nn.Module):
    """A dFlash drafter: one bidirectional pass over [anchor, mask, ..., mask] drafts a whole block.

    The context of committed tokens enters as extra keys and values of every layer, projected from the target's
    hidden states; only these rows are cached. Block rows live for one call, so a rejected draft needs no rollback.
    Embedding and head are the target's unless the checkpoint brings its own.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        decoder = config.decoder
        self.config = config
        self.embed_tokens = nn.Embedding(decoder.vocab_size, decoder.hidden_size)
        width = len(config.target_layer_ids) * config.target_hidden_size
        self.fc = nn.Linear(width, decoder.hidden_size, bias=False, dtype=torch.float32)
        self.hidden_norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps, dtype=torch.float32)
        self.layers = Blocks(decoder)
        self.norm = RMSNorm(decoder.hidden_size, decoder.rms_norm_eps)
        self.rope = Rope(decoder.rope)
        head_rows = config.draft_vocab_size or decoder.vocab_size
        self.lm_head = nn.Linear(decoder.hidden_size, head_rows, bias=False)
        self.vocab = DraftVocab(head_rows, decoder.vocab_size)

    def context(self, target_hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """`target_hidden` [B, S, K*E] -> context features [B, S, E].

        fc and hidden_norm stay in float32 in a float16 export: features of real models pass 2e4 and their sum
        would overflow; the norm brings them back to order one before the cast to `dtype`.
        """
        features: Tensor = self.hidden_norm(self.fc(target_hidden.to(self.fc.weight.dtype)))
        return features.to(dtype)

    def mask(
        self,
        context_length: Tensor,
        block: Tensor,
        capacity: int,
        window: int | None,
        causal: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        """Additive mask [B, 1, N, C + N]: cache rows before the anchor, then the block itself.

        context_length: int64 [B], also the position of the anchor. block: int64 [B, N], positions of the slots.
        """
        column = torch.arange(capacity, device=block.device).expand(block.shape[0], -1)
        keys = torch.cat((column, block), dim=1).unsqueeze(1)  # (B, 1, C + N) positions
        query = block.unsqueeze(-1)  # (B, N, 1)
        in_cache = (column < context_length.unsqueeze(1)).unsqueeze(1).expand(-1, block.shape[1], -1)
        in_block = block.unsqueeze(1) <= query if causal else torch.ones_like(block.unsqueeze(1) <= query)
        visible = torch.cat((in_cache, in_block), dim=2)
        if window is not None:
            visible = visible & (query - keys < window)
            if not causal:
                visible = visible & (keys - query < window)
        return additive(visible, dtype)

    def forward(
        self,
        target_hidden: Tensor,
        num_committed: Tensor,
        write_index: Tensor,
        block_ids: Tensor,
        cache: list[Tensor],
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Append committed context rows, then draft one block.

        target_hidden: float [B, S, K*E], rows of the last target call. num_committed: int64 [B], how many count.
        write_index: int64 [B], rows already in `cache`. block_ids: int64 [B, N], anchor then mask ids.
        cache: key and value of each layer, alternating, [B, H, C, D].
        Returns draft_hidden [B, N, E] (post-norm), draft logits [B, N - first_slot, Vd], the updated cache.
        """
        hidden = self.embed_tokens(block_ids)
        features = self.context(target_hidden, hidden.dtype)
        anchor_position = write_index + num_committed
        block = positions_from(anchor_position, block_ids.shape[1])
        context_rope = self.rope(positions_from(write_index, target_hidden.shape[1]), hidden.dtype)
        block_rope = self.rope(block, hidden.dtype)
        decoder, capacity = self.config.decoder, cache[0].shape[2]
        kinds = list(zip(decoder.layer_windows, self.config.causal_layers, strict=True))
        masks = {
            kind: self.mask(anchor_position, block, capacity, *kind, hidden.dtype) for kind in dict.fromkeys(kinds)
        }
        present: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            keys, values = layer.self_attn.keys_values(features, context_rope)
            present += [
                write_rows(cache[2 * i], keys, write_index),
                write_rows(cache[2 * i + 1], values, write_index),
            ]
            normed = layer.input_layernorm(hidden)
            block_keys, block_values = layer.self_attn.keys_values(normed, block_rope)
            keys = torch.cat((present[-2], block_keys), dim=2)
            values = torch.cat((present[-1], block_values), dim=2)
            hidden = hidden + layer.self_attn(normed, block_rope, keys, values, masks[kinds[i]])
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        hidden = self.norm(hidden)
        return hidden, self.lm_head(hidden[:, self.config.first_slot :]), present


def fold_mixer(raw: Tensor) -> Tensor:
    """Raw mixer weights [r, B, B], as checkpoints store them -> causal mask and identity applied."""
    return torch.tril(raw) + torch.eye(raw.shape[-1], dtype=raw.dtype, device=raw.device)


class Mixer(nn.Module):
    """Per-channel causal token mixer: x_k = a_k + sum over j <= k of L[c, k, j] a_{j,c}.

    Trained as raw `L` [r, B, B]; an exported graph holds `folded`, so that folding happens exactly once.
    """

    def __init__(self, rank: int, block_size: int, folded: bool) -> None:
        super().__init__()
        weight = nn.Parameter(torch.zeros(rank, block_size, block_size))
        self.L = None if folded else weight
        self.folded = weight if folded else None

    def forward(self, a: Tensor) -> Tensor:
        weight = self.folded if self.L is None else fold_mixer(self.L)
        assert weight is not None
        weight = weight[:, : a.shape[1], : a.shape[1]]  # a shorter block uses the leading slots
        return (weight @ a.permute(2, 1, 0)).permute(2, 1, 0)  # (r, N, N) @ (r, N, B)


class Refiner(nn.Module):
    """xPress: a causal correction of a whole block, an additive logit bias of rank r.

    latent_k = W1[previous_k];  a_k = W_in [D_h h_k; D_g mean(h); latent_k];  x = mix(a);  y = x + SwiGLU(x);
    refined logits_k = draft logits_k + W2 y_k.  The Markov head is the case y = latent.

    One `forward` is one Jacobi pass. Being strictly causal, pass i fixes slot i for good: after as many passes as
    there are draft tokens the result is exactly the left-to-right decode.
    """

    def __init__(self, config: RefinerConfig, first_slot: int = 1, *, folded: bool = False) -> None:
        super().__init__()
        rank = config.rank
        self.config = config
        self.first_slot = first_slot
        self.w1 = nn.Embedding(config.vocab_size, rank)
        self.w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        self.vocab = DraftVocab(config.draft_vocab_size, config.vocab_size)
        if config.kind == "xpress":
            self.down_h = nn.Linear(config.hidden_size, rank, bias=False)
            self.down_g = nn.Linear(config.hidden_size, rank, bias=False)
            self.in_proj = nn.Linear(3 * rank, rank, bias=False)
            self.mix = Mixer(rank, config.block_size, folded)
            self.mlp = SwiGLU(rank, config.mlp_hidden)

    def bias(self, draft_hidden: Tensor | None, previous_ids: Tensor) -> Tensor:
        """`draft_hidden` [B, N, E] and the token before each slot, int64 [B, N] -> logit bias [B, N - first, Vd]."""
        latent = self.w1(previous_ids)
        if draft_hidden is None or self.config.kind == "markov":
            return self.w2(latent[:, self.first_slot :])  # type: ignore[no-any-return]
        pooled = self.down_g(draft_hidden.mean(dim=1, keepdim=True)).expand_as(latent)
        a = self.in_proj(torch.cat((self.down_h(draft_hidden), pooled, latent), dim=-1))
        x = self.mix(a)
        return self.w2((x + self.mlp(x))[:, self.first_slot :])  # type: ignore[no-any-return]

    def previous_ids(self, draft_tokens: Tensor, anchor: Tensor, previous: Tensor) -> Tensor:
        """The token before each slot, [B, N].

        Fill-in (slot 0 is the anchor): [previous, anchor, draft_1 .. draft_{N-2}].
        Anchor-sampled (slot 0 already drafts): [anchor, draft_0 .. draft_{N-2}].
        """
        known = torch.stack((previous, anchor), dim=1) if self.first_slot else anchor.unsqueeze(1)
        return torch.cat((known, draft_tokens[:, :-1]), dim=1)

    def forward(
        self,
        draft_logits: Tensor,
        draft_tokens: Tensor,
        anchor: Tensor,
        previous: Tensor,
        draft_hidden: Tensor | None = None,
    ) -> Tensor:
        """One Jacobi pass over the block; returns refined logits [B, N - first, Vd].

        draft_hidden [B, N, E] is needed by xPress and not read by a Markov head.
        """
        return draft_logits + self.bias(draft_hidden, self.previous_ids(draft_tokens, anchor, previous))


class Accept(nn.Module):
    """What a verify step commits: the given tokens, and the drafts after them as far as the target agrees.

    Draft j is accepted if it is the target's token after position j - 1 and everything before it was accepted.
    """

    def forward(
        self, input_ids: Tensor, next_token: Tensor, num_given: Tensor, max_accept: Tensor, write_index: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """One decision for each slot; all int64.

        input_ids, next_token: [B, S]. num_given, max_accept, write_index: [B]; num_given 0: the slot is idle.
        Returns num_committed, anchor, previous, next_write_index, next_given, each [B].
        """
        slots, length = input_ids.shape
        position = torch.arange(length, device=input_ids.device).expand(slots, -1)  # (B, S)
        predicted = next_token.gather(1, (position - 1).clamp(min=0))
        given, may = num_given.unsqueeze(1), max_accept.unsqueeze(1)
        drafted = (given > 0) & (position < given + may)
        committed = (position < given) | (drafted & (input_ids == predicted))
        num_committed = torch.where(committed, length, position).amin(1)
        last = (num_committed - 1).clamp(min=0).unsqueeze(1)
        anchor, previous = next_token.gather(1, last).squeeze(1), input_ids.gather(1, last).squeeze(1)
        return num_committed, anchor, previous, write_index + num_committed, num_given.clamp(max=1)
