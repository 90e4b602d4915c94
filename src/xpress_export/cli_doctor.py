"""`xpress-export doctor`: what this machine can build and run, and what a bundle takes of its memory."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xpress_export import console as ui
from xpress_export.cli_device import device_options
from xpress_export.cli_precision import PRECISION
from xpress_export.precision import Precision

if TYPE_CHECKING:
    from xpress_export.runtime.memory_plan import MemoryPlan


@click.command("doctor")
@click.argument("bundle", type=click.Path(path_type=Path), required=False)
@device_options
@PRECISION
@click.option(
    "--slots",
    type=click.IntRange(1, 65536),
    metavar="N",
    help="Requests that run at a time.  [default: 8, or what engines admit]",
)
@click.option("--max-context", type=click.IntRange(min=2), metavar="N", help="Of a request.  [default: the bundle's]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor_command(bundle: Path | None, as_json: bool, **options: Any) -> None:
    """Show what this machine can build and run, and, given a bundle, the memory that it takes.

    Versions, providers and GPUs, what is missing, and the command that adds it. A bundle that will not fit a GPU ends
    with an error that says what takes how much; on a CPU, where caches grow with requests, the sizes are the most.
    """
    from xpress_export.doctor import examine
    from xpress_export.inspection import describe_machine

    facts = examine()
    plan = None if bundle is None else _plan(bundle, facts, **options)
    if as_json:
        ui.write(json.dumps({**facts, **({"memory_plan": plan.to_json()} if plan else {})}, indent=2) + "\n")
    else:
        console = ui.make_console()
        for section in describe_machine(facts):
            console.print(section)
        if plan is not None:
            title = f"\nMemory of {bundle} on {plan.device_kind} with {plan.backend}, layout {plan.layout}"
            sizes = f"{plan.shape.num_slots} slots of {plan.shape.max_context} tokens"
            console.print(ui.table(f"{title}: {sizes}", ("what", "size", ""), plan.rows()))
            if plan.grows_on_demand:
                console.print(_growth(plan))
    if plan is not None and plan.free_bytes is not None and not plan.grows_on_demand:
        from xpress_export.runtime.memory_plan import refuse_if_too_large

        refuse_if_too_large(plan, plan.free_bytes)


def _plan(
    bundle: Path,
    facts: dict[str, Any],
    device: str,
    backend: str,
    layout: str | None,
    max_draft_tokens: int | None,
    precision: Precision,
    slots: int | None,
    max_context: int | None,
) -> MemoryPlan:
    from xpress_export.manifest import read_manifest
    from xpress_export.runtime import devices
    from xpress_export.runtime.api import PREFILL_CHUNK

    manifest = read_manifest(bundle)
    layout = layout or manifest.layout
    precisions = devices.role_precisions(manifest, precision, layout)
    choice = devices.choose(manifest, device, backend, precisions, layout)
    found = devices.find(bundle, manifest, choice, precisions, layout)
    shape = found.shape(
        manifest, num_slots=slots, chunk=PREFILL_CHUNK, max_drafts=max_draft_tokens, max_context=max_context
    )
    plan = devices.plan_of(manifest, choice, found, precision, layout, shape)
    if choice.index is None:
        free, total = facts["memory_available_bytes"], facts["memory_bytes"]
        return plan if free is None else plan.with_free(free, total)
    with contextlib.closing(devices.open_device(choice, None)) as opened:
        memory = opened.memory_info()
    return plan if memory is None else plan.with_free(*memory)


def _growth(plan: MemoryPlan) -> str:
    """What the sizes mean where opening takes only a part of them."""
    text = "the most that it takes: caches begin at 256 rows and grow with requests, and opening refuses nothing"
    if plan.free_bytes is None or plan.device_bytes <= plan.free_bytes:
        return text
    return f"{text}; as many requests of that length are more than this machine has free"
