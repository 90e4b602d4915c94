"""A GPU as a device: graphs on one compute stream, captured where they repeat, copies on streams beside it.

    backend                     programs
    onnxruntime                 `cuda_onnxruntime`: ONNX Runtime's CUDA provider
    tensorrt, tensorrt-rtx      `cuda_tensorrt`: engine plans

Graphs run on the stream called "compute" alone: a session of ONNX Runtime is tied to one stream when it is opened, and
the execution contexts of TensorRT share their scratch memory. `Stream.repeat` runs new work as it is (the warm-up that
TensorRT and ONNX Runtime need, in which memory is allocated), captures it the second time, and launches the graph from
then on. What cannot be captured runs as it is, and the log says once why.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from xpress_export import platforms
from xpress_export.errors import DeviceLostError, EngineError, MissingDependencyError
from xpress_export.runtime.cuda import Cuda, CudaMemory
from xpress_export.runtime.cuda_programs import CudaBound, CudaProgram, NotReadyError
from xpress_export.runtime.device import Bound, Buffer, Device, Event, Memory, Stream
from xpress_export.runtime.trace import Tracer

COMPUTE = "compute"
_MOST_GRAPHS = 64

logger = logging.getLogger(__name__)


class CudaEvent(Event):
    def __init__(self, cuda: Cuda, name: str) -> None:
        self._cuda, self.name = cuda, name
        self.handle = cuda.new_event(name)

    def synchronize(self) -> None:
        self._cuda.call("cudaEventSynchronize", self.handle, what=f"waiting for {self.name}")


@dataclass
class _Repeated:
    """Work that repeats. bounds, memories: what it uses. graph: once captured. runs_plain: capture was refused."""

    bounds: list[CudaBound] = field(default_factory=list)
    memories: set[Memory] = field(default_factory=set)
    graph: Any = None
    runs_plain: bool = False


class CudaStream(Stream):
    """handle: CUDA's stream. doing: the repeated work whose parts are being enqueued. num_graphs: captured."""

    def __init__(self, device: CudaDevice, name: str) -> None:
        self._device, self._cuda, self.name = device, device.cuda, name
        self.handle = self._cuda.new_stream(name)
        self.doing: _Repeated | None = None
        self.is_capturing = False
        self.num_graphs = 0
        self._repeated: OrderedDict[Hashable, _Repeated] = OrderedDict()

    def run(self, bound: Bound, label: str) -> None:
        assert isinstance(bound, CudaBound), "a graph of another device"
        assert self.name == COMPUTE, f"graphs run on the stream {COMPUTE!r}, not on {self.name!r}"
        self._use(*bound.reads, *bound.writes)
        if self.doing is not None:
            self.doing.bounds.append(bound)
        with self._device.span(self, label):
            bound.enqueue(self, label, repeats=self.doing is not None)

    def copy(self, to: Buffer, source: Buffer, label: str) -> None:
        self._use(to, source)
        with self._device.span(self, label):
            self._cuda.copy(to, source, self.handle, label)

    def _use(self, *buffers: Buffer) -> None:
        if self.doing is not None:
            self.doing.memories.update(buffer.memory for buffer in buffers)

    def record(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._cuda.call("cudaEventRecord", event.handle, self.handle, what=f"recording {event.name} on {self.name}")

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._cuda.call("cudaStreamWaitEvent", self.handle, event.handle, 0, what=f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        """Return when nothing is under way here."""
        self._cuda.call("cudaStreamSynchronize", self.handle, what=f"waiting for all work on {self.name}")

    # Work that repeats

    def repeat(self, key: Hashable, enqueue: Callable[[], None]) -> None:
        work = self._repeated.pop(key, None)
        if work is None:
            work = self._warm_up(enqueue)
        elif work.runs_plain:
            self._warm_up(enqueue)
        elif work.graph is None:
            work = self._capture(key, work, enqueue)
        self._repeated[key] = work
        if work.graph is not None:
            with self._device.span(self, _title(key)):
                what = f"launching the graph of {_title(key)}"
                self._cuda.call("cudaGraphLaunch", work.graph, self.handle, what=what)
        while len(self._repeated) > _MOST_GRAPHS:  # the one not used for longest
            self._drop(next(iter(self._repeated)))

    def _warm_up(self, enqueue: Callable[[], None]) -> _Repeated:
        """Run it as it is; libraries prepare and allocate here what they must not while they are captured."""
        work = _Repeated()
        self.doing = work
        try:
            enqueue()
        finally:
            self.doing = None
        return work

    def _capture(self, key: Hashable, work: _Repeated, enqueue: Callable[[], None]) -> _Repeated:
        """Capture it, to be launched, or run it as it is where that is refused."""
        try:
            if why := next(filter(None, (bound.why_not_captured(self) for bound in work.bounds)), None):
                raise EngineError(why)
            captured = _Repeated()
            self.doing, self.is_capturing = captured, True
            try:
                captured.graph = self._cuda.capture(self.handle, enqueue, f"capturing {_title(key)}")
            finally:
                self.doing, self.is_capturing = None, False
        except DeviceLostError:
            raise
        except NotReadyError:  # bound anew since the warm-up: that is over, this is the next one
            return self._warm_up(enqueue)
        except EngineError as error:
            logger.warning("%s runs without a CUDA graph from now on: %s", _title(key), error)
            work = self._warm_up(enqueue)
            work.runs_plain = True
            return work
        self.num_graphs += 1
        return captured

    def forget(self, memory: Memory | None = None) -> None:
        """Drop the repeated work that uses `memory`, or all of it; none of it may be under way."""
        for key in [key for key, work in self._repeated.items() if memory is None or memory in work.memories]:
            self._drop(key, waits=False)

    def _drop(self, key: Hashable, *, waits: bool = True) -> None:
        work = self._repeated.pop(key)
        self.num_graphs -= work.graph is not None
        if work.graph is not None and not self._cuda.is_lost:
            if waits:
                self.synchronize()
            self._cuda.call("cudaGraphExecDestroy", work.graph, what=f"dropping the graph of {_title(key)}")


class _DeviceMemory(CudaMemory):
    """Memory that a device keeps account of, and whose graphs end with it."""

    def __init__(self, device: CudaDevice, name: str, num_bytes: int, *, on_host: bool) -> None:
        super().__init__(device.cuda, name, num_bytes, on_host=on_host)
        self._device = device

    def free(self) -> None:
        self._device.forget(self)
        super().free()


@dataclass(frozen=True)
class _Span:
    stream: str
    label: str
    start: Any
    end: Any


class CudaDevice(Device):
    """A GPU. index: its number.

    backend: onnxruntime, tensorrt or tensorrt-rtx. ranges: show labels in Nsight Systems, through the package nvtx.
    host_code: let TensorRT run host code that a version-compatible plan brings along; only for plans of one's own. api,
    library: what stands in for `cuda.bindings.runtime` and the backend's module.
    """

    def __init__(
        self,
        index: int,
        backend: str,
        *,
        ranges: bool = False,
        host_code: bool = False,
        api: Any = None,
        library: Any = None,
    ) -> None:
        self.name, self.backend = f"cuda:{index}", backend
        self.cuda = Cuda(index, api)
        self.cuda.call("cudaFree", 0, what="opening it")  # creates this GPU's context in the process
        self._memories: set[_DeviceMemory] = set()
        self._streams: dict[str, CudaStream] = {}
        self._events: list[CudaEvent] = []
        self._spans, self._spare = deque[_Span](), list[Any]()
        self._zero, self._zero_s = None, 0.0
        self._annotate = _annotate() if ranges else None
        self.compute = self._new_stream(COMPUTE)
        self._load = _loader(self, backend, library, host_code)
        self._programs: list[CudaProgram] = []

    def load(self, path: Path, role: str) -> CudaProgram:
        program = self._load(path, role)
        self._programs.append(program)
        return program

    def empty(self, name: str, shape: tuple[int, ...], dtype: type) -> Buffer:
        memory = self._allocate(name, shape, dtype, on_host=False)
        what = f"setting {name} to zero"
        self.cuda.call("cudaMemsetAsync", memory.address, 0, memory.num_bytes, self.compute.handle, what=what)
        self.compute.synchronize()
        return Buffer.whole(memory, shape, dtype)

    def pinned(self, name: str, shape: tuple[int, ...], dtype: type) -> Buffer:
        return Buffer.whole(self._allocate(name, shape, dtype, on_host=True), shape, dtype)

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: type, *, on_host: bool) -> _DeviceMemory:
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        memory = _DeviceMemory(self, name, num_bytes, on_host=on_host)
        self._memories.add(memory)
        return memory

    def forget(self, memory: _DeviceMemory) -> None:
        """Memory is given back: no graph may reach it any more."""
        self._memories.discard(memory)
        for stream in self._streams.values():
            stream.forget(memory)

    def stream(self, name: str) -> CudaStream:
        return self.compute if name == COMPUTE else self._new_stream(name)

    def _new_stream(self, name: str) -> CudaStream:
        assert name not in self._streams, f"there is a stream {name!r} already"
        self._streams[name] = CudaStream(self, name)
        return self._streams[name]

    def event(self, name: str) -> CudaEvent:
        self._events.append(CudaEvent(self.cuda, name))
        return self._events[-1]

    def synchronize(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()

    def memory_info(self) -> tuple[int, int]:
        """Bytes free and in all, of the GPU, whoever uses them."""
        return self.cuda.memory_info()

    # Looking at it

    @contextlib.contextmanager
    def span(self, stream: CudaStream, label: str) -> Any:
        """What is enqueued within, as `label` in traces."""
        with contextlib.ExitStack() as stack:
            if self._annotate is not None:
                stack.enter_context(self._annotate(label))
            if self.tracer is None or stream.is_capturing:  # an event in a graph has no time that the host could read
                yield
                return
            start = self._mark(stream)
            try:
                yield
            except BaseException:
                self._spare.append(start)
                raise
            self._spans.append(_Span(stream.name, label, start, self._mark(stream)))

    def trace(self, tracer: Tracer | None) -> None:
        """Spans are placed by their distance from one event, whose time on the host is known."""
        self.take_spent()
        super().trace(tracer)
        if tracer is not None:
            self._zero = self._mark(self.compute)
            self.compute.synchronize()
            self._zero_s = time.perf_counter()

    @property
    def num_graphs(self) -> int:
        return sum(stream.num_graphs for stream in self._streams.values())

    def _mark(self, stream: CudaStream) -> Any:
        event = self._spare.pop() if self._spare else self.cuda.new_event("timing", timed=True)
        self.cuda.call("cudaEventRecord", event, stream.handle, what="recording a timing event")
        return event

    def take_spent(self) -> dict[str, float]:
        """Milliseconds on the GPU, by label, of what has completed since the last call; {} unless traced."""
        spent: dict[str, float] = {}
        while self._spans and self.cuda.has_passed(self._spans[0].end):
            span = self._spans.popleft()
            took = self._elapsed_ms(span.start, span.end, span.label)
            spent[span.label] = spent.get(span.label, 0.0) + took
            if self.tracer is not None:
                start = self._zero_s + self._elapsed_ms(self._zero, span.start, span.label) / 1e3
                self.tracer.add(span.stream, span.label, start, start + took / 1e3)
            self._spare += [span.start, span.end]
        return spent

    def _elapsed_ms(self, start: Any, end: Any, label: str) -> float:
        return float(self.cuda.call("cudaEventElapsedTime", start, end, what=f"timing {label}"))

    def close(self) -> None:
        """Give everything back, in the order in which one needs the other; nothing may be under way."""
        for stream in self._streams.values():
            stream.forget()
        for program in self._programs:
            program.close()
        for memory in list(self._memories):
            memory.free()
        timing = [event for span in self._spans for event in (span.start, span.end)] + self._spare
        timing += [self._zero] if self._zero is not None else []
        if not self.cuda.is_lost:
            for event in (*(event.handle for event in self._events), *timing):
                self.cuda.call("cudaEventDestroy", event, what="closing")
            for stream in self._streams.values():
                self.cuda.call("cudaStreamDestroy", stream.handle, what="closing")
        self._programs, self._events, self._streams = [], [], {}
        self._spans.clear()
        self._spare.clear()


def open_cuda(index: int, backend: str, **options: Any) -> CudaDevice:
    """GPU number `index`, ready to load what `backend` runs; options: of `CudaDevice`.

    Raises MissingDependencyError for a package that is not installed, EngineError for a GPU that is not there.
    """
    return CudaDevice(index, backend, **options)


def _loader(device: CudaDevice, backend: str, library: Any, host_code: bool) -> Callable[[Path, str], CudaProgram]:
    if backend == platforms.ONNX_RUNTIME:
        from xpress_export.runtime.cuda_onnxruntime import OnnxRuntimeLoader

        return OnnxRuntimeLoader(device, library)
    from xpress_export.runtime.cuda_tensorrt import TensorRtLoader

    return TensorRtLoader(device, backend, library, host_code=host_code)


def _annotate() -> Callable[[str], Any]:
    try:
        annotate: Callable[[str], Any] = importlib.import_module("nvtx").annotate
    except ImportError as err:
        raise MissingDependencyError("nvtx", "show ranges in Nsight Systems", "cuda") from err
    return annotate


def _title(key: Hashable) -> str:
    """A key's label: its first part."""
    return str(key[0] if isinstance(key, tuple) and key else key)
