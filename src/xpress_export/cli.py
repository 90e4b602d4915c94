"""The command line: parse, call one function, print. Heavy imports stay inside the command that needs them.

Results go to stdout, progress and logs to stderr. Exit 0: done; 1: an error of ours, one message, no traceback;
2: usage; 130: interrupted by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import io
import itertools
import json
import logging
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from rich.text import Text

from xpress_export import console as ui
from xpress_export import names, platforms, presets
from xpress_export.cli_eval import evaluate_command
from xpress_export.errors import XpressExportError
from xpress_export.progress import Advance

err = ui.make_console(stderr=True)
out = ui.make_console()
logger = logging.getLogger(__name__)
Command = TypeVar("Command", bound=Callable[..., Any])

PROGRAM = "xpress-export"
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True}
# What a terminal would obey rather than show, as the signs that Unicode has for it; tabs and line ends stay.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_VISIBLE |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


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

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        cmd.params.append(_verbose_option())
        super().add_command(cmd, name)


class _Utf8(click.ParamType[str]):
    """Text; an argument of other bytes than UTF-8 is refused."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            self.fail("is not UTF-8", param, ctx)
        return value


UTF8 = _Utf8()


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
            type=click.Choice(sorted(platforms.PLATFORMS)),
            default="cpu",
            metavar="P",
            help="Where the bundle is to run.",
        ),
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
    """Build a bundle from checkpoints.

    Goes all the way from checkpoints to what the platform runs. A bundle that is already there and still valid is
    reused; an interrupted build leaves nothing behind.
    """
    _export(**options)


@cli.command()
@build_options
def export(**options: Any) -> None:
    """Run only the first stage of `build`.

    It turns checkpoints into ONNX graphs and checks those against the models.
    """
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
    platforms.require(platform, precision)
    if (target is None) == (preset is None):
        raise click.UsageError("give either --target (with --drafter and --refiner) or --preset")
    if preset is not None and (drafter or refiner):
        raise click.UsageError("--preset brings its own drafter and refiner; leave --drafter and --refiner out")
    if refiner is not None and drafter is None:
        raise click.UsageError("--refiner corrects a drafter's block: give --drafter too")
    sources = presets.PRESETS[preset].sources() if preset else dict(target=target, drafter=drafter, refiner=refiner)
    progress = ui.ConsoleProgress(err)
    with progress.step("Loading PyTorch and transformers", expected_s=6):
        from xpress_export.exporter import export as exporter
    options = exporter.ExportOptions(
        **sources,
        preset=preset,
        platform=platform,
        precision=precision,
        max_context=max_context,
        with_logits=logits,
    )
    done = exporter.export(options, out, progress)
    _report_bundle(out, done.manifest, done.reused)


def _report_bundle(folder: Path, manifest: Any, reused: bool) -> None:
    from xpress_export.inspection import parity_table

    state = "is valid and was reused" if reused else "built"
    models = " + ".join(manifest.graphs)
    out.print(f"bundle {folder} {state}: {models}, {manifest.precision}, {ui.human_bytes(manifest.num_bytes)}")
    if not reused:
        out.print()
        out.print(parity_table(manifest))
    _warn_untrained(manifest)


def _warn_untrained(manifest: Any) -> None:
    if manifest.draft is not None and not manifest.draft.trained:
        err.print(
            "The drafter of this bundle is untrained: it drafts nothing useful and only costs time.", style="yellow"
        )


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("stdin", required=False, type=click.Choice(["-"]), metavar="[-]")
@click.option("--prompt", type=UTF8, metavar="TEXT", help="The prompt.")
@click.option("--prompt-file", type=click.Path(path_type=Path), metavar="F", help="Read the prompt from a UTF-8 file.")
@click.option(
    "--chat/--raw",
    default=None,
    help="Apply the chat template, or continue the text as it is.  [default: chat if the model has a template]",
)
@click.option("--system", type=UTF8, metavar="TEXT", help="System message, with the chat template.")
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
@click.option("--stop", type=UTF8, multiple=True, metavar="S", help="End before this text; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Do not end at the model's stop tokens.")
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads.  [default: one per core]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of streaming.")
def generate(bundle: Path, **options: Any) -> None:
    """Generate text from a bundle.

    The text appears as its tokens are committed. Give the prompt as --prompt, as --prompt-file, or as `-` to read it
    from standard input.
    """
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
    progress = ui.ConsoleProgress(err, transient=True)
    with _open_runtime(bundle, threads, progress) as runtime:
        ids = _prompt_ids(runtime, text, chat, system)
        logger.info("the prompt has %d tokens, mode %s", len(ids), mode or runtime.modes[-1])
        logger.debug("prompt token ids: %s", ids)
        generation = runtime.generate(ids, params)
        chunks = _after_prefill(generation, progress)
        if as_json:
            _print_json(generation, chunks, progress.step("Generating", total=max_new_tokens))
        else:
            _stream(chunks)
            _report_stats(bundle, runtime, generation, mode or runtime.modes[-1])


def _open_runtime(bundle: Path, threads: int | None, progress: ui.ConsoleProgress) -> Any:
    from xpress_export.manifest import read_manifest
    from xpress_export.runtime import Runtime

    with progress.step("Opening the bundle", total=read_manifest(bundle).num_bytes) as advance:
        return Runtime.open(bundle, num_threads=threads, on_verify=advance)


def _after_prefill(generation: Any, progress: ui.ConsoleProgress) -> Iterator[Any]:
    """The chunks of `generation`, once the prompt is read."""
    stats = generation.stats
    with progress.step("Reading the prompt", stats.num_prompt_tokens, count=lambda: stats.num_prefilled_tokens):
        first = next(generation)
    return itertools.chain([first], generation)


def _print_json(generation: Any, chunks: Iterator[Any], step: AbstractContextManager[Advance]) -> None:
    with step as advance:
        for chunk in chunks:
            advance(len(chunk.token_ids))
    fields = {"text": generation.text, "token_ids": generation.token_ids, "finish_reason": generation.finish_reason}
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    _write(json.dumps({**fields, "stats": generation.stats.to_dict()}, ensure_ascii=not is_unicode) + "\n")


def _stream(chunks: Iterator[Any]) -> None:
    on_terminal = sys.stdout.isatty()
    try:
        for chunk in chunks:
            _write(chunk.text.translate(_VISIBLE) if on_terminal else chunk.text)
    finally:
        _write("\n")


def _write(text: str) -> None:
    """Result text as it is; `click.echo` would drop what looks like a colour."""
    sys.stdout.write(text)
    sys.stdout.flush()


def _prompt_text(stdin: str | None, prompt: str | None, prompt_file: Path | None) -> str:
    given = [source for source in (stdin, prompt, prompt_file) if source is not None]
    if len(given) != 1:
        raise click.UsageError("give the prompt once: --prompt TEXT, --prompt-file F, or - for standard input")
    text, where = prompt, "the command line"
    if text is None:
        where = "standard input" if prompt_file is None else str(prompt_file)
        text = _read_prompt(prompt_file, where)
    if not text:
        raise click.UsageError(f"the prompt from {where} is empty")
    return text


def _read_prompt(file: Path | None, where: str) -> str:
    if file is None and sys.stdin.isatty():
        err.print("Type the prompt, then Enter and Ctrl-D.", style="dim")
    try:
        data = sys.stdin.buffer.read() if file is None else file.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise click.UsageError(f"cannot read the prompt from {where}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the prompt from {where} is not UTF-8 (byte {error.start})") from error


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
    why = "ended by itself" if generation.finish_reason == "stop" else "limit reached"
    speed = f", {stats.tokens_per_s:.1f} tokens/s, tau {stats.tau:.2f} (tokens per target step)"
    err.print(f"\n{stats.num_generated_tokens} tokens ({why}){speed if stats.num_verify_steps else ''}", style="dim")
    err.print(f"mode {mode}, executed on CPU, bundle {bundle}", style="dim")
    if mode != names.MODE_TARGET:
        _warn_untrained(runtime.manifest)


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Also check every file against its recorded hash.")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def inspect(bundle: Path, verify: bool, as_json: bool) -> None:
    """Show what is in a bundle.

    Its models, graphs with inputs and outputs, sizes, types, and where all of it comes from.
    """
    from xpress_export.manifest import read_manifest, verify_files

    manifest = read_manifest(bundle)
    if verify:
        with ui.ConsoleProgress(err, transient=True).step("Checking files", total=manifest.num_bytes) as advance:
            verify_files(bundle, manifest, advance)
    if as_json:
        _write(manifest.to_json())
        return
    from xpress_export.inspection import describe

    for section in describe(manifest):
        out.print(section)
    if verify:
        out.print("\nevery file matches its recorded hash")


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> None:
    """Show what this machine can build and run.

    Versions, providers and GPUs, what is missing, and the command that adds it.
    """
    from xpress_export.doctor import examine
    from xpress_export.inspection import describe_machine

    facts = examine()
    if as_json:
        _write(json.dumps(facts, indent=2) + "\n")
        return
    for section in describe_machine(facts):
        out.print(section)


cli.add_command(evaluate_command)


def main() -> NoReturn:
    """Entry point: every error of ours becomes one message and exit code 1."""
    signal.signal(signal.SIGTERM, _interrupt)
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
