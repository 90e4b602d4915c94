"""The export stage: the graph contract, parity that can fail, reuse, and every shape of a trio (see `conftest`)."""

from __future__ import annotations

import json
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch
from safetensors.torch import load_file

from xpress_export import names
from xpress_export.exporter import export as export_module
from xpress_export.exporter import graphs, parity
from xpress_export.exporter.checkpoints import read_drafter, read_refiner, read_target
from xpress_export.exporter.export import ExportOptions, read_trio
from xpress_export.manifest import Manifest, open_bundle, read_manifest
from xpress_export.runtime import Runtime, SamplingParams

HALF = 3e-2
"""Relative error of a float16 graph, weights and activations rounded, against float32."""

BUNDLES = ("tiny", "half", "anchored", "dflash", "plain")


def load_graphs(bundle: Path) -> dict[str, Any]:
    return {
        role: onnx.load(bundle / record.file, load_external_data=False)
        for role, record in read_manifest(bundle).graphs.items()
    }


def place(tensor: Any) -> tuple[str, int, int]:
    """Where an external initializer lies: file, offset, length."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return entries["location"], int(entries["offset"]), int(entries["length"])


# The graph contract


@pytest.mark.parametrize("name", BUNDLES)
def test_only_standard_operators_of_opset_24(bundle_of: Any, name: str) -> None:
    for model in load_graphs(bundle_of(name)).values():
        assert [(o.domain, o.version) for o in model.opset_import] == [("", 24)]
        assert {node.domain for node in model.graph.node} <= {"", "ai.onnx"}
        assert not model.functions
        for node in model.graph.node:
            if node.op_type == "Attention":
                assert len([output for output in node.output if output]) == 1
                assert len(node.input) == 4, "query, key, value and an additive mask"
                assert {attribute.name for attribute in node.attribute} == {"scale"}


@pytest.mark.parametrize("name", BUNDLES)
def test_how_often_each_operator_occurs(bundle_of: Any, name: str) -> None:
    """Each rewrite fired everywhere: what is counted here appears in no other form."""
    bundle = bundle_of(name)
    manifest, models = read_manifest(bundle), load_graphs(bundle)
    target, drafter = manifest.target.num_layers, manifest.drafter.num_layers if manifest.drafter else 0
    expected = {  # layers times (norms of the layer, of queries and keys), and those around the layers
        "target": {"RMSNormalization": 4 * target + 1, "RotaryEmbedding": 2 * target},
        "drafter": {"RMSNormalization": 5 * drafter + 2, "RotaryEmbedding": 3 * drafter},
        "refiner": {},
    }
    for role, layers in (("target", target), ("drafter", drafter)):
        expected[role] |= {"TensorScatter": 2 * layers, "Attention": layers}
    for role, model in models.items():
        counts = Counter(node.op_type for node in model.graph.node)
        counted = ("RMSNormalization", "RotaryEmbedding", "TensorScatter", "Attention")
        assert {op: counts[op] for op in counted if counts[op]} == expected[role]
        assert not {"Softmax", "ReduceMean"} & (counts.keys() - ({"ReduceMean"} if role == "refiner" else set()))


def bindings(manifest: Manifest) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Inputs and outputs of each graph, written from the table in `names`."""
    size = manifest.target.hidden_size
    vocab = manifest.target.vocab_size

    def caches(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        shape = ["B", model.num_kv_heads, "C", model.head_dim]
        layers = [(kind, i) for i in range(model.num_layers) for kind in ("key", "value")]
        return tuple({f"{side}_{kind}_{i}": shape for kind, i in layers} for side in ("past", "present"))

    past, present = caches(manifest.target)
    taps = {"target_hidden": ["B", "S", size * len(manifest.draft.target_layer_ids)]} if manifest.draft else {}
    logits = {"logits": ["B", "S", vocab]}
    found = {
        "target": (
            {"input_ids": ["B", "S"], "write_index": ["B"], **past},
            {"next_token": ["B", "S"], **taps, **logits, **present},
        )
    }
    if manifest.draft:
        past, present = caches(manifest.drafter)
        slots = "N-1" if manifest.draft.first_slot else "N"
        blocks = {
            "draft_hidden": ["B", "N", size],
            "draft_logits": ["B", slots, manifest.draft.draft_vocab_size],
        }
        given = {"num_committed": ["B"], "write_index": ["B"], "block_ids": ["B", "N"]}
        hidden = {"draft_hidden": blocks["draft_hidden"]} if manifest.refiner else {}
        states = {**hidden, "draft_logits": blocks["draft_logits"]}
        found["drafter"] = (
            {**taps, **given, **past},
            {"draft_tokens": ["B", slots], **states, **present},
        )
        if manifest.refiner:
            tokens = {"draft_tokens": ["B", slots], "anchor": ["B"], "previous": ["B"]}
            reads = {**blocks, **tokens}
            if manifest.refiner.kind == "markov":
                del reads["draft_hidden"]
            refined = {"refined_tokens": ["B", slots], "refined_logits": blocks["draft_logits"]}
            found["refiner"] = (reads, refined)
    return found


@pytest.mark.parametrize("name", BUNDLES)
def test_names_types_and_symbolic_shapes(bundle_of: Any, name: str) -> None:
    bundle = bundle_of(name)
    manifest, models = read_manifest(bundle), load_graphs(bundle)
    floats = onnx.TensorProto.FLOAT16 if name == "half" else onnx.TensorProto.FLOAT
    expected = bindings(manifest)
    assert list(models) == list(manifest.graphs) == list(expected)
    for role, model in models.items():
        for values, wanted, records in (
            (model.graph.input, expected[role][0], manifest.graphs[role].inputs),
            (model.graph.output, expected[role][1], manifest.graphs[role].outputs),
        ):
            got = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}
            assert got == wanted
            assert {record.name: list(record.shape) for record in records} == wanted
            for value in values:
                is_float = value.name.startswith(("past_", "present_")) or value.name.endswith(("hidden", "logits"))
                expected_type = floats if is_float else onnx.TensorProto.INT64
                assert value.type.tensor_type.elem_type == expected_type, value.name


@pytest.mark.parametrize("name", BUNDLES)
def test_weights_lie_outside_the_graph_file(bundle_of: Any, name: str) -> None:
    bundle = bundle_of(name)
    for role, model in load_graphs(bundle).items():
        inside = [t for t in model.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
        assert all(len(onnx.numpy_helper.to_array(t).tobytes()) <= 1024 for t in inside)
        constants = [node for node in model.graph.node if node.op_type == "Constant"]
        assert all(node.ByteSize() <= 1024 for node in constants)
        assert len(model.graph.initializer) > len(inside)
        for tensor in model.graph.initializer:
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                file, offset, length = place(tensor)
                assert offset % 4096 == 0
                assert offset + length <= (bundle / "graphs" / file).stat().st_size
                assert f"graphs/{file}" in read_manifest(bundle).graphs[role].data


@pytest.mark.parametrize("name", ["tiny", "half", "dflash", "anchored"])
def test_point_14_embedding_and_head_are_stored_once(bundle_of: Any, name: str) -> None:
    """Shared between target and drafter; in a tied target also with each other. A reduced head is its own."""
    models = load_graphs(bundle_of(name))

    def places(role: str, *weights: str) -> set[tuple[str, int, int]]:
        tensors = {tensor.name: tensor for tensor in models[role].graph.initializer if tensor.external_data}
        assert tensors.keys() & set(weights)
        return {place(tensors[weight]) for weight in weights if weight in tensors}

    embedding, head = "embed_tokens.weight", "lm_head.weight"
    if name == "anchored":
        assert places("drafter", embedding) == places("target", f"model.{embedding}")
        assert {file for file, *_ in places("drafter", head)} == {"drafter.data"}
    elif name == "half":
        assert places("drafter", embedding) == places("drafter", head)
        assert places("drafter", head) == places("target", f"model.{embedding}", head)
    else:
        assert places("drafter", embedding) == places("target", f"model.{embedding}")
        assert places("drafter", head) == places("target", head) != places("drafter", embedding)


def test_data_files_hold_each_weight_once(bundle_of: Any, tiny_trio: Any) -> None:
    bundle = bundle_of("tiny")
    tensors = load_file(tiny_trio.target / "model.safetensors")
    num_bytes = sum(tensor.numel() * 4 for tensor in tensors.values())
    stored = (bundle / "graphs" / "target.data").stat().st_size
    assert num_bytes <= stored <= num_bytes + 4096 * (len(tensors) + 1)


def test_tracing_needs_no_memory_for_weights() -> None:
    """2.5 GB of parameters, traced without them."""
    from transformers import LlamaConfig

    from xpress_export.exporter.decoder_config import decoder_config

    raw = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=1,
        num_attention_heads=16,
        vocab_size=150_000,
        rms_norm_eps=1e-6,
    )
    config = decoder_config(raw.to_dict(), "llama", "test")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = graphs.trace_target(config, (), torch.float32)
    grown_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    assert grown_bytes < 5e8
    weights = [v for v in model.graph.initializers.values() if v.const_value is None]
    assert sum(int(np.prod(v.shape.numpy())) for v in weights) > 6e8


# float16


def test_point_12_fc_and_its_norm_stay_in_float32(bundle_of: Any) -> None:
    models = load_graphs(bundle_of("half"))
    types = {t.name: t.data_type for t in models["drafter"].graph.initializer if t.external_data}
    wide = {name for name, kind in types.items() if kind == onnx.TensorProto.FLOAT}
    assert wide == {"fc.weight", "hidden_norm.weight", "rope.inv_freq"}
    assert set(types.values()) == {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16}
    for role in ("target", "refiner"):
        kinds = {t.name: t.data_type for t in models[role].graph.initializer if t.external_data}
        kinds.pop("rope.inv_freq", None)
        assert set(kinds.values()) == {onnx.TensorProto.FLOAT16}


def test_point_12_features_of_2e4_do_not_overflow(bundle_of: Any, recipes: dict[str, ExportOptions]) -> None:
    """As real models have them. The control shows that a float16 sum would be infinite."""
    trio = read_trio(recipes["half"])
    module = export_module._filled(
        export_module.Drafter(trio.drafter.config),
        lambda name: export_module._drafter_source(trio.drafter, trio.target, name),
    )
    rows = 2e4 * torch.randn(2, 12, 48, generator=torch.Generator().manual_seed(0)).sign()
    sums = rows.half().float() @ module.fc.weight.T
    assert sums.abs().max() > torch.finfo(torch.float16).max
    feeds = {
        names.TARGET_HIDDEN: rows,
        names.NUM_COMMITTED: torch.tensor([12, 9]),
        names.WRITE_INDEX: torch.tensor([0, 0]),
        names.BLOCK_IDS: torch.full((2, 8), 317),
    }
    out = parity.GraphRunner(bundle_of("half") / "graphs" / "drafter.onnx")(**feeds)
    cache = [torch.zeros(2, 2, 64, 16) for _ in range(2)]
    with torch.inference_mode():
        hidden, logits, _ = module(*feeds.values(), cache)
    assert parity.relative_error(out[names.DRAFT_HIDDEN], hidden) < HALF
    assert parity.relative_error(out[names.DRAFT_LOGITS], logits) < HALF


# Parity


@pytest.mark.parametrize("name", BUNDLES)
def test_what_parity_is_recorded(bundle_of: Any, name: str) -> None:
    """Tokens and floats of every graph."""
    manifest = open_bundle(bundle_of(name))
    tokens, floats = "share of wrong tokens", "relative error"
    expected = [(role, measure) for role in manifest.roles for measure in (tokens, floats)]
    expected.append(("accept", "share of wrong slots"))
    assert [(check.graph, check.measure) for check in manifest.parity] == expected
    for check in manifest.parity:
        assert check.value <= check.tolerance
        assert ("transformers" in check.against) == (check.graph == "target")
        assert check.rows > 20


def test_the_context_is_the_targets_unless_asked(bundle_of: Any) -> None:
    assert read_manifest(bundle_of("tiny")).max_context == 600
    assert read_manifest(bundle_of("dflash")).max_context == 640


# Every bundle runs


@pytest.fixture
def opened(bundle_of: Any) -> Iterator[Callable[[str], Runtime]]:
    runtimes: list[Runtime] = []

    def get(name: str) -> Runtime:
        runtimes.append(Runtime.open(bundle_of(name), num_threads=1, prefill_chunk=16))
        return runtimes[-1]

    yield get
    for runtime in runtimes:
        runtime.close()


@pytest.mark.parametrize("name", ["anchored", "dflash"])
def test_other_trios_are_lossless_too(opened: Any, stories: Any, name: str) -> None:
    runtime = opened(name)
    most = runtime.manifest.draft.num_draft_tokens
    assert most == (8 if name == "anchored" else 7)
    for mode in runtime.modes:
        for num_draft_tokens in (0, 1, 2, most) if mode != "target" else (None,):
            for passes in (0, 1, most) if mode == "xpress" else (None,):
                params = SamplingParams(
                    max_new_tokens=30,
                    ignore_eos=True,
                    mode=mode,
                    num_draft_tokens=num_draft_tokens,
                    refine_passes=passes,
                )
                result = runtime.generate(stories[0].ids[:40], params).result()
                assert list(result.token_ids) == stories[0].expected(40, 30)


@pytest.mark.parametrize("num_right", [0, 3, 8])
def test_point_17_anchor_sampled_drafters_fill_one_more_slot(
    bundle_of: Any, scripted_bundle: Any, stories: Any, num_right: int
) -> None:
    """All slots of the block draft, so a step commits up to BLOCK + 1 tokens."""
    story, num_tokens = stories[0], 1 + 3 * (num_right + 1)
    script = story.script([num_right] * len(story.ids))
    with Runtime.open(scripted_bundle(script, original=bundle_of("anchored")), num_threads=1) as runtime:
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, mode="dflash")
        result = runtime.generate(story.ids[:40], params).result()
    assert list(result.token_ids) == story.expected(40, num_tokens)
    assert result.stats.tau == num_right + 1


@pytest.mark.parametrize("name", ["plain", "half"])
def test_a_tied_target_writes_what_transformers_writes(
    opened: Any, recipes: dict[str, ExportOptions], name: str
) -> None:
    """Float16 differs where two tokens are close, so there only the start is held to it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(recipes[name].target, dtype=torch.float32)
    prompt = list(range(40, 60))
    inputs = {"attention_mask": torch.ones(1, 20, dtype=torch.int64), "eos_token_id": None, "pad_token_id": 0}
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, **inputs)
    expected = ids[0, 20:].tolist()
    runtime = opened(name)
    for mode in runtime.modes:
        params = SamplingParams(max_new_tokens=30, ignore_eos=True, mode=mode)
        got = list(runtime.generate(prompt, params).result().token_ids)
        assert got[:5] == expected[:5]
        assert got == expected or name == "half"


def test_a_markov_head_makes_one_pass_per_draft_token(bundle_of: Any, tiny_trio: Any) -> None:
    manifest = read_manifest(bundle_of("half"))
    assert (manifest.refiner.kind, manifest.draft.refine_passes) == ("markov", 7)
    target = read_target(str(tiny_trio.target))
    drafter = read_drafter(str(tiny_trio.drafter), target)
    assert read_refiner(str(tiny_trio.markov), target, drafter).config.num_passes == 7
    assert read_manifest(bundle_of("tiny")).draft.refine_passes == 3


# Batches, for engines that run several requests in one call


def test_point_10_rows_of_a_batch_are_independent(tiny_bundle: Path) -> None:
    """Two requests at other positions, of whose last rows other numbers were committed, give what each gives alone."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 320, (2, 9), generator=generator)
    blocks = torch.full((2, 8), 317)
    blocks[:, 0] = torch.tensor([5, 9])
    starts, committed = [(0, 0), (9, 4)], [(9, 4), (2, 9)]

    def run(rows: slice) -> list[dict[str, torch.Tensor]]:
        batch = len(range(2)[rows])
        target, drafter = (
            parity.GraphRunner(tiny_bundle / "graphs" / f"{role}.onnx", batch) for role in ("target", "drafter")
        )
        found = []
        for start, count in zip(starts, committed, strict=True):
            index, num_committed = torch.tensor(start)[rows], torch.tensor(count)[rows]
            out = target(input_ids=ids[rows], write_index=index)
            hidden = out[names.TARGET_HIDDEN]
            out |= drafter(target_hidden=hidden, num_committed=num_committed, write_index=index, block_ids=blocks[rows])
            found.append(out)
        return found

    together = run(slice(0, 2))
    for row in range(2):
        for both, alone in zip(together, run(slice(row, row + 1)), strict=True):
            for name, value in alone.items():
                if value.is_floating_point():
                    assert parity.relative_error(both[name][row : row + 1], value) < 1e-5, name
                else:
                    assert torch.equal(both[name][row : row + 1], value), name


def test_text_side_is_the_targets(bundle_of: Any) -> None:
    text = json.loads((bundle_of("tiny") / "tokenizer" / "text.json").read_text())
    assert text["stop_token_ids"] == [2]
    assert "<|im_start|>" in text["chat_template"]
