"""Adding engines to a bundle: committed whole or not at all, cached, replaced, and killed at any moment."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from xpress_export.engines import compile as compile_module
from xpress_export.engines import memory, process
from xpress_export.engines import plan as planning
from xpress_export.engines.cache import Cache
from xpress_export.engines.compile import Compiled, compile_bundle
from xpress_export.engines.job import BuildJob
from xpress_export.engines.options import CompileOptions
from xpress_export.errors import BundleError, EngineBuildError
from xpress_export.manifest import open_bundle, read_manifest, write_manifest


def compiled(bundle: Path, **options: Any) -> Compiled:
    return compile_bundle(bundle, CompileOptions(**{"platform": "l4", **options}))


def snapshot(bundle: Path) -> dict[str, bytes]:
    return {str(p.relative_to(bundle)): p.read_bytes() for p in sorted(bundle.rglob("*")) if p.is_file()}


def test_engines_join_the_bundle(bundle: Path, builds: Any) -> None:
    made = compiled(bundle)
    manifest = open_bundle(bundle)
    assert manifest == made.manifest and [e.role for e in manifest.engines] == [
        "accept",
        "drafter",
        "refiner",
        "target",
    ]
    target = manifest.engines[3]
    assert (target.sm, target.backend, target.lowering, target.capacity) == (89, "tensorrt-rtx", "native", 624)
    report = json.loads((bundle / target.report).read_text())
    assert report["evidence"].startswith("compiled") and report["seconds"]["build"] == 1.0
    assert report["by_hand"][1].startswith("tensorrt_rtx --onnx=target.onnx") and "--profile=1" in report["by_hand"][1]


def test_a_fused_bundle_has_one_engine(fused_bundle: Path, builds: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(fused_bundle, tmp_path / "bundle"))
    made = compiled(folder)
    (step,) = made.manifest.engines
    assert (step.role, step.layout, step.precision, step.capacity) == ("step", "fused", "fp16", 624)
    sizes = {profile.name: profile.sizes for profile in step.profiles}
    assert list(sizes) == ["prefill", "step"] and sizes["prefill"]["S"] == (1, 64, 512)
    assert sizes["step"]["S"] == (1, 8, 8) and sizes["step"]["N"] == (2, 8, 8)
    files = {file.path: file.num_bytes for file in made.manifest.files}
    weights = sum(files[f"graphs/{role}.data"] for role in ("target", "drafter", "refiner"))
    plan = planning.plan_bundle(folder, made.manifest, CompileOptions(platform="l4"), None)
    assert plan.engines[0].weight_bytes == weights
    both = compiled(folder, layout="split").manifest
    assert [e.role for e in both.engines] == ["accept", "drafter", "refiner", "step", "target"]
    keys = [e.cache_key for e in both.engines]
    assert [e.cache_key for e in compiled(folder, precision="fp16").manifest.engines] == keys


def test_layouts_that_a_bundle_cannot_be_compiled_in(bundle: Path, fused_bundle: Path, builds: Any) -> None:
    with pytest.raises(
        EngineBuildError, match=r"no fused step; build it again with `xpress-export build --layout fused`"
    ):
        compiled(bundle, layout="fused")
    with pytest.raises(EngineBuildError, match=r"--role step: the engines of the split layout are target, .* accept"):
        compiled(bundle, roles=("step",))
    with pytest.raises(EngineBuildError, match=r"--role target: the engines of the fused layout are step"):
        compiled(fused_bundle, roles=("target",))
    assert not builds.jobs


def test_another_platform_adds_and_the_same_replaces(bundle: Path, builds: Any) -> None:
    first = compiled(bundle).manifest
    second = compiled(bundle, platform="t4").manifest
    assert len(second.engines) == 8 and {e.platform for e in second.engines} == {"l4", "t4"}
    third = compiled(bundle, opt_level=1).manifest
    assert len(third.engines) == 8 and open_bundle(bundle) == third
    old, new = ({e.file for e in m.engines if e.platform == "l4"} for m in (first, third))
    assert not old & new and not any((bundle / path).exists() for path in old)


def test_cache_saves_the_second_build(bundle: Path, builds: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    compiled(bundle, cache_dir=cache)
    before = read_manifest(bundle)
    again = compiled(bundle, cache_dir=cache)
    assert len(builds.jobs) == 4 and all(built.cached for built in again.engines)
    assert again.manifest == before
    compiled(bundle, cache_dir=cache, max_batch=2)
    assert len(builds.jobs) == 8


@pytest.mark.parametrize("change", ["opt_level", "workspace_mb", "chunk", "max_context", "platform", "tactic_mb"])
def test_whatever_determines_a_plan_is_in_its_key(bundle: Path, builds: Any, change: str) -> None:
    value = {"opt_level": 1, "workspace_mb": 64, "chunk": 32, "max_context": 128, "platform": "a10", "tactic_mb": 64}
    keys = [
        {e.cache_key for e in compiled(bundle, roles=("target",), **extra).manifest.engines if e.role == "target"}
        for extra in ({}, {change: value[change]})
    ]
    assert keys[0] != keys[1]


def test_damaged_cache_entry_is_built_again(bundle: Path, builds: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    compiled(bundle, cache_dir=cache, roles=("target",))
    (entry,) = Cache(cache, 1).entries()
    path = cache / "plans" / entry.key / "plan"
    path.unlink()
    path.write_bytes(b"x" * entry.num_bytes)
    compiled(bundle, cache_dir=cache, roles=("target",))
    assert len(builds.jobs) == 2
    open_bundle(bundle)


def test_cache_cap_drops_the_least_recently_used(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache", 250)
    plan = tmp_path / "plan"
    for n in range(3):
        plan.unlink(missing_ok=True)
        plan.write_bytes(b"x" * 100)
        cache.store(f"key{n}", plan, {"plan": {"sha256": hashlib.sha256(b"x" * 100).hexdigest()}})
        os.utime(cache.folder / "plans" / f"key{n}", (n, n))
    assert {entry.key for entry in cache.entries()} == {"key1", "key2"}
    assert cache.fetch("key1", tmp_path / "out") is not None and cache.fetch("key0", tmp_path / "out2") is None
    assert cache.clear() == 200 and cache.entries() == []


def test_damaged_weights_are_found_before_the_commit(bundle: Path, builds: Any) -> None:
    weights = bundle / "graphs" / "target.data"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    before = snapshot(bundle)
    with pytest.raises(BundleError, match=r"target\.data should have sha256"):
        compiled(bundle)
    assert snapshot(bundle) == before


def test_platforms_of_one_architecture_share_the_cache(bundle: Path, builds: Any, tmp_path: Path) -> None:
    compiled(bundle, cache_dir=tmp_path / "cache", roles=("target",))
    made = compiled(bundle, cache_dir=tmp_path / "cache", roles=("target",), platform="rtx-4090")
    assert len(builds.jobs) == 1 and made.engines[0].report["platform"] == "rtx-4090"
    open_bundle(bundle)


def test_a_bundle_that_cannot_be_written(bundle: Path, builds: Any) -> None:
    (bundle / "engines").write_text("in the way")
    with pytest.raises(EngineBuildError, match=r"engines cannot be written to .*: File exists"):
        compiled(bundle)


class Crash(BaseException):
    """As sudden as a kill, and nothing catches it."""


def test_crash_at_every_step_of_the_commit(bundle: Path, builds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever file operation is the last, the bundle opens as it was or as it becomes.

    The same engines are compiled again and again; no two builds of one engine write the same bytes.
    """
    compiled(bundle, platform="t4")
    compiled(bundle)
    before, steps = read_manifest(bundle), 0
    while True:
        countdown = [steps]

        def step(real: Any, *args: Any, countdown: list[int] = countdown, **kwargs: Any) -> Any:
            countdown[0] -= 1
            if countdown[0] < 0:
                raise Crash
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            for owner, name in ((os, "replace"), (os, "fsync"), (Path, "unlink"), (Path, "write_bytes")):
                real = getattr(owner, name)
                patch.setattr(owner, name, lambda *a, real=real, **k: step(real, *a, **k))
            try:
                compiled(bundle)
                done = True
            except Crash:
                done = False
        found = open_bundle(bundle)
        assert found.graphs == before.graphs and len(found.engines) == 8
        if done:
            break
        steps += 1
    assert steps > 10
    names = {p.name for p in (bundle / "engines").iterdir()}
    assert names == {Path(path).name for e in found.engines for path in (e.file, e.report)}


@pytest.mark.parametrize("platform", ["l4", "t4"])
def test_a_manifest_that_cannot_be_written_changes_nothing(
    bundle: Path, builds: Any, platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(bundle)
    before = snapshot(bundle)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compile_module, "write_manifest", full)
    with pytest.raises(EngineBuildError, match="No space left on device"):
        compiled(bundle, platform=platform)
    assert snapshot(bundle) == before


def test_failure_and_interrupt_leave_the_bundle_as_it_was(bundle: Path, builds: Any) -> None:
    before = snapshot(bundle)
    for error in (EngineBuildError("no"), KeyboardInterrupt()):

        def fail(error: BaseException = error) -> None:
            if len(builds.jobs) % 2 == 0:
                raise error

        builds.before = fail
        with pytest.raises(type(error)):
            compiled(bundle)
        assert snapshot(bundle) == before


def test_bundle_rebuilt_meanwhile(bundle: Path, builds: Any) -> None:
    def rebuild() -> None:
        manifest = read_manifest(bundle)
        record = dataclasses.replace(manifest.graphs["target"], inputs=manifest.graphs["target"].inputs[:-1])
        changed = {"graphs": {**manifest.graphs, "target": record}, "cycle": {"accept": manifest.cycle["accept"]}}
        write_manifest(bundle, dataclasses.replace(manifest, **changed, decomposed={}))

    builds.before = rebuild
    with pytest.raises(BundleError, match="was built again while its engines were compiled"):
        compiled(bundle, roles=("target",))


def test_jobs_run_side_by_side(bundle: Path, builds: Any) -> None:
    assert len(compiled(bundle, num_jobs=3).manifest.engines) == 4


def test_memory_is_estimated_first(bundle: Path, builds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 300 << 20)
    with pytest.raises(EngineBuildError, match=r"needs about .* are free; close other programs.*--skip-memory-check"):
        compiled(bundle)
    assert not builds.jobs
    compiled(bundle, check_memory=False)


def real_job(bundle: Path, tmp_path: Path) -> BuildJob:
    from xpress_export.engines.plan import plan_bundle

    plan = plan_bundle(bundle, read_manifest(bundle), CompileOptions(platform="l4", roles=("refiner",)), None)
    return plan.job(plan.engines[0], tmp_path, tmp_path / "plan")


def test_killed_worker_is_explained(bundle: Path, rtx: object, tmp_path: Path) -> None:
    job = real_job(bundle, tmp_path)
    killed: list[int] = []

    def kill(phase: str, share: float) -> None:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if children and not killed:
            killed.append(int(children[0]))
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(EngineBuildError, match=r"the refiner engine was killed, as the system does .*it needs about"):
        process.build_in_subprocess(job, kill, 1 << 20, process.Workers())


def test_worker_that_cannot_start_its_work_says_why(bundle: Path, rtx: object, tmp_path: Path) -> None:
    job = dataclasses.replace(real_job(bundle, tmp_path), graph=tmp_path / "absent.onnx")
    with pytest.raises(EngineBuildError, match=r"absent\.onnx"):
        process.build_in_subprocess(job, lambda *_: None, 1, process.Workers())


def test_one_failure_ends_the_builds_beside_it(bundle: Path, rtx: object, tmp_path: Path) -> None:
    """With several jobs, an interrupt or an error does not wait for the other builds."""
    job, workers = real_job(bundle, tmp_path), process.Workers()
    workers.kill()
    started = time.monotonic()
    with pytest.raises(EngineBuildError, match="was killed"):
        process.build_in_subprocess(job, lambda *_: None, 1, workers)
    assert time.monotonic() - started < 5 and not job.plan.exists()


def test_killed_at_random_moments(bundle: Path, rtx: object) -> None:
    """Twenty kills and interrupts of the command, anywhere from its start to its end; the next one succeeds."""
    command = [sys.executable, "-c", "from xpress_export.cli import main; main()", "compile", str(bundle)]
    command += ["--platform", "l4", "--role", "refiner", "--no-cache", "--skip-memory-check"]
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    usual = time.monotonic() - started
    rng, manifests = random.Random(0), set()
    for n in range(20):
        running = subprocess.Popen(
            [*command, "--opt-level", str(n % 6)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(rng.uniform(0.3, 1.0) * usual)
        running.send_signal(signal.SIGKILL if n % 3 else rng.choice((signal.SIGINT, signal.SIGTERM)))
        code = running.wait()
        manifest = open_bundle(bundle)
        if code == 130:  # interrupted, not killed: nothing is left behind
            assert not [p.name for p in (bundle / "engines").glob(f"*partial-{running.pid}")]
        assert [engine.role for engine in manifest.engines] == ["refiner"]
        manifests.add(manifest.digest)
    subprocess.run([*command, "--opt-level", "3"], check=True, capture_output=True)
    (engine,) = open_bundle(bundle).engines
    assert sorted(p.name for p in (bundle / "engines").iterdir()) == sorted(
        Path(path).name for path in (engine.file, engine.report)
    )
