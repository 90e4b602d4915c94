"""The builder against simulated TensorRT versions: the calls it makes, and what it refuses."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_tensorrt import REMOVED

from xpress_export import platforms
from xpress_export.engines import plan as planning
from xpress_export.engines.builder import engine_from_onnx
from xpress_export.engines.cache import Cache
from xpress_export.engines.job import BuildJob, BuildResult
from xpress_export.engines.libraries import Library
from xpress_export.engines.options import CompileOptions
from xpress_export.errors import EngineBuildError, PlatformError
from xpress_export.gpu import Gpu
from xpress_export.manifest import read_manifest

ROOT = Path(__file__).parents[2]
FAMILIES = ("10.3.0", "10.13.3.9", "10.16.1.11", "11.4.0.106")
ORIN = Gpu("Orin", 87, 540)
ORDER = [
    "Builder",
    "create_network",
    "OnnxParser",
    "parse_from_file",
    "create_builder_config",
    "set_timing_cache",
    "create_optimization_profile",
    "add_optimization_profile",
    "create_optimization_profile",
    "add_optimization_profile",
]


def orin_plan(bundle: Path, **options: Any) -> planning.BundlePlan:
    asked = CompileOptions(platform="jetson-orin", backend="tensorrt", **options)
    return planning.plan_bundle(bundle, read_manifest(bundle), asked, ORIN)


def job_of(plan: planning.BundlePlan, role: str, tmp_path: Path) -> BuildJob:
    engine = next(engine for engine in plan.engines if engine.role == role)
    work = tmp_path / "work"
    work.mkdir()
    return plan.job(engine, work, tmp_path / "plan")


def build(library: Library, job: BuildJob) -> tuple[BuildResult, list[tuple[str, float]]]:
    heard: list[tuple[str, float]] = []
    return engine_from_onnx(library, job, lambda phase, share: heard.append((phase, share))), heard


@pytest.mark.parametrize("version", FAMILIES)
def test_call_order(version: str, simulated: Callable[[str], Library], half_bundle: Path, tmp_path: Path) -> None:
    library = simulated(version)
    plan = orin_plan(
        half_bundle,
        cache_dir=tmp_path / "cache",
        workspace_mb=512,
        tactic_mb=256,
        opt_level=2,
        version_compatible=True,
        hardware_compat="ampere-plus",
    )
    result, heard = build(library, job_of(plan, "target", tmp_path))
    last = "build_serialized_network" if version == "10.3.0" else "build_serialized_network_to_stream"
    assert library.trt.calls == [*ORDER, last]
    assert (tmp_path / "plan").read_bytes() == b"simulated plan" and result.num_bytes == 14
    assert heard[-1][1] == 1.0 and [share for _, share in heard] == sorted(share for _, share in heard)
    assert Cache(tmp_path / "cache", 1).timing_cache(version, 87).read_bytes() == b"timed"


@pytest.mark.parametrize("version", FAMILIES)
def test_lowering_follows_version(version: str, simulated: Callable[[str], Library], half_bundle: Path) -> None:
    simulated(version)
    plan = orin_plan(half_bundle)
    expected = "decomposed" if version.startswith(("10.3", "10.13")) else "native"
    assert plan.lowering == expected and version in plan.reason
    assert all(engine.graph.file.endswith(".decomposed.onnx") == (expected == "decomposed") for engine in plan.engines)


@pytest.mark.parametrize("version", FAMILIES[:2])
def test_native_graphs_are_refused_where_they_cannot_be_read(
    version: str, simulated: Callable[[str], Library], half_bundle: Path
) -> None:
    simulated(version)
    with pytest.raises(PlatformError, match=r"target\.onnx has operators .* Attention \(from 10\.14 on\).*decomposed"):
        orin_plan(half_bundle, lowering="native")


def test_parser_errors_name_the_node(simulated: Callable[[str], Library], half_bundle: Path, tmp_path: Path) -> None:
    library = simulated("11.4.0.106")
    job = job_of(orin_plan(half_bundle), "target", tmp_path)
    with pytest.raises(EngineBuildError, match=r"cannot read .*node .* \(TensorScatter\): must have a static sequence"):
        build(library, dataclasses.replace(job, static={}))


def test_missing_and_wrong_inputs_are_named(
    simulated: Callable[[str], Library], half_bundle: Path, tmp_path: Path
) -> None:
    library = simulated("11.4.0.106")
    job = job_of(orin_plan(half_bundle), "target", tmp_path)
    shapes = dict(job.profiles["prefill"])
    write_index = shapes.pop("write_index")
    with pytest.raises(EngineBuildError, match="profile prefill has no shape for input write_index of the target"):
        build(library, dataclasses.replace(job, profiles={"prefill": shapes}))
    (job.work / "target.onnx").unlink()
    shapes |= {"write_index": write_index, "past_key_0": ((1, 3, 8, 16),) * 3}
    with pytest.raises(EngineBuildError, match="profile prefill: input past_key_0 has shape"):
        build(library, dataclasses.replace(job, profiles={"prefill": shapes}))


def test_precision_that_does_not_appear_fails(
    simulated: Callable[[str], Library], half_bundle: Path, tmp_path: Path
) -> None:
    library = simulated("11.4.0.106")
    job = dataclasses.replace(job_of(orin_plan(half_bundle), "target", tmp_path), precision="int8")
    with pytest.raises(EngineBuildError, match="asked for in int8, but its matrix products compute in 100% fp16"):
        build(library, job)


def test_no_removed_call_in_the_source() -> None:
    """Every attribute read or set, and every name looked up by getattr, in what drives TensorRT."""
    for path in sorted((ROOT / "engines").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            used = node.attr if isinstance(node, ast.Attribute) else None
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and path.name != "network.py":
                used = node.value
            assert used not in REMOVED, f"{path.name} uses {used}, which TensorRT 11.0 removed"


@pytest.mark.parametrize("version", FAMILIES)
def test_the_simulation_forgives_nothing(version: str, simulated: Callable[[str], Library]) -> None:
    trt = simulated(version).trt
    config = trt.Builder(_logger(trt)).create_builder_config()
    for name in REMOVED:
        assert not hasattr(config, name) and not hasattr(trt, name) and not hasattr(trt.BuilderFlag, name)
    with pytest.raises(AttributeError):
        config.int8_calibrator = None
    with pytest.raises(AssertionError, match="strongly typed"):
        trt.Builder(_logger(trt)).create_network(0)


def _logger(trt: Any) -> Any:
    return trt.ILogger()


def test_same_cc_needs_a_version_that_knows_it(simulated: Callable[[str], Library], half_bundle: Path) -> None:
    simulated("10.3.0")
    with pytest.raises(PlatformError, match="does not know hardware compatibility same-cc"):
        orin_plan(half_bundle, hardware_compat="same-cc")


def test_wrong_gpu_and_no_gpu(simulated: Callable[[str], Library], half_bundle: Path) -> None:
    simulated("11.4.0.106")
    manifest = read_manifest(half_bundle)
    asked = CompileOptions(platform="l4", backend="tensorrt")
    with pytest.raises(EngineBuildError, match=r"l4 is sm_89, but the GPU here \(Orin\) is sm_87"):
        planning.plan_bundle(half_bundle, manifest, asked, ORIN)
    with pytest.raises(EngineBuildError, match="none is found here"):
        planning.plan_bundle(half_bundle, manifest, asked, None)


def test_a_gpu_is_preferred_over_building_without(simulated: Callable[[str], Library], half_bundle: Path) -> None:
    simulated("11.4.0.106")
    asked = CompileOptions(platform="jetson-orin")
    plan = planning.plan_bundle(half_bundle, read_manifest(half_bundle), asked, ORIN)
    assert plan.library.backend == platforms.TENSORRT and plan.gpu == ORIN
