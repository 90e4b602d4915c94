"""Add quantized variants to a bundle: the whole bundle with them, or the bundle as it was.

plan      which models in which precision; everything that can be refused is refused here
write     each variant into a new folder beside the bundle
audit     every variant against the graph it was made from (`audit.py`)
commit    the files that stay are linked into the new folder, which then takes the bundle's name
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from xpress_export import names, platforms
from xpress_export.calibration.audit import audit
from xpress_export.calibration.formats import DEFAULT_BLOCK, QUANTIZES_ACTIVATIONS
from xpress_export.calibration.layers import Site, find_sites, matches, split
from xpress_export.calibration.qdq import DataFile, write_variant
from xpress_export.calibration.recipe import make_recipe
from xpress_export.calibration.scales import Scales, read_scales, require_graph
from xpress_export.errors import CalibrationError
from xpress_export.folders import link_rest, require_free_space, staged_folder
from xpress_export.manifest import GRAPHS_FOLDER, Manifest, VariantRecord, open_bundle, record_files, write_manifest
from xpress_export.progress import Progress, Silent
from xpress_export.records import SCALES_FILE, SCALES_FOLDER, graph_stem

logger = logging.getLogger(__name__)

HIGH = "none"
"""Precision of a model that gets no variant."""


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """What to quantize to what.

    precision: of target and drafter, unless `target` or `drafter` say otherwise ("none": not at all).
    scales: a file of `calibrate`; None: the one in the bundle. smoothquant: alpha, or None. skip, include: patterns of
    layers that stay high, and of layers that are quantized although they stay high by default. block_size: of INT4.
    run: whether the bundle runs in this precision from now on unless told otherwise.
    """

    precision: str
    target: str | None = None
    drafter: str | None = None
    scales: Path | None = None
    smoothquant: float | None = None
    skip: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    block_size: int = DEFAULT_BLOCK
    run: bool = False

    def __post_init__(self) -> None:
        for field in ("precision", "target", "drafter"):
            value = getattr(self, field)
            allowed = (*platforms.QUANTIZED, *(() if field == "precision" else (HIGH, None)))
            if value not in allowed:
                raise CalibrationError(f"{field} must be one of {', '.join(filter(None, allowed))}, got {value!r}")
        if self.smoothquant is not None and not 0 < self.smoothquant < 1:
            raise CalibrationError(f"--smoothquant must be between 0 and 1, got {self.smoothquant}")
        if self.block_size < 16 or self.block_size & (self.block_size - 1):
            raise CalibrationError(f"block_size must be a power of two from 16, got {self.block_size}")

    def of(self, role: str) -> str:
        return getattr(self, role) or self.precision


def quantize(folder: Path, options: QuantizeOptions, progress: Progress | None = None) -> Manifest:
    """Add the variants that `options` ask for; one of the same model and precision is replaced."""
    progress = progress or Silent()
    with progress.step("Checking the bundle") as advance:
        manifest = open_bundle(folder, advance)
    roles = _roles(manifest, options)
    scales = _scales(folder, manifest, roles, options)
    plans = plan_variants(folder, manifest, roles, options)
    with staged_folder(folder, replace=True) as stage:
        (stage / GRAPHS_FOLDER).mkdir()
        variants = [_write(folder, stage, manifest, variant, scales, progress) for variant in plans]
        for variant in variants:
            with progress.step(f"Checking {variant.role} {variant.precision}"):
                audit(folder, manifest, variant, stage)
        new = _with_variants(manifest, variants, stage, options)
        link_rest(folder, stage, (file.path for file in new.files))
        write_manifest(stage, new)
    return new


def _roles(manifest: Manifest, options: QuantizeOptions) -> list[str]:
    """Models that get a variant, each of them allowed to have it."""
    roles = [role for role in manifest.roles if role != names.REFINER and options.of(role) != HIGH]
    if not roles:
        raise CalibrationError("nothing is left to quantize: both models are `none`")
    for role in roles:
        platforms.require(manifest.platform, options.of(role))
    for role in (names.TARGET, names.DRAFTER):
        if getattr(options, role) not in {None, HIGH} and role not in manifest.roles:
            raise CalibrationError(f"--{role} {options.of(role)}: the bundle has no {role}")
    return roles


def _scales(folder: Path, manifest: Manifest, roles: Sequence[str], options: QuantizeOptions) -> Scales | None:
    """The scales that the variants need, if any, checked to be of these graphs."""
    needing = [role for role in roles if options.of(role) in QUANTIZES_ACTIVATIONS]
    if not needing:
        if options.smoothquant is not None or options.scales is not None:
            raise CalibrationError("weight-only precisions use no scales: leave out --scales and --smoothquant")
        return None
    path = options.scales or folder / SCALES_FILE
    if options.scales is None and not path.exists():
        raise CalibrationError(
            f"{options.of(needing[0])} needs ranges of activations: run `xpress-export calibrate {folder} --prompts F` "
            f"first, or give a file with --scales"
        )
    scales = read_scales(path)
    for role in needing:
        require_graph(scales, manifest, role, str(path))
    return scales


def _write(
    folder: Path, stage: Path, manifest: Manifest, variant: VariantRecord, scales: Scales | None, progress: Progress
) -> VariantRecord:
    """Write the files of one variant; its record, with the data files it turned out to need."""
    role, stem = variant.role, f"{variant.role}.{variant.precision}"
    used = scales if variant.scales is not None else None
    if variant.scales is not None:
        assert scales is not None
        (stage / SCALES_FOLDER).mkdir(exist_ok=True)
        (stage / variant.scales).write_text(scales.only(role).to_json(), "utf-8")
    data = DataFile(stage / GRAPHS_FOLDER, f"{stem}.data")
    recipe = make_recipe(folder, manifest, variant, used)
    require_free_space(stage, recipe.num_weights, f"the {variant.precision} {role}")
    with progress.step(f"Quantizing {role} to {variant.precision}", total=recipe.num_weights) as advance:
        record = write_variant(folder, manifest.graphs[role], role, recipe, data, stem, advance)
    if variant.decomposed is not None:
        lowered = make_recipe(folder, manifest, variant, used, decomposed=True)
        other = write_variant(folder, manifest.decomposed[role], role, lowered, data, f"{stem}.decomposed")
        if other.data != record.data:
            raise CalibrationError(f"the two lowerings of the {role} use different weights; build the bundle again")
    return replace(variant, data=record.data)


def plan_variants(
    folder: Path, manifest: Manifest, roles: Sequence[str], options: QuantizeOptions
) -> list[VariantRecord]:
    """The records of variants before they are written; refuses patterns that match no layer of any of the models."""
    sites = {role: find_sites(ir.load(folder / manifest.graphs[role].file).graph, role) for role in roles}
    skip = _patterns("--skip", options.skip, sites)
    include = _patterns("--include", options.include, sites)
    return [_plan(manifest, role, options, *split(sites[role], skip[role], include[role])) for role in roles]


def _patterns(option: str, patterns: Sequence[str], sites: Mapping[str, list[Site]]) -> dict[str, list[str]]:
    """The patterns that concern each model; "drafter:layers.0.*" is one for the drafter only."""
    found: dict[str, list[str]] = {role: [] for role in sites}
    for pattern in patterns:
        role, colon, rest = pattern.partition(":")
        wanted = [role] if colon else list(sites)
        hits = [r for r in wanted if any(matches(site.layer, rest if colon else pattern) for site in sites.get(r, ()))]
        if not hits:
            example = next(iter(sites.values()))[0].layer
            raise CalibrationError(
                f"{option} {pattern!r} matches no layer of the {' or '.join(wanted)}; one is {example}"
            )
        for r in hits:
            found[r].append(rest if colon else pattern)
    return found


def _plan(
    manifest: Manifest, role: str, options: QuantizeOptions, chosen: Sequence[Site], kept: Sequence[str]
) -> VariantRecord:
    if not chosen:
        raise CalibrationError(f"--skip leaves no layer of the {role} to quantize")
    precision = options.of(role)
    stem = f"{role}.{precision}"
    return VariantRecord(
        role=role,
        precision=precision,
        file=f"{GRAPHS_FOLDER}/{stem}.onnx",
        data=(f"{GRAPHS_FOLDER}/{stem}.data",),
        decomposed=f"{GRAPHS_FOLDER}/{stem}.decomposed.onnx" if role in manifest.decomposed else None,
        scales=f"{SCALES_FOLDER}/{stem}.json" if precision in QUANTIZES_ACTIVATIONS else None,
        smoothquant=options.smoothquant if precision in QUANTIZES_ACTIVATIONS else None,
        block_size=options.block_size if precision == "int4-weight" else None,
        num_layers=len({site.layer for site in chosen}),
        kept=tuple(kept),
    )


def _with_variants(
    manifest: Manifest, variants: Sequence[VariantRecord], stage: Path, options: QuantizeOptions
) -> Manifest:
    """The manifest of the bundle with new variants; what was made of variants that are replaced goes with them.

    Of steps that is any in a precision of `variants`: it had other models, or had not all of these.
    """
    new = {(variant.role, variant.precision) for variant in variants}
    old = [variant for variant in manifest.variants if (variant.role, variant.precision) in new]
    fused = {variant.precision for variant in variants}
    new |= {(names.STEP, precision) for precision in fused}
    stale = [engine for engine in manifest.engines if (engine.role, engine.precision) in new]
    stems = {graph_stem(names.STEP, precision, decomposed=lowered) for precision in fused for lowered in (False, True)}
    gone = {path for variant in old for path in _own_files(variant)}
    gone |= {graph.file for stem, graph in manifest.cycle.items() if stem in stems}
    gone |= {path for engine in stale for path in (engine.file, engine.report)}
    files = {file.path: file for file in manifest.files if file.path not in gone}
    files |= {file.path: file for file in record_files(stage)}
    kept = [variant for variant in manifest.variants if variant not in old]
    return replace(
        manifest,
        cycle={stem: graph for stem, graph in manifest.cycle.items() if stem not in stems},
        variants=tuple(sorted([*kept, *variants], key=lambda v: (names.ROLES.index(v.role), v.precision))),
        run_precision=options.precision if options.run else manifest.run_precision,
        engines=tuple(engine for engine in manifest.engines if engine not in stale),
        files=tuple(files[path] for path in sorted(files)),
    )


def _own_files(variant: VariantRecord) -> list[str]:
    """Files that no other graph of the bundle uses."""
    stem = f"{GRAPHS_FOLDER}/{variant.role}.{variant.precision}"
    own = [path for path in variant.data if path == f"{stem}.data"]
    return [variant.file, *own, *filter(None, (variant.decomposed, variant.scales))]
