"""Where a bundle can run: one table, and the refusals that follow from it.

    backend       what runs the bundle: ONNX Runtime, or the TensorRT that lies on the device
    lowering      which form of the graphs that TensorRT reads, see `lowering_for`
    precisions    what the hardware computes; the advised one first
    evidence      how far this project has been with it, best of three:
                    executed   graphs of this project ran there and their numbers were checked
                    compiled   a real TensorRT builder accepted them for this GPU architecture; nothing ran
                    none       neither; the row is from NVIDIA's documents

Precision by architecture: NVIDIA's support matrices, and what a builder said when asked (`docs/platforms.md`).
INT8 is not advised on Blackwell, whose tensor cores are made for FP8 and FP4. Bandwidth is the data sheet's.
"""

from __future__ import annotations

from dataclasses import dataclass

from xpress_export.errors import PlatformError

CPU = "cpu"
ONNX_RUNTIME = "onnxruntime"
TENSORRT = "tensorrt"
TENSORRT_RTX = "tensorrt-rtx"
NATIVE = "native"
DECOMPOSED = "decomposed"
LOWERINGS = (NATIVE, DECOMPOSED)
FIRST_NATIVE = (10, 15)
"""The first TensorRT whose ONNX parser reads all four operators of the native graphs."""

PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int4", "fp8", "fp4")
QUANTIZED = ("int8", "fp8", "int8-weight", "int4-weight")
"""What `quantize` makes of a graph; `-weight`: weights alone, on hardware that has the type."""
_TURING = ("fp16", "int8", "fp32")
_AMPERE = ("fp16", "int8", "int4", "bf16", "fp32")
_HOPPER = ("fp8", "fp16", "bf16", "int8", "int4", "fp32")
_BLACKWELL = ("fp8", "fp16", "bf16", "fp4", "int4", "int8", "fp32")


@dataclass(frozen=True, kw_only=True)
class Platform:
    """One row. sm: compute capability as an integer, 89 for 8.9. versions: (where from, TensorRT) pairs."""

    name: str
    device: str
    backend: str = TENSORRT
    sm: int | None = None
    memory_gb: float | None = None
    bandwidth_gb_s: int | None = None
    unified_memory: bool = False
    versions: tuple[tuple[str, str], ...] = ()
    precisions: tuple[str, ...]
    evidence: str = "none"
    note: str = ""

    @property
    def lowering(self) -> str:
        """Which graphs its TensorRT versions read: one lowering, or both where the versions differ."""
        kinds = {lowering_for(self.backend, version)[0] for _, version in self.versions} or {NATIVE}
        return " or ".join(sorted(kinds))

    @property
    def advised(self) -> str:
        return self.precisions[0]


_WHEEL = (("wheel", "11.4"), ("wheel", "10.16"))
_JETPACK_7 = (("JetPack 7.0/7.1", "10.13"), ("JetPack 7.2.2", "11.4"))
_ROWS = (
    Platform(
        name=CPU,
        device="any x86-64 or Arm CPU",
        backend=ONNX_RUNTIME,
        precisions=("fp32", "fp16", "int8", "int4", "fp8"),
        evidence="executed",
        note="int8 and weight-only are faster than fp32; fp16 and fp8 are slower and there to check their accuracy",
    ),
    Platform(
        name="t4",
        device="T4 (Turing)",
        sm=75,
        memory_gb=16,
        bandwidth_gb_s=320,
        versions=(("wheel", "10.16"),),
        precisions=_TURING,
        evidence="compiled",
        note="no BF16, no FP8",
    ),
    Platform(
        name="a100",
        device="A100 (Ampere)",
        sm=80,
        memory_gb=80,
        bandwidth_gb_s=2039,
        versions=_WHEEL,
        precisions=_AMPERE,
        evidence="compiled",
        note="no FP8",
    ),
    Platform(
        name="a10",
        device="A10 (Ampere)",
        sm=86,
        memory_gb=24,
        bandwidth_gb_s=600,
        versions=_WHEEL,
        precisions=_AMPERE,
        evidence="compiled",
        note="no FP8",
    ),
    Platform(
        name="rtx-3090",
        device="GeForce RTX 3090 (Ampere)",
        sm=86,
        memory_gb=24,
        bandwidth_gb_s=936,
        versions=_WHEEL,
        precisions=_AMPERE,
        evidence="compiled",
        note="no FP8",
    ),
    Platform(
        name="jetson-orin",
        device="Jetson Orin AGX, NX, Nano (Ampere)",
        sm=87,
        memory_gb=64,
        bandwidth_gb_s=204,
        unified_memory=True,
        versions=(("JetPack 6.2", "10.3"), ("JetPack 7.2.2", "11.4")),
        precisions=_AMPERE,
        note="no FP8; figures are those of AGX Orin 64 GB, Orin Nano has 8 GB and 102 GB/s",
    ),
    Platform(
        name="l4",
        device="L4 (Ada)",
        sm=89,
        memory_gb=24,
        bandwidth_gb_s=300,
        versions=_WHEEL,
        precisions=_HOPPER,
        evidence="compiled",
    ),
    Platform(
        name="rtx-4090",
        device="GeForce RTX 4090 (Ada)",
        sm=89,
        memory_gb=24,
        bandwidth_gb_s=1008,
        versions=_WHEEL,
        precisions=_HOPPER,
        evidence="compiled",
    ),
    Platform(
        name="h100",
        device="H100 SXM (Hopper)",
        sm=90,
        memory_gb=80,
        bandwidth_gb_s=3350,
        versions=_WHEEL,
        precisions=_HOPPER,
    ),
    Platform(
        name="h200",
        device="H200 SXM (Hopper)",
        sm=90,
        memory_gb=141,
        bandwidth_gb_s=4800,
        versions=_WHEEL,
        precisions=_HOPPER,
    ),
    Platform(
        name="b200",
        device="B200 (Blackwell)",
        sm=100,
        memory_gb=180,
        bandwidth_gb_s=8000,
        versions=_WHEEL,
        precisions=_BLACKWELL,
    ),
    Platform(
        name="jetson-thor",
        device="Jetson AGX Thor (Blackwell)",
        sm=110,
        memory_gb=128,
        bandwidth_gb_s=273,
        unified_memory=True,
        versions=_JETPACK_7,
        precisions=_BLACKWELL,
        note="older CUDA calls this architecture sm_101",
    ),
    Platform(
        name="rtx-5090",
        device="GeForce RTX 5090 (Blackwell)",
        sm=120,
        memory_gb=32,
        bandwidth_gb_s=1792,
        versions=_WHEEL,
        precisions=_BLACKWELL,
        evidence="compiled",
    ),
    Platform(
        name="dgx-spark",
        device="DGX Spark, GB10 (Blackwell)",
        sm=121,
        memory_gb=128,
        bandwidth_gb_s=273,
        unified_memory=True,
        versions=_WHEEL,
        precisions=_BLACKWELL,
        evidence="compiled",
    ),
)
PLATFORMS = {row.name: row for row in _ROWS}

_WHY_NOT = {
    "fp8": "FP8 needs compute capability 8.9 (Ada) or newer",
    "fp4": "FP4 needs compute capability 10.0 (Blackwell) or newer",
    "bf16": "BF16 needs compute capability 8.0 (Ampere) or newer",
    "int4": "INT4 weights need compute capability 8.0 (Ampere) or newer",
}


def require(name: str, precision: str) -> Platform:
    """The named platform, if it can run `precision`; otherwise a `PlatformError` that names the alternative."""
    platform = find(name)
    if precision not in {*PRECISIONS, *QUANTIZED}:
        known = ", ".join(dict.fromkeys((*PRECISIONS, *QUANTIZED)))
        raise PlatformError(f"precision {precision!r} is not known; known are {known}")
    if precision.removesuffix("-weight") not in platform.precisions:
        where = f" ({platform.device}, sm_{platform.sm})" if platform.sm else ""
        reason = _WHY_NOT.get(precision.removesuffix("-weight"))
        why = f": {reason}" if reason and platform.sm else ""
        raise PlatformError(
            f"platform {name}{where} cannot run {precision}{why}; it can run {', '.join(platform.precisions)}, "
            f"of which {platform.advised} is advised: use --precision {_alternative(platform, precision)}"
        )
    return platform


def find(name: str) -> Platform:
    """The named platform, or a `PlatformError` that lists them."""
    if name not in PLATFORMS:
        raise PlatformError(
            f"platform {name!r} is not known; known are {', '.join(PLATFORMS)} (see `xpress-export platforms`)"
        )
    return PLATFORMS[name]


def _alternative(platform: Platform, precision: str) -> str:
    """What serves the purpose of `precision` best: eight bits for eight, four for four, else what is advised."""
    substitutes = {"fp8": ("int8",), "int8": ("fp8",), "fp4": ("int4", "int8"), "int4": ("int8",)}
    substitutes["int4-weight"] = ("int8-weight",)
    usable = (p for p in substitutes.get(precision, ()) if p.removesuffix("-weight") in platform.precisions)
    return next(usable, platform.advised)


def lowering_for(backend: str, version: str) -> tuple[str, str]:
    """The graphs that a TensorRT version reads, and why."""
    first = ".".join(map(str, FIRST_NATIVE))
    operators = "Attention, RotaryEmbedding, RMSNormalization and TensorScatter"
    if backend != TENSORRT:
        return NATIVE, f"{backend} {version} reads {operators}"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < FIRST_NATIVE:
        return DECOMPOSED, f"TensorRT {version} does not read {operators}, which came with {first}"
    return NATIVE, f"TensorRT {version} reads {operators} (from {first} on)"
