"""A finished graph: its file, and what the manifest says of it."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from xpress_export.records import GRAPHS_FOLDER, GraphRecord, TensorRecord

_DTYPE_NAMES = {ir.DataType.FLOAT: "float32", ir.DataType.FLOAT16: "float16", ir.DataType.INT64: "int64"}


def save_graph(model: ir.Model, folder: Path, stem: str) -> GraphRecord:
    """Write `stem`.onnx to `folder`, a bundle's folder of graphs; the weights already lie in such a one."""
    ir.save(model, folder / f"{stem}.onnx")
    initializers = model.graph.initializers.values()
    files = {str(v.const_value.location) for v in initializers if isinstance(v.const_value, ir.ExternalTensor)}
    return GraphRecord(
        file=f"{GRAPHS_FOLDER}/{stem}.onnx",
        data=tuple(f"{GRAPHS_FOLDER}/{file}" for file in sorted(files)),
        inputs=tuple(_tensor_record(value) for value in model.graph.inputs),
        outputs=tuple(_tensor_record(value) for value in model.graph.outputs),
    )


def _tensor_record(value: ir.Value) -> TensorRecord:
    assert value.name is not None and value.dtype is not None and value.shape is not None
    shape = tuple(d if isinstance(d, int) else str(d) for d in value.shape)
    return TensorRecord(name=value.name, dtype=_DTYPE_NAMES[value.dtype], shape=shape)
