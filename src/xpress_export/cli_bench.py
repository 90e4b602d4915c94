"""`xpress-export bench`: throughput, latencies and where the time goes, by mode and concurrency."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from xpress_export import console as ui
from xpress_export.cli_device import device_options, executed_on
from xpress_export.cli_precision import PRECISION
from xpress_export.manifest import read_manifest
from xpress_export.precision import Precision

if TYPE_CHECKING:
    from xpress_export.runtime.bench import BenchReport, Spread

_IMPORT_GOAL_S, _OPEN_GOAL_S = 0.3, 1.0


class _Numbers(click.ParamType[tuple[int, ...]]):
    """Counts with commas between them."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers like 1,2,4", param, ctx)
        if min(numbers) < 1:
            self.fail(f"{min(numbers)} is not at least 1", param, ctx)
        return numbers


@click.command("bench")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--modes", metavar="M,M", help="Of target, dflash, xpress, adaptive.  [default: all that the bundle has]")
@click.option(
    "--concurrency",
    type=_Numbers(),
    metavar="N,N",
    help="Clients at a time.  [default: 1,2,4,8, as far as engines admit]",
)
@click.option("--prompts", type=click.Path(path_type=Path), metavar="F", help="JSONL, as for eval.  [default: eight]")
@click.option(
    "--requests", type=click.IntRange(min=1), metavar="N", help="Requests per measurement.  [default: all prompts]"
)
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=64, metavar="N", help="At most, per answer.")
@click.option("--ignore-eos", is_flag=True, help="Every answer has --max-new-tokens tokens, sense or not.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, metavar="R", help="Repetitions, interleaved.")
@PRECISION
@device_options
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads.  [default: one per core]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Also write a page with plots.")
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE", help="Also write a timeline of cycles (Chrome trace)."
)
@click.option("--nvtx", is_flag=True, help="Ranges for Nsight Systems; with --device cuda:N and a --backend.")
def bench_command(
    bundle: Path, as_json: bool, html: Path | None, trace: Path | None, nvtx: bool, **options: Any
) -> None:
    """Measure speed by mode and concurrency, greedy.

    Tokens per second, time to first token, inter-token latency, tau, the parts of a cycle, memory, and what importing
    and opening take. Modes take turns; ratios are taken within a round.
    """
    if nvtx:
        options["device"] = _with_ranges(bundle, options["device"], options["backend"])
    report = _measure(bundle, trace, **options)
    facts = {"bundle": bundle.name, "executed_on": _place(report.device), "max_new_tokens": options["max_new_tokens"]}
    facts["rounds"] = options["rounds"]
    if html is not None:
        from xpress_export.bench_report import bench_page

        html.write_text(bench_page(report, facts), "utf-8")
    if as_json:
        click.echo(json.dumps({**facts, **report.to_dict()}, indent=2))
        return
    console = ui.make_console()
    console.print(_speed_table(report))
    console.print(_time_table(report))
    for line in _notes(report, facts):
        console.print(line)


def _with_ranges(bundle: Path, device: str, backend: str) -> Any:
    """That GPU, showing its work to Nsight Systems."""
    name, _, index = device.partition(":")
    if name != "cuda" or not (index or "0").isdigit() or backend == "auto":
        raise click.UsageError("--nvtx shows ranges of a GPU: name it with --device cuda:N, and a --backend")
    from xpress_export.runtime.device_cuda import open_cuda

    host_code = any(engine.version_compatible for engine in read_manifest(bundle).engines)
    return open_cuda(int(index or 0), backend, ranges=True, host_code=host_code)


def _measure(
    bundle: Path,
    trace: Path | None,
    modes: str | None,
    concurrency: tuple[int, ...] | None,
    prompts: Path | None,
    requests: int | None,
    max_new_tokens: int,
    ignore_eos: bool,
    rounds: int,
    precision: Precision,
    threads: int | None,
    **device: Any,
) -> BenchReport:
    from xpress_export.runtime.bench import PROMPTS, BenchOptions, bench
    from xpress_export.runtime.evaluate import read_prompts
    from xpress_export.runtime.trace import Tracer

    options = BenchOptions(
        modes=modes.split(",") if modes else None,
        concurrency=concurrency,
        prompts=PROMPTS if prompts is None else read_prompts(prompts),
        num_requests=requests,
        max_new_tokens=max_new_tokens,
        rounds=rounds,
        ignore_eos=ignore_eos,
        precision=precision,
        num_threads=threads,
        **device,
    )
    tracer = Tracer() if trace is not None else None
    report = bench(bundle, options, ui.ConsoleProgress(ui.make_console(stderr=True)), tracer)
    if trace is not None and tracer is not None:
        tracer.write(trace)
    return report


def _speed_table(report: BenchReport) -> Table:
    header = ("mode", "clients", "tokens/s", "speed-up", "scaling", "tau", "first token ms", "per token ms", "gap ms")
    rows = [
        (
            row.mode,
            row.concurrency,
            f"{row.tokens_per_s.median:.1f}",
            _shown(row.speed_up),
            _shown(row.scaling),
            f"{row.tau:.2f}",
            *(
                " / ".join(f"{value:.0f}" for value in found.values())
                for found in (row.ttft_ms, row.itl_ms, row.gap_ms)
            ),
        )
        for row in report.rows
    ]
    return ui.table("Speed (ratios: median and range of rounds; times: p50 / p90 / p99)", header, rows)


def _time_table(report: BenchReport) -> Table:
    header = ("mode", "clients", "draft", "refine", "verify", "host", "host share", "prefill per request", "KV")
    rows = [
        (
            row.mode,
            row.concurrency,
            *(f"{value:.2f}" for value in row.cycle_ms.values()),
            f"{row.host_share:.2%}",
            f"{row.prefill_ms:.0f}",
            ui.human_bytes(row.kv_bytes),
        )
        for row in report.rows
    ]
    return ui.table("\nWhere the time goes, ms per cycle", header, rows)


def _shown(ratio: Spread) -> str:
    return f"{ratio.median:.2f}x ({ratio.least:.2f}-{ratio.most:.2f})"


def _notes(report: BenchReport, facts: dict[str, Any]) -> list[str]:
    startup = report.startup
    tokens = "the same tokens in every row" if report.same_tokens else "NOT the same tokens in every row"
    return [
        "",
        f"import of the runtime {startup.import_s:.2f} s (goal: at most {_IMPORT_GOAL_S:g}); opening "
        f"{startup.open_s:.2f} s (goal: at most {_OPEN_GOAL_S:g}) beyond {startup.read_s:.2f} s of reading files",
        f"peak memory {ui.human_bytes(report.peak_memory_bytes)}; {report.num_requests} requests and "
        f"{report.num_tokens} tokens per row and round, {tokens}",
        f"executed on {facts['executed_on']}",
    ]


def _place(device: str) -> str:
    """What it ran on; of a CPU, what the system calls it and how many of its cores this process may use."""
    import os

    if device != "cpu":
        return executed_on(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU, {len(os.sched_getaffinity(0))} cores of {named[0] if named else platform.machine()}"
