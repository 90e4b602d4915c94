"""`doctor BUNDLE` shows what a bundle takes of the memory. On a GPU: `runtime/test_device_cuda.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from xpress_export.cli import cli


def test_a_bundle_that_fits(tiny_fused_bundle: Path) -> None:
    for layout in ("split", "fused"):
        arguments = ["doctor", str(tiny_fused_bundle), "--layout", layout, "--slots", "2", "--json"]
        plan = json.loads(CliRunner().invoke(cli, arguments).output)["memory_plan"]
        assert (plan["device"], plan["backend"], plan["layout"], plan["num_slots"]) == ("cpu", "onnxruntime", layout, 2)
        kinds = {item["kind"] for item in plan["items"]}
        assert {"weights", "caches", "state", "pinned", "activations"} <= kinds
        assert plan["device_bytes"] == sum(i["num_bytes"] for i in plan["items"] if i["kind"] != "pinned")
        assert plan["grows_on_demand"] is True
    shown = CliRunner().invoke(cli, ["doctor", str(tiny_fused_bundle)])
    assert shown.exit_code == 0
    assert "layout fused: 8 slots of 600 tokens" in shown.output
    assert "estimated" in shown.output


@pytest.mark.parametrize("layout", ["split", "fused"])
def test_on_a_cpu_nothing_is_refused_because_opening_takes_a_part_of_it(tiny_fused_bundle: Path, layout: str) -> None:
    arguments = ["doctor", str(tiny_fused_bundle), "--layout", layout, "--device", "cpu"]
    for slots, words in (("2", "and opening refuses nothing"), ("65536", "more than this machine has free")):
        done = CliRunner().invoke(cli, [*arguments, "--slots", slots])
        assert done.exit_code == 0
        assert "the most that it takes" in done.output.replace("\n", " ")
        assert words in done.output.replace("\n", " ")


@pytest.mark.parametrize("arguments", [["--device", "cuda:0"], ["--backend", "tensorrt"], ["--precision", "int8"]])
def test_what_is_not_there_is_said(tiny_bundle: Path, arguments: list[str]) -> None:
    done = CliRunner().invoke(cli, ["doctor", str(tiny_bundle), *arguments])
    assert done.exit_code == 1
    assert done.exception is not None
