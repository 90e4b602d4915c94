"""Which device, backend and engines run a bundle, on machines that have a GPU and on ones that have none."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from xpress_export import names
from xpress_export.errors import BundleError, EngineError, PlanMismatchError, RequestError
from xpress_export.gpu import Gpu
from xpress_export.manifest import EngineRecord, FileRecord, Manifest, ProfileRecord, read_manifest
from xpress_export.runtime import Runtime, devices
from xpress_export.runtime.device_cpu import CpuDevice

L4 = Gpu("NVIDIA L4", 89, 580)
VERSION = "10.16.1.11"
CHUNK, VERIFY, SLOTS = 64, 5, 2


def engine(role: str, **changes: Any) -> EngineRecord:
    rows = {"prefill": CHUNK, "verify": VERIFY}
    base = EngineRecord(
        role=role,
        platform="l4",
        sm=89,
        backend="tensorrt",
        version=VERSION,
        driver=580,
        precision="fp32",
        lowering="native",
        layout="fused" if role == names.STEP else "split",
        max_context=600,
        capacity=624,
        max_batch=SLOTS,
        hardware_compat="none",
        version_compatible=False,
        profiles=tuple(ProfileRecord(name=name, sizes={"S": (1, n, n)}) for name, n in rows.items()),
        file=f"engines/{role}.plan",
        report=f"engines/{role}.build.json",
        cache_key="0" * 64,
    )
    return replace(base, **changes)


@pytest.fixture
def manifest(tiny_bundle: Path) -> Manifest:
    return read_manifest(tiny_bundle)


def with_engines(manifest: Manifest, *engines: EngineRecord) -> Manifest:
    """The manifest as if these engines, whose files do not matter here, were in it."""
    found = copy.copy(manifest)
    object.__setattr__(found, "engines", engines)
    return found


def compiled(manifest: Manifest, **changes: Any) -> Manifest:
    return with_engines(manifest, *(engine(role, **changes) for role in (*manifest.roles, names.ACCEPT)))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend to be a machine with this GPU, these packages, and CUDA in ONNX Runtime or not."""

    def pretend(gpu: Gpu | None, *, packages: dict[str, str] | None = None, cuda: bool = False) -> None:
        monkeypatch.setattr(devices, "find_gpu", lambda index=0: gpu if index == 0 else None)
        monkeypatch.setattr(devices, "_version", (packages or {}).get)
        monkeypatch.setattr(devices, "_providers", lambda: ["CUDAExecutionProvider"] * cuda + ["CPUExecutionProvider"])

    return pretend


def chosen(manifest: Manifest, device: str = "auto", backend: str = "auto") -> tuple[str, str]:
    precisions = devices.role_precisions(manifest, None, "split")
    choice = devices.choose(manifest, device, backend, precisions, "split")
    return choice.name, choice.backend


def test_without_a_gpu_it_is_the_cpu(manifest: Manifest, machine: Any) -> None:
    machine(None, packages={"tensorrt": VERSION}, cuda=True)
    assert chosen(compiled(manifest)) == ("cpu", "onnxruntime")
    with pytest.raises(EngineError, match="no such GPU"):
        chosen(manifest, "cuda:0")
    with pytest.raises(EngineError, match="no GPU is found"):
        chosen(manifest, backend="tensorrt")


def test_engines_come_before_the_cuda_provider_and_that_before_the_cpu(manifest: Manifest, machine: Any) -> None:
    machine(L4, packages={"tensorrt": VERSION}, cuda=True)
    assert chosen(compiled(manifest)) == ("cuda:0", "tensorrt")
    assert chosen(compiled(manifest), backend="onnxruntime") == ("cuda:0", "onnxruntime")
    assert chosen(compiled(manifest), "cpu") == ("cpu", "onnxruntime")
    assert chosen(manifest) == ("cuda:0", "onnxruntime")
    assert chosen(compiled(manifest, sm=120)) == ("cuda:0", "onnxruntime")
    assert chosen(compiled(manifest, precision="fp16")) == ("cuda:0", "onnxruntime")
    machine(L4, cuda=True)
    assert chosen(compiled(manifest)) == ("cuda:0", "onnxruntime"), "TensorRT is not installed"
    with pytest.raises(EngineError, match="no such GPU"):
        chosen(manifest, "cuda:1")


def test_a_gpu_that_cannot_be_used_is_said(manifest: Manifest, machine: Any, caplog: pytest.LogCaptureFixture) -> None:
    machine(L4)
    with caplog.at_level(logging.WARNING):
        assert chosen(manifest) == ("cpu", "onnxruntime")
    assert "NVIDIA L4" in caplog.text and "running on the CPU" in caplog.text
    with pytest.raises(EngineError, match=r"no engines for sm_89.*onnxruntime-gpu"):
        chosen(manifest, "cuda")
    with pytest.raises(EngineError, match="no engines that run on NVIDIA L4"):
        chosen(manifest, backend="tensorrt")


def find(manifest: Manifest, layout: str = "split") -> devices.Found:
    precisions = devices.role_precisions(manifest, None, layout)
    return devices.find(Path("b"), manifest, devices.Choice(0, "tensorrt", ""), precisions, layout)


def test_engines_of_this_gpu_are_taken_before_compatible_ones(manifest: Manifest, machine: Any) -> None:
    machine(L4, packages={"tensorrt": VERSION})
    portable = [
        engine(role, sm=86, platform="a10", hardware_compat="ampere-plus", file=f"engines/{role}.86.plan")
        for role in (*manifest.roles, names.ACCEPT)
    ]
    assert find(with_engines(manifest, *portable)).files["target"] == Path("b/engines/target.86.plan")
    both = with_engines(manifest, *portable, *compiled(manifest).engines)
    assert find(both).files["target"] == Path("b/engines/target.plan")


def test_memory_is_planned_for_the_engines_of_this_gpu_and_the_slots_they_admit(
    manifest: Manifest, machine: Any
) -> None:
    machine(L4, packages={"tensorrt": VERSION})
    others = [engine(r, sm=87, file=f"engines/{r}.87.plan", max_batch=1) for r in (*manifest.roles, names.ACCEPT)]
    both = with_engines(manifest, *others, *compiled(manifest).engines)
    files = [FileRecord(path=e.file, num_bytes=10 ** (e.sm == 89), sha256="0" * 64) for e in both.engines]
    object.__setattr__(both, "files", (*manifest.files, *files))
    found = find(both)
    shape = found.shape(both, num_slots=None, chunk=128, max_drafts=None, max_context=100)
    plan = devices.plan_of(both, devices.Choice(0, "tensorrt", ""), found, None, "split", shape)
    assert plan.of("weights") == 10 * len(found.engines)
    assert (plan.shape.num_slots, plan.shape.max_context) == (SLOTS, 100)


def test_engines_that_are_missing_or_of_another_machine_are_refused(manifest: Manifest, machine: Any) -> None:
    machine(L4, packages={"tensorrt": VERSION})
    some = with_engines(manifest, *compiled(manifest).engines[1:])
    with pytest.raises(BundleError, match="no tensorrt engine of target for cuda:0; run `xpress-export compile b`"):
        find(some)
    with pytest.raises(PlanMismatchError, match=r"version is 10\.3\.0, running 10\.16"):
        find(compiled(manifest, version="10.3.0"))


def test_a_fused_bundle_needs_its_step_alone(tiny_fused_bundle: Path, machine: Any) -> None:
    machine(L4, packages={"tensorrt": VERSION})
    fused = with_engines(read_manifest(tiny_fused_bundle), engine(names.STEP))
    assert find(fused, "fused").files == {names.STEP: Path("b/engines/step.plan")}
    with pytest.raises(BundleError, match="no tensorrt engine of target and drafter and refiner and accept"):
        find(fused, "split")


def test_sizes_give_way_to_engines_unless_they_were_asked_for(manifest: Manifest, machine: Any) -> None:
    machine(L4, packages={"tensorrt": VERSION})
    found = find(compiled(manifest))
    shape = found.shape(manifest, num_slots=None, chunk=128, max_drafts=None)
    assert (shape.num_slots, shape.num_drafts, shape.chunk) == (SLOTS, VERIFY - 1, CHUNK)
    shape = found.shape(manifest, num_slots=1, chunk=16, max_drafts=2)
    assert (shape.num_slots, shape.num_drafts, shape.chunk) == (1, 2, 16)
    with pytest.raises(EngineError, match=r"num_slots is 3.*at most 2.*--max-batch"):
        found.shape(manifest, num_slots=3, chunk=128, max_drafts=None)
    with pytest.raises(EngineError, match=r"max_draft_tokens is 5.*at most 4.*--block"):
        found.shape(manifest, num_slots=None, chunk=128, max_drafts=5)


def test_graphs_have_no_such_limits(manifest: Manifest) -> None:
    precisions = devices.role_precisions(manifest, None, "split")
    found = devices.find(Path("b"), manifest, devices.Choice(None, "onnxruntime", ""), precisions, "split")
    shape = found.shape(manifest, num_slots=None, chunk=128, max_drafts=None)
    assert (shape.num_slots, shape.num_drafts, shape.chunk) == (devices.NUM_SLOTS, 7, 128)


class Small(CpuDevice):
    """Knows how much memory it has: next to nothing. closed: whether it was given back."""

    closed = False

    def memory_info(self) -> tuple[int, int]:
        return 1000, 2000

    def close(self) -> None:
        self.closed = True


def test_what_does_not_fit_is_refused_before_it_is_loaded(tiny_bundle: Path) -> None:
    device = Small(1)
    with pytest.raises(EngineError, match=r"needs about .* of which 1\.0 KB are free: .* caches"):
        Runtime.open(tiny_bundle, device=device)
    assert device.closed


def test_names_that_mean_nothing(manifest: Manifest) -> None:
    for device, backend in (("gpu", "auto"), ("cuda:x", "auto"), ("auto", "torch"), ("cpu", "tensorrt")):
        with pytest.raises(RequestError):
            chosen(manifest, device, backend)
