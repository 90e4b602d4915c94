"""Memory, streams and events of a device, as narrow as a decode cycle needs them.

    device.load(path, role)           a graph, ready to run                               Program
    program.bind({name: buffer})      that graph on fixed buffers                         Bound
    device.empty / device.pinned      memory of the device; memory that both sides reach  Buffer
    stream.run(bound, label)          enqueue a graph
    stream.copy(to, source, label)    enqueue a copy between any two buffers
    stream.record(event)              mark this point of the stream
    stream.wait(event)                what is enqueued here from now on runs after that point
    stream.repeat(key, enqueue)       what `enqueue` puts on this stream, the same every time: a CUDA graph where
                                      there are such
    event.synchronize()               the host waits for that point
    pinned.read(), pinned.write(x)    the host's side of pinned memory

Nothing is complete when a call returns. Work on one stream runs in the order it was enqueued, work on two streams in
any order that their events allow; the host may touch pinned memory only when no work that uses it is under way.
`device_cpu` runs everything at once, `device_cuda` on a GPU, `simulator` in any order that is allowed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from xpress_export.runtime.trace import Tracer

Array = NDArray[Any]
DTYPES: Mapping[str, type] = {"float32": np.float32, "float16": np.float16, "int64": np.int64}


class Memory(ABC):
    """One allocation. name: what it holds. on_host: pinned, so that `Buffer.read` and `write` may be used."""

    name: str
    num_bytes: int
    on_host: bool

    @abstractmethod
    def read(self, buffer: Buffer) -> Array:
        """A copy of what a buffer in this memory holds; pinned memory only."""

    @abstractmethod
    def write(self, buffer: Buffer, values: Array) -> None:
        """Set what a buffer in this memory holds; pinned memory only."""

    @abstractmethod
    def free(self) -> None:
        """Give it back; no work that uses it may be under way."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """An array, or a rectangular part of one, in a device's memory. offset and strides: bytes."""

    memory: Memory
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def whole(cls, memory: Memory, shape: tuple[int, ...], dtype: type) -> Self:
        """A C-contiguous array at the start of `memory`."""
        kind = np.dtype(dtype)
        return cls(memory, kind, shape, _contiguous(shape, kind.itemsize))

    def __getitem__(self, key: slice | tuple[slice, ...]) -> Buffer:
        """A part of it: slices of the leading axes, without steps."""
        offset, shape = self.offset, list(self.shape)
        for axis, part in enumerate(key if isinstance(key, tuple) else (key,)):
            start, stop, step = part.indices(shape[axis])
            assert step == 1, "a part of a buffer has no steps"
            offset += start * self.strides[axis]
            shape[axis] = max(0, stop - start)
        return Buffer(self.memory, self.dtype, tuple(shape), self.strides, offset)

    def reshape(self, *shape: int) -> Buffer:
        """The same numbers in another shape; contiguous buffers only."""
        assert self.is_contiguous and math.prod(shape) == math.prod(self.shape), f"{self.shape} as {shape}"
        return Buffer(self.memory, self.dtype, shape, _contiguous(shape, self.dtype.itemsize), self.offset)

    @property
    def name(self) -> str:
        return self.memory.name

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        wanted = _contiguous(self.shape, self.dtype.itemsize)
        return all(n == 1 or have == want for n, have, want in zip(self.shape, self.strides, wanted, strict=True))

    def pieces(self) -> list[tuple[int, int]]:
        """The (offset, bytes) of its contiguous pieces, in order."""
        axis, length = len(self.shape), self.dtype.itemsize
        while axis and (self.shape[axis - 1] == 1 or self.strides[axis - 1] == length):
            axis -= 1
            length *= self.shape[axis]
        starts = [self.offset]
        for n, stride in zip(self.shape[:axis], self.strides[:axis], strict=True):
            starts = [start + i * stride for start in starts for i in range(n)]
        return [(start, length) for start in starts] if length else []

    def read(self) -> Array:
        """A copy of its contents; pinned memory only, and no work that writes it may be under way."""
        return self.memory.read(self)

    def write(self, values: Any) -> None:
        """Set its contents; pinned memory only, and no work that uses it may be under way."""
        array = np.asarray(values, self.dtype)
        assert array.shape == self.shape, f"{self.name}: {array.shape} into {self.shape}"
        self.memory.write(self, array)


def _contiguous(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    strides = []
    for n in reversed(shape):
        strides.append(item)
        item *= n
    return tuple(reversed(strides))


class Bound(ABC):
    """A graph on fixed buffers. reads, writes: those buffers; a cache that is updated in place is among both.

    Its owner may forget it while it is under way: what the device needs then, the device keeps.
    """

    role: str
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]


class Program(ABC):
    """A loaded graph. inputs, outputs: the shape of each by name, ints and symbols."""

    role: str
    inputs: Mapping[str, tuple[int | str, ...]]
    outputs: Mapping[str, tuple[int | str, ...]]

    @abstractmethod
    def bind(self, buffers: Mapping[str, Buffer]) -> Bound:
        """Fix the buffer of every input and output. Raises EngineError where a shape is not admitted."""

    def size(self, name: str, axis: int) -> int | None:
        """A dimension of an input or output, None where it is dynamic."""
        found = {**self.inputs, **self.outputs}[name][axis]
        return found if isinstance(found, int) else None


class Event(ABC):
    """A point of a stream. Before the first `record` it counts as passed."""

    name: str

    @abstractmethod
    def synchronize(self) -> None:
        """Return when the point is passed. Raises EngineError for what failed on the way, also asynchronously."""


class Stream(ABC):
    """A queue of work. Every method enqueues and returns."""

    name: str

    @abstractmethod
    def run(self, bound: Bound, label: str) -> None:
        """Run a graph on its buffers. label: its stage, in traces."""

    @abstractmethod
    def copy(self, to: Buffer, source: Buffer, label: str) -> None:
        """Copy between buffers of one shape and dtype, which need not be contiguous."""

    @abstractmethod
    def record(self, event: Event) -> None:
        """Move `event` to this point."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Run what follows after the point that `event` marks now."""

    def repeat(self, key: Hashable, enqueue: Callable[[], None]) -> None:
        """Enqueue what `enqueue` does: `run` and `copy` on this stream alone, always the same for one key."""
        enqueue()


class Device(ABC):
    """Where graphs run. name: as `Runtime.open` takes it. backend: what runs them. tracer: where work is noted.

    is_late: work goes on after the call that enqueued it, so that the host has something to gain from not waiting.
    """

    name: str
    backend: str
    is_late: bool = True
    tracer: Tracer | None = None

    @abstractmethod
    def load(self, path: Path, role: str) -> Program:
        """Load a graph or engine file. Raises BundleError if it cannot be, and says why."""

    @abstractmethod
    def empty(self, name: str, shape: tuple[int, ...], dtype: type) -> Buffer:
        """Memory of the device, zero. Raises EngineError when there is none left."""

    @abstractmethod
    def pinned(self, name: str, shape: tuple[int, ...], dtype: type) -> Buffer:
        """Memory that the host reads and writes and the device copies from and to without help, zero."""

    @abstractmethod
    def stream(self, name: str) -> Stream:
        """A new stream; it waits for no other by itself."""

    @abstractmethod
    def event(self, name: str) -> Event:
        """A new event."""

    @abstractmethod
    def synchronize(self) -> None:
        """Return when nothing is under way on any stream of this device; for opening, growing and closing."""

    def trace(self, tracer: Tracer | None) -> None:
        """Note all work in `tracer` from now on, or no longer."""
        self.tracer = tracer

    @property
    def num_graphs(self) -> int:
        """Pieces of work that were captured, and are launched as one."""
        return 0

    def memory_info(self) -> tuple[int, int] | None:
        """Bytes free and in all, where the device knows."""
        return None

    def take_spent(self) -> dict[str, float]:
        """Milliseconds by label since the last call; nothing where work takes its time out of the host's sight."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Give everything back; nothing may be under way."""
