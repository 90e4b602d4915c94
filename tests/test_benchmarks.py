"""The scripts of benchmarks/: nothing they use is gone, and those that make bundles of their own run on tiny shapes."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from xpress_export import names
from xpress_export.engines.profiles import Sizes
from xpress_export.exporter.configs import RefinerConfig
from xpress_export.manifest import open_bundle
from xpress_export.runtime import Runtime, SamplingParams

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(FOLDER.glob("*.py"))


def script(name: str) -> ModuleType:
    """A script as the module it would be; registered, because its dataclasses look for their module."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_script_imports_exists_and_is_public(path: Path) -> None:
    """Imports inside functions too: those would be missed until somebody runs the command."""
    ours = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("xpress_export"):
            ours += [(str(node.module), alias.name, alias.asname or alias.name) for alias in node.names]
    assert ours, "every script measures this package"
    modules = {}
    for module, name, alias in ours:
        assert not name.startswith("_"), f"{path.name} imports the private {module}.{name}"
        found = importlib.import_module(module)
        if not hasattr(found, name):
            modules[alias] = importlib.import_module(f"{module}.{name}")
        elif isinstance(getattr(found, name), ModuleType):
            modules[alias] = getattr(found, name)
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            assert not node.attr.startswith("_"), f"{path.name}:{node.lineno} uses a private {node.attr}"
            assert hasattr(modules[node.value.id], node.attr), f"{path.name}:{node.lineno}: {node.attr} is gone"


@pytest.fixture(scope="module")
def random_bundle(tiny_trio: Any, tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the shapes and the tokenizer of the tiny trio."""
    config = tiny_trio.drafter_module.config
    decoder = dataclasses.replace(config.decoder, max_positions=4096)
    target = dataclasses.replace(decoder, num_layers=3, tied_head=True, layer_windows=())
    refiner = RefinerConfig(
        kind="xpress",
        rank=8,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        block_size=config.block_size,
        num_passes=2,
        mlp_hidden=16,
    )
    out: Path = tmp_path_factory.mktemp("random") / "bundle"
    shapes = (target, dataclasses.replace(config, decoder=decoder), refiner)
    script("engines").random_bundle(out, shapes, tokenizer=tiny_bundle / "tokenizer")
    return out


def test_a_random_bundle_opens_and_generates(random_bundle: Path) -> None:
    manifest = open_bundle(random_bundle)
    assert manifest.roles == names.ROLES and set(manifest.cycle) == {names.ACCEPT}
    with Runtime.open(random_bundle) as runtime:
        made = runtime.submit("one", SamplingParams(max_new_tokens=6, mode="xpress")).result()
    assert made.stats.num_generated_tokens == 6


def test_shapes_of_qwen_have_the_caches_that_are_told() -> None:
    engines = script("engines")
    _, drafter, _ = engines.qwen_shapes()
    for block, first_slot in ((drafter.block_size, drafter.first_slot), (8, 0)):  # the second: the reference trio
        sizes = Sizes(max_context=engines.MAX_CONTEXT, max_batch=1, chunk=512, block=block, first_slot=first_slot)
        assert sizes.capacity == 2048


def test_what_compile_costs_over_the_library(
    random_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed: pip install 'xpress-export[rtx]'")
    shutil.copytree(random_bundle, tmp_path / "qwen3-0.6b-shapes")
    script("engines").overhead(tmp_path, [89], 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[1].split()[0] for line in lines[:3]] == ["direct", "compile", "ratio"]
    assert [line.split()[2] for line in lines[3:]] == [names.DRAFTER, names.REFINER]


def test_speed_of_a_copy_leaves_the_bundle_alone(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in tiny_bundle.rglob("*")}
    script("quantization").speed(tiny_bundle, 8, 1, ())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["fp32", "int8", "fp8", "int8-weight", "int4-weight"]
    assert before == {path: path.stat().st_mtime_ns for path in tiny_bundle.rglob("*")}


def test_memory_is_that_of_the_command_alone(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = np.ones(128 << 20, np.float64)
    script("quantization").memory(tiny_bundle, 1, qwen=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["calibrate", *4 * ["quantize"]]
    peaks = [int(line[: line.index(" MiB peak")].split()[-1]) for line in lines]
    assert 0 < max(peaks) < held.nbytes >> 20
