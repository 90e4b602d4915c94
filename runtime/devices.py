"""Which device and backend run a bundle here, and which of its files they load.

device    cpu        ONNX Runtime on this machine's cores
          cuda:N     GPU number N: the engines that were compiled for it, else ONNX Runtime's CUDA provider
          auto       cuda:0 where one of these can run the bundle, else cpu; the log says which, and why
layout    split      a graph for each model
          fused      one graph for a whole cycle
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from xpress_export import names
from xpress_export.errors import BundleError, EngineError, MissingDependencyError, RequestError
from xpress_export.gpu import Gpu, find_gpu
from xpress_export.load_check import Running, check_loadable, sm_fits
from xpress_export.manifest import EngineRecord, Manifest
from xpress_export.platforms import ONNX_RUNTIME, TENSORRT, TENSORRT_RTX
from xpress_export.precision import Precision, choose_precisions, step_precision
from xpress_export.runtime.device import Device
from xpress_export.runtime.device_cpu import CpuDevice
from xpress_export.runtime.resident_memory import Shape

if TYPE_CHECKING:
    from xpress_export.runtime.memory_plan import MemoryPlan

AUTO, CPU = "auto", "cpu"
NUM_SLOTS = 8
BACKENDS = (ONNX_RUNTIME, TENSORRT, TENSORRT_RTX)
_CUDA = re.compile(r"cuda(?::(\d+))?")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """What runs a bundle. index: of the GPU, None on CPU. why: a phrase for the log."""

    index: int | None
    backend: str
    why: str

    @property
    def name(self) -> str:
        return CPU if self.index is None else f"cuda:{self.index}"


def choose(
    manifest: Manifest, device: str | Device, backend: str, precisions: Mapping[str, str], layout: str
) -> Choice:
    """Decide. Raises RequestError for a name that means nothing, EngineError for what this machine cannot do.

    A device of the caller's own is what it says it is.
    """
    if isinstance(device, Device):
        match = _CUDA.fullmatch(device.name)
        return Choice(int(match[1] or 0) if match else None, device.backend, "it was handed over")
    if backend not in (AUTO, *BACKENDS):
        raise RequestError(f"backend should be {', '.join((AUTO, *BACKENDS))}, got {backend!r}", "backend")
    if device == CPU:
        if backend not in {AUTO, ONNX_RUNTIME}:
            raise RequestError(f"backend {backend} runs on a GPU; device cpu needs {ONNX_RUNTIME}", "backend")
        return Choice(None, ONNX_RUNTIME, "it was asked for")
    if device == AUTO:
        return _automatic(manifest, backend, precisions, layout)
    if (match := _CUDA.fullmatch(device)) is None:
        raise RequestError(f"device should be auto, cpu or cuda:N, got {device!r}", "device")
    index = int(match[1] or 0)
    gpu = find_gpu(index)
    if gpu is None:
        raise EngineError(f"device {device}: this machine has no such GPU or no driver for it; `xpress-export doctor`")
    if backend != AUTO:
        return Choice(index, backend, "it was asked for")
    found = _backends(manifest, gpu, precisions, layout)
    if not found:
        raise EngineError(_cannot(device, gpu))
    return Choice(index, found[0], f"it is the fastest that can run the bundle on {gpu.name}")


def _automatic(manifest: Manifest, backend: str, precisions: Mapping[str, str], layout: str) -> Choice:
    gpu = find_gpu()
    found = _backends(manifest, gpu, precisions, layout) if gpu is not None else []
    if backend != AUTO:
        found = [name for name in found if name == backend]
    if gpu is not None and found:
        return Choice(0, found[0], f"{gpu.name} is there")
    if backend not in {AUTO, ONNX_RUNTIME}:
        what = "no GPU is found" if gpu is None else f"the bundle has no engines that run on {gpu.name} here"
        raise EngineError(f"backend {backend}: {what}; compile the bundle there, or leave the backend out")
    if gpu is not None:
        logger.warning("%s; running on the CPU", _cannot("cuda:0", gpu))
    return Choice(None, ONNX_RUNTIME, "no GPU is found" if gpu is None else f"nothing here runs it on {gpu.name}")


def _cannot(device: str, gpu: Gpu) -> str:
    return (
        f"device {device} ({gpu.name}): the bundle has no engines for sm_{gpu.sm} that TensorRT here could load, and "
        f"ONNX Runtime here has no CUDA provider; run `xpress-export compile`, or install onnxruntime-gpu"
    )


def _backends(manifest: Manifest, gpu: Gpu, precisions: Mapping[str, str], layout: str) -> list[str]:
    """What can run the bundle on a GPU, the fastest first."""
    found = []
    for backend in (TENSORRT, TENSORRT_RTX):
        if _version(backend) is not None and all(find_engines(manifest, backend, gpu.sm, precisions, layout).values()):
            found.append(backend)
    if "CUDAExecutionProvider" in _providers():
        found.append(ONNX_RUNTIME)
    return found


def _version(package: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _providers() -> list[str]:
    try:
        import onnxruntime
    except ImportError:
        return []
    return list(onnxruntime.get_available_providers())


def roles_of(manifest: Manifest, layout: str) -> tuple[str, ...]:
    """The graphs of a cycle, in the order they run."""
    return (names.STEP,) if layout == names.LAYOUT_FUSED else (*manifest.roles, names.ACCEPT)


def find_engines(
    manifest: Manifest, backend: str, sm: int, precisions: Mapping[str, str], layout: str
) -> dict[str, EngineRecord | None]:
    """The engine of each role for a GPU architecture, one made for it before one that is compatible."""
    found: dict[str, EngineRecord | None] = {}
    for role in roles_of(manifest, layout):
        fitting = [
            engine
            for engine in manifest.engines
            if (engine.role, engine.backend, engine.precision) == (role, backend, precisions[role])
            and sm_fits(engine, sm)
        ]
        found[role] = min(fitting, key=lambda engine: engine.sm != sm, default=None)
    return found


def role_precisions(manifest: Manifest, asked: Precision, layout: str) -> dict[str, str]:
    """The precision of each graph of a layout; BundleError for one that the bundle has not."""
    chosen = choose_precisions(manifest, asked)
    if layout == names.LAYOUT_FUSED:
        return {names.STEP: step_precision(manifest, chosen)}
    return {**chosen, names.ACCEPT: manifest.precision}


@dataclass(frozen=True)
class Found:
    """The file of each role that a choice loads. engines: what is known of those that are engines."""

    files: Mapping[str, Path]
    engines: tuple[EngineRecord, ...] = ()

    def shape(
        self,
        manifest: Manifest,
        *,
        num_slots: int | None,
        chunk: int,
        max_drafts: int | None,
        max_context: int | None = None,
    ) -> Shape:
        """Sizes of a loop, no larger than engines admit: what was asked for and is more is an EngineError.

        num_slots, max_drafts: None, as many as there may be, and NUM_SLOTS at most. max_context: None, the bundle's.
        """
        asked = NUM_SLOTS if num_slots is None else num_slots
        shape = Shape.of(manifest, num_slots=asked, chunk=chunk, max_drafts=max_drafts, max_context=max_context)
        if not self.engines:
            return shape
        first = next(engine for engine in self.engines if engine.role in {names.STEP, names.TARGET})
        prefill, verify = (profile.sizes["S"][-1] for profile in first.profiles)
        slots = min(engine.max_batch for engine in self.engines)
        for name, wanted, most, option in (
            ("num_slots", num_slots, slots, "--max-batch"),
            ("max_draft_tokens", max_drafts, verify - 1, "--block"),
        ):
            if wanted is not None and wanted > most:
                raise EngineError(
                    f"{name} is {wanted}, and the engines were compiled for at most {most}; ask for {most}, or run "
                    f"`xpress-export compile` with a larger {option}"
                )
        logger.info("the engines admit %d slots, %d drafts, chunks of %d prompt tokens", slots, verify - 1, prefill)
        return replace(
            shape,
            num_slots=min(shape.num_slots, slots),
            num_drafts=min(shape.num_drafts, verify - 1),
            chunk=min(chunk, prefill),
        )


def find(folder: Path, manifest: Manifest, choice: Choice, precisions: Mapping[str, str], layout: str) -> Found:
    """What `choice` loads. Raises BundleError for what the bundle has not, PlanMismatchError for another machine's."""
    if choice.backend == ONNX_RUNTIME:
        graphs = {role: manifest.graph(role, precisions[role]) for role in roles_of(manifest, layout)}
        if missing := [role for role, graph in graphs.items() if graph is None]:
            raise BundleError(
                f"the bundle has no {' and no '.join(missing)} graph for the {layout} layout; "
                f"build it again with `xpress-export build --layout {layout}`"
            )
        return Found({role: folder / graph.file for role, graph in graphs.items() if graph is not None})
    gpu = find_gpu(choice.index or 0)
    engines = find_engines(manifest, choice.backend, gpu.sm if gpu else 0, precisions, layout)
    if missing := [role for role, engine in engines.items() if engine is None]:
        raise BundleError(
            f"the bundle has no {choice.backend} engine of {' and '.join(missing)} for {choice.name}; "
            f"run `xpress-export compile {folder}` on this machine"
        )
    there = {role: engine for role, engine in engines.items() if engine is not None}
    version = _version(choice.backend)
    for engine in there.values():
        if gpu is not None and version is not None:
            check_loadable(engine, Running(choice.backend, version, gpu), folder, manifest)
    return Found({role: folder / engine.file for role, engine in there.items()}, tuple(there.values()))


def plan_of(
    manifest: Manifest, choice: Choice, found: Found, precision: Precision, layout: str, shape: Shape
) -> MemoryPlan:
    """What a bundle takes where `choice` runs what was found, in a loop of these sizes."""
    from xpress_export.runtime import memory_plan

    return memory_plan.plan_memory(
        manifest,
        device_kind=memory_plan.CPU if choice.index is None else memory_plan.CUDA,
        backend=choice.backend,
        precision=precision,
        layout=layout,
        shape=shape,
        engines=found.engines,
    )


def require_memory(
    manifest: Manifest, device: Device, choice: Choice, found: Found, precision: Precision, layout: str, shape: Shape
) -> None:
    """Refuse, with the numbers, what will not fit a device that knows how much is free. Raises EngineError."""
    if (memory := device.memory_info()) is None:
        return
    from xpress_export.runtime.memory_plan import refuse_if_too_large

    refuse_if_too_large(plan_of(manifest, choice, found, precision, layout, shape), memory[0])


def open_device(choice: Choice, num_threads: int | None, engines: Sequence[EngineRecord] = ()) -> Device:
    """The device of a choice, ready to load graphs. engines: those it will load; version-compatible ones carry code of
    their own for the host to run, which is allowed only for them.
    """
    if choice.index is None:
        return CpuDevice(num_threads)
    try:
        from xpress_export.runtime.device_cuda import open_cuda
    except ImportError as err:
        raise MissingDependencyError("cuda-bindings", "run on a GPU", "cuda") from err
    return open_cuda(choice.index, choice.backend, host_code=any(engine.version_compatible for engine in engines))
