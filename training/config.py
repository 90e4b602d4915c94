"""Every hyper-parameter, named and defaulted, and the TOML file that sets them.

    [drafter]   its shape, and where its weights start
    [refiner]   the head's shape, and where its weights start
    [loss]      terms, slot decay, Jacobi rounds, base anchor, vocabulary of the softmax
    [run]       steps, batch, optimiser, schedule, precision, seed
    [report]    held-out prompts, checkpoints, TensorBoard

A section or key that is not known is refused, and so is a value of another type.
"""

from __future__ import annotations

import tomllib
import types
import typing
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from xpress_export.training.errors import TrainingError

_Options = TypeVar("_Options")

OPTIMIZERS = ("muon", "adamw")
PRECISIONS = ("fp32", "bf16")
REFINER_KINDS = ("xpress", "markov")
SCHEDULES = ("cosine", "stable")


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """Shape of a new drafter, or `init`: the folder of one to go on from (its own shape then counts).

    target_layer_ids: tapped layers, 0-based. mask_token_id: a token that never occurs in text;
    None: the last one that the data never holds.
    first_slot: 1, slot 0 only holds the anchor; 0, it already drafts. causal: slots see earlier slots only, so
    that a shorter block drafts the same tokens. draft_vocab_size: rows of a reduced head, the most frequent
    tokens of the data; None: the target's whole vocabulary.
    """

    init: str | None = None
    num_layers: int = 2
    intermediate_size: int = 1536
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    block_size: int = 8
    first_slot: int = 1
    causal: bool = False
    target_layer_ids: tuple[int, ...] = ()
    num_taps: int = 5
    mask_token_id: int | None = None
    draft_vocab_size: int | None = None
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        _require(self.first_slot in {0, 1}, f"drafter.first_slot must be 0 or 1, got {self.first_slot}")
        _require(
            self.block_size > self.first_slot,
            f"drafter.block_size {self.block_size} leaves no slot to draft in",
        )


@dataclass(frozen=True, kw_only=True)
class RefinerOptions:
    """Shape of a new head, or `init`: the folder of one to go on from.

    bigram_init: start W1 and W2 from the factorised log-odds of the data's token pairs instead of from noise.
    num_passes: Jacobi passes that the checkpoint names as its default.
    """

    init: str | None = None
    kind: str = "xpress"
    rank: int = 64
    mlp_ratio: int = 2
    num_passes: int = 3
    bigram_init: bool = True
    bigram_scale: float = 1.0

    def __post_init__(self) -> None:
        _require(self.kind in REFINER_KINDS, f"refiner.kind must be one of {REFINER_KINDS}, got {self.kind!r}")


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """tv, ce, kl: weights of the terms (see `losses`). slot_decay: slots after which a weight has fallen to 1/e.

    jacobi_rounds, jacobi_weight: free-running rounds of the head. anchor_start, anchor_end: weight of the bare
    drafter's loss in joint training, linear over the run. sampled_vocab: rows of the softmax besides the batch's
    own labels, the most frequent first; None: all rows of the drafter's head.
    """

    tv: float = 0.0
    ce: float = 0.5
    kl: float = 0.5
    slot_decay: float = 4.0
    jacobi_rounds: int = 3
    jacobi_weight: float = 0.3
    anchor_start: float = 0.6
    anchor_end: float = 0.2
    sampled_vocab: int | None = None

    def __post_init__(self) -> None:
        _require(self.slot_decay > 0, f"loss.slot_decay must be positive, got {self.slot_decay}")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """sequences: of one step. anchors: of each, in its answer; prompt_anchors: further ones in its prompt.

    block_size: slots to train on if fewer than the drafter has. feature_dropout: share of the numbers in the tapped
    hidden states that a step sets to zero, against learning few answers by heart.
    schedule: `cosine` over all steps, or `stable` with a linear decay over the last `decay_fraction`.
    precision: of the matrix products; weights and optimiser state stay in float32.
    """

    steps: int = 1000
    sequences: int = 8
    anchors: int = 64
    prompt_anchors: int = 0
    feature_dropout: float = 0.0
    block_size: int | None = None
    optimizer: str = "muon"
    learning_rate: float = 2e-3
    refiner_learning_rate: float | None = None
    weight_decay: float = 0.0
    schedule: str = "cosine"
    decay_fraction: float = 0.3
    warmup: int = 30
    clip: float = 1.0
    precision: str = "fp32"
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.optimizer in OPTIMIZERS, f"run.optimizer must be one of {OPTIMIZERS}, got {self.optimizer!r}")
        _require(self.schedule in SCHEDULES, f"run.schedule must be one of {SCHEDULES}, got {self.schedule!r}")
        _require(self.precision in PRECISIONS, f"run.precision must be one of {PRECISIONS}, got {self.precision!r}")
        _require(self.steps > 0, f"run.steps must be positive, got {self.steps}")
        dropout = self.feature_dropout
        _require(0 <= dropout < 1, f"run.feature_dropout must be at least 0 and below 1, got {dropout}")


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """held_out: answers kept out of training to measure tau on. every, checkpoint_every: in steps."""

    held_out: int = 32
    every: int = 200
    checkpoint_every: int = 200
    tensorboard: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """One run. target: as for `build`. data: folders that `make_data` wrote. out: the run's folder."""

    target: str
    data: tuple[str, ...]
    out: str
    drafter: DrafterOptions = field(default_factory=DrafterOptions)
    refiner: RefinerOptions = field(default_factory=RefinerOptions)
    loss: LossOptions = field(default_factory=LossOptions)
    run: RunOptions = field(default_factory=RunOptions)
    report: ReportOptions = field(default_factory=ReportOptions)

    def __post_init__(self) -> None:
        _require(bool(self.data), "give at least one data folder, as `train data` writes them")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The target's own answers. prompts: JSONL files with `prompt` or `turns` in each row.

    target_layer_ids: layers to tap, empty for the `num_taps` a z-lab drafter taps. temperature 0: greedy.
    limit: at most so many prompts of each file. wave: answers at once.
    store_features: keep the taps on disk (2 (K+1) E bytes per token) instead of running the target while training.
    """

    target: str
    prompts: tuple[str, ...]
    out: str
    target_layer_ids: tuple[int, ...] = ()
    num_taps: int = 5
    max_prompt_tokens: int = 512
    max_new_tokens: int = 256
    temperature: float = 0.0
    limit: int | None = None
    wave: int = 64
    precision: str = "fp32"
    store_features: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.precision in PRECISIONS, f"precision must be one of {PRECISIONS}, got {self.precision!r}")
        _require(self.temperature >= 0, f"temperature must be at least 0, got {self.temperature}")
        _require(self.max_new_tokens > 1, f"max_new_tokens must be at least 2, got {self.max_new_tokens}")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise TrainingError(message)


def read_train_options(path: Path | None, target: str, data: tuple[str, ...], out: str) -> TrainOptions:
    """The options in the TOML file `path` (None: all defaults) for a run on `data`."""
    sections: dict[str, Any] = {}
    if path is not None:
        try:
            sections = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, tomllib.TOMLDecodeError) as err:
            raise TrainingError(f"{path} is not a readable TOML file: {err}") from err
    hints = typing.get_type_hints(TrainOptions)
    known = [f.name for f in fields(TrainOptions) if is_dataclass(hints[f.name])]
    unknown = sorted(set(sections) - set(known))
    _require(not unknown, f"{path}: unknown section [{', '.join(unknown)}]; known are {', '.join(known)}")
    parsed = {name: parse_section(hints[name], raw, f"{path}: [{name}]") for name, raw in sections.items()}
    return TrainOptions(target=target, data=data, out=out, **parsed)


def parse_section(kind: type[_Options], raw: object, where: str) -> _Options:
    """An options dataclass from a TOML table; unknown keys and wrong types are refused."""
    if not isinstance(raw, dict):
        raise TrainingError(f"{where} should be a table, got {raw!r}")
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(raw) - set(hints))
    _require(not unknown, f"{where}: unknown key {', '.join(unknown)}; known are {', '.join(hints)}")
    return kind(**{key: _typed(value, hints[key], f"{where} {key}") for key, value in raw.items()})


def _typed(value: object, hint: Any, where: str) -> Any:
    """`value` as the type `hint`: int, float, bool, str, `X | None` or `tuple[int, ...]`."""
    if isinstance(hint, types.UnionType):
        hint = next(kind for kind in typing.get_args(hint) if kind is not type(None))
    if typing.get_origin(hint) is tuple:
        _require(isinstance(value, list), f"{where} should be a list, got {value!r}")
        item = typing.get_args(hint)[0]
        return tuple(_typed(entry, item, where) for entry in typing.cast(list[object], value))
    if hint is float and type(value) is int:
        return float(value)
    _require(type(value) is hint, f"{where} should be of type {hint.__name__}, got {value!r}")
    return value
