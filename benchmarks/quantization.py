"""What quantizing costs and what it pays: the figures of docs/quantization.md, those with a limit against it.

    python benchmarks/quantization.py quality BUNDLE --calibration F --held-out F     perplexity and tau against fp32
    python benchmarks/quantization.py speed BUNDLE                                    tokens/s of plain decoding
    python benchmarks/quantization.py memory BUNDLE [--qwen]                          peak memory over fp32 weights

BUNDLE is an fp32 bundle; `quality` and `speed` work on a copy of it, each figure against fp32 in the same process.
`memory` runs `calibrate` and `quantize` in processes of their own; with --qwen on random weights of Qwen3-0.6B's shapes
and the tokenizer of BUNDLE.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from xpress_export import names
from xpress_export.calibration.acceptance import load_graphs, measure_acceptance
from xpress_export.calibration.accuracy import compare, make_passages, score
from xpress_export.calibration.calibrate import CalibrateOptions, calibrate, save_scales
from xpress_export.calibration.quantize import QuantizeOptions, quantize
from xpress_export.calibration.runtimes import answer, runtime_of
from xpress_export.calibration.scales import read_scales
from xpress_export.console import ConsoleProgress, make_console
from xpress_export.folders import link_rest
from xpress_export.manifest import Manifest, read_manifest, write_manifest
from xpress_export.platforms import QUANTIZED
from xpress_export.runtime.backend import Graph
from xpress_export.runtime.evaluate import read_prompts

ALPHA = 0.8
LIMITS = {"int8": 5.0, "fp8": 2.0, "int8-weight": 0.5}
MAX_TAU_LOSS = 3.0


def quality(
    bundle: Path, calibration: Path, held_out: Sequence[Path], samples: int, per_file: int, scales: Path | None
) -> bool:
    """Print perplexity and tau of each precision; true if all that have a limit are within it."""
    progress = ConsoleProgress(make_console(stderr=True))
    prompts = [prompt for path in held_out for prompt in read_prompts(path, per_file)]
    passed = True
    with tempfile.TemporaryDirectory(dir=bundle.resolve().parent) as place:
        folder = _copy(bundle, Path(place) / "bundle")
        measured = read_scales(scales) if scales else None
        if measured is None:
            measured = calibrate(folder, CalibrateOptions(prompts=calibration, samples=samples), progress)
        save_scales(folder, measured, None)
        for precision in QUANTIZED:
            alpha = ALPHA if precision == "int8" else None
            manifest = quantize(folder, QuantizeOptions(precision=precision, smoothquant=alpha), progress)
        own = manifest.precision
        print(
            f"calibrated on {measured.dataset.samples} prompts of {calibration.name}; {len(prompts)} held-out prompts"
        )
        graphs = load_graphs(folder, manifest, {})
        with runtime_of(folder, manifest, graphs) as runtime, progress.step("Answers", total=len(prompts)) as advance:
            passages = []
            for passage in make_passages(runtime, prompts, 48):
                passages.append(passage)
                advance(1)
        reference = score(graphs[names.TARGET], manifest, passages)
        base = compare(reference, reference)
        print(f"{'target':<22}{'perplexity':>12}{'above fp32':>22}{'limit':>8}{'greedy match':>15}")
        print(f"{own:<22}{base.perplexity:>12.3f}  ({base.num_text_tokens} tokens of text)")
        runs = [(precision, True) for precision in QUANTIZED]
        runs += [(precision, False) for precision in QUANTIZED if precision.endswith("-weight")]
        for precision, exact in runs:
            graph = _graph(folder, manifest, names.TARGET, precision, exact=exact)
            found = compare(score(graph, manifest, passages), reference)
            limit = LIMITS.get(precision) if exact else None
            passed &= limit is None or 100 * found.ratio <= limit
            change = f"{100 * found.ratio:+.2f}% ± {100 * found.ratio_ci95:.2f}"
            asked = f"{limit}%" if limit else "-"
            label = precision if exact else f"  on CPU, {precision}"
            print(f"{label:<22}{found.perplexity:>12.3f}{change:>22}{asked:>8}{100 * found.match_rate:>14.1f}%")
        pairs = [(own, own), (own, "int8"), (own, "fp8")]
        with progress.step("tau", total=len(pairs) * 2 * len(prompts)) as advance:
            rows = measure_acceptance(folder, manifest, pairs, prompts, 48, advance=advance)
        print(f"\n{'drafter':<14}{'mode':<8}{'tau':>16}{'against fp32':>22}{'limit':>8}{'steps':>8}")
        for row in rows:
            judged = row.drafter != own
            passed &= not judged or -100 * row.change <= MAX_TAU_LOSS
            tau = f"{row.tau:.3f} ± {row.tau_ci95:.3f}"
            change = f"{100 * row.change:+.2f}% ± {100 * row.change_ci95:.2f}"
            asked = f"-{MAX_TAU_LOSS}%" if judged else "-"
            print(f"{row.drafter:<14}{row.mode:<8}{tau:>16}{change:>22}{asked:>8}{row.num_steps:>8}")
    print("\nwithin all limits" if passed else "\nBEYOND A LIMIT")
    return passed


def speed(bundle: Path, num_tokens: int, repeats: int, include: Sequence[str]) -> None:
    """Plain decoding and the fullest mode in each precision, in turns, medians."""
    with tempfile.TemporaryDirectory(dir=bundle.resolve().parent) as place:
        folder = _copy(bundle, Path(place) / "bundle")
        save_scales(folder, calibrate(folder, CalibrateOptions(prompts=None, samples=4, max_new_tokens=16)), None)
        for precision in QUANTIZED:
            alpha = ALPHA if precision == "int8" else None
            wanted = QuantizeOptions(precision=precision, smoothquant=alpha, include=tuple(include))
            manifest = quantize(folder, wanted)
        precisions = [manifest.precision, *QUANTIZED]
        runtimes = {}
        for precision in precisions:
            chosen = {role: precision for role in (names.TARGET, names.DRAFTER) if role in manifest.roles}
            runtimes[precision] = runtime_of(folder, manifest, load_graphs(folder, manifest, chosen))
        modes = (names.MODE_TARGET, runtimes[precisions[0]].modes[-1])
        rates: dict[tuple[str, str], list[float]] = {(p, mode): [] for p in precisions for mode in modes}
        for _ in range(repeats):
            for (precision, mode), found in rates.items():
                stats = answer(runtimes[precision], "Write a story about a lighthouse.", num_tokens, mode).stats
                found.append(1e3 * (stats.num_generated_tokens - 1) / stats.decode_ms)
        print(f"tokens/s, medians of {repeats} runs of {num_tokens} tokens, batch 1, executed on this CPU")
        print(f"{'precision':<14}" + "".join(f"{mode:>12}{'vs fp32':>10}" for mode in modes))
        for precision in precisions:
            cells = ""
            for mode in modes:
                median = statistics.median(rates[precision, mode])
                cells += f"{median:>12.1f}{median / statistics.median(rates[precisions[0], mode]):>9.2f}x"
            print(f"{precision:<14}{cells}")
        for runtime in runtimes.values():
            runtime.close()


PEAK = """
import sys
from xpress_export.cli import cli
try:
    cli.main(sys.argv[1:], standalone_mode=False)
finally:
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(int(status["VmHWM"].split()[0]) * 1024)
"""
"""Not `ru_maxrss`: a process inherits that of the one that started it, and here that one made the random weights."""


def memory(bundle: Path, samples: int, *, qwen: bool) -> None:
    """Peak resident memory of `calibrate` and `quantize`, over the bytes of the weights in float32."""
    with tempfile.TemporaryDirectory(dir=bundle.resolve().parent) as place:
        folder = Path(place) / "bundle"
        if qwen:
            sys.path.insert(0, str(Path(__file__).parent))
            from engines import qwen_shapes, random_bundle

            random_bundle(folder, qwen_shapes(), "fp32", bundle / "tokenizer")
        else:
            _copy(bundle, folder)
        _print_peak(folder, "calibrate", ["--samples", str(samples), "--max-new-tokens", "16", "--allow-dead"])
        for precision in QUANTIZED:
            smooth = ["--smoothquant", str(ALPHA)] if precision == "int8" else []
            _print_peak(folder, "quantize", ["--precision", precision, *smooth])


def _print_peak(folder: Path, command: str, options: Sequence[str]) -> None:
    manifest = read_manifest(folder)
    weights = sum(file.num_bytes for file in manifest.files if file.path in _own_weights(manifest))
    weights *= 1 if manifest.precision == "fp32" else 2  # a float16 bundle has half of them
    started = time.perf_counter()
    words = [sys.executable, "-c", PEAK, command, str(folder), *options]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    peak, seconds = int(done.stdout.splitlines()[-1]), time.perf_counter() - started
    label = f"{command} {options[1] if command == 'quantize' else ''}"
    print(
        f"{label:<24}{peak / 2**20:>8.0f} MiB peak{weights / 2**20:>8.0f} MiB of fp32 weights"
        f"{peak / weights:>7.2f}x{seconds:>7.0f} s",
        flush=True,
    )


def _own_weights(manifest: Manifest) -> set[str]:
    return {path for graph in manifest.graphs.values() for path in graph.data}


def _graph(folder: Path, manifest: Manifest, role: str, precision: str, *, exact: bool) -> Graph:
    record = manifest.graph(role, precision)
    assert record is not None
    return Graph(folder / record.file, role, exact=exact)


def _copy(bundle: Path, folder: Path) -> Path:
    """The bundle without variants and engines, its files shared."""
    manifest = read_manifest(bundle)
    own = {path for graph in (*manifest.graphs.values(), *manifest.decomposed.values()) for path in graph.data}
    made = {variant.precision for variant in manifest.variants}
    cycle = {stem: graph for stem, graph in manifest.cycle.items() if not made & set(stem.split("."))}
    own |= {graph.file for graph in (*manifest.graphs.values(), *manifest.decomposed.values(), *cycle.values())}
    kept = tuple(
        file
        for file in manifest.files
        if file.path in own or file.path.endswith(".npy") or file.path.startswith("tokenizer/")
    )
    bare = replace(manifest, variants=(), cycle=cycle, run_precision=None, engines=(), files=kept)
    folder.mkdir()
    link_rest(bundle, folder, [file.path for file in kept])
    write_manifest(folder, bare)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("quality")
    one.add_argument("bundle", type=Path)
    one.add_argument("--calibration", type=Path, required=True)
    one.add_argument("--held-out", type=Path, nargs="+", required=True)
    one.add_argument("--scales", type=Path, help="of an earlier `calibrate` of this bundle, instead of a new one")
    one.add_argument("--samples", type=int, default=64)
    one.add_argument("--per-file", type=int, default=8)
    two = commands.add_parser("speed")
    two.add_argument("bundle", type=Path)
    two.add_argument("--tokens", type=int, default=64)
    two.add_argument("--repeats", type=int, default=5)
    two.add_argument("--include", nargs="*", default=())
    three = commands.add_parser("memory")
    three.add_argument("bundle", type=Path)
    three.add_argument("--qwen", action="store_true")
    three.add_argument("--samples", type=int, default=8)
    asked = parser.parse_args()
    if asked.command == "quality":
        sys.exit(
            not quality(asked.bundle, asked.calibration, asked.held_out, asked.samples, asked.per_file, asked.scales)
        )
    elif asked.command == "speed":
        speed(asked.bundle, asked.tokens, asked.repeats, asked.include)
    else:
        memory(asked.bundle, asked.samples, qwen=asked.qwen)


if __name__ == "__main__":
    main()
