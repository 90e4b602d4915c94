"""Is a quantized graph what its recipe says? Read from the files, product by product, before anybody runs it.

    every chosen layer            reads both inputs through DequantizeLinear (weight-only: the weight)
    activation scales             clip / greatest code, of the tensor that the layer reads
    weights                       dequantized, they are the original (smoothed) within the rounding of their format
    every other layer             is as it was

So a wrong axis, a scale that is off, a branch that was forgotten and scales of the wrong model are all refused, in
words that name the layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from xpress_export.calibration.formats import GREATEST, QUANTIZES_ACTIVATIONS
from xpress_export.calibration.layers import Site, find_sites, forget, read_array
from xpress_export.calibration.recipe import Recipe, make_recipe
from xpress_export.calibration.scales import read_scales, require_graph
from xpress_export.errors import CalibrationError
from xpress_export.manifest import Manifest, VariantRecord

Array = NDArray[Any]

WEIGHT_ERROR = {"int8": 0.05, "int8-weight": 0.05, "fp8": 0.06, "int4-weight": 0.25}
"""Relative error of a dequantized weight, |difference| / |weight|, that rounding can explain."""
_HIGH_ERROR = 0.001
_SCALE_ERROR = 0.01


def audit(folder: Path, manifest: Manifest, variant: VariantRecord, files: Path | None = None) -> None:
    """Check both lowerings of a variant; raises CalibrationError. files: where its files lie, if not in `folder`."""
    files = files or folder
    scales = None
    if variant.scales is not None:
        scales = read_scales(files / variant.scales)
        require_graph(scales, manifest, variant.role, str(variant.scales))
    for path, decomposed in ((variant.file, False), (variant.decomposed, True)):
        if path is None:
            continue
        recipe = make_recipe(folder, manifest, variant, scales, decomposed=decomposed)
        original = (manifest.decomposed if decomposed else manifest.graphs)[variant.role]
        sites = find_sites(ir.load(folder / original.file).graph, variant.role)
        nodes = {node.name: node for node in ir.load(files / path).graph}
        checked: set[str] = set()
        for site in sites:
            node = nodes.get(site.node.name)
            if node is None or node.op_type != "MatMul":
                raise CalibrationError(f"{path}: the product of {site.name} is missing")
            _check_site(path, site, node, recipe, check_weight=site.layer not in checked)
            checked.add(site.layer)


def _check_site(path: str, site: Site, node: ir.Node, recipe: Recipe, *, check_weight: bool) -> None:
    x, weight = (_dequantizer(node, index) for index in (0, 1))
    if site.layer not in recipe.layers:
        if x is not None or weight is not None:
            raise CalibrationError(f"{path}: {site.name} was to stay in high precision and is quantized")
        if site.layer in recipe.smoothing.layers and check_weight:
            assert node.inputs[1] is not None
            _compare_weight(path, site, _constant(node.inputs[1]).astype(np.float32), recipe, _HIGH_ERROR)
        return
    if weight is None:
        raise CalibrationError(f"{path}: {site.name} was to be quantized and its weight is not")
    quantized = recipe.precision in QUANTIZES_ACTIVATIONS
    if (x is not None) != quantized:
        state = "not quantized" if quantized else "quantized, which weight-only precision does not do"
        raise CalibrationError(f"{path}: the input of {site.name} is {state}")
    if x is not None:
        _check_activation(path, site, x, recipe)
    if check_weight:
        _check_weight(path, site, weight, recipe)


def _dequantizer(node: ir.Node, index: int) -> ir.Node | None:
    value = node.inputs[index]
    producer = value.producer() if value is not None else None
    return producer if producer is not None and producer.op_type == "DequantizeLinear" else None


def _check_activation(path: str, site: Site, dequantize: ir.Node, recipe: Recipe) -> None:
    coded, scale = dequantize.inputs[0], dequantize.inputs[1]
    quantize = coded.producer() if coded is not None else None
    if quantize is None or quantize.op_type != "QuantizeLinear" or scale is None or quantize.inputs[1] is not scale:
        raise CalibrationError(f"{path}: the input of {site.name} is not quantized and dequantized with one scale")
    expected = recipe.clips[site.name] / GREATEST[recipe.precision]
    found = float(_constant(scale))
    if not np.isclose(found, expected, rtol=_SCALE_ERROR, atol=2.0**-24):
        raise CalibrationError(
            f"{path}: the input of {site.name} is quantized with scale {found:.4g}, but its range "
            f"{recipe.clips[site.name]:.4g} asks for {expected:.4g} ({found / expected:.2f}x)"
        )


def _check_weight(path: str, site: Site, dequantize: ir.Node, recipe: Recipe) -> None:
    codes, scale = (value for value in dequantize.inputs[:2])
    assert codes is not None and scale is not None
    try:
        found = _dequantized(_constant(codes), _constant(scale).astype(np.float32), dequantize)
    except ValueError as err:
        raise CalibrationError(f"{path}: the weight of {site.name} cannot be dequantized: {err}") from err
    _compare_weight(path, site, found, recipe, WEIGHT_ERROR[recipe.precision])


def _compare_weight(path: str, site: Site, found: Array, recipe: Recipe, allowed: float) -> None:
    expected = recipe.smoothing.apply(site.layer, site.read())
    if found.shape != expected.shape:
        raise CalibrationError(f"{path}: the weight of {site.name} is {found.shape}, expected {expected.shape}")
    error = float(np.linalg.norm(found - expected) / max(float(np.linalg.norm(expected)), 1e-30))
    forget(read_array(site.weight))
    if not error <= allowed:
        raise CalibrationError(
            f"{path}: the weight of {site.name} is {error:.1%} away from the original once dequantized, "
            f"allowed {allowed:.1%}; its scale or axis is wrong"
        )


def _dequantized(codes: Array, scale: Array, node: ir.Node) -> Array:
    """DequantizeLinear as the node says; a ValueError where its shapes do not fit."""
    axis, block = (node.attributes.get_int(name, default) for name, default in (("axis", 1), ("block_size", 0)))
    values = codes.astype(np.float32)
    if block:
        scale = np.repeat(scale, block, axis=axis)
    elif scale.ndim == 1:
        if len(scale) != values.shape[axis]:
            raise ValueError(f"{len(scale)} scales along axis {axis} of {values.shape}")
        scale = scale[:, None] if axis == 0 else scale
    return values * scale


def _constant(value: ir.Value) -> Array:
    return np.asarray(read_array(value))
