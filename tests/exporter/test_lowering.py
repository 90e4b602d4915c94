"""The decomposed graphs: every rewrite fired, nothing newer is left, and the numbers held."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest

from xpress_export.errors import ParityError
from xpress_export.exporter.export import export
from xpress_export.exporter.lowering import OPSET
from xpress_export.exporter.lowering_check import check_lowering
from xpress_export.manifest import Manifest, read_manifest

REPLACED = ("Attention", "RMSNormalization", "RotaryEmbedding", "TensorScatter")


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def both(request: pytest.FixtureRequest, tiny_trio: Any, trace_once: Any, tmp_path_factory: Any) -> Path:
    """A bundle with both forms of every graph."""
    out: Path = tmp_path_factory.mktemp("lowering") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        trace_once.install(patch)
        export(tiny_trio.options(precision=request.param, lowering="decomposed"), out)
    return out


def operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path, load_external_data=False).graph.node)


def test_every_rewrite_fired(both: Path) -> None:
    found = {role: operators(both / g.file) for role, g in read_manifest(both).graphs.items()}
    lowered = {role: operators(both / g.file) for role, g in read_manifest(both).decomposed.items()}
    for role in ("target", "drafter"):
        assert all(found[role][name] > 0 for name in REPLACED)
        assert not any(lowered[role][name] for name in REPLACED)
        assert lowered[role]["ScatterElements"] == found[role]["TensorScatter"]
        assert lowered[role]["Softmax"] == found[role]["Attention"]
        assert lowered[role]["Sqrt"] == found[role]["RMSNormalization"]
        assert lowered[role]["Split"] == found[role]["RotaryEmbedding"]
    assert found["refiner"] == lowered["refiner"]


def test_valid_in_its_opset_and_of_the_same_bindings_and_weights(both: Path) -> None:
    manifest = read_manifest(both)
    for role, graph in manifest.decomposed.items():
        model = onnx.load(both / graph.file, load_external_data=False)
        assert [(o.domain, o.version) for o in model.opset_import] == [("", OPSET)]
        onnx.checker.check_model(both / graph.file, full_check=True)
        native = manifest.graphs[role]
        assert (graph.inputs, graph.outputs, graph.data) == (native.inputs, native.outputs, native.data)


def test_the_numbers_held(both: Path) -> None:
    """At export: over two slots at different rows, caches included."""
    checks = {c.graph: c for c in read_manifest(both).parity if "native form" in c.against}
    assert set(checks) == {"target", "drafter", "refiner"}
    limit = 1e-5 if read_manifest(both).precision == "fp32" else 1e-2
    assert all(check.value < limit for check in checks.values()), checks


def test_a_difference_is_found(both: Path) -> None:
    """The check is able to fail: the drafter's weights are not the target's."""
    m: Manifest = read_manifest(both)
    path = both / m.decomposed["target"].file
    model = onnx.load(path, load_external_data=False)
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    softmax.op_type = "Sigmoid"
    del softmax.attribute[:]
    wrong = path.with_name("wrong.onnx")
    onnx.save(model, wrong)
    with pytest.raises(ParityError, match="does not reproduce its native form"):
        check_lowering("target", both / m.graphs["target"].file, wrong, m.target.vocab_size, 8, m.precision)
    wrong.unlink()


def test_auto_follows_the_platform(tiny_trio: Any) -> None:
    assert tiny_trio.options(platform="jetson-orin").decomposed and not tiny_trio.options(platform="l4").decomposed
    assert not tiny_trio.options(platform="jetson-orin", lowering="native").decomposed
