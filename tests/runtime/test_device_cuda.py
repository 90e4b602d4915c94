"""The GPU device on doubles of CUDA, TensorRT and ONNX Runtime that compute: same tokens, right calls, right errors."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_ort_cuda
import fake_trt_runtime
import numpy as np
import pytest
from click.testing import CliRunner, Result
from fake_cuda import FakeCuda

from xpress_export import cli_serve, names
from xpress_export import gpu as gpus
from xpress_export.cli import cli
from xpress_export.errors import (
    BundleError,
    DeviceLostError,
    EngineError,
    MissingDependencyError,
    PlanMismatchError,
    RequestError,
)
from xpress_export.manifest import EngineRecord, FileRecord, ProfileRecord, read_manifest, write_manifest
from xpress_export.runtime import Runtime, SamplingParams, bench, cuda, cuda_tensorrt, devices, server_run
from xpress_export.runtime.cuda import Cuda
from xpress_export.runtime.device_cuda import CudaDevice, CudaStream
from xpress_export.runtime.resident import ResidentDecoder
from xpress_export.runtime.resident_memory import Shape
from xpress_export.runtime.text import TextCodec
from xpress_export.runtime.trace import Tracer

SLOTS, CHUNK, WIDTH, CAPACITY = 3, 16, 8, 640
LAYOUTS = (names.LAYOUT_SPLIT, names.LAYOUT_FUSED)
SCRATCH = 5000
ENGINE_VERSION = "11.4.0.106"
L4 = gpus.Gpu("NVIDIA L4", 89, 580)
LIBRARIES = {"tensorrt 10.3": ("10.3.0", False), "tensorrt 11.4": ("11.4.0.106", False), "rtx 1.7": ("1.7.1.116", True)}


def write_plans(
    bundle: Path,
    layout: str,
    folder: Path,
    version: str,
    *,
    chunk: int = CHUNK,
    slots: int = SLOTS,
    capacity: int = CAPACITY,
    host_code: bool = False,
) -> dict[str, Path]:
    """A plan of each graph of a layout."""
    manifest, found = read_manifest(bundle), {}
    for role in devices.roles_of(manifest, layout):
        graph = manifest.graph(role, manifest.precision)
        short = {"B": (1, slots), "N": (2, WIDTH), "S": (1, WIDTH)}
        profiles: list[Mapping[str, tuple[int, int]]] = [{**short, "S": (1, chunk)}, short]
        path = folder / f"{role}.{layout}.{version}.plan"
        found[role] = fake_trt_runtime.write_plan(
            path, bundle / graph.file, profiles, {"C": capacity}, version, SCRATCH, host_code=host_code
        )
    return found


def params(num_tokens: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, ignore_eos=True, **changes)


class Gpu:
    """A runtime on doubles. cuda, library: the doubles. device: what is tested."""

    def __init__(self, bundle: Path, layout: str, folder: Path, library: str, **options: Any) -> None:
        self.cuda = FakeCuda(**options.pop("cuda", {}))
        self.layout, self._bundle = layout, bundle
        manifest = read_manifest(bundle)
        if library == "onnxruntime":
            self.library = fake_ort_cuda.make(self.cuda, **options.pop("ort", {}))
            self.device = CudaDevice(0, "onnxruntime", api=self.cuda, library=self.library, **options)
            graphs = {role: manifest.graph(role, manifest.precision) for role in devices.roles_of(manifest, layout)}
            files = {role: bundle / graph.file for role, graph in graphs.items()}
        else:
            version, is_rtx = LIBRARIES[library]
            self.library = fake_trt_runtime.make(self.cuda, version, is_rtx=is_rtx)
            backend = "tensorrt-rtx" if is_rtx else "tensorrt"
            plans = options.pop("plans", {})
            self.device = CudaDevice(0, backend, api=self.cuda, library=self.library, **options)
            files = write_plans(bundle, layout, folder, version, **plans)
        programs = {role: self.device.load(path, role) for role, path in files.items()}
        self.decoder = ResidentDecoder(self.device, programs, Shape.of(manifest, num_slots=SLOTS, chunk=CHUNK))
        codec = TextCodec.open(bundle / manifest.text.folder)
        sizes = {"num_slots": SLOTS, "prefill_chunk": CHUNK}
        self.runtime = Runtime(manifest, codec, self.decoder, device="cuda:0", layout=layout, **sizes)

    def tokens(self, prompt: list[int], num_tokens: int, **changes: Any) -> list[int]:
        return list(self.runtime.generate(prompt, params(num_tokens, **changes)).result(timeout=60).token_ids)


OpenGpu = Callable[..., Gpu]


@pytest.fixture
def open_gpu(tiny_fused_bundle: Path, tmp_path: Path) -> Iterator[OpenGpu]:
    """Opens runtimes; what they were given is given back in the end, unless the GPU was lost."""
    opened: list[Gpu] = []

    def open_one(layout: str = names.LAYOUT_SPLIT, library: str = "tensorrt 11.4", **options: Any) -> Gpu:
        opened.append(Gpu(tiny_fused_bundle, layout, tmp_path, library, **options))
        return opened[-1]

    yield open_one
    for gpu in opened:
        gpu.runtime.close()
        if not gpu.device.cuda.is_lost:
            assert gpu.cuda.live() == {}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("library", [*LIBRARIES, "onnxruntime"])
def test_tokens_are_those_of_the_target_whatever_runs_it(
    open_gpu: OpenGpu, stories: Any, layout: str, library: str
) -> None:
    """Prompts of several chunks, several slots that join and leave, cycles that are captured and launched."""
    gpu = open_gpu(layout, library)
    jobs = [(stories[i % 4], 20 + 7 * i, 25 + 3 * i) for i in range(6)]
    running = [gpu.runtime.generate(story.ids[:at], params(count)) for story, at, count in jobs]
    for generation, (story, at, count) in zip(running, jobs, strict=True):
        assert list(generation.result(timeout=120).token_ids) == story.expected(at, count)
    assert gpu.cuda.calls.count("cudaGraphLaunch") > 10
    modes = {call for call in gpu.cuda.calls if "Synchronize" in call}
    assert "cudaDeviceSynchronize" not in modes


@pytest.mark.parametrize("library", ["tensorrt 10.3", "onnxruntime"])
def test_a_request_that_the_host_chooses_for(open_gpu: OpenGpu, stories: Any, library: str) -> None:
    gpu, story = open_gpu(library=library), stories[0]
    generation = gpu.runtime.generate(story.ids[:30], params(20, logprobs=2)).result(timeout=60)
    assert list(generation.token_ids) == story.expected(30, 20)


def test_the_public_door_takes_the_device(tiny_fused_bundle: Path, stories: Any) -> None:
    api = FakeCuda()
    device = CudaDevice(0, "onnxruntime", api=api, library=fake_ort_cuda.make(api))
    with Runtime.open(tiny_fused_bundle, device=device, layout="split", num_slots=2, prefill_chunk=16) as runtime:
        result = runtime.generate(stories[1].ids[:40], params(30)).result(timeout=60)
    assert list(result.token_ids) == stories[1].expected(40, 30)
    assert api.live() == {}


# Graphs


def test_a_steady_cycle_is_a_launch_without_any_call_of_the_engines(open_gpu: OpenGpu, stories: Any) -> None:
    gpu, story = open_gpu(), stories[0]
    gpu.tokens(story.ids[:30], 60)
    before = len(gpu.library.calls)
    gpu.tokens(story.ids[:30], 60)
    prefill = gpu.library.calls[before:].count("execute_async_v3")
    assert prefill <= 2 * 2 * 3 + 1  # two chunks of target, accept; drafter and refiner's passes after the last
    assert gpu.cuda.calls.count("cudaStreamBeginCapture") == gpu.cuda.calls.count("cudaGraphInstantiate")


@pytest.mark.parametrize(
    ("library", "change", "reason"),
    [
        ("rtx 1.7", lambda gpu: gpu.library.faults.update(capturable=False), "cannot be captured with these shapes"),
        (
            "tensorrt 11.4",
            lambda gpu: gpu.cuda.fail("cudaStreamBeginCapture", "cudaErrorStreamCaptureUnsupported", times=99),
            "cudaErrorStreamCaptureUnsupported",
        ),
        (
            "tensorrt 11.4",
            lambda gpu: gpu.cuda.fail("cudaGraphInstantiate", "cudaErrorMemoryAllocation", times=99),
            "are free",
        ),
        ("onnxruntime", lambda gpu: None, "graph capture feature"),
    ],
)
def test_what_cannot_be_captured_runs_as_it_is_and_the_log_says_why_once(
    open_gpu: OpenGpu,
    stories: Any,
    caplog: pytest.LogCaptureFixture,
    library: str,
    change: Callable[[Gpu], object],
    reason: str,
) -> None:
    gpu, story = (
        open_gpu(library=library, **({"ort": {"memcpy": True}} if library == "onnxruntime" else {})),
        stories[0],
    )
    change(gpu)
    with caplog.at_level(logging.WARNING):
        assert gpu.tokens(story.ids[:30], 60) == story.expected(30, 60)
    said = [record.getMessage() for record in caplog.records if "without a CUDA graph" in record.getMessage()]
    assert 0 < len(said) <= 8 and all(reason in text for text in said)  # verify and draft, widths and parities
    assert "cudaGraphLaunch" not in gpu.cuda.calls


def test_repeat_warms_up_then_captures_then_launches(open_gpu: OpenGpu) -> None:
    device = open_gpu().device
    here, there = (device.empty(name, (4,), np.int64) for name in ("here", "there"))
    pinned = device.pinned("pinned", (4,), np.int64)
    count = []

    def enqueue() -> None:
        count.append(0)
        device.compute.copy(there, here, "copy")

    for step in range(4):
        pinned.write([step] * 4)
        device.compute.copy(here, pinned, "upload")
        device.compute.repeat(("copies", 1), enqueue)
        device.compute.copy(pinned, there, "download")
        device.synchronize()
        assert pinned.read().tolist() == [step] * 4
    assert len(count) == 2


def test_a_failed_capture_is_ended_and_its_error_is_the_one_that_is_told(open_gpu: OpenGpu) -> None:
    device = open_gpu().device
    calls = []

    def enqueue() -> None:
        calls.append(0)
        if len(calls) > 1:
            raise ValueError("mine")

    device.compute.repeat("work", enqueue)
    with pytest.raises(ValueError, match="mine"):
        device.compute.repeat("work", enqueue)
    device.synchronize()  # it would be refused within a capture


def test_graphs_are_few_and_end_with_the_memory_they_use(open_gpu: OpenGpu) -> None:
    gpu = open_gpu()
    device = gpu.device
    here, there = (device.empty(name, (4,), np.int64) for name in ("here", "there"))
    for _ in range(2):
        for key in range(40):
            device.compute.repeat(key, lambda: device.compute.copy(there, here, "copy"))
    assert gpu.cuda.live()["graph exec"] == 40
    for _ in range(2):
        for key in range(100, 150):
            device.compute.repeat(key, lambda: device.compute.copy(there, here, "copy"))
    assert gpu.cuda.live()["graph exec"] == 64
    there.memory.free()
    assert "graph exec" not in gpu.cuda.live()
    with pytest.raises(AssertionError, match="was freed"):
        device.compute.copy(here, there, "copy")


def test_contexts_of_bindings_that_are_gone_are_used_again(open_gpu: OpenGpu, stories: Any) -> None:
    gpu, story = open_gpu(), stories[0]
    gpu.tokens(story.ids[:30], 60)
    num_contexts = len(gpu.library.contexts)
    for _ in range(2):
        gpu.decoder._bound.clear()
        gpu.device.compute.forget()
        assert gpu.tokens(story.ids[:30], 60) == story.expected(30, 60)
    assert len(gpu.library.contexts) == num_contexts


# Memory and copies


@pytest.mark.parametrize("part", [(slice(0, 3), slice(0, 2), slice(1, 4)), (slice(1, 2),), (slice(0, 3), slice(1, 2))])
@pytest.mark.parametrize("both", [False, True])
def test_copies_of_parts_in_few_calls(open_gpu: OpenGpu, part: tuple[slice, ...], both: bool) -> None:
    gpu, shape = open_gpu(), (3, 2, 5, 4)
    device, values = gpu.device, np.arange(120).reshape(shape)
    pinned, whole = device.pinned("pinned", shape, np.int64), device.empty("whole", shape, np.int64)
    pinned.write(values)
    device.compute.copy(whole, pinned, "upload")
    to = device.empty("to", shape if both else values[part].shape, np.int64)
    before = len(gpu.cuda.calls)
    device.compute.copy(to[part] if both else to, whole[part], "part")
    calls = [call for call in gpu.cuda.calls[before:] if "Memcpy" in call]
    assert len(calls) == 1
    back = device.pinned("back", to.shape, np.int64)
    device.compute.copy(back, to, "download")
    device.synchronize()
    found = back.read()[part] if both else back.read()
    assert (found == values[part]).all()
    if both:
        assert back.read().sum() == values[part].sum()  # memory is zero at first


def test_copies_of_more_axes_than_two_take_a_call_for_each(open_gpu: OpenGpu) -> None:
    gpu = open_gpu()
    whole, to = (gpu.device.empty(name, (3, 4, 5, 6), np.int64) for name in ("whole", "to"))
    gpu.device.compute.copy(to[:, :2, 1:3, :3], whole[:, :2, 1:3, :3], "part")
    assert gpu.cuda.calls.count("cudaMemcpy2DAsync") == 6


def test_out_of_memory_says_how_much_was_asked_and_is_free(open_gpu: OpenGpu, stories: Any) -> None:
    with pytest.raises(EngineError, match=r"allocating \d+ bytes of memory for past_key.*of 0 MiB are free.*num_slots"):
        open_gpu(cuda={"total_bytes": 200_000})
    gpu = open_gpu()
    with pytest.raises(EngineError, match=r"for big on GPU 0: cudaErrorMemoryAllocation .*of 1024 MiB are free"):
        gpu.device.empty("big", (1 << 31,), np.int64)
    assert gpu.tokens(stories[0].ids[:30], 20) == stories[0].expected(30, 20)


def test_running_out_of_memory_midway_ends_what_ran_and_nothing_else(open_gpu: OpenGpu, stories: Any) -> None:
    """A cache that cannot grow: ONNX Runtime's graphs do not fix its size."""
    gpu, story = open_gpu(library="onnxruntime"), stories[0]
    gpu.cuda.fail("cudaMalloc", "cudaErrorMemoryAllocation")
    with pytest.raises(EngineError, match=r"allocating \d+ bytes of memory for (draft_)?past_"):
        gpu.tokens(story.ids[:30], 400)
    assert gpu.tokens(story.ids[:30], 400) == story.expected(30, 400)


# Faults


@pytest.mark.parametrize(
    ("layout", "after"),
    [*(("split", after) for after in (0, 1, 5, 9, 14)), *(("fused", after) for after in (0, 1, 3, 5))],
)
def test_an_engine_that_refuses_a_call_ends_what_ran_and_nothing_else(
    open_gpu: OpenGpu, stories: Any, layout: str, after: int
) -> None:
    """In prefill, in a warm-up, in a capture (which then falls back)."""
    gpu, story, real = open_gpu(layout), stories[0], fake_trt_runtime._Context.execute_async_v3
    left = [after]

    def execute(context: Any, stream: int) -> bool:
        left[0] -= 1
        if left[0] == -1:
            context.engine.runtime.error("a kernel could not be launched")
            return False
        return real(context, stream)

    gpu.library.IExecutionContext.execute_async_v3 = execute
    with contextlib.suppress(EngineError):
        assert gpu.tokens(story.ids[:30], 40) == story.expected(30, 40)
    assert left[0] < 0
    assert gpu.tokens(story.ids[:30], 40) == story.expected(30, 40)


def test_a_refused_call_is_told_with_what_it_was_for(open_gpu: OpenGpu, stories: Any) -> None:
    gpu = open_gpu()
    gpu.library.faults["enqueue"] = 1
    with pytest.raises(EngineError, match=r"running the target engine \(verify\) with input_ids \[1, 16\].*launched"):
        gpu.tokens(stories[0].ids[:30], 40)
    gpu.library.faults["context"] = 1
    with pytest.raises(EngineError, match=r"creating an execution context of the .* Out of memory"):
        gpu.tokens(stories[0].ids[:30], 40)
    assert gpu.tokens(stories[0].ids[:30], 40) == stories[0].expected(30, 40)


@pytest.mark.parametrize("library", ["tensorrt 11.4", "onnxruntime"])
@pytest.mark.parametrize("status", ["cudaErrorIllegalAddress", "cudaErrorLaunchFailure", "cudaErrorECCUncorrectable"])
def test_a_lost_gpu_refuses_all_further_work_and_nothing_hangs(
    open_gpu: OpenGpu, stories: Any, library: str, status: str
) -> None:
    gpu, story = open_gpu(library=library), stories[0]
    gpu.cuda.fail("cudaEventSynchronize", status, after=9)
    with pytest.raises(DeviceLostError, match=f"cudaEventSynchronize failed while waiting for .*{status}.*start it"):
        gpu.tokens(story.ids[:30], 60)
    for _ in range(3):
        with pytest.raises(EngineError, match=status):
            gpu.tokens(story.ids[:30], 10)
    gpu.runtime.close()


@pytest.mark.parametrize("library", ["tensorrt 11.4", "onnxruntime"])
def test_a_library_that_fails_on_a_lost_gpu_is_not_blamed(open_gpu: OpenGpu, stories: Any, library: str) -> None:
    gpu = open_gpu(library=library)
    if library == "onnxruntime":
        gpu.library.failures.append("CUDA failure 700: an illegal memory access was encountered")
    else:
        gpu.library.faults["enqueue"] = 1
    gpu.cuda.fail("cudaGetLastError", "cudaErrorIllegalAddress")
    gpu.cuda._last = "cudaErrorIllegalAddress"
    with pytest.raises(DeviceLostError, match=r"running the target .*cudaErrorIllegalAddress"):
        gpu.tokens(stories[0].ids[:30], 40)


@pytest.mark.parametrize(
    ("plans", "message"),
    [
        ({"chunk": 12}, r"input input_ids with shape \[1, 16\]: axis 1 may be 1 to 12 or 1 to 8, got 16; .*--chunk 16"),
        ({"slots": 1}, r"input input_ids with shape \[2, 8\]: axis 0 may be 1 to 1 or .*got 2; .*--max-batch 2"),
    ],
)
def test_a_shape_that_no_profile_admits(open_gpu: OpenGpu, stories: Any, plans: dict[str, int], message: str) -> None:
    gpu, story = open_gpu(plans=plans), stories[0]
    running = [gpu.runtime.generate(story.ids[:30], params(40)) for _ in range(2)]
    failed = []
    for generation in running:
        try:
            generation.result(timeout=60)
        except EngineError as error:
            failed.append(str(error))
    assert failed
    with pytest.raises(EngineError, match=message):
        raise EngineError(failed[0])
    assert gpu.tokens(story.ids[:10], 20) == story.expected(10, 20)


# Opening


def test_what_is_not_installed_or_not_there(tmp_path: Path, tiny_bundle: Path, monkeypatch: Any) -> None:
    api = FakeCuda()
    with pytest.raises(EngineError, match=r"GPU 3: cudaErrorInvalidDevice .*fewer GPUs"):
        CudaDevice(3, "tensorrt", api=api)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingDependencyError, match="tensorrt is needed to run TensorRT engines"):
        CudaDevice(0, "tensorrt", api=api)
    on_cpu = SimpleNamespace(__version__="1.32.0", get_available_providers=lambda: ["CPUExecutionProvider"])
    with pytest.raises(EngineError, match=r"has no CUDAExecutionProvider.*install onnxruntime-gpu instead"):
        CudaDevice(0, "onnxruntime", api=api, library=on_cpu)
    with pytest.raises(BundleError, match=r"no CUDA kernel for TensorScatter of .*the target graph would run"):
        device = CudaDevice(0, "onnxruntime", api=api, library=fake_ort_cuda.make(api, on_cpu=["TensorScatter"]))
        device.load(tiny_bundle / "graphs" / "target.onnx", "target")
    trt = fake_trt_runtime.make(api, "11.4.0")
    device = CudaDevice(0, "tensorrt", api=api, library=trt)
    old = fake_trt_runtime.write_plan(tmp_path / "old.plan", Path("none"), [], {}, "10.3.0")
    with pytest.raises(PlanMismatchError, match=r"cannot load .*old.plan on cuda:0: Version tag does not match"):
        device.load(old, "target")
    with pytest.raises(BundleError, match=r"missing.plan cannot be read"):
        device.load(tmp_path / "missing.plan", "target")
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(MissingDependencyError, match="cuda-bindings"):
        CudaDevice(0, "tensorrt", library=trt)


# Engines of a bundle, through the public door


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """This process has a GPU, CUDA and TensorRT, all doubles: the TensorRT."""
    api = FakeCuda()
    library = fake_trt_runtime.make(api, ENGINE_VERSION)
    monkeypatch.setattr(devices, "find_gpu", lambda index=0: L4 if index == 0 else None)
    monkeypatch.setattr(devices, "_version", {"tensorrt": ENGINE_VERSION}.get)
    monkeypatch.setattr(devices, "_providers", list)
    monkeypatch.setattr(cuda, "_api", lambda: api)
    monkeypatch.setattr(cuda_tensorrt, "_import", lambda backend: library)
    return library


def compiled(bundle: Path, folder: Path, *, version_compatible: bool = False, **sizes: int) -> Path:
    """A copy of a bundle with engines of the split layout in it. sizes: slots, capacity; as `compile` has them."""
    sizes = {"slots": 1, "capacity": CAPACITY, **sizes}
    shutil.copytree(bundle, folder)
    manifest, engines = read_manifest(folder), folder / "engines"
    engines.mkdir()
    plans = write_plans(folder, names.LAYOUT_SPLIT, engines, ENGINE_VERSION, host_code=version_compatible, **sizes)
    (engines / "build.json").write_text("{}")
    records = [
        EngineRecord(
            role=role,
            platform="l4",
            sm=L4.sm,
            backend="tensorrt",
            version=ENGINE_VERSION,
            driver=None,
            precision="fp32",
            lowering="native",
            layout=names.LAYOUT_SPLIT,
            max_context=sizes["capacity"] - 2 * WIDTH,
            capacity=sizes["capacity"],
            max_batch=sizes["slots"],
            hardware_compat="none",
            version_compatible=version_compatible,
            profiles=tuple(
                ProfileRecord(name=name, sizes={"S": (1, n, n)}) for name, n in (("prefill", CHUNK), ("verify", WIDTH))
            ),
            file=f"engines/{path.name}",
            report="engines/build.json",
            cache_key="0" * 64,
        )
        for role, path in plans.items()
    ]
    added = [
        FileRecord(
            path=f"engines/{path.name}",
            num_bytes=path.stat().st_size,
            sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        )
        for path in sorted(engines.iterdir())
    ]
    files = tuple(sorted((*manifest.files, *added), key=lambda file: file.path))
    write_manifest(folder, replace(manifest, engines=tuple(records), files=files))
    return folder


@pytest.mark.parametrize("version_compatible", [False, True])
def test_code_for_the_host_is_allowed_to_version_compatible_engines_alone(
    tiny_bundle: Path, tmp_path: Path, stories: Any, machine: ModuleType, version_compatible: bool
) -> None:
    bundle = compiled(tiny_bundle, tmp_path / "b", version_compatible=version_compatible)
    with Runtime.open(bundle) as runtime:
        assert runtime.device == "cuda:0"
        result = runtime.generate(stories[0].ids[:30], params(20)).result(timeout=60)
    assert list(result.token_ids) == stories[0].expected(30, 20)
    assert [found.engine_host_code_allowed for found in machine.runtimes] == [version_compatible]


def test_host_code_that_is_not_allowed_is_refused(tiny_bundle: Path, tmp_path: Path, machine: ModuleType) -> None:
    bundle = compiled(tiny_bundle, tmp_path / "b", version_compatible=True)
    device = CudaDevice(0, "tensorrt")
    with pytest.raises(BundleError, match="host executable code"):
        device.load(bundle / read_manifest(bundle).engines[0].file, "target")


def test_the_context_is_that_of_the_engines(tiny_bundle: Path, tmp_path: Path, machine: ModuleType) -> None:
    with Runtime.open(compiled(tiny_bundle, tmp_path / "b", capacity=320)) as runtime:
        assert runtime.max_context == 320 - 2 * WIDTH < runtime.manifest.max_context
        with pytest.raises(
            RequestError, match=r"context of the engines 304, .*shorten it or compile with a larger --max-context"
        ):
            runtime.generate([1] * 304)
    with Runtime.open(tiny_bundle, device="cpu", num_threads=1) as runtime:
        assert runtime.max_context == runtime.manifest.max_context


def test_commands_take_the_slots_that_engines_admit(
    tiny_bundle: Path, tmp_path: Path, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`serve`, `bench` and `doctor` without a word about slots; with one too many it is refused."""
    bundle, served = str(compiled(tiny_bundle, tmp_path / "b")), []
    monkeypatch.setattr(server_run, "run", lambda service, *_, **__: served.append(service.runtime.stats.num_slots))
    monkeypatch.setattr(cli_serve, "_log_server_errors", lambda: None)
    monkeypatch.setattr(bench, "_import_s", lambda: 0.1)
    few = ["--modes", "target", "--requests", "2", "--max-new-tokens", "4", "--rounds", "1", "--json"]

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(cli, arguments)

    assert call("serve", bundle, "--port", "0").exit_code == 0 and served == [1]
    measured = call("bench", bundle, *few)
    assert [row["concurrency"] for row in json.loads(measured.stdout)["rows"]] == [1]
    assert "engines admit 1 at a time: measuring concurrency 1 of 1,2,4,8" in " ".join(measured.stderr.split())
    planned = json.loads(call("doctor", bundle, "--json").stdout)["memory_plan"]
    assert (planned["device"], planned["num_slots"], planned["grows_on_demand"]) == ("cuda", 1, False)
    for command, option in (("serve", "--slots"), ("bench", "--concurrency"), ("doctor", "--slots")):
        error = call(command, bundle, option, "2").exception
        assert isinstance(error, EngineError) and "num_slots is 2, and the engines" in str(error)
    machine.cuda.total_bytes = 1000
    error = call("doctor", bundle).exception
    assert isinstance(error, EngineError) and "of which 1.0 KB are free" in str(error)


# What the doubles are worth

SOURCES = {path.name: path.read_text() for path in (Path(__file__).parents[2] / "runtime").glob("*cuda*.py")}
TENSORRT_SURFACE = {
    "Runtime": ["deserialize_cuda_engine", "engine_host_code_allowed"],
    "ICudaEngine": [
        "num_io_tensors", "get_tensor_name", "get_tensor_mode", "get_tensor_shape", "get_tensor_dtype",
        "get_tensor_location", "get_tensor_profile_shape", "num_optimization_profiles", "device_memory_size_v2",
        "create_execution_context",
    ],
    "IExecutionContext": [
        "set_optimization_profile_async", "set_input_shape", "set_tensor_address", "set_device_memory",
        "infer_shapes", "get_tensor_shape", "execute_async_v3",
    ],
}  # fmt: skip


def test_every_function_of_cuda_that_is_called_exists() -> None:
    """In the installed bindings, where there are such, and in the double."""
    called = set(re.findall(r'"(cuda[A-Z]\w+)"', SOURCES["cuda.py"] + SOURCES["device_cuda.py"]))
    functions = {name for name in called if "Error" not in name} | {"cudaGetLastError", "cudaGetErrorString"}
    assert len(functions) > 25
    for api in (pytest.importorskip("cuda.bindings.runtime"), FakeCuda()):
        assert [name for name in sorted(functions) if not hasattr(api, name)] == []
        assert api.cudaStreamNonBlocking == 1 and api.cudaEventDisableTiming == 2 and api.cudaEventDefault == 0
    known = {status.name for status in pytest.importorskip("cuda.bindings.runtime").cudaError_t}
    assert {f"cudaError{name}" for name in cuda._LOST} <= known


def test_what_is_asked_of_tensorrt_exists_in_the_installed_one_and_is_removed_in_none() -> None:
    trt = pytest.importorskip("tensorrt_rtx")
    for kind, surface in TENSORRT_SURFACE.items():
        assert [name for name in surface if not hasattr(getattr(trt, kind), name)] == []
    used = set(re.findall(r"\b(?:trt|engine|_engine|_runtime)\.(\w+)", SOURCES["cuda_tensorrt.py"]))
    known = {name for surface in TENSORRT_SURFACE.values() for name in surface} | set(dir(trt))
    assert used <= known | {"trt"}


def test_the_installed_tensorrt_tells_why_it_cannot_load_a_plan(tmp_path: Path) -> None:
    """The real library reads the file and logs through the logger; there is no GPU for more."""
    pytest.importorskip("tensorrt_rtx")
    device = CudaDevice(0, "tensorrt-rtx", api=FakeCuda())
    (tmp_path / "bad.plan").write_bytes(b"garbage" * 1000)
    with pytest.raises((PlanMismatchError, BundleError), match=r"cannot load .*bad.plan on cuda:0: .*engine"):
        device.load(tmp_path / "bad.plan", "target")


MISTAKES: dict[str, tuple[Any, str, Any, str]] = {
    "addresses that are not aligned": (cuda_tensorrt, "ALIGNMENT", 8, "is not aligned to 256 bytes"),
    "a context that is shared with a graph": (
        cuda_tensorrt.TensorRtBound,
        "_context",
        lambda self, stream, repeats: self.program.shared_context(self._profile),
        "on a context that a CUDA graph was captured from",
    ),
    "a profile that is never switched": (
        fake_trt_runtime._Context,
        "set_optimization_profile_async",
        lambda *args: True,
        "a shape is set before the profile",
    ),
    "an event that is not waited for": (CudaStream, "wait", lambda self, event: None, "decoding failed|other tokens"),
    "a status that nobody looks at": (
        Cuda,
        "call",
        lambda self, name, *args, what: getattr(self.api, name)(*args)[-1],
        "before cudaSetDevice",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_doubles_find_mistakes(
    tiny_fused_bundle: Path, tmp_path: Path, stories: Any, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    owner, name, broken, message = MISTAKES[mistake]
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((EngineError, AssertionError), match=message):
        gpu = Gpu(tiny_fused_bundle, names.LAYOUT_SPLIT, tmp_path, "tensorrt 11.4")
        running = [gpu.runtime.generate(story.ids[:30], params(40)) for story in (stories[0], stories[0])]
        for generation in running:
            found = list(generation.result(timeout=60).token_ids)
            assert found == stories[0].expected(30, 40), "other tokens"


# Looking at it


def test_times_are_taken_only_while_it_is_traced(open_gpu: OpenGpu, stories: Any) -> None:
    gpu = open_gpu()
    gpu.runtime.trace(Tracer())
    result = gpu.runtime.generate(stories[0].ids[:30], params(60)).result(timeout=60)
    assert list(result.token_ids) == stories[0].expected(30, 60)
    stats = gpu.runtime.stats
    assert stats.verify_ms > 0 and stats.draft_ms > 0
    quiet = open_gpu()
    quiet.tokens(stories[0].ids[:30], 20)
    assert quiet.device.take_spent() == {}
    assert "cudaEventElapsedTime" not in quiet.cuda.calls


def test_a_timeline_has_a_row_for_each_stream_and_counts_graphs(open_gpu: OpenGpu, stories: Any) -> None:
    gpu, tracer = open_gpu(), Tracer()
    gpu.tokens(stories[0].ids[:30], 40)
    gpu.runtime.trace(tracer)
    gpu.tokens(stories[0].ids[:30], 40)
    gpu.runtime.trace(None)
    gpu.tokens(stories[0].ids[:30], 40)
    events = tracer.to_dict()["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    found = {(rows[event["tid"]], event["name"]) for event in events if event["ph"] == "X"}
    assert {("compute", "verify"), ("compute", "draft"), ("copy", "copy"), ("host", "cycle")} <= found
    assert gpu.runtime.stats.num_graphs > 0


def test_ranges_carry_the_labels(open_gpu: OpenGpu, stories: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    nvtx = ModuleType("nvtx")
    nvtx.annotate = lambda label: shown.append(label) or contextlib.nullcontext()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvtx", nvtx)
    open_gpu(ranges=True).tokens(stories[0].ids[:30], 40)
    assert {"verify", "accept", "draft", "refine", "upload", "copy"} <= set(shown)
