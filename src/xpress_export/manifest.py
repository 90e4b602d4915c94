"""The bundle on disk and its manifest: what an export hands to whatever runs it.

    manifest.json                              everything below, and the digest of it
    graphs/{target,drafter,refiner}.onnx       one graph per model; drafter and refiner may be absent
    graphs/{target,drafter,refiner}.data       weights; a graph may refer to another model's file
    graphs/draft_vocab.npy                     token ids of a reduced draft vocabulary, where it is one
    graphs/accept.onnx                         what a cycle commits
    graphs/step.onnx, step.{precision}.onnx    a whole cycle on the same weights, in a bundle of the fused layout
    graphs/*.decomposed.onnx                   the same graphs for an older TensorRT, on the same weights
    graphs/{role}.{precision}.onnx, .data      quantized variants, which may refer to the weights above
    scales/*.json                              what calibration measured, and what each variant was made from
    engines/*.plan, *.build.json               engines of a platform and their build reports, where compiled
    tokenizer/tokenizer.json, text.json        the text side

    read_manifest(folder)       parse and check manifest.json; no other file is opened
    verify_files(folder, m)     compare every listed file with its recorded size and sha256
    open_bundle(folder)         both
    record_files(folder)        what `Manifest.files` of a new bundle holds
    write_manifest(folder, m)   the last step of building one

Reading is strict: a key too many, a key too few, a wrong type, a value that contradicts another, or an edit
that leaves the digest behind is a `BundleError`. To add a section: a frozen class in `records`, a field of
`Manifest`, its checks in `consistency`, the next number in `SCHEMA`. The decoder follows the type hints.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import stat
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from dataclasses import field as declared
from pathlib import Path
from typing import Any

from xpress_export import names
from xpress_export.consistency import check_sections
from xpress_export.errors import BundleError, ExportError
from xpress_export.folders import files_below, sync
from xpress_export.platforms import PLATFORMS
from xpress_export.records import (
    DRAFT_VOCAB_FILE,
    DTYPES,
    ENGINES_FOLDER,
    GRAPHS_FOLDER,
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    DraftRecord,
    EngineRecord,
    FileRecord,
    GraphRecord,
    ModelRecord,
    ParityRecord,
    ProfileRecord,
    RefinerRecord,
    TensorRecord,
    TextRecord,
    VariantRecord,
    at_least,
    graph_stem,
    one_of,
    refuse,
)
from xpress_export.strict_json import (
    FieldError,
    decode,
    dump,
    load_object,
    require,
    show,
)

__all__ = [
    "DRAFT_VOCAB_FILE",
    "ENGINES_FOLDER",
    "GRAPHS_FOLDER",
    "MANIFEST_FILE",
    "TOKENIZER_FOLDER",
    "DraftRecord",
    "EngineRecord",
    "FileRecord",
    "GraphRecord",
    "Manifest",
    "ModelRecord",
    "ParityRecord",
    "ProfileRecord",
    "RefinerRecord",
    "TensorRecord",
    "TextRecord",
    "VariantRecord",
    "open_bundle",
    "read_manifest",
    "record_files",
    "verify_files",
    "verify_sizes",
    "write_manifest",
]

SCHEMA = 4
TOOL = "xpress-export"
PRECISIONS = tuple(DTYPES)
LOWERINGS = ("native",)
OPSETS = (24,)

_BUILD = f"`{TOOL} build`"
_REBUILD = f"build the bundle again with {_BUILD}"
_RECOPY = f"copy the bundle again, or build it again with {_BUILD}"
_LAYOUT = f"a bundle is a folder with {MANIFEST_FILE}, {GRAPHS_FOLDER}/ and {TOKENIZER_FOLDER}/"
_CHECKPOINT_FILES = ("config.json", "*.safetensors", "*.gguf", "*.pt", "pytorch_model*.bin")
_NUM_THREADS = 8


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a bundle says about itself. `files` covers every file but the manifest, sorted by path.

    layout: how it was built to run. cycle: `accept` and, where it was built fused, `step`, by the stem of their files.
    """

    schema: int = SCHEMA
    tool: Mapping[str, str]
    platform: str
    precision: str
    lowering: str
    layout: str = names.LAYOUT_SPLIT
    opset: int
    max_context: int
    preset: str | None
    target: ModelRecord
    drafter: ModelRecord | None
    refiner: RefinerRecord | None
    draft: DraftRecord | None
    text: TextRecord
    graphs: Mapping[str, GraphRecord]
    decomposed: Mapping[str, GraphRecord] = declared(default_factory=dict)
    cycle: Mapping[str, GraphRecord]
    variants: tuple[VariantRecord, ...] = ()
    run_precision: str | None = None
    parity: tuple[ParityRecord, ...]
    engines: tuple[EngineRecord, ...] = ()
    files: tuple[FileRecord, ...]

    def __post_init__(self) -> None:
        one_of(self, "schema", (SCHEMA,))
        one_of(self, "platform", tuple(PLATFORMS))
        one_of(self, "precision", PRECISIONS)
        one_of(self, "lowering", LOWERINGS)
        one_of(self, "layout", names.LAYOUTS)
        one_of(self, "opset", OPSETS)
        at_least(self, 1, "max_context")
        if TOOL not in self.tool:
            raise FieldError(f"tool.{TOOL}", "is missing")
        check_sections(self)
        object.__setattr__(self, "tool", dict(sorted(self.tool.items())))
        object.__setattr__(self, "graphs", {role: self.graphs[role] for role in self.roles})
        decomposed = {role: self.decomposed[role] for role in self.roles if role in self.decomposed}
        object.__setattr__(self, "decomposed", decomposed)
        object.__setattr__(self, "cycle", dict(sorted(self.cycle.items())))

    @property
    def roles(self) -> tuple[str, ...]:
        """The models present, in the order they run."""
        return tuple(role for role in names.ROLES if getattr(self, role) is not None)

    def precisions(self, role: str) -> tuple[str, ...]:
        """What the graphs of a role are in, that of the bundle first; `accept` computes in none and counts as its."""
        if role in names.CYCLE:
            known = dict.fromkeys(variant.precision for variant in self.variants)
            return (self.precision, *(p for p in known if graph_stem(role, p) in self.cycle))
        return (self.precision, *(variant.precision for variant in self.variants if variant.role == role))

    def graph(self, role: str, precision: str, *, decomposed: bool = False) -> GraphRecord | None:
        """The graph of a role in a precision and lowering, or None if the bundle has no such graph.

        Of `step` it is the one whose models run in that precision where they have it; of `accept` the only one.
        """
        if role in names.CYCLE:
            own = role == names.ACCEPT or precision == self.precision
            return self.cycle.get(graph_stem(role, None if own else precision, decomposed=decomposed))
        if precision == self.precision:
            return (self.decomposed if decomposed else self.graphs).get(role)
        found = [v for v in self.variants if (v.role, v.precision) == (role, precision)]
        file = (found[0].decomposed if decomposed else found[0].file) if found else None
        return None if file is None else replace(self.graphs[role], file=file, data=found[0].data)

    @property
    def num_bytes(self) -> int:
        """Size of the bundle's files, the manifest aside."""
        return sum(file.num_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """Sha256 over the canonical JSON of every field."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_json(self) -> str:
        """The text of `manifest.json`: fields in declared order, then the digest."""
        return dump({**asdict(self), "digest": self.digest}) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Parse and check the text of a manifest; `where` is the file that messages name."""
        try:
            raw = load_object(text)
            _check_schema(raw)
            digest = decode(str, require(raw, "digest"), "digest")
            manifest: Manifest = decode(cls, {key: raw[key] for key in raw if key != "digest"}, "")
            if digest != manifest.digest:
                refuse("digest", f"{manifest.digest} unless the file was edited after the build", digest)
        except BundleError as err:
            raise BundleError(f"{where}: {err}; {_REBUILD}") from err
        return manifest


def _check_schema(raw: dict[str, Any]) -> None:
    """Before anything else: a bundle of another schema has other fields."""
    schema = decode(int, require(raw, "schema"), "schema")
    if schema != SCHEMA:
        tool = raw.get("tool")
        writer = tool.get(TOOL) if isinstance(tool, dict) else None
        by = f" written by version {show(writer)}" if isinstance(writer, str) else ""
        expected = f"should be {SCHEMA}, the only one this version of {TOOL} reads"
        raise FieldError("schema", f"{expected}, got {show(schema)}{by}")


# The folder.


def open_bundle(folder: Path, on_progress: Callable[[int], None] | None = None) -> Manifest:
    """The manifest of a bundle whose every file is as it was when built; `on_progress` as in `verify_files`."""
    manifest = read_manifest(folder)
    verify_files(folder, manifest, on_progress)
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Parse and check the manifest of the bundle in `folder`; files are not compared with it."""
    path = folder / MANIFEST_FILE
    try:
        if not path.is_file():
            raise BundleError(_why_no_bundle(folder))
        text = path.read_bytes().decode("utf-8")
    except OSError as err:
        raise BundleError(f"{path} cannot be read: {err.strerror}; check its permissions") from err
    except UnicodeDecodeError as err:
        raise BundleError(f"{path} is not UTF-8 text ({err.reason} at byte {err.start}); {_REBUILD}") from err
    return Manifest.from_json(text, str(path))


def _why_no_bundle(folder: Path) -> str:
    if not folder.exists():
        return f"{folder} does not exist; give the folder of a bundle, or build one with {_BUILD}"
    if folder.name == MANIFEST_FILE:
        return f"{folder} is not a bundle's folder; give the folder that holds {MANIFEST_FILE}"
    if not folder.is_dir():
        return f"{folder} is a file, but {_LAYOUT}; give that folder, or build one with {_BUILD}"
    if any(True for pattern in _CHECKPOINT_FILES for _ in folder.glob(pattern)):
        return f"{folder} is a checkpoint, not a bundle; build a bundle from it first with {_BUILD}"
    return f"{folder} has no {MANIFEST_FILE}, but {_LAYOUT}; give such a folder, or build one with {_BUILD}"


def verify_files(folder: Path, manifest: Manifest, on_progress: Callable[[int], None] | None = None) -> None:
    """Compare every file with the manifest; the first in path order that differs is a `BundleError`.

    on_progress: called with numbers of bytes that add up to `manifest.num_bytes`, from worker threads, never
    from two at once.
    """
    verify_sizes(folder, manifest)
    paths = [folder / file.path for file in manifest.files]
    with contextlib.closing(_hashes(paths, on_progress)) as hashes:
        for path, file, sha256 in zip(paths, manifest.files, hashes, strict=True):
            if sha256 != file.sha256:
                raise BundleError(f"{path} should have sha256 {file.sha256}, got {sha256}; {_RECOPY}")


def verify_sizes(folder: Path, manifest: Manifest) -> None:
    """What `verify_files` can see without reading: files that are missing, of another size, or not listed."""
    root = os.path.realpath(folder)
    for file in manifest.files:
        _check_size(root, folder / file.path, file.num_bytes)
    listed = [file.path for file in manifest.files]
    for found in [*_list_files(folder, GRAPHS_FOLDER), *_list_files(folder, TOKENIZER_FOLDER)]:
        if found not in listed:
            raise BundleError(f"{folder} holds {show(found)}, not listed in its manifest; remove that file")


def _check_size(root: str, path: Path, num_bytes: int) -> None:
    try:
        real = os.path.realpath(path, strict=True)
        found = os.stat(real)
    except OSError as err:
        raise BundleError(f"{path} cannot be opened: {err.strerror}; {_RECOPY}") from err
    if not Path(real).is_relative_to(root):
        raise BundleError(f"{path} is a link to {real}, outside the bundle; copy what it points to (cp -rL)")
    if not stat.S_ISREG(found.st_mode):
        raise BundleError(f"{path} is not a regular file; {_RECOPY}")
    if found.st_size != num_bytes:
        raise BundleError(f"{path} should have {num_bytes} bytes, got {found.st_size}; {_RECOPY}")


def _list_files(folder: Path, top: str) -> list[str]:
    try:
        return list(files_below(folder, top))
    except OSError as err:
        raise BundleError(f"{folder / top} cannot be listed: {err.strerror}; check its permissions") from err


class _StoppedError(Exception):
    """Raised in a worker whose result nobody waits for any more."""


class _Reporting(io.FileIO):
    """A file that tells `advance` how many bytes each read brought."""

    advance: Callable[[int], None]

    def readinto(self, buffer: Any, /) -> int:
        num_bytes = super().readinto(buffer) or 0
        self.advance(num_bytes)
        return num_bytes


def _hashes(paths: Sequence[Path], on_progress: Callable[[int], None] | None) -> Generator[str]:
    """Sha256 of each file, in order, hashed in parallel; leaving the iteration stops the workers."""
    stopped, lock = threading.Event(), threading.Lock()

    def advance(num_bytes: int) -> None:
        if stopped.is_set():
            raise _StoppedError
        if on_progress is not None:
            with lock:
                on_progress(num_bytes)

    pool = ThreadPoolExecutor(_NUM_THREADS)
    try:
        yield from pool.map(lambda path: _sha256(path, advance), paths)
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)


def _sha256(path: Path, advance: Callable[[int], None]) -> str:
    try:
        with _Reporting(path) as file:
            file.advance = advance
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as err:
        raise BundleError(f"{path} cannot be read: {err.strerror}; check the disk and its permissions") from err


def record_files(folder: Path, on_progress: Callable[[int], None] | None = None) -> tuple[FileRecord, ...]:
    """Size and sha256 of every file of a bundle that is being built, its manifest aside.

    on_progress: as for `verify_files`.
    """
    found = sorted(name for name in _list_files(folder, "") if name != MANIFEST_FILE)
    paths = [folder / name for name in found]
    for path in paths:
        if path.is_symlink() or not path.is_file():
            raise BundleError(f"{path} is not a regular file, which a bundle cannot hold; remove it")
    with contextlib.closing(_hashes(paths, on_progress)) as hashes:
        return tuple(
            FileRecord(path=name, num_bytes=path.stat().st_size, sha256=sha256)
            for name, path, sha256 in zip(found, paths, hashes, strict=True)
        )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`, all of it or nothing, after checking that it reads back as the same manifest."""
    path = folder / MANIFEST_FILE
    text = manifest.to_json()
    if Manifest.from_json(text, str(path)) != manifest:
        raise BundleError(f"{path} would not read back as the manifest it was written from")
    partial = folder / f".{MANIFEST_FILE}.partial-{os.getpid()}"
    try:
        partial.write_text(text, "ascii")
        sync(partial)
        os.replace(partial, path)
        sync(folder)
    except OSError as err:
        raise ExportError(f"{path} cannot be written: {err.strerror}; check the disk and its permissions") from err
    finally:
        partial.unlink(missing_ok=True)
