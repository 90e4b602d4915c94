"""A TensorRT that runs plans without a GPU, on `fake_cuda`, and checks how it is driven.

A plan is a JSON file that names an ONNX graph, its profiles and its static sizes (`write_plan`); a context runs the
graph with ONNX Runtime on CPU, on the addresses it was given. Rules cite the documentation: [api] TensorRT API
reference, [dev] TensorRT developer guide.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime as ort
from fake_cuda import FakeCuda, Operation

_NUMPY = {"tensor(float)": ("FLOAT", np.float32), "tensor(int64)": ("INT64", np.int64)}


def write_plan(
    path: Path,
    graph: Path,
    profiles: list[Mapping[str, tuple[int, int]]],
    static: Mapping[str, int],
    version: str,
    scratch_bytes: int = 1000,
    *,
    host_code: bool = False,
) -> Path:
    """profiles: least and greatest size of each symbol. static: the size of the others. host_code: as plans that are
    version-compatible have it.
    """
    plan = {
        "graph": str(graph),
        "profiles": [{symbol: list(sizes) for symbol, sizes in profile.items()} for profile in profiles],
        "static": dict(static),
        "version": version,
        "scratch_bytes": scratch_bytes,
        "host_code": host_code,
    }
    path.write_text(json.dumps(plan))
    return path


def make(cuda: FakeCuda, version: str, *, is_rtx: bool = False) -> ModuleType:
    """The module of a version. Its `faults` hold what is to go wrong: refuses, capturable, enqueue."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    trt = ModuleType("tensorrt_rtx" if is_rtx else "tensorrt")
    found: dict[str, Any] = {
        "__version__": version,
        "cuda": cuda,
        "TensorIOMode": enum.Enum("TensorIOMode", ["NONE", "INPUT", "OUTPUT"]),
        "TensorLocation": enum.Enum("TensorLocation", ["DEVICE", "HOST"]),
        "DataType": enum.Enum("DataType", ["FLOAT", "HALF", "INT64"]),
        "ExecutionContextAllocationStrategy": enum.Enum(
            "ExecutionContextAllocationStrategy", ["STATIC", "ON_PROFILE_CHANGE", "USER_MANAGED"]
        ),
        "ILogger": _Logger,
        "faults": {"enqueue": 0, "capturable": True, "context": 0},
        "contexts": [],
        "runtimes": [],
        "calls": [],
    }
    for name, value in found.items():
        setattr(trt, name, value)
    context = type("IExecutionContext", (_Context,), {"is_stream_capturable": _is_stream_capturable} if is_rtx else {})
    # ICudaEngine::getAliasedInputTensor came with IKVCacheUpdateLayer [api, 10.15 release notes]
    has_aliases = is_rtx or numbers >= (10, 15)
    engine = type("ICudaEngine", (_Engine,), {"get_aliased_input_tensor": _aliased} if has_aliases else {})
    trt.IExecutionContext, trt.ICudaEngine = context, engine  # type: ignore[attr-defined]
    trt.Runtime = lambda logger: _Runtime(trt, logger)  # type: ignore[attr-defined]
    return trt


class _Logger:
    Severity = enum.Enum("Severity", ["INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"])

    def __init__(self) -> None:
        self.is_ready = True


class _Runtime:
    def __init__(self, trt: Any, logger: Any) -> None:
        assert logger.is_ready, "ILogger.__init__ was not called"
        self._trt, self._logger = trt, logger
        self.engine_host_code_allowed = False
        trt.runtimes.append(self)

    def error(self, text: str) -> None:
        self._logger.log(self._logger.Severity.ERROR, text)

    def deserialize_cuda_engine(self, plan: Any) -> Any:
        read = json.loads(bytes(plan))
        if read["version"] != self._trt.__version__:  # [dev] plans are for the exact version they were built with
            self.error(f"Version tag does not match: current {self._trt.__version__}, serialized {read['version']}")
            return None
        if read["host_code"] and not self.engine_host_code_allowed:
            # [dev, version compatibility] plans with a lean runtime in them have to be allowed to run host code
            self.error("Engine contains host executable code; set engine_host_code_allowed to load it")
            return None
        return self._trt.ICudaEngine(self._trt, self, read)


def _size(symbol: str, known: Mapping[str, int]) -> int:
    """A size such as "N" or "N-1"."""
    if symbol in known:
        return known[symbol]
    name, sign, shift = symbol.partition("-" if "-" in symbol else "+")
    return known[name] + int(sign + shift) if name in known and shift else -1


def _aliased(self: _Engine, name: str) -> str | None:
    return name.replace("present_", "past_") if "present_" in name else None


class _Engine:
    def __init__(self, trt: Any, runtime: _Runtime, plan: Mapping[str, Any]) -> None:
        self.trt, self.runtime = trt, runtime
        self.profiles, self.static = plan["profiles"], plan["static"]
        self.device_memory_size_v2 = plan["scratch_bytes"]
        self.num_optimization_profiles = len(self.profiles)
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.session = ort.InferenceSession(plan["graph"], options, providers=["CPUExecutionProvider"])
        self._inputs = {value.name: value for value in self.session.get_inputs()}
        self.tensors = {**self._inputs, **{value.name: value for value in self.session.get_outputs()}}
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return self.trt.TensorIOMode.INPUT if name in self._inputs else self.trt.TensorIOMode.OUTPUT

    def get_tensor_location(self, name: str) -> Any:
        return self.trt.TensorLocation.DEVICE

    def get_tensor_dtype(self, name: str) -> Any:
        return self.trt.DataType[_NUMPY[self.tensors[name].type][0]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(n if isinstance(n, int) else self.static.get(n, -1) for n in self.tensors[name].shape)

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        sizes = self.profiles[profile]
        ends = [
            tuple(n if isinstance(n, int) else self._size(n, sizes, end) for n in self.tensors[name].shape)
            for end in (0, 1)
        ]
        return [ends[0], ends[1], ends[1]]

    def _size(self, symbol: str, sizes: Mapping[str, list[int]], end: int) -> int:
        return _size(symbol, {**self.static, **{known: ends[end] for known, ends in sizes.items()}})

    def create_execution_context(self, strategy: Any = None) -> Any:
        if self.trt.faults["context"]:
            self.trt.faults["context"] -= 1
            self.runtime.error("Out of memory: cannot create an execution context")
            return None
        is_managed = strategy == self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self.trt.contexts.append(self.trt.IExecutionContext(self, is_managed))
        return self.trt.contexts[-1]


def _is_stream_capturable(self: _Context, stream: int) -> bool:
    return bool(self.engine.trt.faults["capturable"])


class _Context:
    def __init__(self, engine: _Engine, is_managed: bool) -> None:
        self.engine, self.cuda = engine, engine.trt.cuda
        self._scratch = None if is_managed else 0
        self._profile, self._profile_stream, self._stream = None, None, None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._ran = False  # since the last change of shape: what it deferred is done

    def _change(self, call: str) -> None:
        self.engine.trt.calls.append(call)
        # [dev, CUDA graphs] a graph captured from a context is valid for its shapes: one context for each graph
        assert not self.cuda.graphs_of(self), f"{call} on a context that a CUDA graph was captured from"

    def set_device_memory(self, memory: int, size: int) -> None:
        # [api] setDeviceMemoryV2: 256-byte aligned, at least as large as the engine's device_memory_size_v2
        self._change("set_device_memory")
        assert memory % 256 == 0 and size >= self.engine.device_memory_size_v2
        self.cuda.check(memory, size, "scratch memory")
        self._scratch = memory

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._change("set_optimization_profile_async")
        assert stream != 0, "a profile is switched on the default stream"
        assert not self.cuda.is_capturing(stream), "a profile is switched within a capture"
        # [api] setOptimizationProfileAsync: shapes have to be set again after it
        self._profile, self._profile_stream, self._ran = profile, stream, False
        self._shapes.clear()
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._change("set_input_shape")
        assert self._profile is not None, "a shape is set before the profile"  # [api] setInputShape
        least, _, most = self.engine.get_tensor_profile_shape(name, self._profile)
        if len(shape) != len(least) or not all(a <= n <= b for a, n, b in zip(least, shape, most, strict=True)):
            self.engine.runtime.error(f"setInputShape: {name} {shape} does not satisfy profile {self._profile}")
            return False
        self._ran = self._ran and self._shapes.get(name) == shape
        self._shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._change("set_tensor_address")
        # [api] setTensorAddress: "The pointer must have at least 256-byte alignment."
        assert address % 256 == 0, f"{name} at {address:#x} is not aligned to 256 bytes"
        self._addresses[name] = address
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine._inputs if name not in self._shapes]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self._shapes:
            return self._shapes[name]
        symbols: dict[str, int] = dict(self.engine.static)
        for known, value in self.engine._inputs.items():
            symbols |= {d: n for d, n in zip(value.shape, self._shapes[known], strict=True) if isinstance(d, str)}
        return tuple(n if isinstance(n, int) else _size(n, symbols) for n in self.engine.tensors[name].shape)

    def execute_async_v3(self, stream: int) -> bool:
        trt, cuda = self.engine.trt, self.cuda
        trt.calls.append("execute_async_v3")
        # [api] enqueueV3: default stream causes extra synchronization; a context is used on one stream at a time
        assert stream != 0, "execution on the default stream"
        assert self._stream in {None, stream}, "a context is used on two streams"
        # [api] setOptimizationProfileAsync: the application synchronizes the profile's stream with that of the enqueue
        assert self._profile_stream == stream, "the profile was switched on another stream, or never"
        assert self._scratch is not None, "a context without device memory"
        assert not self.infer_shapes(), f"no shape for {self.infer_shapes()}"
        missing = [name for name in self.engine.tensors if name not in self._addresses]
        assert not missing, f"no address for {missing}"  # [api] enqueueV3: "each output must have a non-null address"
        self._stream = stream
        if trt.faults["enqueue"]:
            trt.faults["enqueue"] -= 1
            self.engine.runtime.error("enqueueV3: a kernel could not be launched")
            return False
        if cuda.is_capturing(stream) and not self._ran:
            # [dev, CUDA graphs] "call enqueueV3() once before the graph is captured": after a change of shape it defers
            # work that cannot be captured
            cuda.spoil_capture(stream)
            self.engine.runtime.error("enqueueV3: operation not permitted when stream is capturing")
            return False
        self._ran = True
        cuda.enqueue(stream, Operation(self._work(), owner=self))
        return True

    def _work(self) -> Any:
        """A closure over the addresses and shapes of now."""
        io, regions = self.engine.session.io_binding(), {}
        for name, value in self.engine.tensors.items():
            dtype, shape, address = np.dtype(_NUMPY[value.type][1]), self.get_tensor_shape(name), self._addresses[name]
            regions[name] = (address, int(np.prod(shape)) * dtype.itemsize)
            bind = io.bind_input if name in self.engine._inputs else io.bind_output
            bind(name, "cpu", 0, dtype.type, shape, address)
        self._check_overlap(regions)

        def run() -> None:
            for name, (address, num_bytes) in regions.items():
                self.cuda.check(address, num_bytes, name)
            self.engine.session.run_with_iobinding(io)

        return run

    def _check_overlap(self, regions: Mapping[str, tuple[int, int]]) -> None:
        """Only an output that the engine says is an input's alias shares memory with it, and it does so exactly."""
        aliased = getattr(self.engine, "get_aliased_input_tensor", lambda _: None)
        for name in regions.keys() - self.engine._inputs.keys():
            if past := aliased(name):  # [api] IKVCacheUpdateLayer: the output is the cache, at the same address
                assert regions[name] == regions[past], f"{name} is not where {past} is"
            for other, (start, size) in regions.items():
                if other in {name, past}:
                    continue
                apart = start + size <= regions[name][0] or regions[name][0] + regions[name][1] <= start
                assert apart, f"output {name} and {other} share memory"
