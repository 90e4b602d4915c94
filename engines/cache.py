"""Engines already built, by everything that determines them; and timing caches.

    <folder>/plans/<key>/plan, build.json     one engine and its report
    <folder>/timing/tensorrt-<version>-sm<N>  kernel timings of one TensorRT version on one architecture
    <folder>/lock                             held while an entry appears, is used or goes

An entry is complete or absent. Whoever needs it links it into the bundle; the least recently used go when the
folder is larger than its cap. A damaged plan is recognised by its hash and built again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLAN, REPORT = "plan", "build.json"
FORMAT = 1
"""Raised whenever the same key would mean another plan: an adjustment to networks, a new default."""


def cache_key(facts: Mapping[str, Any]) -> str:
    """Digest over everything that determines an engine."""
    canonical = json.dumps({"format": FORMAT, **facts}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True)
class Entry:
    """One cached engine. last_used: seconds since the epoch."""

    key: str
    num_bytes: int
    last_used: float
    report: Mapping[str, Any]


class Cache:
    """A folder of engines, shared by all processes of a user."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes

    def fetch(self, key: str, plan: Path) -> dict[str, Any] | None:
        """Put the cached plan at `plan` and return its report; None where there is none or it is damaged."""
        entry = self.folder / "plans" / key
        if not entry.exists():
            return None
        with self._locked():
            try:
                report: dict[str, Any] = json.loads((entry / REPORT).read_text("utf-8"))
                link_or_copy(entry / PLAN, plan)
                intact = _sha256(plan) == report["plan"]["sha256"]
            except (OSError, ValueError, KeyError, TypeError):
                intact = False
            if intact:
                os.utime(entry)
                return report
            plan.unlink(missing_ok=True)
            shutil.rmtree(entry, ignore_errors=True)
        return None

    def store(self, key: str, plan: Path, report: Mapping[str, Any]) -> None:
        """Keep a plan; a cache that cannot be written costs the next build its time and nothing else."""
        with contextlib.suppress(OSError), self._locked():
            partial = self.folder / "plans" / f".{key}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            link_or_copy(plan, partial / PLAN)
            (partial / REPORT).write_text(json.dumps(report, indent=2), "utf-8")
            entry = self.folder / "plans" / key
            shutil.rmtree(entry, ignore_errors=True)
            partial.rename(entry)
            self._trim(keep=key)

    def timing_cache(self, version: str, sm: int) -> Path:
        """Where the kernel timings of one TensorRT version on one architecture are kept."""
        return self.folder / "timing" / f"tensorrt-{version}-sm{sm}"

    def entries(self) -> list[Entry]:
        """All cached engines, the most recently used first."""
        found = []
        for path in (self.folder / "plans").glob("[!.]*"):
            with contextlib.suppress(OSError, ValueError):
                report = json.loads((path / REPORT).read_text("utf-8"))
                found.append(Entry(path.name, (path / PLAN).stat().st_size, path.stat().st_mtime, report))
        return sorted(found, key=lambda entry: -entry.last_used)

    def clear(self) -> int:
        """Remove everything, timing caches included; returns the bytes of the plans removed."""
        freed = sum(entry.num_bytes for entry in self.entries())
        if self.folder.exists():
            with self._locked():
                for name in ("plans", "timing"):
                    shutil.rmtree(self.folder / name, ignore_errors=True)
        return freed

    def _trim(self, keep: str) -> None:
        """Remove the least recently used entries beyond the cap, never the one just stored."""
        total = 0
        for entry in sorted(self.entries(), key=lambda entry: entry.key != keep):
            total += entry.num_bytes
            if total > self.max_bytes and entry.key != keep:
                shutil.rmtree(self.folder / "plans" / entry.key, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            with contextlib.suppress(OSError):  # a filesystem without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def link_or_copy(source: Path, destination: Path) -> None:
    """Give a file a second name where the filesystem can, which costs nothing; copy it elsewhere."""
    destination.unlink(missing_ok=True)
    try:
        os.link(source, destination)
    except OSError:
        shutil.copyfile(source, destination)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
