"""Which ONNX operators a TensorRT version reads, checked before a build instead of in the middle of it.

what                                      since     source
standard operators listed below           10.0      onnx-tensorrt docs/operators.md, branch 10.0-GA
Attention                                 10.14     TensorRT CHANGELOG, 10.14
RotaryEmbedding, RMSNormalization,        10.15     TensorRT CHANGELOG, 10.15
  TensorScatter
all of these in TensorRT-RTX              1.0       asked of tensorrt-rtx 1.7.1's parser (tests/engines)
MatMulInteger, DynamicQuantizeLinear      never     asked of tensorrt-rtx 1.7.1's parser: no importer
operators of other domains                never     they need a plugin; bundles have none
opset up to 20                            10.0      onnx-tensorrt docs/operators.md, 10.0 to 10.3
opset 21, for the sake of INT4            10.0      the same lists INT4 in DequantizeLinear, which ONNX has from 21 on
opset up to 24                            10.15     TensorRT ONNX opset guide (11.x: up to 25)
"""

from __future__ import annotations

from xpress_export import names, platforms
from xpress_export.engines.onnx_file import Operators
from xpress_export.errors import PlatformError

_SINCE_10_15 = ("RotaryEmbedding", "RMSNormalization", "TensorScatter")
# fmt: off
_ALWAYS = (
    "Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "Ceil", "Clip", "Concat", "Constant", "ConstantOfShape", "Cos",
    "CumSum", "DequantizeLinear", "Div", "Einsum", "Equal", "Erf", "Exp", "Expand", "Flatten", "Floor", "Gather",
    "GatherElements", "GatherND", "Gelu", "Gemm", "Greater", "GreaterOrEqual", "Identity", "LayerNormalization",
    "Less", "LessOrEqual", "Log", "LogSoftmax", "MatMul", "Max", "Mean", "Min", "Mod", "Mul", "Neg", "Not", "Or",
    "Pad", "Pow", "QuantizeLinear", "Range", "Reciprocal", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "Relu", "Reshape", "ScatterElements", "ScatterND", "Shape", "Sigmoid", "Sign", "Sin", "Slice",
    "Softmax", "Softplus", "Split", "Sqrt", "Squeeze", "Sub", "Sum", "Tanh", "Tile", "TopK", "Transpose", "Trilu",
    "Unsqueeze", "Where", "Xor",
)
# fmt: on
SINCE = {
    **dict.fromkeys(_ALWAYS, (10, 0)),
    "Attention": (10, 14),
    **dict.fromkeys(_SINCE_10_15, (10, 15)),
}
MAX_OPSET = (((10, 15), 24), ((10, 0), names.INT4_OPSET))


def check_operators(operators: Operators, backend: str, version: str, where: str) -> None:
    """Raise `PlatformError` naming the operators of a graph that this TensorRT version does not read."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    is_rtx = backend == platforms.TENSORRT_RTX
    name = f"{'TensorRT-RTX' if is_rtx else 'TensorRT'} {version}"
    unknown = sorted(op for op in operators.counts if op not in SINCE)
    if unknown:
        raise PlatformError(f"{where} has operators that {name} does not read without a plugin: {', '.join(unknown)}")
    if is_rtx:
        return
    too_new = {op: SINCE[op] for op in operators.counts if SINCE[op] > numbers}
    if too_new:
        listed = ", ".join(f"{op} (from {major}.{minor} on)" for op, (major, minor) in sorted(too_new.items()))
        raise PlatformError(f"{where} has operators that {name} does not read: {listed}; use --lowering decomposed")
    most = next((opset for since, opset in MAX_OPSET if since <= numbers), 0)
    if operators.opset > most:
        raise PlatformError(f"{where} has opset {operators.opset}, but {name} reads at most {most}")
