"""The graphs of a cycle that no model has of its own: `accept` of every bundle, `step` of one of the fused layout.

write_cycle    both, while a bundle is exported
add_steps      the steps of quantized models, once there are such models
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from xpress_export import names
from xpress_export.exporter.fuse import fuse_step
from xpress_export.exporter.graph_files import save_graph
from xpress_export.exporter.graphs import trace_accept
from xpress_export.exporter.lowering import decompose
from xpress_export.exporter.parity import Check, check_accept
from xpress_export.exporter.step_check import check_step
from xpress_export.folders import link_rest, staged_folder
from xpress_export.manifest import GRAPHS_FOLDER, Manifest, read_manifest, record_files, write_manifest
from xpress_export.progress import Progress, Silent
from xpress_export.records import DraftRecord, GraphRecord, graph_stem

Graphs = dict[str, GraphRecord]


def write_cycle(
    folder: Path,
    graphs: Mapping[str, GraphRecord],
    decomposed: Mapping[str, GraphRecord],
    draft: DraftRecord | None,
    precision: str,
    progress: Progress,
) -> tuple[Graphs, list[Check]]:
    """Write accept and, given `draft`, step beside the graphs of the models, in their lowerings, and check them.

    Returns their records by stem, as `Manifest.cycle` has them.
    """
    with progress.step("Tracing accept", expected_s=2):
        accept = trace_accept()
    records: Graphs = {}
    checks = []
    for models, is_decomposed in ((graphs, False), (decomposed, True)):
        if not models:
            continue
        if is_decomposed:
            decompose(accept)
        stem = graph_stem(names.ACCEPT, decomposed=is_decomposed)
        records[stem] = save_graph(accept, folder / GRAPHS_FOLDER, stem)
        checks.append(check_accept(folder / records[stem].file))
        if draft is not None:
            used = {**models, names.ACCEPT: records[stem]}
            parts = _below(folder, {role: graph.file for role, graph in used.items()})
            stem = graph_stem(names.STEP, decomposed=is_decomposed)
            records[stem] = _write_step(folder, stem, parts, draft)
            checks += _check(folder / records[stem].file, parts, draft, precision, progress)
    return records, checks


def add_steps(folder: Path, progress: Progress | None = None) -> Manifest:
    """Give a bundle of the fused layout the steps it lacks: of each precision that some of its models are in.

    Returns the manifest; a bundle that lacks none stays as it is.
    """
    progress, manifest = progress or Silent(), read_manifest(folder)
    found = dict.fromkeys(variant.precision for variant in manifest.variants)
    missing = [precision for precision in found if precision not in manifest.precisions(names.STEP)]
    if manifest.draft is None or manifest.layout != names.LAYOUT_FUSED or not missing:
        return manifest
    lowerings = (False, True) if manifest.decomposed else (False,)
    made = {
        graph_stem(names.STEP, precision, decomposed=is_decomposed): _parts(manifest, precision, is_decomposed)
        for precision in missing
        for is_decomposed in lowerings
    }
    with staged_folder(folder, replace=True) as stage:
        (stage / GRAPHS_FOLDER).mkdir()
        steps = {stem: _write_step(stage, stem, _below(folder, parts), manifest.draft) for stem, parts in made.items()}
        files = {file.path: file for file in (*manifest.files, *record_files(stage))}
        link_rest(folder, stage, files)  # a graph is read from where its weights are
        for stem, parts in made.items():
            _check(stage / steps[stem].file, _below(stage, parts), manifest.draft, manifest.precision, progress)
        cycle = {**manifest.cycle, **steps}
        new = replace(manifest, cycle=cycle, files=tuple(files[path] for path in sorted(files)))
        write_manifest(stage, new)
    return new


def _parts(manifest: Manifest, precision: str, is_decomposed: bool) -> dict[str, str]:
    """The files of a step whose models are in `precision` where they have it."""
    parts = {}
    for role in (*manifest.roles, names.ACCEPT):
        chosen = precision if precision in manifest.precisions(role) else manifest.precision
        graph = manifest.graph(role, chosen, decomposed=is_decomposed)
        assert graph is not None
        parts[role] = graph.file
    return parts


def _below(folder: Path, parts: Mapping[str, str]) -> dict[str, Path]:
    return {role: folder / file for role, file in parts.items()}


def _write_step(folder: Path, stem: str, parts: Mapping[str, Path], draft: DraftRecord) -> GraphRecord:
    """Merge a step; `folder` is that of a bundle, the parts may lie in another."""
    return save_graph(fuse_step(parts, draft.first_slot, draft.refine_passes), folder / GRAPHS_FOLDER, stem)


def _check(
    path: Path, parts: Mapping[str, Path], draft: DraftRecord, precision: str, progress: Progress
) -> list[Check]:
    weights = sum(file.stat().st_size for file in path.parent.glob("*.data"))
    with progress.step(f"Checking {path.stem}", expected_s=1 + weights / 2e7):
        return check_step(path, parts, draft, precision)
