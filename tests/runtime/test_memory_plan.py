"""What a plan says is what the runtime takes: exactly for what it allocates itself, and a refusal has the numbers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from xpress_export import names
from xpress_export.errors import EngineError
from xpress_export.manifest import Manifest, read_manifest
from xpress_export.records import EngineRecord, FileRecord, ProfileRecord
from xpress_export.runtime import Runtime, SamplingParams, memory_plan
from xpress_export.runtime.device import Buffer
from xpress_export.runtime.device_cpu import CpuDevice, HostMemory
from xpress_export.runtime.memory_plan import MemoryPlan, plan_memory, refuse_if_too_large
from xpress_export.runtime.resident_memory import Shape

LAYOUTS = (names.LAYOUT_SPLIT, names.LAYOUT_FUSED)
SIZES = {"num_slots": 3, "prefill_chunk": 16}


class CountedHost(HostMemory):
    """Host memory that is in a device's account until it is freed."""

    live: list[CountedHost]

    def free(self) -> None:
        self.live.remove(self)
        super().free()


class CountedCpu(CpuDevice):
    """The real device; live: what is allocated on it."""

    def __init__(self) -> None:
        super().__init__(1)
        self.live: list[CountedHost] = []

    def _allocate(self, name: str, shape: tuple[int, ...], dtype: type, *, on_host: bool) -> Buffer:
        buffer = super()._allocate(name, shape, dtype, on_host=on_host)
        memory = CountedHost(name, buffer.num_bytes, on_host=on_host)
        memory.live = self.live
        self.live.append(memory)
        return dataclasses.replace(buffer, memory=memory)

    def of(self, *, on_host: bool) -> int:
        return sum(memory.num_bytes for memory in self.live if memory.on_host == on_host)


def plan(manifest: Manifest, layout: str, **changes: Any) -> MemoryPlan:
    sizes = {"num_slots": 3, "chunk": 16, "max_context": None}
    shape = Shape.of(manifest, **{name: changes.pop(name, size) for name, size in sizes.items()})
    options = {"device_kind": "cpu", "backend": "onnxruntime", "layout": layout, "shape": shape}
    return plan_memory(manifest, **{**options, **changes})


def allocated(found: MemoryPlan) -> int:
    return sum(found.of(kind) for kind in ("caches", "state", "scratch"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_what_the_runtime_allocates(tiny_fused_bundle: Path, stories: Any, layout: str) -> None:
    """Before any request with a short context, and after one as long as the context."""
    found, device = plan(read_manifest(tiny_fused_bundle), layout), CountedCpu()
    with Runtime.open(tiny_fused_bundle, device=device, layout=layout, **SIZES) as runtime:
        assert found.pinned_bytes == device.of(on_host=True)
        assert allocated(found) > device.of(on_host=False)
        params = SamplingParams(max_new_tokens=100, ignore_eos=True)
        runtime.generate(stories[0].ids[:490], params).result()
        rows = sum(m.num_bytes for m in device.live if "past_" in m.name)
        assert found.of("caches") == rows
        assert allocated(found) == device.of(on_host=False)


def test_weights_are_counted_once_on_cpu_and_where_they_are_copied_on_a_gpu(tiny_fused_bundle: Path) -> None:
    manifest = read_manifest(tiny_fused_bundle)
    files = {file.path: file.num_bytes for file in manifest.files if file.path.endswith(".data")}
    for layout in LAYOUTS:
        assert plan(manifest, layout).of("weights") == sum(files.values())
    on_gpu = plan(manifest, names.LAYOUT_SPLIT, device_kind="cuda")
    shared = 2 * manifest.target.vocab_size * manifest.target.hidden_size * 4
    borrowing = [role for role, graph in manifest.graphs.items() if len(graph.data) > 1]
    assert borrowing
    assert on_gpu.of("weights") - sum(files.values()) == len(borrowing) * min(shared, files["graphs/target.data"])
    assert on_gpu.of("context") == 400 << 20
    assert plan(manifest, names.LAYOUT_FUSED, device_kind="cuda").of("weights") == sum(files.values())


def test_fewer_slots_and_shorter_contexts_take_less(tiny_bundle: Path) -> None:
    manifest = read_manifest(tiny_bundle)
    found = plan(manifest, names.LAYOUT_SPLIT)
    rows = found.of("caches") / found.shape.num_slots / found.shape.most_rows
    fewer = plan(manifest, names.LAYOUT_SPLIT, num_slots=1)
    assert fewer.of("caches") == rows * fewer.shape.most_rows
    short = plan(manifest, names.LAYOUT_SPLIT, max_context=100)
    assert short.of("caches") == rows * 3 * short.shape.most_rows
    assert short.of("growing") == 0 < found.of("growing")


def engine(role: str, num_bytes: int, lowering: str, **changes: Any) -> tuple[EngineRecord, FileRecord]:
    record = EngineRecord(
        role=role,
        platform="jetson-orin",
        sm=87,
        backend="tensorrt",
        version="10.3.0",
        driver=540,
        precision="fp32",
        lowering=lowering,
        layout="split",
        max_context=600,
        capacity=624,
        max_batch=3,
        hardware_compat="none",
        version_compatible=False,
        profiles=(ProfileRecord(name="verify", sizes={"B": (1, 3, 3)}),),
        file=f"engines/{role}.plan",
        report=f"engines/{role}.build.json",
        cache_key="0" * 64,
    )
    record = dataclasses.replace(record, **changes)
    return record, FileRecord(path=record.file, num_bytes=num_bytes, sha256="0" * 64)


def compiled(manifest: Manifest, lowering: str, **changes: Any) -> Manifest:
    """The manifest with engines, as if they were there."""
    made = [engine(role, 1000 + i, lowering, **changes) for i, role in enumerate((*manifest.roles, names.ACCEPT))]
    found = object.__new__(Manifest)
    found.__dict__.update(manifest.__dict__)
    found.__dict__["engines"] = tuple(record for record, _ in made)
    found.__dict__["files"] = (*manifest.files, *(file for _, file in made))
    return found


def test_engines_have_their_own_size_and_a_fixed_cache(tiny_bundle: Path) -> None:
    manifest = read_manifest(tiny_bundle)

    def on_gpu(manifest: Manifest) -> MemoryPlan:
        options = {"device_kind": "cuda", "backend": "tensorrt", "engines": manifest.engines}
        return plan(manifest, names.LAYOUT_SPLIT, **options)

    found = on_gpu(compiled(manifest, "native"))
    assert found.of("weights") == 1000 + 1001 + 1002 + 1003
    on_cpu = plan(manifest, names.LAYOUT_SPLIT)
    assert found.of("caches") * on_cpu.shape.most_rows == on_cpu.of("caches") * 624
    assert found.of("growing") == 0
    old = on_gpu(compiled(manifest, "decomposed"))
    assert old.of("caches") == 2 * found.of("caches")
    short = on_gpu(compiled(manifest, "native", max_context=300, capacity=320))
    assert (found.shape.max_context, short.shape.max_context) == (600, 320 - 2 * short.shape.width)
    assert short.of("activations") < found.of("activations")


def test_a_plan_prints_as_a_table_and_as_json(tiny_bundle: Path, tiny_fused_bundle: Path) -> None:
    found = plan(read_manifest(tiny_bundle), names.LAYOUT_SPLIT).with_free(10**9, 2 * 10**9)
    raw = json.loads(json.dumps(found.to_json()))
    assert raw["free_bytes"] == 10**9 and raw["total_bytes"] == 2 * 10**9
    on_device = [item["num_bytes"] for item in raw["items"] if item["kind"] != memory_plan.PINNED]
    assert raw["device_bytes"] == sum(on_device) == found.device_bytes
    rows = found.rows()
    assert rows[-1] == ("device, all", rows[-1][1], "1.0 GB free")
    assert ("activations of the largest call", "estimated") in [(name, remark) for name, _, remark in rows]
    assert ("caches", "estimated") in [(name, remark) for name, _, remark in rows], "the host's loop is another one"
    fused = plan(read_manifest(tiny_fused_bundle), names.LAYOUT_FUSED)
    assert ("caches", "") in [(name, remark) for name, _, remark in fused.rows()]


def test_what_does_not_fit_is_refused_with_numbers_and_a_way_out(tiny_bundle: Path) -> None:
    found = plan(read_manifest(tiny_bundle), names.LAYOUT_SPLIT)
    refuse_if_too_large(found, found.device_bytes)
    with pytest.raises(
        EngineError,
        match=r"needs about .* of the cpu device's memory, of which .* free: .* caches.*num_slots 2 \(it is 3",
    ):
        refuse_if_too_large(found, found.device_bytes - 1)
    with pytest.raises(EngineError, match=r"not even one slot fits: run a bundle of lower precision"):
        refuse_if_too_large(found, found.of("weights"))
