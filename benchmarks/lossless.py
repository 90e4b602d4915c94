"""Does speculation lose anything? Every mode of a bundle against transformers' greedy decoding.

    python benchmarks/lossless.py bundles/smollm2-135m [--tokens 128] [--prompts FILE] [--json]

For each prompt the tokens of every mode are compared with `generate(do_sample=False)` of transformers on the same
float32 weights. A first difference counts as a near-tie, and is listed, only if the reference's logits of the two
tokens differ by at most 1e-4 there; any other difference makes the command fail. Needs the `export` extra.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

NEAR_TIE = 1e-4


def reference(source: str) -> Any:
    """The bundle's target as a transformers model in float32."""
    from xpress_export.exporter.reference import reference_from_checkpoint
    from xpress_export.exporter.target_checkpoint import read_target

    model: Any = reference_from_checkpoint(read_target(source))
    model.set_attn_implementation("sdpa")
    return model


def greedy(model: Any, prompt: list[int], count: int, stops: tuple[int, ...]) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=list(stops),
            pad_token_id=stops[0] if stops else 0,
        )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def logit_gap(model: Any, prefix: list[int], ours: int, theirs: int) -> float:
    """How far apart the reference puts the two tokens after `prefix`."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([prefix])).logits[0, -1]
    return float(logits[theirs] - logits[ours])


def compare(runtime: Any, model: Any, prompts: list[str], count: int) -> list[dict[str, Any]]:
    """One row per prompt and mode: identical, or where and how clearly it first differs."""
    from xpress_export.runtime import SamplingParams

    rows = []
    for text in prompts:
        prompt = runtime.encode(text)
        expected = greedy(model, prompt, count, runtime.codec.stop_token_ids)
        for mode in runtime.modes:
            result = runtime.generate(prompt, SamplingParams(max_new_tokens=count, mode=mode)).result()
            got = list(result.token_ids)
            row: dict[str, Any] = {"prompt": text, "mode": mode, "tokens": len(got), "identical": got == expected}
            row["tau"] = result.stats.tau
            if got != expected:
                pairs = zip(got, expected, strict=False)
                at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
                row["first_difference"] = at
                if at < min(len(got), len(expected)):
                    row["logit_gap"] = logit_gap(model, prompt + expected[:at], got[at], expected[at])
            rows.append(row)
        print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "prompts.jsonl")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    from xpress_export.runtime import Runtime
    from xpress_export.runtime.evaluate import read_prompts

    prompts = read_prompts(options.prompts)
    with Runtime.open(options.bundle) as runtime:
        rows = compare(runtime, reference(runtime.manifest.target.source), prompts, options.tokens)
    lost = [r for r in rows if not r["identical"] and not r.get("logit_gap", 1.0) <= NEAR_TIE]
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        for mode in dict.fromkeys(row["mode"] for row in rows):
            mine = [row for row in rows if row["mode"] == mode]
            same, tokens = sum(row["identical"] for row in mine), sum(row["tokens"] for row in mine)
            tau = sum(row["tau"] for row in mine) / len(mine)
            print(f"{mode:8s} {same} of {len(mine)} prompts identical, {tokens} tokens, mean tau {tau:.3f}")
        for row in rows:
            if not row["identical"]:
                kind, at, gap = "LOST" if row in lost else "near-tie", row["first_difference"], row.get("logit_gap")
                print(f"{kind}: {row['mode']}, token {at}, gap {gap}: {row['prompt']}")
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
