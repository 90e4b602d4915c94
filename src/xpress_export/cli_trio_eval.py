"""`eval` on checkpoints: tau of a trio before there is a bundle, in the rows that `eval` prints for bundles.

The target answers every prompt once; drafts are then checked against its answers, so no mode runs end to end and no
speed is measured. Rows of a trio therefore leave `tokens_per_s` and `speed_up` at 0.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from xpress_export.errors import MissingDependencyError, RequestError
from xpress_export.progress import Progress
from xpress_export.records import MANIFEST_FILE
from xpress_export.runtime.evaluate import Row

if TYPE_CHECKING:
    from xpress_export.training.evaluate import Walk

DRAFTER, REFINER = "drafter", "refiner"
"""Folders of a trio, as a training run writes them."""


@dataclass(frozen=True)
class Heads:
    """Drafter and, if there is one, refiner: folders or Hugging Face ids."""

    drafter: str
    refiner: str | None


@dataclass(frozen=True, kw_only=True)
class TrioSettings:
    """What to measure. modes: of dflash, markov, xpress; None: all there are. passes: a sweep beside the default."""

    target: str
    modes: tuple[str, ...] | None
    passes: tuple[int, ...]
    limit: int | None
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


def heads_of(folder: Path) -> Heads | None:
    """The heads in a trio's folder; None if it is something else, such as a bundle."""
    if (folder / MANIFEST_FILE).is_file() or not (folder / DRAFTER).is_dir():
        return None
    return Heads(str(folder / DRAFTER), str(folder / REFINER) if (folder / REFINER).is_dir() else None)


def evaluate_trios(
    trios: Sequence[Heads], prompts: Sequence[Path], settings: TrioSettings, progress: Progress
) -> list[Row]:
    """Rows by benchmark, then by arm of each trio; arms of the second trio are numbered, as those of bundles are."""
    try:
        from xpress_export.training.api import EvalOptions, evaluate_trio
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("xpress_export"):
            raise
        raise MissingDependencyError(error.name, "evaluate checkpoints", "train") from error
    walks: dict[str, list[Walk]] = {}
    with tempfile.TemporaryDirectory(prefix="xpress-eval-") as work:
        for number, heads in enumerate(trios, start=1):
            options = EvalOptions(
                target=settings.target,
                drafter=heads.drafter,
                refiner=heads.refiner,
                prompts=tuple(map(str, prompts)),
                work=work,
                limit=settings.limit,
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                seed=settings.seed,
                modes=settings.modes,
                passes=settings.passes,
            )
            for label, tally in evaluate_trio(options, progress).tallies.items():
                walks[label if number == 1 else f"{label} #{number}"] = tally.walks
    if not walks:
        raise RequestError(f"there is nothing to evaluate: no trio has a mode of {','.join(settings.modes or ())}")
    return [
        row_of_walks(path.stem, label, [walk for walk in found if walk.source == path.stem])
        for path in prompts
        for label, found in walks.items()
    ]


def row_of_walks(benchmark: str, label: str, walks: Sequence[Walk]) -> Row:
    """The same means as for a bundle: over answers, each counting the same."""
    taus = [walk.tokens / walk.steps for walk in walks]
    steps = sum(walk.steps for walk in walks)
    slots = max((len(walk.accepted) for walk in walks), default=0)
    passes = label.partition("K=")[2].partition(" ")[0] if "K=" in label else None
    return Row(
        benchmark=benchmark,
        arm=label,
        refine_passes=None if passes is None else int(passes),
        num_prompts=len(walks),
        num_tokens=sum(walk.tokens for walk in walks),
        tau=statistics.fmean(taus) if taus else 0.0,
        tau_ci95=1.96 * statistics.stdev(taus) / math.sqrt(len(taus)) if len(taus) > 1 else 0.0,
        slot_rates=[sum(walk.accepted[j] for walk in walks) / max(1, steps) for j in range(slots)],
    )
