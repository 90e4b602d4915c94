"""One ONNX graph to one engine plan: the only module that drives a TensorRT builder.

parse      a copy of the graph with its static sizes, beside its weights, by `parse_from_file`
adjust     what the architecture needs (`network.py`)
profile    shapes checked against the inputs of the network, a missing one named
build      with TensorRT's own progress monitor
write      the plan, hashed on the way
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

from xpress_export.engines.job import BuildJob, BuildResult
from xpress_export.engines.libraries import Library
from xpress_export.engines.network import NetworkFacts, avoid_float32_matmul, describe, layers_of
from xpress_export.engines.onnx_file import write_with_sizes
from xpress_export.engines.phases import Phases
from xpress_export.engines.plan_file import PlanFile
from xpress_export.errors import EngineBuildError

Listener = Callable[[str, float], None]
"""Called with the phase that TensorRT is in and the share of the build that is done, 0 to 1."""

_NOISE = ("Make sure input", "Make sure output")
_NO_FUSED_KERNEL = "not supported by a dedicated kernel"


def engine_from_onnx(library: Library, job: BuildJob, listener: Listener) -> BuildResult:
    """Build `job` and write its plan; raises EngineBuildError with TensorRT's own words where it fails.

    Attention for which the architecture has no fused kernel is decomposed in a second attempt, and reported.
    """
    try:
        return _build(library, job, listener, unfused=job.unfused_attention)
    except EngineBuildError as err:
        if job.unfused_attention or _NO_FUSED_KERNEL not in str(err):
            raise
    return _build(library, job, listener, unfused=True)


def _build(library: Library, job: BuildJob, listener: Listener, *, unfused: bool) -> BuildResult:
    trt, log = library.trt, _logger(library)
    started = time.perf_counter()
    builder = trt.Builder(log)
    network = library.new_network(builder)
    parser = trt.OnnxParser(network, log)
    _parse(parser, job, log)
    layers = layers_of(network)
    adjusted = avoid_float32_matmul(library, network, layers) if library.lacks_float32_matmul(job.sm) else []
    facts = describe(library, layers_of(network))
    if job.must_show:
        require_precision(facts, job.precision, job.role)
    num_unfused = library.allow_unfused_attention(layers) if unfused else 0
    config = builder.create_builder_config()
    _configure(library, config, job)
    _add_profiles(builder, config, network, job)
    monitor = _monitor(library, listener)
    config.progress_monitor = monitor
    parsed = time.perf_counter()
    with PlanFile(job.plan) as plan:
        if not library.build(builder, network, config, plan):
            raise EngineBuildError(
                f"{library.title} could not build the {job.role} engine for sm_{job.sm}: {log.why()}"
            )
    built = time.perf_counter()
    _save_timing_cache(config, job)
    return BuildResult(
        version=library.version,
        seconds={"parse": parsed - started, "build": built - parsed},
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        num_bytes=plan.num_bytes,
        sha256=plan.sha256,
        layers=facts.layers,
        matmuls=facts.matmuls,
        flops=facts.flops,
        attention=facts.attention,
        unfused_attention=num_unfused,
        adjusted=tuple(adjusted),
        warnings=log.warnings(),
    )


def _parse(parser: Any, job: BuildJob, log: Any) -> None:
    """Parse the graph with its static sizes filled in."""
    path = write_with_sizes(job.graph, job.static, job.work)
    if parser.parse_from_file(str(path)):
        return
    problems = []
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        node = f"node {error.node_name()} ({error.node_operator()}): " if error.node_name() else ""
        problems.append(node + error.desc().strip())
    raise EngineBuildError(f"TensorRT cannot read {job.graph}: {'; '.join(problems) or log.why()}")


def _configure(library: Library, config: Any, job: BuildJob) -> None:
    trt = library.trt
    library.aim(config, job.sm)
    library.set_portability(config, job.hardware_compat, job.version_compatible)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    if job.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, job.workspace_bytes)
    if job.tactic_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.TACTIC_DRAM, job.tactic_bytes)
    if job.opt_level is not None:
        config.builder_optimization_level = job.opt_level
    if job.timing_cache is not None and library.has_timing_cache:
        stored = job.timing_cache.read_bytes() if job.timing_cache.exists() else b""
        config.set_timing_cache(config.create_timing_cache(stored), ignore_mismatch=False)


def _add_profiles(builder: Any, config: Any, network: Any, job: BuildJob) -> None:
    """Give every input of the network its shapes in every profile."""
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    for name, shapes in job.profiles.items():
        profile = builder.create_optimization_profile()
        unknown = [tensor.name for tensor in inputs if tensor.name not in shapes]
        if unknown:
            raise EngineBuildError(
                f"profile {name} has no shape for input {unknown[0]} of the {job.role} graph; "
                f"it has shapes for {', '.join(shapes)}"
            )
        for tensor in inputs:
            _check_shape(tensor, shapes[tensor.name], name)
            profile.set_shape(tensor.name, *shapes[tensor.name])
        if config.add_optimization_profile(profile) < 0:
            raise EngineBuildError(f"TensorRT does not accept profile {name} of the {job.role} graph: {dict(shapes)}")


def _check_shape(tensor: Any, shapes: tuple[tuple[int, ...], ...], profile: str) -> None:
    for shape in shapes:
        if len(shape) != len(tensor.shape) or any(
            want not in (-1, got) for want, got in zip(tensor.shape, shape, strict=False)
        ):
            raise EngineBuildError(
                f"profile {profile}: input {tensor.name} has shape {tuple(tensor.shape)} in the graph, got {shape}"
            )


def require_precision(facts: NetworkFacts, precision: str, role: str) -> None:
    """An engine that was asked for a precision has to compute some of its matrix products in it."""
    wanted = precision.replace("-weight", " weights")
    if wanted not in facts.flops:
        shares = ", ".join(f"{facts.share(key):.0%} {key}" for key in facts.flops) or "nothing"
        raise EngineBuildError(
            f"the {role} engine was asked for in {precision}, but its matrix products compute in {shares}; "
            f"precision lies in the graph: export or calibrate the bundle for {precision}"
        )


def _save_timing_cache(config: Any, job: BuildJob) -> None:
    """Keep what was timed, whole or not at all; another build may be reading the file."""
    if job.timing_cache is None:
        return
    cache = config.get_timing_cache()
    if cache is not None:
        partial = job.work / "timing.cache"
        partial.write_bytes(memoryview(cache.serialize()))
        job.timing_cache.parent.mkdir(parents=True, exist_ok=True)
        target = job.timing_cache.with_name(f".{job.timing_cache.name}.partial")
        target.write_bytes(partial.read_bytes())
        target.replace(job.timing_cache)


def _logger(library: Library) -> Any:
    """A TensorRT logger that keeps warnings and errors; the class exists only once TensorRT is imported."""
    base, severity = library.trt.ILogger, library.trt.ILogger.Severity

    class Log(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            base.__init__(self)
            self.kept: dict[str, list[str]] = {"warning": [], "error": []}

        def log(self, level: Any, message: str) -> None:
            if level == severity.WARNING and not any(noise in message for noise in _NOISE):
                self.kept["warning"].append(message)
            elif level in {severity.ERROR, severity.INTERNAL_ERROR}:
                self.kept["error"].append(message)

        def warnings(self) -> tuple[str, ...]:
            return tuple(dict.fromkeys(self.kept["warning"]))

        def why(self) -> str:
            """The errors so far; those about a missing GPU that every RTX error drags along are left out."""
            found = [e for e in dict.fromkeys(self.kept["error"]) if "cudaError 35" not in e]
            return "; ".join(found) or "no reason was given"

    return Log()


def _monitor(library: Library, listener: Listener) -> Any:
    base, phases = library.trt.IProgressMonitor, Phases()

    class Monitor(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            base.__init__(self)

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            phases.start(phase_name, parent_phase, num_steps)
            listener(phases.title, phases.share)

        def step_complete(self, phase_name: str, step: int) -> bool:
            phases.step(phase_name, step)
            listener(phases.title, phases.share)
            return True

        def phase_finish(self, phase_name: str) -> None:
            phases.finish(phase_name)
            listener(phases.title, phases.share)

    return Monitor()
