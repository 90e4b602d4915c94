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


def write_for_trtexec(
    bundle: Path,
    manifest: Manifest,
    role: str,
    lowering: str,
    capacity: int,
    max_batch: int,
    chunk: int,
    folder: Path,
) -> str:
    """Write a graph with caches of `capacity` rows to `folder`; returns the trtexec command for the same profiles."""
    graphs = manifest.graphs if lowering == platforms.NATIVE else manifest.decomposed
    if role not in graphs:
        raise BundleError(f"{bundle} has no {lowering} {role} graph; it has {', '.join(graphs) or 'none of that form'}")
    block = manifest.draft.block_size if manifest.draft else 1
    sizes = Sizes(max_context=capacity, max_batch=max_batch, chunk=chunk, block=block)
    static = {"C": capacity}
    path = write_with_sizes(bundle / graphs[role].file, static, folder)
    profiles = {p.name: input_shapes(graphs[role], p, static) for p in derive_profiles(role, graphs[role], sizes)}
    job = BuildJob(
        role=role,
        backend=platforms.TENSORRT,
        sm=0,
        precision=manifest.precision,
        graph=path,
        static=static,
        profiles=profiles,
        work=folder,
        plan=path.with_suffix(".plan"),
    )
    return tool_line(job, str(path), str(job.plan))
