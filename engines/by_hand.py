"""Building an engine with NVIDIA's own tools: the graph they read, and the command line."""

from __future__ import annotations

from pathlib import Path

from xpress_export import platforms
from xpress_export.engines.job import BuildJob
from xpress_export.engines.onnx_file import write_with_sizes
from xpress_export.engines.profiles import Sizes, derive_profiles, input_shapes
from xpress_export.engines.report import tool_line
from xpress_export.errors import BundleError
from xpress_export.manifest import Manifest
from xpress_export.precision import Precision, choose_precisions


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
    chosen = choose_precisions(manifest, precision).get(role, manifest.precision)
    graph = manifest.graph(role, chosen, decomposed=lowering != platforms.NATIVE)
    if graph is None:
        graphs = manifest.graphs if lowering == platforms.NATIVE else manifest.decomposed
        raise BundleError(f"{bundle} has no {lowering} {role} graph; it has {', '.join(graphs) or 'none of that form'}")
    block = manifest.draft.block_size if manifest.draft else 1
    sizes = Sizes(max_context=capacity, max_batch=max_batch, chunk=chunk, block=block)
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
