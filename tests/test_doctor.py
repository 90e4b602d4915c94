"""`doctor BUNDLE` shows what a bundle takes of the memory, and refuses, with the numbers, what will not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from xpress_export.cli import cli
from xpress_export.errors import EngineError


def test_a_bundle_that_fits(tiny_fused_bundle: Path) -> None:
    for layout in ("split", "fused"):
        arguments = ["doctor", str(tiny_fused_bundle), "--layout", layout, "--slots", "2", "--json"]
        plan = json.loads(CliRunner().invoke(cli, arguments).output)["memory_plan"]
        assert (plan["device"], plan["backend"], plan["layout"], plan["num_slots"]) == ("cpu", "onnxruntime", layout, 2)
        kinds = {item["kind"] for item in plan["items"]}
        assert {"weights", "caches", "state", "pinned", "activations"} <= kinds
        assert plan["device_bytes"] == sum(i["num_bytes"] for i in plan["items"] if i["kind"] != "pinned")
    shown = CliRunner().invoke(cli, ["doctor", str(tiny_fused_bundle)])
    assert shown.exit_code == 0
    assert "layout fused: 8 slots of 600 tokens" in shown.output
    assert "estimated" in shown.output


def test_a_bundle_that_does_not_fit(tiny_bundle: Path) -> None:
    done = CliRunner().invoke(cli, ["doctor", str(tiny_bundle), "--slots", "65536"])
    assert isinstance(done.exception, EngineError)
    assert "caches" in str(done.exception)
    assert "open it with num_slots" in str(done.exception)


@pytest.mark.parametrize("arguments", [["--device", "cuda:0"], ["--backend", "tensorrt"], ["--precision", "int8"]])
def test_what_is_not_there_is_said(tiny_bundle: Path, arguments: list[str]) -> None:
    done = CliRunner().invoke(cli, ["doctor", str(tiny_bundle), *arguments])
    assert done.exit_code == 1
    assert done.exception is not None
