"""An export is reused exactly when nothing that goes into it changed and the bundle is as it was written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from xpress_export.errors import ExportError
from xpress_export.exporter.export import export
from xpress_export.manifest import open_bundle, read_manifest


def stamps(bundle: Path) -> dict[str, tuple[int, int]]:
    found = [path for path in bundle.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}


@pytest.fixture
def out(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny bundle, to export over."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "out"))


def test_an_export_is_reused_when_nothing_changed(tiny_trio: Any, out: Path, re_export: Any, trace_once: Any) -> None:
    before, traces = stamps(out), trace_once.num_traces
    done = re_export(tiny_trio.options(), out)
    assert done.reused
    assert done.manifest == open_bundle(out)
    assert stamps(out) == before
    assert trace_once.num_traces == traces


def new_checkpoint(folder: Path, root: Path) -> str:
    """A copy of a checkpoint with one number changed a little."""
    copy = Path(shutil.copytree(folder, root / f"new_{folder.name}"))
    tensors = load_file(copy / "model.safetensors")
    name = min(tensors)
    tensors[name].view(-1)[0] += 1e-3
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return str(copy)


def new_template(folder: Path, root: Path) -> str:
    """A copy of the target whose tokenizer has another chat template."""
    copy = Path(shutil.copytree(folder, root / "new_template"))
    path = copy / "chat_template.jinja"
    assert path.is_file()
    path.write_text(path.read_text() + " ")
    return str(copy)


CHANGES: dict[str, Callable[[Any, Path], dict[str, Any]]] = {
    "max_context": lambda trio, root: {"max_context": 100},
    "trained": lambda trio, root: {"trained": True},
    "lowering": lambda trio, root: {"lowering": "decomposed"},
    "layout": lambda trio, root: {"layout": "fused"},
    "preset": lambda trio, root: {"preset": "smollm2-135m"},
    "target": lambda trio, root: {"target": new_checkpoint(trio.target, root)},
    "drafter": lambda trio, root: {"drafter": new_checkpoint(trio.drafter, root)},
    "refiner": lambda trio, root: {"refiner": new_checkpoint(trio.refiner, root)},
    "tokenizer": lambda trio, root: {"target": new_template(trio.target, root)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_export_is_made_again_when_a_request_changed(
    tiny_trio: Any, out: Path, re_export: Any, tmp_path: Path, change: str
) -> None:
    options = tiny_trio.options(**CHANGES[change](tiny_trio, tmp_path))
    before = open_bundle(out)
    done = re_export(options, out)
    assert not done.reused
    assert open_bundle(out) == done.manifest != before
    assert re_export(options, out).reused


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a flipped bit": lambda bundle: flip(bundle / "graphs" / "drafter.data"),
    "a missing file": lambda bundle: (bundle / "tokenizer" / "text.json").unlink(),
    "a truncated file": lambda bundle: os.truncate(bundle / "graphs" / "target.data", 100),
    "an edited manifest": lambda bundle: flip(bundle / "manifest.json"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_bundle_is_made_again(
    tiny_trio: Any, tiny_bundle: Path, out: Path, re_export: Any, damage: str
) -> None:
    DAMAGE[damage](out)
    done = re_export(tiny_trio.options(), out)
    assert not done.reused
    assert open_bundle(out) == done.manifest
    assert {f.path: f.sha256 for f in done.manifest.files} == {
        f.path: f.sha256 for f in read_manifest(tiny_bundle).files
    }, "the same export gives the same bytes"


def test_a_context_the_target_was_not_made_for_is_refused(tiny_trio: Any, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"max_context is 641, .* at most 640 positions"):
        export(tiny_trio.options(max_context=641), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": "int8"}, "precision must be one of fp32, fp16, got 'int8'"),
        ({"drafter": None}, "give the drafter too"),
        ({"layout": "fused", "drafter": None, "refiner": None}, "a fused step drafts: give a drafter"),
        ({"layout": "merged"}, "layout must be split or fused, got 'merged'"),
        ({"max_context": 1}, "max_context must be at least 2 tokens, got 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(tiny_trio: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        tiny_trio.options(**changes)
