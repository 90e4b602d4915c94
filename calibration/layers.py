"""The quantizable matrix products of a graph, by the names of their weights.

    site         one MatMul with a constant weight, e.g. "layers.3.mlp.down_proj". Where two products read one weight
                 (a drafter projects context and block with the same matrices) they are "...k_proj" and "...k_proj#2"
    activation   a tensor that sites read; it is named after the first of them, so that a graph that was lowered
                 differently has the same names although its tensors are called something else

Weights are read one at a time from the graph's data files, never through protobuf.
"""

from __future__ import annotations

import fnmatch
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from xpress_export import names

Array = NDArray[Any]

KEPT_BY_DEFAULT = ("fc", "lm_head")
"""Last parts of the names of layers that stay in high precision unless asked for: tapped features of real models pass
2e4, and the head decides between near-ties. Norms, softmax, embeddings and the refiner are no sites at all."""

_FLOATS: dict[Any, np.dtype[Any]] = {ir.DataType.FLOAT: np.dtype(np.float32), ir.DataType.FLOAT16: np.dtype(np.float16)}
_MAPPED: dict[Any, np.dtype[Any]] = _FLOATS | {
    ir.DataType.INT8: np.dtype(np.int8),
    ir.DataType.FLOAT8E4M3FN: np.dtype(ml_dtypes.float8_e4m3fn),
}


@dataclass(frozen=True)
class Site:
    """One matrix product x @ W. transposed: W lies as [out, in] and a Transpose node turns it."""

    name: str
    layer: str
    node: ir.Node
    weight: ir.Value
    transposed: bool

    @property
    def activation(self) -> ir.Value:
        value = self.node.inputs[0]
        assert value is not None
        return value

    @property
    def shape(self) -> tuple[int, int]:
        """[in, out]."""
        assert self.weight.shape is not None
        rows, columns = (int(size) for size in self.weight.shape.numpy())
        return (columns, rows) if self.transposed else (rows, columns)

    def read(self) -> Array:
        """The weight as float32 [in, out], a copy."""
        values = read_array(self.weight).astype(np.float32)
        return np.ascontiguousarray(values.T) if self.transposed else values


def find_sites(graph: ir.Graph, role: str) -> list[Site]:
    """All sites of a graph in its own order; none of a refiner, which stays in high precision."""
    sites: list[Site] = []
    if role == names.REFINER:
        return sites
    for node in graph:
        found = _weight_of(node)
        if found is None:
            continue
        weight, transposed = found
        layer = (weight.name or "").removesuffix(".weight").removeprefix("model.")
        count = sum(site.layer == layer for site in sites)
        name = layer if count == 0 else f"{layer}#{count + 1}"
        sites.append(Site(name, layer, node, weight, transposed))
    return sites


def _weight_of(node: ir.Node) -> tuple[ir.Value, bool] | None:
    """The constant matrix on the right of a MatMul, and whether it is transposed on the way."""
    if node.op_type != "MatMul" or node.domain not in {"", "ai.onnx"}:
        return None
    value, transposed = node.inputs[1], False
    producer = value.producer() if value is not None else None
    if producer is not None and producer.op_type == "Transpose":
        value, transposed = producer.inputs[0], True
    if value is None or value.const_value is None or value.dtype not in _FLOATS:
        return None
    return (value, transposed) if len(value.const_value.shape) == 2 else None


def activations(sites: Iterable[Site]) -> dict[str, list[Site]]:
    """Sites that read the same tensor, by the name of the activation."""
    by_tensor: dict[int, list[Site]] = {}
    for site in sites:
        by_tensor.setdefault(id(site.activation), []).append(site)
    return {group[0].name: group for group in by_tensor.values()}


def split(sites: Sequence[Site], skip: Sequence[str] = (), include: Sequence[str] = ()) -> tuple[list[Site], list[str]]:
    """Sites to quantize, and names of the layers that stay high: by default or by a pattern of `skip`.

    A pattern is matched against a layer's name as shells match files, or is the name of a group of layers, such as
    "layers.3" or "layers.3.mlp".
    """
    kept = {
        site.layer
        for site in sites
        if any(matches(site.layer, p) for p in skip)
        or (site.layer.rsplit(".", 1)[-1] in KEPT_BY_DEFAULT and not any(matches(site.layer, p) for p in include))
    }
    return [site for site in sites if site.layer not in kept], sorted(kept)


def matches(layer: str, pattern: str) -> bool:
    return layer.startswith(f"{pattern}.") or fnmatch.fnmatchcase(layer, pattern)


def read_array(value: ir.Value) -> Array:
    """An initializer's values, in its own type; external data is mapped, not loaded."""
    const = value.const_value
    assert const is not None
    if not isinstance(const, ir.ExternalTensor):
        return np.asarray(const.numpy())
    dtype = _MAPPED.get(const.dtype)
    if dtype is None:  # packed
        return np.asarray(const.numpy())
    shape = tuple(int(size) for size in const.shape.numpy())
    path = Path(const.base_dir, const.location)
    return np.memmap(path, dtype, "r", const.offset or 0, shape)


def forget(array: Array) -> None:
    """Give back the pages of a mapped array: what was read once need not count as memory in use."""
    base: Any = array
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)
