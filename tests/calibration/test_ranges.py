"""Histograms of fixed size and the clips that methods choose from them."""

from __future__ import annotations

import numpy as np
import pytest

from xpress_export.calibration.ranges import METHODS, Range


def filled(values: np.ndarray) -> Range:
    found = Range(values.shape[1])
    for rows in np.array_split(values, 7):
        found.update(rows)
    return found


def test_greatest_value_and_channels_are_exact() -> None:
    values = np.random.default_rng(0).standard_normal((500, 8)).astype(np.float32)
    found = filled(values)
    assert found.amax == np.abs(values).max() and found.num_rows == 500
    np.testing.assert_array_equal(found.channels, np.abs(values).max(axis=0))
    assert found.clip("max") == found.amax


def test_memory_does_not_grow() -> None:
    found = Range(4)
    sizes = set()
    for power in range(-8, 9):
        found.update(np.full((100, 4), 10.0**power, np.float32))
        sizes.add(len(found._counts))
    assert len(sizes) == 1 and found._counts.sum() == 17 * 400


def test_percentile_leaves_the_outlier_out() -> None:
    values = np.random.default_rng(0).uniform(-1, 1, (20000, 4)).astype(np.float32)
    values[3, 2] = 50
    assert filled(values).clip("percentile", 99.99) == pytest.approx(1, abs=0.03)
    assert filled(values).clip("max") == 50


def test_mse_clips_where_squared_error_is_least() -> None:
    values = np.random.default_rng(0).standard_normal((50000, 1)).astype(np.float32)
    values[0] = 40
    found = filled(values)

    def error(clip: float) -> float:
        scale = clip / 127
        return float(((np.clip(np.rint(values / scale), -127, 127) * scale - values) ** 2).sum())

    best = min(np.linspace(1, 40, 300), key=error)
    assert error(found.clip("mse")) < 1.05 * error(best) < 0.9 * error(found.amax)


def test_entropy_leaves_the_outlier_out() -> None:
    values = np.random.default_rng(0).standard_normal((50000, 1)).astype(np.float32)
    values[0] = 40
    assert 2 < filled(values).clip("entropy") < 10


@pytest.mark.parametrize("method", METHODS)
def test_no_clip_is_beyond_what_was_seen(method: str) -> None:
    for scale in (1e-6, 1.0, 1e5):
        values = (scale * np.random.default_rng(1).standard_normal((300, 3))).astype(np.float32)
        found = filled(values)
        assert 0 < found.clip(method) <= found.amax


@pytest.mark.parametrize(("value", "named"), [(np.nan, "NaN"), (np.inf, "Inf"), (-np.inf, "Inf")])
def test_what_is_not_finite_is_named(value: float, named: str) -> None:
    values = np.ones((4, 2), np.float32)
    values[2, 1] = value
    with pytest.raises(ValueError, match=named):
        Range(2).update(values)
