"""What the command line draws: progress on stderr, tables on stdout. Results never mix with progress or logs."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from xpress_export.progress import Advance

_UNITS = ("bytes", "KB", "MB", "GB", "TB")


def human_bytes(num_bytes: float) -> str:
    """12.3 MB: decimal units, as disks and downloads are labelled."""
    for unit in _UNITS:
        if num_bytes < 1000 or unit == _UNITS[-1]:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError("unreachable")


class _TimeLeft(ProgressColumn):
    """Elapsed time, and an estimate of what is left where there is anything to estimate from."""

    def render(self, task: Task) -> Text:
        elapsed = task.elapsed or 0.0
        if task.finished:
            return Text(f"{elapsed:.1f} s", style="dim")
        expected = task.fields.get("expected_s")
        left = max(expected - elapsed, 0.0) if expected else task.time_remaining
        return Text(f"{elapsed:.0f} s, about {left:.0f} s left" if left else f"{elapsed:.0f} s", style="cyan")


class ConsoleProgress:
    """Bars on a terminal, nothing elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def step(self, label: str, total: float | None = None, expected_s: float | None = None) -> Iterator[Advance]:
        if not self._console.is_terminal:
            yield lambda _: None
            return
        columns = (
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}"),
            BarColumn(24),
            _TimeLeft(),
        )
        with Progress(*columns, console=self._console) as progress:
            task = progress.add_task(label, total=total, expected_s=expected_s)
            yield lambda amount: progress.advance(task, amount)
            progress.update(task, total=1.0, completed=1.0)


def table(title: str | None, header: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A plain table; cells are shown as text."""
    made = Table(title=title, title_justify="left", show_edge=False, pad_edge=False, box=None, header_style="bold")
    for name in header:
        made.add_column(name, overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    return made


def configure_logging(verbosity: int) -> None:
    """Logs of this package to stderr: warnings by default, -v adds what is done, -vv everything."""
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG)
    handler = RichHandler(console=Console(stderr=True), show_path=False, show_time=False, markup=False)
    logger = logging.getLogger("xpress_export")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(level)
