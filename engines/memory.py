"""How much memory a build needs, and how much there is."""

from __future__ import annotations

from pathlib import Path

from xpress_export.console import human_bytes
from xpress_export.errors import EngineBuildError
from xpress_export.platforms import TENSORRT, TENSORRT_RTX

_BASE_BYTES = 350 << 20
_PER_WEIGHT_BYTE = {TENSORRT_RTX: 3.6, TENSORRT: 4.3}
"""Peak over bytes of weights, the base aside. TensorRT-RTX 1.7.1: measured, 3.3 to 3.6 from 80 MB to 1.2 GB of
weights. TensorRT: not measured; reports speak of 3 to 4, and 10.3 also holds the whole plan in memory."""

_CGROUP = Path("/sys/fs/cgroup")


def estimate_bytes(backend: str, weight_bytes: int) -> int:
    """Peak memory of building an engine over that many bytes of weights."""
    return int(_BASE_BYTES + _PER_WEIGHT_BYTE[backend] * weight_bytes)


def available_bytes() -> int | None:
    """Memory a new process can take: what the system has free, or what is left of a container's limit."""
    found = [value for value in (_system(), _container()) if value is not None]
    return min(found) if found else None


def _system() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _container() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdigit():
        return None
    return int(limit) - used + int(stat.get("inactive_file", 0))


def require_memory(role: str, backend: str, weight_bytes: int, num_jobs: int = 1) -> None:
    """Refuse a build that is estimated not to fit, rather than have it killed half way."""
    needed, free = estimate_bytes(backend, weight_bytes) * num_jobs, available_bytes()
    if free is not None and needed > free:
        what = f"building {num_jobs} engines at a time" if num_jobs > 1 else f"building the {role} engine"
        raise EngineBuildError(
            f"{what} needs about {human_bytes(needed)}, but {human_bytes(free)} are free; "
            f"{advice()}, or try it anyway with --skip-memory-check"
        )


def advice() -> str:
    """What helps when memory does not suffice."""
    return (
        "close other programs, add swap (a file on NVMe will do for a build), use --jobs 1 and a smaller "
        "--workspace-mb, or build a bundle of lower precision"
    )


def oom_kills() -> int:
    """How many processes the kernel has killed for lack of memory, in this container or the whole system."""
    for path in (_CGROUP / "memory.events", Path("/proc/vmstat")):
        try:
            counts = dict(line.split() for line in path.read_text().splitlines())
        except (OSError, ValueError):
            continue
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return 0
