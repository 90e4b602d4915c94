"""`eval`: figures that follow from scripted drafts, refusals, and the command end to end on a tiny trio."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from xpress_export.cli import cli
from xpress_export.errors import RequestError
from xpress_export.runtime import Result, Runtime, Stats
from xpress_export.runtime.evaluate import Arm, _row, arms_of, evaluate, overall, read_prompts, tell_apart


def result(accepted: list[int], ms_per_step: float) -> Result:
    """A response whose steps accepted so many draft tokens each."""
    stats = Stats(decode_ms=ms_per_step * len(accepted))
    for count in accepted:
        stats.count_step(7, count)
    stats.num_generated_tokens = 1 + sum(accepted) + len(accepted)
    return Result("", tuple(range(stats.num_generated_tokens)), "length", stats)


def test_row_is_the_arithmetic_it_documents() -> None:
    plain = [result([0] * 8, 10.0), result([0] * 4, 10.0)]
    drafted = [result([3, 3], 20.0), result([0, 1, 0], 20.0)]
    arm: Any = Arm("dflash", None, "dflash")  # type: ignore[arg-type]
    row = _row("b", arm, drafted, plain)
    assert (row.num_prompts, row.num_tokens) == (2, 9 + 5)
    assert row.tau == pytest.approx((4 + 4 / 3) / 2)
    assert row.tau_ci95 == pytest.approx(1.96 * abs(4 - 4 / 3) / 2**0.5 / 2**0.5)
    assert row.slot_rates == pytest.approx([3 / 5, 2 / 5, 2 / 5])
    assert row.speed_up == pytest.approx(((8 / 40) / (8 / 80) + (4 / 60) / (4 / 40)) / 2)
    assert row.tokens_per_s == pytest.approx(1e3 * 12 / 100)


def test_overall_is_the_unweighted_mean() -> None:
    arm: Any = Arm("dflash", None, "dflash")  # type: ignore[arg-type]
    plain = [result([0] * 4, 10.0)]
    rows = [_row("a", arm, [result([3], 10.0)], plain), _row("b", arm, [result([1, 1], 10.0)], plain)]
    (mean,) = overall(rows)
    assert mean.tau == pytest.approx((4 + 2) / 2)
    assert mean.benchmark == "mean"


def test_arms_and_their_labels(tiny_bundle: Path) -> None:
    with Runtime.open(tiny_bundle) as runtime:
        labels = [arm.label for arm in arms_of(runtime, passes=[0, 2])]
        assert labels == ["dflash", "xpress", "xpress K=0", "xpress K=2"]
        assert [arm.label for arm in arms_of(runtime, ["dflash"], [1])] == ["dflash"]
        assert [arm.label for arm in tell_apart(arms_of(runtime) * 2)] == ["dflash", "xpress", "dflash #2", "xpress #2"]
        with pytest.raises(RequestError, match="nothing to evaluate"):
            evaluate({"a": ["x"]}, [], 4)


@pytest.mark.parametrize(
    ("line", "message"),
    [("not json", ":1 is not JSON"), ('{"answer": "x"}', ":1 has no text"), ('{"turns": []}', ":1 has no text")],
)
def test_bad_prompt_files_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(RequestError, match=message):
        read_prompts(path)
    path.write_text("\n\n")
    with pytest.raises(RequestError, match="holds no prompts"):
        read_prompts(path)
    with pytest.raises(RequestError, match="cannot be read"):
        read_prompts(tmp_path / "absent.jsonl")


def test_prompt_files_in_every_spelling(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"turns": ["one", "more"]}\n\n{"prompt": "two"}\n"three"\n')
    assert read_prompts(path) == ["one", "two", "three"]
    assert read_prompts(path, limit=1) == ["one"]


def test_the_command_prints_json_and_writes_a_page(tiny_bundle: Path, tmp_path: Path) -> None:
    prompts, page = tmp_path / "own.jsonl", tmp_path / "page.html"
    prompts.write_text('{"prompt": "hello there"}\n{"prompt": "one two"}\n')
    arguments = [str(tiny_bundle), "--prompts", str(prompts), "--max-new-tokens", "12", "--refine-passes", "0..1"]
    done = CliRunner().invoke(cli, ["eval", *arguments, "--json", "--html", str(page)])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [row["arm"] for row in rows] == ["target", "dflash", "xpress", "xpress K=0", "xpress K=1"]
    assert all(row["num_prompts"] == 2 and row["tau"] >= 1 for row in rows)
    by_arm = {row["arm"]: row for row in rows}
    assert by_arm["xpress K=0"]["tau"] == by_arm["dflash"]["tau"]
    assert "own (2 prompts)" in page.read_text("utf-8")


def test_the_command_refuses_a_bad_sweep(tiny_bundle: Path, tmp_path: Path) -> None:
    arguments = [str(tiny_bundle), "--prompts", "x", "--refine-passes", "many"]
    done = CliRunner().invoke(cli, ["eval", *arguments])
    assert done.exit_code == 2
    assert "range A..B" in done.output


def test_sampled_answers_are_the_same_tokens_in_every_arm(tiny_bundle: Path) -> None:
    """One seed for all arms; another seed gives other answers."""
    with Runtime.open(tiny_bundle) as runtime:
        arms = arms_of(runtime)
        found = [
            evaluate({"own": ["hello there", "one two"]}, arms, 16, temperature=0.7, seed=seed) for seed in (1, 1, 2)
        ]
    counts = [[(row.arm, row.tau, row.num_tokens) for row in rows] for rows in found]
    assert [row.arm for row in found[0]] == ["target", "dflash", "xpress"]
    assert counts[0] == counts[1] != counts[2]
