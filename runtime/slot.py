"""The memory of one request: caches that grow and fixed buffers, bound to the graphs of a trio.

    engine    reads                                        writes
    target    input_ids, write_index, past_*               next_token, target_hidden, present_* (in place)
    drafter   target_hidden (the target's own buffer),     draft_tokens, draft_hidden, draft_logits,
              num_committed, write_index, block_ids         present_* (in place)
    refiner   draft_hidden, draft_logits, draft_tokens,    refined_tokens, which the next pass reads
              anchor, previous

Everything is int64 or the bundle's float type, with one slot (B = 1). Nothing is allocated per call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xpress_export import names
from xpress_export.runtime.backend import DTYPES, Array, Call, Graph

FIRST_CAPACITY = 256


class KVCache:
    """Keys and values of one graph, [1, H, C, D] each, growing by doubling up to `max_capacity` rows."""

    def __init__(self, call: Call, dtype: type, max_capacity: int) -> None:
        graph = call.graph
        self._call, self._max = call, max_capacity
        self.capacity = min(FIRST_CAPACITY, max_capacity)
        self._arrays: dict[str, Array] = {
            name: np.zeros((1, graph.size(name, 1), self.capacity, graph.size(name, 3)), dtype)
            for name in graph.shapes
            if name.startswith("past_")
        }
        self._bind()

    def reserve(self, num_rows: int) -> None:
        """Make room for `num_rows` rows, keeping what is there."""
        if num_rows <= self.capacity:
            return
        assert num_rows <= self._max, f"{num_rows} rows asked of a cache of at most {self._max}"
        old, self.capacity = self.capacity, min(self._max, max(num_rows, 2 * self.capacity))
        for name, array in self._arrays.items():
            grown: Array = np.zeros((1, array.shape[1], self.capacity, array.shape[3]), array.dtype)
            grown[:, :, :old] = array
            self._arrays[name] = grown
        self._bind()

    def _bind(self) -> None:
        for name, array in self._arrays.items():
            self._call.bind_input(name, array)
            self._call.bind_output(name.replace("past_", "present_"), array)


class Target:
    """The target over one request: `run` appends rows to the cache and predicts the token after each."""

    def __init__(self, graph: Graph, dtype: type, max_rows: int, max_capacity: int) -> None:
        self._call = graph.call()
        self.cache = KVCache(self._call, dtype, max_capacity)
        self.input_ids = np.zeros((1, max_rows), np.int64)
        self.write_index = np.zeros(1, np.int64)
        self.next_token = np.zeros((1, max_rows), np.int64)
        self._has_taps = graph.has(names.TARGET_HIDDEN)
        width = graph.size(names.TARGET_HIDDEN, 2) if self._has_taps else 0
        self.target_hidden: Array = np.zeros((1, max_rows, width), dtype)
        self._call.bind_input(names.WRITE_INDEX, self.write_index)

    def run(self, num_rows: int) -> None:
        """Process `input_ids[:, :num_rows]` at rows `write_index`...; fills `next_token` and `target_hidden`."""
        self.cache.reserve(int(self.write_index[0]) + num_rows)
        self._call.bind_input(names.INPUT_IDS, self.input_ids[:, :num_rows])
        self._call.bind_output(names.NEXT_TOKEN, self.next_token[:, :num_rows])
        if self._has_taps:
            self._call.bind_output(names.TARGET_HIDDEN, self.target_hidden[:, :num_rows])
        self._call.run()


class Drafter:
    """The drafter over one request: `run` takes committed rows into the context and drafts a block."""

    def __init__(self, graph: Graph, dtype: type, max_capacity: int, block: Block) -> None:
        self._call = graph.call()
        self.cache = KVCache(self._call, dtype, max_capacity)
        self.block_ids = np.full((1, block.size), block.mask_token_id, np.int64)
        self.num_committed = np.zeros(1, np.int64)
        self.write_index = np.zeros(1, np.int64)
        self.draft_tokens = np.zeros((1, block.num_draft_tokens), np.int64)
        self._call.bind_input(names.NUM_COMMITTED, self.num_committed)
        self._call.bind_input(names.WRITE_INDEX, self.write_index)
        self._for_refiner = graph.has(names.DRAFT_HIDDEN)
        if self._for_refiner:
            self.draft_hidden: Array = np.zeros((1, block.size, graph.size(names.DRAFT_HIDDEN, 2)), dtype)
            logits = (1, block.num_draft_tokens, graph.size(names.DRAFT_LOGITS, 2))
            self.draft_logits: Array = np.zeros(logits, dtype)
        self._first_slot = block.first_slot

    def run(self, target_hidden: Array, num_slots: int) -> Array:
        """Append `num_committed` rows of `target_hidden` [1, S, K*E], then draft; int64 [num_slots - first]."""
        self.cache.reserve(int(self.write_index[0]) + target_hidden.shape[1])
        drafts = num_slots - self._first_slot
        self._call.bind_input(names.TARGET_HIDDEN, target_hidden)
        self._call.bind_input(names.BLOCK_IDS, self.block_ids[:, :num_slots])
        self._call.bind_output(names.DRAFT_TOKENS, self.draft_tokens[:, :drafts])
        if self._for_refiner:
            self._call.bind_output(names.DRAFT_HIDDEN, self.draft_hidden[:, :num_slots])
            self._call.bind_output(names.DRAFT_LOGITS, self.draft_logits[:, :drafts])
        self._call.run()
        self.write_index += self.num_committed
        return self.draft_tokens[0, :drafts]


class Refiner:
    """The refiner over one request: each `run` is one Jacobi pass from one token buffer into the other."""

    def __init__(self, graph: Graph, drafter: Drafter, block: Block) -> None:
        self._call, self._drafter, self._first_slot = graph.call(), drafter, block.first_slot
        self._reads_hidden = graph.has(names.DRAFT_HIDDEN)
        self.anchor = np.zeros(1, np.int64)
        self.previous = np.zeros(1, np.int64)
        self._buffers = (drafter.draft_tokens, np.zeros_like(drafter.draft_tokens))
        self._call.bind_input(names.ANCHOR, self.anchor)
        self._call.bind_input(names.PREVIOUS, self.previous)

    def run(self, pass_index: int, num_slots: int) -> tuple[Array, Array]:
        """One pass over a block of `num_slots`; returns the tokens before and after, each [1, num_slots - first]."""
        drafts = num_slots - self._first_slot
        before, after = (self._buffers[(pass_index + i) % 2][:, :drafts] for i in range(2))
        self._call.bind_input(names.DRAFT_LOGITS, self._drafter.draft_logits[:, :drafts])
        if self._reads_hidden:
            self._call.bind_input(names.DRAFT_HIDDEN, self._drafter.draft_hidden[:, :num_slots])
        self._call.bind_input(names.DRAFT_TOKENS, before)
        self._call.bind_output(names.REFINED_TOKENS, after)
        self._call.run()
        return before, after


class Block:
    """The shape of a draft block, from the manifest."""

    def __init__(self, size: int, first_slot: int, mask_token_id: int) -> None:
        self.size, self.first_slot, self.mask_token_id = size, first_slot, mask_token_id
        self.num_draft_tokens = size - first_slot


class Slot:
    """All memory of one request. Reusable: `reset` forgets the previous one."""

    def __init__(
        self, graphs: dict[str, Graph], float_dtype: str, max_context: int, max_rows: int, block: Block | None
    ) -> None:
        dtype: Any = DTYPES[float_dtype]
        # A call may write rows past the last committed one; they are garbage, but they need a place.
        capacity = max_context + max_rows
        self.target = Target(graphs[names.TARGET], dtype, max_rows, capacity)
        self.drafter: Drafter | None = None
        self.refiner: Refiner | None = None
        if block is not None:
            self.drafter = Drafter(graphs[names.DRAFTER], dtype, capacity, block)
            if names.REFINER in graphs:
                self.refiner = Refiner(graphs[names.REFINER], self.drafter, block)

    def reset(self) -> None:
        """Forget all committed rows; what lies in the caches is overwritten as the next request grows."""
        self.target.write_index[:] = 0
        if self.drafter is not None:
            self.drafter.write_index[:] = 0
