"""`xpress-export eval`: what drafting is worth, on a user's own prompts."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from xpress_export import console as ui

if TYPE_CHECKING:
    from xpress_export.runtime.evaluate import Row


@click.command("eval")
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="BUNDLE...")
@click.option(
    "--prompts", multiple=True, required=True, type=click.Path(path_type=Path), metavar="F", help="JSONL; repeatable."
)
@click.option("--modes", metavar="M,M", help="Of dflash, markov, xpress.  [default: what the bundles have]")
@click.option("--refine-passes", metavar="A..B", help="Also sweep the refiner's passes, e.g. 0..7 or 1,2,4.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N prompts of each file.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=128, metavar="N", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads.  [default: one per core]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Also write a page with plots.")
def evaluate_command(
    bundles: tuple[Path, ...],
    prompts: tuple[Path, ...],
    modes: str | None,
    refine_passes: str | None,
    limit: int | None,
    max_new_tokens: int,
    threads: int | None,
    as_json: bool,
    html: Path | None,
) -> None:
    """Measure tau, acceptance per slot and speed-up over plain decoding, each prompt in every mode in turn.

    Several bundles of one target (say, with a Markov head and with xPress) give one table.
    """
    from xpress_export.runtime import Runtime
    from xpress_export.runtime.evaluate import arms_of, evaluate, overall, read_prompts, tell_apart

    passes = _passes(refine_passes)
    benchmarks = {path.stem: read_prompts(path, limit) for path in prompts}
    with contextlib.ExitStack() as stack:
        progress = ui.ConsoleProgress(ui.make_console(stderr=True))
        runtimes = [stack.enter_context(Runtime.open(bundle, num_threads=threads)) for bundle in bundles]
        wanted = modes.split(",") if modes else None
        arms = [arm for runtime in runtimes for arm in arms_of(runtime, wanted, passes)]
        rows = evaluate(benchmarks, tell_apart(arms), max_new_tokens, progress)
    rows += overall(rows) if len(benchmarks) > 1 else []
    if html is not None:
        from xpress_export.report import evaluation_page

        html.write_text(evaluation_page(rows, max_new_tokens), "utf-8")
    if as_json:
        click.echo(json.dumps({"max_new_tokens": max_new_tokens, "rows": [row.to_dict() for row in rows]}, indent=2))
        return
    ui.make_console().print(_table(rows))
    click.echo("executed on CPU; tau: tokens per verify step, mean over responses with its 95% confidence interval")


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
            f"{row.tokens_per_s:.1f}",
            f"{row.speed_up:.2f}x",
            " ".join(f"{rate:.2f}" for rate in row.slot_rates),
        )
        for row in rows
    ]
    return ui.table(None, header, cells)
