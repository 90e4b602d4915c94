"""A timeline holds every engine call, each in the row of what ran it, inside the round of the host that began it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from xpress_export.cli import cli
from xpress_export.runtime import Runtime, SamplingParams
from xpress_export.runtime.trace import Tracer


def spans_of(trace: dict[str, Any]) -> dict[str, list[tuple[float, float, str]]]:
    """(start, end, name) of every span by row, microseconds."""
    rows = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    found: dict[str, list[tuple[float, float, str]]] = {name: [] for name in rows.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[rows[event["tid"]]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return found


@pytest.mark.parametrize(
    ("layout", "row", "stages"),
    [
        ("split", "engines", {"prefill", "draft", "refine", "verify"}),
        ("fused", "compute", {"step"}),
    ],
)
def test_every_engine_call_is_in_its_row(
    tiny_fused_bundle: Path, stories: Any, layout: str, row: str, stages: set[str]
) -> None:
    tracer = Tracer()
    with Runtime.open(tiny_fused_bundle, device="cpu", layout=layout, num_threads=1) as runtime:
        params = SamplingParams(max_new_tokens=30, ignore_eos=True, mode="xpress")
        runtime.generate(stories[0].ids[:20], params).result()
        runtime.trace(tracer)
        result = runtime.generate(stories[0].ids[:20], params).result()
        runtime.trace(None)
        runtime.generate(stories[0].ids[:20], params).result()
    found = spans_of(json.loads(json.dumps(tracer.to_dict())))
    names = [name for _, _, name in found[row]]
    assert stages <= set(names)
    verifies = names.count("verify" if layout == "split" else "step")
    assert verifies - (layout == "fused") == result.stats.num_verify_steps
    for (_, end, _), (start, _, _) in pairwise(found[row]):
        assert end <= start + 0.2, "calls of one row follow one another"
    first, last = found["host"][0][0], found["host"][-1][1]
    assert all(first - 0.2 <= start and end <= last + 0.2 for start, end, _ in found[row])


def test_bench_writes_a_timeline_of_every_cell(tiny_bundle: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    options = ["--concurrency", "2", "--rounds", "1", "--max-new-tokens", "6", "--ignore-eos", "--modes", "xpress"]
    done = CliRunner().invoke(cli, ["bench", str(tiny_bundle), *options, "--threads", "1", "--trace", str(trace)])
    assert done.exit_code == 0, done.output
    found = spans_of(json.loads(trace.read_text()))
    assert [name for _, _, name in found["cells"]] == ["target, 2 clients", "xpress, 2 clients"]
    assert {"draft", "verify"} <= {name for _, _, name in found["engines"]}
