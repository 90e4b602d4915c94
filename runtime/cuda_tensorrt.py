"""TensorRT and TensorRT-RTX engine plans as programs; what is called exists in TensorRT 10.3 to 11.4 and in RTX.

    what                               how
    profile                            the tightest that admits the shapes; switched on the compute stream, then shapes
    execution context                  one for each `Bound` that repeats, so that its graph stays valid; the other
                                       bounds of a profile, such as prompts of any length, take turns in one
    scratch memory of contexts         one block for all of them: graphs run on one stream, never two at once
    addresses                          256-byte aligned ("The pointer must have at least 256-byte alignment",
                                       IExecutionContext::setTensorAddress); for a part of a buffer that is not, such as
                                       the int64 of one slot, the engine works on a copy
    caches                             present_* is past_* where the engine says that it updates in place
                                       (ICudaEngine::getAliasedInputTensor, 10.15); where it does not, nothing promises
                                       that reads of past come first: present_* is a copy, carried back after the call

`set_optimization_profile_async` raises on failure in some versions and returns False in others; the rest return False.
"""

from __future__ import annotations

import importlib
import mmap
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xpress_export import names, platforms
from xpress_export.errors import BundleError, EngineError, MissingDependencyError, PlanMismatchError
from xpress_export.runtime.cuda import ALIGNMENT, address_of
from xpress_export.runtime.cuda_programs import CudaBound, CudaProgram, NotReadyError
from xpress_export.runtime.device import Buffer

if TYPE_CHECKING:
    from xpress_export.runtime.device_cuda import CudaDevice, CudaStream

_MODULES = {platforms.TENSORRT: ("tensorrt", "tensorrt"), platforms.TENSORRT_RTX: ("tensorrt_rtx", "rtx")}
_DTYPES = {"FLOAT": np.float32, "HALF": np.float16, "INT64": np.int64, "INT32": np.int32, "BOOL": np.bool_}
_MOST_KEPT = 8
_OTHER_PLACE = ("version tag", "serialization", "incompatible device", "compute capability", "different version")

Shape = tuple[int, ...]


class TensorRtLoader:
    """Deserializes plans for one device, and keeps the scratch memory that their contexts share."""

    def __init__(self, device: CudaDevice, backend: str, library: Any, *, host_code: bool) -> None:
        self.device, self.trt = device, _import(backend) if library is None else library
        self.title = f"{'TensorRT-RTX' if backend == platforms.TENSORRT_RTX else 'TensorRT'} {self.trt.__version__}"
        self.log = _logger(self.trt)
        self._runtime = self.trt.Runtime(self.log)
        if host_code:
            self._runtime.engine_host_code_allowed = True
        self.shares_scratch = hasattr(self.trt.IExecutionContext, "set_device_memory")
        self._lock = threading.Lock()
        self._scratch_bytes = 0
        self._scratch: Buffer | None = None

    def __call__(self, path: Path, role: str) -> TensorRtProgram:
        with self._lock:  # one runtime and one log for all threads that load
            return self._load(path, role)

    def _load(self, path: Path, role: str) -> TensorRtProgram:
        self.device.cuda.call("cudaFree", 0, what=f"loading {path.name}")  # this thread's GPU is the right one
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as plan:
                engine = self._runtime.deserialize_cuda_engine(plan)
        except (OSError, ValueError) as err:
            raise BundleError(f"{path} cannot be read: {err}") from err
        if engine is None:
            self.device.cuda.raise_if_lost(f"loading {path.name}")
            why = self.log.take()
            text = f"{self.title} cannot load {path} on {self.device.name}: {why}; compile the bundle on this machine"
            raise (PlanMismatchError if any(word in why.lower() for word in _OTHER_PLACE) else BundleError)(text)
        self._scratch_bytes = max(self._scratch_bytes, int(getattr(engine, "device_memory_size_v2", 0)))
        return TensorRtProgram(self, engine, role)

    def scratch(self, num_bytes: int) -> Buffer:
        """Scratch memory for any context; enough for all engines that were loaded before it was first needed."""
        if self._scratch is None or self._scratch.num_bytes < num_bytes:
            self._scratch = self.device.empty("scratch of engines", (self._scratch_bytes,), np.uint8)
        return self._scratch

    def failed(self, what: str) -> EngineError:
        """The error of a call that returned False. Raises DeviceLostError where the GPU is why."""
        self.device.cuda.raise_if_lost(what)
        return EngineError(f"{self.title} failed {what}: {self.log.take()}")

    def checked(self, function: Callable[..., Any], *args: Any, what: str) -> None:
        """Call what returns False, or raises, when it fails."""
        try:
            done = function(*args)
        except RuntimeError as err:
            raise EngineError(f"{self.failed(what)}: {err}") from err
        if done is False:
            raise self.failed(what)


class TensorRtProgram(CudaProgram):
    """An engine. profiles: least and greatest shape of each input, for each profile."""

    def __init__(self, loader: TensorRtLoader, engine: Any, role: str) -> None:
        self.loader, self.role, self._engine, trt = loader, role, engine, loader.trt
        found = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        is_input = {name: engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT for name in found}
        shapes = {name: tuple(engine.get_tensor_shape(name)) for name in found}
        known = {
            name: tuple(n if n >= 0 else f"{name}.{k}" for k, n in enumerate(shape)) for name, shape in shapes.items()
        }
        self.inputs = {name: known[name] for name in found if is_input[name]}
        self.outputs = {name: known[name] for name in found if not is_input[name]}
        self.dtypes = {name: self._dtype(name) for name in found}
        if host := [n for n in found if engine.get_tensor_location(n) != trt.TensorLocation.DEVICE]:
            raise BundleError(f"the {role} engine wants {host[0]} in host memory; compile the bundle again")
        aliased = getattr(engine, "get_aliased_input_tensor", lambda _: None)
        self.aliases = {name: past for name in self.outputs if (past := aliased(name))}
        self.profiles = [
            {name: self._range(name, index) for name in self.inputs}
            for index in range(engine.num_optimization_profiles)
        ]
        self._shared: dict[int, _Context] = {}
        self._contexts: list[_Context] = []
        self._spare: dict[int, list[_Context]] = {}
        self._staging: dict[tuple[str, Shape], Buffer] = {}

    def _range(self, name: str, profile: int) -> tuple[Shape, Shape]:
        least, _, most = self._engine.get_tensor_profile_shape(name, profile)
        return tuple(least), tuple(most)

    def _dtype(self, name: str) -> np.dtype[Any]:
        kind = self._engine.get_tensor_dtype(name).name
        if kind not in _DTYPES:
            raise BundleError(f"the {self.role} engine has {name} as {kind}; known are {', '.join(_DTYPES)}")
        return np.dtype(_DTYPES[kind])

    def bind(self, buffers: Mapping[str, Buffer]) -> TensorRtBound:
        if self.loader.device.compute.is_capturing:
            raise NotReadyError(f"{self.role} was not bound to these buffers before its capture")
        for name, shape in {**self.inputs, **self.outputs}.items():
            self._check(name, shape, buffers[name])
        for name, past in self.aliases.items():
            if address_of(buffers[name]) != address_of(buffers[past]):
                raise EngineError(
                    f"the {self.role} engine updates {past} in place: {name} has to be the same buffer, and it is "
                    f"{buffers[name].name} at {buffers[name].offset}"
                )
        return TensorRtBound(self, buffers, self._profile({name: buffers[name].shape for name in self.inputs}))

    def _check(self, name: str, shape: tuple[int | str, ...], buffer: Buffer) -> None:
        fits = len(shape) == len(buffer.shape) and all(
            n == got for n, got in zip(shape, buffer.shape, strict=True) if isinstance(n, int)
        )
        if not fits or buffer.dtype != self.dtypes[name]:
            raise EngineError(
                f"the {self.role} engine has {name} as {self.dtypes[name]} {list(shape)}, got {buffer.dtype} "
                f"{list(buffer.shape)}; compile the bundle again, with the sizes the runtime is opened for"
            )

    def _profile(self, shapes: Mapping[str, Shape]) -> int:
        """The profile with the least room to spare that admits the shapes."""
        admitting = [
            index
            for index, ranges in enumerate(self.profiles)
            if all(_within(shapes[name], *ranges[name]) for name in shapes)
        ]
        if admitting:
            return min(admitting, key=lambda i: sum(sum(most) for _, most in self.profiles[i].values()))
        for name, shape in shapes.items():
            for axis, got in enumerate(shape):
                ranges = [(ranges[name][0][axis], ranges[name][1][axis]) for ranges in self.profiles]
                if not any(least <= got <= most for least, most in ranges):
                    allowed = " or ".join(f"{least} to {most}" for least, most in ranges)
                    raise EngineError(
                        f"the {self.role} engine does not admit input {name} with shape {list(shape)}: axis {axis} "
                        f"may be {allowed}, got {got}; {_remedy(name, axis, got, max(most for _, most in ranges))}"
                    )
        raise EngineError(
            f"no profile of the {self.role} engine admits its inputs together: "
            f"{', '.join(f'{name} {list(shape)}' for name, shape in shapes.items())}; "
            f"compile with a larger --chunk or --block"
        )

    def staging(self, name: str, shape: Shape) -> Buffer:
        """Aligned memory for a copy of a tensor [B, ...], the same for all bounds: they run one after another."""
        key = (name, shape[1:])
        if key not in self._staging:
            most = max(most[0] for profile in self.profiles for _, most in profile.values())
            title = f"copy of {name} for {self.role}"
            self._staging[key] = self.loader.device.empty(title, (most, *shape[1:]), self.dtypes[name].type)
        return self._staging[key][: shape[0]]

    def context(self, profile: int) -> _Context:
        """A context that nobody else uses, on the shared scratch memory, switched to a profile."""
        if spare := self._spare.get(profile):
            return spare.pop()
        self._contexts.append(_Context(self.loader, self._engine, self.role, profile))
        return self._contexts[-1]

    def shared_context(self, profile: int) -> _Context:
        """The context that bounds of a profile take turns in."""
        if profile not in self._shared:
            self._shared[profile] = self.context(profile)
        return self._shared[profile]

    def give_back(self, context: _Context, profile: int) -> None:
        """Let another bound have a context; the work of both is on one stream, so that no one has to wait."""
        self._spare.setdefault(profile, []).append(context)

    def close(self) -> None:
        """Contexts go before the engine."""
        for context in self._contexts:
            context.close()
        self._contexts.clear()
        self._shared.clear()
        self._spare.clear()
        self._engine = None


class _Context:
    """An execution context, and whose shapes and addresses are set in it."""

    def __init__(self, loader: TensorRtLoader, engine: Any, role: str, profile: int) -> None:
        self._loader, self._role = loader, role
        self._holds: weakref.ref[TensorRtBound] | None = None
        trt, what = loader.trt, f"creating an execution context of the {role} engine"
        if loader.shares_scratch:
            scratch = loader.scratch(engine.device_memory_size_v2)
            self.trt = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
            if self.trt is not None:
                self.trt.set_device_memory(address_of(scratch), scratch.num_bytes)
        else:
            self.trt = engine.create_execution_context()
        if self.trt is None:
            raise loader.failed(what)
        stream = int(loader.device.compute.handle)
        loader.checked(self.trt.set_optimization_profile_async, profile, stream, what=f"{what}, profile {profile}")

    def hold(self, bound: TensorRtBound) -> None:
        """Set the shapes and addresses of a bound, and see that the engine agrees about the outputs."""
        if self._holds is not None and self._holds() is bound:
            return
        self._holds, check = None, self._loader.checked
        program = bound.program
        for name in program.inputs:
            shape = bound.shapes[name]
            what = f"setting the shape of {name} of the {self._role} engine to {list(shape)}"
            check(self.trt.set_input_shape, name, shape, what=what)
        for name, address in bound.addresses.items():
            assert address % ALIGNMENT == 0, f"{name} is at {address}"
            what = f"setting the address of {name} of the {self._role} engine"
            check(self.trt.set_tensor_address, name, address, what=what)
        if missing := list(self.trt.infer_shapes()):
            raise EngineError(f"the {self._role} engine does not know the shape of {', '.join(missing)}")
        for name in program.outputs:
            if (shape := tuple(self.trt.get_tensor_shape(name))) != bound.shapes[name]:
                raise EngineError(
                    f"the {self._role} engine writes {name} with shape {list(shape)}, and its buffer has "
                    f"{list(bound.shapes[name])}; compile the bundle again"
                )
        self._holds = weakref.ref(bound)

    def close(self) -> None:
        self.trt = None


@dataclass(frozen=True)
class _Carried:
    """A buffer that the engine works on a copy of. into: before the call. back: after it."""

    buffer: Buffer
    copy: Buffer
    into: bool
    back: bool


class TensorRtBound(CudaBound):
    """shapes, addresses: by tensor, as the engine is given them."""

    _own: _Context | None = None

    def __init__(self, program: TensorRtProgram, buffers: Mapping[str, Buffer], profile: int) -> None:
        self.program, self.role, self._profile = program, program.role, profile
        self.reads = tuple(buffers[name] for name in program.inputs)
        self.writes = tuple(buffers[name] for name in program.outputs)
        self.shapes = {name: buffer.shape for name, buffer in buffers.items()}
        self._carried = {name: carried for name in self.shapes if (carried := self._carry(name, buffers))}
        used = {**buffers, **{name: carried.copy for name, carried in self._carried.items()}}
        self.addresses = {name: address_of(buffer) for name, buffer in used.items()}

    def _carry(self, name: str, buffers: Mapping[str, Buffer]) -> _Carried | None:
        """How a tensor has to be carried, if it has to; one copy for both names of a cache that is updated in place."""
        program, buffer = self.program, buffers[name]
        is_fit = buffer.is_contiguous and address_of(buffer) % ALIGNMENT == 0
        if past := program.aliases.get(name):
            return None if is_fit else _Carried(buffer, program.staging(past, buffer.shape), into=False, back=True)
        if name in program.inputs:
            return None if is_fit else _Carried(buffer, program.staging(name, buffer.shape), into=True, back=False)
        overwrites = any(address_of(other) == address_of(buffer) for other in self.reads)
        if is_fit and not overwrites:
            return None
        return _Carried(buffer, program.staging(name, buffer.shape), into=False, back=True)

    def enqueue(self, stream: CudaStream, label: str, *, repeats: bool) -> None:
        context = self._context(stream, repeats=repeats)
        context.hold(self)
        for carried in self._carried.values():
            if carried.into:
                stream.copy(carried.copy, carried.buffer, label)
        what = f"running the {self.role} engine ({label}) with {self._inputs()}"
        self.program.loader.checked(context.trt.execute_async_v3, int(stream.handle), what=what)
        for carried in self._carried.values():
            if carried.back:
                stream.copy(carried.buffer, carried.copy, label)

    def _context(self, stream: CudaStream, *, repeats: bool) -> _Context:
        if not repeats:
            return self.program.shared_context(self._profile)
        if self._own is None:
            if stream.is_capturing:
                raise NotReadyError(f"{self.role} did not run on these buffers before its capture")
            self._own = self.program.context(self._profile)
        return self._own

    def _inputs(self) -> str:
        return ", ".join(f"{name} {list(self.shapes[name])}" for name in self.program.inputs if "past" not in name)

    def why_not_captured(self, stream: CudaStream) -> str | None:
        asked = getattr(self._own.trt, "is_stream_capturable", None) if self._own is not None else None
        if asked is None or asked(int(stream.handle)):
            return None
        return f"{self.program.loader.title} says that the {self.role} engine cannot be captured with these shapes"

    def __del__(self) -> None:
        if self._own is not None:
            self.program.give_back(self._own, self._profile)


def _within(shape: Shape, least: Shape, most: Shape) -> bool:
    return all(a <= n <= b for a, n, b in zip(least, shape, most, strict=True))


def _remedy(name: str, axis: int, got: int, most: int) -> str:
    """The option of `compile` that would admit it."""
    if got < most:
        return "that is less than any profile has"
    if axis == 0:
        return f"compile with --max-batch {got}, or open the runtime with num_slots {most}"
    if "past" in name:
        return "compile with a larger --max-context"
    if name in {names.INPUT_IDS, names.TARGET_HIDDEN, names.NEXT_TOKEN}:
        return f"compile with --chunk {got} (or --block, for a verify step), or open it with prefill_chunk {most}"
    return "compile with a larger --block"


def _import(backend: str) -> Any:
    module, extra = _MODULES[backend]
    try:
        return importlib.import_module(module)
    except ImportError as err:
        raise MissingDependencyError(module, "run TensorRT engines", extra) from err


def _logger(trt: Any) -> Any:
    """A logger that keeps the last errors; its class exists only once TensorRT is imported."""
    base, severity = trt.ILogger, trt.ILogger.Severity

    class Log(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            base.__init__(self)
            self._errors: list[str] = []

        def log(self, level: Any, message: str) -> None:
            if level in {severity.ERROR, severity.INTERNAL_ERROR}:
                self._errors = [*self._errors[1 - _MOST_KEPT :], message]

        def take(self) -> str:
            """The errors since the last call."""
            found, self._errors = "; ".join(dict.fromkeys(self._errors)), []
            return found or "TensorRT gave no reason"

    return Log()
