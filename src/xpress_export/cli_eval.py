"""`xpress-export eval`: what drafting is worth, on a user's own prompts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from xpress_export import console as ui
from xpress_export.cli_device import device_options, executed_on
from xpress_export.cli_precision import PRECISION
from xpress_export.precision import Precision

if TYPE_CHECKING:
    from xpress_export.cli_trio_eval import Heads
    from xpress_export.runtime import Runtime
    from xpress_export.runtime.evaluate import Row


MODES = ("dflash", "markov", "xpress")
EXECUTED = "executed on {}, every mode gave the tokens of plain decoding"
CHECKED = "computed by checking each draft against the target's own answers; no speed was measured"


@click.command("eval")
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path), metavar="BUNDLE|TRIO...")
@click.option(
    "--prompts", multiple=True, required=True, type=click.Path(path_type=Path), metavar="F", help="JSONL; repeatable."
)
@click.option("--modes", metavar="M,M", help="Of dflash, markov, xpress.  [default: what there is]")
@click.option("--refine-passes", metavar="A..B", help="Also sweep the refiner's passes, e.g. 0..7 or 1,2,4.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N prompts of each file.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=128, metavar="N", show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, metavar="T", help="0: greedy.")
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Of all modes, above temperature 0.")
@PRECISION
@device_options
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads.  [default: one per core]")
@click.option("--target", metavar="T", help="Of a trio: folder, Hugging Face id or .gguf file.")
@click.option("--drafter", metavar="D", help="Of a trio, where no folder holds its drafter and refiner.")
@click.option("--refiner", metavar="R", help="With --drafter.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Also write a page with plots.")
def evaluate_command(
    paths: tuple[Path, ...],
    prompts: tuple[Path, ...],
    modes: str | None,
    refine_passes: str | None,
    as_json: bool,
    html: Path | None,
    **options: Any,
) -> None:
    """Measure tau, acceptance per slot and, of bundles, speed-up over plain decoding.

    A BUNDLE runs each prompt in every mode in turn. A TRIO is a folder with drafter/ and refiner/, as `train` writes
    it; its drafts are checked against the target's answers, so it needs no export and no speed is measured. Several
    of one target (say, with a Markov head and with xPress) give one table.
    """
    request = _Request(prompts, _modes(modes), _passes(refine_passes), **options)
    trios = _trios(paths, request)
    rows, how = (_of_trios(trios, request), CHECKED) if trios else _of_bundles(paths, request)
    how += f"; temperature {request.temperature:g}, seed {request.seed}" if request.temperature else "; greedy"
    if len(prompts) > 1:
        from xpress_export.runtime.evaluate import overall

        rows += overall(rows)
    if html is not None:
        from xpress_export.report import evaluation_page

        html.write_text(evaluation_page(rows, request.max_new_tokens, how), "utf-8")
    if as_json:
        found = {"max_new_tokens": request.max_new_tokens, "how": how, "rows": [row.to_dict() for row in rows]}
        click.echo(json.dumps(found, indent=2))
        return
    ui.make_console().print(_table(rows))
    click.echo(f"{how}; tau: tokens per verify step, mean over responses with its 95% confidence interval")


@dataclass(frozen=True)
class _Request:
    """What was asked, parsed; the fields are the options of the same names."""

    prompts: tuple[Path, ...]
    modes: list[str] | None
    passes: list[int]
    limit: int | None
    max_new_tokens: int
    temperature: float
    seed: int
    precision: Precision
    threads: int | None
    device: str
    backend: str
    layout: str | None
    max_draft_tokens: int | None
    target: str | None
    drafter: str | None
    refiner: str | None


def _trios(paths: Sequence[Path], request: _Request) -> list[Heads]:
    """The trios that were named; empty if bundles were."""
    from xpress_export.cli_trio_eval import Heads, heads_of

    found = [heads_of(path) for path in paths]
    trios = [heads for heads in found if heads is not None]
    if request.drafter is not None:
        trios.append(Heads(request.drafter, request.refiner))
    if request.refiner is not None and request.drafter is None:
        raise click.UsageError("--refiner corrects a drafter's block: give --drafter too")
    if not trios and not paths:
        raise click.UsageError("name a bundle, a folder with drafter/ and refiner/, or --target and --drafter")
    if trios and len(trios) < len(paths) + (request.drafter is not None):
        raise click.UsageError("bundles and trios do not go into one table: evaluate them one after the other")
    if trios and request.target is None:
        raise click.UsageError("a trio needs its target: add --target with the folder, id or .gguf file")
    if request.target is not None and not trios:
        raise click.UsageError("--target is for trios; a bundle holds its target")
    return trios


def _of_trios(trios: Sequence[Heads], request: _Request) -> list[Row]:
    from xpress_export.cli_trio_eval import TrioSettings, evaluate_trios

    assert request.target is not None
    settings = TrioSettings(
        target=request.target,
        modes=None if request.modes is None else tuple(request.modes),
        passes=tuple(request.passes),
        limit=request.limit,
        max_new_tokens=request.max_new_tokens,
        temperature=request.temperature,
        seed=request.seed,
    )
    return evaluate_trios(trios, request.prompts, settings, _progress())


def _open(bundle: Path, request: _Request) -> Runtime:
    from xpress_export.runtime import Runtime

    return Runtime.open(
        bundle,
        precision=request.precision,
        num_threads=request.threads,
        device=request.device,
        backend=request.backend,
        layout=request.layout,
        max_draft_tokens=request.max_draft_tokens,
    )


def _of_bundles(bundles: Sequence[Path], request: _Request) -> tuple[list[Row], str]:
    """The rows, and where they come from."""
    from xpress_export.runtime.evaluate import arms_of, evaluate, read_prompts, tell_apart

    benchmarks = {path.stem: read_prompts(path, request.limit) for path in request.prompts}
    with contextlib.ExitStack() as stack:
        progress = _progress()
        runtimes = [stack.enter_context(_open(bundle, request)) for bundle in bundles]
        arms = [arm for runtime in runtimes for arm in arms_of(runtime, request.modes, request.passes)]
        rows = evaluate(
            benchmarks,
            tell_apart(arms),
            request.max_new_tokens,
            progress,
            temperature=request.temperature,
            seed=request.seed,
        )
        places = dict.fromkeys(executed_on(runtime.device) for runtime in runtimes)
        return rows, EXECUTED.format(" and ".join(places))


def _progress() -> ui.ConsoleProgress:
    return ui.ConsoleProgress(ui.make_console(stderr=True))


def _modes(text: str | None) -> list[str] | None:
    wanted = text.split(",") if text else None
    unknown = [mode for mode in wanted or () if mode not in MODES]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(MODES)}", param_hint="--modes")
    return wanted


def _passes(text: str | None) -> list[int]:
    if text is None:
        return []
    try:
        first, dots, last = text.partition("..")
        return list(range(int(first), int(last) + 1)) if dots else [int(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is neither a range A..B nor a list A,B,C", param_hint="--refine-passes"
        ) from error


def _table(rows: Sequence[Row]) -> Table:
    header = ("prompts", "mode", "n", "tau", "tokens/s", "speed-up", "accepted per slot")
    cells = [
        (
            row.benchmark,
            row.arm,
            row.num_prompts,
            f"{row.tau:.3f} ± {row.tau_ci95:.3f}" if row.arm != "target" else "1",
            f"{row.tokens_per_s:.1f}" if row.tokens_per_s else "-",
            f"{row.speed_up:.2f}x" if row.speed_up else "-",
            " ".join(f"{rate:.2f}" for rate in row.slot_rates),
        )
        for row in rows
    ]
    return ui.table(None, header, cells)
