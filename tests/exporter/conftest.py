"""Tiny seeded checkpoints in every format the readers accept, written from the formats' own descriptions; and bundles.

    bundle       precision  target               drafter                     refiner
    tiny         fp32       3 layers             2 layers, one slides        xPress
    half         fp16       1 layer, tied head   1 layer                     Markov
    anchored     fp32       3 layers             anchor-sampled, reduced     xPress
                                                 vocabulary, rows of the
                                                 target's head
    dflash       fp32       3 layers             1 layer                     none
    plain        fp32       1 layer, tied head   none                        none

The same request is traced once per session (`trace_once`), so that exports that differ in weights are quick.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from xpress_export.errors import CheckpointError
from xpress_export.exporter.checkpoints import (
    DrafterCheckpoint,
    TargetCheckpoint,
    read_drafter,
    read_target,
)
from xpress_export.exporter.export import ExportOptions, export

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 48, 4, 2, 8, 64
TARGET_LAYERS, DRAFT_LAYERS, BLOCK, MASK, TAPS = 8, 2, 4, 63, [1, 4]
RANK, MLP, DRAFT_VOCAB = 6, 10, 16

REDUCED_HEAD = 200  # rows of the anchored drafter's head

Edit = Callable[[dict[str, Any]], Any]


class Maker:
    """Writes checkpoints into its folder and edits them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def drafter(self, name: str = "drafter", layout: str = "z-lab") -> Path:
        """A drafter folder with all tensors of `layout`."""
        config = {"z-lab": zlab_json, "deepspec": deepspec_json, "speculators": speculators_json}[layout]()
        tensors = drafter_tensors()
        if layout != "z-lab":
            rows = DRAFT_VOCAB if layout == "speculators" else VOCAB
            tensors |= {"embed_tokens.weight": seeded(VOCAB, HIDDEN), "lm_head.weight": seeded(rows, HIDDEN)}
        if layout == "speculators":
            tensors |= {"d2t": torch.arange(DRAFT_VOCAB) * 2, "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
        return self.write(name, config, tensors)

    def xpress(self, name: str = "xpress") -> Path:
        """A serving folder: drafter and xPress head."""
        head = {f"xpress_head.{name}": tensor for name, tensor in xpress_tensors().items()}
        return self.write(name, zlab_json() | xpress_json(), drafter_tensors() | head)

    def markov(self, name: str = "markov") -> Path:
        """A serving folder: drafter and Markov head."""
        extra = {"architectures": ["Qwen3DSparkModel"], "markov_rank": RANK, "sample_from_anchor": False}
        head = {f"markov_head.markov_{w}.weight": seeded(VOCAB, RANK) for w in ("w1", "w2")}
        return self.write(name, zlab_json() | extra, drafter_tensors() | head)

    def write(self, name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
        folder = self.root / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
        return folder

    def edit(self, folder: Path, edit_config: Edit | None = None, edit_tensors: Edit | None = None) -> Path:
        """Change a written checkpoint in place."""
        if edit_config:
            raw = json.loads((folder / "config.json").read_text())
            edit_config(raw)
            (folder / "config.json").write_text(json.dumps(raw))
        if edit_tensors:
            tensors = load_file(folder / "model.safetensors")
            edit_tensors(tensors)
            save_file(tensors, folder / "model.safetensors")
        return folder


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + len(shape)))


def body_json() -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": DRAFT_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "max_position_embeddings": 128,
        "attention_bias": False,
    }


def zlab_json() -> dict[str, Any]:
    return body_json() | {
        "architectures": ["DFlashDraftModel"],
        "block_size": BLOCK,
        "num_target_layers": TARGET_LAYERS,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS},
    }


def deepspec_json() -> dict[str, Any]:
    return body_json() | {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_layer_ids": [-1, 4],
        "markov_rank": 0,
        "enable_confidence_head": False,
    }


def speculators_json() -> dict[str, Any]:
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": body_json(),
        "draft_vocab_size": DRAFT_VOCAB,
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [2, 5],
        "target_hidden_size": HIDDEN,
    }


def xpress_json() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3XPressModel"],
        "xpress_rank": RANK,
        "xpress_mlp_hidden": MLP,
        "xpress_block_size": BLOCK,
        "xpress_num_passes": 3,
        "sample_from_anchor": False,
    }


def drafter_tensors(num_taps: int = 2) -> dict[str, torch.Tensor]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (q, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, q),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.k_norm": (HEAD_DIM,),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    shapes = {f"layers.{i}.{name}.weight": s for i in range(DRAFT_LAYERS) for name, s in layer.items()}
    shapes |= {"hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    shapes |= {"fc.weight": (HIDDEN, num_taps * HIDDEN)}
    return {name: seeded(*shape) for name, shape in shapes.items()}


def xpress_tensors() -> dict[str, torch.Tensor]:
    return {
        "w1.weight": seeded(VOCAB, RANK),
        "w2.weight": seeded(VOCAB, RANK),
        "down_h.weight": seeded(RANK, HIDDEN),
        "down_g.weight": seeded(RANK, HIDDEN),
        "in_proj.weight": seeded(RANK, 3 * RANK),
        "mix.L": seeded(RANK, BLOCK, BLOCK),
        "mlp.gate_proj.weight": seeded(MLP, RANK),
        "mlp.up_proj.weight": seeded(MLP, RANK),
        "mlp.down_proj.weight": seeded(RANK, MLP),
    }


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    """Writer of tiny checkpoints into this test's folder."""
    return Maker(tmp_path)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 target that the tiny drafters fit."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    body = body_json() | {"num_hidden_layers": TARGET_LAYERS, "tie_word_embeddings": True, "eos_token_id": 2}
    folder = tmp_path_factory.mktemp("target") / "qwen3"
    Qwen3ForCausalLM(Qwen3Config(**body)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def target(target_folder: Path) -> TargetCheckpoint:
    """The tiny target, read."""
    return read_target(str(target_folder))


@pytest.fixture
def drafter(make: Maker, target: TargetCheckpoint) -> DrafterCheckpoint:
    """The tiny z-lab drafter, read."""
    return read_drafter(str(make.drafter("read_drafter")), target)


@pytest.fixture
def refusal() -> Iterator[Callable[..., str]]:
    """Call a reader that must refuse; the message, checked to be one plain line."""

    def call(reader: Callable[..., Any], *args: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            reader(*args)
        message = str(caught.value)
        assert "\n" not in message and "Traceback" not in message and len(message) < 700
        assert any(word in message for word in ("; ", "only ", "support")), "says what, not what to do"
        return message

    yield call


@pytest.fixture(scope="session")
def recipes(tiny_trio: Any, trio_maker: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ExportOptions]:
    """Export options of each bundle."""
    root = tmp_path_factory.mktemp("recipes")
    tied = trio_maker.target(root / "tied", num_hidden_layers=1, tie_word_embeddings=True)
    one_layer = {"layer_windows": (None,), "num_layers": 1}
    small = trio_maker.drafter_config(decoder=one_layer, causal_layers=(False,))
    half = dataclasses.replace(small, target_layer_ids=(0,), num_target_layers=1)
    anchored = dataclasses.replace(small, first_slot=0, draft_vocab_size=REDUCED_HEAD)
    rows = torch.randperm(320, generator=torch.Generator().manual_seed(0))[:REDUCED_HEAD].sort().values
    trio_maker.drafter(root / "half", half, tied)
    trio_maker.drafter(root / "one", small, tiny_trio.model)
    trio_maker.drafter(root / "anchored", anchored, tiny_trio.model, d2t=rows - torch.arange(REDUCED_HEAD))
    trio_maker.refiner(root / "xpress", "xpress", first_slot=0, draft_vocab_size=REDUCED_HEAD)
    trio = {
        "half": (root / "tied", root / "half", tiny_trio.markov),
        "anchored": (tiny_trio.target, root / "anchored", root / "xpress"),
        "dflash": (tiny_trio.target, root / "one", None),
        "plain": (root / "tied", None, None),
    }
    options = {
        name: ExportOptions(
            target=str(target),
            drafter=str(drafter) if drafter else None,
            refiner=str(refiner) if refiner else None,
            precision="fp16" if name == "half" else "fp32",
            trained=False,
        )
        for name, (target, drafter, refiner) in trio.items()
    }
    return {"tiny": tiny_trio.options(), **options}


@pytest.fixture(scope="session")
def bundle_of(
    tiny_bundle: Path, recipes: dict[str, ExportOptions], trace_once: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """The bundle of a recipe in a layout, split unless asked, exported when first asked for."""
    root, built = tmp_path_factory.mktemp("exported"), {"tiny-split": tiny_bundle}

    def get(name: str, layout: str = "split", **changes: Any) -> Path:
        key = "-".join((name, layout, *map(str, changes.values())))
        if key not in built:
            with pytest.MonkeyPatch.context() as patch:
                trace_once.install(patch)
                options = dataclasses.replace(recipes[name], layout=layout, **changes)
                assert not export(options, root / key).reused
            built[key] = root / key
        return built[key]

    return get
