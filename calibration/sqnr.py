"""Signal to quantization noise of each quantized product, measured on what flows through it while generating.

The noise of a layer is the difference between what its quantized product puts out and what the float product of the
same input would have; so every layer answers for itself, whatever the layers before it did.

    SQNR in dB = 10 log10(|float output|^2 / |difference|^2), the mean over rows

6 dB are one bit. Rows are drawn from prefill chunks, verify blocks and draft contexts alike, a fixed number per layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from xpress_export.calibration.layers import Site, find_sites, forget, read_array
from xpress_export.calibration.observe import ObservedGraph
from xpress_export.calibration.recipe import Recipe, make_recipe
from xpress_export.calibration.runtimes import answer, runtime_of
from xpress_export.calibration.scales import read_scales
from xpress_export.manifest import Manifest, VariantRecord
from xpress_export.runtime.backend import Graph

Array = NDArray[Any]
_NUM_ROWS = 64
_ROWS_PER_CALL = 6


@dataclass(frozen=True, kw_only=True)
class LayerNoise:
    """One product. clip, amax: of its input; equal where nothing is clipped, None without quantized activations."""

    role: str
    precision: str
    layer: str
    sqnr_db: float
    num_rows: int
    amax: float | None
    clip: float | None


class _Rows:
    """A fixed number of rows of the tensors that enter and leave each product."""

    def __init__(self, path: Path, sites: Sequence[Site]) -> None:
        nodes = {node.name: node for node in ir.load(path).graph}
        self.tensors: dict[str, tuple[str, str]] = {}
        for site in sites:
            node = nodes[site.node.name]
            self.tensors[site.name] = (_unquantized(node.inputs[0]), str(node.outputs[0].name))
        self.rows: dict[str, list[Array]] = {name: [] for pair in self.tensors.values() for name in pair}
        self._random = np.random.default_rng(0)
        self._count: dict[str, int] = dict.fromkeys(self.rows, 0)

    def listen(self, values: Mapping[str, Array]) -> None:
        chosen: dict[int, Array] = {}
        for name, array in values.items():
            if self._count[name] >= _NUM_ROWS:
                continue
            flat = array.reshape(-1, array.shape[-1])
            if len(flat) not in chosen:  # the same rows of all tensors of one size
                size = min(_ROWS_PER_CALL, len(flat))
                chosen[len(flat)] = self._random.choice(len(flat), size, replace=False)
            self.rows[name].append(flat[chosen[len(flat)]].astype(np.float32))
            self._count[name] += len(self.rows[name][-1])

    @property
    def full(self) -> bool:
        return min(self._count.values()) >= _NUM_ROWS


def _unquantized(value: ir.Value | None) -> str:
    """The tensor in front of Q and DQ."""
    assert value is not None
    while (node := value.producer()) is not None and node.op_type in {"DequantizeLinear", "QuantizeLinear"}:
        value = node.inputs[0]
        assert value is not None
    return str(value.name)


def measure_noise(
    folder: Path,
    manifest: Manifest,
    variants: Sequence[VariantRecord],
    prompts: Sequence[str],
    max_new_tokens: int,
    num_threads: int | None = None,
) -> list[LayerNoise]:
    """SQNR of every quantized product of `variants`, at most one per model, worst first."""
    recipes, sites, rows = {}, {}, {}
    graphs: dict[str, Graph] = {}
    for variant in variants:
        role = variant.role
        recipes[role] = recipe_of(folder, manifest, variant)
        found = find_sites(ir.load(folder / manifest.graphs[role].file).graph, role)
        sites[role] = [site for site in found if site.layer in recipes[role].layers]
        rows[role] = _Rows(folder / variant.file, sites[role])
        tensors = tuple(rows[role].rows)
        graphs[role] = ObservedGraph(folder / variant.file, role, tensors, rows[role].listen, num_threads)
    for role, record in manifest.graphs.items():
        graphs.setdefault(role, Graph(folder / record.file, role, num_threads))
    with runtime_of(folder, manifest, {role: graphs[role] for role in manifest.roles}) as runtime:
        for prompt in prompts:
            answer(runtime, prompt, max_new_tokens)
            if all(each.full for each in rows.values()):
                break
    noise = []
    for variant in variants:
        noise += _noise(variant, sites[variant.role], rows[variant.role], recipes[variant.role], folder)
    return sorted(noise, key=lambda layer: layer.sqnr_db)


def recipe_of(folder: Path, manifest: Manifest, variant: VariantRecord) -> Recipe:
    """The recipe that a variant of the bundle was made by."""
    scales = read_scales(folder / variant.scales) if variant.scales is not None else None
    return make_recipe(folder, manifest, variant, scales)


def _noise(
    variant: VariantRecord, sites: Sequence[Site], rows: _Rows, recipe: Recipe, folder: Path
) -> list[LayerNoise]:
    scales = read_scales(folder / variant.scales).graphs[variant.role] if variant.scales is not None else None
    noise = []
    for site in sites:
        inputs, outputs = (np.concatenate(rows.rows[name]) for name in rows.tensors[site.name])
        expected = inputs @ recipe.smoothing.apply(site.layer, site.read())
        forget(read_array(site.weight))
        signal, error = (np.square(values).sum(axis=1, dtype=np.float64) for values in (expected, expected - outputs))
        decibel = 10 * np.log10(np.maximum(signal, 1e-30) / np.maximum(error, 1e-30))
        noise.append(
            LayerNoise(
                role=variant.role,
                precision=variant.precision,
                layer=site.name,
                sqnr_db=float(decibel.mean()),
                num_rows=len(inputs),
                amax=recipe.smoothing.ranges.get(site.name, scales.of_site(site.name).amax) if scales else None,
                clip=recipe.clips.get(site.name),
            )
        )
    return noise
