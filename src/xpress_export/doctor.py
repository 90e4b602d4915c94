"""What this machine can build and run, and the command that adds what is missing. Imports nothing heavy."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from xpress_export.errors import MissingDependencyError
from xpress_export.gpu import Gpu, find_gpu

CAPABILITIES = {
    "run bundles on CPU": ("cpu", ("onnxruntime", "tokenizers", "numpy")),
    "export checkpoints": (
        "export",
        ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "safetensors", "gguf"),
    ),
    "run bundles on a GPU, with ONNX Runtime": ("gpu", ("onnxruntime-gpu", "cuda-bindings")),
    "run TensorRT engines on a GPU": ("tensorrt", ("tensorrt", "cuda-bindings")),
    "build TensorRT-RTX engines": ("rtx", ("tensorrt-rtx",)),
    "serve bundles over HTTP": ("serve", ("fastapi", "uvicorn", "prometheus-client")),
}
PACKAGES = (
    *("onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "torch", "transformers", "onnx", "onnxscript"),
    *("onnx-ir", "safetensors", "gguf", "tokenizers", "huggingface-hub", "numpy", "click", "rich"),
)


@dataclass(frozen=True)
class Capability:
    """name: what it lets you do. missing: packages not installed; fix: the command that adds them, or None."""

    name: str
    available: bool
    missing: tuple[str, ...]
    fix: str | None


def examine() -> dict[str, Any]:
    """Everything `doctor` reports, JSON-ready."""
    versions = {name: version for name in PACKAGES if (version := _version(name))}
    return {
        "xpress_export": _version("xpress-export"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory("MemTotal"),
        "memory_available_bytes": _memory("MemAvailable"),
        "disk_free_bytes": shutil.disk_usage(Path.cwd()).free,
        "packages": versions,
        "onnxruntime_providers": _providers(),
        "gpus": [asdict(gpu) for gpu in _gpus()],
        "capabilities": [asdict(_capability(name, *need)) for name, need in CAPABILITIES.items()],
    }


def missing_dependency(error: ModuleNotFoundError) -> MissingDependencyError | None:
    """What to say of a failed import, if an extra provides what is missing."""
    module = (error.name or "").partition(".")[0]
    for purpose, (extra, packages) in CAPABILITIES.items():
        for package in packages:
            if package.replace("-", "_") == module:
                missing = MissingDependencyError(package, purpose, extra)
                missing.__cause__ = error
                return missing
    return None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _capability(name: str, extra: str, packages: tuple[str, ...]) -> Capability:
    missing = tuple(p for p in packages if _version(p) is None and not _stands_in(p))
    fix = f"pip install 'xpress-export[{extra}]'" if missing else None
    return Capability(name, not missing, missing, fix)


def _stands_in(package: str) -> bool:
    return package == "onnxruntime" and _version("onnxruntime-gpu") is not None


def _memory(key: str) -> int | None:
    """A line of /proc/meminfo in bytes; None where there is no such file."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def _providers() -> list[str]:
    try:
        import onnxruntime
    except ImportError:  # not installed, or without a library that it needs
        return []

    return list(onnxruntime.get_available_providers())


def _gpus() -> list[Gpu]:
    """The GPUs that the NVIDIA driver knows, Jetson's integrated one among them."""
    found: list[Gpu] = []
    while (gpu := find_gpu(len(found))) is not None:
        found.append(gpu)
    return found
