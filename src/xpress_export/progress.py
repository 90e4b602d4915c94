"""How long work reports that it is alive, without knowing who listens.

Library functions take a `Progress` and call `step` around anything that can exceed two seconds; the command line
passes one that draws bars on a terminal (`console.py`), everyone else gets the silent default.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

Advance = Callable[[float], None]
"""Call with the amount of work done since the last call, in the unit of `total`."""


class Progress(Protocol):
    def step(
        self, label: str, total: float | None = None, expected_s: float | None = None
    ) -> AbstractContextManager[Advance]:
        """Enter a named step.

        total: units of work that `Advance` counts. expected_s: for work that cannot count, its usual duration in
        seconds, from which the time left is estimated.
        """


class Silent:
    """The default: says nothing."""

    @contextlib.contextmanager
    def step(self, label: str, total: float | None = None, expected_s: float | None = None) -> Iterator[Advance]:
        yield lambda _: None
