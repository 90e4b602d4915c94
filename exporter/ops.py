"""The four operators of the graph contract, each with two faces.

In eager PyTorch (training, parity) they compute; while tracing they become exactly one standard ONNX operator:

    rms_norm      RMSNormalization (opset 23)   float32 inside, weight applied after the cast (Qwen3 order)
    rotate        RotaryEmbedding  (opset 23)   half-split layout, cos/sin per row
    write_rows    TensorScatter    (opset 24)   linear mode: rows [write_index, write_index + S) of the cache
    attend        Attention        (opset 23)   grouped queries, additive float mask, one output

TensorRT parses all four without a plugin from 10.15 on; ONNX Runtime runs them on CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

MASK_VALUE = -30000.0
"""Added to a masked score. Finite in float16, so that a sum with a negative score cannot become -inf."""


def tracing() -> bool:
    """True while torch.onnx.export runs the module."""
    return bool(torch.onnx.is_in_onnx_export())


def _node(op: str, inputs: tuple[Tensor, ...], like: Tensor, shape: tuple[object, ...], **attrs: object) -> Tensor:
    return torch.onnx.ops.symbolic(op, inputs, attrs, dtype=like.dtype, shape=shape)  # type: ignore[no-any-return]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square normalisation over the last axis of `x` [..., E]; `weight` [E]."""
    if tracing():
        return _node("RMSNormalization", (x, weight), x, tuple(x.shape), axis=-1, epsilon=eps)
    x32 = x.float()
    normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [B, H, S, D] by `cos`, `sin` [B, S, D/2] (same dtype as x)."""
    if tracing():
        return _node("RotaryEmbedding", (x, cos, sin), x, tuple(x.shape))
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def write_rows(cache: Tensor, rows: Tensor, write_index: Tensor) -> Tensor:
    """Return `cache` [B, H, C, D] with `rows` [B, H, S, D] written from row `write_index` [B] on."""
    if tracing():
        return _node("TensorScatter", (cache, rows, write_index), cache, tuple(cache.shape), axis=2, mode="linear")
    index = write_index[:, None] + torch.arange(rows.shape[2], device=rows.device)  # (B, S)
    return cache.scatter(2, index[:, None, :, None].expand_as(rows), rows)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Softmax attention of `query` [B, Hq, S, D] over `key`, `value` [B, H, T, D]; `mask` [B, 1, S, T] is added."""
    if tracing():
        return _node("Attention", (query, key, value, mask), query, tuple(query.shape), scale=scale)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
