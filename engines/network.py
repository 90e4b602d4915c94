"""A parsed TensorRT network: what it consists of, and the one adjustment that some hardware needs.

A strongly typed network computes in the types it is written in, so its matrix multiplications already say which
precision the engine has: `describe` reads them, following each operand back to the node that dequantizes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from xpress_export.engines.libraries import Library

_PRECISION_NAMES = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "INT8": "int8", "FP8": "fp8"}
_PRECISION_NAMES |= {"INT4": "int4", "FP4": "fp4"}
_SAME_VALUE = ("SHUFFLE", "IDENTITY", "SQUEEZE", "UNSQUEEZE", "SLICE")
_HEADROOM = 2.0**-6
"""Scale of float16 stand-ins for float32 products: sums reach 4e6 before they overflow."""


@dataclass(frozen=True, kw_only=True)
class NetworkFacts:
    """layers: layers by type. matmuls: matrix products with weights, by precision; flops: their multiply-adds times
    two for one token; attention: attention operators that have to be fused, or were allowed not to be."""

    layers: Mapping[str, int]
    matmuls: Mapping[str, int]
    flops: Mapping[str, int]
    attention: int

    def share(self, precision: str) -> float:
        """Share of the weight matmul FLOPs computed in `precision`."""
        total = sum(self.flops.values())
        return self.flops.get(precision, 0) / total if total else 0.0


def layers_of(network: Any) -> list[Any]:
    return [network.get_layer(index) for index in range(network.num_layers)]


def describe(library: Library, layers: list[Any]) -> NetworkFacts:
    """Read what a network computes, and in which precision."""
    kinds = library.trt.LayerType
    types = Counter(_name(layer.type) for layer in layers)
    producers = {layer.get_output(k).name: layer for layer in layers for k in range(layer.num_outputs)}
    matmuls, flops = Counter[str](), Counter[str]()
    for layer in layers:
        if layer.type != kinds.MATRIX_MULTIPLY:
            continue
        weight = next((t for t in map(layer.get_input, (1, 0)) if all(size > 0 for size in t.shape)), None)
        if weight is None:
            continue  # scores and values of decomposed attention: no weights
        left, right = (_precision(layer.get_input(k), producers) for k in range(2))
        precision = left if left == right else f"{right} weights" if _is_narrow(right) else right
        matmuls[precision] += 1
        flops[precision] += 2 * prod(weight.shape)
    return NetworkFacts(
        layers=dict(sorted(types.items())),
        matmuls=dict(matmuls),
        flops=dict(flops),
        attention=types.get("ATTENTION_INPUT", 0),
    )


def _is_narrow(precision: str) -> bool:
    return precision in {"int8", "int4", "fp8", "fp4"}


def _precision(tensor: Any, producers: Mapping[str, Any]) -> str:
    """Type of the values behind a tensor: what it was dequantized from, or its own."""
    layer = producers.get(tensor.name)
    while layer is not None and _name(layer.type) in _SAME_VALUE:
        layer = producers.get(layer.get_input(0).name)
    source = layer.get_input(0) if layer is not None and _name(layer.type) == "DEQUANTIZE" else tensor
    return _PRECISION_NAMES.get(_name(source.dtype), _name(source.dtype).lower())


def _name(value: Any) -> str:
    """Name of an enumerator: TensorRT's print as `LayerType.SHUFFLE`."""
    return str(getattr(value, "name", value)).rsplit(".", 1)[-1]


def avoid_float32_matmul(library: Library, network: Any, layers: list[Any]) -> list[str]:
    """Compute float32 matrix products in float16, for an architecture that has no others; returns their names.

    The left operand is scaled by a power of two before the cast and the product scaled back after it, so that large
    sums do not overflow. Changes the network in place.
    """
    trt = library.trt
    changed = []
    for layer in layers:
        if layer.type != trt.LayerType.MATRIX_MULTIPLY or layer.get_input(0).dtype != trt.DataType.FLOAT:
            continue
        product = layer.get_output(0)
        readers = [(other, k) for other in layers for k in range(other.num_inputs) if _reads(other, k, product)]
        scaled = _times(library, network, layer.get_input(0), _HEADROOM)
        layer.set_input(0, network.add_cast(scaled, trt.DataType.HALF).get_output(0))
        layer.set_input(1, network.add_cast(layer.get_input(1), trt.DataType.HALF).get_output(0))
        back = network.add_cast(product, trt.DataType.FLOAT).get_output(0)
        result = _times(library, network, back, 1 / _HEADROOM)
        for reader, k in readers:
            reader.set_input(k, result)
        changed.append(str(layer.name))
    return changed


def _reads(layer: Any, index: int, tensor: Any) -> bool:
    found = layer.get_input(index)
    return found is not None and found.name == tensor.name


def _times(library: Library, network: Any, tensor: Any, factor: float) -> Any:
    """`tensor` times a constant, in float32."""
    import numpy as np

    shape = (1,) * len(tensor.shape)
    constant = network.add_constant(shape, np.full(shape, factor, np.float32)).get_output(0)
    return network.add_elementwise(tensor, constant, library.trt.ElementWiseOperation.PROD).get_output(0)
