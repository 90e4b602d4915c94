"""Whether an engine plan can be loaded here, told before TensorRT is asked: its own message names neither field.

    field      has to be                                                         unless
    backend    the same library                                                  never
    version    the full version of the library                                   version compatible: newer, same major
    sm         the compute capability                                            hardware compatibility, see below
    driver     at least the driver it was built with (its major version)         unknown on either side

Hardware compatibility `ampere-plus` loads on 8.0 and newer, `same-cc` on the same compute capability; neither on
another operating system. TensorRT keeps these promises for its own plans; TensorRT-RTX makes none of them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xpress_export.errors import PlanMismatchError
from xpress_export.gpu import Gpu
from xpress_export.names import LAYOUT_SPLIT
from xpress_export.records import EngineRecord


@dataclass(frozen=True)
class Running:
    """The library and the GPU that are to load a plan."""

    backend: str
    version: str
    gpu: Gpu


def check_loadable(engine: EngineRecord, running: Running, bundle: Path) -> None:
    """Raise PlanMismatchError naming every field that differs and the command that rebuilds."""
    differences = list(_differences(engine, running))
    if differences:
        raise PlanMismatchError(
            f"{bundle / engine.file} was built for another machine: {'; '.join(differences)}. "
            f"Rebuild it here: {rebuild_command(engine, bundle)}"
        )


def rebuild_command(engine: EngineRecord, bundle: Path) -> str:
    """The command that builds this engine again."""
    words = ["xpress-export compile", shlex.quote(str(bundle)), f"--platform {engine.platform}"]
    words += [f"--backend {engine.backend}", f"--max-context {engine.max_context}"]
    words += [f"--layout {engine.layout}"] if engine.layout != LAYOUT_SPLIT else []
    words += [f"--max-batch {engine.max_batch}"] if engine.max_batch != 1 else []
    words += [f"--hardware-compat {engine.hardware_compat}"] if engine.hardware_compat != "none" else []
    return " ".join([*words, *(["--version-compatible"] if engine.version_compatible else [])])


def _differences(engine: EngineRecord, running: Running) -> Iterator[str]:
    if engine.backend != running.backend:
        yield f"backend is {engine.backend}, running {running.backend}"
    elif not _version_fits(engine, running.version):
        how = " or a newer one of its major version" if engine.version_compatible else ""
        yield f"version is {engine.version}{how}, running {running.version}"
    if not sm_fits(engine, running.gpu.sm):
        how = " or newer" if engine.hardware_compat == "ampere-plus" else ""
        yield f"sm is {engine.sm}{how}, running {running.gpu.sm} ({running.gpu.name})"
    if engine.driver is not None and running.gpu.driver is not None and running.gpu.driver < engine.driver:
        yield f"driver is {engine.driver}, running {running.gpu.driver}"


def _version_fits(engine: EngineRecord, version: str) -> bool:
    if engine.version == version:
        return True
    built, here = _numbers(engine.version), _numbers(version)
    return engine.version_compatible and built[0] == here[0] and here > built


def sm_fits(engine: EngineRecord, sm: int) -> bool:
    """Whether a plan may run on compute capability `sm`."""
    if engine.hardware_compat == "ampere-plus":
        return sm >= 80
    return sm == engine.sm


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
