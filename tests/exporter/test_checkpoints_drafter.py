"""Drafters in their three formats, each with its own layer numbering and slot meaning, and every refusal."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from xpress_export.exporter.checkpoints import TargetCheckpoint, read_drafter, read_refiner, read_target
from xpress_export.exporter.drafter_checkpoint import default_target_layer_ids
from xpress_export.exporter.formats import write_drafter


def nest(raw: dict[str, Any]) -> None:
    raw["dflash_config"]["block_size"] = raw.pop("block_size")


def flatten(raw: dict[str, Any]) -> None:
    raw.update(raw.pop("dflash_config"))


def new_rope(raw: dict[str, Any]) -> None:
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": raw.pop("rope_theta")}
    del raw["rope_scaling"]


@pytest.mark.parametrize("spelling", [None, nest, flatten, new_rope])
def test_zlab(spelling: Any, make: Any, target: TargetCheckpoint) -> None:
    folder = make.edit(make.drafter(), spelling)
    read = read_drafter(str(folder), target)
    config = read.config
    assert (read.layout, config.first_slot, config.num_draft_tokens) == ("z-lab", 1, 3)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (4, 63, (1, 4))
    assert (config.target_hidden_size, config.num_target_layers) == (32, 8)
    assert (config.draft_vocab_size, config.own_embedding, config.own_head) == (None, False, False)
    assert (config.decoder.family, config.decoder.num_layers, config.decoder.qk_norm) == ("qwen3", 2, True)
    assert config.decoder.rope.inv_freq[1] == pytest.approx(1e6 ** (-2 / 8))
    assert config.causal_layers == (False, False) and read.d2t is None
    assert len(read.weights.names()) == 11 * 2 + 3
    assert read.weights.shape("fc.weight") == (32, 64) and len(read.digest) == 64


def test_deepspec(make: Any, target: TargetCheckpoint) -> None:
    read = read_drafter(str(make.drafter(layout="deepspec")), target)
    config = read.config
    assert (read.layout, config.first_slot, config.num_draft_tokens) == ("deepspec", 0, 4)
    assert config.target_layer_ids == (-1, 4)
    assert (config.draft_vocab_size, config.own_embedding, config.own_head) == (None, True, True)
    assert read.weights.shape("lm_head.weight") == (64, 32)


def test_speculators(make: Any, target: TargetCheckpoint) -> None:
    read = read_drafter(str(make.drafter(layout="speculators")), target)
    config = read.config
    assert (read.layout, config.first_slot, config.target_layer_ids) == ("speculators", 1, (1, 4))
    assert (config.draft_vocab_size, config.own_embedding, config.own_head) == (16, True, True)
    assert read.draft_to_target is not None
    assert read.draft_to_target.tolist() == [3 * i for i in range(16)]
    assert not {"d2t", "t2d"} & read.weights.names()


def test_speculators_settings(make: Any, target: TargetCheckpoint) -> None:
    def edit(raw: dict[str, Any]) -> None:
        raw.update(sample_from_anchor=True, sliding_window_non_causal=True, block_size=None)
        raw["transformer_layer_config"].update(sliding_window=16, layer_types=["sliding_attention"] * 2)
        del raw["block_size"]

    config = read_drafter(str(make.edit(make.drafter(layout="speculators"), edit)), target).config
    assert (config.first_slot, config.block_size) == (0, 8)
    assert (config.causal_layers, config.decoder.layer_windows) == ((False, False), (16, 16))


def test_markov_serving_folder_drafts_after_the_anchor(make: Any, target: TargetCheckpoint) -> None:
    read = read_drafter(str(make.markov()), target)
    assert read.config.first_slot == 1 and len(read.weights.names()) == 25


def test_xpress_serving_folder_leaves_the_head(make: Any, target: TargetCheckpoint) -> None:
    read = read_drafter(str(make.xpress()), target)
    plain = read_drafter(str(make.drafter()), target)
    assert read.config == plain.config and read.weights.names() == plain.weights.names()


def test_reduced_vocabulary_without_own_head(make: Any, target: TargetCheckpoint) -> None:
    folder = make.edit(make.drafter(), None, lambda t: t.update(d2t=torch.tensor([1, 1, 3])))
    read = read_drafter(str(folder), target)
    assert (read.config.draft_vocab_size, read.config.own_head) == (3, False)
    assert read.draft_to_target is not None and read.draft_to_target.tolist() == [1, 2, 5]


@pytest.mark.parametrize(
    ("num_layers", "num_taps", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (64, 5, (1, 16, 31, 46, 61)),
        (28, 5, (1, 7, 13, 19, 25)),
        (24, 5, (1, 6, 11, 16, 21)),
        (48, 8, (1, 7, 14, 20, 26, 32, 39, 45)),
        (40, 5, (1, 10, 19, 28, 37)),
        (30, 5, (1, 8, 14, 20, 27)),  # 7.5 and 20.5 round to even
        (9, 1, (4,)),
    ],
)
def test_default_layers(num_layers: int, num_taps: int, expected: tuple[int, ...]) -> None:
    assert default_target_layer_ids(num_layers, num_taps) == expected


def test_absent_layer_ids(make: Any, target: TargetCheckpoint) -> None:
    zlab = make.edit(make.drafter(), lambda raw: raw["dflash_config"].pop("target_layer_ids"))
    assert read_drafter(str(zlab), target).config.target_layer_ids == (1, 5)
    other = make.drafter("speculators", "speculators")
    fc = torch.zeros(32, 96)
    make.edit(other, lambda raw: raw.pop("aux_hidden_state_layer_ids"), lambda t: t.update({"fc.weight": fc}))
    assert read_drafter(str(other), target).config.target_layer_ids == (1, 3, 4)


SLIDES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}


@pytest.mark.parametrize(
    ("settings", "causal"),
    [
        (SLIDES, (True, False)),
        (SLIDES | {"use_sliding_window": False}, (True, False)),
        (SLIDES | {"is_causal": False}, (False, False)),
        (SLIDES | {"is_causal": True}, (True, True)),
        (SLIDES | {"causal": False}, (False, False)),
    ],
)
def test_causal_rule(settings: dict[str, Any], causal: tuple[bool, ...], make: Any, target: TargetCheckpoint) -> None:
    def edit(raw: dict[str, Any]) -> None:
        raw.update(settings)
        if "causal" in raw:
            raw["dflash_config"]["causal"] = raw.pop("causal")

    config = read_drafter(str(make.edit(make.drafter(), edit)), target).config
    assert (config.causal_layers, config.decoder.layer_windows) == (causal, (16, None))


def trained(make: Any, **content: Any) -> Path:
    """A training folder: `checkpoint.pt` beside config.json."""
    folder: Path = make.drafter("trained")
    path = folder / "checkpoint.pt"
    torch.save(content, path)
    (folder / "model.safetensors").unlink()
    return path


def test_training_file(make: Any, target: TargetCheckpoint) -> None:
    plain = read_drafter(str(make.drafter()), target)
    tensors = {name: plain.weights.read(name) for name in plain.weights.names()}
    path = trained(make, draft_state_dict=tensors, refiner_state_dict={}, args={"lr": 1.0}, step=3)
    for source in (path, path.parent):
        read = read_drafter(str(source), target)
        assert read.config == plain.config and read.folder_or_file == path
        assert torch.equal(read.weights.read("fc.weight"), tensors["fc.weight"])


def test_training_file_refusals(
    make: Any, target: TargetCheckpoint, refusal: Callable[..., str], tmp_path: Path
) -> None:
    path = trained(make, draft_state_dict={}, args=argparse.Namespace(lr=1.0))
    assert "argparse.Namespace" in refusal(read_drafter, str(path), target)
    torch.save({"model": {}, "step": 1}, path)
    assert "has no 'draft_state_dict' (found model, step)" in refusal(read_drafter, str(path), target)
    torch.save([1], path)
    assert "should hold a dictionary, got list" in refusal(read_drafter, str(path), target)
    path.write_bytes(path.read_bytes()[:100])
    assert "is not a complete torch file" in refusal(read_drafter, str(path), target)
    alone = tmp_path / "alone" / "x.pt"
    alone.parent.mkdir()
    torch.save({"draft_state_dict": {}}, alone)
    assert "has no config.json beside it" in refusal(read_drafter, str(alone), target)


def nested(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda raw: raw["dflash_config"].update(values)


def top(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda raw: raw.update(values)


def tensor(name: str, *shape: int) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.update({name: torch.zeros(shape)})


def offsets(*values: int, dtype: torch.dtype = torch.int64) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors.update(d2t=torch.tensor(values, dtype=dtype))


# case: layout, config edit, tensor edit, part of the message
REFUSALS: dict[str, tuple[str, Any, Any, str]] = {
    "no mask": ("z-lab", nested(mask_token_id=None), None, "has no 'mask_token_id'"),
    "no mask (speculators)": ("speculators", top(mask_token_id=None), None, "has no 'mask_token_id'"),
    "mask too big": ("z-lab", nested(mask_token_id=64), None, "64 is outside the 64 embedding rows"),
    "mask negative": ("z-lab", nested(mask_token_id=-1), None, "'mask_token_id' should be an integer"),
    "mask text": ("z-lab", nested(mask_token_id="<mask>"), None, "should be an integer"),
    "two masks": ("z-lab", top(mask_token_id=5), None, "'mask_token_id' 5 at the top but 63"),
    "no block size": ("z-lab", lambda raw: raw.pop("block_size"), None, "has no 'block_size'"),
    "block of one": ("z-lab", top(block_size=1), None, "'block_size' 1 leaves no slot"),
    "two block sizes": ("z-lab", nested(block_size=16), None, "'block_size' 4 at the top but 16"),
    "tap too deep": ("z-lab", nested(target_layer_ids=[1, 8]), None, "id 8 is out of range"),
    "tap too low": ("z-lab", nested(target_layer_ids=[-2, 4]), None, "id -2 is out of range"),
    "tap too deep (speculators)": (
        "speculators",
        top(aux_hidden_state_layer_ids=[2, 9]),
        None,
        "id 9 is out of range, the target",
    ),
    "taps not a list": ("z-lab", nested(target_layer_ids="1,4"), None, "list of integers, got '1,4'"),
    "no taps": ("z-lab", nested(target_layer_ids=[]), None, "list of integers, got []"),
    "more taps": (
        "z-lab",
        nested(target_layer_ids=[1, 2, 3]),
        None,
        "fc.weight takes 64 features, expected 96 (3 target layers of hidden size 32)",
    ),
    "other depth": ("z-lab", top(num_target_layers=36), None, "'num_target_layers' is 36 but the target"),
    "other width": ("z-lab", top(hidden_size=48), None, "'hidden_size' is 48 but the target"),
    "other width (speculators)": (
        "speculators",
        top(target_hidden_size=64),
        None,
        "'target_hidden_size' is 64 but the target",
    ),
    "other vocabulary": ("z-lab", top(vocab_size=128), None, "'vocab_size' is 128 but the target"),
    "missing tensor": (
        "z-lab",
        None,
        lambda tensors: [tensors.pop(f"layers.0.mlp.{x}_proj.weight") for x in ("up", "gate")],
        "2 of 25 tensors are missing (layers.0.mlp.gate_proj.weight, layers.0.mlp.up_proj.weight)",
    ),
    "missing fc": ("z-lab", None, lambda tensors: tensors.pop("fc.weight"), "missing (fc.weight)"),
    "extra tensor": ("z-lab", None, tensor("odd", 1), "1 tensors that a dFlash drafter does not have (odd)"),
    "wrong shape": ("z-lab", None, tensor("norm.weight", 5), "norm.weight has shape [5], expected [32]"),
    "small head, no map": (
        "z-lab",
        None,
        tensor("lm_head.weight", 16, 32),
        "16 of 64 tokens but has no tensor d2t",
    ),
    "small vocabulary, no map": ("z-lab", top(draft_vocab_size=16), None, "16 of 64 tokens but has no"),
    "map and head differ": ("speculators", None, offsets(0, 0), "tensor d2t has shape [2], expected [16]"),
    "map out of range": ("z-lab", None, offsets(0, 63), "should map each draft id"),
    "map not one to one": ("z-lab", None, offsets(1, 0), "should map each draft id"),
    "map of floats": ("z-lab", None, tensor("d2t", 3), "tensor d2t should be int64"),
    "DFlash2 config": (
        "z-lab",
        nested(selector_rank=256),
        None,
        "is a DFlash2 drafter, told by selector_rank",
    ),
    "DFlash2 tensors": (
        "z-lab",
        None,
        tensor("layers.0.mlp_conv.base_kernel", 2, 2, 32),
        "is a DFlash2 drafter, told by layers.0.mlp_conv.base_kernel",
    ),
    "Laguna": ("z-lab", None, tensor("aux_hidden_norms.0.weight", 32), "is a Laguna drafter"),
    "MiMo": ("z-lab", None, tensor("mask_embedding", 32), "is a MiMo drafter"),
    "Muse-Glimmer": ("z-lab", None, tensor("encoder.fc.weight", 32, 64), "is a Muse-Glimmer drafter"),
    "JetSpec": ("z-lab", nested(causal_head=True), None, "is a JetSpec drafter"),
    "soft cap": ("z-lab", nested(final_logit_softcapping=30.0), None, "scaled embeddings or logits"),
    "eagle": ("speculators", top(speculators_model_type="eagle3"), None, "'eagle3' is not supported"),
    "tables that are none": ("z-lab", top(dflash_config=[]), None, "'dflash_config' should be an object"),
    "layer config that is none": (
        "speculators",
        top(transformer_layer_config=3),
        None,
        "should be an object",
    ),
    "ids that are text": ("speculators", top(aux_hidden_state_layer_ids=["2"]), None, "list of integers"),
    "fc is a number": ("z-lab", None, tensor("fc.weight"), "fc.weight is a single number"),
    "head size is text": ("speculators", top(draft_vocab_size="16"), None, "'draft_vocab_size' should be an"),
    "no layer config": (
        "speculators",
        lambda raw: raw.pop("transformer_layer_config"),
        None,
        "has no 'transformer_layer_config'",
    ),
    "llama layers": ("z-lab", top(model_type="llama"), None, "layers of type 'llama' are not supported"),
    "no theta": ("z-lab", lambda raw: raw.pop("rope_theta"), None, "has no 'rope_theta'"),
    "window not set": ("z-lab", top(layer_types=["sliding_attention"] * 2), None, "has no 'sliding_window'"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, make: Any, target: TargetCheckpoint, refusal: Callable[..., str]) -> None:
    layout, edit_config, edit_tensors, expected = REFUSALS[case]
    folder = make.edit(make.drafter(layout=layout), edit_config, edit_tensors)
    message = refusal(read_drafter, str(folder), target)
    assert expected in message and str(folder) in message


def test_exchanged_roles(make: Any, target_folder: Path, target: TargetCheckpoint, refusal: Callable[..., str]) -> None:
    message = refusal(read_drafter, str(target_folder), target)
    assert "describes Qwen3ForCausalLM, not a dFlash drafter; pass it as the target" in message
    for layout in ("z-lab", "speculators", "deepspec"):
        message = refusal(read_target, str(make.drafter(layout, layout)))
        assert "describes a drafter, not a target; pass it as the drafter" in message
    message = refusal(read_target, str(make.xpress()))
    assert "describes a drafter, not a target" in message


def test_paths(make: Any, target: TargetCheckpoint, refusal: Callable[..., str], tmp_path: Path) -> None:
    assert "does not exist" in refusal(read_drafter, str(tmp_path / "nothing"), target)
    folder = make.drafter()
    assert "is not a drafter checkpoint" in refusal(read_drafter, str(folder / "model.safetensors"), target)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert "not a complete safetensors file" in refusal(read_drafter, str(folder), target)
    (folder / "config.json").write_text("{")
    assert "not readable JSON" in refusal(read_drafter, str(folder), target)
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(read_drafter, str(folder), target)


def test_written_drafter_is_read_back(make: Any, target: TargetCheckpoint, tmp_path: Path) -> None:
    first = read_drafter(str(make.drafter()), target)
    tensors = {name: first.weights.read(name) for name in first.weights.names()}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    sliding = replace(first.config.decoder, layer_windows=(16, None))
    for config in (
        first.config,
        replace(first.config, first_slot=0),
        replace(first.config, causal_layers=(True, True)),
        replace(first.config, decoder=sliding, causal_layers=(True, False)),
        replace(first.config, decoder=sliding, causal_layers=(False, False)),
    ):
        write_drafter(tmp_path / "written", config, tensors, rope)
        read = read_drafter(str(tmp_path / "written"), target)
        assert read.config == config
        assert all(torch.equal(read.weights.read(name), tensors[name]) for name in tensors)
    assert sorted(path.name for path in (tmp_path / "written").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_written_reduced_drafter_is_read_back(make: Any, target: TargetCheckpoint, tmp_path: Path) -> None:
    first = read_drafter(str(make.drafter(layout="speculators")), target)
    assert first.d2t is not None
    tensors = {name: first.weights.read(name) for name in first.weights.names()} | {"d2t": first.d2t}
    write_drafter(tmp_path / "written", first.config, tensors, {"rope_theta": 1e6})
    read = read_drafter(str(tmp_path / "written"), target)
    assert read.config == first.config and read.d2t is not None and torch.equal(read.d2t, first.d2t)
    assert read.layout == "z-lab"


def test_refiner_of_a_plain_drafter(
    make: Any, target: TargetCheckpoint, drafter: Any, refusal: Callable[..., str]
) -> None:
    message = refusal(read_refiner, str(make.drafter()), target, drafter)
    assert "has no refiner head" in message and "fc.weight" in message


def test_digest(make: Any, target: TargetCheckpoint, tmp_path: Path) -> None:
    folder = make.drafter()
    copied = shutil.copytree(folder, tmp_path / "copied")
    digest = read_drafter(str(folder), target).digest
    assert read_drafter(str(copied), target).digest == digest
    raw = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(raw | {"block_size": 3}))
    assert read_drafter(str(copied), target).digest != digest
