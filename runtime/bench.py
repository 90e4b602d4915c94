"""Speed of a bundle as its users meet it: throughput, latencies and where the time goes, by mode and concurrency.

A *cell* is one mode at one concurrency: so many clients, each sending its next prompt as soon as its last answer is
complete. Every round runs all cells, in an order that turns, so that a machine whose speed drifts treats them alike;
ratios are taken within a round. Greedy: every cell generates the same tokens, and whether it did is reported.

    tokens_per_s   generated tokens of all clients over the wall time of the cell
    speed_up       tokens_per_s over that of plain decoding at the same concurrency in the same round
    scaling        tokens_per_s over that of the same mode at the lowest concurrency in the same round
    ttft_ms        submission to first token
    itl_ms         inter-token latency: the time between two arrivals, shared out over the tokens of the second
    gap_ms         the time between two arrivals, which with drafting may bring several tokens
    tau            tokens per verify step
    *_ms per cycle engine time of a decode cycle by stage; host: all time outside engine calls while there was work
    host_share     host time of all time while there was work, prefill included
"""

from __future__ import annotations

import asyncio
import logging
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from xpress_export import names
from xpress_export.errors import RequestError, XpressExportError
from xpress_export.precision import Precision
from xpress_export.progress import Progress, Silent
from xpress_export.runtime.api import Runtime
from xpress_export.runtime.device import Device
from xpress_export.runtime.params import SamplingParams
from xpress_export.runtime.trace import Tracer

ADAPTIVE = "adaptive"
STAGES = ("draft", "refine", "verify", "host")
_TIMES = ("prefill_ms", "draft_ms", "refine_ms", "verify_ms", "host_ms")
_COUNTS = ("num_cycles", "num_verify_steps", "num_draft_tokens", "num_accepted", "num_generated_tokens")
CONCURRENCY = (1, 2, 4, 8)
_NUM_IMPORTS = 5
_WARM_UP_TOKENS = 16
PROMPTS = (
    "Mia has 3 boxes of 24 pencils and gives away 29 of them. How many pencils are left?",
    "Write a Python function that returns the second largest number in a list.",
    "What is 15% of 240, and how did you get it?",
    "Explain in three sentences why the sky is blue.",
    "A train leaves at 9:15 and travels 84 km at 56 km per hour. When does it arrive?",
    "Give me a recipe for pancakes.",
    "Translate into French: The library opens at nine and closes at six.",
    "List five facts about the planet Mars.",
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """modes: of target, dflash, xpress and adaptive; None: all that the bundle has. Plain decoding always runs.

    concurrency: clients at a time; None: CONCURRENCY, as far as engines admit. num_requests: of each cell; None: one
    per prompt, and no fewer than the largest concurrency.
    """

    modes: Sequence[str] | None = None
    concurrency: Sequence[int] | None = None
    prompts: Sequence[str] = PROMPTS
    num_requests: int | None = None
    max_new_tokens: int = 64
    rounds: int = 3
    ignore_eos: bool = False
    precision: Precision = None
    num_threads: int | None = None
    device: str | Device = "auto"
    backend: str = "auto"
    layout: str | None = None
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None and min(self.concurrency, default=0) < 1:
            raise RequestError(f"concurrency must be at least 1, got {list(self.concurrency)}", "concurrency")
        if not self.prompts:
            raise RequestError("there are no prompts to send", "prompts")
        for name, least in (("rounds", 1), ("max_new_tokens", 2)):
            if getattr(self, name) < least:
                raise RequestError(f"{name} must be at least {least}, got {getattr(self, name)}", name)


@dataclass
class Startup:
    """Seconds. import_s: of the runtime, least of a few new processes. read_s: reading and checking the bundle's files;
    open_s: all that opening takes beside that.
    """

    import_s: float
    read_s: float
    open_s: float


@dataclass
class Cell:
    """One mode at one concurrency in one round. Times in ms; spent: differences of the runtime's own counts."""

    wall_s: float = 0.0
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    outputs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    kv_bytes: int = 0

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.outputs.values())) / self.wall_s


@dataclass(frozen=True)
class Spread:
    """Over rounds: the median, and the least and largest."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass
class Row:
    """One mode at one concurrency, over all rounds. Percentiles are of all requests or tokens of all rounds."""

    mode: str
    concurrency: int
    tokens_per_s: Spread
    speed_up: Spread
    scaling: Spread
    tau: float
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    gap_ms: dict[str, float]
    cycle_ms: dict[str, float]
    prefill_ms: float
    host_share: float
    kv_bytes: int


@dataclass
class BenchReport:
    """Everything `bench` found. device: where. same_tokens: whether every cell generated the same answers."""

    device: str
    startup: Startup
    rows: list[Row]
    num_requests: int
    num_tokens: int
    same_tokens: bool
    peak_memory_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def bench(
    folder: Path, options: BenchOptions, progress: Progress | None = None, tracer: Tracer | None = None
) -> BenchReport:
    """Open a bundle and measure it. Raises RequestError for a mode that it lacks.

    tracer: gets a timeline of one more run of every cell, after the measurement, which it would slow down.
    """
    progress = progress or Silent()
    with progress.step("Importing the runtime in new processes", expected_s=2):
        import_s = min(_import_s() for _ in range(_NUM_IMPORTS))
    with progress.step("Opening the bundle", expected_s=3):
        runtime, read_s, open_s = _open(folder, options)
    with runtime:
        modes = _modes(runtime, options.modes)
        counts = _counts(options.concurrency, runtime.stats.num_slots)  # modes to compare run side by side
        most = counts[-1]
        jobs = _jobs(options, most)
        cells: dict[tuple[str, int], list[Cell]] = {(mode, count): [] for count in counts for mode in modes}
        with progress.step("Measuring", total=(options.rounds + 1) * len(cells)) as advance:
            for mode, concurrency in cells:
                run_cell(runtime, mode, concurrency, jobs[:most], min(_WARM_UP_TOKENS, options.max_new_tokens), False)
                advance(1)
            for key in _order(list(cells), options.rounds):
                cells[key].append(run_cell(runtime, *key, jobs, options.max_new_tokens, options.ignore_eos))
                advance(1)
        if tracer is not None:
            _trace(runtime, list(cells), jobs, options, tracer)
    every = [cell.outputs for found in cells.values() for cell in found]
    return BenchReport(
        device=runtime.device,
        startup=Startup(import_s, read_s, open_s),
        rows=[_row(mode, concurrency, cells) for mode, concurrency in cells],
        num_requests=len(jobs),
        num_tokens=sum(map(len, every[0].values())),
        same_tokens=all(outputs == every[0] for outputs in every),
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _trace(
    runtime: Runtime, cells: Sequence[tuple[str, int]], jobs: Sequence[str], options: BenchOptions, tracer: Tracer
) -> None:
    """One run of every cell on the timeline, each under a span of its own."""
    runtime.trace(tracer)
    for mode, concurrency in cells:
        start = time.perf_counter()
        run_cell(runtime, mode, concurrency, jobs[:concurrency], options.max_new_tokens, options.ignore_eos)
        tracer.add("cells", f"{mode}, {concurrency} clients", start, time.perf_counter())
    runtime.trace(None)


def run_cell(
    runtime: Runtime, mode: str, concurrency: int, prompts: Sequence[str], max_new_tokens: int, ignore_eos: bool
) -> Cell:
    """All prompts once, `concurrency` at a time. Not to be called from a running asyncio loop."""
    params = SamplingParams(
        max_new_tokens=max_new_tokens, ignore_eos=ignore_eos, mode=None if mode == ADAPTIVE else mode
    )
    cell, before = Cell(), runtime.stats
    started = time.perf_counter()
    asyncio.run(_clients(runtime, params, concurrency, prompts, cell))
    cell.wall_s = time.perf_counter() - started
    after = runtime.stats
    cell.spent = {name: getattr(after, name) - getattr(before, name) for name in (*_TIMES, *_COUNTS)}
    cell.kv_bytes = after.kv_bytes
    return cell


async def _clients(
    runtime: Runtime, params: SamplingParams, concurrency: int, prompts: Sequence[str], cell: Cell
) -> None:
    jobs = iter(list(enumerate(prompts)))
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(_client(runtime, params, jobs, cell))


async def _client(runtime: Runtime, params: SamplingParams, jobs: Iterator[tuple[int, str]], cell: Cell) -> None:
    for number, prompt in jobs:
        last = time.perf_counter()
        generation = runtime.submit(prompt, params)
        is_first = True
        async for chunk in generation:
            now = time.perf_counter()
            if count := len(chunk.token_ids):
                gap = 1e3 * (now - last)
                if is_first:
                    cell.ttft_ms.append(gap)
                else:
                    cell.gap_ms.append(gap)
                    cell.itl_ms += [gap / count] * count
                last, is_first = now, False
        cell.outputs[number] = tuple(generation.token_ids)


def _open(folder: Path, options: BenchOptions) -> tuple[Runtime, float, float]:
    """The runtime, seconds to read and check its files, seconds for the rest."""
    started = read = time.perf_counter()

    def note(_: int) -> None:
        nonlocal read
        read = time.perf_counter()

    runtime = Runtime.open(
        folder,
        precision=options.precision,
        num_slots=None if options.concurrency is None else max(options.concurrency),
        num_threads=options.num_threads,
        device=options.device,
        backend=options.backend,
        layout=options.layout,
        max_draft_tokens=options.max_draft_tokens,
        on_verify=note,
    )
    return runtime, read - started, time.perf_counter() - read


def _import_s() -> float:
    code = "import time; start = time.perf_counter(); import xpress_export.runtime; print(time.perf_counter() - start)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise XpressExportError(f"a new process cannot import the runtime: {done.stderr.strip()[-500:]}")
    return float(done.stdout)


def _modes(runtime: Runtime, asked: Sequence[str] | None) -> list[str]:
    """Plain decoding first, then what was asked for, each once."""
    has = [*runtime.modes, *([ADAPTIVE] if runtime.adapts else [])]
    wanted = has if asked is None else list(asked)
    for mode in wanted:
        if mode not in has:
            raise RequestError(f"mode {mode!r} is not one of those this bundle has: {', '.join(has)}", "modes")
    return list(dict.fromkeys([names.MODE_TARGET, *wanted]))


def _counts(asked: Sequence[int] | None, num_slots: int) -> list[int]:
    """Numbers of clients, ascending: what was asked for, else as many of the usual ones as have a slot each."""
    if asked is not None:
        return sorted(set(asked))
    counts = [count for count in CONCURRENCY if count <= num_slots]
    if len(counts) < len(CONCURRENCY):
        logger.warning(
            "the engines admit %d at a time: measuring concurrency %s of %s; for more, run `xpress-export compile` "
            "with a larger --max-batch",
            *(num_slots, ",".join(map(str, counts)), ",".join(map(str, CONCURRENCY))),
        )
    return counts


def _jobs(options: BenchOptions, most_clients: int) -> list[str]:
    num = options.num_requests or max(len(options.prompts), most_clients)
    return [options.prompts[i % len(options.prompts)] for i in range(num)]


def _order(cells: list[tuple[str, int]], rounds: int) -> Iterator[tuple[str, int]]:
    """Every cell once a round; each round begins elsewhere, every second one goes backwards."""
    for i in range(rounds):
        start = i * len(cells) // rounds
        turned = cells[start:] + cells[:start]
        yield from turned if i % 2 == 0 else reversed(turned)


def _row(mode: str, concurrency: int, cells: dict[tuple[str, int], list[Cell]]) -> Row:
    mine = cells[mode, concurrency]
    plain = cells[names.MODE_TARGET, concurrency]
    alone = cells[mode, min(c for _, c in cells)]
    spent = {name: sum(cell.spent[name] for cell in mine) for name in (*_TIMES, *_COUNTS)}
    cycles = spent["num_cycles"] or 1
    return Row(
        mode=mode,
        concurrency=concurrency,
        tokens_per_s=Spread.of([cell.tokens_per_s for cell in mine]),
        speed_up=_ratio(mine, plain),
        scaling=_ratio(mine, alone),
        tau=1 + spent["num_accepted"] / spent["num_verify_steps"] if spent["num_verify_steps"] else 0.0,
        ttft_ms=_percentiles([ms for cell in mine for ms in cell.ttft_ms]),
        itl_ms=_percentiles([ms for cell in mine for ms in cell.itl_ms]),
        gap_ms=_percentiles([ms for cell in mine for ms in cell.gap_ms]),
        cycle_ms={stage: spent[f"{stage}_ms"] / cycles for stage in STAGES},
        prefill_ms=spent["prefill_ms"] / sum(len(cell.outputs) for cell in mine),
        host_share=spent["host_ms"] / (sum(spent[name] for name in _TIMES) or 1.0),
        kv_bytes=max(cell.kv_bytes for cell in mine),
    )


def _ratio(mine: Sequence[Cell], others: Sequence[Cell]) -> Spread:
    """Of tokens per second, round by round."""
    return Spread.of([a.tokens_per_s / b.tokens_per_s for a, b in zip(mine, others, strict=True)])


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    found = np.percentile(values, (50, 90, 99)) if values else (0.0, 0.0, 0.0)
    return dict(zip(("p50", "p90", "p99"), map(float, found), strict=True))
