"""Variants in a bundle: what is written, what is shared, what they compute, and what is refused."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from xpress_export import names, platforms
from xpress_export.calibration import quantize as stage
from xpress_export.calibration.calibrate import save_scales
from xpress_export.calibration.qdq import DataFile, write_variant
from xpress_export.calibration.quantize import QuantizeOptions, quantize
from xpress_export.calibration.recipe import make_recipe
from xpress_export.calibration.scales import Scales
from xpress_export.calibration.smooth import Smoothing
from xpress_export.errors import BundleError, CalibrationError, PlatformError
from xpress_export.manifest import open_bundle, read_manifest, write_manifest
from xpress_export.runtime import Runtime, SamplingParams
from xpress_export.runtime.backend import Graph


def load(folder: Path, name: str) -> onnx.ModelProto:
    return onnx.load(folder / "graphs" / name, load_external_data=False)


def logits(path: Path, manifest: Any, num_rows: int = 24) -> np.ndarray:
    """Logits of a target graph for fixed tokens, float32 [S, V]."""
    graph = Graph(path, names.TARGET, 1)
    call = graph.call()
    ids = np.random.default_rng(0).integers(0, manifest.target.vocab_size, (1, num_rows))
    call.bind_input(names.INPUT_IDS, ids)
    start = np.zeros(1, np.int64)
    call.bind_input(names.WRITE_INDEX, start)
    caches = {
        value.name: np.zeros((1, value.shape[1], num_rows, value.shape[3]), np.float32)
        for value in manifest.graphs[names.TARGET].inputs
        if value.name.startswith("past_")
    }
    for name, cache in caches.items():
        call.bind_input(name, cache)
        call.bind_output(name.replace("past_", "present_"), cache)
    out = np.zeros((1, num_rows, manifest.target.vocab_size), np.float32)
    call.bind_output(names.LOGITS, out)
    call.run()
    return out[0]


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(
    ("precision", "allowed"), [("int8", 0.25), ("fp8", 0.35), ("int8-weight", 0.1), ("int4-weight", 0.9)]
)
def test_every_precision_is_near_the_float_graph(precision: str, allowed: float, quantized_bundle: Path) -> None:
    """The tiny target amplifies noise by design; what counts is that each format is as near as it can be."""
    manifest = open_bundle(quantized_bundle)
    base = logits(quantized_bundle / "graphs/target.onnx", manifest)
    found = logits(quantized_bundle / f"graphs/target.{precision}.onnx", manifest)
    assert 0 < error(found, base) < allowed


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_q_and_dq_are_where_they_fuse(role: str, quantized_bundle: Path) -> None:
    """Both inputs of each product, and nothing else: every DequantizeLinear feeds products only."""
    nodes = load(quantized_bundle, f"{role}.int8.onnx").graph.node
    readers: dict[str, list[str]] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node.op_type)
    makers = {node.output[0]: node for node in nodes}
    for node in nodes:
        if node.op_type == "DequantizeLinear":
            assert set(readers[node.output[0]]) == {"MatMul"}
    quantized = [n for n in nodes if n.op_type == "MatMul" and n.input[0] in makers and n.input[1] in makers]
    both = [n for n in quantized if {makers[name].op_type for name in n.input} == {"DequantizeLinear"}]
    assert len(both) == (21 if role == "target" else 18)  # a drafter projects context and block: 2 x 2 more
    assert Counter(node.op_type for node in nodes)["QuantizeLinear"] == (12 if role == "target" else 9)


def test_weights_are_stored_as_codes_and_nothing_twice(quantized_bundle: Path) -> None:
    manifest = read_manifest(quantized_bundle)
    sizes = {file.path: file.num_bytes for file in manifest.files}
    variant = next(v for v in manifest.variants if (v.role, v.precision) == ("target", "int8-weight"))
    assert variant.data == ("graphs/target.data", "graphs/target.int8-weight.data")
    model = load(quantized_bundle, "target.int8-weight.onnx")
    places = {
        init.name: {entry.key: entry.value for entry in init.external_data}["location"]
        for init in model.graph.initializer
        if init.external_data
    }
    own = {name for name, place in places.items() if place == "target.int8-weight.data"}
    assert all(name.endswith((".codes", ".scale")) for name in own) and "model.embed_tokens.weight" not in own
    assert sizes["graphs/target.int8-weight.data"] < 0.6 * sizes["graphs/target.data"]


def test_smoothing_alone_changes_nothing(tiny_bundle: Path, scales: Scales, tmp_path: Path) -> None:
    """(x / s) @ (s W) is x @ W: every product is left in float, with its smoothed weight."""
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    manifest = read_manifest(folder)
    options = QuantizeOptions(precision="int8", smoothquant=0.7)
    for role in (names.TARGET, names.DRAFTER):
        variant = stage.plan_variants(folder, manifest, [role], options)[0]
        recipe = make_recipe(folder, manifest, variant, scales)
        assert recipe.smoothing.norms and recipe.smoothing.columns and recipe.smoothing.rows
        floats = dataclasses.replace(recipe, layers=frozenset(), clips={}, num_weights=0)
        data = DataFile(folder / "graphs", f"{role}.smooth.data")
        write_variant(folder, manifest.graphs[role], role, floats, data, f"{role}.smooth")
    base, found = (logits(folder / f"graphs/target{name}.onnx", manifest) for name in ("", ".smooth"))
    assert 0 < error(found, base) < 1e-5


def test_smoothing_shares_factors_between_query_heads(tiny_bundle: Path, scales: Scales) -> None:
    manifest = read_manifest(tiny_bundle)
    variant = stage.plan_variants(tiny_bundle, manifest, ["target"], QuantizeOptions(precision="int8", smoothquant=0.5))
    smoothing: Smoothing = make_recipe(tiny_bundle, manifest, variant[0], scales).smoothing
    rows, columns = smoothing.rows["layers.0.self_attn.o_proj"], smoothing.columns["layers.0.self_attn.v_proj"]
    heads = rows.reshape(2, 2, 16)  # key heads, query heads of each, head size
    np.testing.assert_array_equal(heads[:, 0], heads[:, 1])
    np.testing.assert_array_equal(heads[:, 0].ravel(), columns)


def test_a_quantized_bundle_generates(quantized_bundle: Path) -> None:
    params = SamplingParams(max_new_tokens=12, mode="xpress")
    with (
        Runtime.open(quantized_bundle, num_threads=1) as base,
        Runtime.open(quantized_bundle, precision={"drafter": "int8"}, num_threads=1) as draft,
        Runtime.open(quantized_bundle, precision="int8-weight", num_threads=1) as both,
    ):
        expected = base.generate("hello", params).result().token_ids
        assert draft.generate("hello", params).result().token_ids == expected  # a drafter never changes the answer
        assert len(both.generate("hello", params).result().token_ids) == len(expected)


def test_precisions_that_a_bundle_lacks(tiny_bundle: Path, quantized_bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"has no model in int8 .*xpress-export quantize"):
        Runtime.open(tiny_bundle, precision="int8")
    with pytest.raises(BundleError, match="has no refiner in int8"):
        Runtime.open(quantized_bundle, precision={"refiner": "int8"})


def test_skip_include_and_roles(fresh: Path) -> None:
    asked = QuantizeOptions(
        precision="int8", drafter="none", skip=("*.down_proj", "target:layers.1"), include=("lm_head",)
    )
    manifest = quantize(fresh, asked)
    variant = next(v for v in manifest.variants if (v.role, v.precision) == ("target", "int8"))
    assert "lm_head" not in variant.kept and variant.num_layers == 2 * 6 + 1 and variant.smoothquant is None
    assert {f"layers.{i}.mlp.down_proj" for i in range(3)} <= set(variant.kept)
    assert len(manifest.variants) == 8  # the one of that role and precision was replaced
    open_bundle(fresh)


def test_run_precision(fresh: Path) -> None:
    assert quantize(fresh, QuantizeOptions(precision="int8-weight", run=True)).run_precision == "int8-weight"
    with Runtime.open(fresh, num_threads=1) as runtime:
        assert runtime.generate("hello", SamplingParams(max_new_tokens=3)).result().token_ids


def unchanged(folder: Path) -> set[tuple[str, str]]:
    open_bundle(folder)
    assert not list(folder.parent.glob(".*"))
    return {(variant.role, variant.precision) for variant in read_manifest(folder).variants}


def test_an_interrupted_run_changes_nothing(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stage, "audit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quantize(folder, QuantizeOptions(precision="int8-weight"))
    assert unchanged(folder) == set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int8"}, r"needs ranges of activations: run `xpress-export calibrate"),
        ({"precision": "int8-weight", "skip": ("layers.9.*",)}, r"--skip 'layers\.9\.\*' matches no layer"),
        ({"precision": "int8-weight", "skip": ("*",)}, "leaves no layer of the target"),
        ({"precision": "int8-weight", "target": "none", "drafter": "none"}, "nothing is left"),
        ({"precision": "int8-weight", "smoothquant": 0.5}, "weight-only precisions use no scales"),
    ],
)
def test_refused_and_nothing_written(options: dict[str, Any], message: str, tiny_bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    with pytest.raises(CalibrationError, match=message) as caught:
        quantize(folder, QuantizeOptions(**options))
    assert "\n" not in str(caught.value) and unchanged(folder) == set()


def test_a_precision_that_the_platform_lacks(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    write_manifest(folder, dataclasses.replace(read_manifest(folder), platform="t4"))
    with pytest.raises(PlatformError, match=r"t4 .* cannot run int4-weight: INT4 weights need .* use --precision int8"):
        quantize(folder, QuantizeOptions(precision="int4-weight"))
    assert unchanged(folder) == set()


def test_scales_of_another_bundle(scripted_bundle: Any, scales: Scales, tmp_path: Path) -> None:
    other: Path = scripted_bundle()
    data = bytearray((other / "graphs/target.data").read_bytes())
    data[5000] ^= 1
    (other / "graphs/target.data").write_bytes(data)
    scripted_bundle.record(other)
    path = save_scales(other, scales, tmp_path / "scales.json")
    with pytest.raises(CalibrationError, match=r"another revision of its graph .*run `xpress-export calibrate`"):
        quantize(other, QuantizeOptions(precision="fp8", scales=path))


@pytest.mark.parametrize("precision", platforms.QUANTIZED)
def test_nothing_of_the_bundle_itself_changes(precision: str, tiny_bundle: Path, quantized_bundle: Path) -> None:
    before, after = (read_manifest(folder) for folder in (tiny_bundle, quantized_bundle))
    assert {file for file in before.files} <= set(after.files)
    assert dataclasses.replace(after, variants=(), files=before.files) == before
