"""ONNX graphs on ONNX Runtime's CUDA provider as programs.

    user_compute_stream          the session works on the device's compute stream, and on no other
    disable_synchronize_...      a run option: `run_with_iobinding` returns when the work is enqueued
    IO binding                   inputs and outputs at fixed addresses; present_* is past_*
    enable_mem_pattern off       else the second run of a shape allocates anew, and it is the one that is captured
    enable_cuda_graph, and       ONNX Runtime refuses to open a session that its own graphs could not capture, because
      gpu_graph_id -1            nodes on the CPU take part or data crosses between the two: that is what is asked for.
                                 Its own capture stays off in every run; the device captures the whole cycle

A graph that must not be captured runs as it is: a copy from host memory that ONNX Runtime uses again would be repeated
with other contents. Shapes and indices may be computed on the CPU; a graph whose heavy operators are not on the GPU is
refused. TF32 is off: float32 means float32 here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from xpress_export.errors import BundleError, EngineError, MissingDependencyError
from xpress_export.runtime.cuda import address_of
from xpress_export.runtime.cuda_programs import CudaBound, CudaProgram, NotReadyError
from xpress_export.runtime.device import Buffer

if TYPE_CHECKING:
    from xpress_export.runtime.device_cuda import CudaDevice, CudaStream

PROVIDER = "CUDAExecutionProvider"
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_HEAVY = (
    "MatMul", "Gemm", "MatMulNBits", "MatMulInteger", "Attention", "TensorScatter", "ScatterND", "RMSNormalization",
    "RotaryEmbedding", "Softmax", "QuantizeLinear", "DequantizeLinear",
)  # fmt: skip
_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}

logger = logging.getLogger(__name__)


class OnnxRuntimeLoader:
    """Opens sessions on one device's compute stream."""

    def __init__(self, device: CudaDevice, library: Any) -> None:
        self.device, self.ort = device, _import() if library is None else library
        if PROVIDER not in self.ort.get_available_providers():
            raise EngineError(
                f"onnxruntime {self.ort.__version__} here has no {PROVIDER}: it has "
                f"{', '.join(self.ort.get_available_providers())}. Uninstall onnxruntime and install onnxruntime-gpu "
                f"instead, not beside it: both are the module onnxruntime"
            )

    def __call__(self, path: Path, role: str) -> OnnxRuntimeProgram:
        self.device.cuda.call("cudaFree", 0, what=f"loading {path.name}")  # this thread's GPU is the right one
        why_plain = None
        try:
            try:
                session = self._open(path, captures=True)
            except Exception as err:  # onnxruntime raises plain classes of its own, without a common base
                why_plain = _first_line(err)
                session = self._open(path, captures=False)
        except Exception as err:
            self.device.cuda.raise_if_lost(f"loading {path.name}")
            raise BundleError(f"ONNX Runtime cannot load {path} on {self.device.name}: {_first_line(err)}") from err
        if PROVIDER not in session.get_providers():
            raise EngineError(
                f"ONNX Runtime opened {path} without {PROVIDER}: its CUDA or cuDNN libraries do not load; install "
                f"those that onnxruntime-gpu {self.ort.__version__} names"
            )
        self._check_placement(session, path, role)
        return OnnxRuntimeProgram(self, session, role, why_plain)

    def _open(self, path: Path, *, captures: bool) -> Any:
        options = self.ort.SessionOptions()
        options.log_severity_level = 3
        options.enable_mem_pattern = False
        options.add_session_config_entry(_WEIGHTS_FOLDER, str(path.parent))
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        provider = {
            "device_id": str(self.device.cuda.index),
            "user_compute_stream": str(int(self.device.compute.handle)),
            "arena_extend_strategy": "kSameAsRequested",
            "use_tf32": "0",
            **({"enable_cuda_graph": "1"} if captures else {}),
        }
        providers = [(PROVIDER, provider), "CPUExecutionProvider"]
        return self.ort.InferenceSession(path.read_bytes(), options, providers=providers, enable_fallback=0)

    def _check_placement(self, session: Any, path: Path, role: str) -> None:
        """Refuse a graph whose heavy operators would run on the CPU, with a copy of their data in every call."""
        on_cpu = [
            node.op_type
            for part in session.get_provider_graph_assignment_info()
            if part.ep_name != PROVIDER
            for node in part.get_nodes()
        ]
        if heavy := sorted({name for name in on_cpu if name in _HEAVY}):
            raise BundleError(
                f"ONNX Runtime {self.ort.__version__} has no CUDA kernel for {', '.join(heavy)} of {path}: the {role} "
                f"graph would run on the CPU in part; compile the bundle for TensorRT, or open it on device cpu"
            )
        logger.debug("%s: %d nodes of shapes and indices run on the CPU", role, len(on_cpu))


class OnnxRuntimeProgram(CudaProgram):
    """A session. why_plain: why it must not be captured, None where it may."""

    def __init__(self, loader: OnnxRuntimeLoader, session: Any, role: str, why_plain: str | None) -> None:
        self.loader, self.role, self.session, self.why_plain = loader, role, session, why_plain
        self.inputs = {value.name: tuple(value.shape) for value in session.get_inputs()}
        self.outputs = {value.name: tuple(value.shape) for value in session.get_outputs()}
        self.dtypes = {v.name: np.dtype(_DTYPES[v.type]) for v in (*session.get_inputs(), *session.get_outputs())}
        self.options = loader.ort.RunOptions()
        self.options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self.options.add_run_config_entry("gpu_graph_id", "-1")

    def bind(self, buffers: Mapping[str, Buffer]) -> OnnxRuntimeBound:
        for name, shape in {**self.inputs, **self.outputs}.items():
            buffer = buffers[name]
            assert buffer.is_contiguous, f"{name} is not contiguous"
            fits = len(shape) == len(buffer.shape) and all(
                n == got for n, got in zip(shape, buffer.shape, strict=True) if isinstance(n, int)
            )
            if not fits or buffer.dtype != self.dtypes[name]:
                raise EngineError(
                    f"the {self.role} graph has {name} as {self.dtypes[name]} {list(shape)}, got {buffer.dtype} "
                    f"{list(buffer.shape)}"
                )
        return OnnxRuntimeBound(self, buffers)

    def close(self) -> None:
        self.session = None


class OnnxRuntimeBound(CudaBound):
    """An IO binding, made once."""

    def __init__(self, program: OnnxRuntimeProgram, buffers: Mapping[str, Buffer]) -> None:
        self._program, self.role = program, program.role
        self.reads = tuple(buffers[name] for name in program.inputs)
        self.writes = tuple(buffers[name] for name in program.outputs)
        self._has_run = False
        self._io = program.session.io_binding()
        where = ("cuda", program.loader.device.cuda.index)
        for name in program.inputs:
            buffer = buffers[name]
            self._io.bind_input(name, *where, buffer.dtype.type, buffer.shape, address_of(buffer))
        for name in program.outputs:
            buffer = buffers[name]
            self._io.bind_output(name, *where, buffer.dtype.type, buffer.shape, address_of(buffer))

    def enqueue(self, stream: CudaStream, label: str, *, repeats: bool) -> None:
        if stream.is_capturing and not self._has_run:
            raise NotReadyError(f"{self.role} did not run on these buffers before its capture")
        what = f"running the {self.role} graph ({label})"
        try:
            self._program.session.run_with_iobinding(self._io, self._program.options)
        except Exception as err:  # as above: no common base class
            self._program.loader.device.cuda.raise_if_lost(what)
            raise EngineError(f"ONNX Runtime failed {what}: {_first_line(err)}") from err
        self._has_run = True

    def why_not_captured(self, stream: CudaStream) -> str | None:
        return self._program.why_plain


def _import() -> Any:
    try:
        import onnxruntime
    except ImportError as err:
        raise MissingDependencyError("onnxruntime-gpu", "run graphs on a GPU", "gpu") from err
    return onnxruntime


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
