"""From a bundle and options to build jobs: every check that needs no TensorRT build happens here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xpress_export import names, platforms
from xpress_export.engines import libraries, memory
from xpress_export.engines.cache import Cache, cache_key
from xpress_export.engines.job import BuildJob
from xpress_export.engines.libraries import Library
from xpress_export.engines.onnx_file import Operators, read_operators
from xpress_export.engines.operators import check_operators
from xpress_export.engines.options import MIB, CompileOptions
from xpress_export.engines.profiles import Sizes, derive_profiles, input_shapes
from xpress_export.errors import EngineBuildError
from xpress_export.gpu import Gpu
from xpress_export.manifest import GraphRecord, Manifest, ProfileRecord
from xpress_export.platforms import Platform
from xpress_export.precision import choose_precisions, step_precision
from xpress_export.records import graph_stem

_SHOWS = (names.TARGET, names.DRAFTER, names.STEP)
"""Roles whose engines compute in the precision they are built in; the refiner stays in that of the bundle."""


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """One engine to be built. precision: what its graph is in. weight_bytes: of the files its graph refers to."""

    role: str
    precision: str
    graph: GraphRecord
    operators: Operators
    profiles: tuple[ProfileRecord, ...]
    weight_bytes: int
    key: str
    name: str

    @property
    def expected_s(self) -> float:
        """About how long TensorRT-RTX takes on two cores: it goes with the matrix products of each profile."""
        return 0.5 + 0.05 * self.operators.counts.get("MatMul", 0) * len(self.profiles)


@dataclass(frozen=True, kw_only=True)
class BundlePlan:
    """What `compile` is going to do with one bundle.

    base: precision of its own graphs. layout: which engines there are. reason: why this lowering.
    """

    folder: Path
    options: CompileOptions
    platform: Platform
    library: Library
    gpu: Gpu | None
    sm: int
    base: str
    layout: str
    lowering: str
    reason: str
    sizes: Sizes
    engines: tuple[EnginePlan, ...]
    cache: Cache | None

    def job(self, engine: EnginePlan, work: Path, plan: Path) -> BuildJob:
        o, static = self.options, self.sizes.static
        mib = [value * MIB if value is not None else None for value in (o.workspace_mb, o.tactic_mb)]
        return BuildJob(
            role=engine.role,
            backend=self.library.backend,
            sm=self.sm,
            precision=engine.precision,
            graph=self.folder / engine.graph.file,
            static=static,
            profiles={p.name: input_shapes(engine.graph, p, static) for p in engine.profiles},
            work=work,
            plan=plan,
            workspace_bytes=mib[0],
            tactic_bytes=mib[1],
            opt_level=o.opt_level,
            hardware_compat=o.hardware_compat,
            version_compatible=o.version_compatible,
            timing_cache=self._timing_cache(),
            unfused_attention=self.base == "fp32",
            must_show=engine.role in _SHOWS or "QuantizeLinear" in engine.operators.counts,
        )

    def _timing_cache(self) -> Path | None:
        if not self.library.has_timing_cache:
            return None
        kept = self.cache.timing_cache(self.library.version, self.sm) if self.cache else None
        return self.options.timing_cache or kept


def plan_bundle(folder: Path, manifest: Manifest, options: CompileOptions, gpu: Gpu | None) -> BundlePlan:
    """Decide what to build and refuse what cannot be: the platform, the precision, the operators, the sizes."""
    asked = options.precision
    for precision in asked.values() if isinstance(asked, Mapping) else filter(None, (asked,)):
        platforms.require(options.platform, precision)
    precisions = choose_precisions(manifest, asked)
    platform = platforms.require(options.platform, manifest.precision)
    for precision in precisions.values():
        platforms.require(options.platform, precision)
    library = libraries.choose(platform, options.backend, gpu)
    library.check_portability(options.hardware_compat, options.version_compatible, options.timing_cache is not None)
    lowering, reason = _lowering(library, options)
    layout = _layout(manifest, options)
    if layout == names.LAYOUT_FUSED:
        precisions = {names.STEP: step_precision(manifest, precisions)}
    else:
        precisions[names.ACCEPT] = manifest.precision
    graphs = _graphs(manifest, precisions, lowering, reason)
    sizes = _sizes(manifest, options)
    assert platform.sm is not None
    cache = Cache(options.cache_dir, options.cache_bytes) if options.cache_dir is not None else None
    shared = _shared_facts(library, gpu, platform.sm, options)
    engines = tuple(
        _plan_engine(folder, manifest, role, precisions[role], graph, sizes, shared, options)
        for role, graph in graphs.items()
        if not options.roles or role in options.roles
    )
    for engine in engines:
        check_operators(engine.operators, library.backend, library.version, engine.graph.file)
    return BundlePlan(
        folder=folder,
        options=options,
        platform=platform,
        library=library,
        gpu=gpu if not library.target_sms else None,
        sm=platform.sm,
        base=manifest.precision,
        layout=layout,
        lowering=lowering,
        reason=reason,
        sizes=sizes,
        engines=engines,
        cache=cache,
    )


def check_memory(plan: BundlePlan, missing: list[EnginePlan]) -> None:
    """Refuse builds that are estimated not to fit, the largest first."""
    if plan.options.check_memory and missing:
        largest = max(missing, key=lambda engine: engine.weight_bytes)
        num_jobs = min(plan.options.num_jobs, len(missing))
        memory.require_memory(largest.role, plan.library.backend, largest.weight_bytes, num_jobs)


def _lowering(library: Library, options: CompileOptions) -> tuple[str, str]:
    if options.lowering is not None:
        return options.lowering, "it was asked for"
    return platforms.lowering_for(library.backend, library.version)


def _layout(manifest: Manifest, options: CompileOptions) -> str:
    """The layout to compile; refuses one that the bundle has no step for, and roles of the other one."""
    layout = options.layout or manifest.layout
    if layout == names.LAYOUT_FUSED and names.STEP not in manifest.cycle:
        raise EngineBuildError(
            f"this bundle has no fused step; build it again with `xpress-export build --layout {layout}`"
        )
    known = (names.STEP,) if layout == names.LAYOUT_FUSED else (*manifest.roles, names.ACCEPT)
    for role in options.roles:
        if role not in known:
            raise EngineBuildError(f"--role {role}: the engines of the {layout} layout are {', '.join(known)}")
    return layout


def _graphs(manifest: Manifest, precisions: Mapping[str, str], lowering: str, reason: str) -> Mapping[str, GraphRecord]:
    decomposed = lowering != platforms.NATIVE
    found = {role: manifest.graph(role, chosen, decomposed=decomposed) for role, chosen in precisions.items()}
    if not all(found.values()):
        raise EngineBuildError(
            f"decomposed graphs are needed ({reason}), and this bundle was exported without; "
            f"build it again with this version of xpress-export, for --platform jetson-orin for example"
        )
    return {role: record for role, record in found.items() if record is not None}


def _sizes(manifest: Manifest, options: CompileOptions) -> Sizes:
    context = options.max_context or manifest.max_context
    if context > manifest.max_context:
        raise EngineBuildError(
            f"--max-context {context} is more than the {manifest.max_context} tokens the bundle was exported for"
        )
    own = manifest.draft.block_size if manifest.draft else 1
    block = options.block or own
    if manifest.draft and block > own:
        raise EngineBuildError(f"--block {block} is more than the {own} slots the drafter was trained for")
    if block > context:
        raise EngineBuildError(f"--max-context {context} is less than one block of {block} tokens")
    first_slot = manifest.draft.first_slot if manifest.draft else 1
    return Sizes(
        max_context=context, max_batch=options.max_batch, chunk=options.chunk, block=block, first_slot=first_slot
    )


def _shared_facts(library: Library, gpu: Gpu | None, sm: int, options: CompileOptions) -> dict[str, Any]:
    """What all engines of a bundle's platform have in their cache key."""
    return {
        "backend": library.backend,
        "version": library.version,
        "sm": sm,
        "driver": gpu.driver if gpu is not None and not library.target_sms else None,
        "hardware_compat": options.hardware_compat,
        "version_compatible": options.version_compatible,
        "workspace_mb": options.workspace_mb,
        "tactic_mb": options.tactic_mb,
        "opt_level": options.opt_level,
    }


def _plan_engine(
    folder: Path,
    manifest: Manifest,
    role: str,
    precision: str,
    graph: GraphRecord,
    sizes: Sizes,
    shared: Mapping[str, Any],
    options: CompileOptions,
) -> EnginePlan:
    files = {file.path: file for file in manifest.files}
    profiles = derive_profiles(role, graph, sizes)
    key = cache_key(
        {
            **shared,
            "precision": precision,
            "graph": files[graph.file].sha256,
            "weights": [files[path].sha256 for path in graph.data],
            "static": sizes.static,
            "profiles": [[p.name, {name: list(size) for name, size in p.sizes.items()}] for p in profiles],
        }
    )
    return EnginePlan(
        role=role,
        precision=precision,
        graph=graph,
        operators=read_operators(folder / graph.file),
        profiles=profiles,
        weight_bytes=_weight_bytes(manifest, role, precision, graph),
        key=key,
        name=f"{role}.{options.platform}.{precision}",
    )


def _weight_bytes(manifest: Manifest, role: str, precision: str, graph: GraphRecord) -> int:
    """Bytes of the weight files a graph uses. Of another graph's file it reads embedding and head at most."""
    files = {file.path: file.num_bytes for file in manifest.files}
    size = 4 if manifest.precision == "fp32" else 2
    borrowed = 2 * manifest.target.vocab_size * manifest.target.hidden_size * size
    models = manifest.roles if role == names.STEP else (role,)
    variants = {(v.role, v.precision) for v in manifest.variants}
    stems = {graph_stem(model, precision if (model, precision) in variants else None) for model in models}
    own = [path for path in graph.data if Path(path).stem in stems]
    others = sum(files[path] for path in graph.data if path not in own)
    return sum(files[path] for path in own) + min(others, borrowed)
