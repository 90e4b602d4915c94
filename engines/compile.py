"""The compile stage: a bundle in, the same bundle with engines of one platform out, or nothing changed.

    plan      what to build; everything that can be refused is refused here
    build     each engine in a process of its own, into a file nobody reads yet
    commit    rename the files, then write the manifest; only then do the engines exist

Engines and reports are named after what is in them, so a new one never overwrites the file of an old one, not even
of the same options: a kill at any moment leaves the bundle that was there, whole, and at most files that the next
compilation removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from xpress_export.engines.builder import Listener
from xpress_export.engines.options import CompileOptions
from xpress_export.engines.plan import BundlePlan, EnginePlan, check_memory, plan_bundle
from xpress_export.engines.process import Workers, build_in_subprocess
from xpress_export.engines.report import build_report
from xpress_export.errors import BundleError, EngineBuildError
from xpress_export.folders import require_free_space, sync
from xpress_export.gpu import find_gpu
from xpress_export.manifest import (
    ENGINES_FOLDER,
    EngineRecord,
    FileRecord,
    Manifest,
    read_manifest,
    verify_files,
    write_manifest,
)

logger = logging.getLogger(__name__)
_OURS = re.compile(r"\.?[\w.-]+\.(plan|build\.json)(\.partial-(\d+))?")


class BuildProgress(Protocol):
    """Who watches a compilation; the command line draws bars, everyone else passes `Unwatched`."""

    def engine(self, role: str, expected_s: float) -> AbstractContextManager[Listener]:
        """Enter the build of one engine; the listener hears of TensorRT's phases."""


class Unwatched:
    """The default: says nothing."""

    @contextlib.contextmanager
    def engine(self, role: str, expected_s: float) -> Iterator[Listener]:
        yield lambda _phase, _share: None


@dataclass(frozen=True, kw_only=True)
class Built:
    """One engine in place. cached: it was built before. report: what its build report says."""

    role: str
    cached: bool
    report: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The bundle's new manifest and its new engines. reason: why this lowering."""

    manifest: Manifest
    lowering: str
    reason: str
    engines: tuple[Built, ...]


def compile_bundle(folder: Path, options: CompileOptions, progress: BuildProgress | None = None) -> Compiled:
    """Add engines for one platform to the bundle in `folder`.

    An engine of the same role, platform, backend, precision and layout is replaced.
    """
    manifest = read_manifest(folder)
    plan = plan_bundle(folder, manifest, options, find_gpu())
    logger.info("%s graphs: %s", plan.lowering, plan.reason)
    try:
        return _compile(plan, manifest, progress or Unwatched())
    except OSError as err:
        problem = f"engines cannot be written to {folder}: {err.strerror or err}"
        raise EngineBuildError(f"{problem}; check the path, its permissions and the disk") from err


def _compile(plan: BundlePlan, manifest: Manifest, progress: BuildProgress) -> Compiled:
    folder = plan.folder
    require_free_space(folder, sum(engine.weight_bytes for engine in plan.engines), "the engines")
    (folder / ENGINES_FOLDER).mkdir(exist_ok=True)
    with _verified(folder, manifest) as verification, _partials(plan) as partials, _temporary() as work:
        watch = _Checking(progress, verification)
        with ThreadPoolExecutor(1) as disk:  # a plan goes to the disk while the next one is built
            built = _build_all(plan, partials, work, watch, disk)
        verification.result()
        new = _commit(plan, manifest, partials, built)
    return Compiled(manifest=new, lowering=plan.lowering, reason=plan.reason, engines=tuple(built))


@contextlib.contextmanager
def _temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="xpress-export-") as folder:
        yield Path(folder)


@contextlib.contextmanager
def _verified(folder: Path, manifest: Manifest) -> Iterator[Future[None]]:
    """Compare the bundle's files with its manifest while engines are built from them; sizes are looked at first."""
    graphs = replace(manifest, engines=(), files=tuple(sorted(_weights(manifest), key=lambda file: file.path)))
    stopped = threading.Event()

    def go_on(_num_bytes: int) -> None:
        if stopped.is_set():
            raise EngineBuildError("the compilation has ended")  # nobody waits for it any more

    with ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(verify_files, folder, graphs, go_on)
        finally:
            stopped.set()


@dataclass(frozen=True)
class _Checking:
    """Passes progress on, and ends a build at once whose files turn out not to be those of the manifest."""

    progress: BuildProgress
    verification: Future[None]

    @contextlib.contextmanager
    def engine(self, role: str, expected_s: float) -> Iterator[Listener]:
        with self.progress.engine(role, expected_s) as listener:

            def listen(phase: str, share: float) -> None:
                if self.verification.done():
                    self.verification.result()
                listener(phase, share)

            yield listen


Partials = dict[str, Path]
"""The unfinished plan file of each role."""


@contextlib.contextmanager
def _partials(plan: BundlePlan) -> Iterator[Partials]:
    """Names for unfinished plans inside the bundle; whatever still bears one at the end is removed."""
    folder = plan.folder / ENGINES_FOLDER
    paths = {engine.role: folder / f".{engine.name}.plan.partial-{os.getpid()}" for engine in plan.engines}
    try:
        yield paths
    finally:
        for path in folder.glob(f".*.partial-{os.getpid()}"):  # plans, and a report that was being written
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: there are engines
            folder.rmdir()


def _build_all(
    plan: BundlePlan, partials: Partials, work: Path, progress: BuildProgress, disk: ThreadPoolExecutor
) -> list[Built]:
    found = {engine.role: _from_cache(plan, engine, partials[engine.role]) for engine in plan.engines}
    missing = [engine for engine in plan.engines if found[engine.role] is None]
    check_memory(plan, missing)

    workers = Workers()

    def build(engine: EnginePlan) -> Built:
        made = _build_one(plan, engine, partials[engine.role], work, progress, workers)
        disk.submit(sync, partials[engine.role])
        return made

    if plan.options.num_jobs == 1:  # in this thread, where Ctrl-C arrives
        made = [build(engine) for engine in missing]
    else:
        with ThreadPoolExecutor(plan.options.num_jobs) as pool:
            try:
                made = list(pool.map(build, missing))
            except BaseException:
                workers.kill()
                raise
    return [*(built for built in found.values() if built is not None), *made]


def _from_cache(plan: BundlePlan, engine: EnginePlan, partial: Path) -> Built | None:
    report = plan.cache.fetch(engine.key, partial) if plan.cache is not None else None
    if report is None:
        return None
    report["platform"] = plan.platform.name  # another of the same architecture may have built it
    return Built(role=engine.role, cached=True, report=report)


def _build_one(
    plan: BundlePlan, engine: EnginePlan, partial: Path, work: Path, progress: BuildProgress, workers: Workers
) -> Built:
    place = work / engine.role
    place.mkdir()
    job = plan.job(engine, place, partial)
    with progress.engine(engine.role, engine.expected_s) as listener:
        result = build_in_subprocess(job, listener, engine.weight_bytes, workers)
    report = build_report(plan, engine, job, result)
    for warning in result.warnings:
        logger.info("%s: %s", engine.role, warning)
    if plan.cache is not None:
        plan.cache.store(engine.key, partial, report)
    return Built(role=engine.role, cached=False, report=report)


def _commit(plan: BundlePlan, seen: Manifest, partials: Partials, built: list[Built]) -> Manifest:
    """Put files in place and write the manifest, last. Two compilations of one bundle take turns here."""
    folder, engines = plan.folder, {engine.role: engine for engine in plan.engines}
    with _locked(folder):
        current = read_manifest(folder)
        if _graphs(current) != _graphs(seen) or _weights(current) != _weights(seen):
            raise BundleError(f"{folder} was built again while its engines were compiled; compile them once more")
        records, files = [], []
        try:
            for made in built:
                report = (json.dumps(made.report, indent=2) + "\n").encode()
                record = _record(plan, engines[made.role], report)
                files += _put(folder, record, partials[made.role], made.report["plan"], report)
                records.append(record)
            manifest = _with_engines(current, records, files)
            write_manifest(folder, manifest)
        finally:
            _remove_unlisted(folder, read_manifest(folder))
    return manifest


def _graphs(manifest: Manifest) -> tuple[object, ...]:
    return (manifest.graphs, manifest.decomposed, manifest.cycle)


def _weights(manifest: Manifest) -> set[FileRecord]:
    return {file for file in manifest.files if not file.path.startswith(f"{ENGINES_FOLDER}/")}


def _put(folder: Path, record: EngineRecord, partial: Path, plan: dict[str, Any], report: bytes) -> list[FileRecord]:
    """Give a plan and its report their names; returns what the manifest says of them."""
    report_partial = folder / ENGINES_FOLDER / f".{Path(record.report).name}.partial-{os.getpid()}"
    report_partial.write_bytes(report)
    for source, name in ((partial, record.file), (report_partial, record.report)):
        if not source.exists():
            raise EngineBuildError(f"{source} has gone while it was built; is the bundle being removed?")
        sync(source)
        source.replace(folder / name)
    sync(folder / ENGINES_FOLDER)
    return [
        FileRecord(path=record.file, num_bytes=plan["num_bytes"], sha256=plan["sha256"]),
        FileRecord(path=record.report, num_bytes=len(report), sha256=hashlib.sha256(report).hexdigest()),
    ]


def _record(plan: BundlePlan, engine: EnginePlan, report: bytes) -> EngineRecord:
    o = plan.options
    name = f"{ENGINES_FOLDER}/{engine.name}.{hashlib.sha256(report).hexdigest()[:12]}"  # it names the plan's hash
    return EngineRecord(
        role=engine.role,
        platform=o.platform,
        sm=plan.sm,
        backend=plan.library.backend,
        version=plan.library.version,
        driver=plan.gpu.driver if plan.gpu else None,
        precision=engine.precision,
        lowering=plan.lowering,
        layout=plan.layout,
        max_context=plan.sizes.max_context,
        capacity=plan.sizes.capacity,
        max_batch=o.max_batch,
        hardware_compat=o.hardware_compat,
        version_compatible=o.version_compatible,
        profiles=engine.profiles,
        file=f"{name}.plan",
        report=f"{name}.build.json",
        cache_key=engine.key,
    )


def _with_engines(manifest: Manifest, records: list[EngineRecord], files: list[FileRecord]) -> Manifest:
    replaced = {record.identity for record in records}
    kept = [engine for engine in manifest.engines if engine.identity not in replaced]
    gone = {path for e in manifest.engines if e.identity in replaced for path in (e.file, e.report)}
    by_path = {file.path: file for file in manifest.files if file.path not in gone} | {f.path: f for f in files}
    return replace(
        manifest,
        engines=tuple(sorted([*kept, *records], key=lambda e: tuple(map(str, e.identity)))),
        files=tuple(by_path[path] for path in sorted(by_path)),
    )


def _remove_unlisted(folder: Path, manifest: Manifest) -> None:
    """Remove replaced engines and what killed compilations left, but no file that a live one is writing."""
    listed = {Path(file.path).name for file in manifest.files}
    for path in (folder / ENGINES_FOLDER).iterdir():
        match = _OURS.fullmatch(path.name)
        if match is None or path.name in listed or (match[3] is not None and _is_alive(int(match[3]))):
            continue
        path.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a filesystem without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
