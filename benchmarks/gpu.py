"""What only a GPU can show: token identity, captured graphs, the parts of a cycle, tokens per second. See `gpu.sh`.

    python benchmarks/gpu.py BUNDLE OUT.json [--device cuda:0] [--seconds 420]

OUT.json is written anew after every part, so that a run that is cut short leaves what it has. A part that cannot run
is listed with its reason. `--device cpu` tries the script itself on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TOKENS, NUM_PROMPTS = 128, 8


class Report:
    """The JSON file: facts of the machine, then one entry for each part."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._end = path, time.monotonic() + seconds
        self.found: dict[str, Any] = {}

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Run one part and write the file; what it raises becomes its entry."""
        started = time.monotonic()
        if started > self._end:
            entry: Any = {"not_run": "out of time"}
        else:
            try:
                entry = work()
            except Exception as error:
                entry = {"not_run": f"{type(error).__name__}: {error}"}
        self.found[name] = entry
        self._path.with_suffix(".partial").write_text(json.dumps(self.found, indent=2) + "\n", "utf-8")
        os.replace(self._path.with_suffix(".partial"), self._path)
        reason = f": {entry['not_run']}" if isinstance(entry, dict) and "not_run" in entry else ""
        print(f"{name} ({time.monotonic() - started:.0f} s){reason}", file=sys.stderr)
        return entry


def ways(bundle: Path, device: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Backends and layouts to try, by name."""
    from xpress_export.manifest import read_manifest

    manifest = read_manifest(bundle)
    layouts = ["split", *(["fused"] if manifest.layout == "fused" else [])]
    backends = ["onnxruntime", *sorted({engine.backend for engine in manifest.engines})]
    for backend in backends if device != "cpu" else ["onnxruntime"]:
        for layout in layouts:
            yield f"{backend} {layout}", {"device": device, "backend": backend, "layout": layout}


def identity(bundle: Path, where: dict[str, Any], prompts: list[str]) -> dict[str, Any]:
    """Tokens of every mode against plain decoding on the same device, one at a time and all together."""
    from xpress_export.runtime import Runtime, SamplingParams

    with Runtime.open(bundle, num_slots=NUM_PROMPTS, **where) as runtime:
        plain = SamplingParams(max_new_tokens=TOKENS, mode=runtime.modes[0])
        expected = [runtime.generate(prompt, plain).result().token_ids for prompt in prompts]
        found = {}
        for mode in runtime.modes[1:]:
            params = SamplingParams(max_new_tokens=TOKENS, mode=mode)
            alone = [runtime.generate(prompt, params).result() for prompt in prompts]
            running = [runtime.generate(prompt, params) for prompt in prompts]
            together = [generation.result().token_ids for generation in running]
            found[mode] = {
                "prompts": len(prompts),
                "identical_alone": sum(r.token_ids == e for r, e in zip(alone, expected, strict=True)),
                "identical_together": sum(r == e for r, e in zip(together, expected, strict=True)),
                "tau": sum(r.stats.tau for r in alone) / len(alone),
            }
        return {"device": runtime.device, "cuda_graphs": runtime.stats.num_graphs, "modes": found}


def speed(bundle: Path, where: dict[str, Any], trace: Path) -> dict[str, Any]:
    """`bench` at 1 and 8 clients, with its timeline beside the report."""
    from xpress_export.runtime.bench import BenchOptions, bench
    from xpress_export.runtime.trace import Tracer

    tracer = Tracer()
    options = BenchOptions(concurrency=(1, 8), max_new_tokens=TOKENS, rounds=2, **where)
    report = bench(bundle, options, tracer=tracer)
    tracer.write(trace)
    return {**report.to_dict(), "trace": trace.name}


def against_transformers(bundle: Path, device: str, prompts: list[str]) -> dict[str, Any]:
    """transformers' greedy `generate` on the same GPU in the bundle's precision: tokens per second, and tokens."""
    import torch

    from xpress_export.exporter.reference import reference_from_checkpoint
    from xpress_export.exporter.target_checkpoint import read_target
    from xpress_export.manifest import read_manifest
    from xpress_export.runtime import Runtime, SamplingParams

    if device != "cpu" and not torch.cuda.is_available():
        raise RuntimeError("torch here has no CUDA")
    manifest = read_manifest(bundle)
    dtype = torch.float16 if manifest.precision == "fp16" else torch.float32
    model: Any = reference_from_checkpoint(read_target(manifest.target.source)).to(device, dtype)
    with Runtime.open(bundle, device=device, layout="split") as runtime:
        same, tokens, seconds = 0, 0, 0.0
        for number, prompt in enumerate([prompts[0], *prompts]):  # the first warms both up
            ids = runtime.encode(prompt)
            given = torch.tensor([ids], device=device)
            started = time.perf_counter()
            out = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=list(runtime.codec.stop_token_ids),
                pad_token_id=runtime.codec.stop_token_ids[0],
            )[0, len(ids) :].tolist()
            spent = time.perf_counter() - started
            ours = runtime.generate(ids, SamplingParams(max_new_tokens=TOKENS)).result().token_ids
            if number:
                same, tokens, seconds = same + (list(ours) == out), tokens + len(out), seconds + spent
    return {"tokens_per_s": tokens / seconds, "identical": same, "prompts": len(prompts)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=420, help="start no part after so long")
    args = parser.parse_args()

    from xpress_export.doctor import examine
    from xpress_export.manifest import read_manifest
    from xpress_export.runtime.bench import PROMPTS

    read_manifest(args.bundle)  # no bundle there: said before anything runs
    report, prompts = Report(args.out, args.seconds), list(PROMPTS[:NUM_PROMPTS])
    report.part("machine", examine)
    for name, where in ways(args.bundle, args.device):
        report.part(f"identity, {name}", lambda where=where: identity(args.bundle, where, prompts))
        trace = args.out.with_name(f"{args.out.stem}.{name.replace(' ', '.')}.trace.json")
        report.part(f"speed, {name}", lambda where=where, trace=trace: speed(args.bundle, where, trace))
    report.part("transformers", lambda: against_transformers(args.bundle, args.device, prompts))
    ran = [name for name, entry in report.found.items() if "not_run" not in entry]
    print(f"{args.out}: {len(ran)} of {len(report.found)} parts ran", file=sys.stderr)
    return 0 if len(ran) == len(report.found) else 1


if __name__ == "__main__":
    sys.exit(main())
