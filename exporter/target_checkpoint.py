"""The target model's checkpoint: a folder or hub id, or a GGUF file, of a dense decoder family."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from xpress_export.errors import CheckpointError
from xpress_export.exporter.checkpoint_files import (
    Json,
    describes_drafter,
    digest_files,
    optional_json,
    read_json,
    resolve_source,
    weight_files,
)
from xpress_export.exporter.configs import DecoderConfig, RopeConfig
from xpress_export.exporter.decoder_config import (
    FAMILIES,
    Shapes,
    check_tensors,
    decoder_config,
    layer_shapes,
)
from xpress_export.exporter.weights import AGAIN, GgufFile, GgufWeights, SafetensorsWeights, WeightSource

SUPPORTED = "supported are dense llama, mistral, qwen2 and qwen3 models"
GGUF_FAMILIES = ("llama", "qwen2", "qwen3")  # Mistral files say `llama`
# What decides the text side of a bundle; part of the digest, so that another template makes another bundle.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "tiktoken.model",
)
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
GGUF_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "head_dim": "attention.key_length",
}


@dataclass(frozen=True, kw_only=True)
class TargetCheckpoint:
    """A target that can be exported.

    weights: Hugging Face names (`model.embed_tokens.weight`, ...); no `lm_head.weight` if `config.tied_head`.
    stop_token_ids: ids that end generation, from the checkpoint's own settings; may be empty.
    raw_config: the settings under Hugging Face's names, as `transformers_config` takes them.
    digest: sha256 of `files`: configuration, tokenizer and weights.
    """

    config: DecoderConfig
    weights: WeightSource
    source: str
    folder_or_file: Path
    digest: str
    model_type: str
    stop_token_ids: tuple[int, ...]
    files: tuple[Path, ...]
    raw_config: Json


def read_target(source: str) -> TargetCheckpoint:
    """Read the target that `source` names: a folder, a hub id `owner/name`, or a `.gguf` file."""
    path = resolve_source(source)
    gguf = _gguf_path(path)
    return _read_folder(source, path) if gguf is None else _read_gguf(source, gguf)


def _gguf_path(path: Path) -> Path | None:
    """The GGUF file that `path` is, or is a folder of; None for a Hugging Face folder."""
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise CheckpointError(f"{path} is a file but not .gguf; give the checkpoint's folder as the target")
    found = sorted(path.glob("*.gguf"))
    if any(path.glob("*.safetensors")) or not found:
        return None
    if len(found) > 1:
        raise CheckpointError(f"{path} holds {len(found)} .gguf files; give the one to use as the target")
    return found[0]


def target_shapes(config: DecoderConfig) -> Shapes:
    """Names and shapes of every tensor of a target."""
    table = (config.vocab_size, config.hidden_size)
    shapes = layer_shapes(config, "model.")
    shapes |= {"model.embed_tokens.weight": table, "model.norm.weight": (config.hidden_size,)}
    return shapes if config.tied_head else shapes | {"lm_head.weight": table}


def _read_folder(source: str, folder: Path) -> TargetCheckpoint:
    path = folder / "config.json"
    raw = read_json(path)
    family = _checked_family(raw, str(path))
    config = decoder_config(raw, family, str(path))
    weights = _without_derived(SafetensorsWeights(folder), config)
    check_tensors(weights, target_shapes(config), f"{family} target")
    generation = folder / "generation_config.json"
    optional = (generation, *(folder / name for name in TEXT_FILES))
    files = (path, *(file for file in optional if file.is_file()), *weight_files(folder))
    return TargetCheckpoint(
        config=config,
        weights=weights,
        source=source,
        folder_or_file=folder,
        digest=digest_files(files),
        model_type=family,
        stop_token_ids=_stop_ids(raw, optional_json(generation), str(path)),
        files=files,
        raw_config=raw,
    )


def _checked_family(raw: Json, where: str) -> str:
    _refuse_drafter(raw, where)
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(f"{where}: model type {family!r} is not supported as a target; {SUPPORTED}")
    experts = [key for key in EXPERT_KEYS if raw.get(key)]
    if experts:
        raise CheckpointError(f"{where} has '{experts[0]}', a mixture of experts; {SUPPORTED}")
    if raw.get("quantization_config") or raw.get("compression_config"):
        raise CheckpointError(
            f"{where} has a 'quantization_config': quantised safetensors are not supported; "
            f"use the unquantised checkpoint or a .gguf file"
        )
    return str(family)


def _refuse_drafter(raw: Json, where: str) -> None:
    if describes_drafter(raw):
        raise CheckpointError(f"{where} describes a drafter, not a target; pass it as the drafter instead")


def _without_derived(weights: WeightSource, config: DecoderConfig) -> WeightSource:
    """Drop what is not a parameter: stored rotary tables, and the copy of a tied head."""
    tied = {"lm_head.weight"} if config.tied_head else set()
    return weights.subset(name for name in weights.names() - tied if not name.endswith(".rotary_emb.inv_freq"))


def _stop_ids(raw: Json, generation: Json, where: str) -> tuple[int, ...]:
    found: Any = generation.get("eos_token_id")
    found = raw.get("eos_token_id") if found is None else found
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(
            f"{where}: 'eos_token_id' should be an integer or a list of them, got {found!r}; correct it"
        )
    return tuple(ids)


def _read_gguf(source: str, path: Path) -> TargetCheckpoint:
    file = GgufFile(path)
    family = _gguf_family(file)
    raw = _gguf_config(file)
    config = _gguf_decoder(file, decoder_config(raw, family, str(path)))
    weights = _gguf_weights(file, config)
    check_tensors(weights, target_shapes(config), f"{family} target")
    return TargetCheckpoint(
        config=config,
        weights=weights,
        source=source,
        folder_or_file=path,
        digest=digest_files([path]),
        model_type=family,
        stop_token_ids=_gguf_stop_ids(file),
        files=(path,),
        raw_config=raw,
    )


def _gguf_family(file: GgufFile) -> str:
    family = file.value("general.architecture")
    if family not in GGUF_FAMILIES:
        raise CheckpointError(f"{file.path}: architecture {family!r} is not supported as a target; {SUPPORTED}")
    if file.arch_value("expert_count"):
        raise CheckpointError(f"{file.path} has '{family}.expert_count', a mixture of experts; {SUPPORTED}")
    if (file.value("split.count") or 1) > 1:
        raise CheckpointError(
            f"{file.path} is one of {file.value('split.count')} parts; join them with llama-gguf-split --merge"
        )
    return str(family)


def _gguf_config(file: GgufFile) -> Json:
    """GGUF metadata under the names of a Hugging Face config."""
    raw: Json = {name: file.arch_value(key) for name, key in GGUF_KEYS.items()}
    if "token_embd.weight" in file.names():
        raw["vocab_size"] = file.shape("token_embd.weight")[0]
    raw["tie_word_embeddings"] = "output.weight" not in file.names()
    window = file.arch_value("attention.sliding_window")
    raw |= {"sliding_window": window, "use_sliding_window": bool(window), "max_window_layers": 0}
    raw["rope_parameters"] = _gguf_rope(file)
    return {key: value for key, value in raw.items() if value is not None}


def _gguf_rope(file: GgufFile) -> Json | None:
    """Rope scaling of the metadata; Llama 3 scaling is not there but in the tensor `rope_freqs.weight`."""
    kind = file.arch_value("rope.scaling.type", "none")
    if kind == "none":
        return None
    if file.arch_value("rope.scaling.attn_factor", 1.0) != 1.0:
        raise CheckpointError(f"{file.path}: 'rope.scaling.attn_factor' other than 1 is not supported")
    rope: Json = {"rope_type": kind, "rope_theta": file.arch_value("rope.freq_base")}
    rope["factor"] = file.arch_value("rope.scaling.factor")
    rope["original_max_position_embeddings"] = file.arch_value("rope.scaling.original_context_length")
    return {key: value for key, value in rope.items() if value is not None}


def _gguf_decoder(file: GgufFile, config: DecoderConfig) -> DecoderConfig:
    """Complete `config` with what a GGUF file tells by the tensors it has."""
    rotary = file.arch_value("rope.dimension_count", config.head_dim)
    if rotary != config.head_dim:
        raise CheckpointError(
            f"{file.path} rotates {rotary} of {config.head_dim} head channels; "
            f"only rotating the whole head is supported"
        )
    return replace(
        config,
        rope=_gguf_scaled_rope(file, config.rope),
        qkv_bias="blk.0.attn_q.bias" in file.names(),
        output_bias="blk.0.attn_output.bias" in file.names(),
        mlp_bias="blk.0.ffn_gate.bias" in file.names(),
    )


def _gguf_scaled_rope(file: GgufFile, rope: RopeConfig) -> RopeConfig:
    if "rope_freqs.weight" not in file.names():
        return rope
    factors = file.read("rope_freqs.weight").tolist()
    if len(factors) != len(rope.inv_freq):
        raise CheckpointError(
            f"{file.path}: tensor rope_freqs.weight has {len(factors)} entries, expected {len(rope.inv_freq)}; {AGAIN}"
        )
    return replace(rope, inv_freq=tuple(f / by for f, by in zip(rope.inv_freq, factors, strict=True)))


def _gguf_weights(file: GgufFile, config: DecoderConfig) -> WeightSource:
    """The file's tensors under Hugging Face names; unknown ones keep theirs, to be refused by name."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == config.family)
    to_gguf = get_tensor_name_map(arch, config.num_layers)
    stored = {name: to_gguf.get_name(name, (".weight", ".bias")) for name in target_shapes(config)}
    stored = {name: found for name, found in stored.items() if found in file.names()}
    known = {*stored.values(), "rope_freqs.weight"}
    stored |= {name: name for name in file.names() if name not in known}
    interleaved = _interleaved_heads(config) if config.family == "llama" else {}
    return GgufWeights(file, stored, interleaved)


def _interleaved_heads(config: DecoderConfig) -> dict[str, int]:
    """The tensors whose rows llama.cpp reorders for the `llama` architecture, with their number of heads."""
    heads = {"q": config.num_heads, "k": config.num_kv_heads}
    return {
        f"model.layers.{i}.self_attn.{x}_proj.{kind}": heads[x]
        for i in range(config.num_layers)
        for x in "qk"
        for kind in ("weight", "bias")
    }


def _gguf_stop_ids(file: GgufFile) -> tuple[int, ...]:
    found = [file.value(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    return tuple(dict.fromkeys(int(i) for i in found if i is not None))
