"""Plain decoding on this CPU: this runtime, onnxruntime-genai and transformers on the same float32 weights.

    python benchmarks/cpu_decode.py bundles/smollm2-135m [--tokens 64] [--rounds 5] [--json]

Rounds are interleaved (A B C, A B C, ...) after one warm-up each, so that a machine whose speed drifts still gives
fair ratios. Every engine decodes greedily from the same prompt; tokens per second count the tokens after the first.
Also printed: whether the three agree on the tokens, and how much of a cycle is spent outside engine calls.
Needs the `export` and `bench` extras.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT = "Explain step by step how a bicycle stays upright, and why it is harder to balance when it is slow."

Run = Callable[[list[int], int], tuple[list[int], float]]
"""(prompt ids, number of new tokens) -> (new tokens, seconds from the first to the last of them)."""


def ours(bundle: Path, mode: str) -> tuple[Run, Any]:
    """This runtime in one mode; also the list of stats of its runs."""
    from xpress_export.runtime import Runtime, SamplingParams

    runtime = Runtime.open(bundle)
    seen: list[Any] = []

    def run(prompt: list[int], count: int) -> tuple[list[int], float]:
        result = runtime.generate(prompt, SamplingParams(max_new_tokens=count, ignore_eos=True, mode=mode)).result()
        seen.append(result.stats)
        return list(result.token_ids), result.stats.decode_ms / 1e3

    return run, (seen, runtime)


def save_hugging_face(source: str, folder: Path) -> Any:
    """The bundle's target as a transformers model, also saved as a folder for the genai builder."""
    from transformers import AutoTokenizer

    from xpress_export.exporter.reference import reference_from_checkpoint
    from xpress_export.exporter.target_checkpoint import read_target

    model: Any = reference_from_checkpoint(read_target(source))
    model.set_attn_implementation("sdpa")
    model.save_pretrained(folder)
    path = Path(source)
    kwargs = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    AutoTokenizer.from_pretrained(path.parent if kwargs else path, **kwargs).save_pretrained(folder)
    return model


def transformers_run(model: Any) -> Run:
    import torch

    def run(prompt: list[int], count: int) -> tuple[list[int], float]:
        stamps: list[float] = []

        class Clock:
            def put(self, _: Any) -> None:
                stamps.append(time.perf_counter())

            def end(self) -> None:
                pass

        with torch.inference_mode():
            ids = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                streamer=Clock(),
            )
        return ids[0, len(prompt) :].tolist(), stamps[-1] - stamps[1]  # stamps[0] is the prompt

    return run


def genai_run(hf_folder: Path, folder: Path) -> Run:
    import onnxruntime_genai as genai

    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", hf_folder, "-o", folder]
    subprocess.run([*builder, "-p", "fp32", "-e", "cpu", "-c", folder / "cache"], check=True, stdout=subprocess.DEVNULL)
    model = genai.Model(str(folder))

    def run(prompt: list[int], count: int) -> tuple[list[int], float]:
        params = genai.GeneratorParams(model)
        params.set_search_options(do_sample=False, max_length=len(prompt) + count, min_length=len(prompt) + count)
        generator = genai.Generator(model, params)
        generator.append_tokens(prompt)
        generator.generate_next_token()
        start = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        seconds = time.perf_counter() - start
        return list(map(int, generator.get_sequence(0)[len(prompt) :])), seconds

    return run


def measure(engines: dict[str, Run], prompt: list[int], count: int, rounds: int) -> dict[str, Any]:
    tokens: dict[str, list[int]] = {}
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for name, run in engines.items():
            gc.collect()
            got, seconds = run(prompt, count)
            tokens[name] = got
            if number:
                speeds[name].append((len(got) - 1) / seconds)
    base = next(iter(engines))
    return {
        "tokens_per_s": {name: statistics.median(values) for name, values in speeds.items()},
        "spread": {name: (min(values), max(values)) for name, values in speeds.items()},
        f"speed_up_of_{base}_over": {
            name: statistics.median(a / b for a, b in zip(speeds[base], values, strict=True))
            for name, values in speeds.items()
            if name != base
        },
        "same_tokens": {name: tokens[name] == tokens[base] for name in engines},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="xpress-bench-") as scratch:
        target_run, (stats, runtime) = ours(options.bundle, "target")
        model = save_hugging_face(runtime.manifest.target.source, Path(scratch, "hf"))
        engines = {
            "xpress-export": target_run,
            "onnxruntime-genai": genai_run(Path(scratch, "hf"), Path(scratch, "genai")),
            "transformers": transformers_run(model),
        }
        report = measure(engines, runtime.encode(PROMPT), options.tokens, options.rounds)
        counted = stats[1:]
        report["host_share"] = sum(s.host_ms for s in counted) / sum(s.decode_ms for s in counted)
    if options.json:
        print(json.dumps(report, indent=2))
        return
    for name, speed in report["tokens_per_s"].items():
        low, high = report["spread"][name]
        same = "same tokens" if report["same_tokens"][name] else "OTHER TOKENS"
        print(f"{name:20s} {speed:6.1f} tokens/s  ({low:.1f} to {high:.1f}, {options.rounds} rounds)  {same}")
    for name, ratio in report["speed_up_of_xpress-export_over"].items():
        print(f"xpress-export / {name}: {ratio:.2f}x (median of paired rounds)")
    print(f"time outside engine calls: {100 * report['host_share']:.2f}% of decoding")


if __name__ == "__main__":
    main()
