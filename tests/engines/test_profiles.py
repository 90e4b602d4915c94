"""Profiles derived from recorded shapes, and graph files read and changed without the onnx package."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest

from xpress_export.engines.onnx_file import fix_dimensions, read_operators
from xpress_export.engines.operators import check_operators
from xpress_export.engines.profiles import Sizes, derive_profiles, input_shapes
from xpress_export.errors import BundleError, EngineBuildError, PlatformError
from xpress_export.manifest import GraphRecord, ProfileRecord, TensorRecord, read_manifest
from xpress_export.strict_json import FieldError

SIZES = Sizes(max_context=600, max_batch=4, chunk=256, block=8)


def graph(*shapes: tuple[int | str, ...]) -> GraphRecord:
    inputs = tuple(TensorRecord(name=f"x{n}", dtype="float16", shape=shape) for n, shape in enumerate(shapes))
    return GraphRecord(file="graphs/target.onnx", data=(), inputs=inputs, outputs=())


def test_capacity_has_room_for_a_rejected_block() -> None:
    assert SIZES.capacity == 624 and SIZES.capacity % 16 == 0


@pytest.mark.parametrize(("role", "names"), [("target", ["prefill", "verify"]), ("drafter", ["prefill", "draft"])])
def test_two_profiles_where_tokens_vary(half_bundle: Path, role: str, names: list[str]) -> None:
    record = read_manifest(half_bundle).graphs[role]
    profiles = derive_profiles(role, record, SIZES)
    assert [p.name for p in profiles] == names
    assert profiles[0].sizes["S"] == (1, 64, 256) and profiles[1].sizes["S"] == (1, 8, 8)
    shapes = input_shapes(record, profiles[1], SIZES.static)
    assert set(shapes) == {t.name for t in record.inputs}
    assert shapes["past_key_0"] == ((1, 2, 624, 16), (4, 2, 624, 16), (4, 2, 624, 16))


def test_one_profile_and_dependent_sizes(half_bundle: Path) -> None:
    record = read_manifest(half_bundle).graphs["refiner"]
    (profile,) = derive_profiles("refiner", record, SIZES)
    assert profile.name == "refine" and profile.sizes == {"B": (1, 4, 4), "N": (2, 8, 8)}
    assert input_shapes(record, profile, SIZES.static)["draft_tokens"] == ((1, 1), (4, 7), (4, 7))


def test_unknown_dimension_is_named() -> None:
    with pytest.raises(EngineBuildError, match=r"input x1 of the target graph has dimension 'Q', .* B, N, S, C"):
        derive_profiles("target", graph(("B", "S"), ("B", "Q")), SIZES)


def test_sizes_out_of_order_are_refused() -> None:
    with pytest.raises(FieldError, match=r"sizes\.S should be three sizes, 1 <= min <= opt <= max"):
        ProfileRecord(name="verify", sizes={"S": (8, 4, 8)})
    profile = ProfileRecord(name="refine", sizes={"N": (1, 8, 8)})
    with pytest.raises(EngineBuildError, match=r"input x0 needs 1 <= min <= opt <= max on every axis, got min \(0,\)"):
        input_shapes(graph(("N-1",)), profile, {})


def test_static_sizes_change_nothing_else(half_bundle: Path) -> None:
    path = half_bundle / "graphs" / "target.onnx"
    before = onnx.load(path, load_external_data=False)
    after = onnx.load_model_from_string(fix_dimensions(path.read_bytes(), {"C": 624}))
    for value in (*before.graph.input, *before.graph.output, *before.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == "C":
                dim.dim_value = 624
    assert before == after
    assert fix_dimensions(path.read_bytes(), {}) == path.read_bytes()


@pytest.mark.parametrize("name", ["target.onnx", "drafter.decomposed.onnx", "refiner.onnx"])
def test_operators_are_those_that_onnx_sees(half_bundle: Path, name: str) -> None:
    path = half_bundle / "graphs" / name
    model = onnx.load(path, load_external_data=False)
    found = read_operators(path)
    assert found.counts == Counter(node.op_type for node in model.graph.node)
    assert found.opset == model.opset_import[0].version


def test_damaged_graph_file(tmp_path: Path, half_bundle: Path) -> None:
    path = tmp_path / "target.onnx"
    path.write_bytes((half_bundle / "graphs" / "target.onnx").read_bytes()[:5000])
    with pytest.raises(BundleError, match="is not an ONNX graph"):
        read_operators(path)


def test_operator_table(tmp_path: Path) -> None:
    def model(domain: str, *operators: str) -> Path:
        nodes = [onnx.helper.make_node(op, [], ["y"], domain=domain) for op in operators]
        opsets = [onnx.helper.make_opsetid("", 24), onnx.helper.make_opsetid("com.microsoft", 1)]
        made = onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [], []), opset_imports=opsets)
        onnx.save(made, tmp_path / "m.onnx")
        return tmp_path / "m.onnx"

    with pytest.raises(PlatformError, match="without a plugin: DynamicQuantizeLinear, MatMulInteger"):
        check_operators(
            read_operators(model("", "MatMulInteger", "DynamicQuantizeLinear")), "tensorrt-rtx", "1.7.1", "g"
        )
    with pytest.raises(PlatformError, match=r"without a plugin: com\.microsoft::MatMul"):
        check_operators(read_operators(model("com.microsoft", "MatMul")), "tensorrt", "11.4.0", "g")
    with pytest.raises(PlatformError, match=r"has opset 24, but TensorRT 10\.3\.0 reads at most 21"):
        check_operators(read_operators(model("", "MatMul")), "tensorrt", "10.3.0", "g")
    check_operators(read_operators(model("", "Attention")), "tensorrt", "10.15.1", "g")
