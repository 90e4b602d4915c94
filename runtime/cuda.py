"""CUDA's runtime API with every status checked: memory, streams, events, copies, graphs. No torch, no kernels.

    Cuda.call(function, *args, what=...)    any function of the API; the status becomes an error that says what for
    allocate, free                          device memory, aligned to 256 bytes; pinned memory, as a numpy array too
    copy                                    between buffers of any strides, in as few calls as they allow
    capture                                 what is enqueued on a stream, recorded once as a graph to launch

The API is `cuda.bindings.runtime`, imported when the first `Cuda` is made. A status that means that this process cannot
use the GPU any more (CUDA Runtime API, "Error types": "the process must be terminated and relaunched") raises
DeviceLostError, and so does every call after it.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from xpress_export.errors import DeviceLostError, EngineError, MissingDependencyError
from xpress_export.runtime.device import Array, Buffer, Memory

ALIGNMENT = 256
"""Bytes that allocations of CUDA are aligned to, and that TensorRT wants of an address."""

_OUT_OF_MEMORY, _NOT_READY = "cudaErrorMemoryAllocation", "cudaErrorNotReady"
_LOST = (
    "IllegalAddress", "LaunchFailure", "LaunchTimeout", "Assert", "HardwareStackError", "IllegalInstruction",
    "MisalignedAddress", "InvalidAddressSpace", "InvalidPc", "TensorMemoryLeak", "ECCUncorrectable",
    "NvlinkUncorrectable", "Contained", "ContextIsDestroyed", "ExternalDevice",
    "MpsClientTerminated", "MpsRpcFailure", "Unknown",
)  # fmt: skip
_HINTS = {
    "cudaErrorInsufficientDriver": "install a driver for this version of CUDA, or an older cuda-bindings",
    "cudaErrorNoDevice": "no GPU is visible to this process; `xpress-export doctor`",
    "cudaErrorInvalidDevice": "there are fewer GPUs; name another with device cuda:N",
}


class CudaMemory(Memory):
    """An allocation. address: where it is. array: pinned memory as the host sees it, uint8."""

    def __init__(self, cuda: Cuda, name: str, num_bytes: int, *, on_host: bool) -> None:
        self._cuda, self.name, self.num_bytes, self.on_host = cuda, name, num_bytes, on_host
        self.address: int = cuda.allocate(name, num_bytes, on_host=on_host)
        self._array: Array | None = None
        if on_host:
            raw = (ctypes.c_uint8 * max(1, num_bytes)).from_address(self.address)
            self._array = np.ctypeslib.as_array(raw)
            self._array[:] = 0

    def _view(self, buffer: Buffer) -> Array:
        assert self._array is not None, f"the host touches {self.name}, which is the device's or was freed"
        return np.ndarray(buffer.shape, buffer.dtype, self._array.data, buffer.offset, buffer.strides)

    def read(self, buffer: Buffer) -> Array:
        return self._view(buffer).copy()

    def write(self, buffer: Buffer, values: Array) -> None:
        self._view(buffer)[...] = values

    def free(self) -> None:
        if self.address:
            address, self.address, self._array = self.address, 0, None
            self._cuda.free(self.name, address, on_host=self.on_host)


def address_of(buffer: Buffer) -> int:
    """Where a buffer begins."""
    memory = buffer.memory
    assert isinstance(memory, CudaMemory) and memory.address, f"{memory.name} was freed or is not of CUDA"
    return memory.address + buffer.offset


class Cuda:
    """One GPU of this process. api: `cuda.bindings.runtime`, or what stands in for it."""

    def __init__(self, index: int, api: Any = None) -> None:
        self.index, self.api = index, _api() if api is None else api
        self._lost: DeviceLostError | None = None

    def call(self, function: str, *args: Any, what: str) -> Any:
        """What a function of the API returns beside its status. what: a phrase for errors, such as "copying ids"."""
        status, *results = self.status_of(function, *args)
        if int(status):
            raise self._error(function, status, what)
        return results[0] if len(results) == 1 else tuple(results)

    def status_of(self, function: str, *args: Any) -> Any:
        """The whole answer of a function, called with this GPU as the thread's current one."""
        if self._lost is not None:
            raise self._lost
        (status,) = self.api.cudaSetDevice(self.index)
        if int(status):
            raise self._error("cudaSetDevice", status, f"choosing GPU {self.index}")
        return getattr(self.api, function)(*args)

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def raise_if_lost(self, what: str) -> None:
        """After a library on top of CUDA failed: DeviceLostError if CUDA did too. Clears other errors of CUDA."""
        (status,) = self.status_of("cudaGetLastError")
        if int(status):
            error = self._error("cudaGetLastError", status, what)
            if isinstance(error, DeviceLostError):
                raise error

    def _error(self, function: str, status: Any, what: str) -> EngineError:
        """The error of a status, and the state that follows from it."""
        name = getattr(status, "name", str(status))
        _, text = self.api.cudaGetErrorString(status)
        described = text.decode() if isinstance(text, bytes) else str(text)
        message = f"{function} failed while {what} on GPU {self.index}: {name} ({described})"
        if name.removeprefix("cudaError") in _LOST:
            self._lost = DeviceLostError(
                f"{message}; this process cannot use the GPU any more: start it again. If it happens again, look for "
                f"Xid messages in the kernel's log, and run under compute-sanitizer"
            )
            return self._lost
        self.api.cudaGetLastError()  # or the next call of a library would report it as its own
        if name == _OUT_OF_MEMORY:
            status, free, total = self.api.cudaMemGetInfo()
            room = f"{free >> 20} of {total >> 20} MiB are free" if not int(status) else "how much is free is unknown"
            return EngineError(
                f"{message}; {room}. Open the runtime with fewer num_slots or a smaller prefill_chunk, compile with a "
                f"smaller --max-context, or end what else uses this GPU"
            )
        return EngineError(f"{message}; {hint}" if (hint := _HINTS.get(name)) else message)

    # Memory

    def allocate(self, name: str, num_bytes: int, *, on_host: bool) -> int:
        """Address of new memory, whose contents are anything."""
        size = max(num_bytes, ALIGNMENT)
        kind = "pinned " if on_host else ""
        what = f"allocating {size} bytes of {kind}memory for {name}"
        if on_host:
            return int(self.call("cudaHostAlloc", size, self.api.cudaHostAllocDefault, what=what))
        return int(self.call("cudaMalloc", size, what=what))

    def free(self, name: str, address: int, *, on_host: bool) -> None:
        if not self.is_lost:  # then CUDA has given it back, or nothing can
            self.call("cudaFreeHost" if on_host else "cudaFree", address, what=f"freeing {name}")

    def memory_info(self) -> tuple[int, int]:
        """Bytes free and in all, of the device, whoever uses them."""
        free, total = self.call("cudaMemGetInfo", what="asking for free memory")
        return int(free), int(total)

    def copy(self, to: Buffer, source: Buffer, stream: Any, label: str) -> None:
        """Enqueue a copy, in one call where both sides have two dimensions at most."""
        assert (to.shape, to.dtype) == (source.shape, source.dtype), (
            f"{source.name} into {to.name}: other shape or dtype"
        )
        width, axes = merge_axes(to, source)
        if not width:
            return
        kind, what = self._kind(to, source), f"copying {source.name} to {to.name} ({to.num_bytes} bytes, {label})"
        first, second = address_of(to), address_of(source)
        if not axes:
            self.call("cudaMemcpyAsync", first, second, width, kind, stream, what=what)
            return
        rows, *outer = axes
        for steps in itertools.product(*(range(n) for n, _, _ in outer)):
            at = first + sum(i * axis[1] for i, axis in zip(steps, outer, strict=True))
            fro = second + sum(i * axis[2] for i, axis in zip(steps, outer, strict=True))
            self.call("cudaMemcpy2DAsync", at, rows[1], fro, rows[2], width, rows[0], kind, stream, what=what)

    def _kind(self, to: Buffer, source: Buffer) -> Any:
        kinds = self.api.cudaMemcpyKind
        if source.memory.on_host:
            return kinds.cudaMemcpyHostToHost if to.memory.on_host else kinds.cudaMemcpyHostToDevice
        return kinds.cudaMemcpyDeviceToHost if to.memory.on_host else kinds.cudaMemcpyDeviceToDevice

    # Streams and events

    def new_stream(self, name: str) -> Any:
        """A stream that does not wait for the legacy default stream, which other libraries use."""
        return self.call("cudaStreamCreateWithFlags", self.api.cudaStreamNonBlocking, what=f"creating stream {name}")

    def new_event(self, name: str, *, timed: bool = False) -> Any:
        flags = self.api.cudaEventDefault if timed else self.api.cudaEventDisableTiming
        return self.call("cudaEventCreateWithFlags", flags, what=f"creating event {name}")

    def has_passed(self, event: Any) -> bool:
        """Whether the last recorded point of an event is passed."""
        (status,) = self.status_of("cudaEventQuery", event)
        if int(status) and getattr(status, "name", "") != _NOT_READY:
            raise self._error("cudaEventQuery", status, "asking for a timing event")
        return not int(status)

    # Graphs

    def capture(self, stream: Any, enqueue: Callable[[], None], what: str) -> Any:
        """An executable graph of what `enqueue` puts on `stream`, which does not run.

        The capture is of this thread alone: the global mode would break captures and allocations of other threads.
        However `enqueue` ends, the capture is ended too. Raises what it raises, or EngineError.
        """
        mode = self.api.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.call("cudaStreamBeginCapture", stream, mode, what=what)
        try:
            enqueue()
        except BaseException:
            self._abandon(stream)
            raise
        graph = self.call("cudaStreamEndCapture", stream, what=what)
        try:
            return self.call("cudaGraphInstantiate", graph, 0, what=what)
        finally:
            if not self.is_lost:
                self.call("cudaGraphDestroy", graph, what=what)

    def _abandon(self, stream: Any) -> None:
        """End a capture that failed; its status says again what is known."""
        if self.is_lost:
            return
        status, graph = self.status_of("cudaStreamEndCapture", stream)
        if int(status):
            self.raise_if_lost("ending a failed capture")
        else:
            self.call("cudaGraphDestroy", graph, what="dropping a failed capture")


def merge_axes(to: Buffer, source: Buffer) -> tuple[int, list[tuple[int, int, int]]]:
    """How two buffers of one shape lie: contiguous bytes, and the (size, stride, stride) of the axes over them.

    Axes that lie together in both are one; the inner comes first.
    """
    width, axes = to.dtype.itemsize, list[tuple[int, int, int]]()
    for n, one, other in zip(reversed(to.shape), reversed(to.strides), reversed(source.strides), strict=True):
        if n == 1:
            continue
        if not axes and one == other == width:
            width *= n
        elif axes and (one, other) == (axes[-1][0] * axes[-1][1], axes[-1][0] * axes[-1][2]):
            axes[-1] = (axes[-1][0] * n, *axes[-1][1:])
        else:
            axes.append((n, one, other))
    if any(n == 0 for n in to.shape):
        return 0, []
    return width, axes


def _api() -> Any:
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as err:
        raise MissingDependencyError("cuda-bindings", "run on a GPU", "cuda") from err
