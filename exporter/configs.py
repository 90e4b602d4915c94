"""What the exporter knows about a model before it traces it: plain frozen dataclasses, no tensors.

Readers (`checkpoints.py`) fill them from `config.json` or GGUF metadata; modules (`modules.py`) are built from
them alone. Shape letters are those of `xpress_export.names`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding, half-split ("neox") layout over the whole head.

    `inv_freq` has D/2 entries (radians per position) with any static scaling (linear, llama3, yarn) already
    folded in; cos and sin are multiplied by `attention_scaling` (1.0 unless yarn).
    """

    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A dense pre-norm decoder of the Llama, Mistral, Qwen2 or Qwen3 family.

    `layer_windows[i]` is the sliding window of layer i in tokens, the query itself included; None: full attention.
    """

    family: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    tied_head: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if not self.layer_windows:
            object.__setattr__(self, "layer_windows", (None,) * self.num_layers)


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """A dFlash block-diffusion drafter.

    decoder: its own layers; `vocab_size` is the target's (the embedding is borrowed unless `own_embedding`).
    block_size: trained slots per block, anchor included.
    target_layer_ids: tapped target layers, 0-based; layer i is Hugging Face `hidden_states[i + 1]`; -1 is the
        embedding output.
    first_slot: slot whose output is the first draft token: 1 for fill-in drafters (slot j predicts the token AT
        j, slot 0 is the anchor), 0 for anchor-sampled ones (slot j predicts the token after j).
    causal_layers[i]: whether layer i masks later slots of the block (sliding layers of newer checkpoints do).
    draft_vocab_size: rows of the drafter's own reduced head, None when it uses the target's head.
    """

    decoder: DecoderConfig
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    first_slot: int
    causal_layers: tuple[bool, ...]
    draft_vocab_size: int | None = None
    own_embedding: bool = False
    own_head: bool = False
    num_target_layers: int | None = None

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens one full block yields."""
        return self.block_size - self.first_slot


@dataclass(frozen=True, kw_only=True)
class RefinerConfig:
    """An xPress causal refiner, or its special case the Markov head (`kind == "markov"`: y = W1[previous]).

    rank: bottleneck width r. block_size: slots of the mixer (xPress only). num_passes: the checkpoint's default
    number of Jacobi passes. vocab_size: rows of W1. draft_vocab_size: rows of W2 (the drafter's head).
    """

    kind: str
    rank: int
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    block_size: int
    num_passes: int
    mlp_hidden: int = 0
