"""The commands of engines, end to end but for the build itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner, Result

from xpress_export.cli import cli
from xpress_export.cli_engines import device_command
from xpress_export.errors import XpressExportError
from xpress_export.manifest import read_manifest


def run(*arguments: object) -> Result:
    done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output + repr(done.exception)
    return done


def refusal(*arguments: object) -> str:
    done = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    assert isinstance(done.exception, XpressExportError), done.output
    return str(done.exception)


def test_compile_then_inspect(bundle: Path, builds: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    done = run("compile", bundle, "--platform", "l4", "--cache-dir", cache)
    assert "native graphs: tensorrt-rtx" in done.stdout and "target: " in done.stdout and "100% fp16" in done.stdout
    again = json.loads(run("compile", bundle, "--platform", "l4", "--cache-dir", cache, "--json").stdout)
    assert [report["cached"] for report in again] == [True] * 4
    shown = run("inspect", bundle, "--engine", "target").stdout
    for text in ("no GPU here can load the plan", "l4 (sm_89)", "100.0% of FLOPs in fp16", "prefill", "S 1..64..512"):
        assert text in shown
    facts = json.loads(run("inspect", bundle, "--engine", "drafter", "--platform", "l4", "--json").stdout)
    assert facts["record"]["role"] == "drafter" and facts["layers"] is None


def test_inspect_of_an_engine_that_is_not_there(bundle: Path, builds: Any) -> None:
    assert "has no target engine; it has none" in refusal("inspect", bundle, "--engine", "target")
    for platform in ("l4", "t4"):
        run("compile", bundle, "--platform", platform, "--role", "target", "--no-cache")
    assert "engines for l4, t4; name one with --platform" in refusal("inspect", bundle, "--engine", "target")
    assert "no target engine for a10" in refusal("inspect", bundle, "--engine", "target", "--platform", "a10")


def test_cache_commands(bundle: Path, builds: Any, tmp_path: Path) -> None:
    cache = ("--cache-dir", tmp_path / "cache")
    run("compile", bundle, "--platform", "l4", *cache)
    listed = json.loads(run("cache", "ls", "--json", *cache).stdout)
    assert {entry["role"] for entry in listed} == {"target", "drafter", "refiner", "accept"}
    assert "4 engines" in run("cache", "ls", *cache).stdout
    assert "freed" in run("cache", "clear", *cache).stdout
    assert json.loads(run("cache", "ls", "--json", *cache).stdout) == []


def test_cache_folder_of_the_user(bundle: Path, builds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    run("compile", bundle, "--platform", "l4", "--role", "refiner")
    assert (tmp_path / "xdg" / "xpress-export" / "engines" / "plans").is_dir()


def test_graph_for_trtexec(bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "graphs"
    line = run("graph", bundle, "target", "--lowering", "decomposed", "--capacity", "128", "--out", out).stdout
    assert line.startswith("trtexec --onnx=") and "past_key_0:1x2x128x16" in line.replace("\n", "")
    model = onnx.load(out / "target.decomposed.onnx", load_external_data=False)
    assert (out / "target.data").samefile(bundle / "graphs" / "target.data")
    shape = next(i for i in model.graph.input if i.name == "past_key_0").type.tensor_type.shape
    assert [d.dim_value for d in shape.dim][1:] == [2, 128, 16]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--platform", "l4", "--precision", "fp8"], "the bundle has no model in fp8"),
        (["--platform", "l4", "--max-context", "601"], "more than the 600 tokens the bundle was exported for"),
        (["--platform", "l4", "--block", "9"], "more than the 8 slots the drafter was trained for"),
        (["--platform", "l4", "--max-context", "4"], "less than one block of 8 tokens"),
        (["--platform", "cpu"], "its bundle needs no engines"),
        (["--platform", "gtx-1080"], "is not known; known are cpu, t4"),
        (["--platform", "h100", "--backend", "tensorrt-rtx"], "but h100 is sm_90"),
    ],
)
def test_refusals(options: list[str], told: str, bundle: Path, builds: Any) -> None:
    before = read_manifest(bundle)
    assert told in refusal("compile", bundle, "--no-cache", *options)
    assert not builds.jobs and read_manifest(bundle) == before and not (bundle / "engines").exists()


def test_the_one_command_for_the_device() -> None:
    assert device_command(Path("my bundle"), "l4") == "xpress-export compile 'my bundle' --platform l4"
