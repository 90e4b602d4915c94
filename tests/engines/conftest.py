"""Bundles to compile, a simulated TensorRT, and the real TensorRT-RTX where it is installed.

half_bundle         session   the tiny trio in float16, both lowerings
fused_bundle        session   the same, in the fused layout
quantized_bundle    session   the same, calibrated; target, drafter and step in every precision
bundle              function  a copy of half_bundle to add engines to
simulated           function  installs a simulated `tensorrt` of a given version as the module of that name
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from xpress_export import platforms
from xpress_export.calibration.calibrate import CalibrateOptions, calibrate, save_scales
from xpress_export.calibration.quantize import QuantizeOptions, quantize
from xpress_export.engines import compile as compile_module
from xpress_export.engines import libraries, memory
from xpress_export.engines.job import BuildJob, BuildResult
from xpress_export.engines.libraries import Library
from xpress_export.exporter.cycle import add_steps
from xpress_export.exporter.export import export
from xpress_export.manifest import read_manifest, write_manifest

ROOT = Path(__file__).parents[2]


def load_file(path: Path, name: str) -> ModuleType:
    """Import a file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


fake_tensorrt = load_file(Path(__file__).with_name("fake_tensorrt.py"), "fake_tensorrt")


@pytest.fixture(scope="session")
def half_bundle(tiny_trio: Any, trace_once: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engines") / "half"
    with pytest.MonkeyPatch.context() as patch:
        trace_once.install(patch)
        export(tiny_trio.options(precision="fp16", platform="jetson-orin"), out)
    return out


@pytest.fixture(scope="session")
def fused_bundle(tiny_trio: Any, trace_once: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engines") / "fused"
    with pytest.MonkeyPatch.context() as patch:
        trace_once.install(patch)
        export(tiny_trio.options(precision="fp16", platform="jetson-orin", layout="fused"), out)
    return out


@pytest.fixture(scope="session")
def quantized_bundle(fused_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """fc and lm_head are quantized too, so that nearly all products are."""
    folder = tmp_path_factory.mktemp("quantized") / "bundle"
    shutil.copytree(fused_bundle, folder)
    calibrated = CalibrateOptions(prompts=None, samples=2, max_new_tokens=8, allow_dead=True, num_threads=1)
    save_scales(folder, calibrate(folder, calibrated), None)
    manifest = read_manifest(folder)
    write_manifest(folder, dataclasses.replace(manifest, platform="dgx-spark"))  # which has all four
    for precision in platforms.QUANTIZED:
        alpha = 0.6 if precision == "int8" else None
        quantize(folder, QuantizeOptions(precision=precision, smoothquant=alpha, include=("fc", "lm_head")))
    add_steps(folder)
    return folder


@pytest.fixture
def bundle(half_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(half_bundle, tmp_path / "bundle"))


@pytest.fixture
def rtx() -> Library:
    """The real TensorRT-RTX, which builds without a GPU."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: pip install 'xpress-export[rtx]'")
    return libraries.load("tensorrt-rtx")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Library]:
    def install(version: str) -> Library:
        monkeypatch.setitem(sys.modules, "tensorrt", fake_tensorrt.make(version))
        return libraries.load("tensorrt")

    return install


class Builds:
    """Stands in for the worker: counts, and writes plans that depend on the job; as with the real one, no two alike."""

    def __init__(self) -> None:
        self.jobs: list[BuildJob] = []
        self.before: Callable[[], None] = lambda: None

    def __call__(self, job: BuildJob, listener: Any, weight_bytes: int, workers: Any) -> BuildResult:
        self.jobs.append(job)
        self.before()
        listener("Building engine", 0.5)
        plan = f"{job.role} {job.sm} {job.profiles} {job.opt_level} {'-' * len(self.jobs)}".encode()
        job.plan.write_bytes(plan)
        return BuildResult(
            version="1.7.1.116",
            seconds={"parse": 0.1, "build": 1.0, "write": 0.1},
            peak_memory_bytes=1 << 28,
            num_bytes=len(plan),
            sha256=hashlib.sha256(plan).hexdigest(),
            layers={"MATRIX_MULTIPLY": 1},
            matmuls={"fp16": 1},
            flops={"fp16": 8},
            attention=0,
            unfused_attention=0,
            adjusted=(),
            warnings=(),
        )


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch, rtx: object) -> Builds:
    made = Builds()
    monkeypatch.setattr(compile_module, "build_in_subprocess", made)
    monkeypatch.setattr(memory, "available_bytes", lambda: 8 << 30)  # whatever else runs on this machine
    return made
