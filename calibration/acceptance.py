"""tau of every combination of a target's and a drafter's precision, against the float drafter on the same prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from xpress_export import names
from xpress_export.calibration.runtimes import answer, runtime_of
from xpress_export.manifest import Manifest
from xpress_export.runtime.backend import Graph

LABELS = {names.MODE_DFLASH: "dFlash", names.MODE_XPRESS: "xPress"}


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """tau of one mode: tokens per verify step, mean over prompts; half-widths are of 95% confidence intervals.

    change: of tau against the bundle's own target and drafter, -0.03 for 3% less, from paired differences.
    tokens_per_s: while decoding, on this machine.
    """

    target: str
    drafter: str
    mode: str
    tau: float
    tau_ci95: float
    change: float
    change_ci95: float
    tokens_per_s: float
    num_prompts: int
    num_steps: int


@dataclass(frozen=True)
class _Run:
    taus: list[float]
    num_steps: int
    tokens_per_s: float


def measure_acceptance(
    folder: Path,
    manifest: Manifest,
    combinations: Sequence[tuple[str, str]],
    prompts: Sequence[str],
    max_new_tokens: int,
    num_threads: int | None = None,
    advance: Callable[[float], None] = lambda _: None,
) -> list[Acceptance]:
    """Rows for each (target, drafter) precision and each drafting mode; the first combination is the reference."""
    modes = [names.MODE_DFLASH, *([names.MODE_XPRESS] if manifest.refiner else [])]
    rows: list[Acceptance] = []
    reference: dict[str, _Run] = {}
    for target, drafter in combinations:
        graphs = load_graphs(folder, manifest, {names.TARGET: target, names.DRAFTER: drafter}, num_threads)
        with runtime_of(folder, manifest, graphs) as runtime:
            for mode in modes:
                taus, steps, tokens, spent_ms = [], 0, 0, 0.0
                for prompt in prompts:
                    stats = answer(runtime, prompt, max_new_tokens, mode).stats
                    taus.append(stats.tau if stats.num_verify_steps else math.nan)
                    steps, spent_ms = steps + stats.num_verify_steps, spent_ms + stats.decode_ms
                    tokens += stats.num_generated_tokens
                    advance(1)
                run = _Run(taus, steps, 1e3 * tokens / spent_ms if spent_ms else 0.0)
                rows.append(_row(target, drafter, LABELS[mode], run, reference.setdefault(mode, run)))
    return rows


def load_graphs(
    folder: Path, manifest: Manifest, precisions: Mapping[str, str], num_threads: int | None = None
) -> dict[str, Graph]:
    """The graphs of all models, in the precisions given or the bundle's own."""
    graphs = {}
    for role in manifest.roles:
        record = manifest.graph(role, precisions.get(role, manifest.precision))
        assert record is not None
        graphs[role] = Graph(folder / record.file, role, num_threads)
    return graphs


def _row(target: str, drafter: str, mode: str, run: _Run, reference: _Run) -> Acceptance:
    both = [(a, b) for a, b in zip(run.taus, reference.taus, strict=True) if not (math.isnan(a) or math.isnan(b))]
    mine, base = (np.array(values, float) for values in zip(*both, strict=True)) if both else (np.ones(1), np.ones(1))
    tau, tau_error = _mean(mine)
    difference, error = _mean(mine - base)
    scale = float(base.mean())
    return Acceptance(
        target=target,
        drafter=drafter,
        mode=mode,
        tau=tau,
        tau_ci95=tau_error,
        change=difference / scale,
        change_ci95=error / scale,
        tokens_per_s=run.tokens_per_s,
        num_prompts=len(both),
        num_steps=run.num_steps,
    )


def _mean(values: np.ndarray) -> tuple[float, float]:
    error = 1.96 * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return float(values.mean()), error
