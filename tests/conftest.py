"""A tiny seeded trio, its bundle, and bundles whose drafts follow a script. Everything real, nothing useful.

    fixture           scope     what it is
    tiny_trio         session   Qwen3 target, drafter, xPress and Markov refiners on disk; transformers' model
    stories           session   token sequences that transformers' greedy `generate` wrote, near-ties excluded
    tiny_bundle       session   the trio exported: the only place where three graphs are traced and checked
    scripted_bundle   session   factory: a copy of it that drafts what a table says, other settings as asked

A random model of ordinary scale repeats one token. This one has large weights and sharp attention, so that its
output depends on every earlier token and visits a third of the vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from xpress_export import names
from xpress_export.exporter.configs import DecoderConfig, DrafterConfig, RefinerConfig, RopeConfig
from xpress_export.exporter.export import ExportOptions, export
from xpress_export.exporter.formats import write_drafter, write_refiner
from xpress_export.exporter.modules import Drafter, Refiner
from xpress_export.manifest import GRAPHS_FOLDER, TOKENIZER_FOLDER, read_manifest, record_files, write_manifest

HIDDEN, HEAD_DIM, VOCAB, BLOCK, RANK = 48, 16, 320, 8, 8
MAX_CONTEXT = 600  # beyond the runtime's first two cache capacities, 256 and 512 rows
MASK = VOCAB - 3  # like Qwen3's: a row of the embedding that is no token
TAPS = (1, 0)  # out of order on purpose
THETA = 1e4
NEAR_TIE = 1e-4  # of the spread of a row of logits; float32 differences between kernels are 100 times smaller
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Trio:
    """Folders of the checkpoints, and the target as transformers loads it (float32)."""

    target: Path
    drafter: Path
    refiner: Path
    markov: Path
    model: Any

    def options(self, **changes: Any) -> ExportOptions:
        """Export options of the xPress trio; `changes` replaces some."""
        sources = {"target": str(self.target), "drafter": str(self.drafter), "refiner": str(self.refiner)}
        return ExportOptions(**{**sources, "max_context": MAX_CONTEXT, "trained": False, **changes})


@dataclass(frozen=True)
class Story:
    """ids[start:] is what transformers wrote, greedily, after ids[:start]; so any longer prefix is a prompt too."""

    ids: list[int]
    start: int

    def expected(self, num_prompt: int, num_tokens: int) -> list[int]:
        """The greedy continuation of the first `num_prompt` tokens."""
        assert self.start <= num_prompt <= len(self.ids) - num_tokens
        return self.ids[num_prompt : num_prompt + num_tokens]


def randomize(module: torch.nn.Module, seed: int, std: float) -> None:
    """Fill every parameter: matrices of scale `std`, norms around one (queries sharper), biases small."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        norm = 3.0 if "q_norm" in name else 1.0
        is_norm = parameter.ndim == 1 and not name.endswith("bias")
        parameter.data = norm * (1 + 0.2 * noise) if is_norm else std * noise


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE with a ChatML template, a few tokens smaller than the vocabulary of the model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 8,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the target verifies what the drafter drafts and the refiner refines, in one block at a time "
    tokenizer.train_from_iterator([text * 4], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    wrapped.chat_template = CHATML
    wrapped.save_pretrained(folder)


def write_target(folder: Path, **changes: Any) -> Any:
    """A Qwen3 target with tokenizer in `folder`; returns transformers' model. `changes` are config keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **{
            "hidden_size": HIDDEN,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": HEAD_DIM,
            "vocab_size": VOCAB,
            "max_position_embeddings": 640,
            "rope_theta": THETA,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
            **changes,
        }
    )
    model = Qwen3ForCausalLM(config).eval()
    randomize(model, seed=0, std=0.2)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def drafter_config(**changes: Any) -> DrafterConfig:
    """Layer 0 slides (causal inside the block, window of 24), layer 1 is full and bidirectional."""
    decoder = DecoderConfig(
        family="qwen3",
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=HEAD_DIM,
        vocab_size=VOCAB,
        rms_norm_eps=1e-6,
        rope=RopeConfig(inv_freq=tuple(THETA ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2))),
        max_positions=640,
        tied_head=False,
        qk_norm=True,
        layer_windows=(24, None),
    )
    config = DrafterConfig(
        decoder=decoder,
        block_size=BLOCK,
        mask_token_id=MASK,
        target_layer_ids=TAPS,
        target_hidden_size=HIDDEN,
        first_slot=1,
        causal_layers=(True, False),
        num_target_layers=3,
    )
    return dataclasses.replace(config, **changes)


def refiner_config(kind: str) -> RefinerConfig:
    return RefinerConfig(
        kind=kind,
        rank=RANK,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        block_size=BLOCK,
        num_passes=3,
        mlp_hidden=2 * RANK,
    )


def write_random_drafter(folder: Path, config: DrafterConfig) -> Path:
    module = Drafter(config)
    randomize(module, seed=1, std=0.2)
    borrowed = {"embed_tokens.weight", "lm_head.weight"}
    tensors = {name: t for name, t in module.state_dict().items() if name not in borrowed}
    write_drafter(folder, config, tensors, {"rope_theta": THETA, "rope_type": "default"})
    return folder


def write_random_refiner(folder: Path, kind: str, first_slot: int = 1) -> Path:
    """Weights so large that the head often overrules the drafter."""
    module = Refiner(refiner_config(kind), first_slot)
    randomize(module, seed=2, std=0.4)
    write_refiner(folder, module.config, module.state_dict(), first_slot)
    return folder


@pytest.fixture(scope="session")
def tiny_trio(tmp_path_factory: pytest.TempPathFactory) -> Trio:
    root = tmp_path_factory.mktemp("trio")
    return Trio(
        target=root / "target",
        model=write_target(root / "target"),
        drafter=write_random_drafter(root / "drafter", drafter_config()),
        refiner=write_random_refiner(root / "refiner", "xpress"),
        markov=write_random_refiner(root / "markov", "markov"),
    )


