"""Write the quantized variant of a graph: explicit Q/DQ on both inputs of each chosen matrix product.

    before                   after
    MatMul(x, W)             MatMul(DQ(Q(x)), DQ(codes of W))       int8, fp8
                             MatMul(x, DQ(codes of W))              weight only

One Q and one DQ per activation, however many products read it; nothing else is touched, so no Q/DQ is stranded on a
residual. The result is a standard ONNX graph of the opset it had, or of the one that INT4 needs. Codes lie in a data
file of their own, everything else stays where the original has it: embedding and head are never stored twice. Peak
memory is a few copies of the largest quantized matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from xpress_export import names
from xpress_export.calibration.formats import (
    CODE_TYPES,
    QUANTIZES_ACTIVATIONS,
    Codes,
    quantize_weight,
    scale_of,
)
from xpress_export.calibration.layers import Site, activations, find_sites, forget, read_array
from xpress_export.calibration.recipe import Recipe
from xpress_export.calibration.smooth import Smoothing, smoothed_norm, smoothed_weight
from xpress_export.manifest import GRAPHS_FOLDER, GraphRecord

Array = NDArray[Any]
_ALIGNMENT = 4096
_INLINE_BYTES = 256
_NUMPY: dict[Any, np.dtype[Any]] = {ir.DataType.FLOAT: np.dtype(np.float32), ir.DataType.FLOAT16: np.dtype(np.float16)}


class DataFile:
    """An external data file being written, each tensor once."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._placed: dict[str, ir.TensorProtocol] = {}

    def tensor(self, name: str, make: Callable[[], Array]) -> ir.TensorProtocol:
        """The tensor `name`, made and written unless it already was; small ones stay in the graph."""
        if name not in self._placed:
            self._placed[name] = self._write(name, make())
        return self._placed[name]

    def _write(self, name: str, array: Array) -> ir.TensorProtocol:
        tensor = ir.tensor(np.require(array, requirements="C"), name=name)  # keeps a scalar a scalar
        if array.nbytes <= _INLINE_BYTES:
            return tensor
        with (self.folder / self.name).open("ab") as out:
            out.write(b"\0" * (-out.tell() % _ALIGNMENT))
            offset = out.tell()
            data = tensor.tobytes()
            out.write(data)
        return ir.ExternalTensor(
            self.name, offset, len(data), tensor.dtype, shape=tensor.shape, name=name, base_dir=self.folder
        )


def write_variant(
    source: Path,
    record: GraphRecord,
    role: str,
    recipe: Recipe,
    data: DataFile,
    stem: str,
    advance: Callable[[float], None] = lambda _: None,
) -> GraphRecord:
    """Write `graphs/{stem}.onnx` beside `data`, quantized as `recipe` says; the record of the new graph.

    source: the bundle that `record` belongs to. advance: called with the bytes of each weight that is done.
    """
    model = ir.load(source / record.file)
    graph = model.graph
    all_sites = find_sites(graph, role)
    sites = [site for site in all_sites if site.layer in recipe.layers]
    _smooth_norms(graph, recipe.smoothing, data)
    _smooth_high(graph, [site for site in all_sites if site.layer not in recipe.layers], recipe.smoothing, data)
    if recipe.precision in QUANTIZES_ACTIVATIONS:
        _quantize_activations(graph, sites, recipe)
    _quantize_weights(graph, sites, recipe, data, advance)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
    if recipe.precision == "int4-weight" and graph.opset_imports[""] < names.INT4_OPSET:
        graph.opset_imports[""], model.ir_version = names.INT4_OPSET, names.INT4_IR_VERSION
    ir.save(model, data.folder / f"{stem}.onnx")
    initializers = [value.const_value for value in graph.initializers.values()]
    files = {str(const.location) for const in initializers if isinstance(const, ir.ExternalTensor)}
    return replace(
        record, file=f"{GRAPHS_FOLDER}/{stem}.onnx", data=tuple(f"{GRAPHS_FOLDER}/{file}" for file in sorted(files))
    )


def _smooth_norms(graph: ir.Graph, smoothing: Smoothing, data: DataFile) -> None:
    for name, factors in smoothing.norms.items():
        value = graph.initializers[name]
        made = data.tensor(f"{name}.smoothed", lambda value=value, factors=factors: smoothed_norm(value, factors))  # type: ignore[misc]
        value.replace_all_uses_with(_initializer(graph, made))


def _smooth_high(graph: ir.Graph, sites: Sequence[Site], smoothing: Smoothing, data: DataFile) -> None:
    """Smooth the weights of layers that stay in high precision."""
    for site in sites:
        if site.layer in smoothing.layers:
            made = data.tensor(f"{site.layer}.smoothed", lambda site=site: smoothed_weight(site, smoothing))  # type: ignore[misc]
            site.node.replace_input_with(1, _initializer(graph, made))


def _quantize_activations(graph: ir.Graph, sites: Sequence[Site], recipe: Recipe) -> None:
    """Q and DQ on each tensor that quantized products read; they share one zero point (see `names`)."""
    zero = _initializer(graph, ir.tensor(np.zeros((), CODE_TYPES[recipe.precision]), name=names.ACTIVATION_ZERO))
    for name, group in activations(sites).items():
        x = group[0].activation
        assert x.dtype is not None
        scale_value = scale_of(recipe.clips[name], recipe.precision, _NUMPY[x.dtype])
        scale = _initializer(graph, ir.tensor(scale_value, name=f"{name}.activation_scale"))
        quantize = ir.Node("", "QuantizeLinear", (x, scale, zero), name=f"{name}.quantize")
        dequantize = ir.Node("", "DequantizeLinear", (quantize.outputs[0], scale, zero), name=f"{name}.dequantize")
        dequantize.outputs[0].type, dequantize.outputs[0].shape = x.type, x.shape
        graph.insert_before(group[0].node, (quantize, dequantize))
        for site in group:
            site.node.replace_input_with(0, dequantize.outputs[0])


def _quantize_weights(
    graph: ir.Graph, sites: Sequence[Site], recipe: Recipe, data: DataFile, advance: Callable[[float], None]
) -> None:
    """A DequantizeLinear for each product, also where two read one weight: TensorRT cannot fuse a shared one."""
    for site in sites:
        site.node.replace_input_with(1, _dequantized(graph, site, recipe, data))
        if site.name == site.layer:
            advance(float(np.prod(site.shape)))


def _dequantized(graph: ir.Graph, site: Site, recipe: Recipe, data: DataFile) -> ir.Value:
    """The weight of a site as DequantizeLinear of its codes, inserted in front of the site."""
    assert site.weight.dtype is not None
    dtype = _NUMPY[site.weight.dtype]
    made: list[Codes] = []

    def codes() -> Codes:
        if not made:
            weight = recipe.smoothing.apply(site.layer, site.read())
            made.append(quantize_weight(weight, recipe.precision, dtype, recipe.block_size))
            forget(read_array(site.weight))
        return made[0]

    inputs = (
        _initializer(graph, _renamed(data.tensor(f"{site.layer}.codes", lambda: codes().codes), f"{site.name}.codes")),
        _initializer(graph, _renamed(data.tensor(f"{site.layer}.scale", lambda: codes().scale), f"{site.name}.scale")),
    )
    attributes: list[ir.Attr] = []
    if recipe.precision == "int4-weight":
        shapes = [int(value.shape[0]) for value in inputs if value.shape is not None]
        attributes = [ir.AttrInt64("axis", 0), ir.AttrInt64("block_size", shapes[0] // shapes[1])]
    elif recipe.precision != "fp8":
        attributes = [ir.AttrInt64("axis", 1)]
    node = ir.Node("", "DequantizeLinear", inputs, attributes, name=f"{site.name}.weight")
    node.outputs[0].type, node.outputs[0].shape = ir.TensorType(site.weight.dtype), ir.Shape(site.shape)
    graph.insert_before(site.node, node)
    return node.outputs[0]


def _renamed(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    """The same bytes under another name: TensorRT fails on codes that two products dequantize (1.7.1, Myelin)."""
    if tensor.name == name:
        return tensor
    if not isinstance(tensor, ir.ExternalTensor):
        return ir.tensor(tensor.numpy(), name=name)
    return ir.ExternalTensor(
        tensor.location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=name,
        base_dir=tensor.base_dir,
    )


def _initializer(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    assert tensor.name is not None
    value = ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.initializers[tensor.name] = value
    return value
