"""`eval` on checkpoints: a trio's folder or its three names, the same tau as its bundle, refusals a newcomer meets."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from xpress_export.cli import cli
from xpress_export.cli_trio_eval import row_of_walks
from xpress_export.training.evaluate import Walk


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "hello there"}\n{"turns": ["one two", "three"]}\n')
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["eval", *map(str, arguments)])


def rows_of(done: Result) -> dict[str, Any]:
    assert done.exit_code == 0, done.output
    return {row["arm"]: row for row in json.loads(done.stdout)["rows"]}


def trio_folder(trio: Any, folder: Path, refiner: str) -> Path:
    shutil.copytree(trio.drafter, folder / "drafter")
    shutil.copytree(trio.target.parent / refiner, folder / "refiner")
    return folder


def test_a_trio_has_the_tau_of_its_bundle(tiny_trio: Any, tiny_bundle: Path, prompts: Path, tmp_path: Path) -> None:
    """The target's answers are the same text, so walking them gives what decoding gives."""
    common = ["--prompts", prompts, "--max-new-tokens", 12, "--refine-passes", "0..1", "--json"]
    executed = rows_of(run(tiny_bundle, *common))
    folder = trio_folder(tiny_trio, tmp_path / "run", tiny_trio.refiner.name)
    checked = rows_of(run(folder, "--target", tiny_trio.target, *common))
    assert list(checked) == ["dflash", "xpress", "xpress K=0", "xpress K=1"]
    for arm, row in checked.items():
        assert row["tau"] == pytest.approx(executed[arm]["tau"], rel=0.1), arm
        assert (row["refine_passes"], row["num_prompts"], row["speed_up"]) == (executed[arm]["refine_passes"], 2, 0)
    named = ["--target", tiny_trio.target, "--drafter", tiny_trio.drafter, "--refiner", tiny_trio.refiner]
    assert rows_of(run(*named, *common)) == checked


def test_heads_side_by_side(tiny_trio: Any, prompts: Path, tmp_path: Path) -> None:
    """Several trios of one target in one table, filtered by mode, as text and as a page."""
    folders = [trio_folder(tiny_trio, tmp_path / name, name) for name in ("markov", "xpress")]
    common = [*folders, "--target", tiny_trio.target, "--prompts", prompts, "--max-new-tokens", 8]
    assert list(rows_of(run(*common, "--json"))) == ["dflash", "markov", "dflash #2", "xpress #2"]
    assert list(rows_of(run(*common, "--json", "--modes", "markov,xpress"))) == ["markov", "xpress #2"]
    page = tmp_path / "page.html"
    done = run(*common, "--html", page)
    assert done.exit_code == 0, done.output
    for text in (done.output, page.read_text("utf-8")):
        assert "no speed was measured" in text.replace("\n", " ")


def test_sampled_answers(tiny_trio: Any, tiny_bundle: Path, prompts: Path, tmp_path: Path) -> None:
    """Bundles and trios take a temperature and a seed, and say so."""
    folder = trio_folder(tiny_trio, tmp_path / "run", "xpress")
    common = ["--prompts", prompts, "--max-new-tokens", 12, "--temperature", 0.7, "--modes", "dflash"]
    for named in ([tiny_bundle], [folder, "--target", tiny_trio.target]):
        counts = [rows_of(run(*named, *common, "--seed", seed, "--json"))["dflash"] for seed in (1, 1, 2)]
        assert counts[0]["tau"] == counts[1]["tau"] and counts[0]["num_tokens"] <= 24
    assert "temperature 0.7, seed 0" in " ".join(run(folder, "--target", tiny_trio.target, *common).output.split())


def test_a_row_is_the_mean_over_answers() -> None:
    walks = [
        Walk(source="a", tokens=8, steps=2, drafted=(2, 2, 2), accepted=(2, 2, 2)),
        Walk(source="a", tokens=4, steps=4, drafted=(4, 3, 2), accepted=(0, 0, 0)),
    ]
    row = row_of_walks("a", "xpress K=3 #2", walks)
    assert row.tau == pytest.approx((4 + 1) / 2) and row.num_tokens == 12
    assert row.slot_rates == pytest.approx([2 / 6] * 3) and row.refine_passes == 3
    assert row.tau_ci95 == pytest.approx(1.96 * 3 / 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a bundle, a folder with drafter/ and refiner/"),
        (["TRIO"], "a trio needs its target"),
        (["BUNDLE", "--target", "T"], "--target is for trios"),
        (["BUNDLE", "TRIO", "--target", "T"], "do not go into one table"),
        (["BUNDLE", "--refiner", "R"], "give --drafter too"),
        (["BUNDLE", "--modes", "dflash,eagle"], "'eagle' is none of dflash, markov, xpress"),
    ],
)
def test_refused_combinations(
    tiny_trio: Any, tiny_bundle: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    names = {"BUNDLE": str(tiny_bundle), "TRIO": str(trio_folder(tiny_trio, tmp_path / "run", "xpress"))}
    done = run(*[names.get(a, a) for a in arguments], "--prompts", "own.jsonl")
    assert done.exit_code == 2 and message in " ".join(done.output.split()), done.output


def test_a_mode_that_no_trio_has(tiny_trio: Any, prompts: Path, tmp_path: Path) -> None:
    folder = trio_folder(tiny_trio, tmp_path / "run", "xpress")
    done = run(folder, "--target", tiny_trio.target, "--prompts", prompts, "--modes", "markov", "--max-new-tokens", 4)
    assert done.exit_code != 0 and "no trio has a mode of markov" in str(done.exception)
