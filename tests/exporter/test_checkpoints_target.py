"""Targets read from Hugging Face folders equal what transformers itself loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from xpress_export.errors import CheckpointError
from xpress_export.exporter.checkpoints import read_target

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [7, 9],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def build(family: str, folder: Path, **settings: Any) -> Any:
    """Save a tiny random model of `family` and return it."""
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    torch.manual_seed(1)
    settings = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}} | SIZES | settings
    config = getattr(transformers, names[family] + "Config")(**settings)
    model = getattr(transformers, names[family] + "ForCausalLM")(config)
    model.save_pretrained(folder, max_shard_size=settings.get("shard", "1GB"))
    return model


def edit_json(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"shard": "20KB"}),
    ],
)
def test_target_equals_transformers(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = build(family, tmp_path, **settings)
    read = read_target(str(tmp_path))
    assert ("shard" in settings) == (tmp_path / "model.safetensors.index.json").is_file()
    assert read.model_type == read.config.family == family
    config, hf = read.config, model.config
    got = (config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads)
    assert got == (hf.hidden_size, hf.intermediate_size, hf.num_hidden_layers, hf.num_attention_heads)
    got = (config.num_kv_heads, config.head_dim, config.vocab_size, config.max_positions)
    assert got == (2, 8, 40, 128)
    assert (config.rms_norm_eps, config.tied_head) == (1e-5, bool(hf.tie_word_embeddings))
    assert config.layer_windows == (None,) * 3
    assert read.stop_token_ids == (7, 9)
    expected = model.state_dict()
    if config.tied_head:
        del expected["lm_head.weight"]
    assert read.weights.names() == expected.keys()
    for name, tensor in expected.items():
        assert read.weights.shape(name) == tuple(tensor.shape)
        assert torch.equal(read.weights.read(name), tensor), name
    has = {name.split("layers.0.")[-1] for name in expected}
    assert config.qkv_bias == ("self_attn.q_proj.bias" in has)
    assert config.output_bias == ("self_attn.o_proj.bias" in has)
    assert config.mlp_bias == ("mlp.up_proj.bias" in has)
    assert config.qk_norm == ("self_attn.q_norm.weight" in has)


def test_stored_dtype_is_kept(tmp_path: Path) -> None:
    model = build("qwen3", tmp_path).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    tensor = read_target(str(tmp_path)).weights.read("model.norm.weight")
    assert tensor.dtype == torch.bfloat16


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 2.0}, LLAMA3, YARN])
def test_rope_equals_transformers(scaling: dict[str, Any] | None, spelling: str, tmp_path: Path) -> None:
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": 5000.0}
    rotary = build("llama", tmp_path, rope_parameters=rope).model.rotary_emb
    if spelling == "rope_scaling":
        old = dict(scaling, type=scaling["rope_type"]) if scaling else None
        (old or {}).pop("rope_type", None)
        edit_json(tmp_path / "config.json", lambda raw: raw.pop("rope_parameters"))
        edit_json(tmp_path / "config.json", lambda raw: raw.update(rope_theta=5000.0, rope_scaling=old))
    read = read_target(str(tmp_path)).config.rope
    assert torch.equal(torch.tensor(read.inv_freq), rotary.inv_freq)
    assert read.attention_scaling == rotary.attention_scaling
    assert (read.attention_scaling != 1.0) == (scaling is YARN)


def test_llama_without_rope_theta_has_the_family_default(tmp_path: Path) -> None:
    build("llama", tmp_path)
    edit_json(tmp_path / "config.json", lambda raw: raw.pop("rope_parameters"))
    assert read_target(str(tmp_path)).config.rope.inv_freq[1] == pytest.approx(10000.0 ** (-2 / 8))


@pytest.mark.parametrize(
    ("family", "settings", "windows"),
    [
        ("mistral", {"sliding_window": 16}, (16, 16, 16)),
        ("mistral", {"sliding_window": None}, (None, None, None)),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
            (None, None, 16),
        ),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16}, (None, None, None)),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
        ("llama", {"sliding_window": 16}, (None, None, None)),
    ],
)
def test_sliding_windows(
    family: str, settings: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    build(family, tmp_path, **settings)
    assert read_target(str(tmp_path)).config.layer_windows == windows


def test_stop_ids_prefer_the_generation_config(tmp_path: Path, target_folder: Path) -> None:
    folder = shutil.copytree(target_folder, tmp_path / "copy")
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert read_target(str(folder)).stop_token_ids == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert read_target(str(folder)).stop_token_ids == (5, 2)
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", lambda raw: raw.update(eos_token_id=None))
    assert read_target(str(folder)).stop_token_ids == ()


def test_derived_tensors_are_dropped(tmp_path: Path, target_folder: Path) -> None:
    folder = shutil.copytree(target_folder, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"lm_head.weight": torch.zeros(64, 32)}
    tensors |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file(tensors, folder / "model.safetensors")
    assert read_target(str(folder)).weights.names() == read_target(str(target_folder)).weights.names()


def test_digest_follows_content_only(tmp_path: Path, target_folder: Path) -> None:
    folder = shutil.copytree(target_folder, tmp_path / "copy")
    digest = read_target(str(folder)).digest
    assert digest == read_target(str(target_folder)).digest and len(digest) == 64
    (folder / "README.md").write_text("not part of the model")
    assert read_target(str(folder)).digest == digest
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"\x7f")
    changed = read_target(str(folder)).digest
    assert changed != digest
    edit_json(folder / "config.json", lambda raw: raw.update(max_position_embeddings=64))
    assert read_target(str(folder)).digest not in {digest, changed}


def test_hub_id_is_downloaded(monkeypatch: pytest.MonkeyPatch, target_folder: Path) -> None:
    calls: list[Any] = []

    def download(repo: str, **settings: Any) -> str:
        calls.append((repo, settings["revision"]))
        assert "*.json" in settings["allow_patterns"]
        return str(target_folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert read_target("owner/name@abc").source == "owner/name@abc"
    assert read_target("owner/name").folder_or_file == target_folder
    assert calls == [("owner/name", "abc"), ("owner/name", None)]


def test_hub_id_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refusal: Callable[..., str]) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    message = refusal(read_target, "nobody/no-such-model")
    assert "nobody/no-such-model is not a local path" in message and "local copy" in message


def truncate(path: Path, num_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:num_bytes])


def set_config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda raw: raw.update(values))


def drop_config(key: str) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", lambda raw: raw.pop(key))


def set_tensors(**values: torch.Tensor | None) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors: dict[str, Any] = load_file(folder / "model.safetensors") | values
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors")

    return edit


def index(weight_map: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "shard.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return edit


NORM = "model.norm.weight"
REFUSALS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "corrupt config": (
        lambda folder: truncate(folder / "config.json", 40),
        "config.json is not readable JSON",
    ),
    "binary config": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "not readable JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "JSON object, got list"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "found no weight file"),
    "pickle weights": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "found pytorch_model.bin",
    ),
    "truncated weights": (
        lambda folder: truncate(folder / "model.safetensors", 3000),
        "model.safetensors is not a complete safetensors file",
    ),
    "garbage weights": (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "not a complete"),
    "empty weights": (lambda folder: truncate(folder / "model.safetensors", 0), "not a complete"),
    "moe type": (set_config(model_type="qwen3_moe"), "'qwen3_moe' is not supported"),
    "no model type": (drop_config("model_type"), "model type None is not supported"),
    "experts": (set_config(num_local_experts=8), "'num_local_experts', a mixture of experts"),
    "quantised": (set_config(quantization_config={"bits": 4}), "quantised safetensors are not supported"),
    "longrope": (set_config(rope_parameters={"rope_type": "longrope"}), "rope type 'longrope'"),
    "dynamic": (
        set_config(rope_parameters=None, rope_theta=1e4, rope_scaling={"type": "dynamic", "factor": 2.0}),
        "supported are default, linear, llama3, yarn",
    ),
    "rope per layer": (
        set_config(rope_parameters={"full_attention": {"rope_theta": 1.0}}),
        "differ between layers",
    ),
    "incomplete yarn": (
        set_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}),
        "not a valid qwen3 configuration",
    ),
    "partial rotary": (
        set_config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "partial rotary",
    ),
    "no rope theta": (drop_config("rope_parameters"), "has no 'rope_theta'"),
    "linear attention": (set_config(layer_types=["linear_attention"] * 8), "with linear_attention"),
    "few layer types": (set_config(layer_types=["full_attention"]), "not a valid qwen3 configuration"),
    "window not set": (
        set_config(layer_types=["sliding_attention"] * 8, sliding_window=None),
        "no usable 'sliding_window'",
    ),
    "activation": (set_config(hidden_act="gelu"), "'hidden_act' is 'gelu'"),
    "no hidden size": (drop_config("hidden_size"), "has no 'hidden_size'"),
    "text hidden size": (set_config(hidden_size="32"), "'hidden_size' should be an integer of at least 1"),
    "no eps": (drop_config("rms_norm_eps"), "has no 'rms_norm_eps'"),
    "odd groups": (set_config(num_key_value_heads=3), "not a multiple of 'num_key_value_heads' 3"),
    "odd head": (set_config(head_dim=7), "`head_dim`=7"),
    "bad eos": (
        lambda f: edit_json(f / "generation_config.json", lambda raw: raw.update(eos_token_id="</s>")),
        "'eos_token_id' should be an integer",
    ),
    "more layers": (set_config(num_hidden_layers=9, layer_types=None), "11 of 101 tensors are missing"),
    "fewer layers": (
        set_config(num_hidden_layers=7, layer_types=None),
        "11 tensors that a qwen3 target does not have",
    ),
    "untied": (set_config(tie_word_embeddings=False), "missing (lm_head.weight)"),
    "wrong shape": (
        set_tensors(**{NORM: torch.zeros(31)}),
        f"tensor {NORM} has shape [31], expected [32]",
    ),
    "wrong vocabulary": (set_config(vocab_size=65), "has shape [64, 32], expected [65, 32]"),
    "extra tensor": (
        set_tensors(extra=torch.zeros(1)),
        "1 tensors that a qwen3 target does not have (extra)",
    ),
    "drafter": (set_config(dflash_config={}), "describes a drafter, not a target"),
    "escaping shard": (index({NORM: "../shard.safetensors"}), "not a file of the checkpoint folder"),
    "absolute shard": (index({NORM: "/etc/shard.safetensors"}), "not a file of the checkpoint folder"),
    "absent shard": (index({NORM: "other.safetensors"}), "lacks other.safetensors"),
    "tensor not in shard": (index({"absent": "shard.safetensors"}), "which does not hold it"),
    "no weight map": (index({}), "no 'weight_map' table"),
    "numbers in weight map": (index({NORM: 3}), "not a file of the checkpoint folder"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, tmp_path: Path, target_folder: Path, refusal: Callable[..., str]) -> None:
    spoil, expected = REFUSALS[case]
    folder = shutil.copytree(target_folder, tmp_path / "spoilt")
    spoil(folder)
    message = refusal(read_target, str(folder))
    assert expected in message and str(folder) in message


def test_refused_sources(tmp_path: Path, refusal: Callable[..., str]) -> None:
    assert "does not exist" in refusal(read_target, str(tmp_path / "nothing"))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "give the checkpoint's folder" in refusal(read_target, str(tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors").unlink()
    assert "has no config.json" in refusal(read_target, str(tmp_path))


def test_reading_an_unknown_tensor(target_folder: Path) -> None:
    weights = read_target(str(target_folder)).weights
    with pytest.raises(CheckpointError, match=r"has no tensor lm_head\.weight"):
        weights.read("lm_head.weight")
