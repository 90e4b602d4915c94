"""The tiny trio, calibrated and in every precision.

scales              session   of two answers of the tiny bundle
quantized_bundle    session   the tiny bundle with all eight variants (fc and lm_head stay high); read-only
fresh               test      a copy of it that may be changed
edit_graph          test      change a variant's graph file in a bundle and bring its manifest up to date
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest

from xpress_export import platforms
from xpress_export.calibration.calibrate import CalibrateOptions, calibrate, save_scales
from xpress_export.calibration.quantize import QuantizeOptions, quantize
from xpress_export.calibration.scales import Scales

OPTIONS = CalibrateOptions(prompts=None, samples=2, max_new_tokens=12, num_threads=1)


@pytest.fixture(scope="session")
def scales(tiny_bundle: Path) -> Scales:
    return calibrate(tiny_bundle, OPTIONS)


@pytest.fixture(scope="session")
def quantized_bundle(tiny_bundle: Path, scales: Scales, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "bundle"
    shutil.copytree(tiny_bundle, folder)
    save_scales(folder, scales, None)
    for precision in platforms.QUANTIZED:
        alpha = 0.6 if precision == "int8" else None
        quantize(folder, QuantizeOptions(precision=precision, smoothquant=alpha, block_size=16))
    return folder


@pytest.fixture
def fresh(quantized_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(quantized_bundle, tmp_path / "bundle"))


@pytest.fixture
def edit_graph(scripted_bundle: Any) -> Callable[[Path, str, Callable[[onnx.ModelProto], None]], None]:
    def edit(folder: Path, name: str, change: Callable[[onnx.ModelProto], None]) -> None:
        path = folder / "graphs" / name
        model = onnx.load(path, load_external_data=False)
        change(model)
        onnx.save(model, path)
        scripted_bundle.record(folder)

    return edit
