"""What is remembered of a tensor while it flows by: a histogram of fixed size and the greatest value per channel.

Memory does not grow with the number of samples: 2048 bins per tensor. When a value does not fit, pairs of bins are
merged until it does, so the histogram always ends within a factor of two of the greatest value.

    method       clip: the value that becomes the greatest code
    max          the greatest value seen
    percentile   what 99.99% of the values (or another share) do not exceed
    mse          the clip with the least squared rounding and clipping error in INT8
    entropy      the clip whose 128 levels lose the least information (Kullback-Leibler divergence)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

METHODS = ("max", "percentile", "mse", "entropy")
PERCENTILE = 99.99
_BINS = 2048
_LEVELS = 128
_CANDIDATES = np.linspace(0.05, 1.0, 96)

Array = NDArray[Any]


class Range:
    """Statistics of one tensor [..., channels]."""

    def __init__(self, num_channels: int) -> None:
        self.channels = np.zeros(num_channels, np.float32)
        self.num_rows = 0
        self._counts = np.zeros(_BINS, np.int64)
        self._top = 2.0**-24

    @property
    def amax(self) -> float:
        return float(self.channels.max())

    def update(self, values: Array) -> None:
        """Take in one tensor; raises ValueError if a number in it is not finite."""
        rows = np.abs(values.reshape(-1, values.shape[-1]).astype(np.float32, copy=False))
        if rows.size == 0:
            return
        greatest = rows.max(axis=0)
        if not np.isfinite(greatest).all():
            raise ValueError("NaN" if np.isnan(greatest).any() else "Inf")
        np.maximum(self.channels, greatest, out=self.channels)
        self._grow(float(greatest.max()))
        index = np.minimum((rows * np.float32(_BINS / self._top)).astype(np.int32), _BINS - 1)
        self._counts += np.bincount(index.ravel(), minlength=_BINS)
        self.num_rows += len(rows)

    def _grow(self, greatest: float) -> None:
        while greatest > self._top:
            self._counts = np.concatenate([self._counts.reshape(-1, 2).sum(axis=1), np.zeros(_BINS // 2, np.int64)])
            self._top *= 2

    def clip(self, method: str, percentile: float = PERCENTILE) -> float:
        """The range that `method` chooses, at most `amax`."""
        if method == "max" or self.amax == 0:
            return self.amax
        chosen = {"percentile": lambda: self._percentile(percentile), "mse": self._mse, "entropy": self._entropy}
        return min(chosen[method](), self.amax)

    @property
    def _centres(self) -> Array:
        return (np.arange(_BINS) + 0.5) * (self._top / _BINS)

    def _percentile(self, percent: float) -> float:
        share = np.cumsum(self._counts) / self._counts.sum()
        return float((np.searchsorted(share, percent / 100) + 1) * self._top / _BINS)

    def _mse(self) -> float:
        values, clips = self._centres, _CANDIDATES * self.amax
        scales = (clips / 127)[:, None]
        codes = np.minimum(np.rint(values / scales), 127)
        errors = ((values - codes * scales) ** 2 * self._counts).sum(axis=1)
        return float(clips[errors.argmin()])

    def _entropy(self) -> float:
        used = math.ceil(self.amax / self._top * _BINS)
        if used <= _LEVELS:
            return self.amax
        ends = np.unique(np.linspace(_LEVELS, used, 64).astype(int))
        return float(ends[int(np.argmin([self._divergence(end) for end in ends]))] * self._top / _BINS)

    def _divergence(self, end: int) -> float:
        """KL divergence of the clipped histogram from its own rendering in 128 levels."""
        counts = self._counts[:end].astype(np.float64)
        clipped = counts.copy()
        clipped[-1] += self._counts[end:].sum()
        level = np.arange(end) * _LEVELS // end
        full = counts > 0
        mass = np.bincount(level, counts, _LEVELS) / np.maximum(np.bincount(level, full, _LEVELS), 1)
        rendered = np.where(full, mass[level], 0.0)
        p, q = clipped / clipped.sum(), rendered / max(rendered.sum(), 1)
        used = p > 0
        return float((p[used] * np.log(p[used] / np.maximum(q[used], 1e-12))).sum())
