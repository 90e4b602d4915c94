"""Building an engine with NVIDIA's own tools: the graph they read, and the command line."""

from __future__ import annotations

from pathlib import Path

from xpress_export import names, platforms
from xpress_export.engines.job import BuildJob
from xpress_export.engines.onnx_file import write_with_sizes
from xpress_export.engines.profiles import Sizes, derive_profiles, input_shapes
from xpress_export.engines.report import tool_line
from xpress_export.errors import BundleError
from xpress_export.manifest import Manifest
from xpress_export.precision import Precision, choose_precisions, step_precision


def write_for_trtexec(
    bundle: Path,
    manifest: Manifest,
    role: str,
    precision: Precision,
    lowering: str,
    capacity: int,
    max_batch: int,
    chunk: int,
    folder: Path,
) -> str:
    """Write a graph with caches of `capacity` rows to `folder`; returns the trtexec command for the same profiles."""
    models = choose_precisions(manifest, precision)
    chosen = step_precision(manifest, models) if role == names.STEP else models.get(role, manifest.precision)
    native = lowering == platforms.NATIVE
    graph = manifest.graph(role, chosen, decomposed=not native)
    if graph is None:
        found = list(manifest.graphs if native else manifest.decomposed)
        found += [stem for stem in manifest.cycle if native != stem.endswith(f".{platforms.DECOMPOSED}")]
        raise BundleError(f"{bundle} has no {lowering} {role} graph; it has {', '.join(found) or 'none of that form'}")
    draft = manifest.draft
    block, first_slot = (draft.block_size, draft.first_slot) if draft else (1, 1)
    sizes = Sizes(max_context=capacity, max_batch=max_batch, chunk=chunk, block=block, first_slot=first_slot)
    static = {"C": capacity}
    path = write_with_sizes(bundle / graph.file, static, folder)
    profiles = {p.name: input_shapes(graph, p, static) for p in derive_profiles(role, graph, sizes)}
    job = BuildJob(
        role=role,
        backend=platforms.TENSORRT,
        sm=0,
        precision=chosen,
        graph=path,
        static=static,
        profiles=profiles,
        work=folder,
        plan=path.with_suffix(".plan"),
    )
    return tool_line(job, str(path), str(job.plan))
