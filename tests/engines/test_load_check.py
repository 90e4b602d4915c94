"""Which engine loads where: every field that can differ, alone."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from xpress_export.cli import cli
from xpress_export.engines.compile import compile_bundle
from xpress_export.engines.inspection import summarise
from xpress_export.engines.options import CompileOptions
from xpress_export.errors import PlanMismatchError
from xpress_export.gpu import Gpu
from xpress_export.load_check import Running, check_loadable
from xpress_export.manifest import EngineRecord, ProfileRecord, read_manifest, write_manifest

ENGINE = EngineRecord(
    role="target",
    platform="l4",
    sm=89,
    backend="tensorrt",
    version="10.16.1.11",
    driver=580,
    precision="fp16",
    lowering="native",
    layout="split",
    max_context=48,
    capacity=64,
    max_batch=4,
    hardware_compat="none",
    version_compatible=False,
    profiles=(ProfileRecord(name="verify", sizes={"S": (1, 8, 8)}),),
    file="engines/t.plan",
    report="engines/t.build.json",
    cache_key="0" * 64,
)
HERE = Running("tensorrt", "10.16.1.11", Gpu("NVIDIA L4", 89, 580))


def running(**changes: Any) -> Running:
    gpu = dataclasses.replace(HERE.gpu, **{k: v for k, v in changes.items() if k in {"sm", "driver"}})
    rest = {k: v for k, v in changes.items() if k in {"backend", "version"}}
    return dataclasses.replace(HERE, gpu=gpu, **rest)


@pytest.mark.parametrize(
    ("engine", "here"),
    [
        ({}, {}),
        ({}, {"driver": 590}),
        ({}, {"driver": None}),
        ({"driver": None}, {"driver": 1}),
        ({"version_compatible": True}, {"version": "10.17.0.1"}),
        ({"hardware_compat": "ampere-plus", "sm": 86}, {"sm": 120}),
    ],
)
def test_loads(engine: dict[str, Any], here: dict[str, Any], half_bundle: Path) -> None:
    check_loadable(dataclasses.replace(ENGINE, **engine), running(**here), half_bundle, read_manifest(half_bundle))


@pytest.mark.parametrize(
    ("engine", "here", "told"),
    [
        ({}, {"version": "10.16.1.12"}, "version is 10.16.1.11, running 10.16.1.12"),
        ({}, {"version": "10.16.0.72"}, "version is 10.16.1.11, running 10.16.0.72"),
        (
            {"version_compatible": True},
            {"version": "11.0.0.114"},
            "or a newer one of its major version, running",
        ),
        ({"version_compatible": True}, {"version": "10.15.0.1"}, "running 10.15.0.1"),
        ({}, {"sm": 86}, "sm is 89, running 86 (NVIDIA L4)"),
        ({"hardware_compat": "same-cc"}, {"sm": 120}, "sm is 89, running 120"),
        ({"hardware_compat": "ampere-plus"}, {"sm": 75}, "sm is 89 or newer, running 75"),
        ({}, {"driver": 570}, "driver is 580, running 570"),
        ({}, {"backend": "tensorrt-rtx"}, "backend is tensorrt, running tensorrt-rtx"),
    ],
)
def test_refused_with_the_field_and_the_command(
    engine: dict[str, Any], here: dict[str, Any], told: str, half_bundle: Path
) -> None:
    with pytest.raises(PlanMismatchError) as caught:
        check_loadable(dataclasses.replace(ENGINE, **engine), running(**here), half_bundle, read_manifest(half_bundle))
    assert told in str(caught.value)
    command = f"xpress-export compile {half_bundle} --platform l4 --backend tensorrt --precision fp16 --layout split"
    sizes = "--max-context 48 --max-batch 4 --block 8"
    flags = f" --hardware-compat {engine['hardware_compat']}" if "hardware_compat" in engine else ""
    flags += " --version-compatible" if "version_compatible" in engine else ""
    assert str(caught.value).endswith(f"Rebuild it here: {command} {sizes}{flags}")


SIZES = {"max_context": 200, "max_batch": 3, "block": 5, "chunk": 100}


@pytest.mark.parametrize(
    ("run_precision", "options"),
    [
        (None, {"layout": "split"}),
        (None, {"layout": "split", "precision": "int8", **SIZES}),
        (None, {"layout": "fused", "precision": "int8", **SIZES}),
        (None, {"layout": "split", "precision": {"target": "int8", "drafter": "fp8"}}),
        (None, {"layout": "split", "precision": {"drafter": "int4-weight"}, "lowering": "decomposed", **SIZES}),
        ("fp8", {"layout": "fused", "precision": "fp16", "lowering": "decomposed"}),
        ("fp8", {"layout": "split", "precision": "fp16"}),
        ("int8", {}),
    ],
    ids=str,
)
def test_the_command_builds_the_same_engines_again(
    run_precision: str | None, options: dict[str, Any], quantized_bundle: Path, builds: Any, tmp_path: Path
) -> None:
    """In a bundle of the fused layout with all precisions, whatever it runs in: nothing is left to a default."""
    folder = Path(shutil.copytree(quantized_bundle, tmp_path / "my bundle"))
    write_manifest(folder, dataclasses.replace(read_manifest(folder), run_precision=run_precision))
    empty = read_manifest(folder)
    engines = compile_bundle(folder, CompileOptions(platform="l4", **options)).manifest.engines
    made = read_manifest(folder)
    assert len(engines) == (4 if options.get("layout") == "split" else 1)

    def facts(records: tuple[EngineRecord, ...]) -> dict[str, EngineRecord]:
        return {e.role: dataclasses.replace(e, file="engines/a", report="engines/b") for e in records}

    for engine in engines:
        write_manifest(folder, made)
        with pytest.raises(PlanMismatchError) as caught:
            check_loadable(engine, Running(engine.backend, "0.1", Gpu("NVIDIA L4", 89, None)), folder, made)
        name, *words = shlex.split(str(caught.value).rpartition("Rebuild it here: ")[2])
        write_manifest(folder, empty)
        done = CliRunner().invoke(cli, [*words, "--no-cache"])
        assert name == "xpress-export" and done.exit_code == 0, done.output
        again, before = facts(read_manifest(folder).engines), facts(engines)
        assert again[engine.role] == before[engine.role]
        assert again == before or engine.role == "refiner", "only its engine does not know how long a chunk is"


def test_inspector_of_both_majors() -> None:
    old = {
        "LayerType": "gemm",
        "Name": "q_proj",
        "Outputs": [{"Name": "y", "Format/Datatype": "Row major FP16 format"}],
    }
    new = {"LayerType": "gemm", "Name": "k_proj", "Outputs": [{"Name": "y", "Format": "Row", "DataType": "Int8"}]}
    more = [
        {"LayerType": "Reformat", "Name": "Reformatting CopyNode for Input 0"},
        {"LayerType": "kgen", "Name": "fused_mha_v2", "TacticName": "sm89_fmha"},
        "a layer of an engine built without detailed profiling",
    ]
    facts = summarise({"Layers": [old, new, *more], "Bindings": []})
    assert facts.num_layers == 5 and facts.num_reformats == 1 and facts.num_attention == 1
    assert facts.matmul_types == {"fp16": 1, "int8": 1}


@pytest.mark.gpu
def test_inspector_on_a_gpu() -> None:
    pytest.skip("no GPU: an engine has never been loaded by these tests")
