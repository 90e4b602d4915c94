"""Every parity check can fail: any wrong weight, tap, position, mask or mixer, and then there is no bundle."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
import torch

from xpress_export import names
from xpress_export.errors import ParityError
from xpress_export.exporter import export as export_module
from xpress_export.exporter import parity
from xpress_export.exporter.export import read_trio
from xpress_export.exporter.modules import Refiner
from xpress_export.exporter.reference import reference_from_checkpoint
from xpress_export.manifest import open_bundle


@pytest.fixture(scope="module")
def checks(tiny_trio: Any) -> dict[str, Callable[[Path], Any]]:
    """The three checks of the tiny bundle, each a function of the graphs' folder."""
    trio = read_trio(tiny_trio.options())
    reference = reference_from_checkpoint(trio.target)
    drafter = tiny_trio.drafter_module
    refiner = export_module._filled(
        Refiner(trio.refiner.config), lambda name: export_module._refiner_source(trio.refiner, trio.drafter, name)
    )
    return {
        "target": lambda folder: parity.check_target(
            folder / "target.onnx", reference, trio.target.config, trio.taps, "fp32"
        ),
        "drafter": lambda folder: parity.check_drafter(folder / "drafter.onnx", drafter, trio.drafter.config, "fp32"),
        "refiner": lambda folder: parity.check_refiner(folder / "refiner.onnx", refiner, "fp32"),
    }


@pytest.fixture
def graph_folder(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny bundle's graphs."""
    return Path(shutil.copytree(tiny_bundle / "graphs", tmp_path / "graphs"))


def test_unchanged_graphs_pass(checks: Any, graph_folder: Path) -> None:
    for check in checks.values():
        assert all(result.value <= result.tolerance for result in check(graph_folder))


@pytest.mark.parametrize("role", ["target", "drafter", "refiner"])
def test_one_wrong_byte_in_any_weight_fails(checks: Any, graph_folder: Path, role: str) -> None:
    """The exponent of one number of each weight; of every row in tables of which a check reads only some."""
    model = onnx.load(graph_folder / f"{role}.onnx", load_external_data=False)
    weights = [tensor for tensor in model.graph.initializer if tensor.external_data]
    assert len(weights) == {"target": 37, "drafter": 28, "refiner": 9}[role]
    for tensor in weights:
        lies = {entry.key: entry.value for entry in tensor.external_data}
        path, end = graph_folder / lies["location"], int(lies["offset"]) + int(lies["length"])
        original = path.read_bytes()
        is_table = tensor.name.endswith(("embed_tokens.weight", "w1.weight"))
        changed = bytearray(original)
        for row in range(tensor.dims[0] if is_table else 1):
            changed[end - 1 - row * 4 * tensor.dims[-1]] ^= 0x40
        path.write_bytes(changed)
        with pytest.raises(ParityError, match=f"the {role} graph does not reproduce"):
            checks[role](graph_folder)
            pytest.fail(f"{tensor.name} may be anything")
        path.write_bytes(original)


def swap_taps(model: Any) -> None:
    concat = next(n for n in model.graph.node if names.TARGET_HIDDEN in n.output)
    concat.input[:] = list(concat.input)[::-1]


def tap_the_layer_before(model: Any) -> None:
    """Taps (1, 0) become (0, 0)."""
    concat = next(n for n in model.graph.node if names.TARGET_HIDDEN in n.output)
    concat.input[0] = concat.input[1]


def shift_tokens(model: Any) -> None:
    """Every predicted token one too high."""
    node = next(n for n in model.graph.node if names.NEXT_TOKEN in n.output)
    node.output[:] = ["unshifted"]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1), "shift_one"))
    model.graph.node.append(onnx.helper.make_node("Add", ["unshifted", "shift_one"], [names.NEXT_TOKEN]))


def shift_positions(which: int) -> Callable[[Any], None]:
    """Positions of the context (0) or of the block (1), one too high, for the rotary embedding only."""

    def edit(model: Any) -> None:
        casts = [n for n in model.graph.node if n.op_type == "Cast" and n.attribute[0].i == onnx.TensorProto.FLOAT]
        positions = casts[which].output[0]
        for node in model.graph.node:
            node.input[:] = ["shifted" if name == positions else name for name in node.input]
        one = onnx.numpy_helper.from_array(np.float32([1]), "shift_one")
        model.graph.initializer.append(one)
        at = list(model.graph.node).index(casts[which]) + 1
        model.graph.node.insert(at, onnx.helper.make_node("Add", [positions, "shift_one"], ["shifted"]))

    return edit


def replace_operator(old: str, new: str) -> Callable[[Any], None]:
    def edit(model: Any) -> None:
        found = [node for node in model.graph.node if node.op_type == old]
        assert found
        for node in found:
            node.op_type = new

    return edit


def nan_in_the_last_call(model: Any) -> None:
    """Add 0 * sqrt(19 - write_index), which the checks' last call, at row 20, makes a NaN."""
    output = next(n for n in model.graph.node if names.TARGET_HIDDEN in n.output).output
    output[:] = ["without_nan"]
    added = onnx.parser.parse_graph(f"""
        nan (int64[B] {names.WRITE_INDEX}, float[B, S, K] without_nan) => (float[B, S, K] {names.TARGET_HIDDEN})
        <int64 limit = {{19}}, float nothing = {{0}}, int64[2] axes = {{1, 2}}>
        {{
            left = Sub(limit, {names.WRITE_INDEX})
            left_float = Cast<to = 1>(left)
            root = Sqrt(left_float)
            zero_or_nan = Mul(root, nothing)
            column = Unsqueeze(zero_or_nan, axes)
            {names.TARGET_HIDDEN} = Add(without_nan, column)
        }}""")
    model.graph.node.extend(added.node)
    model.graph.initializer.extend(added.initializer)


def unfold_mixer(model: Any) -> None:
    """What a loader that forgets the identity leaves: subtract it again."""
    tensor = next(t for t in model.graph.initializer if t.name == "mix.folded")
    slots = tensor.dims[-1]
    identity = onnx.numpy_helper.from_array(np.eye(slots, dtype=np.float32), "identity")
    model.graph.initializer.append(identity)
    for node in model.graph.node:
        node.input[:] = ["unfolded" if name == "mix.folded" else name for name in node.input]
    model.graph.node.insert(0, onnx.helper.make_node("Sub", ["mix.folded", "identity"], ["unfolded"]))


EDITS = {
    "taps swapped": ("target", swap_taps, "relative error"),
    "tap of the layer before": ("target", tap_the_layer_before, "relative error"),
    "NaN in the last call": ("target", nan_in_the_last_call, "relative error"),
    "tokens shifted": ("target", shift_tokens, "share of wrong tokens"),
    "a token does not see itself": ("target", replace_operator("LessOrEqual", "Less"), "share of wrong tokens"),
    "context positions": ("drafter", shift_positions(0), "share of wrong tokens"),
    "block positions": ("drafter", shift_positions(1), "share of wrong tokens"),
    "the block sees a row too many": ("drafter", replace_operator("Less", "LessOrEqual"), "share of wrong tokens"),
    "mixer without identity": ("refiner", unfold_mixer, "share of wrong tokens"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_wrong_graph_fails(checks: Any, graph_folder: Path, edit: str) -> None:
    role, change, measure = EDITS[edit]
    path = graph_folder / f"{role}.onnx"
    model = onnx.load(path, load_external_data=False)
    change(model)
    onnx.save(model, path)
    with pytest.raises(ParityError, match=f"the {role} graph does not reproduce .*: {measure} is .* allowed"):
        checks[role](graph_folder)


def test_a_check_that_compares_nothing_fails() -> None:
    """NaN logits, or none that are clear, are no evidence."""
    got = torch.zeros(2, 2, dtype=torch.int64)
    for logits in (torch.full((2, 2, 5), torch.nan), torch.zeros(2, 2, 5)):
        value = parity.token_mismatch([(got, logits)], 1e-4)
        with pytest.raises(ParityError):
            parity.Check("target", "nothing", "share of wrong tokens", value, 0.0, 4).require()


def unfolded(raw: torch.Tensor) -> torch.Tensor:
    return raw


@pytest.fixture
def break_export(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make the next exports go wrong between tracing and checking, one way or another."""
    write = export_module._write_graphs

    def corrupted(role: str) -> Callable[..., Any]:
        def write_and_corrupt(trio: Any, options: Any, folder: Path, progress: Any) -> Any:
            records = write(trio, options, folder, progress)
            data = bytearray((folder / f"{role}.data").read_bytes())
            data[-1] ^= 0x40
            (folder / f"{role}.data").write_bytes(data)
            return records

        return write_and_corrupt

    def apply(how: str) -> None:
        if how == "mixer":
            monkeypatch.setattr(export_module, "fold_mixer", unfolded)
        else:
            monkeypatch.setattr(export_module, "_write_graphs", corrupted(how))

    return apply


@pytest.mark.parametrize("how", ["target", "drafter", "refiner", "mixer"])
def test_a_failed_check_leaves_no_bundle(
    tiny_trio: Any, re_export: Any, break_export: Any, tmp_path: Path, how: str
) -> None:
    break_export(how)
    role = "refiner" if how == "mixer" else how
    with pytest.raises(ParityError, match=f"the {role} graph does not reproduce"):
        re_export(tiny_trio.options(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_check_leaves_the_bundle_that_was_there(
    tiny_trio: Any, tiny_bundle: Path, re_export: Any, break_export: Any, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(tiny_bundle, tmp_path / "out"))
    before = open_bundle(out)
    break_export("target")
    with pytest.raises(ParityError):
        re_export(tiny_trio.options(max_context=100), out)
    assert open_bundle(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
