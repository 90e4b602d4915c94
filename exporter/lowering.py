"""The second form of a graph, for a TensorRT that does not read the four operators of the contract.

    operator              becomes                                                   note
    RMSNormalization      Cast, Mul, ReduceMean, Add, Sqrt, Div, Cast, Mul          in float32, as the operator
    RotaryEmbedding       Split, Unsqueeze, Mul, Sub, Add, Concat
    TensorScatter         Add, Range, Expand, ScatterElements                       copies the cache, not in place
    Attention             Mul, Reshape, MatMul, Add, Softmax, MatMul, Reshape       no copy of the cache per group

The result has opset 19, the first with QuantizeLinear in float16 and FP8 and within what TensorRT 10.3 reads. It has
the bindings of the native graph and refers to the same weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from xpress_export.errors import ExportError

OPSET = 19
_NEWER_ATTRIBUTES = {"Cast": ("round_mode",)}
"""Attributes that came after OPSET; dropped where they say nothing that older versions do not do anyway."""

_NOT_IN_OPSET = ("Attention", "RMSNormalization", "RotaryEmbedding", "TensorScatter", "Swish")


def decompose(model: ir.Model) -> Counter[str]:
    """Rewrite a native model in place; returns how many nodes of each operator were replaced."""
    fired = Counter[str]()
    graph = model.graph
    shared = _Shared(graph)
    for node in list(graph):
        rewrite = _REWRITES.get(node.op_type) if node.domain in {"", "ai.onnx"} else None
        if rewrite is None:
            _forget_newer(node)
            continue
        tape = _Tape(shared)
        result = rewrite(tape, node)
        old = node.outputs[0]
        result.shape, result.type = old.shape, old.type
        graph.insert_before(node, tape.nodes)
        _take_over(graph, old, result)
        graph.remove(node, safe=True)
        fired[node.op_type] += 1
    left = sorted({node.op_type for node in graph if node.op_type in _NOT_IN_OPSET})
    if left:
        raise ExportError(f"operators {', '.join(left)} are left in the decomposed graph")
    graph.opset_imports[""] = OPSET
    model.ir_version = 9
    return fired


def _take_over(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Let `new` stand wherever `old` did, under its name."""
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    name, old.name = old.name, f"{old.name}.native"
    new.name = name


def _forget_newer(node: ir.Node) -> None:
    for name in _NEWER_ATTRIBUTES.get(node.op_type, ()):
        node.attributes.pop(name, None)


@dataclass
class _Shared:
    """Constants and values that several rewrites of one graph use."""

    graph: ir.Graph

    def __post_init__(self) -> None:
        self.constants: dict[str, ir.Value] = {}
        self.rows: dict[tuple[int, str], ir.Value] = {}

    def constant(self, array: np.ndarray[Any, Any]) -> ir.Value:
        """An initializer; equal ones are made once."""
        key = f"const_{array.dtype.name}_{'x'.join(map(str, array.shape))}_{'_'.join(map(str, array.ravel()))}"
        if key not in self.constants:
            tensor = ir.tensor(array, name=key)
            value = ir.Value(name=key, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
            self.graph.initializers[key] = value
            self.constants[key] = value
        return self.constants[key]


class _Tape:
    """Records nodes in order; values get names that no other rewrite has."""

    _count = 0

    def __init__(self, shared: _Shared) -> None:
        self.shared = shared
        self.nodes: list[ir.Node] = []

    def op(self, name: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        return self.many(name, 1, *inputs, **attributes)[0]

    def many(self, name: str, count: int, *inputs: ir.Value, **attributes: object) -> Sequence[ir.Value]:
        outputs = []
        for _ in range(count):
            _Tape._count += 1
            outputs.append(ir.Value(name=f"lowered_{_Tape._count}"))
        attrs = [ir.Attr(key, _attr_type(value), value) for key, value in attributes.items()]
        node = ir.Node("", name, inputs, attrs, outputs=outputs, name=f"lowered_{outputs[0].name}")
        self.nodes.append(node)
        return tuple(node.outputs)

    def ints(self, *values: int) -> ir.Value:
        return self.shared.constant(np.array(values, np.int64))

    def scalar(self, value: float, dtype: ir.DataType) -> ir.Value:
        return self.shared.constant(np.array(value, dtype.numpy()))


def _attr_type(value: object) -> ir.AttributeType:
    return ir.AttributeType.INT if isinstance(value, int) else ir.AttributeType.INTS


def _inputs(node: ir.Node) -> list[ir.Value]:
    values = [value for value in node.inputs if value is not None]
    if len(values) != len(node.inputs):
        raise ExportError(f"{node.op_type} with an input left out cannot be decomposed")
    return values


def _float(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else float(attribute.as_float())


def _dtype(value: ir.Value) -> ir.DataType:
    if value.dtype is None:
        raise ExportError(f"value {value.name!r} has no type")
    return value.dtype


def _size(value: ir.Value, axis: int) -> int:
    size = value.shape[axis] if value.shape is not None else None
    if not isinstance(size, int):
        raise ExportError(f"value {value.name!r} has no static size on axis {axis}")
    return size


def _rms_norm(tape: _Tape, node: ir.Node) -> ir.Value:
    x, weight = _inputs(node)
    dtype, wide = _dtype(x), ir.DataType.FLOAT
    x32 = x if dtype == wide else tape.op("Cast", x, to=int(wide))
    mean = tape.op("ReduceMean", tape.op("Mul", x32, x32), tape.ints(-1), keepdims=1)
    root = tape.op("Sqrt", tape.op("Add", mean, tape.scalar(_float(node, "epsilon", 1e-5), wide)))
    normed = tape.op("Div", x32, root)
    narrow = normed if dtype == wide else tape.op("Cast", normed, to=int(dtype))
    return tape.op("Mul", narrow, weight)


def _rotate(tape: _Tape, node: ir.Node) -> ir.Value:
    x, cos, sin = _inputs(node)  # (B, H, S, D), (B, S, D/2), (B, S, D/2)
    first, second = tape.many("Split", 2, x, axis=-1, num_outputs=2)
    cos, sin = (tape.op("Unsqueeze", angle, tape.ints(1)) for angle in (cos, sin))
    rotated = (
        tape.op("Sub", tape.op("Mul", first, cos), tape.op("Mul", second, sin)),
        tape.op("Add", tape.op("Mul", second, cos), tape.op("Mul", first, sin)),
    )
    return tape.op("Concat", *rotated, axis=-1)


def _write_rows(tape: _Tape, node: ir.Node) -> ir.Value:
    cache, rows, write_index = _inputs(node)  # (B, H, C, D), (B, H, S, D), (B)
    key = (id(write_index), str(rows.shape))
    if key not in tape.shared.rows:
        shape = tape.op("Shape", rows)
        length = tape.op("Squeeze", tape.op("Slice", shape, tape.ints(2), tape.ints(3)), tape.ints(0))
        zero, one = (tape.shared.constant(np.array(n, np.int64)) for n in (0, 1))
        offsets = tape.op("Range", zero, length, one)  # (S)
        starts = tape.op("Unsqueeze", write_index, tape.ints(1))  # (B, 1)
        index = tape.op("Unsqueeze", tape.op("Add", starts, offsets), tape.ints(1, 3))  # (B, 1, S, 1)
        tape.shared.rows[key] = tape.op("Expand", index, shape)
    return tape.op("ScatterElements", cache, tape.shared.rows[key], rows, axis=2)


def _attend(tape: _Tape, node: ir.Node) -> ir.Value:
    """Query heads that share a key head are stacked as rows of one matrix: the cache is read once, never repeated."""
    query, key, value, mask = _inputs(node)  # (B, Hq, S, D), 2 x (B, H, T, D), (B, 1, S, T)
    heads, kv_heads, size = _size(query, 1), _size(key, 1), _size(query, 3)
    scaled = tape.op("Mul", query, tape.scalar(_float(node, "scale", size**-0.5), _dtype(query)))
    stacked = tape.op("Reshape", scaled, tape.ints(0, kv_heads, -1, size))  # (B, H, G*S, D)
    scores = tape.op("MatMul", stacked, tape.op("Transpose", key, perm=(0, 1, 3, 2)))  # (B, H, G*S, T)
    per_head = tape.op("Reshape", scores, tape.ints(0, heads, -1, 0))  # (B, Hq, S, T)
    shares = tape.op("Softmax", tape.op("Add", per_head, mask), axis=-1)
    again = tape.op("Reshape", shares, tape.ints(0, kv_heads, -1, 0))
    return tape.op("Reshape", tape.op("MatMul", again, value), tape.ints(0, heads, -1, size))


_REWRITES: dict[str, Callable[[_Tape, ir.Node], ir.Value]] = {
    "RMSNormalization": _rms_norm,
    "RotaryEmbedding": _rotate,
    "TensorScatter": _write_rows,
    "Attention": _attend,
}
