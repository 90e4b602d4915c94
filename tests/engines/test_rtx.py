"""Real builds: TensorRT-RTX accepts every graph in every precision that an architecture has, and refuses the rest."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import onnx
import pytest

from xpress_export import names, platforms
from xpress_export.engines import libraries
from xpress_export.engines import plan as planning
from xpress_export.engines.builder import engine_from_onnx
from xpress_export.engines.job import BuildResult
from xpress_export.engines.libraries import Library
from xpress_export.engines.operators import SINCE
from xpress_export.engines.options import CompileOptions
from xpress_export.errors import EngineBuildError, PlatformError
from xpress_export.manifest import read_manifest

OF_SM = {75: "t4", 80: "a100", 86: "a10", 89: "l4", 120: "rtx-5090"}
ONE_PROFILE = (80, 86)
"""Where only the short profile is built, to save time: their kernels are those of 89, which builds both. Of the step
so are those of the quantized graphs."""

MATRIX = [
    *(("fp16", sm) for sm in OF_SM),
    *(("int8", sm) for sm in OF_SM),
    *(("fp8", sm) for sm in (89, 120)),
    *(("int8-weight", sm) for sm in (75, 89)),
    *(("int4-weight", sm) for sm in (80, 120)),
]


def build(library: Library, bundle: Path, tmp_path: Path, role: str, **options: object) -> BuildResult:
    options["layout"] = names.LAYOUT_FUSED if role == names.STEP else names.LAYOUT_SPLIT
    asked = CompileOptions(backend="tensorrt-rtx", roles=(role,), **options)  # type: ignore[arg-type]
    plan = planning.plan_bundle(bundle, read_manifest(bundle), asked, None)
    work = tmp_path / role
    work.mkdir()
    job = plan.job(plan.engines[0], work, work / "plan")
    if plan.sm in ONE_PROFILE or (role == names.STEP and plan.engines[0].precision != "fp16"):
        job = dataclasses.replace(job, profiles=dict([list(job.profiles.items())[-1]]))
    result = engine_from_onnx(library, job, lambda *_: None)
    assert (work / "plan").stat().st_size == result.num_bytes > (10_000 if role == names.ACCEPT else 100_000)
    return result


def test_every_graph_is_valid_onnx(quantized_bundle: Path) -> None:
    """Of every precision, in both lowerings, and of the step of each."""
    files = sorted((quantized_bundle / "graphs").glob("*.onnx"))
    assert len(files) == 2 * (5 + 4 * 3)  # four models and the step; in four precisions target, drafter and step
    for path in files:
        onnx.checker.check_model(path, full_check=True)


@pytest.mark.parametrize(("precision", "sm"), MATRIX)
def test_every_graph_builds(precision: str, sm: int, quantized_bundle: Path, rtx: Library, tmp_path: Path) -> None:
    for role in names.ROLES:
        result = build(rtx, quantized_bundle, tmp_path, role, platform=OF_SM[sm], max_batch=2, precision=precision)
        found = precision if role != names.REFINER else "fp16"
        share = result.flops[found.replace("-weight", " weights")] / sum(result.flops.values())
        assert share > 0.9, f"{role}: {result.flops}"
        assert result.unfused_attention == 0, f"{role}: attention has no fused kernel on sm_{sm}"
        assert bool(result.adjusted) == (sm == 75 and role == names.DRAFTER), result.adjusted


STEPS = [
    *((precision, sm) for precision in ("fp16", "int8", "fp8") for sm in (89, 120)),
    ("int8-weight", 89),
    ("int4-weight", 120),
]


@pytest.mark.parametrize(("precision", "sm"), STEPS)
def test_the_step_builds(precision: str, sm: int, quantized_bundle: Path, rtx: Library, tmp_path: Path) -> None:
    result = build(rtx, quantized_bundle, tmp_path, names.STEP, platform=OF_SM[sm], max_batch=2, precision=precision)
    share = result.flops[precision.replace("-weight", " weights")] / sum(result.flops.values())
    assert share > 0.8, result.flops  # the refiner stays in fp16
    assert result.attention and result.unfused_attention == 0 and not result.adjusted


@pytest.mark.parametrize("sm", [89, 120])
def test_what_a_cycle_commits_builds(sm: int, half_bundle: Path, rtx: Library, tmp_path: Path) -> None:
    result = build(rtx, half_bundle, tmp_path, names.ACCEPT, platform=OF_SM[sm], max_batch=2)
    assert not result.matmuls and not result.warnings


@pytest.mark.parametrize("sm", [89])
def test_decomposed_graphs_build(sm: int, quantized_bundle: Path, rtx: Library, tmp_path: Path) -> None:
    for role in (names.TARGET, names.DRAFTER, names.ACCEPT, names.STEP):
        result = build(rtx, quantized_bundle, tmp_path, role, platform=OF_SM[sm], lowering="decomposed")
        assert result.attention == 0 and (role == names.ACCEPT or result.flops["fp16"] > 0)


@pytest.mark.parametrize(("precision", "platform"), [("int8", "l4"), ("int4-weight", "a100")])
def test_decomposed_quantized_graphs_build(
    precision: str, platform: str, quantized_bundle: Path, rtx: Library, tmp_path: Path
) -> None:
    options = {"platform": platform, "lowering": "decomposed", "precision": precision}
    result = build(rtx, quantized_bundle, tmp_path, names.TARGET, **options)
    assert result.flops[precision.replace("-weight", " weights")] / sum(result.flops.values()) > 0.9


def test_float32_runs_without_fused_attention(tiny_bundle: Path, rtx: Library, tmp_path: Path) -> None:
    result = build(rtx, tiny_bundle, tmp_path, names.DRAFTER, platform="l4")
    assert result.attention == result.unfused_attention == 2 and set(result.flops) == {"fp32"}


@pytest.mark.parametrize(("platform", "precision"), [("a100", "fp8"), ("a10", "fp8"), ("t4", "bf16"), ("l4", "fp4")])
def test_refused_before_any_work(platform: str, precision: str, half_bundle: Path) -> None:
    asked = CompileOptions(platform=platform, precision=precision)
    with pytest.raises(PlatformError, match=f"cannot run {precision}: .* needs compute capability .*use --precision"):
        planning.plan_bundle(half_bundle, read_manifest(half_bundle), asked, None)


def test_fp8_graphs_are_refused_on_ampere_without_being_asked(quantized_bundle: Path) -> None:
    manifest = dataclasses.replace(read_manifest(quantized_bundle), run_precision="fp8")
    with pytest.raises(PlatformError, match="use --precision int8"):
        planning.plan_bundle(quantized_bundle, manifest, CompileOptions(platform="a100"), None)


@pytest.mark.parametrize(("sm", "platform"), [(80, "l4"), (86, "l4")])
def test_the_table_is_right_about_fp8(
    sm: int, platform: str, quantized_bundle: Path, rtx: Library, tmp_path: Path
) -> None:
    """The builder itself refuses what the table refuses."""
    asked = CompileOptions(platform=platform, precision="fp8", layout="split", roles=("drafter",))
    plan = planning.plan_bundle(quantized_bundle, read_manifest(quantized_bundle), asked, None)
    job = dataclasses.replace(plan.job(plan.engines[0], tmp_path, tmp_path / "plan"), sm=sm)
    with pytest.raises(EngineBuildError, match="HW-specific datatypes: fp8"):
        engine_from_onnx(rtx, job, lambda *_: None)


@pytest.mark.parametrize("options", [{"hardware_compat": "ampere-plus"}, {"version_compatible": True}])
def test_what_rtx_does_not_have_is_refused(options: dict[str, object], half_bundle: Path, rtx: Library) -> None:
    asked = CompileOptions(platform="l4", **options)  # type: ignore[arg-type]
    with pytest.raises(PlatformError, match=r"TensorRT-RTX .* has no --"):
        planning.plan_bundle(half_bundle, read_manifest(half_bundle), asked, None)


def test_rtx_never_gets_a_timing_cache(half_bundle: Path, rtx: Library, tmp_path: Path) -> None:
    asked = CompileOptions(platform="l4", timing_cache=tmp_path / "timing")
    with pytest.raises(PlatformError, match="has no --timing-cache"):
        planning.plan_bundle(half_bundle, read_manifest(half_bundle), asked, None)
    plan = planning.plan_bundle(
        half_bundle, read_manifest(half_bundle), CompileOptions(platform="l4", cache_dir=tmp_path), None
    )
    assert plan.job(plan.engines[0], tmp_path, tmp_path / "plan").timing_cache is None


def test_architectures_rtx_does_not_have(half_bundle: Path, rtx: Library) -> None:
    asked = CompileOptions(platform="jetson-orin", backend="tensorrt-rtx")
    with pytest.raises(PlatformError, match=r"builds for sm_75, .*, but jetson-orin is sm_87; run the same command on"):
        planning.plan_bundle(half_bundle, read_manifest(half_bundle), asked, None)
    assert {75, 80, 86, 89, 120} <= set(libraries.load("tensorrt-rtx").target_sms)


def test_the_parser_reads_every_operator_of_the_contract(half_bundle: Path, rtx: Library) -> None:
    """What `operators.py` says of TensorRT-RTX, where its parser can be asked."""
    parser = rtx.trt.OnnxParser(rtx.new_network(rtx.trt.Builder(rtx.trt.Logger())), rtx.trt.Logger())
    wrong = [name for name in SINCE if not parser.supports_operator(name)]
    assert not wrong and not parser.supports_operator("MatMulInteger")
    assert SINCE["TensorScatter"] == platforms.FIRST_NATIVE
