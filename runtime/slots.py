"""The memory of many requests, one slot each, and the three engines over a range of them.

    engine    reads                                        writes
    target    input_ids, write_index, past_*               next_token, target_hidden, logits, present_* (in place)
    drafter   target_hidden (rows that wait), block_ids,   draft_tokens, draft_hidden, draft_logits,
              num_committed, write_index                   present_* (in place)
    refiner   draft_hidden, draft_logits, draft_tokens,    refined_tokens, refined_logits; the next pass reads
              anchor, previous                             its tokens

A call runs over slots first .. last - 1, which lie side by side in every array, so nothing is copied to form a
batch. Rows that a call writes past a slot's committed ones are garbage: no mask shows them, the next call
overwrites them, and nothing is ever rolled back.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from xpress_export import names
from xpress_export.runtime.backend import Call, Graph
from xpress_export.runtime.device import Array

FIRST_CAPACITY = 256


class KVCache:
    """Keys and values of one graph, [slots, H, C, D] each, growing by doubling up to `max_capacity` rows.

    Memory of slots and rows that were never written is not touched, so it costs nothing.
    """

    def __init__(self, graph: Graph, num_slots: int, dtype: type, max_capacity: int) -> None:
        self._max, self._dtype = max_capacity, dtype
        self._shapes = {
            name: (num_slots, graph.size(name, 1), graph.size(name, 3)) for name in graph.shapes if names.is_past(name)
        }
        self.bytes_per_row = sum(h * d for _, h, d in self._shapes.values()) * np.dtype(dtype).itemsize
        self._bound: dict[Call, tuple[int, int, int]] = {}
        self._version = 0
        self.shrink()

    def shrink(self) -> None:
        """Forget everything and give back what growing took."""
        self.capacity = min(FIRST_CAPACITY, self._max)
        self._arrays = {name: self._make(name) for name in self._shapes}
        self._version += 1

    def _make(self, name: str) -> Array:
        slots, heads, size = self._shapes[name]
        return np.zeros((slots, heads, self.capacity, size), self._dtype)

    def reserve(self, num_rows: int, used: int) -> None:
        """Make room for `num_rows` rows in each slot, keeping the first `used`."""
        if num_rows <= self.capacity:
            return
        assert num_rows <= self._max, f"{num_rows} rows asked of a cache of at most {self._max}"
        self.capacity = min(self._max, max(num_rows, 2 * self.capacity))
        for name, array in self._arrays.items():
            grown = self._make(name)
            grown[:, :, :used] = array[:, :, :used]
            self._arrays[name] = grown
        self._version += 1

    def move(self, source: int, to: int, num_rows: int) -> None:
        """Copy the first `num_rows` rows of one slot to another."""
        for array in self._arrays.values():
            array[to, :, :num_rows] = array[source, :, :num_rows]

    def bind(self, call: Call, first: int, last: int) -> None:
        """Bind slots first .. last - 1 as past and, in place, as present."""
        what = (self._version, first, last)
        if self._bound.get(call) == what:
            return
        self._bound[call] = what
        for name, array in self._arrays.items():
            call.bind_input(name, array[first:last])
            call.bind_output(names.present_of(name), array[first:last])


class Buffers:
    """Contiguous memory for the inputs and outputs of one graph, reused by every call, whatever its shape."""

    def __init__(self) -> None:
        self._flat: dict[str, Array] = {}
        self._views: dict[tuple[str, tuple[int, ...]], Array] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: type) -> Array:
        if (name, shape) not in self._views:
            size = math.prod(shape)
            flat = self._flat.get(name)
            if flat is None or flat.size < size:
                flat = self._flat[name] = np.zeros(size, dtype)
                self._views = {key: view for key, view in self._views.items() if key[0] != name}
            self._views[name, shape] = flat[:size].reshape(shape)
        return self._views[name, shape]

    def output(self, call: Call, name: str, shape: tuple[int, ...], dtype: type) -> Array:
        """Memory bound as an output of the next run."""
        array = self.get(name, shape, dtype)
        call.bind_output(name, array)
        return array

    def input(self, call: Call, name: str, values: Array) -> None:
        """A copy of int64 values, bound as an input of the next run."""
        array = self.get(name, values.shape, np.int64)
        array[:] = values
        call.bind_input(name, array)


class Target:
    """The target: `run` appends rows to the caches of a range of slots and predicts the token after each."""

    def __init__(self, graph: Graph, num_slots: int, dtype: type, max_capacity: int) -> None:
        self._graph, self._dtype = graph, dtype
        self._calls: defaultdict[int, Call] = defaultdict(graph.call)
        self._buffers = Buffers()
        self.cache = KVCache(graph, num_slots, dtype, max_capacity)
        self.write_index = np.zeros(num_slots, np.int64)
        self._width = graph.size(names.TARGET_HIDDEN, 2) if graph.has(names.TARGET_HIDDEN) else 0
        self.next_token: Array
        self.logits: Array
        self.target_hidden: Array

    def run(self, first: int, input_ids: Array) -> None:
        """Process `input_ids` [B, S] in slots first .. first + B - 1, at rows `write_index` and following.

        Fills next_token int64 [B, S], logits [B, S, V] and, with a drafter, target_hidden [B, S, K*E].
        """
        batch, length = input_ids.shape
        last = first + batch
        rows = int(self.write_index.max())
        self.cache.reserve(rows + length, rows)
        call = self._calls[first]
        self.cache.bind(call, first, last)
        self._buffers.input(call, names.INPUT_IDS, input_ids)
        call.bind_input(names.WRITE_INDEX, self.write_index[first:last])
        self.next_token = self._buffers.output(call, names.NEXT_TOKEN, (batch, length), np.int64)
        if self._width:
            shape = (batch, length, self._width)
            self.target_hidden = self._buffers.output(call, names.TARGET_HIDDEN, shape, self._dtype)
        shape = (batch, length, self._graph.size(names.LOGITS, 2))
        self.logits = self._buffers.output(call, names.LOGITS, shape, self._dtype)
        call.run()


class Drafter:
    """The drafter: committed rows of target_hidden wait here until `run` takes them into the context and drafts."""

    def __init__(
        self, graph: Graph, num_slots: int, dtype: type, max_capacity: int, block: Block, max_waiting: int
    ) -> None:
        self._graph, self._dtype, self._block = graph, dtype, block
        self._calls: defaultdict[int, Call] = defaultdict(graph.call)
        self._buffers = Buffers()
        self.cache = KVCache(graph, num_slots, dtype, max_capacity)
        self.write_index = np.zeros(num_slots, np.int64)
        self.num_waiting = np.zeros(num_slots, np.int64)
        self._waiting: Array = np.zeros((num_slots, max_waiting, graph.size(names.TARGET_HIDDEN, 2)), dtype)
        self._for_refiner = graph.has(names.DRAFT_HIDDEN)
        self.draft_hidden: Array
        self.draft_logits: Array

    def wait(self, slot: int, rows: Array) -> None:
        """Keep `rows` [n, K*E] for the next run; if there is no room, run now."""
        start = int(self.num_waiting[slot])
        if start + len(rows) > self._waiting.shape[1]:
            self.flush(slot)
            start = 0
        self._waiting[slot, start : start + len(rows)] = rows
        self.num_waiting[slot] = start + len(rows)

    def flush_longer_than(self, most: int) -> None:
        """Flush the slots with more than `most` waiting rows, which would pad those of all others."""
        for slot in np.flatnonzero(self.num_waiting > most):
            self.flush(int(slot))

    def flush(self, slot: int) -> None:
        """Take a slot's waiting rows in without wanting a draft: the smallest block will do."""
        self.run(slot, np.zeros(1, np.int64), max(2, self._block.first_slot + 1))

    def run(self, first: int, anchors: Array, num_block: int) -> Array:
        """Take the waiting rows of slots first .. first + B - 1 in, then draft a block of `num_block` slots each.

        anchors: int64 [B]. Returns draft_tokens int64 [B, num_block - first_slot]; fills draft_logits
        [B, num_block - first_slot, Vd] and, with a refiner, draft_hidden [B, num_block, E].
        """
        batch, last = len(anchors), first + len(anchors)
        waiting = self.num_waiting[first:last]
        length = max(1, int(waiting.max()))
        rows = int(self.write_index.max())
        self.cache.reserve(rows + length, rows)
        call = self._calls[first]
        self.cache.bind(call, first, last)
        hidden = self._buffers.get(names.TARGET_HIDDEN, (batch, length, self._waiting.shape[2]), self._dtype)
        hidden[:] = self._waiting[first:last, :length]
        block = self._buffers.get(names.BLOCK_IDS, (batch, num_block), np.int64)
        block[:, 0], block[:, 1:] = anchors, self._block.mask_token_id
        call.bind_input(names.TARGET_HIDDEN, hidden)
        call.bind_input(names.BLOCK_IDS, block)
        call.bind_input(names.NUM_COMMITTED, waiting)
        call.bind_input(names.WRITE_INDEX, self.write_index[first:last])
        drafts = (batch, num_block - self._block.first_slot)
        tokens = self._buffers.output(call, names.DRAFT_TOKENS, drafts, np.int64)
        if self._for_refiner:
            shape = (batch, num_block, self._graph.size(names.DRAFT_HIDDEN, 2))
            self.draft_hidden = self._buffers.output(call, names.DRAFT_HIDDEN, shape, self._dtype)
        shape = (*drafts, self._graph.size(names.DRAFT_LOGITS, 2))
        self.draft_logits = self._buffers.output(call, names.DRAFT_LOGITS, shape, self._dtype)
        call.run()
        self.write_index[first:last] += waiting
        waiting[:] = 0
        return tokens.copy()

    def move(self, source: int, to: int) -> None:
        """Copy one slot's state to another."""
        self.cache.move(source, to, int(self.write_index[source]))
        self.write_index[to] = self.write_index[source]
        self.num_waiting[to] = self.num_waiting[source]
        self._waiting[to, : self.num_waiting[to]] = self._waiting[source, : self.num_waiting[to]]


class Refiner:
    """The refiner: each `run` is one Jacobi pass over the drafter's last block."""

    def __init__(self, graph: Graph, dtype: type, drafter: Drafter) -> None:
        self._graph, self._dtype, self._drafter = graph, dtype, drafter
        self._call = graph.call()
        self._buffers = Buffers()
        self._reads_hidden = graph.has(names.DRAFT_HIDDEN)
        self.logits: Array

    def run(self, tokens: Array, anchors: Array, previous: Array) -> Array:
        """tokens: int64 [B, n]; anchors, previous: int64 [B]. Returns refined tokens; fills logits [B, n, Vd]."""
        call, drafter = self._call, self._drafter
        for name, values in ((names.DRAFT_TOKENS, tokens), (names.ANCHOR, anchors), (names.PREVIOUS, previous)):
            self._buffers.input(call, name, values)
        call.bind_input(names.DRAFT_LOGITS, drafter.draft_logits)
        if self._reads_hidden:
            call.bind_input(names.DRAFT_HIDDEN, drafter.draft_hidden)
        refined = self._buffers.output(call, names.REFINED_TOKENS, tokens.shape, np.int64)
        self.logits = self._buffers.output(call, names.REFINED_LOGITS, drafter.draft_logits.shape, self._dtype)
        call.run()
        return refined.copy()


class Block:
    """The shape of a draft block, from the manifest."""

    def __init__(self, size: int, first_slot: int, mask_token_id: int) -> None:
        self.size, self.first_slot, self.mask_token_id = size, first_slot, mask_token_id
        self.num_draft_tokens = size - first_slot


class Slots:
    """Target, drafter and refiner over `num_slots` slots; drafter and refiner None where the bundle has none."""

    def __init__(
        self,
        graphs: Mapping[str, Graph],
        dtype: type,
        num_slots: int,
        max_context: int,
        max_rows: int,
        block: Block | None,
    ) -> None:
        # A call may write rows past the last committed one; they are garbage, but they need a place.
        capacity = max_context + max_rows
        self.max_context = max_context
        self.max_drafts = block.num_draft_tokens if block else 0
        self.target = Target(graphs[names.TARGET], num_slots, dtype, capacity)
        self.drafter: Drafter | None = None
        self.refiner: Refiner | None = None
        if block is not None:
            self.drafter = Drafter(graphs[names.DRAFTER], num_slots, dtype, capacity, block, max_rows)
            if names.REFINER in graphs:
                self.refiner = Refiner(graphs[names.REFINER], dtype, self.drafter)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of KV cache of one token in one slot."""
        return sum(part.cache.bytes_per_row for part in (self.target, self.drafter) if part is not None)

    @property
    def capacity(self) -> int:
        """Rows of each slot's cache."""
        return self.target.cache.capacity

    def rows(self, slot: int) -> int:
        """Committed rows of a slot."""
        return int(self.target.write_index[slot])

    def reset(self, slot: int) -> None:
        """Forget a slot's rows; what lies in the caches is overwritten as the next request grows."""
        self.target.write_index[slot] = 0
        if self.drafter is not None:
            self.drafter.write_index[slot] = self.drafter.num_waiting[slot] = 0

    def move(self, source: int, to: int) -> None:
        """Copy a slot's state to another; the source is then free."""
        if source == to:
            return
        self.target.cache.move(source, to, int(self.target.write_index[source]))
        self.target.write_index[to] = self.target.write_index[source]
        if self.drafter is not None:
            self.drafter.move(source, to)
        self.reset(source)

    def shrink(self) -> None:
        """Give back the memory that long requests took; only while no slot is in use."""
        for part in (self.target, self.drafter):
            if part is not None and part.cache.capacity > FIRST_CAPACITY:
                part.cache.shrink()
