"""A `cuda.bindings.runtime` without a GPU: it does what is asked, in host memory, and checks how it is asked.

Memory is real memory of the host at real addresses, so that copies and graphs compute. Work runs as late as CUDA may
run it: when the host waits for it, and then only what it waits for and what that waits for. A breach of a rule fails
the test at the call that commits it; a call that CUDA would refuse answers with CUDA's status. Rules cite the CUDA
documentation: [rt] CUDA Runtime API reference, [pg] CUDA C++ Programming Guide.
"""

# ruff: noqa: N802, N815 - names are CUDA's

from __future__ import annotations

import ctypes
import enum
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

_ALIGNMENT = 256  # [pg] "any address of a variable residing in global memory or returned by one of the memory
#                   allocation routines from the driver or runtime API is always aligned to at least 256 bytes"
_CODES = {
    "cudaSuccess": 0, "cudaErrorInvalidValue": 1, "cudaErrorMemoryAllocation": 2, "cudaErrorInvalidDevice": 101,
    "cudaErrorInvalidResourceHandle": 400, "cudaErrorNotReady": 600, "cudaErrorIllegalAddress": 700,
    "cudaErrorLaunchFailure": 719, "cudaErrorECCUncorrectable": 214, "cudaErrorStreamCaptureUnsupported": 900,
    "cudaErrorStreamCaptureInvalidated": 901, "cudaErrorStreamCaptureIsolation": 905,
    "cudaErrorStreamCaptureWrongThread": 908, "cudaErrorUnknown": 999,
}  # fmt: skip
_STICKY = {"cudaErrorIllegalAddress", "cudaErrorLaunchFailure", "cudaErrorECCUncorrectable", "cudaErrorUnknown"}
# [rt] "This leaves the process in an inconsistent state and any further CUDA work will return the same error."
_RESULTS = {
    "cudaMalloc": 1, "cudaHostAlloc": 1, "cudaStreamCreateWithFlags": 1, "cudaEventCreateWithFlags": 1,
    "cudaStreamEndCapture": 1, "cudaGraphInstantiate": 1, "cudaEventElapsedTime": 1, "cudaMemGetInfo": 2,
}  # fmt: skip
"""What a function returns beside its status: None each, when it fails."""
_UNCHECKED = {"cudaGetErrorString", "cudaGetLastError"}  # they tell of other calls
_ANYWHERE = {"cudaSetDevice", *_UNCHECKED}
_NEVER_IN_CAPTURE = {
    "cudaMalloc", "cudaHostAlloc", "cudaFree", "cudaFreeHost", "cudaStreamSynchronize", "cudaDeviceSynchronize",
    "cudaEventSynchronize", "cudaEventQuery", "cudaStreamQuery",
}  # fmt: skip
# [pg] "Prohibited and Unhandled Operations": synchronizing or querying a stream that is being captured, or an event
# in it, is invalid. [rt] cudaThreadExchangeStreamCaptureMode: under ThreadLocal, "potentially unsafe API calls", such
# as cudaMalloc, are prohibited in the capturing thread.


class Status:
    """What a call returned; it has to be looked at."""

    def __init__(self, name: str, call: str) -> None:
        self.name, self.call, self.was_read = name, call, False

    def __int__(self) -> int:
        self.was_read = True
        return _CODES[self.name]


class Handle:
    """A stream, event, graph or executable graph."""

    _count = 0x1000

    def __init__(self, kind: str, **state: Any) -> None:
        Handle._count += 16
        self.kind, self.number, self.alive = kind, Handle._count, True
        self.__dict__.update(state)

    def __int__(self) -> int:
        return self.number


@dataclass
class Capture:
    """A capture under way. thread: who began it."""

    thread: int
    operations: list[Operation] = field(default_factory=list)
    is_valid: bool = True


@dataclass(frozen=True)
class Operation:
    """Enqueued work. owner: the execution context that it belongs to, if to any."""

    run: Callable[[], None]
    owner: Any = None


class FakeCuda:
    """total_bytes: of device memory. calls: names of the calls, in order."""

    cudaHostAllocDefault, cudaStreamNonBlocking, cudaEventDefault, cudaEventDisableTiming = 0, 1, 0, 2
    cudaStreamCaptureMode = enum.IntEnum(
        "cudaStreamCaptureMode",
        {f"cudaStreamCaptureMode{name}": n for n, name in enumerate(("Global", "ThreadLocal", "Relaxed"))},
    )
    cudaMemcpyKind = enum.IntEnum(
        "cudaMemcpyKind",
        {
            f"cudaMemcpy{n}": k
            for k, n in enumerate(("HostToHost", "HostToDevice", "DeviceToHost", "DeviceToDevice", "Default"))
        },
    )

    def __init__(self, total_bytes: int = 1 << 30, num_devices: int = 1) -> None:
        self.total_bytes, self.num_devices = total_bytes, num_devices
        self.calls: list[str] = []
        self.allocations: dict[int, tuple[int, bool, Any]] = {}
        self.handles: dict[int, Handle] = {}
        self._faults: list[SimpleNamespace] = []
        self._last, self._sticky = "cudaSuccess", ""
        self._thread = threading.local()
        self._clock = 0

    # For tests

    def fail(self, call: str, status: str, after: int = 0, times: int = 1) -> None:
        """Have `call` return `status`, `times` times, after `after` more good calls."""
        self._faults.append(SimpleNamespace(call=call, status=status, after=after, times=times))

    def break_down(self, status: str = "cudaErrorIllegalAddress") -> None:
        """A kernel failed: every call tells of it from now on."""
        self._sticky = status

    def live(self) -> dict[str, int]:
        """What was not given back."""
        found = {"memory": len(self.allocations)}
        for handle in self.handles.values():
            found[handle.kind] = found.get(handle.kind, 0) + handle.alive
        return {kind: count for kind, count in found.items() if count}

    def enqueue(self, stream: int, operation: Operation) -> None:
        """What a library puts on a stream: recorded while it is captured, else run."""
        handle = self._alive(stream, "stream")
        if handle.capture is not None:
            assert handle.capture.thread == threading.get_ident(), "another thread enqueues on a captured stream"
            handle.capture.operations.append(operation)
        else:
            handle.queue.append(operation.run)

    def _drain(self, handle: Handle, until: int | None = None) -> None:
        """Run what is enqueued on a stream, or the part of it before a point."""
        while handle.queue and (until is None or handle.num_done < until):
            handle.num_done += 1
            handle.queue.popleft()()

    def _drain_all(self) -> None:
        """[pg] "Implicit Synchronization": freeing memory waits for the device."""
        for handle in list(self.handles.values()):
            if handle.kind == "stream":
                self._drain(handle)

    def is_capturing(self, stream: int) -> bool:
        return self._alive(stream, "stream").capture is not None

    def spoil_capture(self, stream: int) -> None:
        """Something that must not happen in a capture did."""
        self._alive(stream, "stream").capture.is_valid = False
        self._last = "cudaErrorStreamCaptureInvalidated"

    def check(self, address: int, num_bytes: int, what: str) -> None:
        """No use after free, and none beyond an allocation."""
        assert any(
            start <= address and address + num_bytes <= start + size for start, (size, _, _) in self.allocations.items()
        ), f"{what}: {num_bytes} bytes at {address:#x} are not allocated"

    # The API

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("cuda") or not hasattr(type(self), f"_{name}"):
            raise AttributeError(f"cuda.bindings.runtime has no {name} here")
        return lambda *args: self._call(name, *args)

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        previous = getattr(self._thread, "status", None)
        assert previous is None or previous.was_read, f"nobody looked at the status of {previous.call}"
        assert name in _ANYWHERE or getattr(self._thread, "device", None) is not None, (
            f"{name} before cudaSetDevice: the current device is each thread's own [rt]"
        )
        self.calls.append(name)
        outcome = self._outcome(name, args)
        status, *results = (outcome,) if isinstance(outcome, str) else outcome
        if status != "cudaSuccess" and name not in _UNCHECKED and status != "cudaErrorNotReady":
            self._last = status
            self._sticky = self._sticky or (status if status in _STICKY else "")
        answer = Status(status, name)
        if name not in _UNCHECKED:
            self._thread.status = answer
        return (answer, *results)

    def _outcome(self, name: str, args: tuple[Any, ...]) -> Any:
        nothing = (None,) * _RESULTS.get(name, 0)
        if name == "cudaGetErrorString":
            return getattr(self, f"_{name}")(*args)
        if self._sticky:
            return (self._sticky, *nothing)
        for fault in self._faults:
            if fault.call != name:
                continue
            if fault.after:
                fault.after -= 1
            elif fault.times:
                fault.times -= 1
                return (fault.status, *nothing)
        if name in _NEVER_IN_CAPTURE and (own := self._own_capture()) is not None:
            own.is_valid = False
            return ("cudaErrorStreamCaptureUnsupported", *nothing)
        return getattr(self, f"_{name}")(*args)

    def _own_capture(self) -> Capture | None:
        captures = [h.capture for h in self.handles.values() if h.kind == "stream" and h.capture is not None]
        return next((c for c in captures if c.thread == threading.get_ident()), None)

    def _alive(self, handle: Any, kind: str) -> Handle:
        found = self.handles.get(int(handle))
        assert found is not None and found.kind == kind and found.alive, f"{handle} is no {kind} that is alive"
        return found

    def _new(self, kind: str, **state: Any) -> tuple[str, Handle]:
        handle = Handle(kind, **state)
        self.handles[int(handle)] = handle
        return "cudaSuccess", handle

    def _cudaSetDevice(self, index: int) -> str:
        if index >= self.num_devices:
            return "cudaErrorInvalidDevice"
        self._thread.device = index
        return "cudaSuccess"

    def _cudaGetErrorString(self, status: Status) -> tuple[str, bytes]:
        return "cudaSuccess", f"text of {status.name}".encode()

    def _cudaGetLastError(self) -> str:
        found, self._last = self._last, "cudaSuccess"
        return found

    def _cudaMemGetInfo(self) -> tuple[str, int, int]:
        return "cudaSuccess", self.total_bytes - self._used(), self.total_bytes

    def _used(self) -> int:
        return sum(size for size, on_host, _ in self.allocations.values() if not on_host)

    def _allocate(self, size: int, on_host: bool) -> Any:
        assert size > 0, "an allocation of nothing has no address"
        if not on_host and self._used() + size > self.total_bytes:
            return "cudaErrorMemoryAllocation", None
        raw = np.full(size + _ALIGNMENT, 0xAB, np.uint8)  # [rt] cudaMalloc: "The memory is not cleared."
        address = -(-raw.ctypes.data // _ALIGNMENT) * _ALIGNMENT
        self.allocations[address] = (size, on_host, raw)
        return "cudaSuccess", address

    def _cudaMalloc(self, size: int) -> Any:
        return self._allocate(size, False)

    def _cudaHostAlloc(self, size: int, flags: int) -> Any:
        return self._allocate(size, True)

    def _free(self, address: int, on_host: bool) -> str:
        if address == 0:  # [rt] cudaFree: "If devPtr is 0, no operation is performed."
            return "cudaSuccess"
        self._drain_all()
        assert address in self.allocations, f"{address:#x} is freed twice, or was never allocated"
        assert self.allocations[address][1] == on_host, "cudaFree is for the device's memory, cudaFreeHost for pinned"
        del self.allocations[address]
        return "cudaSuccess"

    def _cudaFree(self, address: int) -> str:
        return self._free(address, False)

    def _cudaFreeHost(self, address: int) -> str:
        return self._free(address, True)

    def _cudaMemsetAsync(self, address: int, value: int, size: int, stream: Any) -> str:
        self.check(address, size, "memset")
        self.enqueue(int(stream), Operation(lambda: ctypes.memset(address, value, size) and None))
        return "cudaSuccess"

    def _cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: Any) -> str:
        return self._cudaMemcpy2DAsync(to, size, source, size, size, 1, kind, stream)

    def _cudaMemcpy2DAsync(
        self, to: int, to_pitch: int, source: int, pitch: int, width: int, height: int, kind: int, stream: Any
    ) -> str:
        if width > to_pitch or width > pitch:  # [rt] "width must not exceed either dpitch or spitch"
            return "cudaErrorInvalidValue"
        wanted = (self._is_host(source), self._is_host(to))
        assert wanted == {0: (1, 1), 1: (1, 0), 2: (0, 1), 3: (0, 0)}[int(kind)], f"{kind} is the wrong direction"
        assert abs(to - source) >= width or to == source, "a copy overlaps itself [rt] cudaMemcpy: undefined behavior"

        def run() -> None:
            self.check(to, to_pitch * (height - 1) + width, "copy, to")
            self.check(source, pitch * (height - 1) + width, "copy, from")
            for row in range(height):
                ctypes.memmove(to + row * to_pitch, source + row * pitch, width)

        self.enqueue(int(stream), Operation(run))
        return "cudaSuccess"

    def _is_host(self, address: int) -> bool:
        found = [h for start, (size, h, _) in self.allocations.items() if start <= address < start + size]
        assert found, f"{address:#x} is not allocated"
        return found[0]

    def _cudaStreamCreateWithFlags(self, flags: int) -> Any:
        assert flags == self.cudaStreamNonBlocking, "a blocking stream waits for the default stream of other libraries"
        return self._new("stream", capture=None, queue=deque(), num_done=0)

    def _cudaStreamDestroy(self, stream: Any) -> str:
        handle = self._alive(stream, "stream")
        assert not handle.queue, "a stream is destroyed while work is under way"
        handle.alive = False
        return "cudaSuccess"

    def _cudaStreamSynchronize(self, stream: Any) -> str:
        self._drain(self._alive(stream, "stream"))
        return "cudaSuccess"

    def _cudaEventCreateWithFlags(self, flags: int) -> Any:
        return self._new("event", flags=flags, at=None, point=None)

    def _cudaEventDestroy(self, event: Any) -> str:
        self._alive(event, "event").alive = False
        return "cudaSuccess"

    def _cudaEventRecord(self, event: Any, stream: Any) -> str:
        handle, marked = self._alive(stream, "stream"), self._alive(event, "event")
        assert handle.capture is None, "an event that is recorded in a capture is part of it"
        self._clock += 1
        marked.at, marked.point = self._clock, (handle, handle.num_done + len(handle.queue))
        return "cudaSuccess"

    def _cudaEventSynchronize(self, event: Any) -> str:  # [rt] before the first record it returns at once
        if (point := self._alive(event, "event").point) is not None:
            self._drain(*point)
        return "cudaSuccess"

    def _cudaEventQuery(self, event: Any) -> str:
        handle, until = self._alive(event, "event").point
        return "cudaSuccess" if handle.num_done >= until else "cudaErrorNotReady"

    def _cudaEventElapsedTime(self, start: Any, end: Any) -> Any:
        first, last = self._alive(start, "event"), self._alive(end, "event")
        if (first.flags | last.flags) & self.cudaEventDisableTiming or None in {first.at, last.at}:
            return "cudaErrorInvalidResourceHandle", None  # [rt] cudaEventElapsedTime
        return "cudaSuccess", float(last.at - first.at)

    def _cudaStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> str:
        assert self._alive(event, "event").at is not None, (
            "a wait for an event that was never recorded waits for nothing"
        )
        handle, point = self._alive(stream, "stream"), self._alive(event, "event").point
        if handle.capture is not None:
            self.spoil_capture(stream)
            return "cudaErrorStreamCaptureIsolation"  # [pg] waiting on an event from outside of the capture
        handle.queue.append(lambda: self._drain(*point))  # [rt] the point that is recorded now, whatever comes later
        return "cudaSuccess"

    def _cudaStreamBeginCapture(self, stream: Any, mode: int) -> str:
        # [pg] the legacy stream cannot be captured; the global mode forbids unsafe calls in all threads of the process.
        assert int(stream) != 0, "the default stream cannot be captured"
        assert mode == self.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal, "not the thread-local mode"
        handle = self._alive(stream, "stream")
        assert handle.capture is None, "it is being captured already"
        handle.capture = Capture(threading.get_ident())
        return "cudaSuccess"

    def _cudaStreamEndCapture(self, stream: Any) -> Any:
        handle = self._alive(stream, "stream")
        capture, handle.capture = handle.capture, None
        assert capture is not None, "no capture was begun"
        if capture.thread != threading.get_ident():
            return "cudaErrorStreamCaptureWrongThread", None
        if not capture.is_valid:
            return "cudaErrorStreamCaptureInvalidated", None
        return self._new("graph", operations=tuple(capture.operations))

    def _cudaGraphInstantiate(self, graph: Any, flags: int) -> Any:
        return self._new("graph exec", operations=self._alive(graph, "graph").operations)

    def _cudaGraphDestroy(self, graph: Any) -> str:
        self._alive(graph, "graph").alive = False
        return "cudaSuccess"

    def _cudaGraphExecDestroy(self, graph: Any) -> str:
        self._alive(graph, "graph exec").alive = False
        return "cudaSuccess"

    def _cudaGraphLaunch(self, graph: Any, stream: Any) -> str:
        handle = self._alive(stream, "stream")
        assert handle.capture is None, "a graph is launched within a capture"
        handle.queue.extend(operation.run for operation in self._alive(graph, "graph exec").operations)
        return "cudaSuccess"

    def graphs_of(self, owner: Any) -> list[Handle]:
        """The executable graphs that hold work of `owner`."""
        return [
            h
            for h in self.handles.values()
            if h.kind == "graph exec" and h.alive and any(o.owner is owner for o in h.operations)
        ]
