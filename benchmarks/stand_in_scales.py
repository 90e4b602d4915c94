"""Q/DQ with invented scales: what INT8 and FP8 graphs look like to a builder, before calibration measures anything.

Every matrix product with a float16 weight gets QuantizeLinear and DequantizeLinear: activations by one fixed scale,
weights by their own range (INT8: per output channel; FP8: per tensor). The result compiles like a calibrated bundle
and generates nonsense; it exists for tests and compile-time benchmarks only.

    python benchmarks/stand_in_scales.py BUNDLE int8|fp8 OUT
"""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from xpress_export.manifest import (
    GRAPHS_FOLDER,
    TOKENIZER_FOLDER,
    GraphRecord,
    read_manifest,
    record_files,
    write_manifest,
)

_ALIGNMENT = 4096
_ACTIVATION_SCALE = {"int8": 0.05, "fp8": 0.02}
_GREATEST = {"int8": 127.0, "fp8": 448.0}
_TYPES = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
_FP8_OPSET = 19


def quantize_bundle(source: Path, out: Path, precision: str) -> Path:
    """A copy of a float16 bundle whose matrix products are in `precision`; returns `out`."""
    manifest = read_manifest(source)
    shutil.copytree(source / TOKENIZER_FOLDER, out / TOKENIZER_FOLDER)
    (out / GRAPHS_FOLDER).mkdir()
    for data in (source / GRAPHS_FOLDER).glob("*.data"):
        shutil.copyfile(data, out / GRAPHS_FOLDER / data.name)
    graphs = {role: _quantize(source, out, graph, precision, role) for role, graph in manifest.graphs.items()}
    decomposed = {role: _quantize(source, out, graph, precision, role) for role, graph in manifest.decomposed.items()}
    changed = dataclasses.replace(
        manifest, precision=precision, graphs=graphs, decomposed=decomposed, engines=(), files=record_files(out)
    )
    write_manifest(out, changed)
    return out


def _quantize(source: Path, out: Path, record: GraphRecord, precision: str, role: str) -> GraphRecord:
    model = ir.load(source / record.file)
    name = f"{Path(record.file).stem.replace('.', '_')}_{precision}.data"
    writer = _Weights(out / GRAPHS_FOLDER, name)
    scales: dict[str, ir.Value] = {}
    for node in list(model.graph):
        if node.op_type == "MatMul" and _is_quantizable(node.inputs[1]):
            _quantize_matmul(model.graph, node, precision, writer, scales)
    for value in list(model.graph.initializers.values()):
        if not value.uses():
            del model.graph.initializers[value.name]
    ir.save(model, out / record.file)
    return dataclasses.replace(record, data=(*record.data, *([f"{GRAPHS_FOLDER}/{name}"] if writer.used else [])))


def _is_quantizable(value: ir.Value | None) -> bool:
    const = value.const_value if value is not None else None
    return const is not None and len(const.shape) == 2 and value.dtype == ir.DataType.FLOAT16


class _Weights:
    """An external data file being written."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name, self.used = folder, name, False

    def add(self, array: np.ndarray[Any, Any], dtype: ir.DataType, name: str) -> ir.Value:
        self.used = True
        with (self.folder / self.name).open("ab") as out:
            out.write(b"\0" * (-out.tell() % _ALIGNMENT))
            offset = out.tell()
            array.tofile(out)
        shape = ir.Shape(array.shape)
        tensor = ir.ExternalTensor(self.name, offset, array.nbytes, dtype, shape=shape, name=name, base_dir=self.folder)
        return ir.Value(name=name, shape=shape, type=ir.TensorType(dtype), const_value=tensor)


def _quantize_matmul(
    graph: ir.Graph, node: ir.Node, precision: str, writer: _Weights, shared: dict[str, ir.Value]
) -> None:
    x, weight = node.inputs
    assert x is not None and weight is not None and weight.const_value is not None
    key = f"{weight.name}.{precision}"
    if key not in shared:
        values = weight.const_value.numpy().astype(np.float32)
        axis = 0 if precision == "int8" else None
        scale = np.maximum(np.abs(values).max(axis=axis), 1e-3) / _GREATEST[precision]
        quantized = np.clip(values / scale, -_GREATEST[precision], _GREATEST[precision])
        rounded = np.rint(quantized) if precision == "int8" else quantized
        dtype = ir.DataType.INT8 if precision == "int8" else ir.DataType.FLOAT8E4M3FN
        shared[key] = writer.add(np.ascontiguousarray(rounded.astype(_TYPES[precision])), dtype, key)
        shared[f"{key}.scale"] = _constant(f"{key}.scale", scale.astype(np.float16))
        graph.initializers[key] = shared[key]
        graph.initializers[f"{key}.scale"] = shared[f"{key}.scale"]
    activation = shared.get("scale")
    if activation is None:
        activation = shared["scale"] = _constant("stand_in.scale", np.array(_ACTIVATION_SCALE[precision], np.float16))
        shared["zero"] = _constant("stand_in.zero", np.zeros((), _TYPES[precision]))
        graph.initializers.update({"stand_in.scale": activation, "stand_in.zero": shared["zero"]})
    attributes = [ir.AttrInt64("axis", 1)] if precision == "int8" else []
    nodes = [
        ir.Node("", "QuantizeLinear", (x, activation, shared["zero"]), name=f"{node.name}.q"),
        ir.Node("", "DequantizeLinear", (shared[key], shared[f"{key}.scale"]), attributes, name=f"{node.name}.w"),
    ]
    nodes.insert(1, ir.Node("", "DequantizeLinear", (nodes[0].outputs[0], activation), name=f"{node.name}.dq"))
    graph.insert_before(node, nodes)
    node.replace_input_with(0, nodes[1].outputs[0])
    node.replace_input_with(1, nodes[2].outputs[0])


def _constant(name: str, array: np.ndarray[Any, Any]) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    return ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)


if __name__ == "__main__":
    print(quantize_bundle(Path(sys.argv[1]), Path(sys.argv[3]), sys.argv[2]))
