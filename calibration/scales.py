"""`scales.json`: what calibration measured, as a file to review, compare and keep.

    {
      "schema": 1, "tool": {...}, "method": "max", "percentile": 99.99,
      "dataset": {"name": "prompts.jsonl", "sha256": "...", "samples": 64, "max_new_tokens": 64},
      "graphs": {
        "target": {
          "graph": "...",                                    digest of the graph and its weights
          "activations": {
            "layers.0.self_attn.k_proj": {
              "feeds": ["layers.0.self_attn.k_proj", ...],   sites that read this tensor
              "rows": 9000, "amax": 7.1, "clip": 6.4,        greatest value seen; INT8 range that the method chose
              "channels": [...]                              greatest value of each channel, for SmoothQuant
            }, ...
          },
          "weights": {"layers.0.self_attn.k_proj": [...], ...}   greatest value of each output channel
    }}}

Numbers have six digits. Reading is strict (`strict_json`); scales are refused by any graph but the one they are of.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xpress_export import names
from xpress_export.calibration.ranges import METHODS
from xpress_export.errors import BundleError, CalibrationError
from xpress_export.manifest import GraphRecord, Manifest
from xpress_export.records import at_least, hex_digest, not_empty, one_of, refuse
from xpress_export.strict_json import FieldError, decode, load_object

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """Prompts that were run. sha256: of the prompt file; samples: prompts used of it."""

    name: str
    sha256: str
    samples: int
    max_new_tokens: int

    def __post_init__(self) -> None:
        not_empty(self, "name")
        hex_digest(self, "sha256")
        at_least(self, 1, "samples", "max_new_tokens")


@dataclass(frozen=True, kw_only=True)
class Activation:
    """Range of one tensor that matrix products read."""

    feeds: tuple[str, ...]
    rows: int
    amax: float
    clip: float
    channels: tuple[float, ...]

    def __post_init__(self) -> None:
        not_empty(self, "feeds", "channels")
        at_least(self, 1, "rows")
        for field in ("amax", "clip"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                refuse(field, "a positive number", value)
        if self.clip > self.amax:
            refuse("clip", f"at most amax {self.amax}", self.clip)
        if min(self.channels) < 0 or not math.isclose(max(self.channels), self.amax, rel_tol=1e-4):
            refuse("channels", f"numbers from 0 to amax {self.amax}", [min(self.channels), max(self.channels)])


@dataclass(frozen=True, kw_only=True)
class GraphScales:
    """Everything of one graph. graph: see `graph_digest`. weights: greatest value per output channel."""

    graph: str
    activations: Mapping[str, Activation]
    weights: Mapping[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        hex_digest(self, "graph")
        not_empty(self, "activations", "weights")

    def of_site(self, site: str) -> Activation:
        """The activation that a site reads."""
        for activation in self.activations.values():
            if site in activation.feeds:
                return activation
        raise CalibrationError(f"the scales have no activation for {site}; calibrate this bundle again")


@dataclass(frozen=True, kw_only=True)
class Scales:
    """The content of a `scales.json`."""

    schema: int = SCHEMA
    tool: Mapping[str, str]
    method: str
    percentile: float
    dataset: Dataset
    graphs: Mapping[str, GraphScales]

    def __post_init__(self) -> None:
        one_of(self, "schema", (SCHEMA,))
        one_of(self, "method", METHODS)
        if not 50 <= self.percentile <= 100:
            refuse("percentile", "from 50 to 100", self.percentile)
        not_empty(self, "graphs")
        for role in self.graphs:
            if role not in names.ROLES:
                raise FieldError(f"graphs.{role}", f"is none of {', '.join(names.ROLES)}")

    def only(self, role: str) -> Scales:
        """The part that belongs to one graph."""
        return Scales(**{**vars(self), "graphs": {role: self.graphs[role]}})

    def to_json(self) -> str:
        """JSON indented by 2, vectors on one line."""
        return _dump(asdict(self)) + "\n"


def read_scales(path: Path) -> Scales:
    """Parse and check a scales file; a CalibrationError names the field that is wrong."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise CalibrationError(
            f"{path} cannot be read as UTF-8 text: {err}; give the file that `calibrate` wrote"
        ) from err
    try:
        scales: Scales = decode(Scales, load_object(text), "")
    except BundleError as err:
        raise CalibrationError(f"{path}: {err}; write it again with `xpress-export calibrate`") from err
    return scales


def graph_digest(manifest: Manifest, record: GraphRecord) -> str:
    """Sha256 over the hashes of a graph and of its weight files: what scales belong to."""
    files = {file.path: file.sha256 for file in manifest.files}
    return hashlib.sha256("".join(files[path] for path in (record.file, *sorted(record.data))).encode()).hexdigest()


def require_graph(scales: Scales, manifest: Manifest, role: str, where: str) -> GraphScales:
    """The scales of one graph of a bundle; a CalibrationError if they were measured on another."""
    digests = {other: graph_digest(manifest, record) for other, record in manifest.graphs.items()}
    found = scales.graphs.get(role)
    if found is None:
        raise CalibrationError(
            f"{where} has no scales of the {role}, only of the {', '.join(scales.graphs)}; calibrate again"
        )
    if found.graph == digests[role]:
        return found
    swapped = next((other for other, digest in digests.items() if digest == found.graph), None)
    what = f"those of the {swapped}" if swapped else "of another model, or of another revision of its graph"
    raise CalibrationError(
        f"the scales of the {role} in {where} are {what} (graph {found.graph[:12]}, this one is {digests[role][:12]}); "
        f"run `xpress-export calibrate` on this bundle"
    )


def rounded(value: float) -> float:
    """Six digits: what a scales file holds."""
    return float(f"{value:.6g}")


def _dump(value: Any, indent: str = "") -> str:
    """Indented objects; a list stays on one line, so that a changed tensor is a changed line."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value, allow_nan=False)
    deeper = indent + "  "
    items = [f"\n{deeper}{json.dumps(key)}: {_dump(item, deeper)}" for key, item in value.items()]
    return "{" + ",".join(items) + f"\n{indent}}}"
