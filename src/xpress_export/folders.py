"""Folders that appear complete or not at all.

    with staged_folder(out, replace=False) as partial:
        ...                                    write files below `partial`; at the end it becomes `out`

`partial` is `.{out.name}.partial-<pid>-<random>` beside `out`, on the same filesystem. What is guaranteed:

    at any moment            whoever opens `out` finds what was there before, or all of the new folder
    an error or Ctrl-C       `out` is as it was, and the partial folder is removed
    the process is killed    `out` is the old or the new folder; the next build of `out` removes the leftovers
    power is lost            the same: the new folder is on the disk before it takes its name

Replacing a bundle exchanges two names in one step (`renameat2` of Linux). A filesystem that cannot do that
gets two renames: a kill between them leaves no `out`, and the next build first puts the old bundle back.

A partial folder belongs to the process that holds its lock (`flock`); the kernel drops it with the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from xpress_export.errors import ExportError, XpressExportError
from xpress_export.names import TARGET
from xpress_export.records import (
    DRAFT_VOCAB_FILE,
    ENGINES_FOLDER,
    GRAPHS_FOLDER,
    MANIFEST_FILE,
    SCALES_FOLDER,
    TOKENIZER_FOLDER,
)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_NEARLY_FULL_BYTES = 1 << 20
_BUNDLE_FILES = re.compile(
    rf"{re.escape(MANIFEST_FILE)}|{GRAPHS_FOLDER}/\w+(\.[\w-]+)?(\.decomposed)?\.(onnx|data)|{DRAFT_VOCAB_FILE}|{SCALES_FOLDER}/[\w.-]+\.json"
    rf"|{TOKENIZER_FOLDER}/(tokenizer|text)\.json|{ENGINES_FOLDER}/\.?[\w.-]+\.(plan|build\.json)(\.partial-\d+)?"
    rf"|\.{re.escape(MANIFEST_FILE)}\.partial-\d+",
    re.ASCII,
)

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def staged_folder(out: Path, *, replace: bool) -> Iterator[Path]:
    """Build a folder aside and give it its name when the block ends without an error.

    Folders above `out` are made where they are missing, and stay.

    replace: whether `out` may be a bundle already, which the new folder then replaces. An empty folder may
    always be filled; a folder with anything in it that no bundle has is never touched.
    """
    out = Path(os.path.realpath(out))
    check_free_to_use(out, replace=replace)
    with _claimed(out) as stage:
        with _full_disk_explained(out.parent):
            yield stage.partial
        with _explained(f"{out} cannot be written"):
            _sync_tree(stage.partial)
        check_free_to_use(out, replace=replace)
        with _explained(f"{out} cannot be put in place"):
            _put_in_place(stage)


@dataclass(frozen=True)
class _Stage:
    """The names one build uses beside `out`: the folder it fills, and the old one while names change."""

    out: Path
    token: str

    @property
    def partial(self) -> Path:
        return self.out.with_name(f".{self.out.name}.partial-{self.token}")

    @property
    def aside(self) -> Path:
        return self.out.with_name(f".{self.out.name}.old-{self.token}")

    def clean(self) -> None:
        """Undo whatever is half done: a bundle set aside and not replaced comes back, the rest goes."""
        if self.aside.exists() and not self.out.exists():
            os.rename(self.aside, self.out)
        for left in (self.partial, self.aside):
            shutil.rmtree(left, ignore_errors=True)
            if left.exists():
                logger.warning("%s could not be removed; remove it by hand", left)


@contextlib.contextmanager
def _claimed(out: Path) -> Iterator[_Stage]:
    """A stage of our own, locked as long as the block lasts and cleaned up whatever happens in it."""
    stage = _Stage(out, f"{os.getpid()}-{secrets.token_hex(4)}")
    with contextlib.ExitStack() as stack:
        # One build at a time looks for leftovers and makes its own folder, which is unlocked for an instant.
        with _explained(f"no folder can be made in {out.parent}"):
            out.parent.mkdir(parents=True, exist_ok=True)
        with _explained(f"no folder can be made in {out.parent}"), _locked(out.parent):
            for left in _leftovers(out):
                left.clean()
            stack.callback(stage.clean)
            stage.partial.mkdir()
            stack.enter_context(_locked(stage.partial))
        yield stage


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a filesystem without locks: `_is_alive` then says yes
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _leftovers(out: Path) -> list[_Stage]:
    """Stages of builds of `out` whose process has ended."""
    pattern = re.compile(rf"\.{re.escape(out.name)}\.(?:partial|old)-(\d+-[0-9a-f]{{8}})")
    with os.scandir(out.parent) as entries:
        found = [pattern.fullmatch(e.name) for e in entries if e.is_dir(follow_symlinks=False)]
    stages = [_Stage(out, token) for token in sorted({match[1] for match in found if match})]
    return [stage for stage in stages if not _is_alive(stage)]


def _is_alive(stage: _Stage) -> bool:
    """Whether a process holds the lock of the stage's partial folder."""
    try:
        descriptor = os.open(stage.partial, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False  # killed after its folder took its name
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _put_in_place(stage: _Stage) -> None:
    """Give the partial folder its name. Interrupted anywhere, `_Stage.clean` finishes or undoes the rest."""
    out, partial = stage.out, stage.partial
    if not out.exists() or not any(out.iterdir()):
        os.rename(partial, out)  # replaces an empty folder, fails on any other
    elif not _exchange(partial, out):
        os.rename(out, stage.aside)
        os.rename(partial, out)
    sync(out.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically; false where the C library or the filesystem cannot."""
    import ctypes

    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number))


def check_free_to_use(out: Path, *, replace: bool) -> None:
    """Refuse a name that `staged_folder` could not give to a new folder; `replace` as there."""
    with _explained(f"{out} cannot be used"):
        if not out.exists():
            return
        if not out.is_dir():
            raise ExportError(f"{out} is a file; name a folder to build into")
        if Path.cwd().is_relative_to(out):
            raise ExportError(f"{out} is the current folder or above it; name a folder inside the current one")
        if os.path.ismount(out):
            raise ExportError(f"{out} is a mount point, which cannot be renamed; name a folder inside it")
        if not any(out.iterdir()):
            return
        if not replace:
            raise ExportError(f"{out} already exists; name another folder, or remove it by hand")
        _check_is_bundle(out)


def _check_is_bundle(folder: Path) -> None:
    """Refuse a folder that may hold somebody's work: nothing in it but what an export writes."""
    found = set(files_below(folder))
    foreign = sorted(path for path in found if not _BUNDLE_FILES.fullmatch(path))
    if not foreign and {MANIFEST_FILE, f"{GRAPHS_FOLDER}/{TARGET}.onnx"} <= found:
        return
    what = f"holds {foreign[0]!a}, which no bundle has" if foreign else "is not a complete bundle"
    raise ExportError(f"{folder} {what}, so it is not replaced; name another folder, or remove it by hand")


def files_below(folder: Path, top: str = "") -> Iterator[str]:
    """Relative paths of everything below `folder / top` that is not a folder, in order; links stay links."""
    for entry in sorted(os.scandir(folder / top), key=lambda entry: entry.name):
        path = f"{top}/{entry.name}" if top else entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from files_below(folder, path)
        else:
            yield path


def _sync_tree(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for path in (*files, "."):
            sync(Path(root, path))


def sync(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _explained(problem: str) -> Iterator[None]:
    """Turn the system's errors into ours."""
    try:
        yield
    except OSError as err:
        raise ExportError(f"{problem}: {err.strerror or err}; check the path, its permissions and the disk") from err


@contextlib.contextmanager
def _full_disk_explained(folder: Path) -> Iterator[None]:
    """Turn a failure for lack of space into ours; many libraries report it without the system's code."""
    try:
        yield
    except XpressExportError:
        raise
    except Exception as err:
        free = shutil.disk_usage(folder).free
        if getattr(err, "errno", None) not in _DISK_FULL and free >= _NEARLY_FULL_BYTES:
            raise
        raise ExportError(
            f"the disk is full: {_human(free)} left in {folder}; free some space or name a folder elsewhere"
        ) from err


def require_free_space(folder: Path, num_bytes: int, what: str) -> None:
    """Refuse early to write `num_bytes` of `what` where they do not fit; `folder` need not exist yet."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    with _explained(f"the free space of {place} cannot be told"):
        free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise ExportError(
            f"{what} takes {_human(num_bytes)} in {folder}, where {_human(free)} are free; "
            f"free {_human(num_bytes - free)} or name a folder on another disk"
        )


def _human(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def link_rest(folder: Path, stage: Path, paths: Iterable[str]) -> None:
    """Make the files `paths` of `folder` that `stage` lacks appear in `stage` too.

    As second names of the same files where the filesystem can, so that nothing is copied.
    """
    for path in paths:
        place = stage / path
        if place.exists():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(folder / path, place)
        except OSError:
            shutil.copy2(folder / path, place)
