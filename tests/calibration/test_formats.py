"""Codes and scales of each format, by their definition."""

from __future__ import annotations

import numpy as np
import pytest

from xpress_export.calibration.formats import block_of, encode, quantize_weight, scale_of
from xpress_export.errors import CalibrationError

WEIGHT = (np.random.default_rng(0).standard_normal((64, 24)) * np.linspace(0.01, 2, 24)).astype(np.float32)
ERRORS = {"int8": 0.015, "int8-weight": 0.015, "fp8": 0.04, "int4-weight": 0.15}


@pytest.mark.parametrize("precision", ERRORS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_round_trip(precision: str, dtype: type) -> None:
    codes = quantize_weight(WEIGHT, precision, np.dtype(dtype), 32)
    error = np.linalg.norm(codes.dequantize() - WEIGHT) / np.linalg.norm(WEIGHT)
    assert error < ERRORS[precision], error
    assert codes.scale.dtype == dtype and codes.codes.shape == WEIGHT.shape


def test_int8_is_per_output_channel() -> None:
    codes = quantize_weight(WEIGHT, "int8", np.dtype(np.float32))
    assert codes.axis == 1
    np.testing.assert_allclose(codes.scale, np.abs(WEIGHT).max(axis=0) / 127, rtol=1e-6)
    assert (np.abs(codes.codes.astype(int)).max(axis=0) == 127).all()


def test_fp8_is_amax_over_448() -> None:
    codes = quantize_weight(WEIGHT, "fp8", np.dtype(np.float32))
    assert codes.scale.shape == () and float(codes.scale) == pytest.approx(np.abs(WEIGHT).max() / 448)
    assert float(np.abs(codes.codes.astype(np.float32)).max()) == 448


def test_int4_blocks_lie_along_the_input() -> None:
    codes = quantize_weight(WEIGHT, "int4-weight", np.dtype(np.float32), 16)
    assert codes.scale.shape == (4, 24) and (codes.axis, codes.block_size) == (0, 16)
    assert codes.codes.astype(int).max() == 7 and codes.codes.astype(int).min() in {-7, -8}


def test_values_beyond_the_clip_saturate() -> None:
    scale = scale_of(1.0, "int8", np.dtype(np.float32))
    np.testing.assert_array_equal(
        encode(np.array([-9, -1, 0, 0.5, 9], np.float32), scale, "int8"), [-127, -127, 0, 64, 127]
    )
    scale = scale_of(1.0, "fp8", np.dtype(np.float32))
    assert encode(np.array([9], np.float32), scale, "fp8").astype(np.float32)[0] == 448


def test_a_dead_channel_has_a_scale() -> None:
    weight = WEIGHT.copy()
    weight[:, 3] = 0
    codes = quantize_weight(weight, "int8", np.dtype(np.float16))
    assert (codes.scale > 0).all() and (codes.dequantize()[:, 3] == 0).all()


def test_blocks_divide_the_inputs() -> None:
    assert [block_of(size, 64) for size in (576, 96, 48)] == [64, 32, 16]
    with pytest.raises(CalibrationError, match="no blocks of 16"):
        block_of(40, 32)
