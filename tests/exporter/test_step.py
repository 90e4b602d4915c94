"""The graphs of a cycle: what they decide, that a step is its parts, that a host which decides nothing is lossless."""

from __future__ import annotations

import dataclasses
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from xpress_export import names
from xpress_export.calibration.calibrate import CalibrateOptions, calibrate, save_scales
from xpress_export.calibration.quantize import QuantizeOptions, quantize
from xpress_export.cli import cli
from xpress_export.errors import ExportError, ParityError
from xpress_export.exporter import cycle as cycle_module
from xpress_export.exporter.cycle import add_steps
from xpress_export.exporter.fuse import fuse_step
from xpress_export.exporter.parity import Check, GraphRunner, check_accept
from xpress_export.exporter.step_check import SplitCycle, check_step
from xpress_export.manifest import Manifest, open_bundle, read_manifest, write_manifest
from xpress_export.records import graph_stem
from xpress_export.runtime.kernels import lower

DRAFTING = ("tiny", "anchored", "dflash")
Cycle = Callable[..., dict[str, Tensor]]


def parts_of(bundle: Path, precision: str = "fp32", decomposed: bool = False) -> dict[str, Path]:
    manifest = read_manifest(bundle)
    chosen = {role: precision if precision in manifest.precisions(role) else "fp32" for role in manifest.roles}
    graphs = {role: manifest.graph(role, p, decomposed=decomposed) for role, p in {**chosen, "accept": "fp32"}.items()}
    return {role: bundle / graph.file for role, graph in graphs.items() if graph is not None}


def step_of(bundle: Path, precision: str = "fp32", decomposed: bool = False) -> onnx.ModelProto:
    record = read_manifest(bundle).graph(names.STEP, precision, decomposed=decomposed)
    assert record is not None
    return onnx.load(bundle / record.file, load_external_data=False)


# Token identity


@dataclasses.dataclass
class Slot:
    """A slot as a host sees it: a prompt to hand over, then tokens to collect."""

    prompt: list[int]
    waits: int  # cycles before its request comes
    written: list[int] = dataclasses.field(default_factory=list)


def generate(cycle: Cycle, manifest: Manifest, slots: list[Slot], num_tokens: int, right: list[list[int]]) -> list[Any]:
    """Feed a cycle back into itself until every slot wrote `num_tokens`; returns the integers of every cycle.

    right: where not empty, what a host puts in place of every second block's drafts: the tokens after each prompt.
    """
    assert manifest.draft is not None
    width, log = 1 + manifest.draft.num_draft_tokens, []
    masks = torch.full((len(slots), manifest.draft.block_size), manifest.draft.mask_token_id)
    ids = torch.zeros(len(slots), width, dtype=torch.int64)
    given, index = torch.zeros(2, len(slots), dtype=torch.int64)
    while any(len(slot.written) < num_tokens for slot in slots):
        may = torch.full((len(slots),), width - 1)
        last = [len(slot.prompt) - int(index[n]) <= width for n, slot in enumerate(slots)]
        for n, slot in enumerate(slots):
            chunk = slot.prompt[int(index[n]) :][:width]
            if len(log) < slot.waits or len(slot.written) >= num_tokens:
                given[n] = 0
            elif chunk:
                ids[n, : len(chunk)], given[n], may[n] = torch.tensor(chunk), len(chunk), 0
            elif right and len(log) % 2:
                drafts = right[n][len(slot.written) :][: width - 1]
                ids[n, 1 : 1 + len(drafts)] = torch.tensor(drafts)
        out = cycle(input_ids=ids, num_given=given, max_accept=may, write_index=index, block_ids=masks)
        log.append({name: value.tolist() for name, value in out.items() if not value.is_floating_point()})
        for n, slot in enumerate(slots):
            count = int(out[names.NUM_COMMITTED][n])
            assert count == 0 if given[n] == 0 else given[n] <= count <= given[n] + may[n]
            if given[n] and last[n]:  # the prompt is in: accepted drafts and the anchor are text
                slot.written += [*ids[n, int(given[n]) : count].tolist(), int(out[names.NEXT_IDS][n, 0])]
        ids, index, given = (out[name].clone() for name in (names.NEXT_IDS, names.NEXT_WRITE_INDEX, names.NEXT_GIVEN))
    return log


@pytest.mark.parametrize("helped", [False, True])
@pytest.mark.parametrize("name", DRAFTING)
def test_a_host_that_decides_nothing_is_lossless(bundle_of: Any, stories: Any, name: str, helped: bool) -> None:
    """A slot that decodes, one that still reads its prompt, and one that is idle at first, in every cycle."""
    bundle, story, num_tokens = bundle_of(name, "fused"), stories[0], 14
    manifest, passes = read_manifest(bundle), read_manifest(bundle).draft.refine_passes
    lengths = (5, 27, 11)
    right = [story.expected(length, 40) for length in lengths] if helped else []
    logs, cycles = [], []
    for cycle in (
        SplitCycle(parts_of(bundle), passes, 3, 64),
        GraphRunner(bundle / "graphs" / "step.onnx", 3),
    ):
        slots = [Slot(story.ids[:length], waits) for length, waits in zip(lengths, (0, 0, 6), strict=True)]
        logs.append(generate(cycle, manifest, slots, num_tokens, right))
        for slot, length in zip(slots, lengths, strict=True):
            assert slot.written[:num_tokens] == story.expected(length, num_tokens)
        cycles.append(len(logs[-1]))
    assert logs[0] == logs[1]
    assert not helped or cycles[1] < 6 + num_tokens, "drafts were accepted"


def test_no_more_is_accepted_than_may_be(bundle_of: Any, stories: Any) -> None:
    """A host that has room for two tokens more says so, and the cycle stops there though more drafts are right."""
    story, step = stories[0], GraphRunner(bundle_of("tiny", "fused") / "graphs" / "step.onnx", 1)
    masks, one = torch.full((1, 8), 317), torch.tensor([1])
    step(
        input_ids=torch.tensor([story.ids[:20]]),
        num_given=torch.tensor([20]),
        max_accept=torch.tensor([0]),
        write_index=torch.tensor([0]),
        block_ids=masks,
    )
    for most, expected in ((0, 1), (2, 3), (7, 8)):
        feeds = {"input_ids": torch.tensor([story.ids[20:28]]), "num_given": one, "max_accept": torch.tensor([most])}
        out = step(**feeds, write_index=torch.tensor([20]), block_ids=masks)
        assert int(out[names.NUM_COMMITTED]) == expected and int(out[names.NEXT_WRITE_INDEX]) == 20 + expected
        assert int(out[names.NEXT_IDS][0, 0]) == story.ids[20 + expected]


# What a step is made of


@pytest.mark.parametrize("decomposed", [False, True])
@pytest.mark.parametrize("name", DRAFTING)
def test_bindings_are_those_of_the_table(bundle_of: Any, name: str, decomposed: bool) -> None:
    bundle = bundle_of(name, "fused", **({"lowering": "decomposed"} if decomposed else {}))
    manifest, model = read_manifest(bundle), step_of(bundle, decomposed=decomposed)
    layers = {"": manifest.target.num_layers, "draft_": manifest.drafter.num_layers}
    caches = [(f"{whose}{{}}_{kind}_{i}") for whose, n in layers.items() for i in range(n) for kind in ("key", "value")]
    rows, slots = ["B", "S"], "N" if manifest.draft.first_slot else "N+1"
    inputs = {"input_ids": rows, "num_given": ["B"], "max_accept": ["B"], "write_index": ["B"], "block_ids": ["B", "N"]}
    outputs = {"next_token": rows, "num_committed": ["B"], "next_ids": ["B", slots], "next_given": ["B"]}
    outputs["next_write_index"] = ["B"]
    record = manifest.cycle[graph_stem(names.STEP, decomposed=decomposed)]
    for values, wanted, side, recorded in (
        (model.graph.input, inputs, "past", record.inputs),
        (model.graph.output, outputs, "present", record.outputs),
    ):
        wanted |= {cache.format(side): ["B", 2, "C", 16] for cache in caches}
        got = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}
        assert got == wanted and list(got) == list(wanted)
        assert {tensor.name: list(tensor.shape) for tensor in recorded} == wanted
    onnx.checker.check_model(str(bundle / record.file))


@pytest.mark.parametrize("name", DRAFTING)
def test_what_parts_share_is_there_once(bundle_of: Any, name: str) -> None:
    bundle = bundle_of(name, "fused")
    manifest, model = read_manifest(bundle), step_of(bundle)
    places = Counter(
        tuple(entry.value for entry in tensor.external_data)
        for tensor in model.graph.initializer
        if tensor.external_data
    )
    assert set(places.values()) == {1}
    of_parts = set()
    for path in parts_of(bundle).values():
        part = onnx.load(path, load_external_data=False)
        of_parts |= {tuple(e.value for e in t.external_data) for t in part.graph.initializer if t.external_data}
    assert places.keys() == of_parts
    files = {f"graphs/{location}" for location, *_ in places}
    assert files == set(manifest.cycle["step"].data) <= {file.path for file in manifest.files}
    readers = Counter(name for node in model.graph.node for name in node.input)
    kinds = Counter(node.op_type for node in model.graph.node)
    assert kinds["TensorScatter"] == 2 * (manifest.target.num_layers + manifest.drafter.num_layers)
    if manifest.refiner:  # of the refiner's work each pass does what depends on its tokens
        (head,) = (t.name for t in model.graph.initializer if t.name.startswith("refiner") and "w1" in t.name)
        (down,) = (t.name for t in model.graph.initializer if t.name.startswith("refiner") and "down_h" in t.name)
        assert readers[head] == manifest.draft.refine_passes == 3 and readers[down] == 1


def test_parts_of_two_lowerings_are_refused(bundle_of: Any) -> None:
    bundle = bundle_of("tiny", "fused", lowering="decomposed")
    mixed = {**parts_of(bundle), "drafter": parts_of(bundle, decomposed=True)["drafter"]}
    with pytest.raises(ExportError, match=r"drafter\.decomposed\.onnx has opset 19, .* mixed lowerings"):
        fuse_step(mixed, 1, 3)


# The checks of a build


def test_what_parity_is_recorded_of_a_cycle(bundle_of: Any) -> None:
    manifest = open_bundle(bundle_of("tiny", "fused", lowering="decomposed"))
    found = [(check.graph, check.measure, check.against) for check in manifest.parity[-6:]]
    measures = [
        ("accept", "share of wrong slots"),
        *(("step", m) for m in ("share of wrong slots", "relative error of caches")),
    ]
    against = {"accept": "its definition", "step": "the graphs of its parts"}
    expected = [(*measure, against[measure[0]] + form) for form in ("", " (decomposed)") for measure in measures]
    assert found == expected and all(check.value == 0 for check in manifest.parity if check.graph == "accept")


@pytest.mark.parametrize(
    ("op", "other"),
    [("Less", "LessOrEqual"), ("Greater", "GreaterOrEqual"), ("Equal", "LessOrEqual"), ("ReduceMin", "ReduceMax")],
)
def test_an_accept_that_decides_otherwise_is_refused(tiny_bundle: Path, tmp_path: Path, op: str, other: str) -> None:
    model = onnx.load(tiny_bundle / "graphs" / "accept.onnx")
    nodes = [node for node in model.graph.node if node.op_type == op]
    assert nodes
    for node in nodes:
        node.op_type = other
        onnx.save(model, tmp_path / "accept.onnx")
        with pytest.raises(ParityError, match="the accept graph does not reproduce its definition"):
            check_accept(tmp_path / "accept.onnx")
        node.op_type = op
    onnx.save(model, tmp_path / "accept.onnx")
    assert check_accept(tmp_path / "accept.onnx").value == 0


def forget_the_anchor(model: onnx.ModelProto) -> None:
    """The drafter reads slot 0 of the block as the host gave it."""
    (block,) = (n for n in model.graph.node if n.name.startswith("step") and n.op_type == "Concat" and is_inside(n))
    for node in model.graph.node:
        node.input[:] = [names.BLOCK_IDS if name == block.output[0] else name for name in node.input]


def is_inside(node: onnx.NodeProto) -> bool:
    return names.NEXT_IDS not in node.output


def write_after_what_was_committed(model: onnx.ModelProto) -> None:
    """The drafter's first cache gets its rows where the next cycle's belong."""
    node = next(n for n in model.graph.node if n.name.startswith("drafter") and n.op_type == "TensorScatter")
    node.input[2] = names.NEXT_WRITE_INDEX


def swap_the_tokens_before_the_block(model: onnx.ModelProto) -> None:
    """The refiner's anchor and the token before it, which the first slots read."""
    node = next(n for n in model.graph.node if n.name.startswith("refiner") and n.op_type == "Concat")
    assert len(node.input) >= 2
    node.input[:2] = list(node.input[:2])[::-1]


def leave_a_pass_out(model: onnx.ModelProto) -> None:
    out = next(n for n in model.graph.node if names.NEXT_IDS in n.output)
    before = {name: node for node in model.graph.node for name in node.output}
    last = [node for node in model.graph.node if node.op_type == "ArgMax" and node.name.startswith("refiner")]
    assert before[out.input[1]] is last[-1] and len(last) == 3
    out.input[1] = last[-2].output[0]


@pytest.mark.parametrize(
    "change",
    [forget_the_anchor, write_after_what_was_committed, swap_the_tokens_before_the_block, leave_a_pass_out],
)
def test_a_step_wired_otherwise_is_refused(
    bundle_of: Any, tmp_path: Path, change: Callable[[onnx.ModelProto], None]
) -> None:
    folder = Path(shutil.copytree(bundle_of("tiny", "fused"), tmp_path / "bundle"))
    draft, parts, path = read_manifest(folder).draft, parts_of(folder), folder / "graphs" / "step.onnx"
    assert all(check.value == 0 for check in check_step(path, parts, draft, "fp32"))
    model = onnx.load(path, load_external_data=False)
    change(model)
    onnx.save(model, path)
    with pytest.raises(ParityError, match="the step graph does not reproduce the graphs of its parts"):
        check_step(path, parts, draft, "fp32")


# Quantized models


@pytest.fixture(scope="module")
def quantized(bundle_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fused bundle, both lowerings, with target and drafter in int8, one in fp8, the other in int4-weight."""
    original = bundle_of("tiny", "fused", lowering="decomposed")
    folder = Path(shutil.copytree(original, tmp_path_factory.mktemp("steps") / "bundle"))
    options = CalibrateOptions(prompts=None, samples=1, max_new_tokens=8, allow_dead=True, num_threads=1)
    save_scales(folder, calibrate(folder, options), None)
    quantize(folder, QuantizeOptions(precision="int8", smoothquant=0.5))
    quantize(folder, QuantizeOptions(precision="fp8", drafter="none"))
    quantize(folder, QuantizeOptions(precision="int4-weight", target="none"))
    assert read_manifest(folder).precisions(names.STEP) == ("fp32",)
    add_steps(folder)
    return folder


def test_steps_of_quantized_models(quantized: Path) -> None:
    manifest = open_bundle(quantized)
    assert manifest.precisions(names.STEP) == ("fp32", "fp8", "int8", "int4-weight")
    stems = {graph_stem(role, p, decomposed=d) for d in (False, True) for role, p in STEPS}
    assert set(manifest.cycle) == stems
    before = (quantized / "manifest.json").read_bytes()
    assert add_steps(quantized) == manifest and (quantized / "manifest.json").read_bytes() == before
    for precision, roles in (("int8", ("target", "drafter")), ("fp8", ("target",)), ("int4-weight", ("drafter",))):
        parts = {role: quantized / manifest.graph(role, precision).file for role in roles}
        counts = Counter()
        for path in parts.values():
            counts += Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)
        step = step_of(quantized, precision)
        merged = Counter(node.op_type for node in step.graph.node)
        for op in ("QuantizeLinear", "DequantizeLinear"):
            assert merged[op] == counts[op]
            assert merged[op] > 0 or (op, precision) == ("QuantizeLinear", "int4-weight")
        codes = [name for node in step.graph.node if node.op_type == "DequantizeLinear" for name in node.input[:1]]
        assert len(set(codes)) == len(codes), "a name for what each product dequantizes"


STEPS = (("accept", None), ("step", None), ("step", "int8"), ("step", "fp8"), ("step", "int4-weight"))


def test_every_step_that_is_added_is_checked(quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every precision and lowering, on ONNX Runtime: one that is not its parts is refused, and nothing is added."""
    folder = Path(shutil.copytree(quantized, tmp_path / "bundle"))
    manifest, checked = read_manifest(folder), []
    added = {f"step.{p}{form}" for p in ("int8", "fp8", "int4-weight") for form in ("", ".decomposed")}
    kept = {stem: graph for stem, graph in manifest.cycle.items() if stem not in added}
    files = tuple(file for file in manifest.files if Path(file.path).stem not in added)
    write_manifest(folder, dataclasses.replace(manifest, cycle=kept, files=files))
    before = (folder / "manifest.json").read_bytes()

    def check(path: Path, *rest: Any) -> list[Check]:
        checked.append(path.stem)
        found = check_step(path, *rest)
        assert all(check.value == 0 for check in found)
        if len(checked) == len(added):
            raise ParityError("the last one is wrong")
        return found

    monkeypatch.setattr(cycle_module, "check_step", check)
    with pytest.raises(ParityError, match="the last one is wrong"):
        add_steps(folder)
    assert sorted(checked) == sorted(added) and (folder / "manifest.json").read_bytes() == before


def test_all_activations_of_a_step_have_one_zero_point(quantized: Path) -> None:
    """By the name and the bytes that the runtime looks for, so that it can run a step on its fast kernels."""
    for decomposed in (False, True):
        model = step_of(quantized, "int8", decomposed)
        zeros = {name for node in model.graph.node if node.op_type == "QuantizeLinear" for name in node.input[2:]}
        assert zeros == {names.ACTIVATION_ZERO}
        assert [t.name for t in model.graph.initializer].count(names.ACTIVATION_ZERO) == 1
        data = model.SerializeToString()
        lowered, config = lower(data)
        assert config or len(lowered) == len(data), "one pattern was found, or the machine multiplies in float"
    record = read_manifest(quantized).graph(names.STEP, "int8")
    text = (quantized / record.file).read_bytes()
    assert text.count(names.ACTIVATION_ZERO.encode() + b"J\x01\x00") == 1


def test_quantizing_again_replaces_the_step(quantized: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(quantized, tmp_path / "bundle"))
    before = read_manifest(folder)
    done = CliRunner().invoke(cli, ["quantize", str(folder), "--precision", "int8", "--skip", "layers.0.*"])
    assert done.exit_code == 0, done.output
    after = open_bundle(folder)
    shas = [{file.path: file.sha256 for file in manifest.files} for manifest in (before, after)]
    changed = {path for path in shas[0] if shas[0][path] != shas[1].get(path)}
    assert {"graphs/step.int8.onnx", "graphs/step.int8.decomposed.onnx", "graphs/target.int8.onnx"} <= changed
    assert not any("fp8" in path or path in {"graphs/step.onnx", "graphs/accept.onnx"} for path in changed)
    quantize(folder, QuantizeOptions(precision="int8", target="none"))
    stale = open_bundle(folder)
    assert stale.precisions(names.STEP) == ("fp32", "fp8", "int4-weight")
    assert not (folder / "graphs" / "step.int8.onnx").exists()


def test_a_quantized_step_generates_what_its_parts_do(quantized: Path, stories: Any) -> None:
    manifest, story = read_manifest(quantized), stories[0]
    logs = []
    for cycle in (
        SplitCycle(parts_of(quantized, "int8"), manifest.draft.refine_passes, 2, 64),
        GraphRunner(quantized / "graphs" / "step.int8.onnx", 2),
    ):
        slots = [Slot(story.ids[:5], 0), Slot(story.ids[:20], 2)]
        logs.append(generate(cycle, manifest, slots, 10, []))
    assert logs[0] == logs[1]
