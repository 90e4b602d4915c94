"""`xpress-export serve`: an OpenAI-compatible server over one bundle."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import click

from xpress_export import console as ui
from xpress_export.cli_device import device_options
from xpress_export.cli_precision import PRECISION
from xpress_export.precision import Precision

err = ui.make_console(stderr=True)
KEY_VARIABLE = "XPRESS_EXPORT_API_KEY"


@click.command("serve")
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", metavar="H", help="Address to listen on; 0.0.0.0: every interface.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, metavar="P", help="0: any free one.")
@click.option(
    "--slots",
    type=click.IntRange(min=1),
    metavar="N",
    help="Requests that run at a time.  [default: 8, or what engines admit]",
)
@click.option("--max-queue", type=click.IntRange(min=0), default=64, metavar="N", help="Requests that may wait.")
@click.option(
    "--default-max-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="New tokens of a chat that sets no limit.  [default: the rest of the context]",
)
@click.option(
    "--kv-budget-mb", type=click.IntRange(min=1), metavar="N", help="Memory for caches.  [default: half of all]"
)
@PRECISION
@device_options
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads.  [default: one per core]")
@click.option(
    "--api-key",
    "api_keys",
    multiple=True,
    envvar=KEY_VARIABLE,
    metavar="KEY",
    help=f"Key that clients must send; repeatable, or {KEY_VARIABLE} with keys set apart by spaces.  [default: none]",
)
@click.option("--served-model-name", metavar="NAME", help="What clients call the model.  [default: the folder's name]")
@click.option(
    "--drain-seconds",
    type=click.FloatRange(0, 3600),
    default=30.0,
    metavar="S",
    help="On SIGTERM or Ctrl-C, running requests have so long to end; a second signal cancels them.",
)
@click.option("--max-body-kb", type=click.IntRange(min=1), default=4096, metavar="N", help="Largest request body.")
def serve_command(bundle: Path, **options: Any) -> None:
    """Serve a bundle over HTTP as OpenAI's API does.

    Routes: /v1/chat/completions, /v1/completions, /v1/models, /health, /ready and Prometheus' /metrics. One process,
    one bundle; requests share its cycles.
    """
    _serve(bundle, **options)


def _serve(
    bundle: Path,
    host: str,
    port: int,
    slots: int | None,
    max_queue: int,
    default_max_tokens: int | None,
    kv_budget_mb: int | None,
    precision: Precision,
    threads: int | None,
    api_keys: tuple[str, ...],
    served_model_name: str | None,
    drain_seconds: float,
    max_body_kb: int,
    **device: Any,
) -> None:
    from xpress_export.manifest import read_manifest
    from xpress_export.runtime import Runtime

    num_bytes = read_manifest(bundle).num_bytes  # no bundle there: said before anything is loaded
    with ui.ConsoleProgress(err, transient=True).step("Loading the server", expected_s=1):
        from xpress_export.runtime.server import Service, ServiceOptions
        from xpress_export.runtime.server_run import listen, run
    options = ServiceOptions(
        model_name=served_model_name or bundle.resolve().name,
        api_keys=api_keys,
        default_max_tokens=default_max_tokens,
        max_body_bytes=max_body_kb << 10,
    )
    with listen(host, port) as bound:
        with ui.ConsoleProgress(err, transient=True).step("Opening the bundle", total=num_bytes) as advance:
            runtime = Runtime.open(
                bundle,
                precision=precision,
                num_slots=slots,
                num_threads=threads,
                max_queue=max_queue,
                kv_budget_bytes=None if kv_budget_mb is None else kv_budget_mb << 20,
                on_verify=advance,
                **device,
            )
        with runtime:
            _warn_of_open_door(host, api_keys)
            address = _url(host, bound.getsockname()[1])
            _log_server_errors()
            run(
                Service(runtime, options),
                bound,
                drain_seconds=drain_seconds,
                on_ready=lambda: err.print(f"serving {options.model_name!r} at {address}/v1 (Ctrl-C ends)"),
            )
    err.print("every request has ended; stopped", style="dim")


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _warn_of_open_door(host: str, api_keys: tuple[str, ...]) -> None:
    if not api_keys and host not in ("127.0.0.1", "::1", "localhost"):
        err.print(f"{host} is reachable from other machines and no --api-key is set", style="yellow")


def _log_server_errors() -> None:
    """What uvicorn has to say goes where our own logs go, warnings and errors always."""
    ours = logging.getLogger("xpress_export")
    theirs = logging.getLogger("uvicorn")
    theirs.handlers, theirs.propagate = ours.handlers, False
    theirs.setLevel(max(ours.level, logging.WARNING) if ours.level > logging.DEBUG else logging.DEBUG)
