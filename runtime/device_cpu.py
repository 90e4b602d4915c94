"""ONNX Runtime on CPU as a device: every call runs at once, so streams and events have nothing left to order."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from xpress_export.runtime.backend import Graph
from xpress_export.runtime.device import Array, Bound, Buffer, Device, Event, Memory, Program, Stream


class HostMemory(Memory):
    """Plain memory; pages that were never touched cost nothing."""

    def __init__(self, name: str, num_bytes: int, *, on_host: bool) -> None:
        self.name, self.num_bytes, self.on_host = name, num_bytes, on_host
        self._bytes = np.zeros(num_bytes, np.uint8)

    def array(self, buffer: Buffer) -> Array:
        """A buffer's numbers themselves, not a copy."""
        return np.ndarray(buffer.shape, buffer.dtype, self._bytes, buffer.offset, buffer.strides)

    def read(self, buffer: Buffer) -> Array:
        assert self.on_host, f"the host reads {self.name}, which is the device's"
        return self.array(buffer).copy()

    def write(self, buffer: Buffer, values: Array) -> None:
        assert self.on_host, f"the host writes {self.name}, which is the device's"
        self.array(buffer)[...] = values

    def free(self) -> None:
        self._bytes = np.zeros(0, np.uint8)


def array_of(buffer: Buffer) -> Array:
    """The numbers of a buffer in host memory."""
    assert isinstance(buffer.memory, HostMemory)
    return buffer.memory.array(buffer)


class CpuBound(Bound):
    """An ONNX Runtime binding, made once."""

    def __init__(self, program: CpuProgram, buffers: Mapping[str, Buffer]) -> None:
        self.role = program.role
        self.reads = tuple(buffers[name] for name in program.inputs)
        self.writes = tuple(buffers[name] for name in program.outputs)
        self._call = program.graph.call()
        self._arrays = {name: array_of(buffer) for name, buffer in buffers.items()}  # kept alive
        for name in program.inputs:
            self._call.bind_input(name, self._arrays[name])
        for name in program.outputs:
            self._call.bind_output(name, self._arrays[name])

    def run(self) -> None:
        self._call.run()


class CpuProgram(Program):
    def __init__(self, graph: Graph) -> None:
        self.graph, self.role = graph, graph.role
        session = graph.session
        self.inputs = {value.name: tuple(value.shape) for value in session.get_inputs()}
        self.outputs = {value.name: tuple(value.shape) for value in session.get_outputs()}

    def bind(self, buffers: Mapping[str, Buffer]) -> CpuBound:
        return CpuBound(self, buffers)


class CpuEvent(Event):
    def __init__(self, name: str) -> None:
        self.name = name

    def synchronize(self) -> None:
        pass


class CpuStream(Stream):
    def __init__(self, device: CpuDevice, name: str) -> None:
        self._device, self.name = device, name

    def run(self, bound: Bound, label: str) -> None:
        assert isinstance(bound, CpuBound)
        start = time.perf_counter()
        bound.run()
        self._device.spent(self.name, label, start)

    def copy(self, to: Buffer, source: Buffer, label: str) -> None:
        start = time.perf_counter()
        array_of(to)[...] = array_of(source)
        self._device.spent(self.name, label, start)

    def record(self, event: Event) -> None:
        pass

    def wait(self, event: Event) -> None:
        pass


class CpuDevice(Device):
    """num_threads: of ONNX Runtime, None for one per core."""

    name, backend, is_late = "cpu", "onnxruntime", False

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads
        self._spent_ms: dict[str, float] = {}

    def load(self, path: Path, role: str) -> CpuProgram:
        return CpuProgram(Graph(path, role, self._num_threads))

    def empty(self, name: str, shape: tuple[int, ...], dtype: type) -> Buffer:
        return self._allocate(name, shape, dtype, on_host=False)

    def pinned(self, name: str, shape: tuple[int, ...], dtype: type) -> Buffer:
        return self._allocate(name, shape, dtype, on_host=True)

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: type, *, on_host: bool) -> Buffer:
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return Buffer.whole(HostMemory(name, num_bytes, on_host=on_host), shape, dtype)

    def stream(self, name: str) -> CpuStream:
        return CpuStream(self, name)

    def event(self, name: str) -> CpuEvent:
        return CpuEvent(name)

    def synchronize(self) -> None:
        pass

    def spent(self, stream: str, label: str, start: float) -> None:
        """Count the time since `start` for a label."""
        end = time.perf_counter()
        self._spent_ms[label] = self._spent_ms.get(label, 0.0) + 1e3 * (end - start)
        if self.tracer is not None:
            self.tracer.add(stream, label, start, end)

    def take_spent(self) -> dict[str, float]:
        spent, self._spent_ms = self._spent_ms, {}
        return spent

    def close(self) -> None:
        pass  # memory goes with the buffers
