"""Quantized graphs on ONNX Runtime's fast CPU kernels: what changes between the file and the session, in memory.

    graph holds             is loaded with                                        and runs
    int8 activations        the zero point of all of them as uint8 128            MatMulIntegerToFloat (VNNI, AMX)
    fp8 activations         weights dequantized once, at load                     MatMul in float, for checking only
    weights alone           nothing                                               MatMulNBits

A signed code s with zero point 0 and an unsigned code s + 128 with zero point 128 are the same number, so the lowering
changes no result, but CPUs multiply unsigned by signed bytes: signed activations are ten times slower than float32.
The bundle's file is a standard graph and stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from xpress_export import names

_INT8, _UINT8, _FP8 = 3, 2, 17
"""TensorProto.DataType of zero points."""


def lower(model: bytes) -> tuple[bytes, Mapping[str, str]]:
    """A serialized graph as ONNX Runtime should load it, and the session's configuration entries."""
    if _zero_point(_FP8, 0) in model:
        return model, {"session.disable_quant_qdq": "1"}
    signed = _zero_point(_INT8, 0)
    if signed not in model:
        return model, {}
    assert model.count(signed) == 1, "one zero point for all activations"
    # Where the CPU would saturate sums of bytes (before VNNI), take the kernels that do not.
    return model.replace(signed, _zero_point(_UINT8, 128)), {"session.x64quantprecision": "1"}


def _zero_point(data_type: int, value: int) -> bytes:
    """The serialized initializer: fields data_type (2), name (8) and raw_data (9) of a scalar TensorProto."""
    name = names.ACTIVATION_ZERO.encode()
    return bytes([2 << 3, data_type, 8 << 3 | 2, len(name)]) + name + bytes([9 << 3 | 2, 1, value])
