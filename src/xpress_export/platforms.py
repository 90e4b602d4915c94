"""Where a bundle can run. This release builds for one platform; the table grows with the TensorRT stage."""

from __future__ import annotations

from dataclasses import dataclass

from xpress_export.errors import PlatformError


@dataclass(frozen=True, kw_only=True)
class Platform:
    """precisions: what a bundle for it may be built in, the advised one first."""

    name: str
    backend: str
    precisions: tuple[str, ...]
    note: str


PLATFORMS = {
    platform.name: platform
    for platform in (
        Platform(
            name="cpu",
            backend="ONNX Runtime",
            precisions=("fp32", "fp16"),
            note="fp16 halves the bundle and checks float16 accuracy; ONNX Runtime computes it slower than fp32 on x86",
        ),
    )
}


def require(name: str, precision: str) -> Platform:
    """The named platform, if it can run `precision`."""
    platform = PLATFORMS.get(name)
    if platform is None:
        raise PlatformError(f"platform {name!r} is not known; known are {', '.join(sorted(PLATFORMS))}")
    if precision not in platform.precisions:
        raise PlatformError(
            f"platform {name} cannot run {precision}; it can run {', '.join(platform.precisions)}, "
            f"of which {platform.precisions[0]} is advised"
        )
    return platform
