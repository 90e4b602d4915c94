"""The command line: parse, call one function, print. Heavy imports stay inside the command that needs them.

Results go to stdout, progress and logs to stderr. Exit 0: done; 1: an error of ours, one message, no traceback;
2: usage; 130: interrupted by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import io
import logging
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from rich.text import Text

from xpress_export import console as ui
from xpress_export import names, platforms, presets
from xpress_export.cli_bench import bench_command
from xpress_export.cli_calibrate import COMMANDS as PRECISION_COMMANDS
from xpress_export.cli_calibrate import quantize_build
from xpress_export.cli_doctor import doctor_command
from xpress_export.cli_engines import COMMANDS as ENGINE_COMMANDS
from xpress_export.cli_engines import GRAPHS, device_command, print_engine
from xpress_export.cli_eval import evaluate_command
from xpress_export.cli_generate import generate_command, warn_untrained
from xpress_export.cli_serve import serve_command
from xpress_export.cli_train import train
from xpress_export.errors import XpressExportError
from xpress_export.folders import check_free_to_use

err = ui.make_console(stderr=True)
out = ui.make_console()
logger = logging.getLogger(__name__)
Command = TypeVar("Command", bound=Callable[..., Any])

PROGRAM = "xpress-export"
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


def _set_verbosity(ctx: click.Context, _: click.Parameter, count: int) -> None:
    ctx.meta[__name__] = ctx.meta.get(__name__, 0) + count
    ui.configure_logging(ctx.meta[__name__], err)


def _verbose_option() -> click.Option:
    return click.Option(
        ["-v", "--verbose"],
        count=True,
        expose_value=False,
        show_default=False,
        callback=_set_verbosity,
        help="Say what is done (-vv: everything), on stderr.",
    )


class _Group(click.Group):
    """Commands in the order of use, each with `-v`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):  # each with the whole first sentence of its help
            formatter.write_dl([(name, command.get_short_help_str(limit=1000)) for name, command in commands])

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        cmd.params.append(_verbose_option())
        super().add_command(cmd, name)


@click.group(cls=_Group, context_settings=CONTEXT, params=[_verbose_option()])
@click.version_option(package_name=PROGRAM)
def cli() -> None:
    """Take a speculative-decoding trio (target LLM, dFlash drafter, xPress refiner) from checkpoints to a bundle,
    and generate text from it, losslessly.

    \b
    First steps:
      xpress-export build --preset smollm2-135m --out bundles/smollm2-135m
      xpress-export generate bundles/smollm2-135m --prompt "Why is the sky blue?"

    \b
    Completion of commands and options by Tab, in bash (zsh and fish likewise):
      eval "$(_XPRESS_EXPORT_COMPLETE=bash_source xpress-export)"
    """


def build_options(command: Command) -> Command:
    """The options that `build` and `export` share."""
    options = [
        click.option("--target", metavar="T", help="Target LLM: a folder, a Hugging Face hub id, or a .gguf file."),
        click.option("--drafter", metavar="D", help="dFlash drafter: a folder, hub id, or training .pt file."),
        click.option("--refiner", metavar="R", help="xPress refiner or Markov head: a folder, hub id, or .pt file."),
        click.option(
            "--preset", type=click.Choice(sorted(presets.PRESETS)), help="A ready trio, instead of the above."
        ),
        click.option(
            "--platform",
            type=click.Choice(list(platforms.PLATFORMS)),
            default="cpu",
            metavar="P",
            help="Where the bundle is to run; see `xpress-export platforms`.",
        ),
        click.option(
            "--precision",
            type=click.Choice(["fp32", "fp16", *platforms.QUANTIZED]),
            help="Type of weights and cache; build also quantizes.  [default: fp32 on cpu, fp16 elsewhere]",
        ),
        click.option(
            "--max-context",
            type=click.IntRange(min=2),
            metavar="N",
            help="Tokens of prompt and answer together.  [default: what the target was made for]",
        ),
        click.option(
            "--lowering",
            type=click.Choice(["auto", *platforms.LOWERINGS]),
            default="auto",
            help="decomposed: add graphs for an older TensorRT; auto: where the platform has one.",
        ),
        click.option(
            "--layout",
            type=click.Choice(names.LAYOUTS),
            default=names.LAYOUT_SPLIT,
            help="How a cycle runs: a graph for each model, or fused into one, which needs a drafter.",
        ),
        click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the bundle."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@cli.command()
@build_options
@click.option(
    "--calibration-prompts",
    type=click.Path(path_type=Path),
    metavar="F",
    help="JSONL of prompts like yours, for int8 and fp8.  [default: a few of our own]",
)
def build(precision: str | None, calibration_prompts: Path | None, **options: Any) -> None:
    """Build a bundle from checkpoints.

    Goes all the way from checkpoints to what the platform runs. A bundle that is already there and still valid is
    reused; an interrupted build leaves nothing behind.
    """
    if precision not in platforms.QUANTIZED:
        _export(precision=precision, **options)
        return
    platforms.require(options["platform"], precision)
    _export(precision=None, **options)
    quantize_build(options["out"], precision, calibration_prompts)


@cli.command()
@build_options
def export(**options: Any) -> None:
    """Run only the first stage of `build`.

    It turns checkpoints into ONNX graphs and checks those against the models.
    """
    if options["precision"] in platforms.QUANTIZED:
        raise click.UsageError("export writes fp32 or fp16; `xpress-export build` and `quantize` go on from there")
    _export(**options)


cli.add_command(generate_command)
cli.add_command(evaluate_command)
cli.add_command(bench_command)
cli.add_command(serve_command)


def _export(
    target: str | None,
    drafter: str | None,
    refiner: str | None,
    preset: str | None,
    platform: str,
    precision: str | None,
    max_context: int | None,
    lowering: str,
    layout: str,
    out: Path,
) -> None:
    precision = precision or ("fp32" if platform == platforms.CPU else "fp16")
    platforms.require(platform, precision)
    if (target is None) == (preset is None):
        raise click.UsageError("give either --target (with --drafter and --refiner) or --preset")
    if preset is not None and (drafter or refiner):
        raise click.UsageError("--preset brings its own drafter and refiner; leave --drafter and --refiner out")
    if refiner is not None and drafter is None:
        raise click.UsageError("--refiner corrects a drafter's block: give --drafter too")
    if layout == names.LAYOUT_FUSED and preset is None and drafter is None:
        raise click.UsageError("--layout fused drafts in its step: give --drafter, or leave the layout split")
    sources = presets.PRESETS[preset].sources() if preset else dict(target=target, drafter=drafter, refiner=refiner)
    check_free_to_use(out, replace=True)  # before anything that takes time
    progress = ui.ConsoleProgress(err)
    with progress.step("Loading PyTorch and transformers", expected_s=6):
        from xpress_export.exporter import export as exporter
    options = exporter.ExportOptions(
        **sources,
        preset=preset,
        platform=platform,
        precision=precision,
        max_context=max_context,
        lowering=lowering,
        layout=layout,
    )
    done = exporter.export(options, out, progress)
    _report_bundle(out, done.manifest, done.reused)
    if platform != platforms.CPU:
        _say_what_the_device_does(out, platform)


def _say_what_the_device_does(folder: Path, platform: str) -> None:
    err.print(f"\nEngines are built where TensorRT for {platform} is installed. On the device, run:")
    out.print(f"  {device_command(folder, platform)}")


def _report_bundle(folder: Path, manifest: Any, reused: bool) -> None:
    from xpress_export.inspection import parity_table

    state = "is valid and was reused" if reused else "built"
    models = " + ".join(manifest.graphs)
    layout = f"{names.LAYOUT_FUSED} layout, " if manifest.layout == names.LAYOUT_FUSED else ""
    size = ui.human_bytes(manifest.num_bytes)
    out.print(f"bundle {folder} {state}: {models}, {layout}{manifest.precision}, {size}")
    if not reused:
        out.print()
        out.print(parity_table(manifest))
    warn_untrained(manifest)


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Also check every file against its recorded hash.")
@click.option("--engine", type=GRAPHS, help="Show one engine instead: layers, precision, memory.")
@click.option("--platform", metavar="P", help="Which platform's engine, where there are several.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect(bundle: Path, verify: bool, engine: str | None, platform: str | None, as_json: bool) -> None:
    """Show what is in a bundle.

    Its models, graphs with inputs and outputs, sizes, types, and where all of it comes from.
    """
    if engine is not None:
        print_engine(bundle, engine, platform, as_json)
        return
    from xpress_export.manifest import read_manifest, verify_files

    manifest = read_manifest(bundle)
    if verify:
        with ui.ConsoleProgress(err, transient=True).step("Checking files", total=manifest.num_bytes) as advance:
            verify_files(bundle, manifest, advance)
    if as_json:
        ui.write(manifest.to_json())
        return
    from xpress_export.inspection import describe

    for section in describe(manifest):
        out.print(section)
    if verify:
        out.print("\nevery file matches its recorded hash")


for other_command in (doctor_command, train, *PRECISION_COMMANDS, *ENGINE_COMMANDS):
    cli.add_command(other_command)


def main() -> NoReturn:
    """Entry point: every error of ours becomes one message and exit code 1."""
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _interrupt)
    sys.unraisablehook = _interrupt_again
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an old locale shows a question mark rather than failing
    try:
        code = cli.main(prog_name=PROGRAM, standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        err.print("interrupted", style="yellow")
        code = 130
    except Exception as error:
        code = _report_error(error)
    sys.exit(code)


def _report_error(error: Exception) -> int:
    from xpress_export.doctor import missing_dependency

    if isinstance(error, ModuleNotFoundError):
        error = missing_dependency(error) or error
    if logging.getLogger("xpress_export").isEnabledFor(logging.DEBUG):
        traceback.print_exception(error)
    if isinstance(error, XpressExportError):
        err.print(Text.assemble(("error: ", "red"), str(error)))
        return 1
    err.print(Text.assemble(("internal error: ", "red"), f"{type(error).__name__}: {error}"))
    err.print("This is a defect of xpress-export. Run again with -vv for a traceback and report it.")
    return 1


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _interrupt_again(dropped: Any) -> None:
    """Python drops an interrupt that comes while an object is being cleaned up: have it come again a little later."""
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.01)
    else:
        sys.__unraisablehook__(dropped)
