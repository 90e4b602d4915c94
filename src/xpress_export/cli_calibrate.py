"""The commands about precision: calibrate, quantize, check; and what `build --precision int8` adds to an export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xpress_export import console as ui
from xpress_export import names, platforms

if TYPE_CHECKING:
    from xpress_export.calibration.check import Checked
    from xpress_export.calibration.sensitivity import Sensitivity
    from xpress_export.manifest import Manifest

err = ui.make_console(stderr=True)
out = ui.make_console()
BUNDLE = click.argument("bundle", type=click.Path(path_type=Path))
METHODS = ("max", "percentile", "mse", "entropy")
DEFAULT_ALPHA = 0.8
PROMPTS = click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="F",
    help="JSONL; lines with 'prompt' or 'turns'.  [default: a few of our own, which are nobody's traffic]",
)
THREADS = click.option(
    "--threads", "num_threads", type=click.IntRange(min=1), metavar="N", help="CPU threads.  [default: one per core]"
)
ROLE_PRECISIONS = click.Choice([*platforms.QUANTIZED, "none"])


@click.command("calibrate")
@BUNDLE
@PROMPTS
@click.option("--samples", type=click.IntRange(min=1), default=64, metavar="N", help="Prompts from the top of F.")
@click.option("--method", type=click.Choice(METHODS), default="max", help="How INT8 ranges are chosen.")
@click.option("--percentile", type=click.FloatRange(50, 100), default=99.99, help="Of the method of that name.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, metavar="N", help="Per answer.")
@click.option("--allow-dead", is_flag=True, help="Accept channels that are always zero.")
@click.option("--out", "out_file", type=click.Path(path_type=Path), metavar="F", help="[default: in the bundle]")
@THREADS
def calibrate_command(bundle: Path, out_file: Path | None, **options: Any) -> None:
    """Measure the ranges of activations on BUNDLE's own answers to prompts.

    The draft-refine-verify loop runs as deployed, so prefill chunks, verify blocks and draft contexts are all seen.
    """
    from xpress_export.calibration.calibrate import CalibrateOptions, calibrate, save_scales

    scales = calibrate(bundle, CalibrateOptions(**options), ui.ConsoleProgress(err))
    place = save_scales(bundle, scales, out_file)
    rows = []
    for role, graph in scales.graphs.items():
        loudest = max(graph.activations.items(), key=lambda item: item[1].amax)
        rows.append((role, len(graph.activations), len(graph.weights), f"{loudest[1].amax:.4g} in {loudest[0]}"))
    out.print(f"scales of {scales.dataset.samples} prompts ({scales.dataset.name}), method {scales.method}: {place}")
    out.print(ui.table(None, ("graph", "activations", "weights", "greatest value"), rows))


@click.command("quantize")
@BUNDLE
@click.option("--precision", required=True, type=click.Choice(platforms.QUANTIZED), help="Of target and drafter.")
@click.option("--scales", type=click.Path(path_type=Path), metavar="F", help="[default: those in the bundle]")
@click.option(
    "--smoothquant",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="ALPHA",
    help="Move outliers of activations into weights first; 0.8 is a good start for int8.",
)
@click.option("--target", type=ROLE_PRECISIONS, help="Of the target, instead; none: leave it.")
@click.option("--drafter", type=ROLE_PRECISIONS, help="Of the drafter, instead; none: leave it.")
@click.option("--skip", multiple=True, metavar="PATTERN", help="Layers to leave high, e.g. '*.down_proj'; repeatable.")
@click.option(
    "--include", multiple=True, metavar="PATTERN", help="Layers to quantize that stay high by default: fc, lm_head."
)
@click.option(
    "--block-size", type=click.Choice([16, 32, 64, 128]), default=32, help="Weights per scale of int4-weight."
)
@click.option("--run", is_flag=True, help="Run the bundle in this precision from now on.")
def quantize_command(bundle: Path, **options: Any) -> None:
    """Add quantized graphs to BUNDLE, beside its own.

    Norms, softmax, embeddings, fc, lm_head and the refiner stay as they are. An interrupted run changes nothing.
    """
    from xpress_export.calibration.quantize import QuantizeOptions, quantize

    asked = QuantizeOptions(**options)
    progress = ui.ConsoleProgress(err)
    made = _with_steps(bundle, quantize(bundle, asked, progress), progress)
    _report(bundle, made, {asked.of("target"), asked.of("drafter")})


def quantize_build(folder: Path, precision: str, prompts: Path | None) -> None:
    """Calibrate a bundle that was just built, if `precision` needs it, and quantize it, unless that is done already."""
    from xpress_export.calibration.calibrate import CalibrateOptions, calibrate, save_scales
    from xpress_export.calibration.quantize import QuantizeOptions, quantize
    from xpress_export.calibration.scales import read_scales
    from xpress_export.manifest import read_manifest

    manifest, progress = read_manifest(folder), ui.ConsoleProgress(err)
    options, weights_only = CalibrateOptions(prompts=prompts), precision.endswith("-weight")
    made = [variant for variant in manifest.variants if variant.precision == precision]
    same = weights_only or all(read_scales(folder / str(v.scales)).dataset == options.read()[1] for v in made)
    if made and same and manifest.run_precision == precision:
        _report(folder, _with_steps(folder, manifest, progress), {precision})
        return
    if not weights_only:
        if prompts is None:
            ours = "Calibrating with a few prompts of our own; give yours with --calibration-prompts."
            err.print(ours, style="yellow")
        save_scales(folder, calibrate(folder, options, progress), None)
    alpha = DEFAULT_ALPHA if precision == "int8" else None
    wanted = QuantizeOptions(precision=precision, smoothquant=alpha, run=True)
    _report(folder, _with_steps(folder, quantize(folder, wanted, progress), progress), {precision})


def _with_steps(folder: Path, manifest: Manifest, progress: ui.ConsoleProgress) -> Manifest:
    """A bundle of the fused layout with the steps of its quantized models."""
    if manifest.layout != names.LAYOUT_FUSED:
        return manifest
    from xpress_export.exporter.cycle import add_steps

    return add_steps(folder, progress)


def _report(bundle: Path, manifest: Any, precisions: set[str]) -> None:
    sizes = {file.path: file.num_bytes for file in manifest.files}
    rows = []
    for variant in manifest.variants:
        if variant.precision in precisions:
            own = [path for path in variant.data if f".{variant.precision}." in path]
            kept = ", ".join(variant.kept[:4]) + (f" and {len(variant.kept) - 4} more" if len(variant.kept) > 4 else "")
            size = ui.human_bytes(sum(sizes[path] for path in own))
            rows.append((variant.role, variant.precision, variant.num_layers, size, kept))
    out.print(ui.table(None, ("model", "precision", "layers", "weights", "kept high"), rows))
    out.print(f"measure what it costs: xpress-export check {bundle}")


@click.command("check")
@BUNDLE
@click.option("--precision", type=click.Choice(platforms.QUANTIZED), help="[default: all that the bundle has]")
@PROMPTS
@click.option("--samples", type=click.IntRange(min=2), default=32, metavar="N", help="Prompts from the top of F.")
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=48, metavar="N", help="Per answer.")
@click.option(
    "--max-perplexity",
    type=float,
    metavar="PCT",
    help="Above the float target's.  [default: int8 5, fp8 2, int8-weight 0.5, int4-weight 15]",
)
@click.option("--max-tau-loss", type=float, default=3.0, metavar="PCT", help="Of the drafter's tau.")
@click.option("--min-match", type=float, default=0.0, metavar="PCT", help="Greedy tokens equal to the float target's.")
@click.option("--min-sqnr", type=float, default=5.0, metavar="DB", help="Of every layer.")
@click.option("--every-combination", is_flag=True, help="Also combine targets and drafters of different precisions.")
@click.option("--sensitivity", is_flag=True, help="Also find the fewest layers to leave high to meet the thresholds.")
@click.option("--groups", type=click.IntRange(min=1), default=12, metavar="N", help="Layer groups that it tries.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Also write a page with plots.")
@THREADS
def check_command(
    bundle: Path,
    sensitivity: bool,
    groups: int,
    as_json: bool,
    html: Path | None,
    **options: Any,
) -> None:
    """Measure what the quantized graphs of BUNDLE cost against its own.

    SQNR of every layer, perplexity and greedy match of the target, tau of every combination of target and drafter.
    Exits 1 where a figure is beyond its threshold.
    """
    from xpress_export.calibration.check import CheckOptions, check

    asked = CheckOptions(**options)
    progress = ui.ConsoleProgress(err)
    checked = check(bundle, asked, progress)
    found = _sensitivity(bundle, checked, asked, groups, progress) if sensitivity else []
    if html is not None:
        from xpress_export.calibration.page import check_page

        html.write_text(check_page(checked, found), "utf-8")
    if as_json:
        from dataclasses import asdict

        recipes = [{**asdict(each), "command": each.command(str(bundle))} for each in found]
        out_text = json.dumps({**checked.to_dict(), "sensitivity": recipes}, indent=2)
        ui.write(out_text + "\n")
    else:
        _print(checked, found, str(bundle))
    if not checked.passed:
        click.get_current_context().exit(1)


def _sensitivity(
    bundle: Path, checked: Checked, options: Any, groups: int, progress: ui.ConsoleProgress
) -> list[Sensitivity]:
    from xpress_export.calibration.check import MAX_PERPLEXITY, select
    from xpress_export.calibration.sensitivity import find_recipe
    from xpress_export.manifest import read_manifest

    manifest = read_manifest(bundle)
    _, prompts = options.held_out()
    found = []
    for variant in select(manifest, options.precision):
        perplexity = MAX_PERPLEXITY[variant.precision] if options.max_perplexity is None else options.max_perplexity
        found.append(
            find_recipe(
                bundle,
                manifest,
                variant,
                checked.noise,
                prompts,
                budget=perplexity if variant.role == "target" else options.max_tau_loss,
                max_groups=groups,
                max_new_tokens=options.max_new_tokens,
                progress=progress,
                num_threads=options.num_threads,
            )
        )
    return found


def _print(checked: Checked, sensitivity: list[Sensitivity], bundle: str) -> None:
    out.print(f"{checked.num_prompts} prompts ({checked.prompts}), executed on CPU; ± is a 95% confidence interval")
    worst = checked.noise[:10]
    rows: list[tuple[object, ...]] = [(n.precision, n.role, n.layer, f"{n.sqnr_db:.1f}", n.num_rows) for n in worst]
    header: tuple[str, ...] = ("precision", "model", "layer", "SQNR, dB", "rows")
    out.print(ui.table(f"Noise per layer, the worst {len(worst)} of {len(checked.noise)}", header, rows))
    rows = [
        (
            precision,
            f"{a.perplexity:.3f}",
            f"{100 * a.ratio:+.2f}% ± {100 * a.ratio_ci95:.2f}",
            f"{100 * a.match_rate:.1f}% ± {100 * a.match_ci95:.1f}",
            f"{a.num_text_tokens} / {a.num_answer_tokens}",
        )
        for precision, a in checked.accuracy.items()
    ]
    header = ("target", "perplexity", "against float", "greedy match", "tokens: text / answers")
    out.print(ui.table("Target", header, rows))
    rows = [
        (
            a.target,
            a.drafter,
            a.mode,
            f"{a.tau:.3f} ± {a.tau_ci95:.3f}",
            f"{100 * a.change:+.2f}% ± {100 * a.change_ci95:.2f}",
            f"{a.tokens_per_s:.1f}",
            f"{a.num_prompts} / {a.num_steps}",
        )
        for a in checked.acceptance
    ]
    header = ("target", "drafter", "mode", "tau", "against float", "tokens/s", "prompts / steps")
    out.print(ui.table("Acceptance", header, rows))
    rows = [("pass" if v.passed else "FAIL", v.what, f"{v.value:.2f}", f"{v.limit:g}") for v in checked.verdicts]
    out.print(ui.table("Thresholds", ("", "figure", "measured", "limit"), rows))
    for each in sensitivity:
        _print_sensitivity(each, bundle)


def _print_sensitivity(found: Sensitivity, bundle: str) -> None:
    loss = "perplexity above float, %" if found.role == "target" else "tau below float, %"
    rows = [("nothing", f"{found.quantized.loss:.2f}"), *((t.left_out[0], f"{t.loss:.2f}") for t in found.trials)]
    out.print(ui.table(f"Sensitivity of the {found.precision} {found.role}", ("left high", loss), rows))
    if found.recipe is None:
        out.print(f"no combination of these groups is within {found.budget:g}%; try more with --groups")
    elif not found.recipe.left_out:
        out.print(f"nothing need be left out to be within {found.budget:g}%")
    else:
        out.print(f"{found.recipe.loss:.2f}% with {len(found.recipe.left_out)} groups left out:")
        out.print(f"  {found.command(bundle)}")


COMMANDS = (calibrate_command, quantize_command, check_command)
