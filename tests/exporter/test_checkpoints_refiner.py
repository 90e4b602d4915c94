"""Refiner heads: serving folders, training files, and heads that belong to another drafter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from xpress_export.exporter.checkpoints import (
    DrafterCheckpoint,
    TargetCheckpoint,
    read_drafter,
    read_refiner,
)
from xpress_export.exporter.formats import write_drafter, write_refiner

XPRESS_NAMES = {
    "w1.weight",
    "w2.weight",
    "down_h.weight",
    "down_g.weight",
    "in_proj.weight",
    "mix.L",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
}
HEAD = "xpress_head."


def test_xpress_folder(make: Any, target: TargetCheckpoint, drafter: DrafterCheckpoint) -> None:
    folder = make.xpress()
    read = read_refiner(str(folder), target, drafter)
    config = read.config
    assert (config.kind, config.rank, config.hidden_size, config.mlp_hidden) == ("xpress", 6, 32, 10)
    assert (config.vocab_size, config.draft_vocab_size, config.block_size, config.num_passes) == (
        64,
        64,
        4,
        3,
    )
    assert read.weights.names() == XPRESS_NAMES
    raw = load_file(folder / "model.safetensors")
    for name in XPRESS_NAMES:
        assert torch.equal(read.weights.read(name), raw[HEAD + name])
    assert read.weights.read("mix.L").triu(1).abs().sum() > 0, "raw, not masked"


def test_default_passes(make: Any, target: TargetCheckpoint, drafter: DrafterCheckpoint) -> None:
    folder = make.edit(make.xpress(), lambda raw: raw.pop("xpress_num_passes"))
    assert read_refiner(str(folder), target, drafter).config.num_passes == 6


def test_markov_folder(make: Any, target: TargetCheckpoint, drafter: DrafterCheckpoint) -> None:
    read = read_refiner(str(make.markov()), target, drafter)
    assert (read.config.kind, read.config.rank, read.config.num_passes) == ("markov", 6, 3)
    assert read.config.mlp_hidden == 0 and read.weights.names() == {"w1.weight", "w2.weight"}


def head_tensors(make: Any) -> dict[str, torch.Tensor]:
    tensors = load_file(make.xpress("source") / "model.safetensors")
    return {n.removeprefix(HEAD): t for n, t in tensors.items() if n.startswith(HEAD)}


@pytest.mark.parametrize("kind", ["xpress", "markov"])
def test_training_file(
    kind: str, make: Any, target: TargetCheckpoint, drafter: DrafterCheckpoint, tmp_path: Path
) -> None:
    tensors = head_tensors(make)
    if kind == "markov":
        tensors = {name: tensors[name] for name in ("w1.weight", "w2.weight")}
    stored = tensors | {"mix.tril": torch.ones(4, 4)} if kind == "xpress" else tensors
    path = tmp_path / "refiner_cotrain.pt"
    torch.save({"draft_state_dict": {}, "refiner_state_dict": stored, "args": {}, "step": 1}, path)
    read = read_refiner(str(path), target, drafter)
    assert (read.config.kind, read.config.num_passes) == (kind, 6 if kind == "xpress" else 3)
    assert read.weights.names() == tensors.keys()
    assert all(torch.equal(read.weights.read(name), tensors[name]) for name in tensors)


def test_reduced_vocabulary(make: Any, target: TargetCheckpoint) -> None:
    small = read_drafter(str(make.drafter(layout="speculators")), target)
    rows = torch.zeros(16, 6)
    folder = make.edit(make.xpress(), None, lambda t: t.update({HEAD + "w2.weight": rows}))
    config = read_refiner(str(folder), target, small).config
    assert (config.vocab_size, config.draft_vocab_size) == (64, 16)


def test_anchored_drafter_needs_one_more_markov_pass(make: Any, target: TargetCheckpoint) -> None:
    anchored = read_drafter(str(make.drafter(layout="deepspec")), target)
    folder = make.edit(make.markov(), lambda raw: raw.update(sample_from_anchor=True))
    assert read_refiner(str(folder), target, anchored).config.num_passes == 4


def put(name: str, *shape: int) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.update({HEAD + name: torch.zeros(shape)})


REFUSALS: dict[str, tuple[Any, Any, str]] = {
    "missing": (None, lambda t: t.pop(HEAD + "mix.L"), "1 of 9 tensors are missing (mix.L)"),
    "extra": (None, put("gate.weight", 2), "does not have (gate.weight)"),
    "other block, config": (
        lambda raw: raw.update(xpress_block_size=16),
        None,
        "block size is 16 but that of",
    ),
    "other block, tensor": (None, put("mix.L", 6, 5, 5), "block size is 5 but that of the drafter"),
    "other hidden": (None, put("down_h.weight", 6, 64), "hidden size is 64 but that of the drafter"),
    "other vocabulary": (None, put("w1.weight", 70, 6), "vocabulary is 70 but that of the drafter"),
    "other draft vocabulary": (None, put("w2.weight", 16, 6), "draft vocabulary is 16 but that of"),
    "other rank": (lambda raw: raw.update(xpress_rank=8), None, "expected [8, 32] from the configuration"),
    "other inner size": (
        lambda raw: raw.update(xpress_mlp_hidden=12),
        None,
        "[6, 12] from the configuration",
    ),
    "no passes": (
        lambda raw: raw.update(xpress_num_passes=0),
        None,
        "'xpress_num_passes' should be an integer",
    ),
    "other slots": (
        lambda raw: raw.update(sample_from_anchor=True),
        None,
        "'sample_from_anchor' is True but",
    ),
    "no head": (None, lambda t: [t.pop(n) for n in list(t) if HEAD in n], "has no refiner head"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(
    case: str,
    make: Any,
    target: TargetCheckpoint,
    drafter: DrafterCheckpoint,
    refusal: Callable[..., str],
) -> None:
    edit_config, edit_tensors, expected = REFUSALS[case]
    folder = make.edit(make.xpress(), edit_config, edit_tensors)
    message = refusal(read_refiner, str(folder), target, drafter)
    assert expected in message and str(folder) in message


def test_gated_markov_head(
    make: Any, target: TargetCheckpoint, drafter: DrafterCheckpoint, refusal: Callable[..., str]
) -> None:
    gate = {"markov_head.gate.weight": torch.zeros(6, 6)}
    folder = make.edit(make.markov(), None, lambda t: t.update(gate))
    assert "does not have (gate.weight)" in refusal(read_refiner, str(folder), target, drafter)


def test_target_given_as_refiner(
    target_folder: Path, target: TargetCheckpoint, drafter: DrafterCheckpoint, refusal: Callable[..., str]
) -> None:
    assert "has no refiner head" in refusal(read_refiner, str(target_folder), target, drafter)


@pytest.mark.parametrize("kind", ["xpress", "markov"])
@pytest.mark.parametrize("combined", [False, True])
def test_written_refiner_is_read_back(
    kind: str, combined: bool, make: Any, target: TargetCheckpoint, drafter: DrafterCheckpoint
) -> None:
    source = read_refiner(str(make.xpress() if kind == "xpress" else make.markov()), target, drafter)
    config = replace(source.config, num_passes=5) if kind == "xpress" else source.config
    tensors = {name: source.weights.read(name) for name in source.weights.names()}
    folder = make.root / "written"
    if combined:
        body = {name: drafter.weights.read(name) for name in drafter.weights.names()}
        write_drafter(folder, drafter.config, body, {"rope_theta": 1e6}, (config, tensors))
        assert read_drafter(str(folder), target).config == drafter.config
    else:
        write_refiner(folder, config, tensors)
    read = read_refiner(str(folder), target, drafter)
    assert read.config == config and read.weights.names() == tensors.keys()
    assert all(torch.equal(read.weights.read(name), tensors[name]) for name in tensors)
