"""The export stage: a trio of checkpoints in, a bundle out, or nothing at all.

    read      checkpoints, checked to fit each other
    write     tokenizer, then each graph with its weights
    check     every graph against its reference (`parity.py`)
    commit    the manifest, last; then the finished folder takes its place

A bundle that already holds the same trio with the same options is reused.
"""

from __future__ import annotations

import importlib.metadata
import logging
import platform as python_platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
import torch

from xpress_export import names, platforms
from xpress_export.errors import BundleError, ExportError
from xpress_export.exporter import parity
from xpress_export.exporter.checkpoints import (
    DrafterCheckpoint,
    RefinerCheckpoint,
    TargetCheckpoint,
    read_drafter,
    read_refiner,
    read_target,
)
from xpress_export.exporter.cycle import write_cycle
from xpress_export.exporter.graph_files import save_graph
from xpress_export.exporter.graphs import trace_drafter, trace_refiner, trace_target
from xpress_export.exporter.lowering import decompose
from xpress_export.exporter.lowering_check import check_lowering
from xpress_export.exporter.modules import Drafter, Refiner, fold_mixer
from xpress_export.exporter.reference import reference_from_checkpoint
from xpress_export.exporter.tokenizer import TokenizerInfo, check_same_tokenizer, export_tokenizer
from xpress_export.exporter.trace import OPSET, Source, WeightFile, attach
from xpress_export.exporter.weights import WeightSource
from xpress_export.folders import files_below, require_free_space, staged_folder
from xpress_export.manifest import (
    DRAFT_VOCAB_FILE,
    GRAPHS_FOLDER,
    MANIFEST_FILE,
    TOKENIZER_FOLDER,
    DraftRecord,
    GraphRecord,
    Manifest,
    ModelRecord,
    ParityRecord,
    RefinerRecord,
    TextRecord,
    read_manifest,
    record_files,
    verify_files,
    write_manifest,
)
from xpress_export.progress import Progress, Silent
from xpress_export.records import graph_stem

logger = logging.getLogger(__name__)
_Module = TypeVar("_Module", bound=torch.nn.Module)

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
_RECORDED_TOOLS = ("torch", "transformers", "onnx-ir", "onnxscript", "onnxruntime", "tokenizers", "gguf")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What to export. Sources are a folder, a hub id or (target) a GGUF file.

    max_context: tokens of prompt and answer a request may have; None: what the target was made for.
    lowering: "native"; "decomposed" adds the graphs for an older TensorRT; "auto" adds them where the platform has one.
    layout: "split"; "fused" adds the graph of a whole cycle and has the bundle run in it.
    preset: name recorded in the manifest. trained: False for stand-in drafters with random weights.
    """

    target: str
    drafter: str | None = None
    refiner: str | None = None
    precision: str = "fp32"
    platform: str = "cpu"
    max_context: int | None = None
    lowering: str = "auto"
    layout: str = names.LAYOUT_SPLIT
    preset: str | None = None
    trained: bool = True

    @property
    def decomposed(self) -> bool:
        """Whether the graphs for an older TensorRT are written too."""
        is_needed = platforms.DECOMPOSED in platforms.find(self.platform).lowering
        return self.lowering == platforms.DECOMPOSED or (self.lowering == "auto" and is_needed)

    def __post_init__(self) -> None:
        if self.lowering not in {"auto", *platforms.LOWERINGS}:
            raise ExportError(f"lowering must be auto, native or decomposed, got {self.lowering!r}")
        if self.precision not in DTYPES:
            raise ExportError(f"precision must be one of {', '.join(DTYPES)}, got {self.precision!r}")
        if self.layout not in names.LAYOUTS:
            raise ExportError(f"layout must be {' or '.join(names.LAYOUTS)}, got {self.layout!r}")
        if self.layout == names.LAYOUT_FUSED and self.drafter is None:
            raise ExportError("a fused step drafts: give a drafter, or leave the layout split")
        if self.refiner is not None and self.drafter is None:
            raise ExportError("a refiner corrects a drafter's block: give the drafter too")
        if self.max_context is not None and self.max_context < 2:
            raise ExportError(f"max_context must be at least 2 tokens, got {self.max_context}")


@dataclass(frozen=True, kw_only=True)
class Trio:
    """The checkpoints of one export, already checked to fit each other."""

    target: TargetCheckpoint
    drafter: DrafterCheckpoint | None
    refiner: RefinerCheckpoint | None

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafter.config.target_layer_ids if self.drafter else ()

    def digests(self) -> dict[str, str | None]:
        return {role: getattr(getattr(self, role), "digest", None) for role in names.ROLES}


@dataclass(frozen=True)
class Exported:
    """The bundle's manifest, and whether an existing bundle was reused as it stood."""

    manifest: Manifest
    reused: bool


def read_trio(options: ExportOptions) -> Trio:
    """Read the checkpoints that `options` names; raises CheckpointError where they do not fit."""
    target = read_target(options.target)
    drafter = read_drafter(options.drafter, target) if options.drafter else None
    refiner = read_refiner(options.refiner, target, drafter) if options.refiner and drafter else None
    return Trio(target=target, drafter=drafter, refiner=refiner)


def export(options: ExportOptions, out: Path, progress: Progress | None = None) -> Exported:
    """Build the bundle `out`, or reuse it if it already is what `options` asks for."""
    progress = progress or Silent()
    with progress.step("Reading checkpoints", expected_s=8):
        trio = read_trio(options)
        max_context = _max_context(options, trio)
    existing = _reusable(out, trio, options, max_context, progress)
    if existing is not None:
        return Exported(existing, reused=True)
    with staged_folder(out, replace=True) as stage:
        require_free_space(stage, _num_bytes(trio, DTYPES[options.precision]), f"the bundle {out}")
        return Exported(_build(trio, options, max_context, stage, progress), reused=False)


def _build(trio: Trio, options: ExportOptions, max_context: int, stage: Path, progress: Progress) -> Manifest:
    source = trio.target.folder_or_file
    with progress.step("Writing tokenizer", expected_s=6 if source.suffix == ".gguf" else 1):
        tokenizer = export_tokenizer(source, stage / TOKENIZER_FOLDER, stop_token_ids=trio.target.stop_token_ids)
        text = _text_record(trio, tokenizer)
    graphs, decomposed = _write_graphs(trio, options, stage / GRAPHS_FOLDER, progress)
    checks = _check_graphs(trio, options.precision, stage / GRAPHS_FOLDER, progress)
    checks += _check_decomposed(trio, options.precision, stage, decomposed, progress)
    draft = _draft_record(trio, options) if trio.drafter else None
    steps = draft if options.layout == names.LAYOUT_FUSED else None
    cycle, cycle_checks = write_cycle(stage, graphs, decomposed, steps, options.precision, progress)
    num_bytes = sum((stage / name).stat().st_size for name in files_below(stage))
    with progress.step("Hashing files", total=num_bytes) as advance:
        files = record_files(stage, advance)
    manifest = Manifest(
        tool=_tools(),
        platform=options.platform,
        precision=options.precision,
        lowering="native",
        layout=options.layout,
        opset=OPSET,
        max_context=max_context,
        preset=options.preset,
        target=_model_record(trio.target, trio.target.model_type),
        drafter=_model_record(trio.drafter, trio.drafter.layout) if trio.drafter else None,
        refiner=_refiner_record(trio.refiner) if trio.refiner else None,
        draft=draft,
        text=text,
        graphs=graphs,
        decomposed=decomposed,
        cycle=cycle,
        parity=tuple(ParityRecord(**asdict(check)) for check in (*checks, *cycle_checks)),
        files=files,
    )
    write_manifest(stage, manifest)
    return manifest


# What is already there


def _max_context(options: ExportOptions, trio: Trio) -> int:
    most = trio.target.config.max_positions
    if options.max_context is not None and options.max_context > most:
        raise ExportError(f"max_context is {options.max_context}, but the target was made for at most {most} positions")
    return options.max_context or most


def _reusable(out: Path, trio: Trio, options: ExportOptions, max_context: int, progress: Progress) -> Manifest | None:
    """The manifest of `out` if it is intact and what would be built now; otherwise None, and why in the log."""
    if not (out / MANIFEST_FILE).exists():
        return None
    try:
        found = read_manifest(out)
        with progress.step("Checking the bundle that is there", total=found.num_bytes) as advance:
            verify_files(out, found, advance)
    except BundleError as err:
        logger.warning("building again: %s", err)
        return None
    is_now = {
        "tool": found.tool,
        "platform": found.platform,
        "precision": found.precision,
        "max_context": found.max_context,
        "lowering": bool(found.decomposed),
        "layout": found.layout,
        "preset": found.preset,
        "trained": found.draft.trained if found.draft else None,
        **{f"{role} checkpoint": getattr(getattr(found, role), "digest", None) for role in names.ROLES},
    }
    would_be = {
        "tool": _tools(),
        "platform": options.platform,
        "precision": options.precision,
        "max_context": max_context,
        "lowering": options.decomposed,
        "layout": options.layout,
        "preset": options.preset,
        "trained": options.trained if trio.drafter else None,
        **{f"{role} checkpoint": digest for role, digest in trio.digests().items()},
    }
    changed = [key for key in would_be if is_now[key] != would_be[key]]
    if changed:
        logger.info("building again: %s changed", ", ".join(changed))
    return None if changed else found


# Graphs and their weights


Graphs = dict[str, GraphRecord]


def _write_graphs(trio: Trio, options: ExportOptions, folder: Path, progress: Progress) -> tuple[Graphs, Graphs]:
    """The native graphs, and the decomposed ones where the options ask for them."""
    folder.mkdir()
    dtype = DTYPES[options.precision]
    weights = WeightFile(folder, dtype)
    records: Graphs = {}
    decomposed: Graphs = {}
    for role, trace_graph, source_of, num_bytes in _jobs(trio, options, dtype):
        with progress.step(f"Tracing {role}", expected_s=_tracing_s(trio, role)):
            model = trace_graph()
        with progress.step(f"Writing {role} weights", total=num_bytes) as advance:
            weights.on_bytes = advance
            attach(model, weights, f"{role}.data", source_of)
        records[role] = save_graph(model, folder, graph_stem(role))
        if options.decomposed:
            decompose(model)
            decomposed[role] = save_graph(model, folder, graph_stem(role, decomposed=True))
    if trio.drafter is not None and trio.drafter.draft_to_target is not None:
        np.save(folder / Path(DRAFT_VOCAB_FILE).name, trio.drafter.draft_to_target.numpy())
    return records, decomposed


def _tracing_s(trio: Trio, role: str) -> float:
    """About how long tracing takes, seconds: it goes with the number of layers, not with their size.

    The first trace, of the target, also loads the tracer.
    """
    layers = {names.TARGET: trio.target.config.num_layers, names.REFINER: 1}
    if trio.drafter is not None:
        layers[names.DRAFTER] = trio.drafter.config.decoder.num_layers
    return (5 if role == names.TARGET else 3) + 0.9 * layers[role]


Job = tuple[str, Callable[[], ir.Model], Callable[[str], Source], int]


def _jobs(trio: Trio, options: ExportOptions, dtype: torch.dtype) -> list[Job]:
    """For each model: its role, how to trace it, where its weights come from, and about how many bytes they are."""
    target, drafter, refiner = trio.target, trio.drafter, trio.refiner
    jobs: list[Job] = [
        (
            names.TARGET,
            lambda: trace_target(target.config, trio.taps, dtype),
            lambda name: _target_source(target, name),
            num_parameters(target.weights) * dtype.itemsize,
        )
    ]
    if drafter is not None:
        jobs.append(
            (
                names.DRAFTER,
                lambda: trace_drafter(drafter.config, dtype, for_refiner=refiner is not None),
                lambda name: _drafter_source(drafter, target, name),
                num_parameters(drafter.weights) * dtype.itemsize,
            )
        )
    if drafter is not None and refiner is not None:
        jobs.append(
            (
                names.REFINER,
                lambda: trace_refiner(refiner.config, drafter.config.first_slot, dtype),
                lambda name: _refiner_source(refiner, drafter, name),
                num_parameters(refiner.weights) * dtype.itemsize,
            )
        )
    return jobs


def _target_source(target: TargetCheckpoint, name: str) -> Source:
    if name == "rope.inv_freq":
        return "target rope", lambda: torch.tensor(target.config.rope.inv_freq)
    if name == "lm_head.weight" and target.config.tied_head:
        name = "model.embed_tokens.weight"
    return f"target {name}", lambda: target.weights.read(name)


def _drafter_source(drafter: DrafterCheckpoint, target: TargetCheckpoint, name: str) -> Source:
    """A drafter's weight: its own, or the target's embedding and head, whole or the rows of a reduced vocabulary."""
    config, rows = drafter.config, drafter.draft_to_target
    if name == "rope.inv_freq":
        return "drafter rope", lambda: torch.tensor(config.decoder.rope.inv_freq)
    if name == "vocab.target_ids":
        assert rows is not None
        return "draft vocabulary", lambda: rows
    if name == "embed_tokens.weight" and not config.own_embedding:
        return _target_source(target, "model.embed_tokens.weight")
    if name == "lm_head.weight" and not config.own_head:
        identity, read = _target_source(target, "lm_head.weight")
        return (identity, read) if rows is None else (f"{identity} rows", lambda: read()[rows])
    return f"drafter {name}", lambda: drafter.weights.read(name)


def _refiner_source(refiner: RefinerCheckpoint, drafter: DrafterCheckpoint, name: str) -> Source:
    if name == "vocab.target_ids":
        rows = drafter.draft_to_target
        assert rows is not None
        return "draft vocabulary", lambda: rows
    if name == "mix.folded":
        return "refiner mixer", lambda: fold_mixer(refiner.weights.read("mix.L").float())
    return f"refiner {name}", lambda: refiner.weights.read(name)


# Parity


def _check_graphs(trio: Trio, precision: str, folder: Path, progress: Progress) -> list[parity.Check]:
    target, drafter, refiner = trio.target, trio.drafter, trio.refiner
    expected_s = 5 + num_parameters(target.weights) / 2e7
    with progress.step("Checking target against transformers", expected_s=expected_s):
        reference = reference_from_checkpoint(target)
        path = folder / f"{names.TARGET}.onnx"
        checks = parity.check_target(path, reference, target.config, trio.taps, precision)
        del reference
    if drafter is not None:
        with progress.step("Checking drafter", expected_s=1 + num_parameters(drafter.weights) / 2e7):
            module = _filled(Drafter(drafter.config), lambda name: _drafter_source(drafter, target, name))
            checks += parity.check_drafter(folder / f"{names.DRAFTER}.onnx", module, drafter.config, precision)
    if drafter is not None and refiner is not None:
        with progress.step("Checking refiner", expected_s=1 + num_parameters(refiner.weights) / 2e7):
            head = _filled(
                Refiner(refiner.config, drafter.config.first_slot),
                lambda name: _refiner_source(refiner, drafter, name),
            )
            checks += parity.check_refiner(folder / f"{names.REFINER}.onnx", head, precision)
    return checks


def _check_decomposed(
    trio: Trio, precision: str, stage: Path, graphs: Graphs, progress: Progress
) -> list[parity.Check]:
    vocab_size = trio.target.config.vocab_size
    block = trio.drafter.config.block_size if trio.drafter else 1
    checks = []
    for role, graph in graphs.items():
        with progress.step(f"Checking the decomposed {role}"):
            native = stage / GRAPHS_FOLDER / f"{role}.onnx"
            checks.append(check_lowering(role, native, stage / graph.file, vocab_size, block, precision))
    return checks


def _filled(module: _Module, source_of: Callable[[str], Source]) -> _Module:
    """The eager float32 module with every parameter and buffer read from its source."""
    state = {name: source_of(name)[1]() for name in module.state_dict()}
    module.load_state_dict({name: t.float() if t.is_floating_point() else t for name, t in state.items()})
    return module.eval()


# Records


def num_parameters(weights: WeightSource) -> int:
    """Elements of all tensors of a checkpoint."""
    return sum(torch.Size(weights.shape(name)).numel() for name in weights.names())


def _num_bytes(trio: Trio, dtype: torch.dtype) -> int:
    sources = [m.weights for m in (trio.target, trio.drafter, trio.refiner) if m is not None]
    return sum(num_parameters(weights) for weights in sources) * dtype.itemsize * 21 // 20


def _model_record(checkpoint: TargetCheckpoint | DrafterCheckpoint, family: str) -> ModelRecord:
    config = checkpoint.config
    decoder = config if isinstance(checkpoint, TargetCheckpoint) else checkpoint.config.decoder
    return ModelRecord(
        source=checkpoint.source,
        digest=checkpoint.digest,
        family=family,
        num_parameters=num_parameters(checkpoint.weights),
        **{
            key: getattr(decoder, key)
            for key in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
        },
    )


def _refiner_record(refiner: RefinerCheckpoint) -> RefinerRecord:
    return RefinerRecord(
        source=refiner.source,
        digest=refiner.digest,
        kind=refiner.config.kind,
        rank=refiner.config.rank,
        num_parameters=num_parameters(refiner.weights),
    )


def _draft_record(trio: Trio, options: ExportOptions) -> DraftRecord:
    assert trio.drafter is not None
    config = trio.drafter.config
    passes = min(trio.refiner.config.num_passes, config.num_draft_tokens) if trio.refiner else 0
    return DraftRecord(
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=config.target_layer_ids,
        first_slot=config.first_slot,
        num_draft_tokens=config.num_draft_tokens,
        draft_vocab_size=config.draft_vocab_size or config.decoder.vocab_size,
        vocab_file=None if trio.drafter.draft_to_target is None else DRAFT_VOCAB_FILE,
        refine_passes=passes,
        trained=options.trained,
    )


def _text_record(trio: Trio, tokenizer: TokenizerInfo) -> TextRecord:
    """Prove that the three models speak of the same tokens, as far as their checkpoints say."""

    def compare(checkpoint: Any, role: str) -> str | None:
        return None if checkpoint is None else check_same_tokenizer(tokenizer, checkpoint.folder_or_file, role)

    return TextRecord(
        folder=TOKENIZER_FOLDER,
        fingerprint=tokenizer.fingerprint,
        stop_token_ids=tuple(sorted(tokenizer.stop_token_ids)),
        drafter_tokenizer=compare(trio.drafter, names.DRAFTER),
        refiner_tokenizer=compare(trio.refiner, names.REFINER),
    )


def _tools() -> dict[str, str]:
    versions = {
        "xpress-export": importlib.metadata.version("xpress-export"),
        "python": python_platform.python_version(),
    }
    for package in _RECORDED_TOOLS:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # onnxruntime-gpu stands in for onnxruntime
    return versions
