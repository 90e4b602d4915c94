"""The build report: all that is known of an engine on a machine that cannot load it."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from xpress_export.engines.job import BuildJob, BuildResult, Shapes
from xpress_export.platforms import TENSORRT_RTX

if TYPE_CHECKING:
    from xpress_export.engines.plan import BundlePlan, EnginePlan

_LEVELS = {"ampere-plus": "ampere+", "same-cc": "sameComputeCapability"}


def build_report(plan: BundlePlan, engine: EnginePlan, job: BuildJob, result: BuildResult) -> dict[str, Any]:
    """The report of a finished build, JSON-ready. Shares are of the weight matmul FLOPs of one token."""
    total = sum(result.flops.values()) or 1
    return {
        "role": engine.role,
        "platform": plan.platform.name,
        "sm": plan.sm,
        "backend": plan.library.backend,
        "version": result.version,
        "gpu": asdict(plan.gpu) if plan.gpu else None,
        "precision": engine.precision,
        "lowering": plan.lowering,
        "lowering_reason": plan.reason,
        "evidence": "compiled: a TensorRT builder accepted the graph; nothing ran",
        "static": dict(job.static),
        "profiles": {p.name: {symbol: list(sizes) for symbol, sizes in p.sizes.items()} for p in engine.profiles},
        "flags": _flags(job),
        "seconds": {step: round(value, 3) for step, value in result.seconds.items()},
        "peak_memory_bytes": result.peak_memory_bytes,
        "plan": {"num_bytes": result.num_bytes, "sha256": result.sha256},
        "layers": dict(result.layers),
        "matmuls": dict(result.matmuls),
        "matmul_share": {name: round(flops / total, 4) for name, flops in result.flops.items()},
        "attention": {"operators": result.attention, "allowed_unfused": result.unfused_attention},
        "adjusted": list(result.adjusted),
        "warnings": list(result.warnings),
        "by_hand": by_hand(plan, engine, job),
    }


def _flags(job: BuildJob) -> dict[str, Any]:
    keys = ("workspace_bytes", "tactic_bytes", "opt_level", "hardware_compat", "version_compatible")
    return {"strongly_typed": True, **{key: getattr(job, key) for key in keys}}


def by_hand(plan: BundlePlan, engine: EnginePlan, job: BuildJob) -> list[str]:
    """The commands that build the same engine with NVIDIA's own tool; the first writes the graph it reads."""
    graph = job.graph.name
    precision = f" --precision {engine.precision}" if engine.precision != plan.base else ""
    write = f"xpress-export graph BUNDLE {engine.role} --lowering {plan.lowering}{precision}"
    write += f" --capacity {plan.sizes.capacity} --out ."
    return [write, tool_line(job, graph, f"{engine.name}.plan")]


def tool_line(job: BuildJob, graph: str, saved: str) -> str:
    """The equivalent command line of trtexec, or of TensorRT-RTX's tensorrt_rtx."""
    is_rtx = job.backend == TENSORRT_RTX
    words = ["tensorrt_rtx" if is_rtx else "trtexec", f"--onnx={graph}", f"--saveEngine={saved}"]
    words += ["--stronglyTyped"] if not is_rtx else [f"--computeCapabilities={job.sm / 10}"]
    for index, shapes in enumerate(job.profiles.values()):
        words += [f"--profile={index}"] if len(job.profiles) > 1 else []
        words += [f"--{which}Shapes={_shapes(shapes, k)}" for k, which in enumerate(("min", "opt", "max"))]
    words += [f"--memPoolSize=workspace:{job.workspace_bytes >> 20}"] if job.workspace_bytes is not None else []
    words += [f"--builderOptimizationLevel={job.opt_level}"] if job.opt_level is not None else []
    words += ["--versionCompatible"] if job.version_compatible else []
    if job.hardware_compat != "none":
        words.append(f"--hardwareCompatibilityLevel={_LEVELS[job.hardware_compat]}")
    return shlex.join([*words, "--profilingVerbosity=detailed", "--skipInference"])


def _shapes(shapes: Shapes, which: int) -> str:
    return ",".join(f"{name}:{'x'.join(map(str, shape[which]))}" for name, shape in shapes.items())
