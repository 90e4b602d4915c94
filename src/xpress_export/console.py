"""What the command line draws: progress and logs on stderr, tables on stdout. Results never mix with the rest."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from xpress_export.progress import Advance

_UNITS = ("bytes", "KB", "MB", "GB", "TB")
_LABEL_WIDTH = 36
_BAR_WIDTH = 14
_PIPE_WIDTH = 160
_ALMOST = 0.97
"""Where a bar that only goes by time waits for the work to end."""


def make_console(*, stderr: bool = False) -> Console:
    """Text as it is, without markup; lines break at words on a terminal and nowhere in a pipe or file."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        return console
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True, width=_PIPE_WIDTH)


def human_bytes(num_bytes: float) -> str:
    """12.3 MB: decimal units, as disks and downloads are labelled."""
    for unit in _UNITS:
        if num_bytes < 1000 or unit == _UNITS[-1]:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    raise AssertionError("unreachable")


def human_seconds(seconds: float) -> str:
    """A duration, roughly: 8 s, 12 min, 2.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def clock(seconds: float) -> str:
    """A duration to the second: 8 s, 2:05, 1:10:00."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _Mark(SpinnerColumn):
    """Turns while the step runs; then says how it ended."""

    def render(self, task: Task) -> RenderableType:
        if not task.finished:
            return super().render(task)
        return Text("✗", style="red") if task.fields["failed"] else Text("✓", style="green")


class _Bar(BarColumn):
    """A bar while there is something to wait for, nothing afterwards."""

    def render(self, task: Task) -> RenderableType:  # type: ignore[override]
        return Text("") if task.finished else super().render(task)


class _TimeLeft(ProgressColumn):
    """Elapsed time, and what is left where there is anything to estimate that from."""

    max_refresh = 0.5

    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        elapsed = task.elapsed or 0.0
        if task.finished:
            return Text(f"{elapsed:.1f} s", style="dim")
        expected, left = task.fields["expected_s"], task.time_remaining
        if expected is not None and elapsed > expected:
            return Text(f"{clock(elapsed)}, expected {human_seconds(expected)}", style="cyan")
        if expected is not None:
            left = expected - elapsed
        note = "" if left is None else f", about {human_seconds(left)} left"
        return Text(clock(elapsed) + note, style="cyan")


class _Bars(Progress):
    """Bars that look how far the work is at every refresh: at a count that it keeps, or else at the clock."""

    def get_renderables(self) -> Iterator[RenderableType]:
        for task in self.tasks:
            expected, count = task.fields["expected_s"], task.fields["count"]
            if task.finished:
                continue
            if count is not None:
                self.update(task.id, completed=count())
            elif expected is not None:
                self.update(task.id, completed=min((task.elapsed or 0.0) / expected, _ALMOST))
        yield from super().get_renderables()


class ConsoleProgress:
    """Bars on a terminal, nothing elsewhere. transient: they vanish when their step ends.

    Expected durations are of an ordinary idle machine. Where steps took longer than that, later ones will too.
    """

    def __init__(self, console: Console, *, transient: bool = False) -> None:
        self._console, self._transient = console, transient
        self._taken_s = self._expected_s = 0.0

    @contextlib.contextmanager
    def step(
        self,
        label: str,
        total: float | None = None,
        expected_s: float | None = None,
        count: Callable[[], float] | None = None,
    ) -> Iterator[Advance]:
        """As `Progress.step`. count: tells how much of `total` is done, for work that cannot call `Advance`."""
        if not self._console.is_terminal:
            yield lambda _: None
            return
        columns = (
            _Mark(),
            TextColumn(f"{{task.description:<{_LABEL_WIDTH}}}", markup=False),
            _Bar(_BAR_WIDTH),
            _TimeLeft(),
        )
        pace = max(self._taken_s / self._expected_s, 1.0) if self._expected_s else 1.0
        paced_s = None if expected_s is None else expected_s * pace
        if total is not None:
            total = total / _ALMOST  # what is left may be more than what counts
        elif expected_s is not None:
            total = 1.0
        with _Bars(*columns, console=self._console, transient=self._transient) as bars:
            task = bars.add_task(label, total=total, expected_s=paced_s, count=count, failed=True)
            try:
                yield lambda amount: bars.advance(task, amount)
                bars.update(task, failed=False)
            finally:
                bars.update(task, total=1.0, completed=1.0)
                if expected_s is not None:
                    self._expected_s += expected_s
                    self._taken_s += bars.tasks[0].elapsed or 0.0


def write(text: str) -> None:
    """Result text as it is, at once; `click.echo` would drop what looks like a colour."""
    sys.stdout.write(text)
    sys.stdout.flush()


def table(title: str | None, header: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A plain table; cells are shown as text, and a header of empty names is left out."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    made.show_header = any(header)
    for name in header:
        made.add_column(name, overflow="fold")
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    return made


class _LogHandler(logging.Handler):
    """Records as our errors look: `warning: ...`."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else "dim"
        self._console.print(Text.assemble((f"{record.levelname.lower()}: ", style), self.format(record)))


def configure_logging(verbosity: int, console: Console) -> None:
    """Logs of this package to `console`: warnings by default, -v adds what is done, -vv everything."""
    level = {0: logging.WARNING, 1: logging.INFO}.get(verbosity, logging.DEBUG)
    logger = logging.getLogger("xpress_export")
    logger.handlers, logger.propagate = [_LogHandler(console)], False
    logger.setLevel(level)
