"""The target as a source of answers and hidden states: batched prefill and decode with caches written in place.

The layers are those of `exporter.modules.Target`; its `forward` returns a new cache at each call, as a graph must,
which batched generation cannot afford. Shapes: B sequences, T prompt rows, C capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from xpress_export.exporter.configs import DecoderConfig
from xpress_export.exporter.modules import Attention, Target, additive
from xpress_export.exporter.ops import rotate
from xpress_export.exporter.target_checkpoint import TargetCheckpoint

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [B, Hq, S, D], keys, values [B, H, S, D]) -> [B, Hq, S, D]."""


@dataclass(frozen=True)
class States:
    """What one call yields per token. features: tapped layers [..., K*E]; final: post-norm states [..., E]."""

    features: Tensor
    final: Tensor


def load_target(
    checkpoint: TargetCheckpoint, taps: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Target:
    """The target's module with its weights, frozen."""
    target = Target(checkpoint.config, taps)
    state = {name: checkpoint.weights.read(name) for name in checkpoint.weights.names()}
    if checkpoint.config.tied_head:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    target.load_state_dict(state)
    inv_freq = target.rope.inv_freq
    target.to(device, dtype).requires_grad_(False).eval()
    target.rope.inv_freq = inv_freq.to(device)  # angles stay in float32
    return target


class TargetRunner:
    """Runs one wave of sequences: `prefill`, then `decode` once per token, `keep` to drop finished ones."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.config: DecoderConfig = target.config
        self._cache: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def prefill(self, ids: Tensor, capacity: int = 0) -> States:
        """Run right-padded prompts `ids` int64 [B, T]; keep keys and values if `capacity` rows are wanted."""
        num_seq, length = ids.shape
        self._cache = [self._empty(num_seq, capacity) for _ in self.target.model.layers] if capacity else []
        positions = torch.arange(length, device=ids.device).expand(num_seq, -1)
        masks = {window: self._prompt_mask(length, window) for window in set(self.config.layer_windows)}

        def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            if capacity:
                self._cache[layer][0][:, :, :length] = keys
                self._cache[layer][1][:, :, :length] = values
            mask = masks[self.config.layer_windows[layer]]
            keys, values = self._per_query_head(keys), self._per_query_head(values)
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=mask is None)

        return self._run(ids, positions, attend)

    @torch.no_grad()
    def decode(self, ids: Tensor, positions: Tensor) -> States:
        """Run one token of each sequence, `ids` and `positions` int64 [B]; results are [B, ...]."""
        used = int(positions.max()) + 1
        column = torch.arange(used, device=ids.device)
        visible = column <= positions.unsqueeze(1)  # (B, used)
        recent = {w: visible if w is None else visible & (column > positions.unsqueeze(1) - w) for w in self._windows}
        masks = {window: additive(seen.unsqueeze(1), self._dtype) for window, seen in recent.items()}
        rows = torch.arange(len(ids), device=ids.device)

        def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            for cache, new in zip(self._cache[layer], (keys, values), strict=True):
                cache[rows, :, positions] = new[:, :, 0]
            grouped = query.view(len(ids), self.config.num_kv_heads, -1, self.config.head_dim)  # heads as rows
            past_keys, past_values = (cache[:, :, :used] for cache in self._cache[layer])
            mask = masks[self.config.layer_windows[layer]].expand(-1, -1, grouped.shape[2], -1)
            return F.scaled_dot_product_attention(grouped, past_keys, past_values, attn_mask=mask).view_as(query)

        states = self._run(ids.unsqueeze(1), positions.unsqueeze(1), attend)
        return States(states.features[:, 0], states.final[:, 0])

    def keep(self, rows: Tensor) -> None:
        """Keep only the sequences `rows` int64 of the wave."""
        self._cache = [(keys[rows], values[rows]) for keys, values in self._cache]

    @property
    def _dtype(self) -> torch.dtype:
        return self.target.model.embed_tokens.weight.dtype

    @property
    def _windows(self) -> set[int | None]:
        return set(self.config.layer_windows)

    def _empty(self, num_seq: int, capacity: int) -> tuple[Tensor, Tensor]:
        weight = self.target.model.embed_tokens.weight
        shape = (num_seq, self.config.num_kv_heads, capacity, self.config.head_dim)
        return weight.new_zeros(shape), weight.new_zeros(shape)

    def _prompt_mask(self, length: int, window: int | None) -> Tensor | None:
        """None where plain causal attention is right."""
        if window is None or window >= length:
            return None
        row = torch.arange(length, device=self.target.model.embed_tokens.weight.device)
        visible = (row <= row.unsqueeze(1)) & (row > row.unsqueeze(1) - window)
        return additive(visible.unsqueeze(0), self._dtype)

    def _per_query_head(self, rows: Tensor) -> Tensor:
        return rows.repeat_interleave(self.config.num_heads // self.config.num_kv_heads, dim=1)

    def _run(self, ids: Tensor, positions: Tensor, attend: Attend) -> States:
        """Embed, run every layer with `attend`, norm; ids and positions [B, S]."""
        model, taps = self.target.model, {}
        hidden = model.embed_tokens(ids)
        taps[-1] = hidden
        rope = self.target.rope(positions, hidden.dtype)
        for i, layer in enumerate(model.layers):
            normed = layer.input_layernorm(hidden)
            hidden = hidden + attended(layer.self_attn, normed, rope, i, attend)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            taps[i] = hidden
        final = model.norm(hidden)
        taps[self.config.num_layers - 1] = final  # a tap of the last layer is its normalised state, as in `Target`
        features = torch.cat([taps[i] for i in self.target.target_layer_ids], dim=-1)
        return States(features, final)


def attended(attention: Attention, normed: Tensor, rope: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
    """Project `normed` [B, S, E], attend with `attend`, project back."""
    query = rotate(attention._heads(attention.q_proj(normed), attention.q_norm), *rope)
    keys, values = attention.keys_values(normed, rope)
    out = attend(layer, query, keys, values)
    return attention.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]
