"""Engine builds: the whole matrix of platforms and precisions, and what `compile` costs over the bare library.

    python benchmarks/engines.py matrix BUNDLE...            every bundle for every platform it can be built for here
    python benchmarks/engines.py overhead [--work DIR]       Qwen3-0.6B shapes: `compile` against direct calls

BUNDLE is a float16 bundle (`build --precision fp16`), with variants of `quantize`. Everything here is compiled by
TensorRT-RTX without a GPU and nothing is executed. Times are those of the machine that prints them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpress_export import names
from xpress_export.engines.compile import compile_bundle
from xpress_export.engines.onnx_file import write_with_sizes
from xpress_export.engines.options import CompileOptions
from xpress_export.engines.plan import plan_bundle
from xpress_export.manifest import read_manifest
from xpress_export.platforms import PLATFORMS as PLATFORM_TABLE

if TYPE_CHECKING:
    from xpress_export.exporter.configs import DecoderConfig, DrafterConfig, RefinerConfig

    Shapes = tuple[DecoderConfig, DrafterConfig, RefinerConfig]

PLATFORMS = {75: "t4", 80: "a100", 86: "a10", 89: "l4", 120: "rtx-5090", 121: "dgx-spark"}
MAX_CONTEXT = 2016  # with room for two verify steps of up to 16 tokens: 2048 rows of cache


def matrix(bundles: Sequence[Path], sms: Sequence[int]) -> None:
    """Compile every bundle in every precision it has for every platform; print a row for each engine."""
    print(f"{'precision':<13}{'sm':<6}{'graph':<10}{'seconds':>8}{'peak MB':>9}{'plan MB':>9}  matmul FLOPs")
    for bundle in bundles:
        manifest = read_manifest(bundle)
        context = min(MAX_CONTEXT, manifest.max_context)
        for precision in dict.fromkeys((manifest.precision, *(variant.precision for variant in manifest.variants))):
            roles = tuple(r for r in (*manifest.roles, names.ACCEPT) if precision in manifest.precisions(r))
            layouts = {names.LAYOUT_SPLIT: roles}
            if names.STEP in manifest.cycle and precision in manifest.precisions(names.STEP):
                layouts[names.LAYOUT_FUSED] = (names.STEP,)
            for sm in sms:
                hardware = PLATFORM_TABLE[PLATFORMS[sm]].precisions
                if precision.removesuffix("-weight") not in hardware:
                    continue
                for layout, chosen in layouts.items():
                    asked = CompileOptions(
                        platform=PLATFORMS[sm], precision=precision, layout=layout, roles=chosen, max_context=context
                    )
                    for built in compile_bundle(bundle, asked).engines:
                        _print_row(precision, sm, built.report)


def _print_row(precision: str, sm: int, report: dict[str, Any]) -> None:
    seconds, peak = sum(report["seconds"].values()), report["peak_memory_bytes"] / 1e6
    shares = ", ".join(f"{share:.0%} {name}" for name, share in report["matmul_share"].items())
    size = report["plan"]["num_bytes"] / 1e6
    print(f"{precision:<13}{sm:<6}{report['role']:<10}{seconds:>8.1f}{peak:>9.0f}{size:>9.1f}  {shares}", flush=True)


DIRECT = """
import json, os, resource, sys, time
started = time.perf_counter()
import tensorrt_rtx as trt
graph, plan, sm, profiles = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
log = trt.Logger(trt.Logger.ERROR)
builder = trt.Builder(log)
network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
assert trt.OnnxParser(network, log).parse_from_file(graph)
config = builder.create_builder_config()
config.num_compute_capabilities = 1
config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), 0)
config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
for shapes in profiles:
    profile = builder.create_optimization_profile()
    for name, three in shapes.items():
        profile.set_shape(name, *map(tuple, three))
    config.add_optimization_profile(profile)
built = builder.build_serialized_network(network, config)
with open(plan, "wb") as out:
    out.write(memoryview(built))
    out.flush()
    os.fsync(out.fileno())
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": time.perf_counter() - started, "peak": peak}))
"""


def overhead(work: Path, sms: Sequence[int], repeats: int) -> None:
    """Build the target both ways, in turns, and print the best of each and their ratio; then the rest of the trio."""
    bundle = work / "qwen3-0.6b-shapes"
    if not bundle.exists():
        started = time.perf_counter()
        random_bundle(bundle, qwen_shapes())
        print(f"random bundle: {read_manifest(bundle).num_bytes / 1e9:.2f} GB in {time.perf_counter() - started:.0f} s")
    for sm in sms:
        runs: dict[str, list[tuple[float, float]]] = {"direct": [], "compile": []}
        for _ in range(repeats):
            runs["direct"].append(_direct(bundle, work, sm))
            runs["compile"].append(_compiled(bundle, work, sm))
        best = {how: tuple(min(values) for values in zip(*found, strict=True)) for how, found in runs.items()}
        for how, (seconds, peak) in best.items():
            print(f"sm_{sm} target, {how:<8}{seconds:>7.1f} s {peak / 2**30:>6.2f} GiB peak", flush=True)
        ratio = [compiled / direct for compiled, direct in zip(best["compile"], best["direct"], strict=True)]
        print(f"sm_{sm} target, ratio   {ratio[0]:>7.3f}   {ratio[1]:>6.3f}", flush=True)
        made = compile_bundle(bundle, _options(sm, (names.DRAFTER, names.REFINER)))
        for built in made.engines:
            _print_row("fp16", sm, built.report)


def _options(sm: int, roles: tuple[str, ...], **changes: Any) -> CompileOptions:
    return CompileOptions(platform=PLATFORMS[sm], max_context=MAX_CONTEXT, roles=roles, **changes)


def _direct(bundle: Path, work: Path, sm: int) -> tuple[float, float]:
    """The bare library on the same graph and profiles, in a process of its own."""
    plan = plan_bundle(bundle, read_manifest(bundle), _options(sm, (names.TARGET,)), None)
    job = plan.job(plan.engines[0], work, work / "direct.plan")
    graph = write_with_sizes(job.graph, job.static, work)
    started = time.perf_counter()
    command = [
        sys.executable,
        "-c",
        DIRECT,
        str(graph),
        str(job.plan),
        str(sm),
        json.dumps(list(job.profiles.values())),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    job.plan.unlink()
    return seconds, json.loads(done.stdout.splitlines()[-1])["peak"]


def _compiled(bundle: Path, work: Path, sm: int) -> tuple[float, float]:
    """`compile` from its start to the written manifest: files checked, plan hashed, cached and committed.

    Both ways end with the plan on the disk, not only in the page cache.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=work) as cache:
        made = compile_bundle(bundle, _options(sm, (names.TARGET,), cache_dir=Path(cache)))
        seconds = time.perf_counter() - started
    return seconds, made.engines[0].report["peak_memory_bytes"]


def qwen_shapes() -> Shapes:
    """Those of Qwen3-0.6B, a drafter of five of its layers with blocks of 16, and an xPress refiner of rank 256."""
    from xpress_export.exporter.configs import DecoderConfig, DrafterConfig, RefinerConfig, RopeConfig

    target = DecoderConfig(
        family="qwen3",
        hidden_size=1024,
        intermediate_size=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151_936,
        rms_norm_eps=1e-6,
        rope=RopeConfig(inv_freq=tuple(1e6 ** (-i / 64) for i in range(64))),
        max_positions=40_960,
        tied_head=True,
        qk_norm=True,
    )
    drafter = DrafterConfig(
        decoder=dataclasses.replace(target, num_layers=5, layer_windows=()),
        block_size=16,
        mask_token_id=151_669,
        target_layer_ids=(1, 7, 13, 19, 25),
        target_hidden_size=target.hidden_size,
        first_slot=1,
        causal_layers=(False,) * 5,
        num_target_layers=target.num_layers,
    )
    refiner = RefinerConfig(
        kind="xpress",
        rank=256,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=target.vocab_size,
        block_size=drafter.block_size,
        num_passes=4,
        mlp_hidden=512,
    )
    return target, drafter, refiner


def random_bundle(out: Path, shapes: Shapes, precision: str = "fp16", tokenizer: Path | None = None) -> None:
    """A trio of these shapes with random weights and one embedding for all, traced by the exporter.

    Its models are checked against nothing. tokenizer: a bundle's tokenizer folder to copy, for a trio that is to
    generate; its vocabulary may be smaller.
    """
    import torch

    from xpress_export.exporter.cycle import write_cycle
    from xpress_export.exporter.export import DTYPES
    from xpress_export.exporter.graph_files import save_graph
    from xpress_export.exporter.graphs import trace_drafter, trace_refiner, trace_target
    from xpress_export.exporter.trace import Source, WeightFile, attach
    from xpress_export.progress import Silent

    target, drafter, refiner = shapes
    dtype = DTYPES[precision]
    traced: dict[str, Callable[[], Any]] = {
        names.TARGET: lambda: trace_target(target, drafter.target_layer_ids, dtype),
        names.DRAFTER: lambda: trace_drafter(drafter, dtype, for_refiner=True),
        names.REFINER: lambda: trace_refiner(refiner, drafter.first_slot, dtype),
    }
    folder = out / "graphs"
    folder.mkdir(parents=True)
    weights, graphs = WeightFile(folder, dtype), {}
    for role, trace in traced.items():
        model = trace()
        sizes = {name: tuple(value.shape) for name, value in model.graph.initializers.items()}

        def source(name: str, role: str = role, sizes: dict[str, Any] = sizes) -> Source:
            shared = {"lm_head.weight", "embed_tokens.weight", "model.embed_tokens.weight"}
            identity = "embedding" if name in shared else f"{role} {name}"
            return identity, lambda: torch.randn(sizes[name]) * 0.02

        attach(model, weights, f"{role}.data", source)
        graphs[role] = save_graph(model, folder, role)
    cycle, _ = write_cycle(out, graphs, {}, None, precision, Silent())
    (out / "tokenizer").mkdir()
    for name in ("tokenizer.json", "text.json"):
        (out / "tokenizer" / name).write_bytes(b"{}" if tokenizer is None else (tokenizer / name).read_bytes())
    _write_manifest(out, shapes, graphs, cycle, precision)


def _write_manifest(out: Path, shapes: Shapes, graphs: dict[str, Any], cycle: dict[str, Any], precision: str) -> None:
    from xpress_export import manifest as m

    target, drafter, refiner = shapes
    keys = ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")

    def record(decoder: DecoderConfig) -> m.ModelRecord:
        sizes = {key: getattr(decoder, key) for key in keys}
        return m.ModelRecord(source="random", digest="0" * 64, family=decoder.family, num_parameters=1, **sizes)

    made = m.Manifest(
        tool={"xpress-export": "0"},
        platform="cpu",
        precision=precision,
        lowering="native",
        opset=24,
        max_context=min(MAX_CONTEXT, target.max_positions),
        preset=None,
        target=record(target),
        drafter=record(drafter.decoder),
        refiner=m.RefinerRecord(
            source="random", digest="0" * 64, kind=refiner.kind, rank=refiner.rank, num_parameters=1
        ),
        draft=m.DraftRecord(
            block_size=drafter.block_size,
            mask_token_id=drafter.mask_token_id,
            target_layer_ids=drafter.target_layer_ids,
            first_slot=drafter.first_slot,
            num_draft_tokens=drafter.num_draft_tokens,
            draft_vocab_size=target.vocab_size,
            vocab_file=None,
            refine_passes=refiner.num_passes,
            trained=False,
        ),
        text=m.TextRecord(
            folder="tokenizer",
            fingerprint="0" * 64,
            stop_token_ids=(),
            drafter_tokenizer="absent",
            refiner_tokenizer="absent",
        ),
        graphs=graphs,
        cycle=cycle,
        parity=(),
        files=m.record_files(out),
    )
    m.write_manifest(out, made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("matrix")
    one.add_argument("bundles", nargs="+", type=Path)
    two = commands.add_parser("overhead")
    two.add_argument("--work", type=Path, default=None)
    two.add_argument("--repeats", type=int, default=2)
    for command, sms in ((one, list(PLATFORMS)), (two, [89, 120])):
        command.add_argument("--sm", type=int, nargs="+", default=sms)
    asked = parser.parse_args()
    if asked.command == "matrix":
        matrix(asked.bundles, asked.sm)
        return
    with tempfile.TemporaryDirectory() as folder:
        work = asked.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        overhead(work, asked.sm, asked.repeats)


if __name__ == "__main__":
    main()
