"""Do both layouts write what the target alone writes, and does the fused one cost anything on this CPU?

    python benchmarks/layouts.py BUNDLE [--tokens 64] [--draft-tokens N] [--prompts FILE ...] [--limit N] [--json]

BUNDLE: one of the fused layout; it holds the graphs of the split layout too. Arms, one after the other for every
prompt, in an order that turns:

    target    plain decoding
    split     the loop in which the host decides, as a split bundle runs on CPU
    device    the graphs of the split layout in the loop in which the device decides
    fused     one graph for a whole cycle

All arms that draft do so alike: the same draft tokens and refine passes in every cycle. A ratio is the median over
prompts of the time per cycle of fused over that of split, with the 95% interval of a bootstrap. Exit 1: some prompt
got other tokens than from the target alone, or fused is more than 3% slower.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_SLOWER = 0.03
OWN_PROMPTS = [Path(__file__).with_name(name) for name in ("prompts.jsonl", "more_prompts.jsonl")]


@dataclass
class Arm:
    """runtime, mode: how it decodes. wrong: prompts with other tokens than the target's. cycle_ms: of each prompt."""

    runtime: Any
    mode: str
    wrong: list[str] = field(default_factory=list)
    cycle_ms: list[float] = field(default_factory=list)
    tau: list[float] = field(default_factory=list)


def open_arms(stack: contextlib.ExitStack, bundle: Path, draft_tokens: int | None) -> dict[str, Arm]:
    from xpress_export.runtime import Runtime
    from xpress_export.runtime.device_cpu import CpuDevice

    def opened(**options: Any) -> Any:
        return stack.enter_context(Runtime.open(bundle, num_slots=1, max_draft_tokens=draft_tokens, **options))

    split = opened(device="cpu", layout="split")
    return {
        "target": Arm(split, split.modes[0]),
        "split": Arm(split, split.modes[-1]),
        "device": Arm(opened(device=CpuDevice(), layout="split"), split.modes[-1]),
        "fused": Arm(opened(device="cpu", layout="fused"), split.modes[-1]),
    }


def measure(arms: dict[str, Arm], prompts: list[str], num_tokens: int) -> None:
    from xpress_export.runtime import SamplingParams

    names = list(arms)
    for number, prompt in enumerate(prompts):
        tokens: dict[str, tuple[int, ...]] = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            arm = arms[name]
            params = SamplingParams(max_new_tokens=num_tokens, mode=arm.mode)
            result = arm.runtime.generate(prompt, params).result()
            tokens[name] = result.token_ids
            if result.stats.num_verify_steps:
                arm.cycle_ms.append(result.stats.decode_ms / result.stats.num_verify_steps)
                arm.tau.append(result.stats.tau)
        for name, found in tokens.items():
            if found != tokens["target"]:
                arms[name].wrong.append(prompt)
        print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)


def ratio_of(fused: Arm, split: Arm) -> tuple[float, float, float]:
    """Median of the ratios of time per cycle, and its 95% interval."""
    import numpy as np

    ratios = np.array(fused.cycle_ms) / np.array(split.cycle_ms)
    draws = np.random.default_rng(0).choice(ratios, (2000, ratios.size))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return float(np.median(ratios)), float(low), float(high)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--draft-tokens", type=int)
    parser.add_argument("--prompts", type=Path, action="append")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    from xpress_export.errors import XpressExportError
    from xpress_export.runtime.evaluate import read_prompts

    try:
        prompts = [text for path in args.prompts or OWN_PROMPTS for text in read_prompts(path, args.limit)]
        with contextlib.ExitStack() as stack:
            arms = open_arms(stack, args.bundle, args.draft_tokens)
            measure(arms, prompts[:2], num_tokens=8)  # warm
            for arm in arms.values():
                arm.wrong, arm.cycle_ms, arm.tau = [], [], []
            measure(arms, prompts, args.tokens)
    except XpressExportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    ratio, low, high = ratio_of(arms["fused"], arms["split"])
    found = {
        name: {
            "identical": len(prompts) - len(arm.wrong),
            "cycle_ms": statistics.median(arm.cycle_ms),
            "tau": statistics.mean(arm.tau),
            "wrong": arm.wrong,
        }
        for name, arm in arms.items()
    }
    if args.json:
        print(json.dumps({"prompts": len(prompts), "arms": found, "fused_over_split": [ratio, low, high]}, indent=2))
    else:
        for name, row in found.items():
            print(
                f"{name:7} {row['identical']} of {len(prompts)} prompts as the target alone, tau {row['tau']:.3f}, "
                f"{row['cycle_ms']:.1f} ms per cycle"
            )
        print(f"fused over split, time per cycle: {ratio:.3f} ({low:.3f} to {high:.3f}); executed on CPU")
    return int(any(arm.wrong for arm in arms.values()) or ratio > 1 + MOST_SLOWER)


if __name__ == "__main__":
    sys.exit(main())
