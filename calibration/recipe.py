"""What is to be done to a graph: worked out from the record of a variant and the scales it is made from.

Whoever writes a variant, audits it or measures it works from the same recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from xpress_export.calibration.formats import DEFAULT_BLOCK
from xpress_export.calibration.layers import find_sites
from xpress_export.calibration.scales import Scales
from xpress_export.calibration.smooth import Smoothing, smooth
from xpress_export.manifest import Manifest, VariantRecord


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """layers: to quantize. num_weights: in them. clips: range of the activation that each site reads."""

    precision: str
    layers: frozenset[str]
    num_weights: int
    clips: Mapping[str, float] = field(default_factory=dict)
    smoothing: Smoothing = field(default_factory=Smoothing)
    block_size: int = DEFAULT_BLOCK


def make_recipe(
    folder: Path, manifest: Manifest, variant: VariantRecord, scales: Scales | None, *, decomposed: bool = False
) -> Recipe:
    """What the record of a variant, and the scales it was made from, say is to be done to its graph."""
    record = (manifest.decomposed if decomposed else manifest.graphs)[variant.role]
    all_sites = find_sites(ir.load(folder / record.file).graph, variant.role)
    sites = [site for site in all_sites if site.layer not in variant.kept]
    clips: dict[str, float] = {}
    smoothing = Smoothing()
    if scales is not None:
        graph_scales = scales.graphs[variant.role]
        if variant.smoothquant is not None:
            smoothing = smooth(all_sites, sites, graph_scales, variant.smoothquant)
        for site in sites:
            measured = graph_scales.of_site(site.name)
            clip = measured.clip if variant.precision == "int8" else measured.amax
            clips[site.name] = smoothing.ranges.get(site.name, clip)
    return Recipe(
        precision=variant.precision,
        layers=frozenset(site.layer for site in sites),
        num_weights=sum(rows * columns for rows, columns in {site.layer: site.shape for site in sites}.values()),
        clips=clips,
        smoothing=smoothing,
        block_size=variant.block_size or DEFAULT_BLOCK,
    )
