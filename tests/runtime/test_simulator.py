"""The simulated device: it names every kind of mistake, finds none in what is right, and can run in every order."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from xpress_export.errors import EngineError
from xpress_export.runtime.device import Buffer, Device
from xpress_export.runtime.device_cpu import CpuDevice
from xpress_export.runtime.hazards import HazardError, Region
from xpress_export.runtime.schedules import Order, every_order
from xpress_export.runtime.simulator import SimulatedDevice

MIX = """<ir_version: 10, opset_import: ["": 24]>
mix (int64[N] a, int64[N] b) => (int64[N] c) <int64 three = {3}> { scaled = Mul(a, three)  c = Add(scaled, b) }"""
LOOKUP = """<ir_version: 10, opset_import: ["": 24]>
lookup (int64[N] a, int64[M] b) => (int64[M] c) { c = Gather(a, b) }"""
CACHE = """<ir_version: 10, opset_import: ["": 24]>
cache (int64[N] past_key_0, int64[N] a) => (int64[N] present_key_0) { present_key_0 = Add(past_key_0, a) }"""


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    for name, text in (("mix", MIX), ("lookup", LOOKUP), ("cache", CACHE)):
        onnx.save(onnx.parser.parse_model(text), folder / f"{name}.onnx")
    return folder


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice(seed=0)


def ints(device: Device, name: str, size: int = 4) -> Buffer:
    return device.empty(name, (size,), np.int64)


def pinned(device: Device, name: str, size: int = 4) -> Buffer:
    return device.pinned(name, (size,), np.int64)


# Mistakes, each beside the program in which it is not made


def two_streams(device: SimulatedDevice, is_right: bool) -> None:
    """A stream reads what another writes."""
    one, other, ready = device.stream("one"), device.stream("other"), device.event("ready")
    a, b, c = ints(device, "a"), ints(device, "b"), ints(device, "c")
    one.copy(b, a, "make")
    one.record(ready)
    if is_right:
        other.wait(ready)
    other.copy(c, b, "use")


def overwritten(device: SimulatedDevice, is_right: bool) -> None:
    """A stream writes what another still reads."""
    one, other, read = device.stream("one"), device.stream("other"), device.event("read")
    a, b, c = ints(device, "a"), ints(device, "b"), ints(device, "c")
    one.copy(b, a, "use")
    if is_right:
        one.record(read)
    other.wait(read)
    other.copy(a, c, "make")


def written_twice(device: SimulatedDevice, is_right: bool) -> None:
    """Two streams write the same, and which is last nobody knows."""
    one, other = device.stream("one"), device.stream("other")
    a, b, c = ints(device, "a"), ints(device, "b"), ints(device, "c")
    one.copy(c, a, "use")
    if is_right:
        device.synchronize()
    other.copy(c, b, "make")


def recorded_too_early(device: SimulatedDevice, is_right: bool) -> None:
    """The event marks a point before the operation that matters."""
    one, other, ready = device.stream("one"), device.stream("other"), device.event("ready")
    a, b, c = ints(device, "a"), ints(device, "b"), ints(device, "c")
    one.record(ready)
    one.copy(b, a, "make")
    if is_right:
        one.record(ready)
    other.wait(ready)
    other.copy(c, b, "use")


def waited_too_early(device: SimulatedDevice, is_right: bool) -> None:
    """A wait is for the point that the event marks by then, not for the next one."""
    one, other, ready = device.stream("one"), device.stream("other"), device.event("ready")
    a, b, c = ints(device, "a"), ints(device, "b"), ints(device, "c")
    if not is_right:
        other.wait(ready)
    one.copy(b, a, "make")
    one.record(ready)
    if is_right:
        other.wait(ready)
    other.copy(c, b, "use")


def host_reads(device: SimulatedDevice, is_right: bool) -> None:
    """The host reads a result whose event it did not synchronize."""
    stream, copied = device.stream("one"), device.event("copied")
    result = pinned(device, "b")
    stream.copy(result, ints(device, "a"), "use")
    stream.record(copied)
    if is_right:
        copied.synchronize()
    result.read()


def host_writes(device: SimulatedDevice, is_right: bool) -> None:
    """The host fills pinned memory again before it was read."""
    stream, uploaded = device.stream("one"), device.event("uploaded")
    given = pinned(device, "a")
    for value in range(2):
        if is_right:
            uploaded.synchronize()
        given.write(np.full(4, value))
        stream.copy(ints(device, "b"), given, "use")
        stream.record(uploaded)


def freed_in_use(device: SimulatedDevice, is_right: bool) -> None:
    """Memory is given back while a copy may still read it."""
    old = ints(device, "a")
    device.stream("one").copy(ints(device, "b"), old, "use")
    if is_right:
        device.synchronize()
    old.memory.free()


def closed_in_use(device: SimulatedDevice, is_right: bool) -> None:
    """The device goes while work is under way."""
    device.stream("one").copy(ints(device, "b"), ints(device, "a"), "use")
    if is_right:
        device.synchronize()
    device.close()


def carried_on(device: SimulatedDevice, is_right: bool) -> None:
    """Order passes from stream to stream to the host, and only along events."""
    streams = [device.stream(name) for name in ("one", "two", "other")]
    events = [device.event(f"done {i}") for i in range(3)]
    buffers = [pinned(device, name) for name in "abcd"]
    for i, stream in enumerate(streams):
        if i and (is_right or i == 1):
            stream.wait(events[i - 1])
        source = buffers[i] if is_right or i < 2 else buffers[0]
        stream.copy(buffers[i + 1], source, f"hop {i}")
        stream.record(events[i])
    events[2].synchronize()
    buffers[1].write(np.zeros(4))  # which "hop 1" reads and "hop 0" writes


MISTAKES: tuple[tuple[Callable[[SimulatedDevice, bool], None], str], ...] = (
    (
        two_streams,
        r"copy 'use' \(#1 of stream other\) reads bytes 0 to 32 of 'b', which copy 'make' \(#1 of stream one\)",
    ),
    (overwritten, r"copy 'make' \(#1 of stream other\) writes bytes 0 to 32 of 'a', which copy 'use' .* reads"),
    (written_twice, r"copy 'make' .* writes .* 'c', which copy 'use' .* writes, and nothing orders the two"),
    (recorded_too_early, r"stream other has to wait for an event that is recorded on stream one after #1, or the host"),
    (waited_too_early, r"copy 'use' \(#1 of stream other\) reads .* which copy 'make'"),
    (host_reads, r"read of 'b' \(#1 of the host\) .* the host has to synchronize an event .* on stream one after #1"),
    (host_writes, r"write to 'a' \(#2 of the host\) writes .* which copy 'use' \(#1 of stream one\) reads"),
    (freed_in_use, r"free of 'a' \(#1 of the host\) writes .* which copy 'use' .* reads"),
    (closed_in_use, r"close of the device while the host does not know streams one to be complete"),
    (carried_on, r"write to 'b' \(#1 of the host\) .* which copy 'hop 0' \(#1 of stream one\) writes"),
)
IDS = [case.__name__ for case, _ in MISTAKES]


@pytest.mark.parametrize(("case", "message"), MISTAKES, ids=IDS)
def test_a_mistake_names_both_operations_whatever_order_is_drawn(case: Callable[..., None], message: str) -> None:
    for seed in range(8):
        case(SimulatedDevice(seed), True)
        with pytest.raises(HazardError, match=message):
            case(SimulatedDevice(seed), False)


def test_a_stream_of_its_own_needs_no_events(device: SimulatedDevice) -> None:
    stream, a, b = device.stream("one"), ints(device, "a"), ints(device, "b")
    for _ in range(3):
        stream.copy(b, a, "there")
        stream.copy(a, b, "back")


def test_what_is_enqueued_later_follows_what_the_host_wrote_and_heard_of(device: SimulatedDevice) -> None:
    one, other, done = device.stream("one"), device.stream("other"), device.event("done")
    given, result = pinned(device, "given"), pinned(device, "result")
    given.write([1, 2, 3, 4])
    one.copy(result, given, "use")
    one.record(done)
    done.synchronize()
    other.copy(given, result, "back")
    assert result.read().tolist() == [1, 2, 3, 4]


def test_memory_that_was_never_written_is_zero(device: SimulatedDevice) -> None:
    result = pinned(device, "result")
    device.stream("one").copy(result, ints(device, "a"), "use")
    device.synchronize()
    assert result.read().tolist() == [0] * 4


def test_only_the_same_bytes_meet(device: SimulatedDevice) -> None:
    one, other = device.stream("one"), device.stream("other")
    cache = device.empty("cache", (4, 2, 8, 4), np.int64)
    for slot, stream in ((0, one), (1, other), (2, one)):
        stream.copy(cache[slot : slot + 1, :, 2:5], device.empty("rows", (1, 2, 3, 4), np.int64), "move")
    other.copy(cache[0:1, :, :2], device.empty("rows", (1, 2, 2, 4), np.int64), "before")
    other.copy(cache[0:1, :, 5:], device.empty("rows", (1, 2, 3, 4), np.int64), "after")
    with pytest.raises(HazardError, match=r"bytes 352 to 384 of 'cache'"):
        other.copy(cache[0:1, 1:, 3:4], device.empty("row", (1, 1, 1, 4), np.int64), "within")


def test_regions_are_exact() -> None:
    rng, memory = random.Random(0), ints(SimulatedDevice(), "a", 4 * 3 * 5 * 2)
    parts = []
    for _ in range(40):
        ends = [sorted(rng.choices(range(n + 1), k=2)) for n in (4, 3, 5, 2)]
        part = memory.reshape(4, 3, 5, 2)[tuple(slice(*pair) for pair in ends)]
        parts.append((Region(part), {start + i for start, size in part.pieces() for i in range(size)}))
    for one, bytes_of_one in parts:
        for other, bytes_of_other in parts:
            found, common = one.overlap(other), bytes_of_one & bytes_of_other
            assert bool(found) == bool(common)
            if found is not None:
                assert set(range(*found)) <= common and found[0] == min(common)


# Freed memory


def test_nothing_uses_freed_memory(device: SimulatedDevice, graphs: Path) -> None:
    stream, program = device.stream("one"), device.load(graphs / "mix.onnx", "mix")
    gone, other = pinned(device, "gone"), ints(device, "other")
    made_before = program.bind({"a": gone, "b": other, "c": ints(device, "c")})
    gone.memory.free()
    uses: tuple[Callable[[], object], ...] = (
        lambda: stream.run(made_before, "mix"),
        lambda: stream.copy(other, gone, "copy"),
        lambda: stream.copy(gone, other, "copy"),
        lambda: program.bind({"a": gone, "b": other, "c": ints(device, "c")}),
        gone.read,
        lambda: gone.write([0] * 4),
        gone.memory.free,
    )
    for use in uses:
        with pytest.raises(HazardError, match=r"uses 'gone' after free of 'gone' \(#1 of the host\)"):
            use()
    device.close()
    with pytest.raises(HazardError, match="copy 'late' on stream one after the device was closed"):
        stream.copy(other, ints(device, "b"), "late")


# Graphs


def test_a_graph_may_write_over_nothing_that_it_reads_but_a_cache(device: SimulatedDevice, graphs: Path) -> None:
    mix, cache = (device.load(graphs / f"{name}.onnx", name) for name in ("mix", "cache"))
    a, b = ints(device, "a"), ints(device, "b", 8)
    with pytest.raises(HazardError, match=r"bind of 'mix': output c and a share bytes 0 to 32 of 'a'"):
        mix.bind({"a": a, "b": b[:4], "c": a})
    with pytest.raises(HazardError, match=r"output present_key_0 and past_key_0 share bytes 16 to 32 of 'b'"):
        cache.bind({"past_key_0": b[:4], "present_key_0": b[2:6], "a": a})
    cache.bind({"past_key_0": b[:4], "present_key_0": b[:4], "a": a})
    with pytest.raises(HazardError, match=r"copy 'shift' on stream one overlaps itself in bytes 16 to 32 of 'b'"):
        device.stream("one").copy(b[2:6], b[:4], "shift")


def test_a_graph_that_fails_is_heard_of_by_the_next_synchronize(device: SimulatedDevice, graphs: Path) -> None:
    index = pinned(device, "index")
    index.write([0, 1, 2, 99])
    bound = device.load(graphs / "lookup.onnx", "lookup").bind(
        {"a": ints(device, "a"), "b": index, "c": ints(device, "c")}
    )
    device.stream("one").run(bound, "look")
    with pytest.raises(EngineError, match="the lookup graph failed"):
        device.synchronize()
    device.synchronize()


# Repeated work


@pytest.mark.parametrize("seed", range(6))
def test_repeated_work_is_done_each_time(seed: int, graphs: Path) -> None:
    device = SimulatedDevice(seed)
    stream, total, step, after = device.stream("one"), ints(device, "t"), pinned(device, "s"), ints(device, "u")
    step.write([1, 2, 3, 4])
    bound = device.load(graphs / "mix.onnx", "mix").bind({"a": total, "b": step, "c": after})

    def enqueue() -> None:
        stream.run(bound, "mix")
        stream.copy(total, after, "back")

    for _ in range(4):
        stream.repeat("again", enqueue)
    result = pinned(device, "result")
    stream.copy(result, total, "copy")
    device.synchronize()
    assert result.read().tolist() == [40, 80, 120, 160]  # 1, 4, 13, 40


class Again:
    """Work under one key that goes wrong the second time, in a way of its own."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device, self.stream, self.other = device, device.stream("one"), device.stream("other")
        self.event, self.given = device.event("e"), pinned(device, "given")
        self.buffers = [ints(device, name) for name in "abc"]
        self.fresh = ints(device, "a")
        self.calls = count()

    def enqueue(self, wrong: str) -> None:
        a, b, c = self.buffers
        is_first = next(self.calls) == 0
        source = {"buffer": c, "memory": self.fresh}.get(wrong, a)
        self.stream.copy(b, a if is_first else source, "copy")
        if is_first:
            return
        mistakes: dict[str, Callable[[], object]] = {
            "more": lambda: self.stream.copy(c, b, "copy"),
            "stream": lambda: self.other.copy(c, self.given, "copy"),
            "record": lambda: self.stream.record(self.event),
            "wait": lambda: self.stream.wait(self.event),
            "event": self.event.synchronize,
            "device": self.device.synchronize,
            "read": self.given.read,
            "allocation": lambda: ints(self.device, "new"),
            "nested": lambda: self.stream.repeat("inner", lambda: None),
        }
        mistakes.get(wrong, lambda: None)()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("buffer", r"repeat of 'again' on stream one is not what it was: its step 0 was copy 'copy' of 'a' \[4\] at 0"),
        (
            "memory",
            r"its step 0 was copy 'copy' of 'a' .* of allocation 2 .* is now copy 'copy' of 'a' .* of allocation 5",
        ),
        ("more", r"it had 1 steps and has now 2"),
        ("stream", r"copy 'copy' on stream other within repeat of 'again' on stream one"),
        ("record", r"record of event 'e' within repeat"),
        ("wait", r"wait for event 'e' within repeat"),
        ("event", r"synchronize of event 'e' within repeat"),
        ("device", r"synchronize of the device within repeat"),
        ("read", r"read of 'given' within repeat"),
        ("allocation", r"allocation of 'new' within repeat"),
        ("nested", r"repeat of 'inner' within repeat"),
    ],
)
def test_repeated_work_has_to_be_the_same_and_nothing_else(wrong: str, message: str) -> None:
    again = Again(SimulatedDevice(order=Always(0)))
    again.stream.repeat("again", lambda: again.enqueue(wrong))
    with pytest.raises(HazardError, match=message):
        again.stream.repeat("again", lambda: again.enqueue(wrong))
    again.stream.copy(again.buffers[0], again.buffers[1], "goes on")


class Always(Order):
    """Takes the option of one index, the last of fewer."""

    def __init__(self, index: int) -> None:
        self._index = index

    def pick(self, options: object) -> int:
        return min(self._index, len(options) - 1)  # type: ignore[arg-type]


def test_a_key_that_was_used_on_freed_memory_is_not_used_again(device: SimulatedDevice) -> None:
    stream, a, b = device.stream("one"), ints(device, "a"), ints(device, "b")
    stream.repeat("again", lambda: stream.copy(b, a, "copy"))
    device.synchronize()
    a.memory.free()
    fresh = ints(device, "a")
    with pytest.raises(HazardError, match=r"repeat of 'again' .* memory that free of 'a' \(#1 of the host\) took"):
        stream.repeat("again", lambda: stream.copy(b, fresh, "copy"))


# Orders


def copies(order: Order, sizes: tuple[int, ...]) -> tuple[str, ...]:
    """So many copies on streams that share nothing; in which order they ran."""
    device, log = SimulatedDevice(order=order), []
    step = device._step
    device._step = lambda name: (log.append(name), step(name))[1]  # type: ignore[method-assign, func-returns-value]
    for i, size in enumerate(sizes):
        stream = device.stream(f"s{i}")
        for _ in range(size):
            stream.copy(ints(device, "b"), ints(device, "a"), "copy")
    device.synchronize()
    return tuple(log)


@pytest.mark.parametrize("sizes", [(1,), (3, 2), (2, 2, 2), (1, 1, 1, 1)])
def test_every_order_is_every_interleaving_once(sizes: tuple[int, ...]) -> None:
    found = list(every_order(lambda order: copies(order, sizes)))
    number = math.factorial(sum(sizes)) // math.prod(map(math.factorial, sizes))
    assert len(found) == len(set(found)) == number


class Program:
    """Copies, waits and host accesses, drawn; small enough for every order of it."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.steps: list[tuple[str, tuple[int, ...]]] = []
        for _ in range(7):
            verb = rng.choice(("copy", "copy", "copy", "record", "wait", "host"))
            self.steps.append((verb, (rng.randrange(2), *rng.sample(range(3), 2))))

    def run(self, order: Order) -> tuple[list[int], bool]:
        """What is in memory at the end, and whether a hazard was found."""
        device = SimulatedDevice(order=order, raises=False)
        streams = [device.stream(name) for name in ("one", "other")]
        events = [device.event(name) for name in "xyz"]
        buffers = [pinned(device, name, 1) for name in "abc"]
        for value, buffer in enumerate(buffers):
            buffer.write([value])
        written = count(10)
        for verb, (stream, first, second) in self.steps:
            if verb == "copy":
                streams[stream].copy(buffers[first], buffers[second], "copy")
            elif verb == "record":
                streams[stream].record(events[first])
            elif verb == "wait":
                streams[stream].wait(events[first])
            elif first:
                events[first].synchronize()
                buffers[second].write([next(written)])
        device.synchronize()
        return [int(buffer.read()[0]) for buffer in buffers], bool(device.hazards)


def test_a_hazard_is_found_in_every_order_or_in_none_and_without_one_all_orders_agree() -> None:
    num_found = num_wrong = num_right = 0
    for seed in range(150):
        results = list(every_order(Program(seed).run))
        outcomes, found = {tuple(values) for values, _ in results}, {was_found for _, was_found in results}
        assert len(found) == 1, f"program {seed}: the verdict hangs on the order"
        assert found == {True} or len(outcomes) == 1, f"program {seed}: different results and no hazard"
        num_found += found == {True}
        num_wrong += len(outcomes) > 1
        num_right += found == {False}
    assert min(num_found, num_wrong, num_right) > 20, (num_found, num_wrong, num_right)


def race(order_or_seed: int) -> list[int]:
    """Two streams write the same memory, unordered."""
    device = SimulatedDevice(order_or_seed, raises=False)
    result, sources = pinned(device, "result"), [pinned(device, name) for name in "ab"]
    for i, source in enumerate(sources):
        source.write([i] * 4)
        device.stream(f"s{i}").copy(result, source, "copy")
    device.synchronize()
    return result.read().tolist()  # type: ignore[no-any-return]


def test_a_seed_always_gives_the_same_order_and_seeds_give_both() -> None:
    assert {tuple(race(seed)) for seed in range(20)} == {(0,) * 4, (1,) * 4}
    assert [race(seed) for seed in range(20)] == [race(seed) for seed in range(20)]


def test_work_runs_before_the_host_asks_for_it_or_not() -> None:
    """A host that reads too early sees the old numbers in some orders and the new ones in others."""

    def seen(order: Order) -> int:
        device = SimulatedDevice(order=order, raises=False)
        given, result = pinned(device, "given", 1), pinned(device, "result", 1)
        given.write([1])
        device.stream("one").copy(result, given, "copy")
        return int(result.read()[0])

    assert set(every_order(seen)) == {0, 1}


# Length


def test_history_does_not_grow_with_the_work(device: SimulatedDevice) -> None:
    one, other, done = device.stream("one"), device.stream("other"), device.event("done")
    a, b, c = ints(device, "a"), ints(device, "b"), ints(device, "c")
    for _ in range(500):
        one.copy(b, a, "copy")
        one.record(done)
        other.wait(done)
        other.copy(c, a, "copy")
    assert [len(buffer.memory.history) for buffer in (a, b, c)] == [2, 1, 1]  # type: ignore[attr-defined]
    device.synchronize()
    one.copy(b, a, "copy")
    assert [len(buffer.memory.history) for buffer in (a, b)] == [1, 1]  # type: ignore[attr-defined]
    assert device._streams["one"].pending and not device._streams["other"].pending


def sites_of(program: Callable[[SimulatedDevice, bool], None]) -> Iterator[tuple[SimulatedDevice, str]]:
    """A right program, each time with one of the places that order its work left out."""
    whole = SimulatedDevice()
    program(whole, True)
    for site in whole.sites:
        device = SimulatedDevice(without=site, raises=False)
        program(device, True)
        yield device, str(site)


@pytest.mark.parametrize(
    "case", [case for case, _ in MISTAKES if case is not recorded_too_early], ids=lambda c: c.__name__
)
def test_a_place_that_is_left_out_is_found(case: Callable[[SimulatedDevice, bool], None]) -> None:
    found = {site: bool(device.hazards) for device, site in sites_of(case)}
    assert found and all(found.values()), found


def test_the_numbers_are_those_of_the_cpu(graphs: Path) -> None:
    """The same calls on both devices, on two streams with a wait between them."""

    def run(device: Device) -> list[int]:
        one, other, ready = device.stream("one"), device.stream("other"), device.event("ready")
        given, middle, result = pinned(device, "given"), ints(device, "middle"), pinned(device, "result")
        program = device.load(graphs / "mix.onnx", "mix")
        given.write([1, -2, 3, 4])
        one.run(program.bind({"a": given, "b": given, "c": middle}), "mix")
        one.record(ready)
        other.wait(ready)
        other.run(program.bind({"a": middle, "b": given, "c": result}), "mix")
        device.synchronize()
        return result.read().tolist()  # type: ignore[no-any-return]

    assert run(SimulatedDevice(3)) == run(CpuDevice(1)) == [13, -26, 39, 52]
