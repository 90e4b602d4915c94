"""Ranges measured on the real loop, and what is refused while measuring."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from xpress_export import names
from xpress_export.calibration.calibrate import CalibrateOptions, Observer, calibrate, save_scales
from xpress_export.calibration.observe import ObservedGraph
from xpress_export.calibration.runtimes import answer, runtime_of
from xpress_export.calibration.scales import Scales, read_scales
from xpress_export.errors import CalibrationError, RequestError
from xpress_export.manifest import open_bundle, read_manifest
from xpress_export.records import SCALES_FILE
from xpress_export.runtime import Runtime

OPTIONS = CalibrateOptions(prompts=None, samples=1, max_new_tokens=4, num_threads=1)


def test_every_product_is_measured(scales: Scales) -> None:
    target, drafter = (scales.graphs[role] for role in (names.TARGET, names.DRAFTER))
    assert len(target.weights) == 3 * 7 + 1 and len(drafter.weights) == 2 * 7 + 2
    assert {site for found in target.activations.values() for site in found.feeds} >= set(target.weights)
    feeds = {site for found in drafter.activations.values() for site in found.feeds}
    assert {"fc", "layers.0.self_attn.k_proj", "layers.0.self_attn.k_proj#2"} <= feeds
    # Prefill rows and verify rows: more than the tokens that were committed.
    assert target.of_site("layers.0.self_attn.q_proj").rows > 2 * 12


def test_observing_changes_nothing(tiny_bundle: Path) -> None:
    manifest = read_manifest(tiny_bundle)
    seen: list[dict[str, Any]] = []
    observer = Observer(names.TARGET, tiny_bundle / manifest.graphs[names.TARGET].file)
    from xpress_export.runtime.backend import Graph

    graphs: dict[str, Graph] = {
        role: Graph(tiny_bundle / record.file, role, 1) for role, record in manifest.graphs.items()
    }
    path = tiny_bundle / manifest.graphs[names.TARGET].file
    graphs[names.TARGET] = ObservedGraph(path, names.TARGET, tuple(observer.tensors), lambda v: seen.append(dict(v)), 1)
    with runtime_of(tiny_bundle, manifest, graphs) as watched, Runtime.open(tiny_bundle, num_threads=1) as plain:
        assert answer(watched, "hello", 10).token_ids == answer(plain, "hello", 10).token_ids
    assert seen and set(seen[0]) == set(observer.tensors)


def test_a_scales_file_reads_back(scales: Scales, tmp_path: Path) -> None:
    path = save_scales(tmp_path, scales, tmp_path / "made" / "scales.json")
    assert read_scales(path) == scales and not list(path.parent.glob(".*"))


def test_scales_in_the_bundle_are_listed(tiny_bundle: Path, scales: Scales, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    save_scales(folder, scales, None)
    assert SCALES_FILE in {file.path for file in open_bundle(folder).files}


@pytest.mark.parametrize(
    ("text", "message"), [("", "holds no prompts"), ('{"prompt": 3}', ":1 has no text"), ("{", "is not JSON")]
)
def test_bad_prompts(text: str, message: str, tiny_bundle: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(RequestError, match=message):
        calibrate(tiny_bundle, dataclasses.replace(OPTIONS, prompts=path))


def poison(scripted_bundle: Any, weight: str, change: Any) -> Path:
    """A copy of the tiny bundle in which `change` was made to one weight of the target."""
    folder: Path = scripted_bundle()
    const = ir.load(folder / "graphs" / "target.onnx").graph.initializers[weight].const_value
    assert isinstance(const, ir.ExternalTensor)
    shape = tuple(int(size) for size in const.shape.numpy())
    change(np.memmap(folder / "graphs" / const.location, np.float32, "r+", const.offset or 0, shape))
    scripted_bundle.record(folder)
    return folder


def test_nan_is_named_by_layer(scripted_bundle: Any) -> None:
    folder = poison(
        scripted_bundle, "model.layers.1.post_attention_layernorm.weight", lambda w: w.__setitem__(3, np.nan)
    )
    with pytest.raises(
        CalibrationError, match=r"target computes NaN in front of layers\.1\.mlp\.gate_proj for prompt 1"
    ):
        calibrate(folder, OPTIONS)


def test_dead_channels_are_named_by_layer(scripted_bundle: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder = poison(scripted_bundle, "model.layers.2.input_layernorm.weight", lambda w: w.__setitem__([5, 9], 0))
    with pytest.raises(CalibrationError, match=r"layers\.2\.self_attn\.\w+ reads 2 dead channels of 48 \(5, 9\)"):
        calibrate(folder, OPTIONS)
    calibrate(folder, dataclasses.replace(OPTIONS, allow_dead=True))


@pytest.mark.parametrize("changes", [{"method": "best"}, {"percentile": 10.0}, {"samples": 0}])
def test_bad_options(changes: dict[str, Any]) -> None:
    with pytest.raises(CalibrationError):
        dataclasses.replace(OPTIONS, **changes)
