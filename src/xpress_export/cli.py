"""The command line: parse, call one function, print. Heavy imports stay inside the command that needs them.

Results go to stdout, progress and logs to stderr. Exit 0: done; 1: an error of ours, one message, no traceback;
2: usage; 130: interrupted.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from rich.console import Console

from xpress_export import console as ui
from xpress_export import names, presets
from xpress_export.errors import MissingDependencyError, XpressExportError

err = Console(stderr=True, highlight=False, soft_wrap=True)
out = Console(highlight=False, soft_wrap=True)
Command = TypeVar("Command", bound=Callable[..., Any])

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}


class _Group(click.Group):
    """Commands in the order of use, and a suggestion for a mistyped one."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=_Group, context_settings=CONTEXT)
@click.version_option(package_name="xpress-export")
@click.option("-v", "--verbose", count=True, help="Say what is done (-vv: everything), on stderr.")
def cli(verbose: int) -> None:
    """Take a speculative-decoding trio (target LLM, dFlash drafter, xPress refiner) from checkpoints to a bundle,
    and generate text from it, losslessly.

    \b
    First steps:
      xpress-export build --preset smollm2-135m --out bundles/smollm2-135m
      xpress-export generate bundles/smollm2-135m --prompt "Why is the sky blue?"
    """
    ui.configure_logging(verbose)


def build_options(command: Command) -> Command:
    """The options that `build` and `export` share."""
    options = [
        click.option("--target", metavar="T", help="Target LLM: a folder, a Hugging Face hub id, or a .gguf file."),
        click.option("--drafter", metavar="D", help="dFlash drafter: a folder, hub id, or training .pt file."),
        click.option("--refiner", metavar="R", help="xPress refiner or Markov head: a folder, hub id, or .pt file."),
        click.option(
            "--preset", type=click.Choice(sorted(presets.PRESETS)), help="A ready trio, instead of the above."
        ),
        click.option("--platform", default="cpu", help="Where the bundle is to run."),
        click.option(
            "--precision",
            type=click.Choice(["fp32", "fp16"]),
            default="fp32",
            help="Type of weights and cache.",
        ),
        click.option(
            "--max-context",
            type=click.IntRange(min=2),
            metavar="N",
            help="Tokens of prompt and answer together.  [default: what the target was made for]",
        ),
        click.option("--logits", is_flag=True, help="Let the target graph output its logits too."),
        click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the bundle."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@cli.command()
@build_options
def build(**options: Any) -> None:
    """Build a bundle: everything from checkpoints to what the platform runs.

    A bundle that is already there and still valid is reused; an interrupted build leaves nothing behind.
    """
    _export(**options)


@cli.command()
@build_options
def export(**options: Any) -> None:
    """Only the export stage of `build`: checkpoints to ONNX graphs, checked against the models."""
    _export(**options)


def _export(
    target: str | None,
    drafter: str | None,
    refiner: str | None,
    preset: str | None,
    platform: str,
    precision: str,
    max_context: int | None,
    logits: bool,
    out: Path,
) -> None:
    from xpress_export import platforms

    platforms.require(platform, precision)
    if (target is None) == (preset is None):
        raise click.UsageError("give either --target (with --drafter and --refiner) or --preset")
    if preset is not None and (drafter or refiner):
        raise click.UsageError("--preset brings its own drafter and refiner; leave --drafter and --refiner out")
    if refiner is not None and drafter is None:
        raise click.UsageError("--refiner corrects a drafter's block: give --drafter too")
    sources = presets.PRESETS[preset].sources() if preset else dict(target=target, drafter=drafter, refiner=refiner)
    exporter = _exporter()
    options = exporter.ExportOptions(
        **sources,
        preset=preset,
        platform=platform,
        precision=precision,
        max_context=max_context,
        with_logits=logits,
    )
    done = exporter.export(options, out, ui.ConsoleProgress(err))
    _report_bundle(out, done.manifest, done.reused)


def _exporter() -> Any:
    try:
        from xpress_export.exporter import export as exporter
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("xpress_export"):
            raise
        raise MissingDependencyError(error.name, "read and trace checkpoints", "export") from error
    return exporter


def _report_bundle(folder: Path, manifest: Any, reused: bool) -> None:
    state = "is valid and was reused" if reused else "built"
    models = " + ".join(manifest.graphs)
    out.print(f"bundle {folder} {state}: {models}, {manifest.precision}, {ui.human_bytes(manifest.num_bytes)}")
    for check in manifest.parity:
        out.print(
            f"  {check.graph}: {check.measure} {check.value:.1e} against {check.against} "
            f"(allowed {check.tolerance:.0e}, {check.rows} rows, executed on ONNX Runtime CPU)"
        )


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("stdin", required=False, type=click.Choice(["-"]), metavar="[-]")
@click.option("--prompt", metavar="TEXT", help="The prompt.")
@click.option("--prompt-file", type=click.Path(path_type=Path), metavar="F", help="Read the prompt from a file.")
@click.option(
    "--chat/--raw",
    default=None,
    help="Apply the chat template, or continue the text as it is.  [default: chat if the model has a template]",
)
@click.option("--system", metavar="TEXT", help="System message, with the chat template.")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="At most N tokens.  [default: until the context is full]",
)
@click.option(
    "--mode",
    type=click.Choice(names.MODES),
    help="Plain decoding, drafter, or drafter and refiner; the text is the same.  [default: the best the bundle has]",
)
@click.option(
    "--refine-passes",
    type=click.IntRange(min=0),
    metavar="K",
    help="Passes of the refiner.  [default: the bundle's]",
)
@click.option(
    "--draft-tokens",
    type=click.IntRange(min=0),
    metavar="N",
    help="Draft tokens verified per step.  [default: the whole block]",
)
@click.option("--stop", multiple=True, metavar="S", help="End before this text; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Do not end at the model's stop tokens.")
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads.  [default: one per core]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of streaming.")
def generate(bundle: Path, **options: Any) -> None:
    """Generate text from BUNDLE; `-` reads the prompt from standard input. Streams as tokens are committed."""
    _generate(bundle, **options)


def _generate(
    bundle: Path,
    stdin: str | None,
    prompt: str | None,
    prompt_file: Path | None,
    chat: bool | None,
    system: str | None,
    max_new_tokens: int | None,
    mode: str | None,
    refine_passes: int | None,
    draft_tokens: int | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    from xpress_export.runtime import SamplingParams

    text = _prompt_text(stdin, prompt, prompt_file)
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        mode=mode,
        refine_passes=refine_passes,
        num_draft_tokens=draft_tokens,
        stop=stop,
        ignore_eos=ignore_eos,
    )
    with _open_runtime(bundle, threads) as runtime:
        generation = runtime.generate(_prompt_ids(runtime, text, chat, system), params)
        if as_json:
            result = generation.result()
            fields = {
                "text": result.text,
                "token_ids": result.token_ids,
                "finish_reason": result.finish_reason,
            }
            click.echo(json.dumps({**fields, "stats": result.stats.to_dict()}, ensure_ascii=False))
            return
        for chunk in generation:
            click.echo(chunk.text, nl=False)
        click.echo()
        _report_stats(bundle, runtime, generation, mode or runtime.modes[-1])


def _open_runtime(bundle: Path, threads: int | None) -> Any:
    from xpress_export.manifest import read_manifest
    from xpress_export.runtime import Runtime

    total = read_manifest(bundle).num_bytes
    with ui.ConsoleProgress(err).step(f"Opening {bundle}", total=total) as advance:
        return Runtime.open(bundle, num_threads=threads, on_verify=advance)


def _prompt_text(stdin: str | None, prompt: str | None, prompt_file: Path | None) -> str:
    given = [source for source in (stdin, prompt, prompt_file) if source is not None]
    if len(given) != 1:
        raise click.UsageError("give the prompt once: --prompt TEXT, --prompt-file F, or - for standard input")
    if prompt is not None:
        return prompt
    where = "standard input" if prompt_file is None else str(prompt_file)
    try:
        data = sys.stdin.buffer.read() if prompt_file is None else prompt_file.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise click.UsageError(f"cannot read the prompt from {where}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the prompt in {where} is not UTF-8 (byte {error.start})") from error


def _prompt_ids(runtime: Any, text: str, chat: bool | None, system: str | None) -> list[int]:
    if chat is None:
        chat = runtime.codec.config.chat_template is not None
    if not chat:
        if system is not None:
            raise click.UsageError("--system needs the chat template; leave out --raw")
        return runtime.codec.encode(text)  # type: ignore[no-any-return]
    messages = [{"role": "system", "content": system}] if system is not None else []
    return runtime.codec.encode_chat([*messages, {"role": "user", "content": text}])  # type: ignore[no-any-return]


def _report_stats(bundle: Path, runtime: Any, generation: Any, mode: str) -> None:
    stats = generation.stats
    err.print(
        f"\n{stats.num_generated_tokens} tokens ({generation.finish_reason}), {stats.tokens_per_s:.1f} tokens/s, "
        f"tau {stats.tau:.2f}, mode {mode}, executed on CPU; bundle: {bundle}",
        style="dim",
    )
    draft = runtime.manifest.draft
    if mode != names.MODE_TARGET and draft is not None and not draft.trained:
        err.print(
            "The drafter of this bundle is untrained: it drafts nothing useful and only costs time.",
            style="yellow",
        )


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Also check every file against its recorded hash.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect(bundle: Path, verify: bool, as_json: bool) -> None:
    """Show what is in BUNDLE: models, graphs and their inputs and outputs, sizes, types, provenance."""
    from xpress_export.manifest import open_bundle, read_manifest

    manifest = open_bundle(bundle) if verify else read_manifest(bundle)
    if as_json:
        click.echo(manifest.to_json(), nl=False)
        return
    from xpress_export.inspection import describe

    for section in describe(manifest):
        out.print(section)
    if verify:
        out.print("every file matches its recorded hash")


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Report versions, providers and GPUs, what this machine can build and run, and what is missing."""
    from xpress_export.doctor import examine
    from xpress_export.inspection import describe_machine

    facts = examine()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for section in describe_machine(facts):
        out.print(section)


def main() -> NoReturn:
    """Entry point: every error of ours becomes one message and exit code 1."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        cli.main(standalone_mode=False)
        code = 0
    except click.exceptions.Exit as done:
        code = done.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        err.print("interrupted", style="yellow")
        code = 130
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stderr.close()
        code = 141
    except XpressExportError as error:
        err.print(f"[red]error:[/red] {_escape(str(error))}")
        code = 1
    except Exception as error:
        code = _internal_error(error)
    sys.exit(code)


def _internal_error(error: Exception) -> int:
    if logging.getLogger("xpress_export").isEnabledFor(logging.DEBUG):
        err.print_exception()
    err.print(
        f"[red]internal error:[/red] {_escape(f'{type(error).__name__}: {error}')}\n"
        "This is a defect of xpress-export. Run again with -vv for a traceback and report it."
    )
    return 1


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt
