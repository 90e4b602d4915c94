"""The check as a whole on the tiny trio, its arithmetic, its page and its exit code."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from xpress_export.calibration.acceptance import Acceptance
from xpress_export.calibration.accuracy import Accuracy, Score, compare, ratio_of_sums
from xpress_export.calibration.check import Checked, CheckOptions, check, combine, judge
from xpress_export.calibration.page import check_page
from xpress_export.calibration.sensitivity import find_recipe, loudest_groups
from xpress_export.calibration.sqnr import LayerNoise
from xpress_export.cli import cli
from xpress_export.errors import CalibrationError
from xpress_export.manifest import open_bundle, read_manifest

OPTIONS = CheckOptions(precision="int8", samples=2, max_new_tokens=8, num_threads=1, max_perplexity=1e9, min_sqnr=-99)


@pytest.fixture(scope="module")
def checked(quantized_bundle: Path) -> Checked:
    return check(quantized_bundle, OPTIONS)


def test_everything_is_measured(checked: Checked) -> None:
    layers = {(layer.role, layer.layer) for layer in checked.noise}
    assert len(layers) == 21 + 18 and ("drafter", "layers.0.self_attn.k_proj#2") in layers
    assert [layer.sqnr_db for layer in checked.noise] == sorted(layer.sqnr_db for layer in checked.noise)
    assert checked.noise[0].sqnr_db > 15  # six bits would give more, scales that are off by two would not
    assert list(checked.accuracy) == ["fp32", "int8"] and checked.accuracy["fp32"].ratio == 0
    assert checked.accuracy["fp32"].match_rate == 1 and 8 < checked.accuracy["int8"].num_answer_tokens <= 16
    combinations = {(row.target, row.drafter, row.mode) for row in checked.acceptance}
    assert len(combinations) == 8 and ("int8", "fp32", "xPress") in combinations
    assert checked.acceptance[0].change == 0 and checked.acceptance[0].tau >= 1


def test_noise_is_the_layers_own(checked: Checked) -> None:
    """INT8 of a smooth input: about 40 dB, wherever the layer lies."""
    found = {layer.layer: layer.sqnr_db for layer in checked.noise if layer.role == "target"}
    assert min(found["layers.2.self_attn.q_proj"], found["layers.2.mlp.gate_proj"]) > 25


def test_json_and_page(checked: Checked) -> None:
    text = json.dumps(checked.to_dict())
    assert json.loads(text)["passed"] is checked.passed
    page = check_page(checked)
    assert page.count("<svg") == 3 and "layers.0.mlp.down_proj" in page
    assert not re.search(r"<script|https?://|src=", page)


def test_thresholds(checked: Checked) -> None:
    manifest = open_bundle_of(checked)
    strict = dataclasses.replace(OPTIONS, min_sqnr=90.0, max_perplexity=-100.0, min_match=100.1)
    verdicts = judge(checked.noise, checked.accuracy, checked.acceptance, strict, manifest)
    failed = [verdict.what for verdict in verdicts if not verdict.passed]
    assert any("SQNR" in what for what in failed) and any("perplexity" in what for what in failed)
    assert any("greedy match" in what for what in failed)


def open_bundle_of(checked: Checked) -> Any:
    return read_manifest(Path(checked.bundle))


def test_a_drafter_that_loses_tau_fails(checked: Checked) -> None:
    row = dataclasses.replace(checked.acceptance[0], drafter="int8", change=-0.04)
    verdicts = judge((), {}, [row], CheckOptions(), open_bundle_of(checked))
    assert [(v.value, v.limit, v.passed) for v in verdicts] == [(pytest.approx(4.0), 3.0, False)]


def test_combinations(quantized_bundle: Path) -> None:
    manifest = read_manifest(quantized_bundle)
    variants = [v for v in manifest.variants if v.precision in {"int8", "fp8"}]
    some, every = (combine(manifest, variants, every=flag) for flag in (False, True))
    assert some[0] == ("fp32", "fp32") and len(some) == 7 and len(every) == 9


def test_nothing_to_check(tiny_bundle: Path) -> None:
    with pytest.raises(CalibrationError, match="has no quantized graph; add one with"):
        check(tiny_bundle, CheckOptions())


def test_the_command_exits_1_beyond_a_threshold(quantized_bundle: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = ["check", str(quantized_bundle), "--precision", "int8-weight", "--samples", "2", "--max-new-tokens", "4"]
    done = CliRunner().invoke(cli, [*words, "--json", "--html", str(page), "--min-sqnr", "99", "--threads", "1"])
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert found["passed"] is False and found["evidence"] == "executed on CPU"
    assert list(found["accuracy"]) == ["fp32", "int8-weight", "int8-weight, CPU kernels"]
    assert {row["drafter"] for row in found["acceptance"]} == {"fp32", "int8-weight"} and page.exists()


def test_sensitivity_finds_the_layer_that_hurts(quantized_bundle: Path, checked: Checked) -> None:
    manifest = read_manifest(quantized_bundle)
    variant = next(v for v in manifest.variants if (v.role, v.precision) == ("target", "int8"))
    groups = loudest_groups(variant, checked.noise)
    assert len(groups) == 6 and all(group.rpartition(".")[2] in {"self_attn", "mlp"} for group in groups)
    found = find_recipe(
        quantized_bundle,
        manifest,
        variant,
        checked.noise,
        ["hello", "what is drafted"],
        budget=-1e9,
        max_groups=2,
        max_new_tokens=4,
        num_threads=1,
    )
    assert found.recipe is None and len(found.trials) == 2 and found.trials[0].loss <= found.trials[1].loss
    assert {trial.left_out[0] for trial in found.trials} == set(groups[:2])
    assert not list(quantized_bundle.parent.glob(".*"))
    open_bundle(quantized_bundle)
    command = dataclasses.replace(found, recipe=found.trials[0]).command("b")
    expected = (
        f"quantize b --precision int8 --drafter none --smoothquant 0.6 --skip target:{found.trials[0].left_out[0]}"
    )
    assert command == f"xpress-export {expected}"


def test_ratio_of_sums() -> None:
    values, sizes = np.array([1.0, 2.0, 3.0]), np.array([2.0, 4.0, 6.0])
    assert ratio_of_sums(values, sizes) == (0.5, 0.0)
    ratio, half = ratio_of_sums(np.array([1.0, 0.0]), np.array([1.0, 1.0]))
    assert ratio == 0.5 and half == pytest.approx(1.96 * np.sqrt(1.0) / 2)


def test_perplexity_by_hand() -> None:
    base = [Score(nll=10.0, num_text=5, matches=4, num_answer=4), Score(nll=20.0, num_text=10, matches=2, num_answer=2)]
    worse = [dataclasses.replace(s, nll=s.nll + 0.05 * s.num_text, matches=s.matches - 1) for s in base]
    found: Accuracy = compare(worse, base)
    assert found.perplexity == pytest.approx(np.exp(2.05)) and found.ratio == pytest.approx(np.expm1(0.05))
    assert found.ratio_ci95 == pytest.approx(0, abs=1e-9) and found.match_rate == pytest.approx(4 / 6)


def test_records_are_plain(checked: Checked) -> None:
    assert isinstance(checked.noise[0], LayerNoise) and isinstance(checked.acceptance[0], Acceptance)
