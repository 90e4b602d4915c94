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
            parts = {role: folder / graph.file for role, graph in {**models, names.ACCEPT: records[stem]}.items()}
            stem = graph_stem(names.STEP, decomposed=is_decomposed)
            records[stem], made = _write_step(folder, stem, parts, draft, precision, progress)
            checks += made
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
    with staged_folder(folder, replace=True) as stage:
        (stage / GRAPHS_FOLDER).mkdir()
        cycle = dict(manifest.cycle)
        for precision in missing:
            for is_decomposed in (False, True) if manifest.decomposed else (False,):
                stem = graph_stem(names.STEP, precision, decomposed=is_decomposed)
                parts = _parts_in(folder, manifest, precision, is_decomposed)
                cycle[stem], _ = _write_step(stage, stem, parts, manifest.draft, manifest.precision, progress)
        files = {file.path: file for file in (*manifest.files, *record_files(stage))}
        new = replace(manifest, cycle=cycle, files=tuple(files[path] for path in sorted(files)))
        link_rest(folder, stage, files)
        write_manifest(stage, new)
    return new


def _parts_in(folder: Path, manifest: Manifest, precision: str, is_decomposed: bool) -> dict[str, Path]:
    """The files of a step whose models are in `precision` where they have it."""
    own = manifest.precision
    parts = {}
    for role in (*manifest.roles, names.ACCEPT):
        chosen = precision if precision in manifest.precisions(role) else own
        graph = manifest.graph(role, chosen, decomposed=is_decomposed)
        assert graph is not None
        parts[role] = folder / graph.file
    return parts


def _write_step(
    folder: Path, stem: str, parts: Mapping[str, Path], draft: DraftRecord, precision: str, progress: Progress
) -> tuple[GraphRecord, list[Check]]:
    """Merge and check one step; `folder` is that of a bundle, the parts may lie in another."""
    weights = sum(path.stat().st_size for path in parts[names.TARGET].parent.glob("*.data"))
    with progress.step(f"Fusing and checking {stem}", expected_s=2 + weights / 2e7):
        model = fuse_step(parts, draft.first_slot, draft.refine_passes)
        record = save_graph(model, folder / GRAPHS_FOLDER, stem)
        return record, check_step(folder / record.file, parts, draft, precision)
