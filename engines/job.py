"""One engine build as data: what the parent process hands to the worker, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class BuildJob:
    """Everything that determines an engine, and where it is written.

    graph: the ONNX file. static: sizes of dimensions that are fixed before parsing. profiles: for each, the least,
    usual and greatest shape of each input. work: an empty folder for the worker. plan: file to write.
    """

    role: str
    backend: str
    sm: int
    precision: str
    graph: Path
    static: Mapping[str, int]
    profiles: Mapping[str, Shapes]
    work: Path
    plan: Path
    workspace_bytes: int | None = None
    tactic_bytes: int | None = None
    opt_level: int | None = None
    hardware_compat: str = "none"
    version_compatible: bool = False
    timing_cache: Path | None = None
    unfused_attention: bool = False
    must_show: bool = field(default=True)
    """Whether a build whose matmuls do not show the asked precision is a failure."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> BuildJob:
        raw: dict[str, Any] = json.loads(text)
        for name in ("graph", "work", "plan", "timing_cache"):
            raw[name] = Path(raw[name]) if raw[name] is not None else None
        raw["profiles"] = {
            profile: {name: tuple(map(tuple, shapes)) for name, shapes in inputs.items()}
            for profile, inputs in raw["profiles"].items()
        }
        return cls(**raw)


@dataclass(frozen=True, kw_only=True)
class BuildResult:
    """What a finished build reports. seconds: by step. sha256, num_bytes: of the plan. adjusted: nodes changed."""

    version: str
    seconds: Mapping[str, float]
    peak_memory_bytes: int
    num_bytes: int
    sha256: str
    layers: Mapping[str, int]
    matmuls: Mapping[str, int]
    flops: Mapping[str, int]
    attention: int
    unfused_attention: int
    adjusted: tuple[str, ...]
    warnings: tuple[str, ...]

    @classmethod
    def from_raw(cls, raw: dict[str, Any]) -> BuildResult:
        return cls(**{**raw, "adjusted": tuple(raw["adjusted"]), "warnings": tuple(raw["warnings"])})
