"""Checkpoints out: z-lab format drafters and serving format refiners, as the readers read them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from xpress_export.errors import CheckpointError
from xpress_export.exporter.configs import DecoderConfig, DrafterConfig, RefinerConfig
from xpress_export.exporter.decoder_config import FULL, SLIDING

Tensors = Mapping[str, torch.Tensor]


def write_drafter(
    folder: Path,
    config: DrafterConfig,
    tensors: Tensors,
    rope_parameters: Mapping[str, Any],
    refiner: tuple[RefinerConfig, Tensors] | None = None,
) -> None:
    """Write a drafter folder; with `refiner`, the serving folder that holds both.

    tensors: z-lab names, with `embed_tokens.weight`, `lm_head.weight` and `d2t` if it has its own.
    rope_parameters: rotary settings as Hugging Face spells them, `rope_theta` included.
    """
    raw = _drafter_json(config) | {"rope_parameters": dict(rope_parameters)}
    stored = dict(tensors)
    if refiner is not None:
        raw |= _refiner_json(refiner[0], config.first_slot)
        stored |= _prefixed(*refiner)
    _write(folder, raw, stored)


def write_refiner(folder: Path, config: RefinerConfig, tensors: Tensors, first_slot: int = 1) -> None:
    """Write a folder with the head alone. `mix.L` is written as given: raw, not folded."""
    _write(folder, _refiner_json(config, first_slot), _prefixed(config, tensors))


def _drafter_json(config: DrafterConfig) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "draft_vocab_size": config.draft_vocab_size,
        "sample_from_anchor": config.first_slot == 0,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
        },
        **_decoder_json(config.decoder),
        **_causal_json(config),
    }


def _decoder_json(decoder: DecoderConfig) -> dict[str, Any]:
    windows = {window for window in decoder.layer_windows if window is not None}
    if len(windows) > 1:
        raise CheckpointError(f"a drafter folder stores one sliding window, got {sorted(windows)}")
    return {
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "vocab_size": decoder.vocab_size,
        "rms_norm_eps": decoder.rms_norm_eps,
        "max_position_embeddings": decoder.max_positions,
        "attention_bias": decoder.qkv_bias,
        "tie_word_embeddings": False,
        "layer_types": [FULL if window is None else SLIDING for window in decoder.layer_windows],
        "sliding_window": windows.pop() if windows else None,
    }


def _causal_json(config: DrafterConfig) -> dict[str, Any]:
    """Nothing where sliding layers, and only they, are causal: that is what the format means by default."""
    if config.causal_layers == tuple(window is not None for window in config.decoder.layer_windows):
        return {}
    if len(set(config.causal_layers)) > 1:
        raise CheckpointError(f"a drafter folder cannot store causal layers {list(config.causal_layers)}")
    return {"is_causal": config.causal_layers[0]}


def _refiner_json(config: RefinerConfig, first_slot: int) -> dict[str, Any]:
    anchored = {"sample_from_anchor": first_slot == 0}
    if config.kind == "markov":
        return {"architectures": ["Qwen3DSparkModel"], "markov_rank": config.rank, **anchored}
    return {
        "architectures": ["Qwen3XPressModel"],
        "xpress_rank": config.rank,
        "xpress_mlp_hidden": config.mlp_hidden,
        "xpress_block_size": config.block_size,
        "xpress_num_passes": config.num_passes,
        **anchored,
    }


def _prefixed(config: RefinerConfig, tensors: Tensors) -> dict[str, torch.Tensor]:
    prefix = "markov_head.markov_" if config.kind == "markov" else "xpress_head."
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _write(folder: Path, raw: Mapping[str, Any], tensors: Tensors) -> None:
    """Config and weights, each under a temporary name first, so that a crash leaves no half-written file."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights, config = folder / "model.safetensors", folder / "config.json"
    temporary = [path.with_name(path.name + ".tmp") for path in (weights, config)]
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, temporary[0])
    temporary[1].write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary[0], weights)
    os.replace(temporary[1], config)
