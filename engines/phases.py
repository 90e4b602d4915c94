"""TensorRT's nested build phases as one number that only grows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Phase:
    name: str
    parent: str | None
    num_steps: int
    done: int = 0


class Phases:
    """A phase is a share of one step of its parent; phases report in any order, from any thread."""

    def __init__(self) -> None:
        self._open: dict[str, _Phase] = {}
        self._best = 0.0

    @property
    def title(self) -> str:
        """The innermost open phase that began last."""
        return next(reversed(self._open), "Finishing")

    @property
    def share(self) -> float:
        """Share of the whole build that is done, 0 to 1; never less than before."""
        total = sum(self._of(phase) for phase in list(self._open.values()))
        self._best = max(self._best, min(total, 1.0))
        return self._best

    def start(self, name: str, parent: str | None, num_steps: int) -> None:
        self._open[name] = _Phase(name, parent, max(num_steps, 1))

    def step(self, name: str, step: int) -> None:
        if name in self._open:
            self._open[name].done = step + 1

    def finish(self, name: str) -> None:
        phase = self._open.pop(name, None)
        if phase is not None and phase.parent is None:
            self._best = 1.0

    def _of(self, phase: _Phase) -> float:
        """What a phase contributes to the whole by its own finished steps."""
        share = min(phase.done / phase.num_steps, 1.0)
        while phase.parent is not None and phase.parent in self._open:
            phase = self._open[phase.parent]
            share /= phase.num_steps
        return share
