"""A `tensorrt` module that builds nothing and forgives nothing: one surface per version family, and the calls made.

The surface is what the bindings of the wheels 10.3.0, 10.13.3.9, 10.16.1.11 and 11.4.0.106 contain, as far as a
builder may use it. A name that a version does not have, or that 11.0 removed, fails the test that touches it: reading
it raises `AttributeError`, as the real module does, and so does setting an attribute that does not exist. Like the
real one it parses only operators that the version knows, wants static caches, and wants a profile for every input.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx

REMOVED = (
    "FP16", "INT8", "BF16", "FP8", "INT4", "FP4", "OBEY_PRECISION_CONSTRAINTS", "PREFER_PRECISION_CONSTRAINTS",
    "int8_calibrator", "set_calibration_profile", "get_calibration_profile", "set_quantization_flag",
    "clear_quantization_flag", "get_quantization_flag", "quantization_flags", "platform_has_fast_fp16",
    "platform_has_fast_int8", "platform_has_tf32", "algorithm_selector", "IAlgorithmSelector", "set_output_type",
    "IInt8Calibrator", "IInt8EntropyCalibrator2", "IInt8MinMaxCalibrator", "max_workspace_size", "EXPLICIT_BATCH",
    "build_engine", "build_cuda_engine", "max_batch_size", "QuantizationFlag", "execute_v2", "num_bindings",
)  # fmt: skip
"""What 11.0 removed, or earlier versions had already."""

_KINDS = {"MatMul": "MATRIX_MULTIPLY", "Attention": "ATTENTION_INPUT", "DequantizeLinear": "DEQUANTIZE"}
_SINCE = {"Attention": (10, 14), "RotaryEmbedding": (10, 15), "RMSNormalization": (10, 15), "TensorScatter": (10, 15)}
_DTYPES = {1: "FLOAT", 10: "HALF", 7: "INT64", 3: "INT8", 17: "FP8"}


class Strict:
    """Objects whose attributes are those declared, to read and to set."""

    _settable: tuple[str, ...] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in self._settable:
            raise AttributeError(f"{type(self).__name__} of this TensorRT has no attribute {name}")
        object.__setattr__(self, name, value)


def make(version: str) -> ModuleType:
    """The module of a version such as "10.3.0"."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    trt = ModuleType("tensorrt")
    calls: list[str] = []
    add: Callable[[str, Any], None] = lambda name, value: setattr(trt, name, value)  # noqa: E731
    add("__version__", version)
    add("calls", calls)
    for name, members in _enums(numbers).items():
        add(name, enum.Enum(name, members))
    add("NetworkDefinitionCreationFlag", enum.IntEnum("NetworkDefinitionCreationFlag", {"STRONGLY_TYPED": 1}))
    for name, value in _classes(trt, numbers, calls).items():
        add(name, value)
    return trt


def _enums(numbers: tuple[int, ...]) -> dict[str, list[str]]:
    layers = ["MATRIX_MULTIPLY", "DEQUANTIZE", "SHUFFLE", "CAST", "CONSTANT", "ELEMENTWISE", "PLUGIN"]
    levels = ["NONE", "AMPERE_PLUS"]
    if numbers >= (10, 9):
        levels.append("SAME_COMPUTE_CAPABILITY")
    if numbers >= (10, 14):
        layers += ["ATTENTION_INPUT", "ATTENTION_OUTPUT"]
    return {
        "LayerType": layers,
        "HardwareCompatibilityLevel": levels,
        "DataType": ["FLOAT", "HALF", "INT64", "INT8", "FP8"],
        "MemoryPoolType": ["WORKSPACE", "TACTIC_DRAM", "TACTIC_SHARED_MEMORY"],
        "ProfilingVerbosity": ["NONE", "LAYER_NAMES_ONLY", "DETAILED"],
        "BuilderFlag": ["VERSION_COMPATIBLE", "EXCLUDE_LEAN_RUNTIME", "REFIT", "STRIP_PLAN", "TF32"],
        "ElementWiseOperation": ["PROD", "SUM"],
        "LayerInformationFormat": ["ONELINE", "JSON"],
    }


def _classes(trt: Any, numbers: tuple[int, ...], calls: list[str]) -> dict[str, type]:
    class ILogger:
        Severity = enum.Enum("Severity", ["INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"])

        def __init__(self) -> None:
            self._ready = True

    class IProgressMonitor:
        def __init__(self) -> None:
            self._ready = True

    class IStreamWriter:
        def __init__(self) -> None:
            self._ready = True

    class Builder(Strict):
        def __init__(self, logger: Any) -> None:
            assert isinstance(logger, ILogger) and logger._ready, "ILogger.__init__ was not called"
            calls.append("Builder")

        def create_network(self, flags: int) -> Network:
            assert flags & 1 << 1, "the network is not strongly typed"
            calls.append("create_network")
            return Network()

        def create_builder_config(self) -> Any:
            calls.append("create_builder_config")
            return Config(trt, calls)

        def create_optimization_profile(self) -> Profile:
            calls.append("create_optimization_profile")
            return Profile()

        def _stream(self, network: Network, config: Any, writer: Any) -> bool:
            calls.append("build_serialized_network_to_stream")
            assert isinstance(writer, IStreamWriter) and writer._ready, "IStreamWriter.__init__ was not called"
            plan = _build(network, config)
            return all(writer.write(plan[k : k + 7]) == 7 for k in range(0, len(plan), 7))

        def build_serialized_network(self, network: Network, config: Any) -> bytes:
            calls.append("build_serialized_network")
            return _build(network, config)

    class OnnxParser(Strict):
        def __init__(self, network: Network, logger: Any) -> None:
            calls.append("OnnxParser")
            self._network, self._errors = network, []

        @property
        def num_errors(self) -> int:
            return len(self._errors)

        def get_error(self, index: int) -> ParserError:
            return self._errors[index]

        def parse_from_file(self, path: str) -> bool:
            calls.append("parse_from_file")
            self._errors = _parse(trt, numbers, self._network, Path(path))
            return not self._errors

    classes = dict(ILogger=ILogger, IProgressMonitor=IProgressMonitor, Builder=Builder, OnnxParser=OnnxParser)
    if numbers >= (10, 13):
        classes["IStreamWriter"] = IStreamWriter
        Builder.build_serialized_network_to_stream = Builder._stream  # type: ignore[attr-defined]
    if numbers >= (10, 14):
        classes["IAttentionInputLayer"] = AttentionLayer
    return classes


class Tensor(Strict):
    def __init__(self, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        self._name, self._shape, self._dtype = name, shape, dtype

    name = property(lambda self: self._name)
    shape = property(lambda self: self._shape)
    dtype = property(lambda self: self._dtype)


class Layer(Strict):
    def __init__(self, kind: Any, name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self._type, self._name, self._inputs, self._outputs = kind, name, inputs, outputs
        self._attention = Attention()

    type = property(lambda self: self._type)
    name = property(lambda self: self._name)
    num_inputs = property(lambda self: len(self._inputs))
    num_outputs = property(lambda self: len(self._outputs))

    def get_input(self, index: int) -> Tensor:
        return self._inputs[index]

    def get_output(self, index: int) -> Tensor:
        return self._outputs[index]


class Attention(Strict):
    _settable = ("decomposable",)
    decomposable = False


class AttentionLayer(Layer):
    attention = property(lambda self: self._attention)


class Network(Strict):
    def __init__(self) -> None:
        self._inputs: list[Tensor] = []
        self._layers: list[Layer] = []

    num_inputs = property(lambda self: len(self._inputs))
    num_layers = property(lambda self: len(self._layers))

    def get_input(self, index: int) -> Tensor:
        return self._inputs[index]

    def get_layer(self, index: int) -> Layer:
        return self._layers[index]


class ParserError(Strict):
    def __init__(self, node: str, operator: str, text: str) -> None:
        self._node, self._operator, self._text = node, operator, text

    def desc(self) -> str:
        return self._text

    def node_name(self) -> str:
        return self._node

    def node_operator(self) -> str:
        return self._operator


class Profile(Strict):
    def __init__(self) -> None:
        self._shapes: dict[str, tuple[tuple[int, ...], ...]] = {}

    def set_shape(self, name: str, least: tuple[int, ...], usual: tuple[int, ...], most: tuple[int, ...]) -> None:
        self._shapes[name] = (least, usual, most)


class TimingCache(Strict):
    def __init__(self, data: bytes) -> None:
        self._data = data

    def serialize(self) -> bytes:
        return self._data + b"timed"


class Config(Strict):
    _settable = ("profiling_verbosity", "builder_optimization_level", "hardware_compatibility_level")
    _settable += ("progress_monitor", "max_aux_streams")

    def __init__(self, trt: Any, calls: list[str]) -> None:
        self._trt, self._calls = trt, calls
        self._profiles: list[Profile] = []
        self._flags: list[Any] = []
        self._limits: dict[Any, int] = {}
        self._cache: TimingCache | None = None
        self.progress_monitor = None

    def set_flag(self, flag: Any) -> None:
        self._flags.append(self._trt.BuilderFlag(flag))

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        self._limits[self._trt.MemoryPoolType(pool)] = size

    def add_optimization_profile(self, profile: Profile) -> int:
        self._calls.append("add_optimization_profile")
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def create_timing_cache(self, data: bytes) -> TimingCache:
        return TimingCache(data)

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        self._calls.append("set_timing_cache")
        self._cache = cache
        return True

    def get_timing_cache(self) -> TimingCache | None:
        return self._cache


def _parse(trt: Any, numbers: tuple[int, ...], network: Network, path: Path) -> list[ParserError]:
    model = onnx.load(path, load_external_data=False)
    for weight in model.graph.initializer:
        for entry in weight.external_data:
            assert entry.key != "location" or (path.parent / entry.value).exists(), f"{entry.value} is not beside it"
    shapes = {w.name: (tuple(w.dims), w.data_type) for w in model.graph.initializer}
    for value in model.graph.input:
        dims = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in value.type.tensor_type.shape.dim)
        shapes[value.name] = (dims, value.type.tensor_type.elem_type)
        network._inputs.append(_tensor(trt, value.name, shapes))
    for node in model.graph.node:
        if numbers < _SINCE.get(node.op_type, (0, 0)):
            return [ParserError(node.name, node.op_type, "Plugin not found")]
        if node.op_type == "TensorScatter" and -1 in shapes[node.input[0]][0][1:]:
            return [ParserError(node.name, node.op_type, "must have a static sequence length dimension")]
        kind = getattr(trt.LayerType, _KINDS.get(node.op_type, "PLUGIN"))
        inputs = [_tensor(trt, name, shapes) for name in node.input if name]
        for name in node.output:  # types follow the data; shapes of results are not needed
            shapes[name] = ((-1,), shapes[node.input[0]][1] if node.input else 1)
        outputs = [_tensor(trt, name, shapes) for name in node.output]
        network._layers.append(Layer(kind, node.name, inputs, outputs))
    return []


def _tensor(trt: Any, name: str, shapes: dict[str, tuple[tuple[int, ...], int]]) -> Tensor:
    dims, code = shapes.get(name, ((-1,), 1))
    return Tensor(name, dims, getattr(trt.DataType, _DTYPES.get(code, "FLOAT")))


def _build(network: Network, config: Config) -> bytes:
    assert config._profiles, "no optimization profile has been defined"
    for profile in config._profiles:
        missing = [t.name for t in network._inputs if -1 in t.shape and t.name not in profile._shapes]
        assert not missing, f"dynamic input {missing[0]} is missing dimensions in profile"
    monitor = config.progress_monitor
    if monitor is not None:
        assert monitor._ready, "IProgressMonitor.__init__ was not called"
        monitor.phase_start("Building engine", None, 2)
        for step in range(2):
            assert monitor.step_complete("Building engine", step) is True
        monitor.phase_finish("Building engine")
    return b"simulated plan"
