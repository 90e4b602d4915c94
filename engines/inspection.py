"""What is in an engine: asked of TensorRT's own inspector where a GPU can load the plan, else of its build report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xpress_export.engines import libraries
from xpress_export.errors import EngineBuildError, XpressExportError
from xpress_export.gpu import Gpu, find_gpu
from xpress_export.load_check import Running, check_loadable
from xpress_export.manifest import EngineRecord, Manifest

_MATMUL_KINDS = ("gemm", "matmul", "matrix_multiply", "matrixmultiply")
_ATTENTION_KINDS = ("mha", "attention", "fmha")


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """An inspector's view. kinds: layers by kind; types: data types of the outputs of matrix products."""

    num_layers: int
    kinds: Mapping[str, int]
    num_attention: int
    num_reformats: int
    matmul_types: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """source: where it was learned. report: the build report. layers, device_memory_bytes: the inspector's, or None."""

    record: EngineRecord
    source: str
    report: Mapping[str, Any]
    layers: LayerFacts | None = None
    device_memory_bytes: int | None = None


def find_engine(manifest: Manifest, role: str, platform: str | None) -> EngineRecord:
    """The engine of a role, and of a platform where the bundle has engines for several."""
    found = [e for e in manifest.engines if e.role == role and platform in {None, e.platform}]
    if not found:
        have = ", ".join(sorted({f"{e.role} for {e.platform}" for e in manifest.engines})) or "none"
        raise EngineBuildError(
            f"the bundle has no {role} engine{f' for {platform}' if platform else ''}; it has {have}"
        )
    if len({e.platform for e in found}) > 1:
        raise EngineBuildError(
            f"the bundle has {role} engines for {', '.join(e.platform for e in found)}; name one with --platform"
        )
    return found[0]


def inspect_engine(bundle: Path, manifest: Manifest, record: EngineRecord) -> Inspection:
    """Everything that can be told of an engine on this machine."""
    report = json.loads((bundle / record.report).read_text("utf-8"))
    gpu = find_gpu()
    if gpu is None:
        return Inspection(record=record, source="the build report: no GPU here can load the plan", report=report)
    try:
        return _loaded(bundle, manifest, record, report, gpu)
    except XpressExportError as err:
        return Inspection(record=record, source=f"the build report: {err}", report=report)


def _loaded(bundle: Path, manifest: Manifest, record: EngineRecord, report: Mapping[str, Any], gpu: Gpu) -> Inspection:
    library = libraries.load(record.backend)
    check_loadable(record, Running(library.backend, library.version, gpu), bundle, manifest)
    trt = library.trt
    engine = trt.Runtime(trt.Logger(trt.Logger.ERROR)).deserialize_cuda_engine((bundle / record.file).read_bytes())
    if engine is None:
        raise EngineBuildError(f"{library.title} cannot load {record.file}")
    text = engine.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON)
    return Inspection(
        record=record,
        source=f"the inspector of {library.title} on {gpu.name}",
        report=report,
        layers=summarise(json.loads(text)),
        device_memory_bytes=int(engine.device_memory_size_v2),
    )


def summarise(information: Mapping[str, Any]) -> LayerFacts:
    """Count what an inspector's JSON lists; layers are objects where the engine was built with detailed profiling.

    TensorRT 10 names a tensor's type `Format/Datatype`, TensorRT 11 `DataType`.
    """
    layers = [layer for layer in information.get("Layers", ()) if isinstance(layer, dict)]
    kinds = Counter(_kind(layer) for layer in layers)
    matmuls = [layer for layer in layers if any(word in _words(layer) for word in _MATMUL_KINDS)]
    return LayerFacts(
        num_layers=len(information.get("Layers", ())),
        kinds=dict(sorted(kinds.items())),
        num_attention=sum(any(word in _words(layer) for word in _ATTENTION_KINDS) for layer in layers),
        num_reformats=sum("reformat" in _words(layer) for layer in layers),
        matmul_types=dict(Counter(_output_type(layer) for layer in matmuls)),
    )


def _kind(layer: Mapping[str, Any]) -> str:
    return str(layer.get("LayerType", layer.get("Type", "unknown")))


def _words(layer: Mapping[str, Any]) -> str:
    return " ".join(str(layer.get(key, "")) for key in ("LayerType", "Type", "Name", "TacticName")).lower()


def _output_type(layer: Mapping[str, Any]) -> str:
    outputs = layer.get("Outputs") or [{}]
    first = outputs[0] if isinstance(outputs[0], dict) else {}
    text = str(first.get("DataType") or first.get("Format/Datatype") or "unknown").lower()
    known = {"fp8": "fp8", "int8": "int8", "half": "fp16", "fp16": "fp16", "bf16": "bf16", "float": "fp32"}
    return next((name for word, name in known.items() if word in text), text)
