"""ONNX graph files without the onnx package: what a device has to know of a graph, read from its protobuf.

A device that compiles needs three things of a graph file: its opset, its operators, and a copy in which some
dynamic dimensions have a size, because TensorRT wants the rows of a cache to be known when it parses. Weights lie
in other files, so a graph file is small and is read whole.

    message       field numbers used
    ModelProto    7 graph, 8 opset_import
    OperatorSet   1 domain, 2 version
    GraphProto    1 node, 11 input, 12 output, 13 value_info
    NodeProto     4 op_type, 7 domain
    ValueInfo     2 type -> 1 tensor_type -> 2 shape -> 1 dim -> 1 dim_value | 2 dim_param
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from xpress_export.errors import BundleError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_GRAPH, _OPSETS, _NODE, _VALUES = 7, 8, 1, (11, 12, 13)
_DIMENSIONS = ((_GRAPH,), _VALUES, (2,), (1,), (2,), (1,))
"""Field numbers from the model down to each dimension of each tensor that is described by name."""


@dataclass(frozen=True)
class Operators:
    """What a graph is made of. counts: nodes by operator, `domain::name` outside the standard domain."""

    opset: int
    counts: Mapping[str, int]


def read_operators(path: Path) -> Operators:
    """Opset and operator counts of a graph file; subgraphs, which exports do not have, are not looked into."""
    opset, counts = 0, Counter[str]()
    try:
        for number, value, _ in _fields(path.read_bytes()):
            if number == _OPSETS:
                entry = dict(_values(value))
                opset = opset if entry.get(1, b"") else int(entry.get(2, 0))
            elif number == _GRAPH:
                counts.update(_operator(node) for field, node, _ in _fields(value) if field == _NODE)
    except (IndexError, ValueError, TypeError) as err:
        raise BundleError(f"{path} is not an ONNX graph ({err}); build the bundle again") from err
    return Operators(opset, dict(sorted(counts.items())))


def fix_dimensions(model: bytes, sizes: Mapping[str, int]) -> bytes:
    """A copy of a serialized model in which each dynamic dimension named in `sizes` has that size."""

    def fix(dimension: bytes) -> bytes:
        name = dict(_values(dimension)).get(2)
        size = sizes.get(name.decode()) if isinstance(name, bytes) else None
        return dimension if size is None else _varint(1 << 3 | _VARINT) + _varint(size)

    return _rewrite(model, _DIMENSIONS, fix)


def write_with_sizes(graph: Path, sizes: Mapping[str, int], folder: Path) -> Path:
    """Write a graph with `sizes` filled in to `folder`, its weights linked beside it, where parsers look for them."""
    path = folder / graph.name
    path.write_bytes(fix_dimensions(graph.read_bytes(), sizes))
    for data in graph.parent.glob("*.data"):
        link = folder / data.name
        link.unlink(missing_ok=True)
        link.symlink_to(data.resolve())
    return path


def _operator(node: bytes | int) -> str:
    fields = dict(_values(node))
    name, domain = (fields.get(number, b"") for number in (4, 7))
    assert isinstance(name, bytes) and isinstance(domain, bytes)
    return name.decode() if domain in {b"", b"ai.onnx"} else f"{domain.decode()}::{name.decode()}"


# The wire format: a tag (number << 3 | kind), then a varint, 4 or 8 bytes, or a length and that many bytes.


def _rewrite(message: bytes, path: Sequence[Sequence[int]], change: Callable[[bytes], bytes]) -> bytes:
    """Replace each submessage that `path` leads to by `change` of it; everything else keeps its bytes."""
    out = bytearray()
    for number, value, raw in _fields(message):
        if number not in path[0] or not isinstance(value, bytes):
            out += raw
            continue
        new = change(value) if len(path) == 1 else _rewrite(value, path[1:], change)
        out += _varint(number << 3 | _BYTES) + _varint(len(new)) + new
    return bytes(out)


def _values(message: bytes | int) -> Iterator[tuple[int, bytes | int]]:
    return ((number, value) for number, value, _ in _fields(message))


def _fields(message: bytes | int) -> Iterator[tuple[int, bytes | int, bytes]]:
    """Number, value (an integer for a varint) and encoded bytes of each field."""
    if isinstance(message, int):
        raise ValueError("a number where a message should be")
    at = 0
    while at < len(message):
        start = at
        tag, at = _read_varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            value: bytes | int
            value, at = _read_varint(message, at)
        else:
            length, at = _length(kind, message, at)
            if at + length > len(message):
                raise ValueError("the file is cut short")
            value, at = message[at : at + length], at + length
        yield tag >> 3, value, message[start:at]


def _length(kind: int, message: bytes, at: int) -> tuple[int, int]:
    if kind == _BYTES:
        return _read_varint(message, at)
    if kind not in {_FIXED64, _FIXED32}:
        raise ValueError(f"wire type {kind}")
    return (8 if kind == _FIXED64 else 4), at


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))
