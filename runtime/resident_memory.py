"""Everything a device-decided cycle works on, allocated before it runs: state, reports, caches, scratch, uploads.

    state     ids [slots, 1 + n]   what the next verify step reads: anchor and draft tokens
              first_ids [slots, 1] its first column, for cycles without drafts
              num_given [slots]    tokens of ids that are known to be right: 1 while decoding, 0 for an idle slot
              write_index [slots]  committed rows of the caches
    report    next_token           the target's own token after each row
              num_committed        rows that a cycle committed
    caches    past/present of target and drafter, updated in place
    scratch   what one graph of a cycle hands to the next

There are two states and two reports, and cycles alternate: a cycle reads one state and writes the other, and the
report of a cycle can travel to the host while the next cycle fills the other. All numbers are int64 but the floats of
the models. n: draft tokens of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from xpress_export import names
from xpress_export.errors import EngineError
from xpress_export.manifest import Manifest
from xpress_export.runtime.device import DTYPES, Buffer, Device, Event, Program, Stream

FIRST_CAPACITY = 256
_NUM_UPLOADS = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a resident runtime. num_drafts: n, 0 without a drafter. chunk: most prompt tokens of one call."""

    num_slots: int
    num_drafts: int
    first_slot: int
    mask_token_id: int
    max_context: int
    chunk: int
    dtype: type

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        *,
        num_slots: int,
        chunk: int,
        max_drafts: int | None = None,
        max_context: int | None = None,
    ) -> Self:
        """The sizes of a bundle. max_drafts: None, all of the drafter's block. max_context: None, the bundle's."""
        draft = manifest.draft
        most = draft.num_draft_tokens if draft else 0
        return cls(
            num_slots=num_slots,
            num_drafts=most if max_drafts is None else min(most, max_drafts),
            first_slot=draft.first_slot if draft else 0,
            mask_token_id=draft.mask_token_id if draft else 0,
            max_context=manifest.max_context if max_context is None else max_context,
            chunk=chunk,
            dtype=cache_dtype(manifest),
        )

    @property
    def width(self) -> int:
        """Rows of a verify step."""
        return 1 + self.num_drafts

    @property
    def num_block(self) -> int:
        return self.num_drafts + self.first_slot

    @property
    def most_rows(self) -> int:
        """Rows of a cache: the context, one prompt chunk, or two cycles that nobody will read any more."""
        return self.max_context + max(self.chunk, 2 * self.width)


def cache_dtype(manifest: Manifest) -> type:
    """The type of keys, values and hidden states in a bundle's graphs."""
    return DTYPES[next(t.dtype for t in manifest.graphs[names.TARGET].inputs if t.name == names.past_key(0))]


@dataclass(frozen=True)
class State:
    """See the module's docstring."""

    ids: Buffer
    first_ids: Buffer
    num_given: Buffer
    write_index: Buffer

    def rows(self, first: int, last: int) -> tuple[Buffer, ...]:
        return tuple(part[first:last] for part in (self.ids, self.first_ids, self.num_given, self.write_index))


@dataclass(frozen=True)
class Report:
    """On the device, and its pinned copy. verified, copied: events between the two and the host."""

    next_token: Buffer
    num_committed: Buffer
    host_next_token: Buffer
    host_num_committed: Buffer
    verified: Event
    copied: Event


class Caches:
    """The KV caches of one or more graphs, by input name; [slots, H, C, D] each. C grows where no graph fixes it."""

    def __init__(self, device: Device, programs: Iterable[Program], shape: Shape) -> None:
        self._device, self._shape = device, shape
        self._dims: dict[str, tuple[int, int]] = {}
        fixed = set()
        for program in programs:
            for name in filter(names.is_past, program.inputs):
                heads, size = program.size(name, 1), program.size(name, 3)
                assert heads is not None and size is not None
                self._dims[_key(program, name)] = heads, size
                fixed.add(program.size(name, 2))
        self.bytes_per_row = sum(h * d for h, d in self._dims.values()) * np.dtype(shape.dtype).itemsize
        capacity = fixed.pop()
        if fixed:
            raise EngineError("the graphs of this bundle have caches of different sizes; compile them together")
        self.is_static = capacity is not None
        if capacity is not None and capacity < 2 * shape.width + 2:
            raise EngineError(
                f"the engine's cache has {capacity} rows, too few for blocks of {shape.num_drafts} drafts"
            )
        self.version = 0
        self.capacity = min(FIRST_CAPACITY, shape.most_rows) if capacity is None else capacity
        self._buffers = self._allocate(self.capacity)

    def _allocate(self, capacity: int) -> dict[str, Buffer]:
        slots, dtype = self._shape.num_slots, self._shape.dtype
        return {name: self._device.empty(name, (slots, h, capacity, d), dtype) for name, (h, d) in self._dims.items()}

    def of(self, program: Program, first: int, last: int) -> dict[str, Buffer]:
        """Inputs and outputs of a graph for slots first .. last - 1, the same memory for both."""
        found: dict[str, Buffer] = {}
        for name in filter(names.is_past, program.inputs):
            found[name] = found[names.present_of(name)] = self._buffers[_key(program, name)][first:last]
        return found

    def reserve(self, num_rows: int, used: int, stream: Stream) -> None:
        """Make room for `num_rows` rows in each slot, keeping the first `used`."""
        if num_rows <= self.capacity or self.is_static:
            return
        assert num_rows <= self._shape.most_rows, f"{num_rows} rows asked of at most {self._shape.most_rows}"
        self._resize(min(self._shape.most_rows, max(num_rows, 2 * self.capacity)), used, stream)

    def shrink(self, stream: Stream) -> None:
        """Give back what growing took; nothing is kept."""
        first = min(FIRST_CAPACITY, self._shape.most_rows)
        if not self.is_static and self.capacity > first:
            self._resize(first, 0, stream)

    def _resize(self, capacity: int, used: int, stream: Stream) -> None:
        used = min(used, self.capacity, capacity)
        old, self._buffers = self._buffers, self._allocate(capacity)
        for name, buffer in old.items():
            stream.copy(self._buffers[name][:, :, :used], buffer[:, :, :used], "grow")
        self._device.synchronize()
        for buffer in old.values():
            buffer.memory.free()
        self.capacity = capacity
        self.version += 1

    def move(self, source: int, to: int, num_rows: int, stream: Stream) -> None:
        """Copy the first `num_rows` rows of one slot to another."""
        for buffer in self._buffers.values():
            rows = slice(0, num_rows)
            stream.copy(buffer[to : to + 1, :, rows], buffer[source : source + 1, :, rows], "move")


def _key(program: Program, name: str) -> str:
    """The drafter's own graph calls its caches what the target calls its; a step has both."""
    return names.of_drafter(name) if program.role == names.DRAFTER else name


class Uploads:
    """Integers from the host into device buffers: a ring of pinned memory, each piece reused when it was read."""

    def __init__(self, device: Device, most: int) -> None:
        self._pieces = [
            (device.pinned(f"upload {i}", (most,), np.int64), device.event(f"uploaded {i}"))
            for i in range(_NUM_UPLOADS)
        ]
        self._next = 0

    def send(self, stream: Stream, values: Sequence[tuple[Buffer, Sequence[int]]]) -> None:
        """Enqueue copies of `values` into their buffers."""
        pinned, uploaded = self._pieces[self._next]
        self._next = (self._next + 1) % _NUM_UPLOADS
        uploaded.synchronize()
        start = 0
        for buffer, numbers in values:
            count = math.prod(buffer.shape)
            piece = pinned[start : start + count]
            piece.write(np.reshape(numbers, (count,)))
            stream.copy(buffer, piece.reshape(*buffer.shape), "upload")
            start += count
        stream.record(uploaded)


class Scratch:
    """Memory that one graph of a cycle writes and the next reads, in any batch shape that fits."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._flat: dict[str, Buffer] = {}

    def reserve(self, name: str, count: int, dtype: type) -> None:
        self._flat[name] = self._device.empty(name, (count,), dtype)

    def __contains__(self, name: str) -> bool:
        return name in self._flat

    def get(self, name: str, *shape: int) -> Buffer:
        return self._flat[name][: math.prod(shape)].reshape(*shape)


class ResidentMemory:
    """All of it, and what the scheduler asks of the memory of slots."""

    def __init__(self, device: Device, programs: Mapping[str, Program], shape: Shape) -> None:
        self.device, self.shape = device, shape
        self.stream = device.stream("compute")
        slots, width = shape.num_slots, shape.width

        def ints(name: str, *dims: int) -> Buffer:
            return device.empty(name, dims, np.int64)

        self.states = tuple(
            State(
                ints(f"ids {p}", slots, width),
                ints(f"first_ids {p}", slots, 1),
                ints(f"num_given {p}", slots),
                ints(f"write_index {p}", slots),
            )
            for p in range(2)
        )
        self.reports = tuple(
            Report(
                ints(f"next_token {p}", slots * width),
                ints(f"num_committed {p}", slots),
                device.pinned(f"pinned next_token {p}", (slots * width,), np.int64),
                device.pinned(f"pinned num_committed {p}", (slots,), np.int64),
                device.event(f"verified {p}"),
                device.event(f"copied {p}"),
            )
            for p in range(2)
        )
        self.max_accept = ints(names.MAX_ACCEPT, slots)
        self.prompt_ids, self.prompt_given = ints("prompt_ids", shape.chunk), ints("prompt_given", 1)
        self.prompt_report = Report(
            ints("prompt next_token", shape.chunk),
            ints("prompt num_committed", 1),
            device.pinned("pinned prompt next_token", (1,), np.int64),
            device.pinned("pinned prompt num_committed", (1,), np.int64),
            device.event("prompt verified"),
            device.event("prompt copied"),
        )
        self.block_ids = ints(names.BLOCK_IDS, slots, max(1, shape.num_block))
        self.uploads = Uploads(device, max(slots * (width + 4), slots * max(1, shape.num_block), shape.chunk + 8))
        self.uploads.send(self.stream, [(self.block_ids, [shape.mask_token_id] * math.prod(self.block_ids.shape))])
        self.caches = Caches(device, programs.values(), shape)
        self.scratch = Scratch(device)
        self.reads = 0  # parity of the state that the next cycle reads
        self._rows = np.zeros(slots, np.int64)

    # What the scheduler asks

    @property
    def bytes_per_row(self) -> int:
        """Bytes of KV cache of one token in one slot."""
        return self.caches.bytes_per_row

    @property
    def capacity(self) -> int:
        """Rows of each slot's cache."""
        return self.caches.capacity

    def rows(self, slot: int) -> int:
        """Rows of a slot that the host knows to be committed."""
        return int(self._rows[slot])

    def reset(self, slot: int) -> None:
        """Forget a slot's rows; `start` puts the next request there."""
        self._rows[slot] = 0

    def move(self, source: int, to: int) -> None:
        """Copy a slot's state to another, in the order of the cycles; the source is then free."""
        if source == to:
            return
        rows = min(self.capacity, self.rows(source) + 2 * self.shape.width)  # and those not heard of yet
        self.caches.move(source, to, rows, self.stream)
        for state in self.states:
            for part, here in zip(state.rows(source, source + 1), state.rows(to, to + 1), strict=True):
                self.stream.copy(here, part, "move")
        self.stream.copy(self.max_accept[to : to + 1], self.max_accept[source : source + 1], "move")
        self._rows[to] = self._rows[source]
        self.reset(source)

    def shrink(self) -> None:
        """Give back the memory that long requests took; only while no slot is in use."""
        self.caches.shrink(self.stream)

    @property
    def max_context(self) -> int:
        """Tokens that a request may have: in a cache of fixed size, what two cycles that nobody reads leave of it."""
        if not self.caches.is_static:
            return self.shape.max_context
        return min(self.shape.max_context, self.capacity - 2 * self.shape.width)

    @property
    def max_drafts(self) -> int:
        """Draft tokens of a cycle."""
        return self.shape.num_drafts

    # What the loop asks

    def start(self, slot: int, max_accept: int) -> list[tuple[Buffer, list[int]]]:
        """Uploads that begin a request in a slot."""
        state = self.states[self.reads]
        return [(state.write_index[slot : slot + 1], [0]), (self.max_accept[slot : slot + 1], [max_accept])]

    def advance(self, slot: int, num_rows: int) -> None:
        """The host has heard of so many more committed rows."""
        self._rows[slot] += num_rows

    def reserve(self, more: int, slots: Iterable[int]) -> None:
        """Make room for `more` rows after those committed in each of `slots`."""
        used = max(self.rows(slot) for slot in slots)
        self.caches.reserve(used + more, int(self._rows.max()) + 2 * self.shape.width, self.stream)

    def settle(self, slot: int) -> None:
        """Carry a slot's state from the one that a prompt's call wrote to the other: cycles of other slots go on."""
        written, read = self.states[1 - self.reads], self.states[self.reads]
        for part, here in zip(written.rows(slot, slot + 1), read.rows(slot, slot + 1), strict=True):
            self.stream.copy(here, part, "settle")
