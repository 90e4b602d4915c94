"""The manifest's text, every way to tamper with it, and every way to tamper with the files it lists."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from xpress_export import manifest as module
from xpress_export.errors import BundleError, ExportError
from xpress_export.manifest import (
    DraftRecord,
    EngineRecord,
    GraphRecord,
    Manifest,
    ModelRecord,
    ParityRecord,
    ProfileRecord,
    RefinerRecord,
    TensorRecord,
    TextRecord,
    VariantRecord,
    open_bundle,
    read_manifest,
    record_files,
    verify_files,
    write_manifest,
)
from xpress_export.precision import choose_precisions, step_precision

Place = tuple[str | int, ...]

FILES = {
    "graphs/target.onnx": b"target graph",
    "graphs/target.data": bytes(range(256)) * 2500,  # more than one read of the hash
    "graphs/drafter.onnx": b"drafter graph",
    "graphs/drafter.data": b"drafter weights",
    "graphs/refiner.onnx": b"refiner graph",
    "graphs/refiner.data": b"refiner weights",
    "graphs/target.decomposed.onnx": b"the same, for an older TensorRT",
    "graphs/drafter.decomposed.onnx": b"and this",
    "graphs/refiner.decomposed.onnx": b"and this too",
    "graphs/target.int8.onnx": b"quantized",
    "graphs/target.int8.decomposed.onnx": b"and lowered",
    "graphs/target.int8.data": b"codes",
    "graphs/accept.onnx": b"accept graph",
    "graphs/accept.decomposed.onnx": b"accept, lowered",
    "graphs/step.onnx": b"step graph",
    "graphs/step.decomposed.onnx": b"step, lowered",
    "graphs/step.int8.onnx": b"quantized step",
    "graphs/step.int8.decomposed.onnx": b"quantized step, lowered",
    "scales/target.int8.json": b"{}",
    "engines/target.l4.fp32.1234.plan": b"engine",
    "engines/target.l4.fp32.1234.build.json": b"{}",
    "tokenizer/tokenizer.json": b"{}",
    "tokenizer/text.json": b"{ }",
}
SOLO_FILES = {
    path: data
    for path, data in FILES.items()
    if not any(word in path for word in ("drafter", "refiner", "decomposed", "engines", "int8", "step"))
}

GOLDEN = """\
{
  "schema": 4,
  "tool": {"python": "3.11.4", "xpress-export": "0.1.0"},
  "platform": "cpu",
  "precision": "fp32",
  "lowering": "native",
  "layout": "split",
  "opset": 24,
  "max_context": 64,
  "preset": null,
  "target": {
    "source": "models/\\u6a21\\u578b",
    "digest": "1111111111111111111111111111111111111111111111111111111111111111",
    "family": "llama",
    "num_parameters": 1000,
    "hidden_size": 8,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 2,
    "vocab_size": 32
  },
  "drafter": null,
  "refiner": null,
  "draft": null,
  "text": {
    "folder": "tokenizer",
    "fingerprint": "4444444444444444444444444444444444444444444444444444444444444444",
    "stop_token_ids": [2, 7],
    "drafter_tokenizer": null,
    "refiner_tokenizer": null
  },
  "graphs": {
    "target": {
      "file": "graphs/target.onnx",
      "data": ["graphs/target.data"],
      "inputs": [
        {"name": "input_ids", "dtype": "int64", "shape": ["B", "S"]},
        {"name": "past_key_0", "dtype": "float32", "shape": ["B", 2, "C", 2]}
      ],
      "outputs": [{"name": "next_token", "dtype": "int64", "shape": ["B", "S"]}]
    }
  },
  "decomposed": {},
  "cycle": {
    "accept": {
      "file": "graphs/accept.onnx",
      "data": [],
      "inputs": [
        {"name": "input_ids", "dtype": "int64", "shape": ["B", "S"]},
        {"name": "past_key_0", "dtype": "float32", "shape": ["B", 2, "C", 2]}
      ],
      "outputs": [{"name": "next_token", "dtype": "int64", "shape": ["B", "S"]}]
    }
  },
  "variants": [],
  "run_precision": null,
  "parity": [
    {
      "graph": "target",
      "against": "transformers LlamaForCausalLM",
      "measure": "relative error",
      "value": 1e-06,
      "tolerance": 0.0001,
      "rows": 96
    }
  ],
  "engines": [],
  "files": [
    {
      "path": "graphs/accept.onnx",
      "num_bytes": 12,
      "sha256": "485a30e6b804c7ef1ec4ca5e7bf5ace94ccff45aec6f407f29086c361985cbb3"
    },
    {
      "path": "graphs/target.data",
      "num_bytes": 640000,
      "sha256": "3bf434e0edbcb9e13e2b75bf38b37fd141556bba9a61eb7e8ded1b8d2aceb1e2"
    },
    {
      "path": "graphs/target.onnx",
      "num_bytes": 12,
      "sha256": "f301aad8c6acced9e56ef5a05e9ffea59745a7856c5dc8eb8c47314f2ab4c929"
    },
    {
      "path": "tokenizer/text.json",
      "num_bytes": 3,
      "sha256": "257c1be96ae69f4b01c2c69bdb6d78605f59175819fb007d0bf245bf48444c4a"
    },
    {
      "path": "tokenizer/tokenizer.json",
      "num_bytes": 2,
      "sha256": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    }
  ],
  "digest": "9ae5b2d293c5fed5eae9707a9dbca02b0e0ec6d7651bf32524e3ecac99afa080"
}
"""


def tensor(name: str, dtype: str, *shape: int | str) -> TensorRecord:
    return TensorRecord(name=name, dtype=dtype, shape=shape)


def model(digit: str, **changes: Any) -> ModelRecord:
    sizes = dict(hidden_size=8, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=2, vocab_size=32)
    record = dict(source="models/模型", digest=digit * 64, family="llama", num_parameters=1000)
    return ModelRecord(**{**record, **sizes, **changes})


def graph(role: str, *data: str) -> GraphRecord:
    inputs = (tensor("input_ids", "int64", "B", "S"), tensor("past_key_0", "float32", "B", 2, "C", 2))
    outputs = (tensor("next_token", "int64", "B", "S"),)
    return GraphRecord(file=f"graphs/{role}.onnx", data=data, inputs=inputs, outputs=outputs)


def solo(folder: Path) -> Manifest:
    """A target and nothing else."""
    return Manifest(
        tool={"xpress-export": "0.1.0", "python": "3.11.4"},
        platform="cpu",
        precision="fp32",
        lowering="native",
        opset=24,
        max_context=64,
        preset=None,
        target=model("1"),
        drafter=None,
        refiner=None,
        draft=None,
        text=TextRecord(
            folder="tokenizer",
            fingerprint="4" * 64,
            stop_token_ids=(2, 7),
            drafter_tokenizer=None,
            refiner_tokenizer=None,
        ),
        graphs={"target": graph("target", "graphs/target.data")},
        cycle={"accept": graph("accept")},
        parity=(parity("target", "transformers LlamaForCausalLM"),),
        files=record_files(folder),
    )


def trio(folder: Path) -> Manifest:
    base = solo(folder)
    return dataclasses.replace(
        base,
        preset="tiny",
        drafter=model("2", family="dflash", num_layers=1),
        refiner=RefinerRecord(source="r.pt", digest="3" * 64, kind="xpress", rank=4, num_parameters=99),
        draft=DraftRecord(
            block_size=8,
            mask_token_id=31,
            target_layer_ids=(-1, 1),
            first_slot=1,
            num_draft_tokens=7,
            draft_vocab_size=32,
            vocab_file=None,
            refine_passes=2,
            trained=False,
        ),
        text=dataclasses.replace(base.text, drafter_tokenizer="identical", refiner_tokenizer="absent"),
        graphs={
            "refiner": graph("refiner", "graphs/refiner.data"),
            "drafter": graph("drafter", "graphs/drafter.data", "graphs/target.data"),
            **base.graphs,
        },
        decomposed={
            "target": graph("target.decomposed", "graphs/target.data"),
            "drafter": graph("drafter.decomposed", "graphs/drafter.data", "graphs/target.data"),
            "refiner": graph("refiner.decomposed", "graphs/refiner.data"),
        },
        layout="fused",
        cycle={
            "step": graph("step", "graphs/target.data"),
            "step.decomposed": graph("step.decomposed", "graphs/target.data"),
            "step.int8": graph("step.int8", "graphs/target.int8.data"),
            "step.int8.decomposed": graph("step.int8.decomposed", "graphs/target.int8.data"),
            "accept": graph("accept", "graphs/target.data"),
            "accept.decomposed": graph("accept.decomposed", "graphs/target.data"),
        },
        variants=(variant(),),
        parity=(*base.parity, parity("drafter", "the module"), parity("refiner", "the module")),
        engines=(engine(),),
    )


def variant(**changes: Any) -> VariantRecord:
    return dataclasses.replace(
        VariantRecord(
            role="target",
            precision="int8",
            file="graphs/target.int8.onnx",
            data=("graphs/target.data", "graphs/target.int8.data"),
            decomposed="graphs/target.int8.decomposed.onnx",
            scales="scales/target.int8.json",
            smoothquant=0.5,
            block_size=None,
            num_layers=14,
            kept=("lm_head",),
        ),
        **changes,
    )


def engine() -> EngineRecord:
    return EngineRecord(
        role="target",
        platform="l4",
        sm=89,
        backend="tensorrt",
        version="10.16.1.11",
        driver=580,
        precision="fp32",
        lowering="native",
        layout="split",
        max_context=48,
        capacity=64,
        max_batch=1,
        hardware_compat="none",
        version_compatible=False,
        profiles=(ProfileRecord(name="verify", sizes={"B": (1, 1, 1), "S": (1, 8, 8)}),),
        file="engines/target.l4.fp32.1234.plan",
        report="engines/target.l4.fp32.1234.build.json",
        cache_key="5" * 64,
    )


def parity(role: str, against: str) -> ParityRecord:
    return ParityRecord(graph=role, against=against, measure="relative error", value=1e-6, tolerance=1e-4, rows=96)


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A whole trio on disk."""
    folder = write_files(tmp_path / "bundle", FILES)
    write_manifest(folder, trio(folder))
    return folder


@pytest.fixture(scope="module")
def trio_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trio(write_files(tmp_path_factory.mktemp("trio"), FILES)).to_json()


@pytest.fixture
def raw(trio_text: str) -> dict[str, Any]:
    """The trio's manifest as plain JSON."""
    return json.loads(trio_text)


def text_of(raw: dict[str, Any], *, signed: bool) -> str:
    """JSON text, with its digest brought up to date if `signed`; written out here to pin its definition."""
    rest = {key: value for key, value in raw.items() if key != "digest"}
    canonical = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return json.dumps(rest | {"digest": hashlib.sha256(canonical.encode()).hexdigest()} if signed else raw)


def refusal(text: str) -> str:
    with pytest.raises(BundleError) as caught:
        Manifest.from_json(text, "m.json")
    message = str(caught.value)
    assert message.startswith("m.json: ") and "\n" not in message
    assert "`xpress-export build`" in message
    return message.removeprefix("m.json: ")


# Writing and reading


def test_golden_bytes(tmp_path: Path) -> None:
    folder = write_files(tmp_path, SOLO_FILES)
    assert solo(folder).to_json() == GOLDEN


def test_round_trip(bundle: Path) -> None:
    text = (bundle / "manifest.json").read_text()
    manifest = read_manifest(bundle)
    assert manifest == trio(bundle)
    assert manifest.to_json() == text
    assert list(manifest.graphs) == list(manifest.roles) == ["target", "drafter", "refiner"]
    assert manifest.num_bytes == sum(map(len, FILES.values()))
    assert all(len(line) <= 112 for line in text.splitlines())


def test_layout_of_the_text_is_free(raw: dict[str, Any]) -> None:
    reordered = dict(sorted(raw.items(), reverse=True))
    assert Manifest.from_json(json.dumps(reordered, indent=7), "m.json") == Manifest.from_json(
        json.dumps(raw), "m.json"
    )


def test_open_bundle(bundle: Path) -> None:
    assert open_bundle(bundle) == read_manifest(bundle)
    (bundle / "NOTES.md").write_text("a file beside graphs/ and tokenizer/ is the user's own")
    open_bundle(bundle)


def test_progress_adds_up(bundle: Path) -> None:
    seen: list[int] = []
    open_bundle(bundle, seen.append)
    assert sum(seen) == read_manifest(bundle).num_bytes and len(seen) > len(FILES)
    seen.clear()
    record_files(bundle, seen.append)
    assert sum(seen) == read_manifest(bundle).num_bytes


def test_an_error_in_progress_ends_the_check(bundle: Path) -> None:
    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_bundle(bundle, stop)


def test_imports_nothing_but_the_standard_library() -> None:
    code = "import sys; old = {*sys.modules}; import xpress_export.manifest; print(*sys.modules.keys() - old)"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    found = {name.partition(".")[0] for name in printed.split()}
    assert found - sys.stdlib_module_names == {"xpress_export"}


# Tampering with the manifest


def leaves(value: Any, place: Place = ()) -> Iterator[Place]:
    items: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(item, dict | list) and item:
            yield from leaves(item, (*place, key))
        else:
            yield (*place, key)


def at(raw: Any, place: Place) -> Any:
    for key in place:
        raw = raw[key]
    return raw


def changed(raw: Any, place: Place, value: Any) -> Any:
    result = copy.deepcopy(raw)
    at(result, place[:-1])[place[-1]] = value
    return result


def without(raw: Any, place: Place) -> Any:
    result = copy.deepcopy(raw)
    del at(result, place[:-1])[place[-1]]
    return result


def dotted(place: Place) -> str:
    keys = [repr(key) if "." in str(key) else key for key in place]
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    return text.removeprefix(".")


def another(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if value is None or isinstance(value, str):
        return (value or "") + "x"
    return value + 1


def of_another_type(value: Any) -> list[Any]:
    wrong = [{}, 1.5 if not isinstance(value, float) else 1, True if not isinstance(value, bool) else 1]
    return [*wrong, str(value)] if isinstance(value, int | float) else [*wrong, ["x"]]


def test_every_leaf_changed(raw: dict[str, Any]) -> None:
    places = list(leaves(raw))
    assert len(places) > 120
    for place in places:
        message = refusal(text_of(changed(raw, place, another(at(raw, place))), signed=False))
        assert re.search(r"should be .*, got |digest should be|should be those of|should list|is missing", message), (
            place
        )


def test_every_leaf_of_another_type(raw: dict[str, Any]) -> None:
    for place in leaves(raw):
        is_dimension = "shape" in place
        for wrong in of_another_type(at(raw, place)):
            if is_dimension and isinstance(wrong, str):
                continue
            for signed in (False, place != ("digest",)):
                message = refusal(text_of(changed(raw, place, wrong), signed=signed))
                assert message.startswith(f"{dotted(place)} should be "), (place, wrong, message)
                assert ", got " in message


def test_every_container_of_another_type(raw: dict[str, Any]) -> None:
    containers = {place[:n] for place in leaves(raw) for n in range(1, len(place))}
    assert len(containers) > 30
    for place in containers:
        for wrong in ("x", 1, [] if isinstance(at(raw, place), dict) else {}):
            message = refusal(text_of(changed(raw, place, wrong), signed=True))
            assert message.startswith(f"{dotted(place)} should be "), (place, wrong, message)


def test_every_key_deleted(raw: dict[str, Any]) -> None:
    for place in leaves(raw):
        assert refusal(text_of(without(raw, place), signed=False))
        if isinstance(place[-1], str) and place[0] not in ("tool", "digest"):
            message = refusal(text_of(without(raw, place), signed=True))
            assert message.startswith(f"{dotted(place)} is missing; "), (place, message)


@pytest.mark.parametrize("key", ["schema", "digest", "graphs", "files", "text"])
def test_top_level_key_deleted(raw: dict[str, Any], key: str) -> None:
    assert refusal(text_of(without(raw, (key,)), signed=False)).startswith(f"{key} is missing; ")


def test_unknown_key_in_every_object(raw: dict[str, Any]) -> None:
    objects = {place[:n] for place in leaves(raw) for n in range(len(place))}
    for place in sorted(filter(lambda p: isinstance(at(raw, p), dict), objects), key=str):
        if place == ("tool",):
            continue
        message = refusal(text_of(changed(raw, (*place, "extra"), 1), signed=True))
        records = place in {("graphs",), ("cycle",)}
        expected = f"{place[0]}.extra should be an object" if records else dotted((*place, "extra"))
        assert message.startswith(expected), (place, message)
    assert "unknown, expected only source, digest" in refusal(
        text_of(changed(raw, ("target", "extra"), 1), signed=True)
    )


def test_every_list_element_removed_or_doubled(raw: dict[str, Any]) -> None:
    lists = {place[:n] for place in leaves(raw) for n in range(len(place)) if isinstance(place[n], int)}
    for place in lists:
        items = at(raw, place)
        for wrong in (items[1:], items[:-1], [*items, items[-1]]):
            assert refusal(text_of(changed(raw, place, wrong), signed=False))


TOKEN = {"name": "next_token", "dtype": "int64", "shape": ["B", "S"]}
EMBEDDER = {"file": "graphs/embedder.onnx", "data": [], "inputs": [], "outputs": []}

CONTRADICTIONS: list[tuple[str, Any, str]] = [
    ("platform", "gpu", "platform should be 'cpu' or 't4'"),
    ("precision", "int4", "precision should be 'fp32' or 'fp16' or 'int8' or 'fp8', got 'int4'"),
    ("lowering", "decomposed", "lowering should be 'native'"),
    ("opset", 23, "opset should be 24, got 23"),
    ("max_context", 0, "max_context should be at least 1, got 0"),
    ("max_context", 7, "max_context should be at least the block size 8, got 7"),
    ("tool", {"python": "3"}, "tool.xpress-export is missing"),
    ("target.digest", "1" * 63, "target.digest should be 64 lower-case hex digits"),
    ("target.digest", "A" * 64, "target.digest should be 64"),
    ("target.digest", "1" * 64 + "\n", "target.digest should be 64"),
    ("target.source", "", "target.source should not be empty"),
    ("target.head_dim", 0, "target.head_dim should be at least 1, got 0"),
    ("target.num_layers", 0, "target.num_layers should be at least 1, got 0"),
    ("target.num_layers", 1, "draft.target_layer_ids should be between -1 and 0, got [-1, 1]"),
    ("target.num_kv_heads", 3, "target.num_kv_heads should be a divisor of num_heads 4, got 3"),
    ("target.vocab_size", 33, "drafter.vocab_size should be the target's 33, got 32"),
    ("drafter", None, "drafter should be a record, got null: a refiner needs the drafter"),
    ("refiner", None, "text.refiner_tokenizer should be absent without its model"),
    ("refiner.kind", "eagle", "refiner.kind should be 'xpress' or 'markov', got 'eagle'"),
    ("refiner.source", "", "refiner.source should not be empty"),
    ("refiner.digest", "", "refiner.digest should be 64"),
    ("refiner.rank", 0, "refiner.rank should be at least 1"),
    ("draft", None, "draft should be present"),
    ("draft.block_size", 1, "draft.block_size should be at least 2, got 1"),
    ("draft.block_size", 9, "draft.num_draft_tokens should be 8 (block_size - first_slot), got 7"),
    ("draft.first_slot", 2, "draft.first_slot should be 0 or 1, got 2"),
    ("draft.first_slot", 0, "draft.num_draft_tokens should be 8"),
    ("draft.mask_token_id", 32, "draft.mask_token_id should be below the vocabulary's 32, got 32"),
    ("draft.mask_token_id", -1, "draft.mask_token_id should be at least 0"),
    ("draft.draft_vocab_size", 33, "draft.draft_vocab_size should be at most the vocabulary's 32"),
    ("draft.draft_vocab_size", 0, "draft.draft_vocab_size should be at least 1, got 0"),
    ("draft.draft_vocab_size", 31, "draft.vocab_file should be a file, got null"),
    ("draft.vocab_file", "graphs/draft_vocab.npy", "draft.vocab_file should be null, the drafter has every token"),
    ("draft.vocab_file", "vocab.npy", "draft.vocab_file should be null or 'graphs/draft_vocab.npy'"),
    ("draft.target_layer_ids", [], "draft.target_layer_ids should not be empty"),
    ("draft.target_layer_ids", [2], "draft.target_layer_ids should be between -1 and 1, got [2]"),
    ("draft.refine_passes", 0, "draft.refine_passes should be at least 1 with a refiner, got 0"),
    ("text.folder", "tok", "text.folder should be 'tokenizer', got 'tok'"),
    ("text.fingerprint", "", "text.fingerprint should be 64"),
    ("text.stop_token_ids", [7, 2], "text.stop_token_ids should be ascending token ids, got [7, 2]"),
    ("text.stop_token_ids", [-1], "text.stop_token_ids should be ascending"),
    ("text.drafter_tokenizer", "same", "text.drafter_tokenizer should be null or 'identical' or 'absent'"),
    ("text.refiner_tokenizer", "", "text.refiner_tokenizer should be null or 'identical' or 'absent', got ''"),
    ("text.drafter_tokenizer", None, "text.drafter_tokenizer should be present"),
    ("graphs.refiner", "DELETE", "graphs.refiner should be present"),
    ("graphs.target", "DELETE", "graphs.target should be present"),
    ("graphs.target.file", "graphs/drafter.onnx", "graphs.target.file should be 'graphs/target.onnx'"),
    ("graphs.target.file", "../target.onnx", "graphs.target.file should be a relative path"),
    ("graphs.target.data.0", "graphs/other.data", "graphs.target.data[0] should be listed in files"),
    ("graphs.target.data.0", "/etc/passwd", "graphs.target.data[0] should be a file of graphs/"),
    ("graphs.target.data.0", "tokenizer/text.json", "graphs.target.data[0] should be a file of graphs/"),
    ("graphs.drafter.data.1", "graphs/drafter.data", "graphs.drafter.data should not repeat"),
    ("graphs.target.inputs.1.name", "input_ids", "graphs.target.inputs should not repeat, got 'input_ids'"),
    ("graphs.target.inputs.1.name", "", "graphs.target.inputs[1].name should not be empty"),
    ("graphs.target.outputs", [TOKEN, TOKEN], "graphs.target.outputs should not repeat, got 'next_token' twice"),
    ("graphs.embedder", EMBEDDER, "graphs.embedder is none of target, drafter, refiner"),
    ("graphs.target.inputs.1.dtype", "float16", "graphs.target.inputs[1].dtype should be a type of fp32"),
    ("graphs.target.inputs.1.dtype", "bool", "graphs.target.inputs[1].dtype should be 'int64' or"),
    ("graphs.target.inputs.1.shape.1", 0, "graphs.target.inputs[1].shape[1] should be a positive size"),
    ("graphs.target.inputs.1.shape.0", "", "graphs.target.inputs[1].shape[0] should be a positive size"),
    ("layout", "merged", "layout should be 'split' or 'fused', got 'merged'"),
    ("layout", "split", "cycle.step is none of accept, accept.decomposed"),
    ("cycle.accept", "DELETE", "cycle.accept should be present"),
    ("cycle.step", "DELETE", "cycle.step should be present"),
    ("cycle.'step.decomposed'", "DELETE", "cycle.step.decomposed should be present"),
    ("cycle.'step.int8'", "DELETE", "cycle.step.int8 should be present"),
    ("cycle.'step.int8.decomposed'", "DELETE", "cycle.step.int8.decomposed should be present"),
    ("cycle.embedder", EMBEDDER, "cycle.embedder is none of accept, accept.decomposed, step, step.decomposed"),
    ("cycle.step.file", "graphs/target.onnx", "cycle.step.file should be 'graphs/step.onnx'"),
    ("cycle.step.inputs.1.dtype", "float16", "cycle.step.inputs[1].dtype should be a type of fp32"),
    ("cycle.'step.int8'.outputs", [], "cycle.'step.int8'.outputs should be those of cycle.step"),
    ("engines.0.role", "step", "engines[0].layout should be 'fused', got 'split'"),
    ("engines.0.layout", "fused", "engines[0].layout should be 'split', got 'fused'"),
    ("parity.0.graph", "embedder", "parity[0].graph should be 'target' or 'drafter' or 'refiner'"),
    ("parity.0.against", "", "parity[0].against should not be empty"),
    ("parity.0.value", 0.5, "parity[0].value should be at most the tolerance 0.0001, got 0.5"),
    ("parity.0.value", -0.5, "parity[0].value should be a finite number of at least 0"),
    ("parity.0.rows", 0, "parity[0].rows should be at least 1"),
    ("files.2.num_bytes", -1, "files[2].num_bytes should be at least 0"),
    ("files.2.sha256", "x" * 64, "files[2].sha256 should be 64"),
    ("files.4.path", "manifest.json", "graphs.drafter.data[0] should be listed"),
    ("files.21.path", "tokenizer/texts.json", "files should list tokenizer/text.json"),
    ("files.22.path", "zz", "files should list tokenizer/tokenizer.json"),
    ("files.4.path", "graphs/zz.data", "graphs.drafter.data[0] should be listed in files"),
]


@pytest.mark.parametrize(("where", "value", "message"), CONTRADICTIONS)
def test_contradictions(raw: dict[str, Any], where: str, value: Any, message: str) -> None:
    keys = re.findall(r"'([^']*)'|([^.']+)", where)
    place = tuple(int(key) if key.isdigit() else key for key in (quoted or plain for quoted, plain in keys))
    tampered = without(raw, place) if value == "DELETE" else changed(raw, place, value)
    assert refusal(text_of(tampered, signed=True)).startswith(message)


@pytest.mark.parametrize(
    "path",
    [
        "/abs",
        "../up",
        "graphs/../x",
        "./x",
        "graphs//x",
        "graphs/",
        "a\\b",
        "",
        ".hidden",
        "a\nb",
        "a b",
        "x\n",
    ],
)
def test_paths_that_could_leave_the_bundle(raw: dict[str, Any], path: str) -> None:
    message = refusal(text_of(changed(raw, ("files", 0, "path"), path), signed=True))
    assert message.startswith("files[0].path should be a relative path such as")


def test_files_in_another_order_or_with_the_manifest_itself(raw: dict[str, Any]) -> None:
    raw["files"].reverse()
    assert refusal(text_of(raw, signed=True)).startswith("files should be sorted by path, each file once")
    raw["files"] = sorted([*raw["files"], raw["files"][0] | {"path": "manifest.json"}], key=lambda f: f["path"])
    assert refusal(text_of(raw, signed=True)).startswith("files should not list manifest.json itself")


def test_records_check_themselves_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"^num_kv_heads should be a divisor of num_heads 4, got 3$"):
        model("1", num_kv_heads=3)
    alone = solo(write_files(tmp_path, SOLO_FILES))
    with pytest.raises(BundleError, match=r"^parity\[0\]\.graph should be one of target, accept, got 'drafter'$"):
        dataclasses.replace(alone, parity=(parity("drafter", "the module"),))
    with pytest.raises(BundleError, match=r"^schema should be 4, got 5$"):
        dataclasses.replace(alone, schema=5)


def test_what_a_bundle_has_of_a_cycle(bundle: Path) -> None:
    fused = read_manifest(bundle)
    assert fused.precisions("step") == ("fp32", "int8") and fused.precisions("accept") == ("fp32",)
    for precision, stem in (("fp32", "step"), ("int8", "step.int8")):
        for decomposed, suffix in ((False, ""), (True, ".decomposed")):
            found = fused.graph("step", precision, decomposed=decomposed)
            assert found is not None and found.file == f"graphs/{stem}{suffix}.onnx"
            assert fused.graph("accept", precision, decomposed=decomposed) == fused.cycle[f"accept{suffix}"]
    assert fused.graph("step", "fp8") is None
    stale = {stem: graph for stem, graph in fused.cycle.items() if "int8" not in stem}
    assert dataclasses.replace(fused, cycle=stale).precisions("step") == ("fp32",)
    split = {stem: graph for stem, graph in stale.items() if "accept" in stem}
    assert dataclasses.replace(fused, layout="split", cycle=split).graph("step", "fp32") is None
    alone = {"variants": (), "drafter": None, "refiner": None, "draft": None, "decomposed": {}}
    with pytest.raises(BundleError, match=r"^layout should be 'split' without a drafter, got 'fused'$"):
        text = dataclasses.replace(fused.text, drafter_tokenizer=None, refiner_tokenizer=None)
        graphs = {"target": fused.graphs["target"]}
        dataclasses.replace(fused, **alone, text=text, graphs=graphs, parity=fused.parity[:1], engines=())


def test_the_step_of_what_is_asked(bundle: Path) -> None:
    manifest = read_manifest(bundle)
    for asked, expected in ((None, "fp32"), ("int8", "int8"), ({"target": "int8"}, "int8"), ("fp32", "fp32")):
        assert step_precision(manifest, choose_precisions(manifest, asked)) == expected
    with pytest.raises(
        BundleError, match=r"no fused step of target=fp8, drafter=fp32, refiner=fp32 \(it has fp32, int8\)"
    ):
        step_precision(manifest, {"target": "fp8", "drafter": "fp32", "refiner": "fp32"})
    split = {stem: graph for stem, graph in manifest.cycle.items() if "accept" in stem}
    with pytest.raises(BundleError, match="no fused step; build one with `xpress-export build --layout fused`"):
        step_precision(dataclasses.replace(manifest, layout="split", cycle=split), {})


def test_other_schema(raw: dict[str, Any]) -> None:
    newer = raw | {"schema": 5, "servers": [], "tool": {"xpress-export": "9.0"}}
    message = refusal(text_of(newer, signed=True))
    assert message.startswith("schema should be 4, the only one this version of xpress-export reads, got 5")
    assert "written by version '9.0'" in message
    assert refusal(text_of(raw | {"schema": True}, signed=True)).startswith("schema should be an integer")
    assert refusal(text_of(raw | {"schema": 5, "tool": 1}, signed=True)).startswith("schema should be 4")


# Text that is no manifest


def test_truncated_anywhere(bundle: Path) -> None:
    text = (bundle / "manifest.json").read_text()
    for end in [*range(0, len(text) - 2, 37), len(text) - 2]:
        assert refusal(text[:end]).startswith(("the file is cut short", "this is not valid JSON"))
    assert refusal("").startswith("the file is cut short")
    Manifest.from_json(text.rstrip(), "m.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "one JSON object was expected, got a list"),
        ("null", "one JSON object was expected, got null"),
        ('{"schema": 4, "schema": 4}', "this is not valid JSON (an object repeats one of its keys"),
        ('{"schema": NaN}', "this is not valid JSON (NaN is no JSON number)"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", "this is not valid JSON (maximum recursion depth"),
        ('{"schema": ' + "1" * 5000 + "}", "this is not valid JSON"),
        ("{}", "schema is missing"),
        ('{"schema": 4}', "digest is missing"),
        ('\ufeff{"schema": 1}', "this is not valid JSON"),
    ],
)
def test_not_a_manifest(text: str, message: str) -> None:
    assert refusal(text).startswith(message)


def test_number_too_large_for_a_float(raw: dict[str, Any]) -> None:
    text = text_of(raw, signed=True).replace("1e-06", "1e999", 1)
    assert refusal(text).startswith("parity[0].value should be a finite number of at least 0, got inf")


def test_writing_what_would_not_read_back(bundle: Path) -> None:
    before = (bundle / "manifest.json").read_bytes()
    wrong = dataclasses.replace(trio(bundle), max_context=64.0)  # type: ignore[arg-type]
    with pytest.raises(BundleError, match=r"max_context should be an integer, got 64\.0"):
        write_manifest(bundle, wrong)
    assert (bundle / "manifest.json").read_bytes() == before


def test_writing_leaves_the_old_file_to_its_readers(bundle: Path) -> None:
    os.link(bundle / "manifest.json", bundle / "reader")
    before = (bundle / "reader").read_bytes()
    write_manifest(bundle, dataclasses.replace(read_manifest(bundle), preset="other"))
    assert read_manifest(bundle).preset == "other"
    assert (bundle / "reader").read_bytes() == before


def test_writing_fails_cleanly(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(os.listdir(bundle))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "sync", full)
    with pytest.raises(ExportError, match=r"manifest\.json cannot be written: No space left on device"):
        write_manifest(bundle, read_manifest(bundle))
    assert sorted(os.listdir(bundle)) == before


# Folders that are no bundle


def unreadable(folder: Path) -> str:
    with pytest.raises(BundleError) as caught:
        read_manifest(folder)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message
    return message.replace(str(folder), "F")


def test_folders_that_are_no_bundle(tmp_path: Path, bundle: Path) -> None:
    assert unreadable(tmp_path / "none").startswith("F does not exist; give the folder of a bundle")
    assert unreadable(bundle / "manifest.json").startswith("F is not a bundle's folder; give the folder that")
    assert unreadable(bundle / "graphs" / "target.onnx").startswith("F is a file, but a bundle is a folder with")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert unreadable(empty).startswith("F has no manifest.json, but a bundle is a folder with manifest.json,")
    (empty / "manifest.json").mkdir()
    assert unreadable(empty).startswith("F has no manifest.json")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "q8.gguf", "last.pt"])
def test_checkpoint_given_as_a_bundle(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    message = unreadable(tmp_path)
    assert message.startswith("F is a checkpoint, not a bundle; build a bundle from it first with `xpress-export")


def test_manifest_that_cannot_be_read(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bundle / "manifest.json").write_bytes(b'{"schema": "\xff"}')
    assert "manifest.json is not UTF-8 text (invalid start byte at byte 12)" in unreadable(bundle)

    def denied(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    assert "manifest.json cannot be read: Permission denied; check its permissions" in unreadable(bundle)


# Tampering with the files


def rejected(bundle: Path) -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(bundle)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(bundle), "F")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
def test_every_file_tampered_with(bundle: Path, tmp_path: Path, name: str) -> None:
    path, data = bundle / name, FILES[name]
    size, sha256 = len(data), hashlib.sha256(data).hexdigest()
    path.write_bytes(data[:-1])
    assert rejected(bundle).startswith(f"F/{name} should have {size} bytes, got {size - 1}; copy the bundle")
    path.write_bytes(data + b"\0")
    assert rejected(bundle).startswith(f"F/{name} should have {size} bytes, got {size + 1}; ")
    flip(path)
    path.write_bytes(data)
    flip(path)
    assert rejected(bundle).startswith(f"F/{name} should have sha256 {sha256}, got ")
    path.unlink()
    assert rejected(bundle).startswith(f"F/{name} cannot be opened: No such file or directory; ")
    path.mkdir()
    assert rejected(bundle).startswith(f"F/{name} is not a regular file")
    path.rmdir()
    path.write_bytes(data)
    open_bundle(bundle)


@pytest.mark.parametrize("name", FILES)
def test_every_file_replaced_by_a_link(bundle: Path, tmp_path: Path, name: str) -> None:
    path = bundle / name
    outside = shutil.move(path, tmp_path / "outside")
    path.symlink_to(outside)
    assert rejected(bundle).startswith(f"F/{name} is a link to {outside}, outside the bundle")
    path.unlink()
    path.symlink_to(path.name)
    assert rejected(bundle).startswith(f"F/{name} cannot be opened: Too many levels of symbolic links")
    path.unlink()
    shutil.move(outside, bundle / "moved")
    path.symlink_to("../moved")
    open_bundle(bundle)  # a link that stays inside is no escape


def test_folder_replaced_by_a_link(bundle: Path, tmp_path: Path) -> None:
    shutil.move(bundle / "graphs", tmp_path / "graphs")
    (bundle / "graphs").symlink_to(tmp_path / "graphs")
    assert "outside the bundle" in rejected(bundle)


def test_bundle_reached_through_a_link(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(bundle)
    open_bundle(tmp_path / "latest")


@pytest.mark.parametrize("name", ["graphs/extra.data", "tokenizer/.hidden", "graphs/deep/er/file"])
@pytest.mark.parametrize("kind", ["file", "link", "folder link", "fifo"])
def test_unlisted_files(bundle: Path, name: str, kind: str) -> None:
    path = bundle / name
    path.parent.mkdir(parents=True, exist_ok=True)
    make = {
        "file": lambda: path.write_text(""),
        "link": lambda: path.symlink_to("nowhere"),
        "folder link": lambda: path.symlink_to(bundle),
        "fifo": lambda: os.mkfifo(path),
    }
    make[kind]()
    assert rejected(bundle).startswith(f"F holds '{name}', not listed in its manifest; remove that file")


def test_the_first_difference_is_the_one_named(bundle: Path) -> None:
    for name in ("graphs/refiner.data", "graphs/target.data", "tokenizer/text.json"):
        flip(bundle / name)
    assert rejected(bundle).startswith("F/graphs/refiner.data should have sha256")
    flip(bundle / "graphs/refiner.data")
    assert rejected(bundle).startswith("F/graphs/target.data should have sha256")
    (bundle / "tokenizer/text.json").unlink()
    assert rejected(bundle).startswith("F/tokenizer/text.json cannot be opened")


def test_files_that_cannot_be_read(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise OSError(5, "Input/output error")

    manifest = read_manifest(bundle)
    monkeypatch.setattr(module._Reporting, "readinto", denied)
    with pytest.raises(BundleError, match=r"json cannot be read: Input/output error"):
        verify_files(bundle, manifest)
    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(BundleError, match=r"graphs cannot be listed: Input/output error"):
        verify_files(bundle, manifest)


def test_recording_refuses_what_a_bundle_cannot_hold(bundle: Path) -> None:
    (bundle / "graphs" / "link.data").symlink_to("target.data")
    with pytest.raises(BundleError, match=r"link\.data is not a regular file, which a bundle cannot hold"):
        record_files(bundle)
    (bundle / "graphs" / "link.data").rename(bundle / "graphs" / "spaces in it")
    (bundle / "graphs" / "spaces in it").unlink()
    (bundle / "graphs" / "spaces in it").touch()
    with pytest.raises(BundleError, match=r"path should be a relative path .*, got 'graphs/spaces in it'"):
        record_files(bundle)
