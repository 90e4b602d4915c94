"""Deliberate faults in quantized graphs, each named by its layer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from xpress_export.calibration.audit import audit
from xpress_export.calibration.check import CheckOptions, check
from xpress_export.errors import CalibrationError
from xpress_export.manifest import VariantRecord, read_manifest

Edit = Callable[[Path, str, Callable[[onnx.ModelProto], None]], None]
LAYER = "layers.1.self_attn.o_proj"
SQUARE = "layers.1.self_attn.q_proj"


def variant_of(folder: Path, role: str = "target", precision: str = "int8") -> VariantRecord:
    return next(v for v in read_manifest(folder).variants if (v.role, v.precision) == (role, precision))


def refusal(folder: Path, role: str = "target", precision: str = "int8") -> str:
    with pytest.raises(CalibrationError) as caught:
        audit(folder, read_manifest(folder), variant_of(folder, role, precision))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def node_of(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.name == name)


def scale_initializer(model: onnx.ModelProto, name: str, factor: float) -> None:
    found = next(init for init in model.graph.initializer if init.name == name)
    assert not found.external_data
    found.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(found) * np.float32(factor), name))


def test_what_quantize_writes_passes(quantized_bundle: Path) -> None:
    manifest = read_manifest(quantized_bundle)
    assert len(manifest.variants) == 8
    for variant in manifest.variants:
        audit(quantized_bundle, manifest, variant)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_an_activation_scale_off_by_two(factor: float, fresh: Path, edit_graph: Edit) -> None:
    edit_graph(fresh, "target.int8.onnx", lambda m: scale_initializer(m, f"{LAYER}.activation_scale", factor))
    assert (
        f"the input of {LAYER} is quantized with scale" in (message := refusal(fresh)) and f"{factor:.2f}x" in message
    )


def test_a_weight_scale_off_by_two(fresh: Path, edit_graph: Edit) -> None:
    edit_graph(fresh, "target.int8.onnx", lambda m: scale_initializer(m, f"{LAYER}.scale", 2))
    assert f"the weight of {LAYER} is 100" in (message := refusal(fresh)) and "scale or axis" in message


def test_the_wrong_axis(fresh: Path, edit_graph: Edit) -> None:
    """Of a matrix that is not square the shapes do not fit; of a square one only the numbers tell."""

    def transpose(model: onnx.ModelProto, layer: str) -> None:
        attribute = next(a for a in node_of(model, f"{layer}.weight").attribute if a.name == "axis")
        attribute.i = 0

    edit_graph(fresh, "target.int8-weight.onnx", lambda m: transpose(m, LAYER))
    assert f"the weight of {LAYER} cannot be dequantized" in refusal(fresh, precision="int8-weight")


def test_the_wrong_axis_of_a_square_matrix() -> None:
    from xpress_export.calibration.formats import Codes, quantize_weight

    weight = (np.random.default_rng(0).standard_normal((32, 32)) * np.linspace(0.1, 3, 32)).astype(np.float32)
    codes = quantize_weight(weight, "int8", np.dtype(np.float32))
    wrong = Codes(codes.codes, codes.scale, 0).dequantize()
    assert np.linalg.norm(wrong - weight) / np.linalg.norm(weight) > 0.5


@pytest.mark.parametrize("side", [0, 1])
def test_a_branch_that_is_not_quantized(side: int, fresh: Path, edit_graph: Edit) -> None:
    def bypass(model: onnx.ModelProto) -> None:
        makers = {node.output[0]: node for node in model.graph.node}
        product = next(n for n in model.graph.node if n.op_type == "MatMul" and n.input[1] in makers)
        dequantize = makers[product.input[side]]
        source = makers[dequantize.input[0]].input[0] if side == 0 else "model.layers.0.input_layernorm.weight"
        product.input[side] = source

    edit_graph(fresh, "target.int8.onnx", bypass)
    message = refusal(fresh)
    assert ("is not quantized" if side == 0 else "its weight is not") in message and "layers.0.self_attn" in message


def test_swapped_scales_of_drafter_and_target(fresh: Path, scripted_bundle: Any) -> None:
    """The files of two variants, exchanged: each says whose they are."""
    one, other = (fresh / f"scales/{role}.int8.json" for role in ("target", "drafter"))
    texts = [json.loads(path.read_text()) for path in (one, other)]
    texts[0]["graphs"] = {"drafter": texts[0]["graphs"]["target"]}
    texts[1]["graphs"] = {"target": texts[1]["graphs"]["drafter"]}
    one.write_text(json.dumps(texts[1]))
    other.write_text(json.dumps(texts[0]))
    scripted_bundle.record(fresh)
    assert "are those of the drafter" in refusal(fresh)
    assert "are those of the target" in refusal(fresh, "drafter")


def test_a_layer_that_was_to_stay_high(fresh: Path) -> None:
    manifest = read_manifest(fresh)
    variant = variant_of(fresh, precision="int8-weight")
    kept = tuple(sorted({*variant.kept, LAYER}))
    with pytest.raises(CalibrationError, match=f"{LAYER} was to stay in high precision"):
        audit(fresh, manifest, dataclasses.replace(variant, kept=kept))


def test_check_refuses_a_faulty_variant(fresh: Path, edit_graph: Edit) -> None:
    edit_graph(fresh, "drafter.int8.onnx", lambda m: scale_initializer(m, "layers.0.mlp.down_proj.activation_scale", 2))
    with pytest.raises(CalibrationError, match=r"drafter\.int8\.onnx: the input of layers\.0\.mlp\.down_proj"):
        check(fresh, CheckOptions(precision="int8", samples=2, max_new_tokens=4, num_threads=1))
