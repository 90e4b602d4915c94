"""Figures that others published, for reports to print beside measured ones: never measured here, never mixed in.

The tables lie in `published/*.json`. `Table.average` is what the authors state; `mean` is computed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources

MODES = ("dflash", "markov", "xpress")
LABEL = "published, not measured here"


@dataclass(frozen=True)
class Figure:
    """speed_up: over plain decoding. tau: tokens per verify step."""

    speed_up: float
    tau: float


@dataclass(frozen=True)
class Table:
    """figures: by benchmark, then mode. average: by mode, as stated."""

    temperature: float
    average: dict[str, Figure]
    figures: dict[str, dict[str, Figure]]

    def mean(self, mode: str) -> Figure:
        """The unweighted mean over the benchmarks."""
        found = [row[mode] for row in self.figures.values()]
        return Figure(sum(f.speed_up for f in found) / len(found), sum(f.tau for f in found) / len(found))


@dataclass(frozen=True)
class Publication:
    """source, setting, note: who says so, about what, and what to keep in mind."""

    source: str
    setting: str
    note: str
    tables: tuple[Table, ...]


def published(name: str = "xpress_qwen3_8b") -> Publication:
    """The publication in `published/<name>.json`."""
    raw = json.loads((resources.files("xpress_export") / "published" / f"{name}.json").read_text("utf-8"))
    tables = tuple(
        Table(
            temperature=table["temperature"],
            average=_by_mode(table["stated_average"]),
            figures={row["benchmark"]: _by_mode(row) for row in table["rows"]},
        )
        for table in raw["tables"]
    )
    return Publication(source=raw["source"], setting=raw["setting"], note=raw["note"], tables=tables)


def _by_mode(raw: dict[str, dict[str, float]]) -> dict[str, Figure]:
    return {mode: Figure(**raw[mode]) for mode in MODES}
