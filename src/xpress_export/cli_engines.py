"""The commands about TensorRT engines: compile, platforms, cache, graph; and `inspect --engine`."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from xpress_export import console as ui
from xpress_export import names, platforms
from xpress_export.cli_precision import PRECISION
from xpress_export.precision import Precision
from xpress_export.records import HARDWARE_LEVELS

err = ui.make_console(stderr=True)
out = ui.make_console()
GRAPHS = click.Choice((*names.ROLES, *names.CYCLE))
BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))


def default_cache_dir() -> Path:
    """Where engines are kept unless told otherwise: XDG_CACHE_HOME, or ~/.cache."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "xpress-export" / "engines"


@click.command("compile")
@BUNDLE
@click.option("--platform", required=True, metavar="P", help="Where the engines run; see `xpress-export platforms`.")
@PRECISION
@click.option(
    "--backend",
    type=click.Choice([platforms.TENSORRT, platforms.TENSORRT_RTX]),
    help="Which TensorRT builds.  [default: the one that can here]",
)
@click.option(
    "--layout",
    type=click.Choice(names.LAYOUTS),
    help="split: an engine for each model; fused: one for a whole cycle.  [default: the bundle's]",
)
@click.option(
    "--lowering",
    type=click.Choice(["auto", *platforms.LOWERINGS]),
    default="auto",
    help="Form of the graphs; auto: what the TensorRT version reads.",
)
@click.option("--role", "roles", multiple=True, type=GRAPHS, help="Only the engine of this graph; repeatable.")
@click.option("--max-context", type=click.IntRange(min=2), metavar="N", help="Tokens of prompt and answer together.")
@click.option("--max-batch", type=click.IntRange(min=1), default=1, metavar="N", help="Slots.")
@click.option("--block", type=click.IntRange(min=2), metavar="N", help="Slots of a block.  [default: the drafter's]")
@click.option("--chunk", type=click.IntRange(min=1), default=512, metavar="N", help="Prompt tokens of one call.")
@click.option("--workspace-mb", type=click.IntRange(min=1), metavar="N", help="Scratch memory a layer may use.")
@click.option("--tactic-mb", type=click.IntRange(min=1), metavar="N", help="Device memory for trying kernels.")
@click.option("--opt-level", type=click.IntRange(0, 5), metavar="0-5", help="TensorRT's optimization level.")
@click.option(
    "--hardware-compat", type=click.Choice(HARDWARE_LEVELS), default="none", help="Let the plan load on more GPUs."
)
@click.option("--version-compatible", is_flag=True, help="Let the plan load on newer TensorRT of the same major.")
@click.option("--timing-cache", type=click.Path(path_type=Path), metavar="F", help="Timing cache of your own.")
@click.option("--cache-dir", type=click.Path(path_type=Path), metavar="D", help="Engines already built.")
@click.option("--no-cache", is_flag=True, help="Neither use nor keep engines already built.")
@click.option("--jobs", "num_jobs", type=click.IntRange(min=1), default=1, metavar="N", help="Builds at a time.")
@click.option("--skip-memory-check", is_flag=True, help="Build even where memory is estimated not to suffice.")
@click.option("--json", "as_json", is_flag=True, help="Print the build reports as JSON.")
def compile_command(bundle: Path, as_json: bool, **options: Any) -> None:
    """Build TensorRT engines for one platform from the graphs of BUNDLE and add them to it.

    Needs neither torch nor transformers nor onnx. A failed or interrupted build leaves the bundle as it was.
    """
    from xpress_export.engines.compile import compile_bundle
    from xpress_export.engines.options import CompileOptions

    cache_dir, no_cache = options.pop("cache_dir") or default_cache_dir(), options.pop("no_cache")
    lowering, skip = options.pop("lowering"), options.pop("skip_memory_check")
    made = compile_bundle(
        bundle,
        CompileOptions(
            **options,
            lowering=None if lowering == "auto" else lowering,
            cache_dir=None if no_cache else cache_dir,
            check_memory=not skip,
        ),
        _Bars(err),
    )
    if as_json:
        click.echo(json.dumps([{**built.report, "cached": built.cached} for built in made.engines], indent=2))
        return
    out.print(f"{made.lowering} graphs: {made.reason}")
    for built in made.engines:
        out.print(_one_line(built.report, built.cached))


def _one_line(report: dict[str, Any], cached: bool) -> str:
    seconds = sum(report["seconds"].values())
    how = "from the cache" if cached else f"{seconds:.1f} s, peak {ui.human_bytes(report['peak_memory_bytes'])}"
    shares = ", ".join(f"{share:.0%} {name}" for name, share in report["matmul_share"].items()) or "none"
    return (
        f"  {report['role']}: {ui.human_bytes(report['plan']['num_bytes'])}, matmuls {shares}; {how}; "
        f"compiled for {report['platform']} (sm_{report['sm']}) with {report['backend']} {report['version']}"
    )


class _TimeLeft(ProgressColumn):
    """The time so far, and about what is left: by what TensorRT reports, or by what such a build usually takes."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        elapsed, expected = task.elapsed or 0.0, task.fields["expected_s"]
        if task.finished:
            return Text(f"{elapsed:.1f} s", style="dim")
        left = max(expected, elapsed / task.completed if task.completed > 0.3 else 0.0) - elapsed
        note = f", about {ui.human_seconds(left)} left" if left > 0 else ""
        return Text(ui.human_seconds(elapsed) + note, style="cyan")


class _Bars:
    """A bar per engine on a terminal: TensorRT's phase, the time so far and about what is left."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def engine(self, role: str, expected_s: float) -> Iterator[Any]:
        if not self._console.is_terminal:
            yield lambda _phase, _share: None
            return
        columns = (
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.fields[role]}"),
            BarColumn(24),
            _TimeLeft(),
            TextColumn("{task.description}", style="dim"),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task("starting", total=1.0, role=f"Building {role}", expected_s=expected_s)
            yield lambda phase, share: progress.update(task, description=phase, completed=share)
            progress.update(task, description="", completed=1.0)


@click.command("platforms")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def platforms_command(as_json: bool) -> None:
    """List the platforms: hardware, TensorRT versions, precisions (the advised one first), and what is proven."""
    rows = platforms.PLATFORMS.values()
    if as_json:
        click.echo(json.dumps([_platform_facts(row) for row in rows], indent=2))
        return
    header = ("name", "device", "sm", "memory", "bandwidth", "TensorRT", "lowering", "precisions", "evidence")
    out.print(ui.table(None, header, [_platform_row(row) for row in rows]))


def _platform_facts(row: platforms.Platform) -> dict[str, Any]:
    versions = [{"from": source, "tensorrt": version} for source, version in row.versions]
    keys = ("name", "device", "backend", "sm", "memory_gb", "bandwidth_gb_s", "unified_memory", "lowering")
    facts = {key: getattr(row, key) for key in keys}
    more = {"advised": row.advised, "evidence": row.evidence, "note": row.note}
    return {**facts, "versions": versions, "precisions": list(row.precisions), **more}


def _platform_row(row: platforms.Platform) -> tuple[object, ...]:
    versions = ", ".join(f"{version} ({source})" for source, version in row.versions) or row.backend
    return (
        row.name,
        row.device,
        row.sm or "-",
        f"{row.memory_gb:g} GB" if row.memory_gb else "-",
        f"{row.bandwidth_gb_s} GB/s" if row.bandwidth_gb_s else "-",
        versions,
        row.lowering,
        ", ".join(row.precisions),
        row.evidence,
    )


@click.group("cache")
def cache_command() -> None:
    """Engines already built, kept for the next time."""


@cache_command.command("ls")
@click.option("--cache-dir", type=click.Path(path_type=Path), metavar="D", help="Its folder.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def cache_ls(cache_dir: Path | None, as_json: bool) -> None:
    """List cached engines, the most recently used first."""
    from xpress_export.engines.cache import Cache

    entries = Cache(cache_dir or default_cache_dir(), 0).entries()
    keys = ("role", "platform", "backend", "version", "precision")
    if as_json:
        facts = [{"key": e.key, "num_bytes": e.num_bytes, **{k: e.report.get(k) for k in keys}} for e in entries]
        click.echo(json.dumps(facts, indent=2))
        return
    rows = [
        (e.key[:12], *(e.report.get(k) for k in keys), ui.human_bytes(e.num_bytes), _when(e.last_used)) for e in entries
    ]
    out.print(ui.table(None, ("key", *keys, "size", "last used"), rows))
    out.print(f"{len(entries)} engines, {ui.human_bytes(sum(e.num_bytes for e in entries))}")


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


@cache_command.command("clear")
@click.option("--cache-dir", type=click.Path(path_type=Path), metavar="D", help="Its folder.")
def cache_clear(cache_dir: Path | None) -> None:
    """Remove all cached engines and timing caches; bundles keep theirs."""
    from xpress_export.engines.cache import Cache

    out.print(f"{ui.human_bytes(Cache(cache_dir or default_cache_dir(), 0).clear())} freed")


@click.command("graph")
@BUNDLE
@click.argument("role", type=GRAPHS)
@click.option("--lowering", type=click.Choice(platforms.LOWERINGS), default=platforms.NATIVE, help="Which form.")
@PRECISION
@click.option("--capacity", type=click.IntRange(min=1), required=True, metavar="N", help="Rows of each cache.")
@click.option("--max-batch", type=click.IntRange(min=1), default=1, metavar="N", help="Slots.")
@click.option("--chunk", type=click.IntRange(min=1), default=512, metavar="N", help="Prompt tokens of one call.")
@click.option("--out", "folder", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder.")
def graph_command(
    bundle: Path,
    role: str,
    precision: Precision,
    lowering: str,
    capacity: int,
    max_batch: int,
    chunk: int,
    folder: Path,
) -> None:
    """Write one graph of BUNDLE with a fixed cache capacity, and print the trtexec command that builds it.

    For NVIDIA's own tools. Weights are linked, not copied.
    """
    from xpress_export.engines.by_hand import write_for_trtexec
    from xpress_export.manifest import read_manifest

    manifest = read_manifest(bundle)
    folder.mkdir(parents=True, exist_ok=True)
    out.print(write_for_trtexec(bundle, manifest, role, precision, lowering, capacity, max_batch, chunk, folder))


def print_engine(bundle: Path, role: str, platform: str | None, as_json: bool) -> None:
    """`inspect --engine`: one engine of a bundle."""
    from dataclasses import asdict

    from xpress_export.engines.inspection import find_engine, inspect_engine
    from xpress_export.manifest import read_manifest

    manifest = read_manifest(bundle)
    found = inspect_engine(bundle, manifest, find_engine(manifest, role, platform))
    if as_json:
        click.echo(json.dumps(asdict(found), indent=2))
        return
    out.print(ui.table(f"Engine {role} ({found.record.file})", ("", ""), list(_engine_facts(found))))
    profiles = found.record.profiles
    rows = [(p.name, *(f"{s} {'..'.join(map(str, sizes))}" for s, sizes in p.sizes.items())) for p in profiles]
    width = max(len(row) for row in rows)
    out.print()
    out.print(ui.table("Profiles (min..opt..max)", ("name", *[""] * (width - 1)), rows))


def _engine_facts(found: Any) -> Iterator[tuple[str, object]]:
    record, report, layers = found.record, found.report, found.layers
    yield "learned from", found.source
    yield "platform", f"{record.platform} (sm_{record.sm}), {record.backend} {record.version}"
    yield "graph", f"{record.precision}, {record.lowering} lowering, cache of {record.capacity} rows"
    shares = [f"{share:.1%} of FLOPs in {name}" for name, share in report["matmul_share"].items()]
    yield "matmuls", ", ".join(shares) or "none"
    attention = report["attention"]
    unfused = f", {attention['allowed_unfused']} allowed to run unfused" if attention["allowed_unfused"] else ", fused"
    yield "attention", f"{attention['operators']} operators{unfused if attention['operators'] else ''}"
    if layers is None:
        yield "layers", f"{sum(report['layers'].values())} in the network; reformats are known once it is loaded"
    else:
        kinds = f"{layers.num_attention} attention, {layers.num_reformats} reformats"
        yield "layers", f"{layers.num_layers}, of which {kinds}"
        yield "matmul outputs", ", ".join(f"{n} {kind}" for kind, n in layers.matmul_types.items()) or "not listed"
    plan = ui.human_bytes(report["plan"]["num_bytes"])
    device = found.device_memory_bytes
    yield "size", f"{plan} plan" + (f", {ui.human_bytes(device)} device memory" if device is not None else "")
    seconds = sum(report["seconds"].values())
    yield "build", f"{seconds:.1f} s, peak {ui.human_bytes(report['peak_memory_bytes'])}"
    for name in report["adjusted"]:
        yield "adjusted", f"{name}: float32 product computed in float16, scaled to avoid overflow"
    for warning in report["warnings"]:
        yield "warning", warning
    yield "by hand", f"the trtexec line is in {record.report}"


COMMANDS = (compile_command, platforms_command, cache_command, graph_command)


def device_command(bundle: Path, platform: str) -> str:
    """The one command that finishes a bundle on the device."""
    return shlex.join(["xpress-export", "compile", str(bundle), "--platform", platform])
