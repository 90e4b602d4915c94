"""Which layers hurt: leave one group of them in high precision at a time, and find the fewest that meet a budget.

A group is the attention or the MLP of one layer. Groups are tried in the order of their noise, the loudest first; each
trial is a real variant, written beside the bundle and removed again. The recipe then takes groups by what leaving each
one out gained, until the measured loss is within the budget.

    the target     loss: perplexity above the float target's, in percent
    the drafter    loss: tau below the float drafter's, in percent, in the fullest mode that the bundle has
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from xpress_export import names
from xpress_export.calibration.acceptance import load_graphs
from xpress_export.calibration.accuracy import compare, make_passages, score
from xpress_export.calibration.layers import KEPT_BY_DEFAULT, find_sites, matches
from xpress_export.calibration.qdq import DataFile, write_variant
from xpress_export.calibration.recipe import make_recipe
from xpress_export.calibration.runtimes import answer, runtime_of
from xpress_export.calibration.scales import Scales, read_scales
from xpress_export.calibration.sqnr import LayerNoise
from xpress_export.manifest import GRAPHS_FOLDER, Manifest, VariantRecord
from xpress_export.progress import Progress, Silent
from xpress_export.runtime.backend import Graph


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A variant with some groups left in high precision; loss in percent, as the module says."""

    left_out: tuple[str, ...]
    loss: float


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """trials: one group at a time, the most helpful first. recipe: the proposal, None if no trial met the budget.

    options: further words of the `quantize` command, those that the variant was made with.
    """

    role: str
    precision: str
    options: tuple[str, ...]
    budget: float
    quantized: Trial
    trials: tuple[Trial, ...]
    recipe: Trial | None

    def command(self, bundle: str) -> str | None:
        """The `quantize` command of the recipe."""
        if self.recipe is None:
            return None
        other = names.DRAFTER if self.role == names.TARGET else names.TARGET
        skip = [f"--skip {self.role}:{group}" for group in self.recipe.left_out]
        words = [f"xpress-export quantize {bundle} --precision {self.precision} --{other} none", *self.options, *skip]
        return " ".join(words)


Measure = Callable[[Sequence[str]], float]


def find_recipe(
    folder: Path,
    manifest: Manifest,
    variant: VariantRecord,
    noise: Sequence[LayerNoise],
    prompts: Sequence[str],
    *,
    budget: float,
    max_groups: int,
    max_new_tokens: int,
    progress: Progress | None = None,
    num_threads: int | None = None,
) -> Sensitivity:
    """Try the `max_groups` loudest groups of a variant, then add the most helpful ones until the budget is met."""
    progress = progress or Silent()
    groups = loudest_groups(variant, noise)[:max_groups]
    with _measuring(folder, manifest, variant, prompts, max_new_tokens, num_threads) as measure:
        with progress.step(f"Sensitivity of the {variant.precision} {variant.role}", total=1 + len(groups)) as advance:
            whole = Trial(left_out=(), loss=measure(()))
            advance(1)
            trials = []
            for group in groups:
                trials.append(Trial(left_out=(group,), loss=measure((group,))))
                advance(1)
        trials.sort(key=lambda trial: trial.loss)
        recipe = _grow(whole, trials, budget, measure, progress)
    return Sensitivity(
        role=variant.role,
        precision=variant.precision,
        options=_options(variant),
        budget=budget,
        quantized=whole,
        trials=tuple(trials),
        recipe=recipe,
    )


def _options(variant: VariantRecord) -> tuple[str, ...]:
    """What `quantize` was told, as far as the record shows it."""
    words = [] if variant.smoothquant is None else [f"--smoothquant {variant.smoothquant}"]
    words += [] if variant.block_size is None else [f"--block-size {variant.block_size}"]
    kept = [layer for layer in variant.kept if layer.rsplit(".", 1)[-1] not in KEPT_BY_DEFAULT]
    return (*words, *(f"--skip {variant.role}:{layer}" for layer in kept))


def _grow(whole: Trial, trials: Sequence[Trial], budget: float, measure: Measure, progress: Progress) -> Trial | None:
    """The first set of groups, by helpfulness, whose loss is within the budget."""
    if whole.loss <= budget:
        return whole
    if trials and trials[0].loss <= budget:
        return trials[0]
    with progress.step("Growing a recipe", total=max(len(trials) - 1, 1)) as advance:
        for count in range(2, len(trials) + 1):
            left_out = tuple(group for trial in trials[:count] for group in trial.left_out)
            loss = measure(left_out)
            advance(1)
            if loss <= budget:
                return Trial(left_out=left_out, loss=loss)
    return None


def loudest_groups(variant: VariantRecord, noise: Sequence[LayerNoise]) -> list[str]:
    """Attention and MLP of each quantized layer, by the least SQNR in it."""
    worst: dict[str, float] = {}
    for layer in noise:
        if (layer.role, layer.precision) == (variant.role, variant.precision):
            group = layer.layer.rpartition(".")[0] or layer.layer
            worst[group] = min(worst.get(group, layer.sqnr_db), layer.sqnr_db)
    return sorted(worst, key=lambda group: worst[group])


@contextmanager
def _measuring(
    folder: Path,
    manifest: Manifest,
    variant: VariantRecord,
    prompts: Sequence[str],
    max_new_tokens: int,
    num_threads: int | None,
) -> Iterator[Measure]:
    """A function from groups left out to the loss."""
    scales = read_scales(folder / variant.scales) if variant.scales is not None else None
    graphs = load_graphs(folder, manifest, {}, num_threads)
    base = _tau(folder, manifest, graphs, prompts, max_new_tokens) if variant.role == names.DRAFTER else 0.0
    passages = []
    if variant.role == names.TARGET:
        with runtime_of(folder, manifest, graphs) as runtime:
            passages = list(make_passages(runtime, prompts, max_new_tokens))
        reference = score(graphs[names.TARGET], manifest, passages)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.sensitivity-", dir=folder.resolve().parent) as place:
        work = Path(place)
        _share_weights(folder, work)

        def measure(left_out: Sequence[str]) -> float:
            path = _write(folder, manifest, variant, scales, left_out, work)
            graph = Graph(path, variant.role, num_threads, exact=True)
            if variant.role == names.DRAFTER:
                tau = _tau(folder, manifest, {**graphs, names.DRAFTER: graph}, prompts, max_new_tokens)
                return 100 * (1 - tau / base)
            return 100 * compare(score(graph, manifest, passages), reference).ratio

        yield measure


def _tau(
    folder: Path, manifest: Manifest, graphs: dict[str, Graph], prompts: Sequence[str], max_new_tokens: int
) -> float:
    with runtime_of(folder, manifest, graphs) as runtime:
        stats = [answer(runtime, prompt, max_new_tokens).stats for prompt in prompts]
    taus = [each.tau for each in stats if each.num_verify_steps]
    return sum(taus) / len(taus) if taus else 1.0


def _share_weights(folder: Path, work: Path) -> None:
    for path in (folder / GRAPHS_FOLDER).glob("*.data"):
        try:
            os.link(path, work / path.name)
        except OSError:
            shutil.copy2(path, work / path.name)


def _write(
    folder: Path,
    manifest: Manifest,
    variant: VariantRecord,
    scales: Scales | None,
    left_out: Sequence[str],
    work: Path,
) -> Path:
    """Write the variant with more layers kept high to `work`."""
    record = manifest.graphs[variant.role]
    sites = find_sites(ir.load(folder / record.file).graph, variant.role)
    more = {site.layer for site in sites if any(matches(site.layer, group) for group in left_out)}
    changed = replace(variant, kept=tuple(sorted({*variant.kept, *more})))
    data = work / "trial.data"
    data.unlink(missing_ok=True)
    recipe = make_recipe(folder, manifest, changed, scales)
    write_variant(folder, record, variant.role, recipe, DataFile(work, data.name), "trial")
    return work / "trial.onnx"
