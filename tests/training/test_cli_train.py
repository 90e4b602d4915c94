"""`train` as a newcomer types it: from prompts to text that a trained trio writes, and what typing it wrong says."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from xpress_export import cli

PROMPTS = ["draft", "verify what was drafted", "in one block", "refine", "the next token", "commit"]
TOML = """
[drafter]
num_layers = 1
intermediate_size = 32
block_size = 4
{init}
[refiner]
rank = 4
[loss]
jacobi_rounds = 1
[run]
steps = 4
sequences = 2
anchors = 4
warmup = 1
[report]
held_out = 2
every = 2
"""


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """The program's entry point in this process: (exit code, stdout, stderr with its lines joined)."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setenv("COLUMNS", "400")

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["xpress-export", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return int(ended.value.code or 0), out, " ".join(err.split())

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text}) for text in PROMPTS))
    return path


def test_from_prompts_to_text(call: Any, tiny_trio: Any, prompts: Path, tmp_path: Path) -> None:
    """data, drafter, joint, refiner, build, generate: each reads what the one before it wrote."""
    target, data, toml = tiny_trio.target, tmp_path / "data", tmp_path / "run.toml"
    code, out, err = call(
        "train",
        "data",
        "--target",
        target,
        "--prompts",
        prompts,
        "--out",
        data,
        "--max-new-tokens",
        12,
        "--precision",
        "bf16",
    )
    assert code == 0 and out.startswith("6 answers, "), err

    def train(kind: str, init: Path | None) -> tuple[Path, str]:
        toml.write_text(TOML.format(init="" if init is None else f'init = "{init}"'))
        folder = tmp_path / kind
        code, out, err = call("train", kind, "--target", target, "--data", data, "--config", toml, "--out", folder)
        assert code == 0, err
        assert json.loads(out.splitlines()[-1].partition("held out: ")[2])["mean_tau"] >= 1
        return folder, out

    drafter, out = train("drafter", None)
    assert f"drafter: {drafter / 'drafter'}" in out and "refiner:" not in out
    joint, out = train("joint", drafter / "drafter")
    assert f"refiner: {joint / 'refiner'}" in out
    frozen, _ = train("refiner", joint / "drafter")
    weights = "drafter/model.safetensors"
    assert (frozen / weights).read_bytes() == (joint / weights).read_bytes() != (drafter / weights).read_bytes()

    heads = ["--drafter", joint / "drafter", "--refiner", joint / "refiner"]
    code, _, err = call("build", "--target", target, *heads, "--out", tmp_path / "bundle")
    assert code == 0, err
    texts = []
    for mode in ("target", "xpress"):
        code, out, err = call(
            "generate", tmp_path / "bundle", "--prompt", "draft", "--max-new-tokens", 8, "--mode", mode, "--json"
        )
        assert code == 0, err
        texts.append(json.loads(out)["text"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "--target", "nowhere", "--prompts", "PROMPTS", "--out", "OUT"], "nowhere"),
        (["data", "--target", "TARGET", "--prompts", "EMPTY", "--out", "OUT"], "holds no prompts; each line is"),
        (["data", "--target", "TARGET", "--prompts", "TEXT", "--out", "OUT"], "line 1 is not JSON"),
        (["data", "--target", "TARGET", "--prompts", "NAMELESS", "--out", "OUT"], "line 2: neither 'prompt' nor"),
        (["drafter", "--target", "TARGET", "--data", "OUT", "--out", "OUT"], "make one with: train data"),
        (
            ["drafter", "--target", "TARGET", "--data", "DATA", "--config", "TOML", "--out", "OUT"],
            "unknown key",
        ),
        (
            ["drafter", "--target", "TARGET", "--data", "DATA", "--config", "gone.toml", "--out", "OUT"],
            "gone.toml",
        ),
        (["refiner", "--target", "TARGET", "--data", "DATA", "--out", "OUT"], "set drafter.init to its folder"),
        (["joint", "--target", "DRAFTER", "--data", "DATA", "--out", "OUT"], "DRAFTER"),
    ],
)
def test_what_goes_wrong_first_says_what_to_do(
    call: Any, tiny_trio: Any, tiny_data: Path, prompts: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    """One line, exit code 1, nothing written."""
    files = {"EMPTY": "\n", "TEXT": "what is this?\n", "NAMELESS": '{"prompt": "a"}\n{"question": "b"}\n'}
    files["TOML"] = "[run]\nsteppes = 3\n"
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    places = {name: str(tmp_path / name) for name in files} | {
        "PROMPTS": str(prompts),
        "TARGET": str(tiny_trio.target),
        "DRAFTER": str(tiny_trio.drafter),
        "DATA": str(tiny_data),
        "OUT": str(tmp_path / "out"),
    }
    code, out, err = call("train", *[places.get(a, a) for a in arguments])
    assert (code, out) == (1, "") and places.get(message, message) in err and "Traceback" not in err, err
    assert not (tmp_path / "out").exists()


def test_options_are_asked_for(call: Any) -> None:
    code, _, err = call("train", "drafter", "--data", "D", "--out", "O")
    assert code == 2 and "Missing option '--target'" in err
