"""An `onnxruntime` with a CUDA provider that computes on CPU, on the stream of `fake_cuda` that it was given.

Rules cite [ort] ONNX Runtime's documentation of the CUDA execution provider and its header of run options' keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import onnxruntime as ort
from fake_cuda import FakeCuda, Operation

PROVIDER = "CUDAExecutionProvider"


def make(cuda: FakeCuda, *, on_cpu: Sequence[str] = ("Shape",), memcpy: bool = False) -> ModuleType:
    """on_cpu: operators that have no CUDA kernel. memcpy: data crosses between CPU and GPU within the graph."""
    fake = ModuleType("onnxruntime")
    found: dict[str, Any] = {
        "__version__": ort.__version__,
        "get_available_providers": lambda: [PROVIDER, "CPUExecutionProvider"],
        "SessionOptions": ort.SessionOptions,
        "RunOptions": ort.RunOptions,
        "InferenceSession": lambda *args, **options: _Session(fake, *args, **options),
        "cuda": cuda,
        "on_cpu": on_cpu,
        "memcpy": memcpy,
        "failures": [],
        "num_runs": 0,
    }
    for name, value in found.items():
        setattr(fake, name, value)
    return fake


class _Session:
    def __init__(self, fake: Any, model: bytes, options: Any, *, providers: list[Any], enable_fallback: int) -> None:
        (name, provider), other = providers
        assert (name, other, enable_fallback) == (PROVIDER, "CPUExecutionProvider", 0)
        assert not options.enable_mem_pattern, "the second run of a shape would allocate its memory pattern"
        self.stream = int(provider["user_compute_stream"])  # [ort] user_compute_stream: the address as a string
        assert not fake.cuda.is_capturing(self.stream)
        if provider.get("enable_cuda_graph") == "1" and fake.memcpy:
            # [ort] "Using CUDA Graphs": models in which nodes or copies are on the CPU are refused
            raise RuntimeError("This session cannot use the graph capture feature as requested by the user")
        self._fake, self._ran = fake, set[tuple[Any, ...]]()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.get_inputs, self.get_outputs = self._session.get_inputs, self._session.get_outputs

    def get_providers(self) -> list[str]:
        return [PROVIDER, "CPUExecutionProvider"]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        nodes = [SimpleNamespace(op_type=name) for name in self._fake.on_cpu]
        return [SimpleNamespace(ep_name="CPUExecutionProvider", get_nodes=lambda: nodes)]

    def io_binding(self) -> _Binding:
        return _Binding(self._fake.cuda, self._session)

    def run_with_iobinding(self, binding: _Binding, options: Any) -> None:
        # [ort] without this key a run ends with a synchronization of the stream
        assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        assert options.get_run_config_entry("gpu_graph_id") == "-1", "ONNX Runtime would capture graphs of its own"
        if self._fake.failures:
            raise RuntimeError(self._fake.failures.pop())
        shapes = tuple(shape for _, shape in binding.bound)
        if self._fake.cuda.is_capturing(self.stream) and shapes not in self._ran:
            self._fake.cuda.spoil_capture(self.stream)
            raise RuntimeError("CUDA failure 900: operation not permitted when stream is capturing ; cudaMalloc")
        self._ran.add(shapes)
        self._fake.num_runs += 1
        self._fake.cuda.enqueue(self.stream, Operation(binding.work(), owner=binding))


class _Binding:
    def __init__(self, cuda: FakeCuda, session: Any) -> None:
        self._cuda, self._session, self._io = cuda, session, session.io_binding()
        self.bound: list[tuple[tuple[int, int], tuple[int, ...]]] = []

    def bind_input(self, name: str, device: str, index: int, dtype: Any, shape: tuple[int, ...], at: int) -> None:
        self._bind(self._io.bind_input, name, device, dtype, shape, at)

    def bind_output(self, name: str, device: str, index: int, dtype: Any, shape: tuple[int, ...], at: int) -> None:
        self._bind(self._io.bind_output, name, device, dtype, shape, at)

    def _bind(self, bind: Any, name: str, device: str, dtype: Any, shape: tuple[int, ...], at: int) -> None:
        assert device == "cuda"
        num_bytes = dtype(0).itemsize
        for n in shape:
            num_bytes *= n
        self.bound.append(((at, num_bytes), tuple(shape)))
        bind(name, "cpu", 0, dtype, shape, at)

    def work(self) -> Any:
        def run() -> None:
            for (address, num_bytes), _ in self.bound:
                self._cuda.check(address, num_bytes, "a bound buffer")
            self._session.run_with_iobinding(self._io)

        return run
