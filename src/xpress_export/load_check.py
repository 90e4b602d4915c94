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
from xpress_export.manifest import Manifest
from xpress_export.platforms import lowering_for
from xpress_export.precision import choose_precisions
from xpress_export.records import EngineRecord


@dataclass(frozen=True)
class Running:
    """The library and the GPU that are to load a plan."""

    backend: str
    version: str
    gpu: Gpu


def check_loadable(engine: EngineRecord, running: Running, bundle: Path, manifest: Manifest) -> None:
    """Raise PlanMismatchError naming every field that differs and the command that rebuilds."""
    differences = list(_differences(engine, running))
    if differences:
        raise PlanMismatchError(
            f"{bundle / engine.file} was built for another machine: {'; '.join(differences)}. "
            f"Rebuild it here: {rebuild_command(engine, bundle, manifest)}"
        )


def rebuild_command(engine: EngineRecord, bundle: Path, manifest: Manifest) -> str:
    """The command that builds this engine again, and those it runs with: they are most likely of the same machine.

    It names the lowering only where that was asked for, not where the version of the library decided: here another may.
    """
    block, chunk = _block(engine, manifest), _chunk(engine)
    words = ["xpress-export compile", shlex.quote(str(bundle)), f"--platform {engine.platform}"]
    words += [f"--backend {engine.backend}", f"--precision {_precision(engine, manifest)}", f"--layout {engine.layout}"]
    was_asked_for = engine.lowering != lowering_for(engine.backend, engine.version)[0]
    words += [f"--lowering {engine.lowering}"] if was_asked_for else []
    words += [f"--max-context {engine.max_context}", f"--max-batch {engine.max_batch}"]
    words += [f"--block {block}"] if block is not None else []
    words += [f"--chunk {chunk}"] if chunk is not None else []
    words += [f"--hardware-compat {engine.hardware_compat}"] if engine.hardware_compat != "none" else []
    return " ".join([*words, *(["--version-compatible"] if engine.version_compatible else [])])


def _precision(engine: EngineRecord, manifest: Manifest) -> str:
    """That of the engine, for every model that has it; or one for each, where the engines beside it are such a mix."""
    place = (engine.platform, engine.backend, engine.layout)
    beside = [e for e in manifest.engines if (e.platform, e.backend, e.layout) == place and e.role in manifest.roles]
    chosen = {e.role: e.precision for e in beside}
    is_one_set = len(beside) == len(manifest.roles) == len(chosen)
    if not is_one_set or chosen == choose_precisions(manifest, engine.precision):
        return engine.precision
    return ",".join(f"{role}={chosen[role]}" for role in manifest.roles)


def _block(engine: EngineRecord, manifest: Manifest) -> int | None:
    """Slots of a draft block: the engine's own, or those whose drafts make up a verify call; None without a drafter."""
    sizes, draft = engine.profiles[-1].sizes, manifest.draft
    if "N" in sizes:
        return sizes["N"][-1]
    return sizes["S"][-1] - 1 + draft.first_slot if draft and "S" in sizes else None


def _chunk(engine: EngineRecord) -> int | None:
    """Tokens of a prefill call; None for a refiner, which has none."""
    return next((profile.sizes["S"][-1] for profile in engine.profiles if profile.name == "prefill"), None)


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
