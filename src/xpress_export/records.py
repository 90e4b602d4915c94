"""The records a manifest is made of. Each checks at construction what it can know on its own."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from xpress_export import names, platforms
from xpress_export.strict_json import FieldError, show

MANIFEST_FILE = "manifest.json"
GRAPHS_FOLDER = "graphs"
DRAFT_VOCAB_FILE = f"{GRAPHS_FOLDER}/draft_vocab.npy"
ENGINES_FOLDER = "engines"
TOKENIZER_FOLDER = "tokenizer"
SCALES_FOLDER = "scales"
SCALES_FILE = f"{SCALES_FOLDER}/calibration.json"
_HALF = ("int64", "float32", "float16")
DTYPES = {"fp32": ("int64", "float32"), "fp16": _HALF, "int8": _HALF, "fp8": _HALF}
HARDWARE_LEVELS = ("none", "ampere-plus", "same-cc")
REFINER_KINDS = ("xpress", "markov")
TOKENIZER_MATCHES = ("identical", "absent")

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PATH = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*/)*[A-Za-z0-9_][A-Za-z0-9._-]*")
_SYMBOL = re.compile(r"[A-Za-z]\w*(?:[+-]\d+)?")


def graph_stem(role: str, precision: str | None = None, *, decomposed: bool = False) -> str:
    """Name of a graph's file without its ending. precision: of a quantized graph; None: of the bundle."""
    return ".".join(filter(None, (role, precision, "decomposed" if decomposed else None)))


def refuse(field: str, expected: str, got: object) -> None:
    raise FieldError(field, f"should be {expected}, got {show(got)}")


def one_of(record: object, field: str, allowed: tuple[object, ...]) -> None:
    got = getattr(record, field)
    if got not in allowed:
        refuse(field, " or ".join("null" if a is None else repr(a) for a in allowed), got)


def at_least(record: object, minimum: int, *field_names: str) -> None:
    for field in field_names:
        if getattr(record, field) < minimum:
            refuse(field, f"at least {minimum}", getattr(record, field))


def not_empty(record: object, *field_names: str) -> None:
    for field in field_names:
        if not getattr(record, field):
            raise FieldError(field, "should not be empty")


def hex_digest(record: object, field: str) -> None:
    if not _SHA256.fullmatch(getattr(record, field)):
        refuse(field, "64 lower-case hex digits", getattr(record, field))


def plain_path(record: object, field: str) -> None:
    if not _PATH.fullmatch(getattr(record, field)):
        refuse(field, "a relative path such as 'graphs/target.onnx', without '..'", getattr(record, field))


def unique(field: str, values: Sequence[str]) -> None:
    for n, value in enumerate(values):
        if value in values[:n]:
            raise FieldError(field, f"should not repeat, got {show(value)} twice")


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """A target or drafter. `source` is the checkpoint as the user named it, `digest` that of its files."""

    source: str
    digest: str
    family: str
    num_parameters: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    def __post_init__(self) -> None:
        not_empty(self, "source", "family")
        hex_digest(self, "digest")
        at_least(self, 1, "num_parameters", "hidden_size", "num_layers", "num_heads", "num_kv_heads")
        at_least(self, 1, "head_dim", "vocab_size")
        if self.num_heads % self.num_kv_heads:
            refuse("num_kv_heads", f"a divisor of num_heads {self.num_heads}", self.num_kv_heads)


@dataclass(frozen=True, kw_only=True)
class RefinerRecord:
    """A refiner; `rank` is its bottleneck width."""

    source: str
    digest: str
    kind: str
    rank: int
    num_parameters: int

    def __post_init__(self) -> None:
        not_empty(self, "source")
        hex_digest(self, "digest")
        one_of(self, "kind", REFINER_KINDS)
        at_least(self, 1, "rank", "num_parameters")


@dataclass(frozen=True, kw_only=True)
class DraftRecord:
    """How blocks are drafted.

    first_slot: slot of the block that holds the first draft token. draft_vocab_size: rows of the drafter's
    head. vocab_file: the target's token id of each row, int64 [Vd] as .npy, null where they are all ids in order.
    refine_passes: default Jacobi passes, 0 without a refiner. trained: false for random stand-ins.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    first_slot: int
    num_draft_tokens: int
    draft_vocab_size: int
    vocab_file: str | None
    refine_passes: int
    trained: bool

    def __post_init__(self) -> None:
        at_least(self, 2, "block_size")
        at_least(self, 0, "mask_token_id", "refine_passes")
        at_least(self, 1, "draft_vocab_size")
        one_of(self, "first_slot", (0, 1))
        one_of(self, "vocab_file", (None, DRAFT_VOCAB_FILE))
        not_empty(self, "target_layer_ids")
        if self.num_draft_tokens != self.block_size - self.first_slot:
            expected = f"{self.block_size - self.first_slot} (block_size - first_slot)"
            refuse("num_draft_tokens", expected, self.num_draft_tokens)


@dataclass(frozen=True, kw_only=True)
class TextRecord:
    """The text side. `drafter_tokenizer`: whether the drafter came with the target's tokenizer or none."""

    folder: str
    fingerprint: str
    stop_token_ids: tuple[int, ...]
    drafter_tokenizer: str | None
    refiner_tokenizer: str | None

    def __post_init__(self) -> None:
        one_of(self, "folder", (TOKENIZER_FOLDER,))
        hex_digest(self, "fingerprint")
        one_of(self, "drafter_tokenizer", (None, *TOKENIZER_MATCHES))
        one_of(self, "refiner_tokenizer", (None, *TOKENIZER_MATCHES))
        ids = self.stop_token_ids
        if list(ids) != sorted(set(ids)) or min(ids, default=0) < 0:
            refuse("stop_token_ids", "ascending token ids", list(ids))


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """One graph input or output; a dynamic dimension is the symbol `names` explains, such as "B" or "N-1"."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def __post_init__(self) -> None:
        not_empty(self, "name")
        one_of(self, "dtype", DTYPES["fp16"])
        for axis, size in enumerate(self.shape):
            if not (_SYMBOL.fullmatch(size) if isinstance(size, str) else size >= 1):
                refuse(f"shape[{axis}]", "a positive size or a symbol such as 'B'", size)


@dataclass(frozen=True, kw_only=True)
class GraphRecord:
    """One ONNX file, the weight files it refers to, and its bindings in graph order."""

    file: str
    data: tuple[str, ...]
    inputs: tuple[TensorRecord, ...]
    outputs: tuple[TensorRecord, ...]

    def __post_init__(self) -> None:
        plain_path(self, "file")
        for n, path in enumerate(self.data):
            if not _PATH.fullmatch(path) or os.path.dirname(path) != GRAPHS_FOLDER:
                refuse(f"data[{n}]", f"a file of {GRAPHS_FOLDER}/", path)
        unique("data", self.data)
        unique("inputs", [tensor.name for tensor in self.inputs])
        unique("outputs", [tensor.name for tensor in self.outputs])


@dataclass(frozen=True, kw_only=True)
class VariantRecord:
    """The graph of one model in one quantized precision.

    It has the bindings of the model's own graph. file, data: the graph and its weights; decomposed: the same for an
    older TensorRT, on the same weights. scales: what it was made from, null where only weights are quantized.
    smoothquant: alpha, null without. num_layers: quantized layers. kept: layers left in high precision.
    """

    role: str
    precision: str
    file: str
    data: tuple[str, ...]
    decomposed: str | None
    scales: str | None
    smoothquant: float | None
    block_size: int | None
    num_layers: int
    kept: tuple[str, ...]

    def __post_init__(self) -> None:
        one_of(self, "role", (names.TARGET, names.DRAFTER))
        one_of(self, "precision", platforms.QUANTIZED)
        stem = f"{GRAPHS_FOLDER}/{self.role}.{self.precision}"
        one_of(self, "file", (f"{stem}.onnx",))
        one_of(self, "decomposed", (None, f"{stem}.decomposed.onnx"))
        for n, path in enumerate(self.data):
            if not _PATH.fullmatch(path) or os.path.dirname(path) != GRAPHS_FOLDER:
                refuse(f"data[{n}]", f"a file of {GRAPHS_FOLDER}/", path)
        unique("data", self.data)
        at_least(self, 1, "num_layers")
        unique("kept", self.kept)
        if (self.scales is None) != self.precision.endswith("-weight"):
            refuse("scales", "a file with quantized activations, null without", self.scales)
        if self.smoothquant is not None and not 0 < self.smoothquant < 1:
            refuse("smoothquant", "between 0 and 1", self.smoothquant)
        if (self.block_size is None) != (self.precision != "int4-weight"):
            refuse("block_size", "the size of a block of int4-weight, null otherwise", self.block_size)


@dataclass(frozen=True, kw_only=True)
class ParityRecord:
    """A comparison made at export: `value` is the error measured on `rows` rows, at most `tolerance`."""

    graph: str
    against: str
    measure: str
    value: float
    tolerance: float
    rows: int

    def __post_init__(self) -> None:
        one_of(self, "graph", (*names.ROLES, *names.CYCLE))
        not_empty(self, "against", "measure")
        at_least(self, 1, "rows")
        for name in ("value", "tolerance"):
            number = getattr(self, name)
            if not (math.isfinite(number) and number >= 0):
                refuse(name, "a finite number of at least 0", number)
        if self.value > self.tolerance:
            refuse("value", f"at most the tolerance {self.tolerance}", self.value)


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of the bundle; `path` is relative to the bundle, with forward slashes."""

    path: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        plain_path(self, "path")
        at_least(self, 0, "num_bytes")
        hex_digest(self, "sha256")


@dataclass(frozen=True, kw_only=True)
class ProfileRecord:
    """One optimization profile: for each dynamic dimension the least, the usual and the greatest size."""

    name: str
    sizes: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        not_empty(self, "name")
        for symbol, sizes in self.sizes.items():
            if len(sizes) != 3 or not 1 <= sizes[0] <= sizes[1] <= sizes[2]:
                refuse(f"sizes.{symbol}", "three sizes, 1 <= min <= opt <= max", list(sizes))


@dataclass(frozen=True, kw_only=True)
class EngineRecord:
    """One engine plan, what it was built from, and what has to be equal where it is loaded.

    sm: compute capability it was built for. backend, version: the library and its full version. driver: major
    version of the driver it was built with, null where a plan was built without a GPU. capacity: rows of each
    cache, fixed in the plan. cache_key: digest of everything that determines the plan. report: the build report.
    """

    role: str
    platform: str
    sm: int
    backend: str
    version: str
    driver: int | None
    precision: str
    lowering: str
    layout: str
    max_context: int
    capacity: int
    max_batch: int
    hardware_compat: str
    version_compatible: bool
    profiles: tuple[ProfileRecord, ...]
    file: str
    report: str
    cache_key: str

    def __post_init__(self) -> None:
        one_of(self, "role", (*names.ROLES, *names.CYCLE))
        one_of(self, "platform", tuple(platforms.PLATFORMS))
        one_of(self, "backend", (platforms.TENSORRT, platforms.TENSORRT_RTX))
        one_of(self, "precision", (*platforms.PRECISIONS, *platforms.QUANTIZED))
        one_of(self, "lowering", platforms.LOWERINGS)
        one_of(self, "layout", (names.LAYOUT_FUSED if self.role == names.STEP else names.LAYOUT_SPLIT,))
        one_of(self, "hardware_compat", HARDWARE_LEVELS)
        not_empty(self, "version", "profiles")
        at_least(self, 1, "sm", "max_context", "max_batch")
        at_least(self, self.max_context, "capacity")
        hex_digest(self, "cache_key")
        unique("profiles", [profile.name for profile in self.profiles])
        for field in ("file", "report"):
            plain_path(self, field)
            if os.path.dirname(getattr(self, field)) != ENGINES_FOLDER:
                refuse(field, f"a file of {ENGINES_FOLDER}/", getattr(self, field))

    @property
    def identity(self) -> tuple[object, ...]:
        """What two engines of one bundle must not share: a newer one replaces the older."""
        return (self.role, self.platform, self.backend, self.precision, self.layout)
