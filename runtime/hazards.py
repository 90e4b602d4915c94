"""Which operations are ordered, and which bytes each of them touches: what it takes to find a race whatever ran first.

    Clock       how much of each stream is complete: operations by stream, {stream: count}
    Operation   something enqueued on a stream, or done by the host, and the clock that it waits for
    Region      the bytes of a buffer
    History     the accesses of one memory that the host does not know to be complete

An operation follows another if its clock counts it. Two that touch the same bytes, one of them to write, and of which
neither follows the other, are a hazard: they may run in either order, or at once, even if today they never do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xpress_export.errors import EngineError
from xpress_export.runtime.device import Array, Buffer

HOST = "host"
Clock = dict[str, int]
Key = tuple[object, ...]


class HazardError(EngineError):
    """Work that nothing orders uses the same memory, or a promise of the device's interface was not kept."""


def join(clock: Clock, other: Clock) -> None:
    """Let `clock` count everything that `other` counts."""
    for stream, count in other.items():
        if count > clock.get(stream, 0):
            clock[stream] = count


def covers(clock: Clock, other: Clock) -> bool:
    """Whether everything that `other` counts is counted by `clock`."""
    return all(clock.get(stream, 0) >= count for stream, count in other.items())


@dataclass(frozen=True, eq=False)
class Operation:
    """what: as errors name it. number: 1, 2, ... in its stream. clock: what is complete when it is, itself included."""

    what: str
    stream: str
    number: int
    clock: Clock

    def follows(self, other: Operation) -> bool:
        return self.clock.get(other.stream, 0) >= other.number

    def __str__(self) -> str:
        return f"{self.what} (#{self.number} of {place(self.stream)})"


def place(stream: str) -> str:
    return "the host" if stream == HOST else f"stream {stream}"


class Region:
    """The bytes of a buffer within its memory, as sorted pieces that do not touch each other.

    key: equal for buffers of the same bytes and layout.
    """

    def __init__(self, buffer: Buffer) -> None:
        self.key = key_of(buffer)
        pieces = np.array(buffer.pieces(), np.int64).reshape(-1, 2)
        starts, ends = pieces[:, 0], pieces.sum(1)
        is_first = np.append(True, starts[1:] != ends[:-1])[: len(starts)]
        self.starts: Array = starts[is_first]
        self.ends: Array = np.maximum.reduceat(ends, np.flatnonzero(is_first)) if len(ends) else ends
        self.first, self.last = (int(starts[0]), int(ends[-1])) if len(ends) else (0, 0)

    def overlap(self, other: Region) -> tuple[int, int] | None:
        """The first bytes [start, end) that are of both."""
        if self.last <= other.first or other.last <= self.first:
            return None
        at = np.searchsorted(other.ends, self.starts, side="right")  # the first piece that ends after mine starts
        inside = at < len(other.ends)
        hit = inside & (other.starts[np.where(inside, at, 0)] < self.ends)
        if not hit.any():
            return None
        mine = int(hit.argmax())
        theirs = int(at[mine])
        return max(int(self.starts[mine]), int(other.starts[theirs])), min(
            int(self.ends[mine]), int(other.ends[theirs])
        )


def key_of(buffer: Buffer) -> Key:
    return buffer.offset, buffer.shape, buffer.strides, buffer.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Access:
    operation: Operation
    region: Region
    writes: bool

    @property
    def verb(self) -> str:
        return "writes" if self.writes else "reads"


class History:
    """What may still be under way in one memory.

    A stream runs in order, so of its accesses of one kind to one region only the last counts: whatever follows that
    one follows those before it. So this grows with the regions that are in use, not with the work that was done.
    """

    def __init__(self) -> None:
        self._accesses: dict[tuple[str, Key, bool], Access] = {}

    def __len__(self) -> int:
        return len(self._accesses)

    def forget(self, known: Clock) -> None:
        """Drop what the host knows to be complete: whatever is enqueued from now on follows it."""
        self._accesses = {
            key: access
            for key, access in self._accesses.items()
            if known.get(access.operation.stream, 0) < access.operation.number
        }

    def conflict(self, access: Access) -> tuple[Access, tuple[int, int]] | None:
        """An access that this one does not follow and must not meet, and the bytes of both."""
        for earlier in self._accesses.values():
            if (access.writes or earlier.writes) and not access.operation.follows(earlier.operation):
                found = earlier.region.overlap(access.region)
                if found is not None:
                    return earlier, found
        return None

    def add(self, access: Access) -> None:
        self._accesses[access.operation.stream, access.region.key, access.writes] = access


def describe(memory: str, earlier: Access, later: Access, found: tuple[int, int]) -> str:
    """What is wrong between two accesses of a memory, and what would order them."""
    first, second = earlier.operation, later.operation
    point = f"an event that is recorded on stream {first.stream} after #{first.number}"
    cure = f"the host has to synchronize {point}"
    if second.stream != HOST:
        cure = f"stream {second.stream} has to wait for {point}, or {cure}"
    return (
        f"{second} {later.verb} bytes {found[0]} to {found[1]} of {memory!r}, which {first} {earlier.verb}, "
        f"and nothing orders the two: {cure} first"
    )


def difference(before: Sequence[str], now: Sequence[str]) -> str:
    """Where two sequences part."""
    for i, (was, has) in enumerate(zip(before, now, strict=False)):
        if was != has:
            return f"its step {i} was {was} and is now {has}"
    return f"it had {len(before)} steps and has now {len(now)}"
