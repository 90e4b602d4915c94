"""calibrate, quantize and build as a user runs them: what they print, write and refuse."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from xpress_export.cli import cli
from xpress_export.manifest import open_bundle
from xpress_export.precision import choose_precisions, parse_precision


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words])


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def test_calibrate_then_quantize(bundle: Path) -> None:
    short = ("--samples", "1", "--max-new-tokens", "4", "--threads", "1")
    done = run("calibrate", bundle, *short)
    assert done.exit_code == 0, done.output
    assert "scales of 1 prompts (xpress-export's own), method max" in done.output
    done = run("quantize", bundle, "--precision", "fp8", "--drafter", "none", "--run")
    assert done.exit_code == 0 and "xpress-export check" in done.output, done.output
    manifest = open_bundle(bundle)
    assert [(v.role, v.precision) for v in manifest.variants] == [("target", "fp8")]
    assert choose_precisions(manifest, None) == {"target": "fp8", "drafter": "fp32", "refiner": "fp32"}
    done = run("generate", bundle, "--prompt", "hello", "--precision", "target=fp32", "--max-new-tokens", "3", "--json")
    assert done.exit_code == 0, done.output
    shown = run("inspect", bundle)
    assert "Quantized graphs (runs in fp8)" in shown.output and "scales/target.fp8.json" in shown.output


def test_scales_in_a_file(bundle: Path, tmp_path: Path) -> None:
    place = tmp_path / "reviewed" / "scales.json"
    options = ("--samples", "1", "--max-new-tokens", "3", "--method", "percentile", "--threads", "1")
    assert run("calibrate", bundle, *options, "--out", place).exit_code == 0
    before = (bundle / "manifest.json").read_bytes()
    assert place.exists() and not (bundle / "scales").exists()
    assert run("quantize", bundle, "--precision", "int8", "--scales", place, "--target", "none").exit_code == 0
    assert (bundle / "manifest.json").read_bytes() != before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("calibrate", "BUNDLE", "--prompts", "missing.jsonl"), "cannot be read"),
        (("quantize", "BUNDLE", "--precision", "int8"), "needs ranges of activations"),
        (("check", "BUNDLE", "--precision", "fp8"), "no fp8 graph"),
        (("generate", "BUNDLE", "--prompt", "x", "--precision", "fp8"), "has no model in fp8"),
    ],
)
def test_errors_are_one_sentence(words: tuple[str, ...], message: str, bundle: Path) -> None:
    done = run(*(bundle if word == "BUNDLE" else word for word in words))
    assert done.exit_code == 1 and message in str(done.exception) and "\n" not in str(done.exception)


@pytest.mark.parametrize("text", ["target", "target=", "nobody=int8", "target=int8,target=fp8"])
def test_precisions_that_do_not_parse(text: str, bundle: Path) -> None:
    if "=" in text:
        assert run("generate", bundle, "--prompt", "x", "--precision", text).exit_code == 2
    else:
        assert parse_precision(text) == text


def test_build_refuses_what_the_platform_lacks_first(tmp_path: Path) -> None:
    words = ("build", "--target", "nowhere", "--platform", "a100", "--precision", "fp8", "--out", tmp_path / "b")
    done = run(*words)
    assert "cannot run fp8" in str(done.exception) and not (tmp_path / "b").exists()
    done = run("export", "--target", "nowhere", "--precision", "int8", "--out", tmp_path / "b")
    assert done.exit_code == 2 and "writes fp32 or fp16" in done.output
