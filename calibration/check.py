"""What quantizing costs: noise per layer, perplexity and match rate of the target, tau of every combination.

Everything is compared with the bundle's own graphs, run in the same process on the same prompts. Each figure that a
threshold is set for becomes a verdict; the check fails if one of them does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xpress_export import names, platforms
from xpress_export.calibration import default_prompts
from xpress_export.calibration.acceptance import Acceptance, load_graphs, measure_acceptance
from xpress_export.calibration.accuracy import Accuracy, compare, make_passages, score
from xpress_export.calibration.audit import audit
from xpress_export.calibration.runtimes import runtime_of
from xpress_export.calibration.sqnr import LayerNoise, measure_noise
from xpress_export.errors import CalibrationError
from xpress_export.manifest import Manifest, VariantRecord, open_bundle
from xpress_export.progress import Progress, Silent
from xpress_export.runtime.backend import Graph
from xpress_export.runtime.evaluate import read_prompts

MAX_PERPLEXITY = {"int8": 5.0, "fp8": 2.0, "int8-weight": 0.5, "int4-weight": 15.0}
"""Percent that a target's perplexity may be above the float one's, unless told otherwise."""
ON_CPU = ", CPU kernels"
"""Marks a weight-only target on the kernels that the runtime uses here, which round more than the graph does."""
_NOISE_PROMPTS = 4


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """precision: of the variants to look at, None: all. prompts: a file, None: a few of our own.

    Thresholds: max_perplexity and max_tau_loss in percent of the float graphs', min_match in percent, min_sqnr in dB;
    None for max_perplexity: by precision. A figure within its confidence interval of the threshold still counts as it
    is: take more prompts.
    """

    precision: str | None = None
    prompts: Path | None = None
    samples: int = 32
    max_new_tokens: int = 48
    max_perplexity: float | None = None
    max_tau_loss: float = 3.0
    min_match: float = 0.0
    min_sqnr: float = 5.0
    every_combination: bool = False
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if self.precision is not None and self.precision not in platforms.QUANTIZED:
            raise CalibrationError(f"precision must be one of {', '.join(platforms.QUANTIZED)}, got {self.precision!r}")
        if self.samples < 2 or self.max_new_tokens < 2:
            raise CalibrationError("a check needs at least 2 samples and 2 new tokens")

    def held_out(self) -> tuple[str, list[str]]:
        """What the prompts are called, and the prompts."""
        if self.prompts is None:
            return default_prompts.NAME, list(default_prompts.HELD_OUT[: self.samples])
        return self.prompts.name, read_prompts(self.prompts, self.samples)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One figure against its threshold, in the unit that `what` names."""

    what: str
    value: float
    limit: float
    passed: bool


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Everything that was measured. accuracy: of the target by precision, the bundle's own first."""

    bundle: str
    prompts: str
    num_prompts: int
    noise: tuple[LayerNoise, ...]
    accuracy: Mapping[str, Accuracy]
    acceptance: tuple[Acceptance, ...]
    verdicts: tuple[Verdict, ...] = field(default=())

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed, "evidence": "executed on CPU"}


def check(folder: Path, options: CheckOptions, progress: Progress | None = None) -> Checked:
    """Measure the variants of a bundle; raises CalibrationError where a variant is not what its record says."""
    progress = progress or Silent()
    name, prompts = options.held_out()
    with progress.step("Checking the bundle") as advance:
        manifest = open_bundle(folder, advance)
    variants = select(manifest, options.precision)
    with progress.step("Auditing the graphs", total=len(variants)) as advance:
        for variant in variants:
            audit(folder, manifest, variant)
            advance(1)
    noise = _noise(folder, manifest, variants, prompts, options, progress)
    accuracy = _accuracy(folder, manifest, variants, prompts, options, progress)
    acceptance = _acceptance(folder, manifest, variants, prompts, options, progress)
    return Checked(
        bundle=str(folder),
        prompts=name,
        num_prompts=len(prompts),
        noise=tuple(noise),
        accuracy=accuracy,
        acceptance=tuple(acceptance),
        verdicts=tuple(judge(noise, accuracy, acceptance, options, manifest)),
    )


def select(manifest: Manifest, precision: str | None) -> list[VariantRecord]:
    """The variants to check."""
    found = [variant for variant in manifest.variants if precision in {None, variant.precision}]
    if not found:
        what = f"no {precision} graph" if precision else "no quantized graph"
        raise CalibrationError(f"the bundle has {what}; add one with `xpress-export quantize BUNDLE --precision P`")
    return found


def _noise(
    folder: Path,
    manifest: Manifest,
    variants: Sequence[VariantRecord],
    prompts: Sequence[str],
    options: CheckOptions,
    progress: Progress,
) -> list[LayerNoise]:
    by_precision = {v.precision: [w for w in variants if w.precision == v.precision] for v in variants}
    noise: list[LayerNoise] = []
    with progress.step("Noise per layer", total=len(by_precision)) as advance:
        for group in by_precision.values():
            few = prompts[:_NOISE_PROMPTS]
            noise += measure_noise(folder, manifest, group, few, options.max_new_tokens, options.num_threads)
            advance(1)
    return sorted(noise, key=lambda layer: layer.sqnr_db)


def _accuracy(
    folder: Path,
    manifest: Manifest,
    variants: Sequence[VariantRecord],
    prompts: Sequence[str],
    options: CheckOptions,
    progress: Progress,
) -> dict[str, Accuracy]:
    targets = [variant for variant in variants if variant.role == names.TARGET]
    if not targets:
        return {}
    with progress.step("Answers of the float target", total=len(prompts)) as advance:
        graphs = load_graphs(folder, manifest, {}, options.num_threads)
        passages = []
        with runtime_of(folder, manifest, graphs) as runtime:
            for passage in make_passages(runtime, prompts, options.max_new_tokens):
                passages.append(passage)
                advance(1)
    runs = 1 + sum(2 if variant.scales is None else 1 for variant in targets)
    with progress.step("Perplexity", total=len(prompts) * runs) as advance:
        reference = score(graphs[names.TARGET], manifest, passages, advance)
        found = {manifest.precision: compare(reference, reference)}
        for variant in targets:
            for exact in (True, *([False] if variant.scales is None else [])):
                graph = Graph(folder / variant.file, names.TARGET, options.num_threads, exact=exact)
                name = variant.precision if exact else f"{variant.precision}{ON_CPU}"
                found[name] = compare(score(graph, manifest, passages, advance), reference)
    return found


def _acceptance(
    folder: Path,
    manifest: Manifest,
    variants: Sequence[VariantRecord],
    prompts: Sequence[str],
    options: CheckOptions,
    progress: Progress,
) -> list[Acceptance]:
    """Of target and drafter in each precision, alone and together; the bundle's own graphs first."""
    if names.DRAFTER not in manifest.roles:
        return []
    combinations = combine(manifest, variants, every=options.every_combination)
    modes = 2 if manifest.refiner else 1
    with progress.step("tau of each combination", total=len(prompts) * len(combinations) * modes) as advance:
        return measure_acceptance(
            folder, manifest, combinations, prompts, options.max_new_tokens, options.num_threads, advance
        )


def combine(manifest: Manifest, variants: Sequence[VariantRecord], *, every: bool) -> list[tuple[str, str]]:
    """Precisions of (target, drafter), that of the bundle first. every: also pairs of two different precisions."""
    own = manifest.precision
    targets, drafters = (
        [own, *(v.precision for v in variants if v.role == role)] for role in (names.TARGET, names.DRAFTER)
    )
    pairs = [(target, drafter) for target in targets for drafter in drafters]
    return [(t, d) for t, d in pairs if every or own in {t, d} or t == d]


def judge(
    noise: Sequence[LayerNoise],
    accuracy: Mapping[str, Accuracy],
    acceptance: Sequence[Acceptance],
    options: CheckOptions,
    manifest: Manifest,
) -> list[Verdict]:
    """Every figure that has a threshold."""
    verdicts = []
    for precision in dict.fromkeys(layer.precision for layer in noise):
        worst = min((layer for layer in noise if layer.precision == precision), key=lambda layer: layer.sqnr_db)
        what = f"{precision} {worst.role} {worst.layer}: SQNR, dB"
        verdicts.append(_at_least(what, worst.sqnr_db, options.min_sqnr))
    for precision in [name for name in accuracy if name in MAX_PERPLEXITY]:
        found = accuracy[precision]
        limit = MAX_PERPLEXITY[precision] if options.max_perplexity is None else options.max_perplexity
        verdicts.append(_at_most(f"{precision} target: perplexity above float, %", 100 * found.ratio, limit))
        if options.min_match:
            what = f"{precision} target: greedy match, %"
            verdicts.append(_at_least(what, 100 * found.match_rate, options.min_match))
    for row in acceptance:
        if row.target == manifest.precision and row.drafter != manifest.precision:
            what = f"{row.drafter} drafter, {row.mode}: tau below float, %"
            verdicts.append(_at_most(what, -100 * row.change, options.max_tau_loss))
    return verdicts


def _at_most(what: str, value: float, limit: float) -> Verdict:
    return Verdict(what=what, value=value, limit=limit, passed=value <= limit)


def _at_least(what: str, value: float, limit: float) -> Verdict:
    return Verdict(what=what, value=value, limit=limit, passed=value >= limit)
