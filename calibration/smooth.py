"""SmoothQuant: move the outliers of activations into the weights, exactly, before anything is rounded.

x @ W == (x / s) @ (s W) for any vector s over the channels of x. Whoever produces x is divided by s instead of x:

    between                       divided by s                  multiplied by s
    norm and projections          the norm's weight             rows of every projection that reads it
    up_proj and down_proj         columns of up_proj            rows of down_proj
    v_proj and o_proj             columns of v_proj             rows of o_proj (query heads of a key head share theirs)

    s[j] = amax(x[:, j]) ** alpha / amax(W[j, :]) ** (1 - alpha)

A tensor is left alone where something but matrix products reads it, or where a projection reads other tensors too. A
projection that stays in high precision is smoothed like the others, and its weight is stored again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from xpress_export.calibration.layers import Site, activations, read_array
from xpress_export.calibration.scales import GraphScales

Array = NDArray[Any]
_LIMITS = (1e-3, 1e3)
_PRODUCERS = {"down_proj": "up_proj", "o_proj": "v_proj"}


@dataclass
class Smoothing:
    """Factors s by name. rows, columns: of layers' weights; norms: of initializers; ranges: smoothed amax by site."""

    rows: dict[str, Array] = field(default_factory=dict)
    columns: dict[str, Array] = field(default_factory=dict)
    norms: dict[str, Array] = field(default_factory=dict)
    ranges: dict[str, float] = field(default_factory=dict)

    @property
    def layers(self) -> set[str]:
        """Layers whose weights change."""
        return {*self.rows, *self.columns}

    def apply(self, layer: str, weight: Array) -> Array:
        """The smoothed weight [in, out], float32; in place."""
        if layer in self.rows:
            weight *= self.rows[layer][:, None]
        if layer in self.columns:
            weight /= self.columns[layer]
        return weight


def smooth(all_sites: Sequence[Site], sites: Sequence[Site], scales: GraphScales, alpha: float) -> Smoothing:
    """Factors for the tensors that can be smoothed. all_sites: of the graph; sites: those that will be quantized."""
    result = Smoothing()
    readers = _readers(all_sites)
    quantized = {site.name for site in sites}
    by_layer = {site.layer: site for site in all_sites}
    for group in activations(all_sites).values():
        if not any(site.name in quantized for site in group):
            continue
        tensor = group[0].activation
        uses = [use.node for use in tensor.uses()]
        exclusive = all(any(site.node is node for site in group) for node in uses) and not tensor.is_graph_output()
        single = all(len(readers[site.layer]) == 1 and not site.transposed for site in group)
        if not (exclusive and single):
            continue
        channels = np.array(scales.of_site(group[0].name).channels, np.float32)
        norm, producer = _norm_weight(tensor), _producer(group, by_layer)
        if norm is None and producer is None:
            continue
        weights = np.max([np.abs(site.read()).max(axis=1) for site in group], axis=0)
        if producer is not None and producer.shape[1] != len(channels):  # one value head, several query heads
            factors = _shared_factors(channels, weights, alpha, producer.shape[1], _head_size(producer))
        else:
            factors = _factors(channels, weights, alpha)
        for site in group:
            result.rows[site.layer] = factors
        if norm is not None:
            result.norms[str(norm.name)] = factors
        else:
            assert producer is not None
            result.columns[producer.layer] = _of_values(factors, producer)
        result.ranges.update({site.name: float((channels / factors).max()) for site in group})
    return result


def _readers(sites: Sequence[Site]) -> Mapping[str, set[int]]:
    """Tensors that are multiplied with each layer's weight."""
    found: dict[str, set[int]] = defaultdict(set)
    for site in sites:
        found[site.layer].add(id(site.activation))
    return found


def _factors(channels: Array, weights: Array, alpha: float) -> Array:
    """s [channels]; a channel that never moves, or that no weight reads, stays as it is."""
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = channels**alpha / weights ** (1 - alpha)
    alive = (channels > 0) & (weights > 0)
    middle = np.exp(np.log(factors[alive]).mean()) if alive.any() else 1.0
    return np.where(alive, np.clip(factors / middle, *_LIMITS), 1.0).astype(np.float32)


def _norm_weight(tensor: ir.Value) -> ir.Value | None:
    """The weight vector that `tensor` was just multiplied with, if that is all its producer does."""
    node = tensor.producer()
    if node is None or node.op_type not in {"RMSNormalization", "Mul"}:
        return None
    for value in node.inputs[1:] if node.op_type == "RMSNormalization" else node.inputs:
        if value is not None and value.const_value is not None and len(value.const_value.shape) == 1:
            return value if len(value.uses()) == 1 else None
    return None


def _producer(group: Sequence[Site], by_layer: Mapping[str, Site]) -> Site | None:
    """The projection whose columns are the channels of what `group` reads."""
    prefix, _, last = group[0].layer.rpartition(".")
    found = by_layer.get(f"{prefix}.{_PRODUCERS.get(last, '')}")
    usable = found is not None and len(group) == 1 and not found.transposed and not _bias(found)
    return found if usable else None


def _bias(site: Site) -> bool:
    return any(use.node.op_type == "Add" and _is_vector(use.node) for use in site.node.outputs[0].uses())


def _is_vector(node: ir.Node) -> bool:
    values = [value.const_value for value in node.inputs if value is not None and value.const_value is not None]
    return any(len(value.shape) == 1 for value in values)


def _head_size(producer: Site) -> int:
    """Values per head, from the Reshape [B, S, H, D] behind the projection."""
    for use in producer.node.outputs[0].uses():
        shape = use.node.outputs[0].shape if use.node.op_type == "Reshape" else None
        if shape is not None and len(shape) == 4 and isinstance(shape[3], int):
            return shape[3]
    return 1


def _shared_factors(channels: Array, weights: Array, alpha: float, num_values: int, size: int) -> Array:
    """Factors of [Hq * D] channels in which the query heads of one key head agree."""
    heads = num_values // size
    grouped = [values.reshape(heads, -1, size).max(axis=1).ravel() for values in (channels, weights)]
    shared = _factors(grouped[0], grouped[1], alpha)
    return np.repeat(shared.reshape(heads, 1, size), len(channels) // num_values, axis=1).ravel()


def _of_values(factors: Array, producer: Site) -> Array:
    """Factors of the producer's own columns."""
    num_values = producer.shape[1]
    if num_values == len(factors):
        return factors
    size = _head_size(producer)
    return factors.reshape(num_values // size, -1, size)[:, 0].ravel()


def smoothed_norm(value: ir.Value, factors: Array) -> Array:
    """A norm's weight divided by its factors, in its own type."""
    weight = read_array(value)
    return (weight.astype(np.float32) / factors).astype(weight.dtype)


def smoothed_weight(site: Site, smoothing: Smoothing) -> Array:
    """The weight of a layer that stays in high precision, smoothed, in its own type [in, out]."""
    dtype = read_array(site.weight).dtype
    return smoothing.apply(site.layer, site.read()).astype(dtype)
