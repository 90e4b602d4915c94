"""What to compile: the options of `compile`, checked before any work."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from xpress_export import names, platforms
from xpress_export.errors import EngineBuildError
from xpress_export.precision import Precision
from xpress_export.records import HARDWARE_LEVELS

BACKENDS = (platforms.TENSORRT, platforms.TENSORRT_RTX)
DEFAULT_CHUNK = 512
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Where the engines are to run, and the sizes and limits they are built with.

    precision: of the graphs, as in `xpress_export.precision`. backend: None: the TensorRT that is installed.
    layout: an engine for each model and `accept`, or one for the whole step; None: what the bundle was built to run.
    max_context: tokens of prompt and answer; None: what the bundle was exported for. max_batch: slots.
    block: slots of a draft block; None: the drafter's own. chunk: prompt tokens that one call takes.
    workspace_mb: scratch memory a layer may use, None: no limit. tactic_mb: device memory for trying kernels.
    opt_level: TensorRT's 0 to 5, None: its default. lowering: None: what the TensorRT version reads.
    timing_cache: a file of one's own instead of the one kept in the cache folder. cache_dir: None: no cache.
    num_jobs: engines built at the same time. check_memory: refuse a build that is estimated not to fit.
    """

    platform: str
    precision: Precision = None
    backend: str | None = None
    layout: str | None = None
    lowering: str | None = None
    max_context: int | None = None
    max_batch: int = 1
    block: int | None = None
    chunk: int = DEFAULT_CHUNK
    workspace_mb: int | None = None
    tactic_mb: int | None = None
    opt_level: int | None = None
    hardware_compat: str = "none"
    version_compatible: bool = False
    timing_cache: Path | None = None
    cache_dir: Path | None = None
    cache_bytes: int = 20 << 30
    num_jobs: int = 1
    check_memory: bool = True
    roles: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[object, ...]] = {
            "backend": (None, *BACKENDS),
            "layout": (None, *names.LAYOUTS),
            "lowering": (None, *platforms.LOWERINGS),
            "hardware_compat": HARDWARE_LEVELS,
            "opt_level": (None, 0, 1, 2, 3, 4, 5),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                choices = ", ".join(str(v) for v in values if v is not None)
                raise EngineBuildError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        least = {"max_context": 2, "max_batch": 1, "block": 2, "chunk": 1, "workspace_mb": 1, "tactic_mb": 1}
        for name, minimum in {**least, "num_jobs": 1}.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise EngineBuildError(f"{name} must be at least {minimum}, got {value}")
