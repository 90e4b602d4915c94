"""What the README tells people to type and to open exists."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from xpress_export.cli import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    parts = re.split(r"^```", page.read_text(), flags=re.MULTILINE)  # prose and code in turn
    return [code.partition("\n")[2] for code in parts[1::2] if code.partition("\n")[0].strip() == language]


def commands(program: str) -> Iterator[tuple[str, list[str]]]:
    """(page, words) of every command line of `program` in the pages' shell blocks."""
    for page in PAGES:
        for block in [*blocks(page, "bash"), *blocks(page, "sh"), *blocks(page, "console")]:
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words and words[0] == program:
                    yield page.name, words[1:]


def test_the_quick_start_comes_first() -> None:
    first = blocks(ROOT / "README.md", "bash")[0]
    assert [line.split("#")[0].strip() for line in first.splitlines()] == ["make demo", "make test"]


def test_commands_and_options_exist() -> None:
    found = list(commands("xpress-export"))
    assert {words[0] for _, words in found} >= {"build", "generate", "inspect", "doctor"}
    unknown = []
    for page, words in found:
        command: click.Command = cli
        for word in words:
            if isinstance(command, click.Group) and word in command.commands:
                command = command.commands[word]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        options = {word.split("=")[0] for word in words if word.startswith("--")}
        if isinstance(command, click.Group) or options - known - {"--help"}:
            unknown.append(f"{page}: {' '.join(words)}")
    assert unknown == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = [words[0] for _, words in commands("make")]
    assert asked and set(asked) <= targets


def test_python_examples_import_what_exists() -> None:
    num_imports = 0
    for page in PAGES:
        for block in blocks(page, "python"):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("xpress_export"):
                    module = importlib.import_module(str(node.module))
                    assert [a.name for a in node.names if not hasattr(module, a.name)] == [], page.name
                    num_imports += 1
    assert num_imports


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_nothing_is_left_to_fill_in(page: Path) -> None:
    text = page.read_text()
    links = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in links if target and "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []
    assert re.findall(r"@@\w+@@|\bTODO\b|\bTBD\b", text) == []


def test_the_tree_is_the_tree() -> None:
    (tree,) = [block for block in blocks(ROOT / "README.md", "") if "src/xpress_export/" in block]
    listed = re.findall(r"^([\w./]+/)\s", tree, re.MULTILINE)
    assert len(listed) >= 5
    assert [name for name in listed if not (ROOT / name).is_dir()] == []
    packages = {f"{path.parent.name}/" for path in ROOT.glob("*/__init__.py")}
    assert packages <= set(listed)
