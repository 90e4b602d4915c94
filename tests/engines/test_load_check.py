"""Which engine loads where: every field that can differ, alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from xpress_export.engines.inspection import summarise
from xpress_export.errors import PlanMismatchError
from xpress_export.gpu import Gpu
from xpress_export.load_check import Running, check_loadable
from xpress_export.manifest import EngineRecord, ProfileRecord

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
BUNDLE = Path("my-bundle")


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
def test_loads(engine: dict[str, Any], here: dict[str, Any]) -> None:
    check_loadable(dataclasses.replace(ENGINE, **engine), running(**here), BUNDLE)


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
def test_refused_with_the_field_and_the_command(engine: dict[str, Any], here: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanMismatchError) as caught:
        check_loadable(dataclasses.replace(ENGINE, **engine), running(**here), BUNDLE)
    assert told in str(caught.value)
    assert "xpress-export compile my-bundle --platform l4 --backend tensorrt --max-context 48 --max-batch 4" in str(
        caught.value
    )


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
