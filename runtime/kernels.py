"""Quantized graphs on ONNX Runtime's fast CPU kernels: what changes between the file and the session, in memory.

    graph holds        on                   is loaded with                                    and runs
    int8 activations   x86-64 with VNNI     the zero point of all of them as uint8 128        MatMulIntegerToFloat
                       older x86-64         weights dequantized once, at load                 MatMul in float
                       Arm                  nothing                                           MatMulIntegerToFloat
    fp8 activations    any                  weights dequantized once, at load                 MatMul in float
    weights alone      any                  nothing                                           MatMulNBits

MatMulNBits rounds its input to INT8 in small blocks, which the graph does not ask for and TensorRT does not do: that
costs SmolLM2-135M half a percent of perplexity on CPU, and `check` reports it apart.

A signed code s with zero point 0 and an unsigned code s + 128 with zero point 128 are the same number, so the lowering
changes no result; but x86 multiplies unsigned by signed bytes, and signed activations are ten times slower than
float32. Before VNNI such products saturate, so they are done in float instead. The bundle's file is a standard graph
and stays as it is.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from xpress_export import names

_INT8, _UINT8, _FP8 = 3, 2, 17
"""TensorProto.DataType of zero points."""
_IN_FLOAT = {"session.disable_quant_qdq": "1"}


def lower(model: bytes, *, exact: bool = False) -> tuple[bytes, Mapping[str, str]]:
    """A serialized graph as ONNX Runtime should load it, and the session's configuration entries.

    exact: compute what the graph says, in float, whatever it costs: what to judge a graph by.
    """
    signed, is_x86 = _zero_point(_INT8, 0), platform.machine().lower() in {"x86_64", "amd64"}
    if exact or _zero_point(_FP8, 0) in model or (signed in model and is_x86 and not _has_vnni()):
        return model, _IN_FLOAT
    if signed not in model or not is_x86:
        return model, {}
    assert model.count(signed) == 1, "one zero point for all activations"
    return model.replace(signed, _zero_point(_UINT8, 128)), {}


@cache
def _has_vnni() -> bool:
    try:
        return "_vnni" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _zero_point(data_type: int, value: int) -> bytes:
    """The serialized initializer: fields data_type (2), name (8) and raw_data (9) of a scalar TensorProto."""
    name = names.ACTIVATION_ZERO.encode()
    return bytes([2 << 3, data_type, 8 << 3 | 2, len(name)]) + name + bytes([9 << 3 | 2, 1, value])
