"""What each folder may import, and what importing may do: nothing. Each check runs in a process of its own."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from xpress_export import names

ROOT = Path(__file__).parents[1]
PACKAGES = {
    name: ROOT / folder
    for name, folder in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-dir"
    ].items()
}
MODULES = [(package, path) for package, folder in PACKAGES.items() for path in sorted(folder.glob("*.py"))]
EXPORT_ONLY = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors", "gguf")
MAY_IMPORT: dict[str, set[str]] = {
    "exporter": set(),
    "runtime": set(),
    "engines": set(),
    "calibration": {"runtime"},
    "training": {"exporter"},
}
"""The stages that a stage may import; the core is open to all."""
COMMAND_LINE = re.compile(r"(cli\w*|doctor|console|__main__)\.py")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60


def run_python(code: str, *args: str) -> str:
    """Standard output of a fresh interpreter that runs `code`."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args], capture_output=True, text=True, cwd="/", check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def module_names(*packages: str) -> list[str]:
    """Dotted names of the modules of some packages; `__main__` would run the command line."""
    stems = [(package, path.stem) for package, path in MODULES if package in packages]
    return [f"{package}.{stem}" for package, stem in stems if stem not in {"__main__", "__init__"}]


# Refuses some packages, and remembers who asked: an import that is tried and survived is an import all the same.
REFUSE = """
    import json, sys
    asked = []

    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in refused:
                asked.append(name)
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    refused = set(json.loads(sys.argv[1]))
    sys.meta_path.insert(0, Refuse())
"""


@pytest.mark.parametrize("package", ["xpress_export", "xpress_export.runtime"])
def test_core_and_runtime_import_nothing_of_the_export_set(package: str) -> None:
    modules = module_names(package)
    assert len(modules) >= 6
    code = (
        REFUSE
        + """
    import importlib
    for name in sys.argv[2:]:
        importlib.import_module(name)
    print(json.dumps(asked))
    """
    )
    assert json.loads(run_python(code, json.dumps(EXPORT_ONLY), *modules)) == []


def test_generating_imports_nothing_of_the_export_set(tiny_bundle: Path) -> None:
    code = (
        REFUSE
        + """
    from xpress_export.runtime import Runtime, SamplingParams
    with Runtime.open(sys.argv[2], num_threads=1) as runtime:
        result = runtime.generate("hello", SamplingParams(max_new_tokens=12, ignore_eos=True)).result()
    print(json.dumps([asked, len(result.token_ids)]))
    """
    )
    assert json.loads(run_python(code, json.dumps(EXPORT_ONLY), str(tiny_bundle))) == [[], 12]


def test_importing_the_runtime_leaves_onnxruntime_out() -> None:
    """How long it takes is measured by `bench`."""
    code = """
    import sys
    import xpress_export.runtime
    print("onnxruntime" in sys.modules)
    """
    assert run_python(code).split() == ["False"]


def test_help_of_every_command_imports_nothing_heavy() -> None:
    code = (
        REFUSE
        + """
    import click
    from xpress_export import cli

    def commands(group, path):
        yield path
        for name, command in getattr(group, "commands", {}).items():
            yield from commands(command, (*path, name))

    shown = {}
    for path in commands(cli.cli, ()):
        sys.argv = ["xpress-export", *path, "--help"]
        try:
            cli.main()
        except SystemExit as done:
            shown[" ".join(path)] = done.code
    print(json.dumps([asked, shown, sorted(refused & set(sys.modules))]), file=sys.stderr)
    """
    )
    heavy = (*EXPORT_ONLY, "onnxruntime", "tensorrt", "tensorrt_rtx", "numpy", "tokenizers", "jinja2")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), json.dumps(heavy)], capture_output=True, text=True, check=True
    )
    asked, shown, loaded = json.loads(done.stderr)
    assert asked == loaded == []
    assert {"", "build", "export", "generate", "inspect", "doctor"} <= shown.keys()
    assert set(shown.values()) == {0}


def test_importing_every_module_changes_nothing() -> None:
    """No handlers, no environment, no signals, no threads, no output; torch and numpy stay set as they were."""
    code = """
    import importlib, json, logging, os, signal, sys, threading, warnings
    import torch

    def state():
        numbers = range(1, signal.NSIG)
        return {
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "handlers": [str(h) for name in ("", "xpress_export") for h in logging.getLogger(name or None).handlers],
            "levels": [logging.getLogger(name or None).level for name in ("", "xpress_export")],
            "signals": [str(signal.getsignal(number)) for number in numbers if number in signal.valid_signals()],
            "threads": threading.active_count(),
            "torch": str([torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()]),
            "seed": torch.initial_seed(),
            "path": list(sys.path),
        }

    before = state()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    after = state()
    print(json.dumps([before, after]))
    """
    before, after = json.loads(run_python(code, *module_names(*PACKAGES)))
    assert after == before


def test_stages_do_not_import_one_another() -> None:
    found = []
    for package, path in MODULES:
        stage = package.partition(".")[2]
        imported = set(imported_stages(package, path)) - {stage}
        may = MAY_IMPORT[stage] if stage else MAY_IMPORT.keys() if COMMAND_LINE.fullmatch(path.name) else set()
        found += [f"{path.relative_to(ROOT)} imports {other}" for other in sorted(imported - may)]
    assert found == []


def imported_stages(package: str, path: Path) -> Iterator[str]:
    """The stages that a file imports from, anywhere in it but where only types are checked."""
    for node in nodes(path, "TYPE_CHECKING"):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: -node.level + 1 or None] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from {name.split(".")[1] for name in found if name.startswith("xpress_export.")} & MAY_IMPORT.keys()


def nodes(path: Path, left_out: str = "^$") -> Iterator[ast.AST]:
    """All of a file's syntax, but for top-level `if` blocks whose condition matches `left_out`."""
    for statement in ast.parse(path.read_text()).body:
        if not (isinstance(statement, ast.If) and re.search(left_out, ast.unparse(statement.test))):
            yield from ast.walk(statement)


def test_importing_a_module_only_defines() -> None:
    """At the top of a file: imports, constants, functions, classes. A bare call there is work at import."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign, *functions, ast.ClassDef)
    found = []
    for _, path in MODULES:
        for node in ast.parse(path.read_text()).body:
            source = ast.unparse(node)
            guarded = isinstance(node, ast.If) and re.search("TYPE_CHECKING|__name__", ast.unparse(node.test))
            documentation = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            registration = path.name == "cli.py" and re.match(r"(for .*\n +)?cli\.add_command\(.*\)$", source)
            if not (isinstance(node, allowed) or guarded or documentation or registration):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {source[:60]}")
    assert found == []


def test_only_the_command_line_configures_reads_the_environment_and_exits() -> None:
    forbidden = re.compile(r"os\.environ|os\.getenv|logging\.basicConfig|\w+\.addHandler|sys\.exit|print")
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for _, path in MODULES
        if not COMMAND_LINE.fullmatch(path.name)
        for node in nodes(path, "__name__")
        if isinstance(node, ast.Attribute | ast.Name) and forbidden.fullmatch(ast.unparse(node))
    ]
    assert found == []


BINDINGS = {
    value
    for name, value in vars(names).items()
    if name.isupper()
    and isinstance(value, str)
    and not name.startswith(("MODE_", "LAYOUT_"))
    and value not in (*names.ROLES, *names.CYCLE)
}


def test_binding_names_are_literals_only_in_names_py() -> None:
    assert len(BINDINGS) >= 13
    cache = re.compile(r"(draft_)?(past|present)_(key|value)_?(\d+|\{\w*\})?")
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.value!r}"
        for _, path in MODULES
        if path.name != "names.py"
        for node in constants(ast.parse(path.read_text()))
        if node.value in BINDINGS or cache.fullmatch(str(node.value))
    ]
    assert found == []


def constants(tree: ast.Module) -> Iterator[ast.Constant]:
    """The string constants of a file, those aside that stand alone: they are documentation."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node


def test_files_and_functions_stay_small() -> None:
    found = []
    for _, path in MODULES:
        text = path.read_text()
        if len(text.splitlines()) > MAX_FILE_LINES:
            found.append(f"{path.relative_to(ROOT)} has {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = 1 + (node.end_lineno or 0) - node.lineno
                if length > MAX_FUNCTION_LINES:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines")
    assert found == []


def repository_files() -> list[Path]:
    """What git has or would add, the licence and binary files aside."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: cannot tell the repository's files from others")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:8000]]


def test_the_repository_names_no_machine_and_no_package_index() -> None:
    folders = [f"/{name}/" for name in ("work", "root", "home/[a-z]")] + ["/tmp" + "/w" + r"\b"]
    hosts = [
        r"pypi" + r"\.org",
        r"pythonhosted" + r"\.org",
        r"download\.pytorch" + r"\.org",
        "--(extra-)?index" + "-url",
    ]
    forbidden = re.compile(rf"(?<![\w.])(?:{'|'.join(folders)})|{'|'.join(hosts)}")
    files = repository_files()
    assert ROOT / "pyproject.toml" in files
    found = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()[:100]}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if forbidden.search(line)
    ]
    assert found == []
