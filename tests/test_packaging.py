"""The wheel as a user gets it: what is inside, what it declares, and that it works without a checkout.

wheel       built from the sdist, which is built from a copy of the files that git has or would add
installed   that wheel in a folder of its own, not editable
device      a Python path of that folder and the base dependencies only: what a device has
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from xpress_export.presets import PRESETS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]
CORE = ROOT / FOLDERS["xpress_export"]
PRESET_FILES = CORE / "presets"
NOT_PRODUCT = {"tests", "benchmarks", "build", "dist", "docs"}
EXPORT_ONLY = {"torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "gguf"}


def sources() -> dict[str, Path]:
    """Path in a wheel to path here, of everything that has to be in it."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            found[f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder).as_posix()}"] = path
    found["xpress_export/py.typed"] = CORE / "py.typed"
    for path in (*PRESET_FILES.rglob("*"), *(CORE / "published").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            found[f"xpress_export/{path.relative_to(CORE).as_posix()}"] = path
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in {"pyproject.toml", "README.md", "LICENSE", *(folder.split("/")[0] for folder in FOLDERS.values())}:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    subprocess.run([*command, "--no-deps", "--target", str(folder), str(wheel)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def device(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Links to every distribution that the base dependencies need, and to nothing else."""
    folder = tmp_path_factory.mktemp("base")
    for name in needed(PROJECT["project"]["dependencies"]):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in {"..", "__pycache__"}}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))))
    return f"{installed}{os.pathsep}{folder}"


def needed(requirements: list[str]) -> set[str]:
    """Names of the installed distributions that `requirements` ask for, and what those ask for."""
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        one = waiting.pop()
        if one.name in found or (one.marker and not one.marker.evaluate({"extra": ""})):
            continue
        found.add(one.name)
        waiting += [Requirement(text) for text in importlib.metadata.requires(one.name) or ()]
    return found


def run(path: str, *args: str) -> subprocess.CompletedProcess[str]:
    """Python without its site-packages, finding packages below `path` only."""
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-S", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", check=False)


def test_every_package_on_disk_is_declared() -> None:
    """A package that is not declared works here and is absent from the wheel."""
    found = set()
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([package, *path.parent.relative_to(ROOT / folder).parts]))
    assert found == set(SETUPTOOLS["packages"]) == set(FOLDERS)


def test_every_folder_of_the_product_is_a_package() -> None:
    on_disk = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert on_disk - NOT_PRODUCT == {folder for folder in FOLDERS.values() if "/" not in folder}
    assert not list((ROOT / "tests").rglob("__init__.py")), "it would make pytest import tests/runtime as `runtime`"


def test_the_wheel_has_every_file_byte_for_byte(wheel: Path) -> None:
    expected = sources()
    assert len(expected) > 50
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        assert sorted(expected.keys() - inside) == []
        assert [name for name, path in expected.items() if archive.read(name) != path.read_bytes()] == []


def test_the_wheel_has_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        inside = archive.namelist()
    info = f"xpress_export-{PROJECT['project']['version']}.dist-info"
    assert {name.split("/")[0] for name in inside} == {"xpress_export", info}
    assert f"{info}/licenses/LICENSE" in inside
    unexpected = {name for name in inside if name.startswith("xpress_export/")} - sources().keys()
    assert unexpected == set(), "tests, caches or data that nobody declared"


def test_every_preset_is_complete_in_the_package() -> None:
    assert PRESETS
    for preset in PRESETS.values():
        for role in ("drafter", "refiner"):
            files = {path.name for path in (preset.heads / role).glob("*")}
            assert {"config.json", "model.safetensors"} <= files, f"{preset.name} lacks its {role}"


def test_extras(metadata: Message) -> None:
    extras = set(metadata.get_all("Provides-Extra") or ())
    assert {"cpu", "gpu", "rtx", "export", "dev"} <= extras
    assert ("train" in extras) == ("xpress_export.training" in FOLDERS)


def test_the_base_needs_no_export_set(metadata: Message) -> None:
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist") or ()]
    base = {r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})}
    assert base == {Requirement(text).name for text in PROJECT["project"]["dependencies"]}
    assert not {name.replace("-", "_") for name in needed(sorted(base))} & {*EXPORT_ONLY, "onnxruntime"}
    cpu = {r.name for r in requirements if r.marker and r.marker.evaluate({"extra": "cpu"})} - base
    assert cpu == {"onnxruntime"}


def test_licence(metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0" in text and len(text) > 10_000


def test_a_plain_install_imports_from_where_it_is(installed: Path, device: str) -> None:
    code = "import xpress_export, xpress_export.runtime as r, xpress_export.cli as c; print(r.__file__, c.__file__)"
    done = run(device, "-c", code)
    assert done.returncode == 0, done.stderr
    assert [Path(p) for p in done.stdout.split()] == [
        installed / "xpress_export" / "runtime" / "__init__.py",
        installed / "xpress_export" / "cli.py",
    ]


def test_the_console_script_of_a_plain_install(installed: Path, device: str) -> None:
    script = installed / "bin" / "xpress-export"
    done = run(device, str(script), "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().endswith(PROJECT["project"]["version"])
    as_module = run(device, "-m", "xpress_export", "--help")
    assert as_module.returncode == 0
    assert as_module.stdout == run(device, str(script), "--help").stdout


def test_a_device_without_extras_says_what_to_install(device: str, tiny_bundle: Path) -> None:
    """Everything that needs an extra names it; what needs none works."""

    def command(*args: str) -> Any:
        return run(device, "-m", "xpress_export", *args)

    doctor = command("doctor")
    assert doctor.returncode == 0, doctor.stderr
    for extra in ("cpu", "export", "rtx"):
        assert f"pip install 'xpress-export[{extra}]'" in doctor.stdout
    generate = command("generate", str(tiny_bundle), "--prompt", "hello")
    assert (generate.returncode, generate.stdout) == (1, "")
    assert "pip install 'xpress-export[cpu]'" in generate.stderr
    build = command("build", "--target", "anything", "--out", "/nowhere/bundle")
    assert (build.returncode, build.stdout) == (1, "")
    assert "pip install 'xpress-export[export]'" in build.stderr
    inspect = command("inspect", str(tiny_bundle), "--verify")
    assert inspect.returncode == 0, inspect.stderr
    assert "every file matches" in inspect.stdout
    assert "Traceback" not in generate.stderr + build.stderr


def test_typings_cover_every_module() -> None:
    """`.typings/xpress_export` is what mypy and editors read: links to the core's files and to each folder."""
    view = ROOT / ".typings" / "xpress_export"
    links = {path.name: path for path in view.iterdir()}
    core = {path.name for path in CORE.iterdir() if path.suffix == ".py" or path.name == "py.typed"}
    folders = {package.split(".")[1]: ROOT / folder for package, folder in FOLDERS.items() if "." in package}
    assert links.keys() == core | folders.keys()
    for name, link in links.items():
        assert link.is_symlink() and not os.path.isabs(os.readlink(link)), name
        assert link.resolve() == folders.get(name, CORE / name).resolve(), name
