"""The refiner's checkpoint: an xPress or Markov head in a serving folder, or a training `.pt` file.

format   tensors
serving  xpress_head.* or markov_head.markov_*, beside the drafter's own tensors or alone
training refiner_state_dict: the same names without prefix
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xpress_export.errors import CheckpointError
from xpress_export.exporter.checkpoint_files import integer
from xpress_export.exporter.configs import RefinerConfig
from xpress_export.exporter.decoder_config import Shapes, check_tensors, first_few
from xpress_export.exporter.drafter_checkpoint import DrafterCheckpoint
from xpress_export.exporter.head_files import HeadFiles, open_head_files
from xpress_export.exporter.target_checkpoint import TargetCheckpoint
from xpress_export.exporter.weights import WeightSource

XPRESS, MARKOV = "xpress", "markov"
DEFAULT_NUM_PASSES = 6
IGNORED = "mix.tril"


@dataclass(frozen=True, kw_only=True)
class RefinerCheckpoint:
    """A refiner that fits its drafter and target.

    weights: `w1.weight` [V, r], `w2.weight` [Vd, r]; for xPress also `down_h.weight`, `down_g.weight` [r, E],
        `in_proj.weight` [r, 3r], `mix.L` [r, N, N] as stored (neither masked nor with the identity added) and
        `mlp.{gate,up}_proj.weight` [m, r], `mlp.down_proj.weight` [r, m].
    """

    config: RefinerConfig
    weights: WeightSource
    source: str
    folder_or_file: Path
    digest: str
    files: tuple[Path, ...]


def read_refiner(source: str, target: TargetCheckpoint, drafter: DrafterCheckpoint) -> RefinerCheckpoint:
    """Read the refiner that `source` names and check that it fits `drafter` and `target`."""
    files = open_head_files(source, "refiner", "refiner_state_dict")
    kind, weights = _head(files)
    _check_slot_convention(files, drafter)
    config = _refiner_config(kind, files, weights, target, drafter)
    _check_fits(weights, config, drafter)
    check_tensors(weights, refiner_shapes(config), f"{kind} refiner")
    return RefinerCheckpoint(
        config=config,
        weights=weights,
        source=source,
        folder_or_file=files.path,
        digest=files.digest(),
        files=files.files,
    )


def refiner_shapes(config: RefinerConfig) -> Shapes:
    """Names and shapes of every tensor of a refiner."""
    rank, hidden, inner, slots = config.rank, config.hidden_size, config.mlp_hidden, config.block_size
    shapes: Shapes = {"w1.weight": (config.vocab_size, rank), "w2.weight": (config.draft_vocab_size, rank)}
    if config.kind == MARKOV:
        return shapes
    shapes |= {"down_h.weight": (rank, hidden), "down_g.weight": (rank, hidden)}
    shapes |= {"in_proj.weight": (rank, 3 * rank), "mix.L": (rank, slots, slots)}
    shapes |= {"mlp.gate_proj.weight": (inner, rank), "mlp.up_proj.weight": (inner, rank)}
    return shapes | {"mlp.down_proj.weight": (rank, inner)}


def _head(files: HeadFiles) -> tuple[str, WeightSource]:
    """The kind of head and its tensors, without prefix."""
    for kind, prefix in ((XPRESS, "xpress_head."), (MARKOV, "markov_head.")):
        head = files.weights.without_prefix(prefix)
        if head.names():
            return kind, _plain_names(head)
    head = _plain_names(files.weights)
    if "w1.weight" not in head.names():
        found = first_few(files.weights.names()) or "no tensors"
        raise CheckpointError(
            f"{files.path} has no refiner head, neither xpress_head.* nor markov_head.* tensors "
            f"(found {found}); give the folder or .pt file that training wrote, or export without a refiner"
        )
    return (MARKOV if head.names() == {"w1.weight", "w2.weight"} else XPRESS), head


def _plain_names(weights: WeightSource) -> WeightSource:
    kept = weights.names() - {IGNORED}
    return weights.renamed({name.removeprefix("markov_"): name for name in kept})


def _check_slot_convention(files: HeadFiles, drafter: DrafterCheckpoint) -> None:
    anchored = files.raw.get("sample_from_anchor")
    if anchored is not None and bool(anchored) != (drafter.config.first_slot == 0):
        raise CheckpointError(
            f"{files.where}: 'sample_from_anchor' is {anchored} but the drafter {drafter.source} starts "
            f"at slot {drafter.config.first_slot}; use the refiner trained with this drafter"
        )


def _refiner_config(
    kind: str, files: HeadFiles, weights: WeightSource, target: TargetCheckpoint, drafter: DrafterCheckpoint
) -> RefinerConfig:
    rank = _declared(files, f"{kind}_rank", _size(weights, "w1.weight", -1))
    inner = _declared(files, "xpress_mlp_hidden", _size(weights, "mlp.gate_proj.weight", 0))
    return RefinerConfig(
        kind=kind,
        rank=rank,
        hidden_size=drafter.config.decoder.hidden_size,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=drafter.config.draft_vocab_size or target.config.vocab_size,
        block_size=_declared(files, "xpress_block_size", drafter.config.block_size),
        num_passes=_num_passes(kind, files, drafter),
        mlp_hidden=inner if kind == XPRESS else 0,
    )


def _size(weights: WeightSource, name: str, axis: int) -> int:
    """One dimension of a tensor, 0 if it is absent (which `check_tensors` reports)."""
    return weights.size(name, axis) if name in weights.names() else 0


def _declared(files: HeadFiles, key: str, default: int) -> int:
    return integer(files.raw[key], key, files.where) if files.raw.get(key) is not None else default


def _num_passes(kind: str, files: HeadFiles, drafter: DrafterCheckpoint) -> int:
    """The checkpoint's passes; a Markov head is exact only after one pass per draft token."""
    if kind == MARKOV:
        return drafter.config.num_draft_tokens
    return _declared(files, "xpress_num_passes", DEFAULT_NUM_PASSES)


def _check_fits(weights: WeightSource, config: RefinerConfig, drafter: DrafterCheckpoint) -> None:
    """Sizes that a refiner of another drafter would have different."""
    slots = _size(weights, "mix.L", -1) or config.block_size
    pairs = [
        ("block size", config.block_size, drafter.config.block_size),
        ("block size", slots, drafter.config.block_size),
        ("hidden size", _size(weights, "down_h.weight", -1) or config.hidden_size, config.hidden_size),
        ("vocabulary", _size(weights, "w1.weight", 0) or config.vocab_size, config.vocab_size),
        (
            "draft vocabulary",
            _size(weights, "w2.weight", 0) or config.draft_vocab_size,
            config.draft_vocab_size,
        ),
    ]
    for what, got, expected in pairs:
        if got != expected:
            raise CheckpointError(
                f"{weights.where}: the refiner's {what} is {got} but that of the drafter {drafter.source} is "
                f"{expected}; use the refiner trained with this drafter"
            )
