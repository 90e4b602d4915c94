"""The platform table: consistent with itself, and refusals that name the alternative."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from xpress_export import platforms
from xpress_export.cli import cli
from xpress_export.errors import PlatformError
from xpress_export.platforms import PLATFORMS, lowering_for, require


def test_rows_are_consistent() -> None:
    for row in PLATFORMS.values():
        assert set(row.precisions) <= set(platforms.PRECISIONS) and row.evidence in {"executed", "compiled", "none"}
        if row.sm is None:
            continue
        assert ("fp8" in row.precisions) == (row.sm >= 89), row.name
        assert ("fp4" in row.precisions) == (row.sm >= 100), row.name
        assert ("bf16" in row.precisions) == (row.sm >= 80), row.name
        assert row.versions and row.memory_gb and row.bandwidth_gb_s


@pytest.mark.parametrize(
    ("name", "precision", "told"),
    [
        ("jetson-orin", "fp8", "sm_87) cannot run fp8: FP8 needs compute capability 8.9"),
        ("a100", "fp8", "use --precision int8"),
        ("t4", "bf16", "use --precision fp16"),
        ("h100", "fp4", "use --precision int4"),
        ("cpu", "bf16", "it can run fp32, fp16, int8, int4, fp8, of which fp32 is advised"),
        ("t4", "int4-weight", "INT4 weights need compute capability 8.0"),
        ("l4", "int7", "precision 'int7' is not known"),
        ("l40", "fp16", "platform 'l40' is not known; known are cpu, t4"),
    ],
)
def test_refusals(name: str, precision: str, told: str) -> None:
    with pytest.raises(PlatformError) as caught:
        require(name, precision)
    assert told in str(caught.value)


def test_lowering_by_version() -> None:
    assert lowering_for("tensorrt", "10.3.0")[0] == "decomposed"
    assert lowering_for("tensorrt", "10.14.1.48")[0] == "decomposed"
    assert lowering_for("tensorrt", "10.15.1.29")[0] == "native"
    assert lowering_for("tensorrt", "11.4.0.106")[0] == "native"
    assert lowering_for("tensorrt-rtx", "1.7.1.116")[0] == "native"
    assert PLATFORMS["jetson-orin"].lowering == "decomposed or native"


def test_command() -> None:
    rows = json.loads(CliRunner().invoke(cli, ["platforms", "--json"]).stdout)
    assert [row["name"] for row in rows] == list(PLATFORMS)
    assert all(name in CliRunner().invoke(cli, ["platforms"]).stdout for name in PLATFORMS)


def test_a_device_needs_none_of_the_exporter() -> None:
    """Importing everything `compile` imports brings in neither torch nor transformers nor onnx."""
    code = (
        "import sys, xpress_export.cli, xpress_export.engines.compile, xpress_export.engines.worker, "
        "xpress_export.engines.inspection, xpress_export.engines.builder\n"
        "print([m for m in ('torch', 'transformers', 'onnx', 'onnxscript', 'onnx_ir', 'google.protobuf', "
        "'onnxruntime', 'tensorrt', 'tensorrt_rtx') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
