"""`bench`: the arithmetic of its figures, the order of its rounds, refusals, and the command on a tiny trio."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from xpress_export.cli import cli
from xpress_export.errors import RequestError
from xpress_export.runtime import Runtime
from xpress_export.runtime.bench import BenchOptions, Cell, _counts, _jobs, _modes, _order, _row, run_cell


def cell(num_tokens: int, wall_s: float, num_cycles: int, num_accepted: int = 0, **changes: Any) -> Cell:
    spent = dict.fromkeys(("prefill_ms", "draft_ms", "refine_ms", "num_draft_tokens", "num_generated_tokens"), 0.0)
    spent |= dict(verify_ms=9.0 * num_cycles, host_ms=1.0 * num_cycles, num_cycles=num_cycles)
    spent |= dict(num_verify_steps=num_cycles, num_accepted=num_accepted)
    return Cell(wall_s=wall_s, outputs={0: tuple(range(num_tokens))}, spent=spent, **changes)


def test_a_row_is_the_arithmetic_it_documents() -> None:
    plain = [cell(100, 10.0, 100), cell(100, 20.0, 100), cell(100, 10.0, 100)]
    drafted = [cell(100, 5.0, 50, 50), cell(100, 8.0, 50, 50), cell(100, 10.0, 50, 50)]
    drafted[0].itl_ms, drafted[2].itl_ms = [1.0, 2.0], [3.0]
    alone = [cell(100, 20.0, 50), cell(100, 20.0, 50), cell(100, 20.0, 50)]
    row = _row("xpress", 4, {("target", 4): plain, ("xpress", 4): drafted, ("xpress", 1): alone})
    assert (row.tokens_per_s.median, row.tokens_per_s.least, row.tokens_per_s.most) == (12.5, 10.0, 20.0)
    assert (row.speed_up.median, row.speed_up.least, row.speed_up.most) == (2.0, 1.0, 2.5)  # within each round
    assert (row.scaling.median, row.scaling.least, row.scaling.most) == (2.5, 2.0, 4.0)
    assert row.tau == 2.0
    assert row.itl_ms["p50"] == 2.0 and row.ttft_ms == {"p50": 0.0, "p90": 0.0, "p99": 0.0}
    assert row.cycle_ms == {"draft": 0.0, "refine": 0.0, "verify": 9.0, "host": 1.0}
    assert row.host_share == pytest.approx(0.1)


def test_every_round_runs_every_cell_in_another_order() -> None:
    cells = [(mode, count) for mode in ("target", "xpress") for count in (1, 8)]
    order = list(_order(cells, 3))
    rounds = [order[i : i + 4] for i in (0, 4, 8)]
    assert all(sorted(one) == sorted(cells) for one in rounds)
    assert len({tuple(one) for one in rounds}) == 3


def test_requests_and_options() -> None:
    assert _jobs(BenchOptions(prompts=["a", "b"]), 3) == ["a", "b", "a"]
    assert _jobs(BenchOptions(prompts=["a", "b", "c"], num_requests=2), 1) == ["a", "b"]
    assert _counts((8, 1, 8), 8) == [1, 8]
    assert _counts(None, 8) == [1, 2, 4, 8] and _counts(None, 3) == [1, 2]
    for options in ({"concurrency": ()}, {"concurrency": (0,)}, {"prompts": []}, {"rounds": 0}, {"max_new_tokens": 1}):
        with pytest.raises(RequestError):
            BenchOptions(**options)  # type: ignore[arg-type]


def test_a_cell_counts_every_token_once(tiny_bundle: Path) -> None:
    prompts = ["one", "two", "three", "four", "five"]
    with Runtime.open(tiny_bundle, num_threads=1, num_slots=3) as runtime:
        assert _modes(runtime, None) == ["target", "dflash", "xpress", "adaptive"]
        assert _modes(runtime, ["xpress"]) == ["target", "xpress"]
        with pytest.raises(RequestError, match="'warp' is not one of those this bundle has: target, dflash"):
            _modes(runtime, ["warp"])
        cells = {mode: run_cell(runtime, mode, 3, prompts, 10, True) for mode in ("target", "xpress", "adaptive")}
    for found in cells.values():
        assert found.outputs == cells["target"].outputs
        assert sorted(found.outputs) == [0, 1, 2, 3, 4]
        assert len(found.ttft_ms) == 5
        assert len(found.itl_ms) == 5 * 9
        assert sum(found.gap_ms) == pytest.approx(sum(found.itl_ms))
        assert found.spent["num_generated_tokens"] == 50
        assert found.tokens_per_s == pytest.approx(50 / found.wall_s)


def test_the_command(tiny_bundle: Path, tmp_path: Path) -> None:
    prompts, page = tmp_path / "p.jsonl", tmp_path / "page.html"
    prompts.write_text('{"prompt": "hello there"}\n{"prompt": "one two"}\n')
    options = ["--prompts", str(prompts), "--max-new-tokens", "8", "--rounds", "2", "--concurrency", "2,1"]
    arguments = ["bench", str(tiny_bundle), *options, "--threads", "1", "--modes", "xpress"]
    done = CliRunner().invoke(cli, [*arguments, "--json", "--html", str(page)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [(row["mode"], row["concurrency"]) for row in found["rows"]] == [
        ("target", 1),
        ("xpress", 1),
        ("target", 2),
        ("xpress", 2),
    ]
    assert found["same_tokens"] is True and found["num_requests"] == 2
    assert found["rows"][0]["speed_up"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    assert set(found["startup"]) == {"import_s", "read_s", "open_s"}
    assert found["peak_memory_bytes"] > 1e7
    text = page.read_text("utf-8")
    assert re.findall(r"(?:src|href)=", text) == []
    assert text.count('class="verify"') == 4 + 1  # a part of each row's bar, and the key
    parser = _Balanced()
    parser.feed(text)
    assert parser.open == []


def test_the_command_shows_tables_and_refuses_nonsense(tiny_bundle: Path) -> None:
    short = [
        "bench",
        str(tiny_bundle),
        "--concurrency",
        "1",
        "--max-new-tokens",
        "4",
        "--rounds",
        "1",
        "--threads",
        "1",
    ]
    done = CliRunner().invoke(cli, [*short, "--modes", "target", "--requests", "1"])
    assert done.exit_code == 0, done.output
    for words in ("tokens/s", "host share", "import of the runtime", "beyond", "peak memory", "executed on CPU"):
        assert words in done.stdout
    for bad in (["--concurrency", "1,x"], ["--concurrency", "0"]):
        done = CliRunner().invoke(cli, [*short, *bad])
        assert done.exit_code == 2
        assert "--concurrency" in done.output


class _Balanced(HTMLParser):
    """Keeps the SVG and container elements that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("svg", "text", "table", "div", "span"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in ("svg", "text", "table", "div", "span"):
            assert self.open.pop() == tag
