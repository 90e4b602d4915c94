"""Staged folders: complete or absent, through errors, kills at every step, and full disks."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from xpress_export import folders
from xpress_export.errors import BundleError, ExportError
from xpress_export.folders import require_free_space, staged_folder
from xpress_export.manifest import (
    GraphRecord,
    Manifest,
    ModelRecord,
    TextRecord,
    open_bundle,
    record_files,
    write_manifest,
)

FILES = (
    "graphs/target.onnx",
    "graphs/target.data",
    "graphs/accept.onnx",
    "tokenizer/tokenizer.json",
    "tokenizer/text.json",
)


def fill(folder: Path, label: str) -> Path:
    """Make `folder` a bundle of a target; `label` is in every file and tells two bundles apart."""
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{label} {name}")
    sizes = dict(hidden_size=8, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=2, vocab_size=32)
    manifest = Manifest(
        tool={"xpress-export": "0.1.0"},
        platform="cpu",
        precision="fp32",
        lowering="native",
        opset=24,
        max_context=64,
        preset=label,
        target=ModelRecord(source=label, digest="1" * 64, family="llama", num_parameters=9, **sizes),
        drafter=None,
        refiner=None,
        draft=None,
        text=TextRecord(
            folder="tokenizer",
            fingerprint="4" * 64,
            stop_token_ids=(),
            drafter_tokenizer=None,
            refiner_tokenizer=None,
        ),
        graphs={"target": GraphRecord(file=FILES[0], data=(FILES[1],), inputs=(), outputs=())},
        cycle={"accept": GraphRecord(file=FILES[2], data=(), inputs=(), outputs=())},
        parity=(),
        files=record_files(folder),
    )
    write_manifest(folder, manifest)
    return folder


def bundle(folder: Path, label: str) -> Path:
    folder.mkdir()
    return fill(folder, label)


def label_of(folder: Path) -> str | None:
    return open_bundle(folder).preset


def refused(out: Path, *, replace: bool = False) -> str:
    before = sorted(out.parent.rglob("*"))
    with pytest.raises(ExportError) as caught, staged_folder(out, replace=replace):
        raise AssertionError("the work should not have begun")
    assert sorted(out.parent.rglob("*")) == before
    message = str(caught.value)
    assert "\n" not in message and "; " in message
    return message.replace(str(out), "OUT")


@pytest.fixture
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process loses nothing that the system has accepted, so many builds need not wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(params=["exchange", "two renames"])
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to put a bundle in another's place."""
    if request.param == "two renames":
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    return str(request.param)


# When all goes well


def test_new_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with staged_folder(out, replace=False) as partial:
        assert partial.parent == tmp_path and partial.name.startswith(f".out.partial-{os.getpid()}-")
        assert not out.exists()
        fill(partial, "new")
    assert label_of(out) == "new"
    assert os.listdir(tmp_path) == ["out"]
    assert out.stat().st_mode == (tmp_path / "out" / "graphs").stat().st_mode  # not private as mkdtemp's


def test_replaced_bundle(tmp_path: Path, swap: str) -> None:
    out = bundle(tmp_path / "out", "old")
    with staged_folder(out, replace=True) as partial:
        fill(partial, "new")
        assert label_of(out) == "old"
    assert label_of(out) == "new"
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("replace", [False, True])
def test_empty_folder_is_filled(tmp_path: Path, replace: bool) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with staged_folder(out, replace=replace) as partial:
        fill(partial, "new")
    assert label_of(out) == "new"


def test_link_to_a_bundle_stays_a_link(tmp_path: Path, swap: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    real = bundle(tmp_path / "elsewhere" / "real", "old")
    (tmp_path / "out").symlink_to(real)
    with staged_folder(tmp_path / "out", replace=True) as partial:
        assert partial.parent == real.parent
        fill(partial, "new")
    assert (tmp_path / "out").is_symlink() and label_of(real) == "new"


def test_damaged_bundle_is_replaced(tmp_path: Path) -> None:
    out = bundle(tmp_path / "out", "old")
    (out / "manifest.json").write_text('{"schema": 99')
    (out / ".manifest.json.partial-17").touch()
    (out / "graphs" / "target.data").unlink()
    with staged_folder(out, replace=True) as partial:
        fill(partial, "new")
    assert label_of(out) == "new"


def test_everything_is_on_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, rename = folders.sync, os.rename
    monkeypatch.setattr(folders, "sync", lambda path: (done.append(f"sync {path}"), sync(path)))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append("rename"), rename(a, b)))
    with staged_folder(tmp_path / "out", replace=False) as partial:
        fill(partial, "new")
        done.clear()
    renamed = done.index("rename")
    synced = {step.removeprefix(f"sync {partial}").strip("/") for step in done[:renamed]}
    assert synced >= {*FILES, "manifest.json", "graphs", "tokenizer", ""}
    assert done[renamed + 1 :] == [f"sync {tmp_path}"]


# What is not replaced


def test_existing_bundle_without_replace(tmp_path: Path) -> None:
    out = bundle(tmp_path / "out", "old")
    assert refused(out).startswith("OUT already exists; name another folder")


def add_file(name: str) -> Callable[[Path], object]:
    def add(out: Path) -> None:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).touch()

    return add


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (add_file("thesis.tex"), "OUT holds 'thesis.tex', which no bundle has, so it is not replaced; name"),
        (add_file("graphs/target.onnx.bak"), "OUT holds 'graphs/target.onnx.bak', which no bundle has"),
        (add_file("tokenizer/notes.json"), "OUT holds 'tokenizer/notes.json', which"),
        (add_file("photos/cat.data"), "OUT holds 'photos/cat.data', which"),
        (lambda out: (out / "graphs" / "more").symlink_to("/"), "OUT holds 'graphs/more', which"),
        (lambda out: (out / "manifest.json").unlink(), "OUT is not a complete bundle, so it is not replaced"),
        (lambda out: shutil.rmtree(out / "graphs"), "OUT is not a complete bundle, so it is not replaced"),
    ],
)
def test_folder_that_is_no_bundle(tmp_path: Path, spoil: Callable[[Path], object], message: str) -> None:
    out = bundle(tmp_path / "out", "old")
    spoil(out)
    assert refused(out, replace=True).startswith(message)


def test_file_and_folders_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert refused(tmp_path / "file", replace=True).startswith("OUT is a file; name a folder to build into")
    (tmp_path / "here" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "below")
    for out in (tmp_path / "here", tmp_path / "here" / "below"):
        assert refused(out, replace=True).startswith("OUT is the current folder or above it")
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    (tmp_path / "mount").mkdir()
    assert refused(tmp_path / "mount").startswith("OUT is a mount point, which cannot be renamed")


def test_missing_folders_above_are_made(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "new" / "newer" / "out", replace=True) as partial:
        (partial / "file").write_text("x")
    assert (tmp_path / "new" / "newer" / "out" / "file").read_text() == "x"


def test_parent_is_a_file_or_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    message = refused(tmp_path / "file" / "out")
    assert message.startswith(f"no folder can be made in {tmp_path}/file: File exists; check")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", denied)
    assert ": Permission denied; check the path, its permissions" in refused(tmp_path / "out")


def test_folder_that_appears_while_building(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with (
        pytest.raises(ExportError, match=r"out already exists"),
        staged_folder(out, replace=False) as partial,
    ):
        fill(partial, "mine")
        bundle(out, "theirs")
    assert label_of(out) == "theirs"
    with (
        pytest.raises(ExportError, match=r"holds 'work', which no bundle has"),
        staged_folder(out, replace=True) as partial,
    ):
        fill(partial, "mine")
        (out / "work").touch()
    assert (out / "work").exists() and os.listdir(tmp_path) == ["out"]


def test_two_builds_at_once_both_finish(tmp_path: Path, swap: str) -> None:
    out = tmp_path / "out"
    with staged_folder(out, replace=True) as first:
        fill(first, "first")
        with staged_folder(out, replace=True) as second:
            fill(second, "second")
            assert first.exists()
        assert label_of(out) == "second"
    assert label_of(out) == "first"
    assert os.listdir(tmp_path) == ["out"]


# Interruptions


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, ExportError])
@pytest.mark.parametrize("exists", [False, True])
def test_error_while_building(tmp_path: Path, error: type[BaseException], exists: bool) -> None:
    out = tmp_path / "out"
    if exists:
        bundle(out, "old")
    with pytest.raises(error), staged_folder(out, replace=True) as partial:
        fill(partial, "new")
        raise error("stop")
    assert os.listdir(tmp_path) == (["out"] if exists else [])
    assert not exists or label_of(out) == "old"


def at_step(step: int, act: Callable[[], object]) -> None:
    """Call `act` just before this process's `step`-th audited operation (open, rename, remove, ...) from now."""
    left = [step]

    def hook(event: str, _: tuple[object, ...]) -> None:
        left[0] -= 1
        if left[0] == 0:
            act()

    sys.addaudithook(hook)  # cannot be taken back: only ever in a child


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a forked child; its exit code, negative for a signal."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 70
    try:
        work()
        code = 0
    except KeyboardInterrupt:
        code = 3
    finally:
        os._exit(code)


def interrupted_builds(out: Path, act: Callable[[], object]) -> Iterator[int]:
    """Replace "old" at `out` by "new" again and again, interrupted one step later each time, until it is not."""
    new = bundle(out.parent.parent / "new", "new")

    def build(step: int) -> None:
        with staged_folder(out, replace=True) as partial:
            shutil.copytree(new, partial, dirs_exist_ok=True)
            at_step(step, act)

    for step in range(1, 1000):
        shutil.rmtree(out.parent, ignore_errors=True)
        shutil.copytree(new.with_name("old"), out)
        code = in_child(lambda step=step: build(step))
        yield code
        if code == 0:
            return


@contextlib.contextmanager
def failing_build(out: Path) -> Iterator[None]:
    """The next build beside `out`, which tidies up first; that it then fails changes nothing."""
    with pytest.raises(ZeroDivisionError), staged_folder(out, replace=True):
        yield
        raise ZeroDivisionError


@pytest.mark.usefixtures("no_flush")
def test_killed_at_every_step(tmp_path: Path, swap: str) -> None:
    out = tmp_path / "work" / "out"
    bundle(tmp_path / "old", "old")
    seen = []
    for code in interrupted_builds(out, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        assert code in (-signal.SIGKILL, 0)
        if swap == "exchange" or out.exists():
            seen.append(label_of(out))
        else:
            seen.append("recovered")
        with failing_build(out):
            pass
        expected = "old" if seen[-1] == "recovered" else seen[-1]
        assert label_of(out) == expected
        assert os.listdir(out.parent) == ["out"]
    states = [label for n, label in enumerate(seen) if n == 0 or seen[n - 1] != label]
    assert states == (["old", "new"] if swap == "exchange" else ["old", "recovered", "new"])
    assert min(seen.count("old"), seen.count("new")) > 5


@pytest.mark.usefixtures("no_flush")
def test_ctrl_c_at_every_step(tmp_path: Path, swap: str) -> None:
    def press() -> None:
        raise KeyboardInterrupt

    out = tmp_path / "work" / "out"
    bundle(tmp_path / "old", "old")
    seen = []
    for code in interrupted_builds(out, press):
        assert code in (3, 0)
        seen.append(label_of(out))
        with failing_build(out):
            pass
        assert label_of(out) == seen[-1]
        assert os.listdir(out.parent) == ["out"]
    assert seen == sorted(seen, reverse=True) and {*seen} == {"old", "new"}


def test_leftovers_belong_to_the_living(tmp_path: Path) -> None:
    """Another process's folder goes when it dies, and not before."""
    script = f"""
        import sys, time
        from pathlib import Path
        from xpress_export.folders import staged_folder
        with staged_folder(Path({str(tmp_path / "out")!r}), replace=False) as partial:
            (partial / "half").touch()
            print(partial, flush=True)
            time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        assert str(other.pid) in theirs.name
        with failing_build(tmp_path / "out"):
            assert (theirs / "half").exists()
        other.kill()
    assert (theirs / "half").exists()
    with failing_build(tmp_path / "out"):
        assert not theirs.exists()


def test_only_leftovers_of_this_folder_go(tmp_path: Path) -> None:
    kept = [".out2.partial-1-00000000", ".out.partial-x", "out.partial-1-00000000", ".out.partial-1-0000000g"]
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / "target").mkdir()
    (tmp_path / ".out.partial-1-11111111").symlink_to(tmp_path / "target")
    (tmp_path / ".out.partial-1-22222222").touch()
    (tmp_path / ".out.partial-1-00000000").mkdir()
    before = {*os.listdir(tmp_path)}
    with failing_build(tmp_path / "out"):
        pass
    assert before - {*os.listdir(tmp_path)} == {".out.partial-1-00000000"}


def test_exchange_that_the_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = bundle(tmp_path / "out", "old")

    def refuse(*_: object) -> bool:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(folders, "_exchange", refuse)
    with (
        pytest.raises(ExportError, match=r"out cannot be put in place: Device or resource busy"),
        staged_folder(out, replace=True) as partial,
    ):
        fill(partial, "new")
    assert label_of(out) == "old" and os.listdir(tmp_path) == ["out"]


def test_exchange_itself(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "was a").touch()
    if not folders._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this filesystem cannot exchange two names")
    assert os.listdir(tmp_path / "b") == ["was a"] and os.listdir(tmp_path / "a") == []
    with pytest.raises(FileNotFoundError):
        folders._exchange(tmp_path / "a", tmp_path / "none")


# Space


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk is not allowed here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def write_bytes(partial: Path) -> None:
    (partial / "big").write_bytes(b"x" * (3 << 20))


def write_array(partial: Path) -> None:
    with (partial / "big").open("wb") as file:
        np.zeros(3 << 20, np.uint8).tofile(file)  # its OSError has no errno


@pytest.mark.parametrize("write", [write_bytes, write_array])
def test_full_disk(small_disk: Path, write: Callable[[Path], None]) -> None:
    out = bundle(small_disk / "out", "old")
    with (
        pytest.raises(ExportError, match=r"^the disk is full: .* left in .*/disk; free some space or name a"),
        staged_folder(out, replace=True) as partial,
    ):
        write(partial)
    assert label_of(out) == "old" and os.listdir(small_disk) == ["out"]
    with (
        pytest.raises(BundleError, match=r"^another matter$"),
        staged_folder(out, replace=True) as partial,
    ):
        with contextlib.suppress(OSError):
            write(partial)
        raise BundleError("another matter")


def test_full_disk_by_its_code(tmp_path: Path) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT):
        with (
            pytest.raises(ExportError, match=r"^the disk is full: \d+\.\d \wiB left in "),
            staged_folder(tmp_path / "out", replace=True),
        ):
            raise OSError(number, os.strerror(number))
    with pytest.raises(OSError, match="Input/output"), staged_folder(tmp_path / "out", replace=True):
        raise OSError(errno.EIO, "Input/output error")
    with pytest.raises(BundleError, match=r"^mine$"), staged_folder(tmp_path / "out", replace=True):
        raise BundleError("mine") from OSError(errno.ENOSPC, "")
    assert os.listdir(tmp_path) == []


def test_disk_full_when_flushing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        pytest.raises(ExportError, match=r"out cannot be written: No space left on device"),
        staged_folder(tmp_path / "out", replace=True) as partial,
    ):
        fill(partial, "new")
        monkeypatch.setattr(folders, "sync", full)
    assert os.listdir(tmp_path) == []


def test_require_free_space(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    require_free_space(tmp_path, free // 2, "the bundle")
    require_free_space(tmp_path / "not" / "there", free // 2, "the bundle")
    with pytest.raises(ExportError) as caught:
        require_free_space(tmp_path / "not" / "there", 5 << 50, "the bundle")
    message = str(caught.value)
    assert message.startswith(f"the bundle takes 5120.0 TiB in {tmp_path}/not/there, where ")
    assert " are free; free " in message


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (1 << 41, "2.0 TiB")],
)
def test_sizes_are_readable(num_bytes: int, text: str) -> None:
    assert folders._human(num_bytes) == text
