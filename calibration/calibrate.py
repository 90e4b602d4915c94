"""Run the system on prompts and remember the range of every tensor that a matrix product reads.

The bundle's own draft-refine-verify loop generates an answer to each prompt, through graphs that are being watched
(`observe.py`); memory is that of the graphs and one histogram per tensor (`ranges.py`), whatever the number of prompts.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from xpress_export import names
from xpress_export.calibration import default_prompts
from xpress_export.calibration.layers import Site, activations, find_sites, forget, read_array
from xpress_export.calibration.observe import ObservedGraph
from xpress_export.calibration.ranges import METHODS, PERCENTILE, Range
from xpress_export.calibration.runtimes import answer, runtime_of
from xpress_export.calibration.scales import Activation, Dataset, GraphScales, Scales, graph_digest, rounded
from xpress_export.errors import CalibrationError
from xpress_export.folders import link_rest, staged_folder
from xpress_export.manifest import Manifest, open_bundle, read_manifest, record_files, write_manifest
from xpress_export.progress import Progress, Silent
from xpress_export.records import SCALES_FILE, SCALES_FOLDER
from xpress_export.runtime.backend import Graph
from xpress_export.runtime.evaluate import read_prompts

logger = logging.getLogger(__name__)
Array = NDArray[Any]
_TOOLS = ("xpress-export", "onnxruntime", "onnx-ir", "numpy")


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """What to run. prompts: a file, None: a few of our own. samples: prompts from its top, at most.
    percentile: of the method of that name.

    allow_dead: go on where a channel of an activation is always zero, which is a defect in most models.
    """

    prompts: Path | None
    samples: int = 64
    method: str = "max"
    percentile: float = PERCENTILE
    max_new_tokens: int = 64
    allow_dead: bool = False
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise CalibrationError(f"method must be one of {', '.join(METHODS)}, got {self.method!r}")
        if not 50 <= self.percentile <= 100:
            raise CalibrationError(f"percentile must be from 50 to 100, got {self.percentile}")
        if self.samples < 1 or self.max_new_tokens < 1:
            raise CalibrationError("samples and max_new_tokens must be at least 1")

    def read(self) -> tuple[list[str], Dataset]:
        """The prompts, and what a scales file says of them."""
        if self.prompts is None:
            texts = list(default_prompts.CALIBRATION[: self.samples])
            name, data = default_prompts.NAME, "\n".join(default_prompts.CALIBRATION).encode()
        else:
            texts, name = read_prompts(self.prompts, self.samples), self.prompts.name
            data = self.prompts.read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        return texts, Dataset(name=name, sha256=sha256, samples=len(texts), max_new_tokens=self.max_new_tokens)


class Observer:
    """Ranges of the tensors that the sites of one graph read."""

    def __init__(self, role: str, path: Path) -> None:
        self.role = role
        self.sites = find_sites(ir.load(path).graph, role)
        self.groups = activations(self.sites)
        self.tensors = {str(group[0].activation.name): name for name, group in self.groups.items()}
        self.ranges = {name: Range(group[0].shape[0]) for name, group in self.groups.items()}
        self.problem: tuple[str, str] | None = None

    def listen(self, values: Mapping[str, Array]) -> None:
        """Take in the tensors of one call; the first that is not finite is remembered as the problem."""
        for tensor, array in values.items():
            name = self.tensors[tensor]
            try:
                self.ranges[name].update(array)
            except ValueError as err:
                self.problem = self.problem or (name, str(err))

    def require_sound(self, where: str) -> None:
        """Raise for a tensor that held NaN or Inf."""
        if self.problem is not None:
            name, what = self.problem
            raise CalibrationError(
                f"the {self.role} computes {what} in front of {name} for {where}; its ranges cannot be measured. "
                f"If the bundle is fp16, build it in fp32 and see whether it overflows"
            )

    def require_alive(self, allow_dead: bool) -> None:
        """Raise for tensors that were never seen or whose channels are dead, naming the layer that reads them."""
        for name, seen in self.ranges.items():
            if seen.num_rows == 0 or seen.amax == 0:
                what = "was never run" if seen.num_rows == 0 else "reads nothing but zeros"
                raise CalibrationError(f"{self.role} layer {name} {what}; it cannot be calibrated with these prompts")
            dead = np.flatnonzero(seen.channels == 0)
            if dead.size:
                some = ", ".join(map(str, dead[:5])) + (", ..." if dead.size > 5 else "")
                what = f"{self.role} layer {name} reads {dead.size} dead channels of {len(seen.channels)} ({some})"
                if not allow_dead:
                    raise CalibrationError(f"{what}: always zero in {seen.num_rows} rows; --allow-dead accepts that")
                logger.warning("%s", what)

    def scales(self, digest: str, options: CalibrateOptions) -> GraphScales:
        found = {}
        for name, seen in self.ranges.items():
            amax = rounded(seen.amax)
            found[name] = Activation(
                feeds=tuple(site.name for site in self.groups[name]),
                rows=seen.num_rows,
                amax=amax,
                clip=min(rounded(seen.clip(options.method, options.percentile)), amax),
                channels=tuple(rounded(float(value)) for value in seen.channels),
            )
        return GraphScales(graph=digest, activations=found, weights=_weight_ranges(self.role, self.sites))


def _weight_ranges(role: str, sites: Sequence[Site]) -> dict[str, tuple[float, ...]]:
    """Greatest value per output channel, one weight in memory at a time."""
    ranges: dict[str, tuple[float, ...]] = {}
    for site in sites:
        if site.layer in ranges:
            continue
        stored = read_array(site.weight)
        amax = np.abs(stored).max(axis=1 if site.transposed else 0).astype(np.float32)
        forget(stored)
        if not np.isfinite(amax).all():
            raise CalibrationError(f"the weight of {role} layer {site.layer} has NaN or Inf; the checkpoint is damaged")
        ranges[site.layer] = tuple(rounded(float(value)) for value in amax)
    return ranges


def calibrate(folder: Path, options: CalibrateOptions, progress: Progress | None = None) -> Scales:
    """Scales of the target and the drafter of a bundle, measured on its answers to the prompts."""
    progress = progress or Silent()
    prompts, dataset = options.read()
    manifest = _open(folder, progress)
    roles = [role for role in manifest.roles if role != names.REFINER]
    observers = {role: Observer(role, folder / manifest.graphs[role].file) for role in roles}
    with (
        runtime_of(folder, manifest, _watched_graphs(folder, manifest, observers, options.num_threads)) as runtime,
        progress.step("Calibrating", total=len(prompts)) as advance,
    ):
        for number, prompt in enumerate(prompts, 1):
            answer(runtime, prompt, options.max_new_tokens)
            for observer in observers.values():
                observer.require_sound(f"prompt {number} of {dataset.name}")
            advance(1)
    for observer in observers.values():
        observer.require_alive(options.allow_dead)
    with progress.step("Choosing ranges"):
        graphs = {
            role: observer.scales(graph_digest(manifest, manifest.graphs[role]), options)
            for role, observer in observers.items()
        }
    return Scales(
        tool={name: importlib.metadata.version(name) for name in _TOOLS},
        method=options.method,
        percentile=options.percentile,
        dataset=dataset,
        graphs=graphs,
    )


def _open(folder: Path, progress: Progress) -> Manifest:
    with progress.step("Checking the bundle") as advance:
        return open_bundle(folder, advance)


def _watched_graphs(
    folder: Path, manifest: Manifest, observers: Mapping[str, Observer], num_threads: int | None
) -> dict[str, Graph]:
    graphs: dict[str, Graph] = {}
    for role, record in manifest.graphs.items():
        path, observer = folder / record.file, observers.get(role)
        if observer is None:
            graphs[role] = Graph(path, role, num_threads)
        else:
            graphs[role] = ObservedGraph(path, role, tuple(observer.tensors), observer.listen, num_threads)
    return graphs


def save_scales(folder: Path, scales: Scales, out: Path | None) -> Path:
    """Write a scales file where `out` says, or into the bundle, which then lists it; returns its path."""
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
            partial.write_text(scales.to_json(), "utf-8")
            partial.replace(out)
        except OSError as err:
            raise CalibrationError(f"{out} cannot be written: {err.strerror}; check the path and the disk") from err
        return out
    manifest = read_manifest(folder)
    with staged_folder(folder, replace=True) as stage:
        (stage / SCALES_FOLDER).mkdir()
        (stage / SCALES_FILE).write_text(scales.to_json(), "utf-8")
        files = {file.path: file for file in (*manifest.files, *record_files(stage))}
        new = replace(manifest, files=tuple(files[path] for path in sorted(files)))
        link_rest(folder, stage, (file.path for file in new.files))
        write_manifest(stage, new)
    return folder / SCALES_FILE
