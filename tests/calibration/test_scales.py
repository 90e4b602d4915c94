"""A scales file is read strictly and belongs to one graph."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xpress_export.calibration.scales import Scales, read_scales, require_graph
from xpress_export.errors import CalibrationError
from xpress_export.manifest import read_manifest


def change_target(raw: dict[str, Any], **changes: Any) -> None:
    next(iter(raw["graphs"]["target"]["activations"].values())).update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(extra=1), "extra is unknown"),
        (lambda raw: raw.pop("method"), "method is missing"),
        (lambda raw: raw.update(schema=2), "schema should be 1"),
        (lambda raw: raw.update(method="best"), "method should be 'max' or"),
        (lambda raw: raw["dataset"].update(sha256="x"), "dataset.sha256 should be 64"),
        (lambda raw: change_target(raw, amax=-1.0), r"amax should be a positive number"),
        (lambda raw: change_target(raw, clip=1e9), r"clip should be at most amax"),
        (lambda raw: change_target(raw, rows=0), r"rows should be at least 1"),
        (lambda raw: change_target(raw, channels=[1.0]), r"channels should be numbers from 0 to amax"),
        (lambda raw: raw["graphs"].update(other=raw["graphs"]["target"]), "graphs.other is none of"),
    ],
)
def test_strict(change: Callable[[dict[str, Any]], None], message: str, scales: Scales, tmp_path: Path) -> None:
    raw = json.loads(scales.to_json())
    change(raw)
    path = tmp_path / "scales.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(CalibrationError, match=message):
        read_scales(path)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="give the file that `calibrate` wrote"):
        read_scales(tmp_path / "missing.json")
    (tmp_path / "half.json").write_text('{"schema": 1, ')
    with pytest.raises(CalibrationError, match="cut short"):
        read_scales(tmp_path / "half.json")


def test_swapped_scales_say_whose_they_are(scales: Scales, tiny_bundle: Path) -> None:
    graphs = {"target": scales.graphs["drafter"], "drafter": scales.graphs["target"]}
    swapped = dataclasses.replace(scales, graphs=graphs)
    with pytest.raises(CalibrationError, match="scales of the drafter in f are those of the target"):
        require_graph(swapped, read_manifest(tiny_bundle), "drafter", "f")


def test_scales_of_another_revision(scales: Scales, tiny_bundle: Path) -> None:
    old = dataclasses.replace(scales.graphs["target"], graph="0" * 64)
    with pytest.raises(CalibrationError, match="of another model, or of another revision"):
        require_graph(dataclasses.replace(scales, graphs={"target": old}), read_manifest(tiny_bundle), "target", "f")


def test_vectors_stay_on_a_line(scales: Scales) -> None:
    """A changed tensor is a few changed lines."""
    lines = scales.to_json().splitlines()
    assert len(lines) < 12 * sum(len(graph.activations) + len(graph.weights) for graph in scales.graphs.values())
