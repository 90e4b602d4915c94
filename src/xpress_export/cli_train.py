"""`xpress-export train`: the target's own answers, then drafter, refiner, or both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from xpress_export import console as ui
from xpress_export.errors import MissingDependencyError

Command = TypeVar("Command", bound=Callable[..., Any])


@click.group()
def train() -> None:
    """Train a drafter and a refiner for a target of your own; `docs/training.md` is the guide.

    Everything is resumable: run the same command again and it goes on from its last checkpoint.
    """


@train.command()
@click.option("--target", required=True, metavar="T", help="Folder, Hugging Face id or .gguf file.")
@click.option(
    "--prompts", multiple=True, required=True, type=click.Path(exists=True), metavar="F", help="JSONL; repeatable."
)
@click.option("--out", required=True, type=click.Path(), metavar="D", help="Folder for the answers.")
@click.option("--max-new-tokens", default=256, show_default=True, type=click.IntRange(min=2), metavar="N")
@click.option("--max-prompt-tokens", default=512, show_default=True, type=click.IntRange(min=1), metavar="N")
@click.option("--temperature", default=0.0, show_default=True, type=click.FloatRange(min=0), help="0: greedy.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N prompts of each file.")
@click.option(
    "--batch", default=64, show_default=True, type=click.IntRange(min=1), metavar="N", help="Answers at once."
)
@click.option("--precision", default="fp32", show_default=True, type=click.Choice(["fp32", "bf16"]))
@click.option(
    "--store-features/--no-store-features", default=True, show_default=True, help="Keep hidden states on disk."
)
@click.option("--seed", default=0, show_default=True)
def data(target: str, prompts: tuple[str, ...], out: str, batch: int, **options: Any) -> None:
    """Let the target answer prompts: what drafters learn from."""
    api = _api()
    made = api.DataOptions(target=target, prompts=prompts, out=out, wave=batch, **options)
    result = api.make_data(made, _progress())
    click.echo(f"{result.num_answers} answers, {result.num_answer_tokens} tokens: {out}")
    if result.num_skipped:
        click.echo(f"{result.num_skipped} prompts were too long and left out", err=True)


def run_options(command: Command) -> Command:
    """Options of every training run."""
    options = [
        click.option("--target", required=True, metavar="T", help="Folder, Hugging Face id or .gguf file."),
        click.option("--data", multiple=True, required=True, metavar="D", help="Folder of `train data`; repeatable."),
        click.option(
            "--config", type=click.Path(path_type=Path), metavar="TOML", help="Hyper-parameters.  [default: all]"
        ),
        click.option("--out", required=True, metavar="DIR", help="Folder of the run: checkpoints, then the models."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@train.command()
@run_options
def drafter(**options: Any) -> None:
    """Train a dFlash drafter alone."""
    _run("train_drafter", **options)


@train.command()
@run_options
def refiner(**options: Any) -> None:
    """Train an xPress refiner, or a Markov head, on a frozen drafter (drafter.init in the TOML)."""
    _run("train_refiner", **options)


@train.command()
@run_options
def joint(**options: Any) -> None:
    """Train drafter and refiner together, the bare drafter held by its base anchor."""
    _run("train_joint", **options)


def _run(kind: str, target: str, data: tuple[str, ...], config: Path | None, out: str) -> None:
    api = _api()
    options = api.read_train_options(config, target, data, out)
    result = getattr(api, kind)(options, _progress())
    for role, folder in (("drafter", result.drafter), ("refiner", result.refiner)):
        if folder is not None:
            click.echo(f"{role}: {folder}")
    click.echo(f"held out: {json.dumps(result.held_out)}")


def _progress() -> ui.ConsoleProgress:
    return ui.ConsoleProgress(ui.make_console(stderr=True))


def _api() -> Any:
    try:
        from xpress_export.training import api
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("xpress_export"):
            raise
        raise MissingDependencyError(error.name, "train", "train") from error
    return api
