"""The options of every command that runs a bundle: where, with what, in which layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from xpress_export import names, platforms
from xpress_export.gpu import find_gpu

Command = TypeVar("Command", bound=Callable[..., Any])
BACKENDS = ("auto", platforms.ONNX_RUNTIME, platforms.TENSORRT, platforms.TENSORRT_RTX)


def device_options(command: Command) -> Command:
    """--device, --backend, --layout and --max-draft-tokens, as `Runtime.open` takes them."""
    options = [
        click.option("--device", default="auto", metavar="D", help="cpu, cuda:N, or auto: a GPU that can, else cpu."),
        click.option("--backend", type=click.Choice(BACKENDS), default="auto", metavar="B", help="What runs graphs."),
        click.option("--layout", type=click.Choice(names.LAYOUTS), help="Graphs of a cycle.  [default: as built]"),
        click.option(
            "--max-draft-tokens",
            type=click.IntRange(min=1),
            metavar="N",
            help="Most that a cycle drafts.  [default: the drafter's block]",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def executed_on(device: str) -> str:
    """Where a runtime ran, for a reader. device: its `Runtime.device`."""
    if device == "cpu":
        return "CPU"
    gpu = find_gpu(int(device.partition(":")[2] or 0))
    return device if gpu is None else f"{device}, {gpu.name}"
