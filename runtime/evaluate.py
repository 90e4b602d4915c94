"""What drafting is worth on given prompts: tau, acceptance per slot, tau against refine passes, speed-up.

Prompt files are JSONL; a row is `{"turns": [...]}` (the first turn is used), `{"prompt": "..."}` or a plain string.
Each prompt runs in every arm before the next prompt, so that a machine whose speed drifts still compares fairly;
the outputs of all arms must be the same tokens, or the evaluation fails.

    tau          of a response: generated tokens per verify step; reported: mean over responses, with the half-width
                 of its 95% confidence interval (1.96 standard errors)
    slot_rates   [j]: share of verify steps that accepted more than j draft tokens
    speed_up     median over prompts of (tokens/s of the arm) / (tokens/s of plain decoding of the same prompt)
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from xpress_export import names
from xpress_export.errors import RequestError
from xpress_export.progress import Progress, Silent
from xpress_export.runtime.api import Runtime
from xpress_export.runtime.params import SamplingParams
from xpress_export.runtime.requests import Result


@dataclass(frozen=True)
class Arm:
    """One way to decode: a runtime, a mode, refine passes (None: the bundle's). label: what reports call it."""

    label: str
    runtime: Runtime
    mode: str
    refine_passes: int | None = None


@dataclass
class Row:
    """Results of one arm on one prompt file."""

    benchmark: str
    arm: str
    refine_passes: int | None
    num_prompts: int = 0
    num_tokens: int = 0
    tau: float = 0.0
    tau_ci95: float = 0.0
    slot_rates: list[float] = field(default_factory=list)
    tokens_per_s: float = 0.0
    speed_up: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """The prompts of a JSONL file, in order, at most `limit`; a RequestError names the line that is wrong."""
    try:
        lines = path.read_text("utf-8").split("\n")  # a string may hold other line ends
    except (OSError, UnicodeDecodeError) as err:
        raise RequestError(f"{path} cannot be read as UTF-8 text: {err}") from err
    prompts = [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise RequestError(f"{path} holds no prompts; each line is a JSON object with 'prompt' or 'turns'")
    return prompts[:limit]


def _prompt(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as err:
        raise RequestError(f"{where} is not JSON ({err}); each line is an object with 'prompt' or 'turns'") from err
    if isinstance(row, dict):
        row = row.get("prompt") or (row.get("turns") or [None])[0]
    if not isinstance(row, str) or not row.strip():
        raise RequestError(f"{where} has no text in 'prompt' or in the first of 'turns'")
    return row


def arms_of(runtime: Runtime, modes: Sequence[str] | None = None, passes: Sequence[int] = ()) -> list[Arm]:
    """Arms for a bundle: each drafting mode it has; with `passes`, one more refined arm per number of passes."""
    kind = runtime.manifest.refiner.kind if runtime.manifest.refiner else ""
    label = {names.MODE_DFLASH: "dflash", names.MODE_XPRESS: kind}
    wanted = [m for m in runtime.modes if m != names.MODE_TARGET and (modes is None or label[m] in modes)]
    arms = [Arm(label[mode], runtime, mode) for mode in wanted]
    if names.MODE_XPRESS in wanted:
        arms += [Arm(f"{kind} K={k}", runtime, names.MODE_XPRESS, k) for k in passes]
    return arms


def tell_apart(arms: Sequence[Arm]) -> list[Arm]:
    """Number arms of the same label, which come from different bundles: "xpress", "xpress #2"."""
    labels = [arm.label for arm in arms]
    counts = [labels[: i + 1].count(label) for i, label in enumerate(labels)]
    return [arm if n == 1 else replace(arm, label=f"{arm.label} #{n}") for arm, n in zip(arms, counts, strict=True)]


def evaluate(
    benchmarks: dict[str, list[str]],
    arms: Sequence[Arm],
    max_new_tokens: int,
    progress: Progress | None = None,
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> list[Row]:
    """Run every prompt in plain decoding and in every arm; one row per benchmark and arm, plain decoding first.

    temperature: above 0, all arms draw with the same `seed`, so their answers are still the same tokens.
    """
    if not arms:
        raise RequestError("there is nothing to evaluate: the bundle has no drafter, or no mode was left")
    progress, rows = progress or Silent(), []
    for name, prompts in benchmarks.items():
        with progress.step(f"Evaluating {name}", total=len(prompts) * (1 + len(arms))) as advance:
            results: list[list[Result]] = [[] for _ in range(1 + len(arms))]
            common = SamplingParams(
                max_new_tokens=max_new_tokens, temperature=temperature, seed=seed if temperature else None
            )
            for prompt in prompts:
                for collected, result in zip(results, _run(prompt, arms, common), strict=True):
                    collected.append(result)
                    advance(1)
        rows += [_row(name, arm, found, results[0]) for arm, found in zip((None, *arms), results, strict=True)]
    return rows


def _run(prompt: str, arms: Sequence[Arm], common: SamplingParams) -> Iterator[Result]:
    plain = _generate(Arm("target", arms[0].runtime, names.MODE_TARGET), prompt, common)
    yield plain
    for arm in arms:
        result = _generate(arm, prompt, common)
        if result.token_ids != plain.token_ids:
            raise RequestError(f"{arm.label} gave other tokens than plain decoding for the prompt {prompt[:60]!r}")
        yield result


def _generate(arm: Arm, prompt: str, common: SamplingParams) -> Result:
    params = replace(common, mode=arm.mode, refine_passes=arm.refine_passes)
    return arm.runtime.generate(prompt, params).result()


def _row(benchmark: str, arm: Arm | None, results: list[Result], plain: list[Result]) -> Row:
    steps = [r for r in results if r.stats.num_verify_steps]  # an answer of one token takes no step
    taus = [r.stats.tau for r in steps]
    ratios = [r.stats.tokens_per_s / p.stats.tokens_per_s for r, p in zip(results, plain, strict=True) if r in steps]
    spent_ms = sum(r.stats.decode_ms for r in steps)
    return Row(
        benchmark=benchmark,
        arm=arm.label if arm else "target",
        refine_passes=arm.refine_passes if arm else None,
        num_prompts=len(results),
        num_tokens=sum(len(r.token_ids) for r in results),
        tau=statistics.fmean(taus) if taus else 0.0,
        tau_ci95=1.96 * statistics.stdev(taus) / math.sqrt(len(taus)) if len(taus) > 1 else 0.0,
        slot_rates=_slot_rates([r.stats.acceptance_histogram for r in steps]) if arm else [],
        tokens_per_s=1e3 * sum(len(r.token_ids) - 1 for r in steps) / spent_ms if spent_ms else 0.0,
        speed_up=statistics.median(ratios) if ratios else 0.0,
    )


def _slot_rates(histograms: Sequence[Sequence[int]]) -> list[float]:
    """Share of steps that accepted more than j draft tokens, j = 0, 1, ..."""
    longest = max(map(len, histograms), default=0)
    total = [sum(h[a] for h in histograms if a < len(h)) for a in range(longest)]
    steps = sum(total)
    return [sum(total[j + 1 :]) / steps for j in range(longest - 1)]


def overall(rows: Sequence[Row]) -> list[Row]:
    """Per arm, the unweighted mean over benchmarks of tau and speed-up, as papers report it."""
    means = []
    for arm in dict.fromkeys(row.arm for row in rows):
        mine = [row for row in rows if row.arm == arm]
        means.append(
            Row(
                benchmark="mean",
                arm=arm,
                refine_passes=mine[0].refine_passes,
                num_prompts=sum(r.num_prompts for r in mine),
                num_tokens=sum(r.num_tokens for r in mine),
                tau=statistics.fmean(r.tau for r in mine),
                tau_ci95=math.sqrt(sum(r.tau_ci95**2 for r in mine)) / len(mine),
                tokens_per_s=statistics.fmean(r.tokens_per_s for r in mine),
                speed_up=statistics.fmean(r.speed_up for r in mine),
            )
        )
    return means
