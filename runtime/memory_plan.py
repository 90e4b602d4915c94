"""How much memory a bundle takes on a device, before anything is opened.

    kind          what                                                   how it is known
    weights       graphs' weight files, or engine plans                  the manifest's file sizes; see `_weights`
    caches        KV caches, all slots as long as they can get           the loop itself, on a device that only counts
    growing       the caches before, while the last growth copies them   the same, if they always double
    state         integers of the cycle                                  the same
    scratch       what one graph hands to the next                       the same
    pinned        memory of the host that the device copies from         the same
    activations   what graphs need while they run                        estimated: a few tensors of a layer, attention
                                                                         scores in float32
    context       what CUDA and its libraries take for themselves        estimated: 400 MiB

Nothing is asked of a device. Where the device decides, what the loop allocates is exact, because `ResidentDecoder`
itself allocates it, from the shapes in the manifest. On CPU in the split layout the host decides (`decode`), and its
memory (`slots`) is about as large: there all of it is an estimate. Caches that no engine fixes begin at 256 rows and
grow with requests, so a plan is the most that they come to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from xpress_export import names, platforms
from xpress_export.console import human_bytes
from xpress_export.errors import BundleError, EngineError
from xpress_export.manifest import Manifest
from xpress_export.precision import Precision
from xpress_export.records import EngineRecord, GraphRecord
from xpress_export.runtime import devices
from xpress_export.runtime.device import Array, Bound, Buffer, Device, Event, Memory, Program, Stream
from xpress_export.runtime.resident import ResidentDecoder
from xpress_export.runtime.resident_memory import ResidentMemory, Shape

CPU, CUDA = "cpu", "cuda"
PINNED = "pinned"
_CONTEXT_BYTES = 400 << 20
_TENSORS_OF_A_LAYER = 16
"""Hidden states of one row that are alive at the same time: the residual, queries, keys, values, an MLP of four."""


@dataclass(frozen=True)
class MemoryItem:
    """kind: as in the module's table. name: of a graph. is_estimate: it may differ from what is taken."""

    kind: str
    name: str
    num_bytes: int
    is_estimate: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """shape: of the loop; max_context: of a request. free_bytes, total_bytes: of the device, where they are known."""

    device_kind: str
    backend: str
    layout: str
    precisions: Mapping[str, str]
    shape: Shape
    items: tuple[MemoryItem, ...]
    free_bytes: int | None = None
    total_bytes: int | None = None

    @property
    def device_bytes(self) -> int:
        """All of it but pinned memory, which is the host's."""
        return sum(item.num_bytes for item in self.items if item.kind != PINNED)

    @property
    def grows_on_demand(self) -> bool:
        """Whether it is no more than what requests may come to, and opening refuses nothing: so it is on a CPU."""
        return self.device_kind == CPU

    @property
    def pinned_bytes(self) -> int:
        return self.of(PINNED)

    def of(self, kind: str) -> int:
        """Bytes of one kind."""
        return sum(item.num_bytes for item in self.items if item.kind == kind)

    def slots_that_fit(self, free_bytes: int) -> int:
        """About how many slots `free_bytes` suffice for; 0 where not even one fits."""
        each = (self.device_bytes - self.of("weights") - self.of("context")) / self.shape.num_slots
        left = free_bytes - self.of("weights") - self.of("context")
        return max(0, min(self.shape.num_slots, int(left / each)))

    def rows(self) -> list[tuple[str, str, str]]:
        """What, size, and a remark, for a table; the sum of the device's last."""
        found = [
            (f"{item.kind} {item.name}".strip(), human_bytes(item.num_bytes), "estimated" if item.is_estimate else "")
            for item in self.items
        ]
        free = "" if self.free_bytes is None else f"{human_bytes(self.free_bytes)} free"
        return [*found, ("device, all", human_bytes(self.device_bytes), free)]

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device_kind,
            "backend": self.backend,
            "layout": self.layout,
            "precisions": dict(self.precisions),
            "num_slots": self.shape.num_slots,
            "max_context": self.shape.max_context,
            "prefill_chunk": self.shape.chunk,
            "items": [
                {"kind": i.kind, "name": i.name, "num_bytes": i.num_bytes, "is_estimate": i.is_estimate}
                for i in self.items
            ],
            "device_bytes": self.device_bytes,
            "pinned_bytes": self.pinned_bytes,
            "grows_on_demand": self.grows_on_demand,
            "free_bytes": self.free_bytes,
            "total_bytes": self.total_bytes,
        }

    def with_free(self, free_bytes: int, total_bytes: int) -> MemoryPlan:
        """The same plan on a device with that much memory."""
        return replace(self, free_bytes=free_bytes, total_bytes=total_bytes)


def plan_memory(
    manifest: Manifest,
    *,
    device_kind: str,
    backend: str,
    precision: Precision = None,
    layout: str,
    shape: Shape,
    engines: Sequence[EngineRecord] = (),
) -> MemoryPlan:
    """What a bundle takes. device_kind: cpu or cuda. engines: what is loaded in place of graphs, one for each role.

    Raises BundleError for graphs that it has not.
    """
    precisions = devices.role_precisions(manifest, precision, layout)
    roles = devices.roles_of(manifest, layout)
    graphs = {role: _graph(manifest, role, precisions[role]) for role in roles}
    plans = {engine.role: engine for engine in engines}
    memory, loop = _loop(graphs, plans, shape)
    if device_kind == CPU and layout == names.LAYOUT_SPLIT:  # the host's loop, which this one stands in for
        loop = [replace(item, is_estimate=True) for item in loop]
    items = [*_weights(manifest, graphs, plans, device_kind), *loop, _activations(manifest, shape, memory.capacity)]
    if any(engine.lowering == platforms.DECOMPOSED for engine in engines):  # it does not update in place
        caches = next(item for item in loop if item.kind == "caches")
        items.append(MemoryItem("caches", "as engines write them", caches.num_bytes, is_estimate=True))
    if device_kind == CUDA:
        items.append(MemoryItem("context", "of CUDA", _CONTEXT_BYTES, is_estimate=True))
    return MemoryPlan(
        device_kind=device_kind,
        backend=backend,
        layout=layout,
        precisions=precisions,
        shape=replace(shape, max_context=memory.max_context),
        items=tuple(items),
    )


def refuse_if_too_large(plan: MemoryPlan, free_bytes: int) -> None:
    """Raises EngineError, before anything is loaded, where a plan needs more than there is."""
    needed = plan.device_bytes
    if needed <= free_bytes:
        return
    kinds = dict.fromkeys(item.kind for item in plan.items if item.kind != PINNED)
    parts = sorted(((plan.of(kind), kind) for kind in kinds), reverse=True)
    fits = plan.slots_that_fit(free_bytes)
    change = (
        f"open it with num_slots {fits} (it is {plan.shape.num_slots}) or a shorter context"
        if fits
        else "not even one slot fits: run a bundle of lower precision or of a smaller model, or a shorter context"
    )
    raise EngineError(
        f"the bundle needs about {human_bytes(needed)} of the {plan.device_kind} device's memory, of which "
        f"{human_bytes(free_bytes)} are free: {', '.join(f'{human_bytes(size)} {kind}' for size, kind in parts)} for "
        f"{plan.shape.num_slots} slots of {plan.shape.max_context} tokens; {change}, or end what else uses the device"
    )


def _graph(manifest: Manifest, role: str, precision: str) -> GraphRecord:
    found = manifest.graph(role, precision)
    if found is None:
        raise BundleError(f"the bundle has no {role} graph in {precision}; it has {manifest.precisions(role)}")
    return found


def _weights(
    manifest: Manifest, graphs: Mapping[str, GraphRecord], engines: Mapping[str, EngineRecord], device_kind: str
) -> list[MemoryItem]:
    """By graph. On CPU a file is mapped once, whoever reads it; on a GPU each graph copies what it uses.

    Of another model's file, and of the unquantized one beside a quantized, a graph uses embedding and head at most.
    """
    files, seen, items = {file.path: file.num_bytes for file in manifest.files}, set[str](), []
    size = 4 if manifest.precision == "fp32" else 2
    borrowed = 2 * manifest.target.vocab_size * manifest.target.hidden_size * size
    for role, graph in graphs.items():
        if role in engines:
            items.append(MemoryItem("weights", role, files[engines[role].file], is_estimate=True))
            continue
        total, is_estimate = 0, False
        for path in graph.data:
            is_main = _is_main(path, role, graph.data)
            if path in seen and device_kind == CPU:
                continue
            total += files[path] if is_main else min(files[path], borrowed)
            is_estimate |= not is_main
            seen.add(path)
        items.append(MemoryItem("weights", role, total, is_estimate))
    return items


def _is_main(path: str, role: str, data: tuple[str, ...]) -> bool:
    """Whether a graph uses a weight file as a whole: that of its own model, in the precision that it is in."""
    stem = Path(path).stem
    owner = stem.partition(".")[0]
    is_own = role in {names.STEP, owner}
    return is_own and not any(Path(other).stem.startswith(f"{stem}.") for other in data)


def _activations(manifest: Manifest, shape: Shape, capacity: int) -> MemoryItem:
    """Of the largest call: the scratch memory of graphs is used by one after the other. capacity: rows of a cache."""
    rows, target = max(shape.num_slots * shape.width, shape.chunk), manifest.target
    item, vocab = np.dtype(shape.dtype).itemsize, target.vocab_size
    hidden = rows * _TENSORS_OF_A_LAYER * target.hidden_size * item
    scores = rows * target.num_heads * capacity * 4
    return MemoryItem("activations", "of the largest call", hidden + scores + rows * vocab * item, is_estimate=True)


# The loop, on a device that counts


def _loop(
    graphs: Mapping[str, GraphRecord], engines: Mapping[str, EngineRecord], shape: Shape
) -> tuple[ResidentMemory, list[MemoryItem]]:
    """The loop's memory, once its caches have grown as far as they can, and what it allocated."""
    device = CountingDevice()
    capacities = {role: engines[role].capacity if role in engines else None for role in graphs}
    programs = {role: CountedProgram(role, graph, capacities[role]) for role, graph in graphs.items()}
    memory = ResidentDecoder(device, programs, shape).memory
    while not memory.caches.is_static and memory.capacity < shape.most_rows:
        device.most_bytes = 0
        memory.caches.reserve(min(shape.most_rows, memory.capacity + 1), 0, memory.stream)
    sums = dict.fromkeys(("caches", "growing", "state", "scratch", PINNED), 0)
    for counted in device.live:
        kind = "state"
        if counted.on_host:
            kind = PINNED
        elif "past_" in counted.name:
            kind = "caches"
        elif counted.name in memory.scratch:
            kind = "scratch"
        sums[kind] += counted.num_bytes
    live = sum(counted.num_bytes for counted in device.live if not counted.on_host)
    sums["growing"] = max(0, device.most_bytes - live)
    return memory, [MemoryItem(kind, "", size, is_estimate=kind == "growing") for kind, size in sums.items() if size]


class CountedMemory(Memory):
    """A name and a size."""

    def __init__(self, device: CountingDevice, name: str, num_bytes: int, *, on_host: bool) -> None:
        self._device, self.name, self.num_bytes, self.on_host = device, name, num_bytes, on_host

    def read(self, buffer: Buffer) -> Array:
        return np.zeros(buffer.shape, buffer.dtype)

    def write(self, buffer: Buffer, values: Array) -> None:
        pass

    def free(self) -> None:
        self._device.live.remove(self)


class CountedProgram(Program):
    """A graph's shapes, as the manifest has them. capacity: rows of its caches, where an engine fixes them."""

    def __init__(self, role: str, graph: GraphRecord, capacity: int | None) -> None:
        self.role, fixed = role, {"C": capacity} if capacity is not None else {}

        def shape(dims: tuple[int | str, ...]) -> tuple[int | str, ...]:
            return tuple(fixed.get(d, d) if isinstance(d, str) else d for d in dims)

        self.inputs = {tensor.name: shape(tensor.shape) for tensor in graph.inputs}
        self.outputs = {tensor.name: shape(tensor.shape) for tensor in graph.outputs}

    def bind(self, buffers: Mapping[str, Buffer]) -> Bound:
        raise AssertionError("nothing runs on a device that counts")


class CountingEvent(Event):
    def __init__(self, name: str) -> None:
        self.name = name

    def synchronize(self) -> None:
        pass


class CountingStream(Stream):
    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, bound: Bound, label: str) -> None:
        pass

    def copy(self, to: Buffer, source: Buffer, label: str) -> None:
        pass

    def record(self, event: Event) -> None:
        pass

    def wait(self, event: Event) -> None:
        pass

    def repeat(self, key: Hashable, enqueue: Callable[[], None]) -> None:
        pass


class CountingDevice(Device):
    """A device that has no memory and keeps account of it. live: what is allocated. most_bytes: of the device, ever."""

    name, backend = "counting", "none"

    def __init__(self) -> None:
        self.live: list[CountedMemory] = []
        self.most_bytes = 0

    def load(self, path: Path, role: str) -> Program:
        raise AssertionError("a device that counts loads nothing")

    def empty(self, name: str, shape: tuple[int, ...], dtype: type) -> Buffer:
        return self._count(name, shape, dtype, on_host=False)

    def pinned(self, name: str, shape: tuple[int, ...], dtype: type) -> Buffer:
        return self._count(name, shape, dtype, on_host=True)

    def _count(self, name: str, shape: tuple[int, ...], dtype: type, *, on_host: bool) -> Buffer:
        memory = CountedMemory(self, name, math.prod(shape) * np.dtype(dtype).itemsize, on_host=on_host)
        self.live.append(memory)
        self.most_bytes = max(self.most_bytes, sum(m.num_bytes for m in self.live if not m.on_host))
        return Buffer.whole(memory, shape, dtype)

    def stream(self, name: str) -> CountingStream:
        return CountingStream(name)

    def event(self, name: str) -> CountingEvent:
        return CountingEvent(name)

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        self.live.clear()
