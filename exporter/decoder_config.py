"""From a `config.json` dictionary to a `DecoderConfig`, and from that to the tensors a decoder has."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from xpress_export.errors import CheckpointError
from xpress_export.exporter.checkpoint_files import Json, integer, one_line, require
from xpress_export.exporter.configs import DecoderConfig, RopeConfig
from xpress_export.exporter.weights import WeightSource

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
FULL, SLIDING = "full_attention", "sliding_attention"
REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
)


def decoder_config(raw: Json, family: str, where: str) -> DecoderConfig:
    """The decoder that a Hugging Face config dictionary of `family` describes."""
    for key in REQUIRED:
        integer(require(raw, key, where), key, where)
    require(raw, "rms_norm_eps", where)
    hf = transformers_config(raw, family, where)
    if hf.hidden_act != "silu":
        raise CheckpointError(f"{where}: 'hidden_act' is {hf.hidden_act!r}, only 'silu' is supported")
    attention_bias = bool(getattr(hf, "attention_bias", False))
    return DecoderConfig(
        family=family,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=_num_kv_heads(raw, where),
        head_dim=_head_dim(hf, where),
        vocab_size=hf.vocab_size,
        rms_norm_eps=float(hf.rms_norm_eps),
        rope=_rope_config(hf, where),
        max_positions=hf.max_position_embeddings,
        tied_head=bool(hf.tie_word_embeddings),
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=family != "qwen2" and attention_bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        qk_norm=family == "qwen3",
        layer_windows=_layer_windows(hf, family, where),
    )


def transformers_config(raw: Json, family: str, where: str) -> Any:
    """Transformers' own config object, for its defaults and its reading of both rope spellings."""
    from transformers import CONFIG_MAPPING

    _check_rope_type(_rope_dict(raw), where)
    if family != "llama" and raw.get("rope_theta") is None and not _rope_dict(raw).get("rope_theta"):
        raise CheckpointError(f"{where} has no 'rope_theta', at the top or in 'rope_parameters'; add it")
    kept = {key: copy.deepcopy(raw[key]) for key in (*REQUIRED, *OPTIONAL) if key in raw}
    try:
        return CONFIG_MAPPING[family](**kept)
    except Exception as err:  # its validators raise errors of several unrelated classes
        raise CheckpointError(f"{where} is not a valid {family} configuration ({one_line(err)}); correct it") from err


def _rope_dict(raw: Json) -> Json:
    found = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    return found if isinstance(found, dict) else {}


def _check_rope_type(rope: Json, where: str) -> None:
    if any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(f"{where}: rope parameters that differ between layers are not supported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"{where}: rope type {kind!r} is not supported; supported are {', '.join(ROPE_TYPES)}")


def _num_kv_heads(raw: Json, where: str) -> int:
    heads = raw["num_attention_heads"]
    kv_heads = integer(raw.get("num_key_value_heads") or heads, "num_key_value_heads", where)
    if heads % kv_heads:
        raise CheckpointError(
            f"{where}: 'num_attention_heads' {heads} is not a multiple of 'num_key_value_heads' {kv_heads}; "
            f"correct the file"
        )
    return kv_heads


def _head_dim(hf: Any, where: str) -> int:
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    if head_dim % 2:
        raise CheckpointError(f"{where}: the head size {head_dim} is odd, rotary embedding needs it even")
    return int(head_dim)


def _rope_config(hf: Any, where: str) -> RopeConfig:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = hf.rope_parameters
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError(f"{where}: partial rotary embedding is not supported, only the whole head is")
    if rope["rope_type"] == "default":
        inv_freq, scaling = _default_inv_freq(rope["rope_theta"], _head_dim(hf, where)), 1.0
    else:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf)
    return RopeConfig(inv_freq=tuple(inv_freq.tolist()), attention_scaling=float(scaling))


def _default_inv_freq(theta: float, head_dim: int) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def _layer_windows(hf: Any, family: str, where: str) -> tuple[int | None, ...]:
    """Sliding windows as the family applies them: Llama has none, Mistral the same in every layer."""
    window = None if family == "llama" else getattr(hf, "sliding_window", None)
    everywhere = FULL if window is None else SLIDING
    types = (family != "llama" and getattr(hf, "layer_types", None)) or [everywhere] * hf.num_hidden_layers
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown or len(types) != hf.num_hidden_layers:
        raise CheckpointError(
            f"{where}: 'layer_types' should name {FULL} or {SLIDING} for each of {hf.num_hidden_layers} "
            f"layers, got {len(types)} entries"
            + (f" with {', '.join(unknown)}" if unknown else "")
            + "; other kinds are not supported"
        )
    if SLIDING in types and not window:
        raise CheckpointError(f"{where} has {SLIDING} layers but no usable 'sliding_window'; set it")
    return tuple(window if kind == SLIDING else None for kind in types)


Shapes = dict[str, tuple[int, ...]]


def layer_shapes(config: DecoderConfig, prefix: str) -> Shapes:
    """Names and shapes of all tensors of all layers, named `<prefix>layers.<i>...`."""
    one, layers = _one_layer_shapes(config), range(config.num_layers)
    return {f"{prefix}layers.{i}.{name}": shape for i in layers for name, shape in one.items()}


def _one_layer_shapes(config: DecoderConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    rows = {"q": config.num_heads * config.head_dim, "k": config.num_kv_heads * config.head_dim}
    rows["v"] = rows["k"]
    shapes: Shapes = {f"self_attn.{x}_proj.weight": (rows[x], hidden) for x in "qkv"}
    shapes["self_attn.o_proj.weight"] = (hidden, rows["q"])
    shapes |= {f"mlp.{x}_proj.weight": (inner, hidden) for x in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (hidden, inner)
    shapes |= {f"{x}_layernorm.weight": (hidden,) for x in ("input", "post_attention")}
    if config.qkv_bias:
        shapes |= {f"self_attn.{x}_proj.bias": (rows[x],) for x in "qkv"}
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.mlp_bias:
        shapes |= {f"mlp.{x}_proj.bias": (inner,) for x in ("gate", "up")}
        shapes["mlp.down_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes |= {f"self_attn.{x}_norm.weight": (config.head_dim,) for x in "qk"}
    return shapes


def check_tensors(weights: WeightSource, expected: Mapping[str, tuple[int, ...]], what: str) -> None:
    """Fail unless `weights` has exactly the `expected` tensors; `what` says what they should make up."""
    missing, extra = expected.keys() - weights.names(), weights.names() - expected.keys()
    if missing:
        raise CheckpointError(
            f"{weights.where} is not a complete {what}: {len(missing)} of {len(expected)} tensors are "
            f"missing ({first_few(missing)}); check that config.json and the weights belong together"
        )
    if extra:
        raise CheckpointError(
            f"{weights.where} has {len(extra)} tensors that a {what} does not have ({first_few(extra)}); "
            f"this variant is not supported"
        )
    for name, shape in sorted(expected.items()):
        if weights.shape(name) != shape:
            raise CheckpointError(
                f"{weights.where}: tensor {name} has shape {list(weights.shape(name))}, expected "
                f"{list(shape)} from the configuration; check that both belong to the same {what}"
            )


def first_few(names: Iterable[str]) -> str:
    """The first three names, in order, and whether there are more."""
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (", ..." if len(ordered) > 3 else "")
