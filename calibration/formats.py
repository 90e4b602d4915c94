"""How numbers become codes: INT8, FP8 E4M3, and weights alone in INT8 or in blocks of INT4.

    precision     weights                                    activations
    int8          int8 per output channel, amax / 127        int8 per tensor, clip / 127
    fp8           E4M3 per tensor, amax / 448                E4M3 per tensor, amax / 448
    int8-weight   int8 per output channel                    as they are
    int4-weight   int4 in blocks along the input, symmetric  as they are

Codes are always computed with the scale as it is stored, so a float16 scale costs no accuracy beyond its own rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from xpress_export.errors import CalibrationError

Array = NDArray[Any]

GREATEST = {"int8": 127.0, "fp8": 448.0, "int8-weight": 127.0, "int4-weight": 7.0}
CODE_TYPES = {
    "int8": np.dtype(np.int8),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8-weight": np.dtype(np.int8),
    "int4-weight": np.dtype(ml_dtypes.int4),
}
QUANTIZES_ACTIVATIONS = ("int8", "fp8")
DEFAULT_BLOCK = 32
_SHRINK = (1.0, 0.94, 0.88, 0.82, 0.76, 0.7)
"""Candidate ranges of a block of INT4, as shares of its greatest value."""


@dataclass(frozen=True)
class Codes:
    """A quantized matrix [in, out]. axis, block_size: as DequantizeLinear takes them; None: one scale for all."""

    codes: Array
    scale: Array
    axis: int | None
    block_size: int | None = None

    def dequantize(self) -> Array:
        """float32 [in, out]."""
        codes, scale = self.codes.astype(np.float32), self.scale.astype(np.float32)
        if self.block_size is not None:
            scale = np.repeat(scale, self.block_size, axis=0)
        elif self.axis == 0:
            scale = scale[:, None]
        result: Array = codes * scale
        return result


def quantize_weight(weight: Array, precision: str, dtype: np.dtype[Any], block_size: int = DEFAULT_BLOCK) -> Codes:
    """Codes and scales, of type `dtype`, of a float32 weight [in, out]."""
    if precision == "fp8":
        scale = scale_of(np.abs(weight).max(), precision, dtype)
        return Codes(encode(weight, scale, precision), scale, None)
    if precision != "int4-weight":
        scale = scale_of(np.abs(weight).max(axis=0), precision, dtype)
        return Codes(encode(weight, scale, precision), scale, 1)
    size = block_of(len(weight), block_size)
    blocks = weight.reshape(-1, size, weight.shape[1])
    scale = _best_block_scale(blocks, dtype)
    codes = encode(blocks, scale[:, None], precision).reshape(weight.shape)
    return Codes(codes, scale, 0, size)


def block_of(num_inputs: int, wanted: int) -> int:
    """The largest block of at most `wanted` that divides the inputs."""
    size = wanted
    while size >= 16:
        if num_inputs % size == 0:
            return size
        size //= 2
    raise CalibrationError(f"a weight of {num_inputs} inputs has no blocks of 16; leave that layer out with --skip")


def scale_of(amax: Any, precision: str, dtype: np.dtype[Any]) -> Array:
    """amax / greatest code, in the type it is stored in; never so small that it vanishes there."""
    scale = np.asarray(amax, np.float32) / GREATEST[precision]
    return np.asarray(np.maximum(scale, np.finfo(dtype).tiny)).astype(dtype)


def encode(values: Array, scale: Array, precision: str) -> Array:
    """Codes of `values`, rounded to the nearest and saturated."""
    greatest, dtype = GREATEST[precision], CODE_TYPES[precision]
    least = -8.0 if precision == "int4-weight" else -greatest
    codes = np.clip(values / scale.astype(np.float32), least, greatest)
    return (codes if precision == "fp8" else np.rint(codes)).astype(dtype)


def _best_block_scale(blocks: Array, dtype: np.dtype[Any]) -> Array:
    """Scales [blocks, out] with the least squared error among a few clips of each block [blocks, size, out]."""
    amax = np.abs(blocks).max(axis=1)
    best = scale_of(amax, "int4-weight", dtype)
    least = np.full(amax.shape, np.inf, np.float32)
    for share in _SHRINK:
        scale = scale_of(amax * share, "int4-weight", dtype)
        wide = scale.astype(np.float32)[:, None]
        error = ((np.clip(np.rint(blocks / wide), -8, 7) * wide - blocks) ** 2).sum(axis=1)
        better = error < least
        best, least = np.where(better, scale, best), np.where(better, error, least)
    return best
