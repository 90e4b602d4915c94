"""TensorRT and TensorRT-RTX: finding them, and the one place that knows how their versions differ.

    what                        tensorrt 10.3 - 11.4                      tensorrt_rtx
    builds for                  the GPU in the machine                    the architectures it is told, without a GPU
    timing cache                one per version and architecture          none: it times nothing
    hardware compatibility      AMPERE_PLUS; SAME_COMPUTE_CAPABILITY      none: name the architecture
                                since 10.9
    version compatible plans    within a major version                    none
    plans as a stream           since 10.13; before it whole, in memory   the same
    attention without a fused   since 10.14 `IAttention.decomposable`,    the same
      kernel                    before it nothing is fused by contract
    matrices in float32         everywhere                                not on Turing (sm_75)

Everything else that is called exists, under one name, in all of them: strongly typed networks, `parse_from_file`,
memory pools, optimization levels, the progress monitor, the inspector. Nothing that 11.0 removed is called.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from xpress_export import platforms
from xpress_export.engines.plan_file import PlanFile
from xpress_export.errors import EngineBuildError, MissingDependencyError, PlatformError
from xpress_export.gpu import Gpu
from xpress_export.platforms import Platform

_MODULES = {platforms.TENSORRT: "tensorrt", platforms.TENSORRT_RTX: "tensorrt_rtx"}
_LEVELS = {"ampere-plus": "AMPERE_PLUS", "same-cc": "SAME_COMPUTE_CAPABILITY"}


@dataclass(frozen=True)
class Library:
    """An imported TensorRT. trt: its module; every call to TensorRT goes through one of these."""

    backend: str
    trt: Any

    @property
    def version(self) -> str:
        return str(self.trt.__version__)

    @property
    def is_rtx(self) -> bool:
        return self.backend == platforms.TENSORRT_RTX

    @property
    def title(self) -> str:
        return f"{'TensorRT-RTX' if self.is_rtx else 'TensorRT'} {self.version}"

    @property
    def target_sms(self) -> tuple[int, ...]:
        """Architectures it can be told to build for; empty where it builds for the GPU at hand."""
        found = getattr(self.trt, "ComputeCapability", None)
        names = [name for name in dir(found) if name.startswith("SM") and name[2:].isdigit()] if found else []
        return tuple(sorted(int(name[2:]) for name in names))

    @property
    def has_timing_cache(self) -> bool:
        return not self.is_rtx

    def lacks_float32_matmul(self, sm: int) -> bool:
        return self.is_rtx and sm < 80

    def new_network(self, builder: Any) -> Any:
        """A strongly typed network: the types in the graph are the types computed in, on every version."""
        return builder.create_network(1 << int(self.trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))

    def aim(self, config: Any, sm: int) -> None:
        """Build for compute capability `sm`."""
        if self.target_sms:
            config.num_compute_capabilities = 1
            config.set_compute_capability(getattr(self.trt.ComputeCapability, f"SM{sm}"), 0)

    def set_portability(self, config: Any, hardware_compat: str, version_compatible: bool) -> None:
        if hardware_compat != "none":
            level = getattr(self.trt.HardwareCompatibilityLevel, _LEVELS[hardware_compat])
            config.hardware_compatibility_level = level
        if version_compatible:
            config.set_flag(self.trt.BuilderFlag.VERSION_COMPATIBLE)

    def allow_unfused_attention(self, layers: list[Any]) -> int:
        """Let attention without a fused kernel run as separate steps; returns how many are allowed to."""
        if not hasattr(self.trt, "IAttentionInputLayer"):
            return 0
        found = [layer for layer in layers if layer.type == self.trt.LayerType.ATTENTION_INPUT]
        for layer in found:
            layer.__class__ = self.trt.IAttentionInputLayer  # layers of a parsed network arrive as their base class
            layer.attention.decomposable = True
        return len(found)

    def build(self, builder: Any, network: Any, config: Any, plan: PlanFile) -> bool:
        """Build into `plan`, piece by piece where the version can: the plan is then never in memory as a whole."""
        if not hasattr(self.trt, "IStreamWriter"):
            data = builder.build_serialized_network(network, config)
            if data is not None:
                plan.write_all(data)
            return data is not None
        base = self.trt.IStreamWriter
        failed: list[OSError] = []

        class Writer(base):  # type: ignore[misc, valid-type]
            def __init__(self) -> None:
                base.__init__(self)

            def write(self, data: Any) -> int:
                try:
                    return plan.write(data)
                except OSError as err:  # a C++ caller cannot pass it on: it sees a short write and gives up
                    failed.append(err)
                    return 0

        done = bool(builder.build_serialized_network_to_stream(network, config, Writer()))
        if failed:
            raise failed[0]
        return done

    def check_portability(self, hardware_compat: str, version_compatible: bool, timing_cache: bool) -> None:
        """Refuse what this library cannot do, before any work."""
        asked = {
            "--hardware-compat": hardware_compat != "none",
            "--version-compatible": version_compatible,
            "--timing-cache": timing_cache,
        }
        refused = [option for option, is_asked in asked.items() if is_asked]
        if self.is_rtx and refused:
            raise PlatformError(
                f"{self.title} has no {' and no '.join(refused)}: it builds for the architecture it is told and "
                f"times nothing; leave the option out, or use --backend tensorrt on the device"
            )
        level = _LEVELS.get(hardware_compat)
        if level is not None and not hasattr(self.trt.HardwareCompatibilityLevel, level):
            raise PlatformError(f"{self.title} does not know hardware compatibility {hardware_compat}")


def load(backend: str) -> Library:
    """Import a TensorRT, or say how to install it."""
    try:
        return Library(backend, importlib.import_module(_MODULES[backend]))
    except ImportError as err:
        how = "rtx" if backend == platforms.TENSORRT_RTX else "tensorrt"
        raise MissingDependencyError(_MODULES[backend], "build TensorRT engines", how) from err


def is_installed(backend: str) -> bool:
    module = _MODULES[backend]
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # a module put into sys.modules by hand has no spec
        return True


def choose(platform: Platform, backend: str | None, gpu: Gpu | None) -> Library:
    """The TensorRT that builds for `platform` on this machine, or a refusal that says where to build instead.

    backend: None prefers TensorRT where it is installed with a GPU, and TensorRT-RTX elsewhere.
    """
    if platform.sm is None:
        raise PlatformError(f"platform {platform.name} runs on ONNX Runtime: its bundle needs no engines")
    if backend is None:
        has_tensorrt = is_installed(platforms.TENSORRT) and (gpu is not None or not is_installed("tensorrt-rtx"))
        backend = platforms.TENSORRT if has_tensorrt else platforms.TENSORRT_RTX
    library = load(backend)
    if library.target_sms and platform.sm not in library.target_sms:
        known = ", ".join(f"sm_{sm}" for sm in library.target_sms)
        raise PlatformError(
            f"{library.title} builds for {known}, but {platform.name} is sm_{platform.sm}; run the same command on "
            f"the device, where TensorRT is installed (--backend tensorrt)"
        )
    if not library.target_sms and gpu is None:
        raise EngineBuildError(
            f"{library.title} builds on the GPU that the engine is for, and none is found here; run the same command "
            f"on {platform.name}, or build with --backend tensorrt-rtx where that supports it"
        )
    if not library.target_sms and gpu is not None and gpu.sm != platform.sm:
        raise EngineBuildError(
            f"platform {platform.name} is sm_{platform.sm}, but the GPU here ({gpu.name}) is sm_{gpu.sm}; "
            f"name the platform of this GPU, or run the command on {platform.name}"
        )
    return library
