"""A device for tests of what drives it: work runs late, in any order that streams and events allow, and gaps are found.

    SimulatedDevice(seed)           the order is drawn; the same calls and seed give the same order
    SimulatedDevice(order=order)    `schedules.every_order` hands out each order there is, for small cases
    SimulatedDevice(without=site)   one call that orders work is left out, to see that its absence is found

It computes what `device_cpu` computes, but an operation runs only when the host synchronizes or touches memory: then
all that this needs has run, and of the rest as much as the draw says. HazardError, at the call that completes the
mistake and naming both operations, for

    operations that use the same bytes, one to write, while neither waits for the other: on two streams, or the host's
    memory that is freed while in use, or used after it was freed; work that is under way when the device is closed
    outputs of a graph in memory of its inputs or of each other, other than caches, present_* on their own past_*
    copies that overlap themselves, `repeat` with other work than before, and anything but run and copy within it

This does not depend on the order that was drawn. Wrong numbers do: with `raises=False` hazards are only kept in
`hazards`, and what they spoil can be seen.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xpress_export import names
from xpress_export.runtime.backend import Graph
from xpress_export.runtime.device import Array, Bound, Buffer, Device, Event, Stream
from xpress_export.runtime.device_cpu import CpuBound, CpuProgram, HostMemory, array_of
from xpress_export.runtime.hazards import (
    HOST,
    Access,
    Clock,
    HazardError,
    History,
    Key,
    Operation,
    Region,
    covers,
    describe,
    difference,
    join,
    key_of,
)
from xpress_export.runtime.schedules import Order, RandomOrder

_MOST_REGIONS = 4096


@dataclass(frozen=True, order=True)
class Site:
    """A place in a program that orders work. call: record, wait or synchronize. of: an event, or the device."""

    call: str
    stream: str
    of: str
    where: str

    def __str__(self) -> str:
        return f"{self.where} {self.call} {self.of}" + (f" on {self.stream}" if self.stream != HOST else "")


class SimulatedMemory(HostMemory):
    """Host memory that is watched. number: 1, 2, ... of its device. freed: what freed it, if anything did."""

    def __init__(self, device: SimulatedDevice, number: int, name: str, num_bytes: int, *, on_host: bool) -> None:
        super().__init__(name, num_bytes, on_host=on_host)
        self.device, self.number, self.history = device, number, History()
        self.freed: Operation | None = None

    def read(self, buffer: Buffer) -> Array:
        with self.device.lock:
            self.device.host_access(f"read of {self.name!r}", buffer, writes=False)
            return super().read(buffer)

    def write(self, buffer: Buffer, values: Array) -> None:
        with self.device.lock:
            self.device.host_access(f"write to {self.name!r}", buffer, writes=True)
            super().write(buffer, values)

    def free(self) -> None:
        with self.device.lock:
            whole = Buffer.whole(self, (self.num_bytes,), np.uint8)
            self.freed = self.device.host_access(f"free of {self.name!r}", whole, writes=True)
            super().free()
            self.device.forget(self)


class SimulatedProgram(CpuProgram):
    """A graph whose buffers are looked at before they are bound."""

    def __init__(self, device: SimulatedDevice, graph: Graph) -> None:
        super().__init__(graph)
        self._device = device

    def bind(self, buffers: Mapping[str, Buffer]) -> CpuBound:
        with self._device.lock:
            for buffer in buffers.values():
                self._device.memory_of(buffer, f"bind of {self.role!r}")
            for name in self.outputs:
                self._check_output(name, buffers)
            return super().bind(buffers)

    def _check_output(self, name: str, buffers: Mapping[str, Buffer]) -> None:
        for other, buffer in buffers.items():
            is_cache = other in self.inputs and name == names.present_of(other)
            if other == name or (is_cache and key_of(buffer) == key_of(buffers[name])):
                continue
            if (found := self._device.overlap(buffers[name], buffer)) is not None:
                self._device.report(
                    f"bind of {self.role!r}: output {name} and {other} share bytes {found[0]} to {found[1]} of "
                    f"{buffer.name!r}; only a cache may be updated in place, all of it"
                )


class SimulatedEvent(Event):
    """clock: what the point that it marks comes after; empty before the first `record`."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self._device, self.name = device, name
        self.clock: Clock = {}

    def synchronize(self) -> None:
        with self._device.lock:
            self._device.refuse_in_repeat(f"synchronize of event {self.name!r}")
            if not self._device.leaves_out("synchronize", HOST, self.name):
                self._device.complete(self.clock)


@dataclass(frozen=True, eq=False)
class _Work:
    """One `run` or `copy`, so that it can be enqueued again. bound: None of a copy."""

    what: str
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    bound: CpuBound | None = None

    def uses(self, memory: SimulatedMemory) -> bool:
        return any(buffer.memory is memory for buffer in (*self.reads, *self.writes))

    def signature(self) -> tuple[object, ...]:
        """Equal for the same work on the same memory."""
        return self.what, *((buffer.memory, key_of(buffer)) for buffer in (*self.reads, *self.writes))

    def __str__(self) -> str:
        sides = (", ".join(map(_describe, side)) for side in (self.reads, self.writes))
        return f"{self.what} of {' into '.join(sides)}"


def _describe(buffer: Buffer) -> str:
    assert isinstance(buffer.memory, SimulatedMemory)
    return f"{buffer.name!r} {list(buffer.shape)} at {buffer.offset} of allocation {buffer.memory.number}"


class SimulatedStream(Stream):
    """clock: what is complete when all that was enqueued here is. pending: what has not run yet."""

    def __init__(self, device: SimulatedDevice, name: str) -> None:
        self._device, self.name = device, name
        self.clock: Clock = {name: 0}
        self.pending: deque[tuple[Operation, Callable[[], None]]] = deque()
        self.repeats: dict[Hashable, list[_Work] | str] = {}

    def run(self, bound: Bound, label: str) -> None:
        assert isinstance(bound, CpuBound)
        self._enqueue(_Work(f"run {label!r} of {bound.role}", bound.reads, bound.writes, bound))

    def copy(self, to: Buffer, source: Buffer, label: str) -> None:
        assert (to.shape, to.dtype) == (source.shape, source.dtype), (
            f"{source.name} into {to.name}: other shape or dtype"
        )
        with self._device.lock:
            if (found := self._device.overlap(to, source)) is not None:
                self._device.report(
                    f"copy {label!r} on stream {self.name} overlaps itself in bytes {found[0]} to {found[1]} "
                    f"of {to.name!r}"
                )
            self._enqueue(_Work(f"copy {label!r}", (source,), (to,)))

    def record(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        with self._device.lock:
            self._device.refuse_in_repeat(f"record of event {event.name!r}")
            if not self._device.leaves_out("record", self.name, event.name):
                event.clock = dict(self.clock)

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        with self._device.lock:
            self._device.refuse_in_repeat(f"wait for event {event.name!r}")
            if not self._device.leaves_out("wait", self.name, event.name):
                join(self.clock, event.clock)

    def repeat(self, key: Hashable, enqueue: Callable[[], None]) -> None:
        with self._device.lock:
            known = self.repeats.get(key)
            if isinstance(known, str):
                self._device.report(
                    f"repeat of {key!r} on stream {self.name}: it was first used on memory that {known}"
                )
            elif known is not None and self._device.order.pick(("repeat anew", "repeat as before")):
                for work in known:
                    self._enqueue(work)
                return
            with self._device.repeating(self, key) as made:
                enqueue()
            if isinstance(known, list) and [w.signature() for w in known] != [w.signature() for w in made]:
                what = difference([str(work) for work in known], [str(work) for work in made])
                self._device.report(f"repeat of {key!r} on stream {self.name} is not what it was: {what}")
            self.repeats[key] = made

    def _enqueue(self, work: _Work) -> None:
        with self._device.lock:
            self._device.note(self, work)
            join(self.clock, self._device.known)
            self.clock[self.name] += 1
            operation = Operation(work.what, self.name, self.clock[self.name], dict(self.clock))
            try:
                self._device.check(operation, work.reads, work.writes)
            except HazardError:
                self.clock[self.name] -= 1
                raise
            if work.bound is not None:
                call = work.bound.run
            else:
                call = functools.partial(np.copyto, array_of(work.writes[0]), array_of(work.reads[0]))
            self.pending.append((operation, call))


class SimulatedDevice(Device):
    """See the module's docstring.

    order: instead of a seed, and may be set anew at any time. lock: while a thread holds it, no other gets anything
    done here. known: the clock of the host. sites: how often each place that orders work was reached.
    """

    name, backend = "cpu", "onnxruntime"

    def __init__(
        self, seed: int = 0, *, order: Order | None = None, without: Site | None = None, raises: bool = True
    ) -> None:
        self.order: Order = RandomOrder(seed) if order is None else order
        self.lock = threading.RLock()
        self.known: Clock = {}
        self.sites: Counter[Site] = Counter()
        self.hazards: list[HazardError] = []
        self._without, self._raises = without, raises
        self._streams: dict[str, SimulatedStream] = {}
        self._done: Clock = {}
        self._num_host = self._num_allocated = 0
        self._repeating: tuple[SimulatedStream, Hashable, list[_Work]] | None = None
        self._regions: dict[Key, Region] = {}
        self._failure: Exception | None = None
        self._is_closed = False

    # What a device does

    def load(self, path: Path, role: str) -> SimulatedProgram:
        return SimulatedProgram(self, Graph(path, role, num_threads=1))

    def empty(self, name: str, shape: tuple[int, ...], dtype: type) -> Buffer:
        return self._allocate(name, shape, dtype, on_host=False)

    def pinned(self, name: str, shape: tuple[int, ...], dtype: type) -> Buffer:
        return self._allocate(name, shape, dtype, on_host=True)

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: type, *, on_host: bool) -> Buffer:
        with self.lock:
            self.refuse_in_repeat(f"allocation of {name!r}")
            num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            self._num_allocated += 1
            memory = SimulatedMemory(self, self._num_allocated, name, num_bytes, on_host=on_host)
            return Buffer.whole(memory, shape, dtype)

    def stream(self, name: str) -> SimulatedStream:
        with self.lock:
            while name in (*self._streams, HOST):
                name += "'"
            self._streams[name] = SimulatedStream(self, name)
            return self._streams[name]

    def event(self, name: str) -> SimulatedEvent:
        return SimulatedEvent(self, name)

    def synchronize(self) -> None:
        with self.lock:
            self.refuse_in_repeat("synchronize of the device")
            if not self.leaves_out("synchronize", HOST, "device"):
                self.complete(self._enqueued())

    def close(self) -> None:
        with self.lock:
            if not covers(self.known, self._enqueued()):
                running = [s.name for s in self._streams.values() if self.known.get(s.name, 0) < s.clock[s.name]]
                self.report(
                    f"close of the device while the host does not know streams {', '.join(running)} to be complete; "
                    f"synchronize the device first"
                )
            self._is_closed = True

    @property
    def num_done(self) -> int:
        """Operations that have run."""
        return sum(self._done.values())

    # The host's side

    def host_access(self, what: str, buffer: Buffer, *, writes: bool) -> Operation:
        """What the host does to memory: all that it knows to be complete has run, anything else may have."""
        self.refuse_in_repeat(what)
        self._num_host += 1
        operation = Operation(what, HOST, self._num_host, dict(self.known))
        memory = self.memory_of(buffer, operation)
        memory.history.forget(self.known)
        self._run_some()
        self._meet(memory, Access(operation, self._region(buffer), writes))
        return operation

    def complete(self, clock: Clock) -> None:
        """The host waits until what `clock` counts is complete."""
        while not covers(self._done, clock):
            ready = self._ready()
            self._step(ready[self.order.pick(ready) if len(ready) > 1 else 0])
        join(self.known, clock)
        if (failure := self._failure) is not None:
            self._failure = None
            raise failure

    def leaves_out(self, call: str, stream: str, of: str) -> bool:
        """Count a call that orders work; whether it is the one to leave out."""
        frame = sys._getframe(2)  # who called the stream, the event or the device
        site = Site(call, stream, of, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        self.sites[site] += 1
        return site == self._without

    # Order

    def _enqueued(self) -> Clock:
        return {stream.name: stream.clock[stream.name] for stream in self._streams.values()}

    def _ready(self) -> list[str]:
        """Streams whose next operation has all that it waits for."""
        found = []
        for name, stream in self._streams.items():
            if stream.pending:
                clock = stream.pending[0][0].clock
                if all(n <= self._done.get(other, 0) for other, n in clock.items() if other != name):
                    found.append(name)
        return found

    def _run_some(self) -> None:
        while ready := self._ready():
            picked = self.order.pick([*ready, HOST])
            if picked == len(ready):
                return
            self._step(ready[picked])

    def _step(self, name: str) -> None:
        """Run the next operation of a stream. What it raises, the host hears of when it synchronizes."""
        operation, call = self._streams[name].pending.popleft()
        self._done[name] = operation.number
        try:
            call()
        except Exception as error:
            self._failure = self._failure or error

    # Memory

    def check(self, operation: Operation, reads: Sequence[Buffer], writes: Sequence[Buffer]) -> None:
        """Look for what an operation must not meet, and remember what it touches."""
        accesses = []
        for buffers, is_write in ((reads, False), (writes, True)):
            for buffer in buffers:
                memory, region = self.memory_of(buffer, operation), self._region(buffer)
                if len(region.starts):
                    accesses.append((memory, Access(operation, region, is_write)))
        for memory, access in accesses:
            memory.history.forget(self.known)
            self._meet(memory, access)
        for memory, access in accesses:
            memory.history.add(access)

    def _meet(self, memory: SimulatedMemory, access: Access) -> None:
        if (conflict := memory.history.conflict(access)) is not None:
            self.report(describe(memory.name, conflict[0], access, conflict[1]))

    def memory_of(self, buffer: Buffer, user: object) -> SimulatedMemory:
        """Its memory, which has to be of this device and there."""
        memory = buffer.memory
        assert isinstance(memory, SimulatedMemory) and memory.device is self, f"{buffer.name} is of another device"
        if memory.freed is not None:
            raise self._found(f"{user} uses {memory.name!r} after {memory.freed}")
        return memory

    def overlap(self, one: Buffer, other: Buffer) -> tuple[int, int] | None:
        """Bytes that two buffers share."""
        return self._region(one).overlap(self._region(other)) if one.memory is other.memory else None

    def _region(self, buffer: Buffer) -> Region:
        key = key_of(buffer)
        if key not in self._regions:
            if len(self._regions) >= _MOST_REGIONS:
                self._regions.clear()
            self._regions[key] = Region(buffer)
        return self._regions[key]

    def forget(self, memory: SimulatedMemory) -> None:
        """Let go of repeated work that used freed memory."""
        for stream in self._streams.values():
            for key, known in stream.repeats.items():
                if not isinstance(known, str) and any(work.uses(memory) for work in known):
                    stream.repeats[key] = f"{memory.freed} took"

    # Rules

    def report(self, message: str) -> None:
        error = self._found(message)
        if self._raises:
            raise error

    def _found(self, message: str) -> HazardError:
        self.hazards.append(HazardError(message))
        return self.hazards[-1]

    def note(self, stream: SimulatedStream, work: _Work) -> None:
        """Keep what is enqueued within `repeat`."""
        if self._is_closed:
            raise self._found(f"{work.what} on stream {stream.name} after the device was closed")
        if self._repeating is not None:
            only, key, made = self._repeating
            if stream is not only:
                self.report(
                    f"{work.what} on stream {stream.name} within repeat of {key!r} on stream {only.name}: work of "
                    f"other streams cannot be repeated with it; enqueue it outside"
                )
            made.append(work)

    def refuse_in_repeat(self, what: str) -> None:
        if self._repeating is not None:
            stream, key, _ = self._repeating
            self.report(f"{what} within repeat of {key!r} on stream {stream.name}: only run and copy can be repeated")

    @contextmanager
    def repeating(self, stream: SimulatedStream, key: Hashable) -> Iterator[list[_Work]]:
        """While work is enqueued that has to be the same each time."""
        self.refuse_in_repeat(f"repeat of {key!r}")
        made: list[_Work] = []
        self._repeating = (stream, key, made)
        try:
            yield made
        finally:
            self._repeating = None
