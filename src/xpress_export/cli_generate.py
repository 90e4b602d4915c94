"""`xpress-export generate`: a prompt in, text out as it is committed, or one JSON object."""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from xpress_export import console as ui
from xpress_export import names
from xpress_export.cli_device import device_options, executed_on
from xpress_export.cli_precision import PRECISION
from xpress_export.precision import Precision
from xpress_export.progress import Advance

err = ui.make_console(stderr=True)
logger = logging.getLogger(__name__)
# What a terminal would obey rather than show, as the signs that Unicode has for it; tabs and line ends stay.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n"}
_VISIBLE |= {0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}


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


class _Bias(click.ParamType[tuple[int, float]]):
    """`ID=VALUE`: a token id and a number."""

    name = "bias"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        token, _, bias = value.partition("=")
        try:
            return int(token), float(bias)
        except ValueError:
            self.fail(f"{value!r} is not ID=VALUE, such as 42=-5", param, ctx)


def _sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """How a token is chosen; SamplingParams checks the values."""
    options = [
        click.option("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest."),
        click.option("--top-k", type=int, metavar="N", help="Sample among the N likeliest tokens."),
        click.option("--top-p", type=float, default=1.0, metavar="P", help="Sample among the likeliest that reach P."),
        click.option("--min-p", type=float, default=0.0, metavar="P", help="Leave out what is under P of the largest."),
        click.option("--seed", type=int, metavar="N", help="Same seed, same text, in every mode.  [default: drawn]"),
        click.option("--repetition-penalty", type=float, default=1.0, metavar="R", help="Above 1: repeat less."),
        click.option("--presence-penalty", type=float, default=0.0, metavar="X", help="Once per token used, -2 to 2."),
        click.option("--frequency-penalty", type=float, default=0.0, metavar="X", help="Per use of a token, -2 to 2."),
        click.option("--logit-bias", type=_Bias(), multiple=True, metavar="ID=X", help="Add X to a token's logit."),
        click.option(
            "--draft-sampling",
            type=click.Choice(["greedy", "sampled"]),
            default="greedy",
            help="Above temperature 0, propose the likeliest tokens or drawn ones.",
        ),
        click.option(
            "--logprobs", type=int, metavar="N", help="With --json: log-probabilities, and of N alternatives."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.command("generate")
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
    help="Plain decoding, drafter, or drafter and refiner; the text is the same.  [default: the fastest, as measured]",
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
    help="Draft tokens verified per step.  [default: adaptive; with --mode, all]",
)
@click.option("--stop", type=UTF8, multiple=True, metavar="S", help="End before this text; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Do not end at the model's stop tokens.")
@click.option("--stop-token-id", type=int, multiple=True, metavar="ID", help="End after this token; may be repeated.")
@_sampling_options
@PRECISION
@device_options
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="CPU threads.  [default: one per core]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of streaming.")
def generate_command(bundle: Path, **options: Any) -> None:
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
    draft_tokens: int | None,
    stop_token_id: tuple[int, ...],
    logit_bias: tuple[tuple[int, float], ...],
    precision: Precision,
    threads: int | None,
    device: str,
    backend: str,
    layout: str | None,
    max_draft_tokens: int | None,
    as_json: bool,
    **given: Any,
) -> None:
    from xpress_export.runtime import SamplingParams

    text = _prompt_text(stdin, prompt, prompt_file)
    if given["logprobs"] is not None and not as_json:
        raise click.UsageError("--logprobs needs --json, where they are printed")
    params = SamplingParams(
        num_draft_tokens=draft_tokens, stop_token_ids=stop_token_id, logit_bias=dict(logit_bias), **given
    )
    progress = ui.ConsoleProgress(err, transient=True)
    where = {"device": device, "backend": backend, "layout": layout, "max_draft_tokens": max_draft_tokens}
    with _open_runtime(bundle, progress, precision=precision, num_threads=threads, **where) as runtime:
        ids = _prompt_ids(runtime, text, chat, system)
        logger.debug("prompt token ids: %s", ids)
        generation = runtime.generate(ids, params)
        logger.info("the prompt has %d tokens, mode %s", len(ids), generation.stats.mode)
        chunks = _after_prefill(generation, progress)
        if as_json:
            _print_json(generation, chunks, progress.step("Generating", total=params.max_new_tokens))
        else:
            _stream(chunks)
            _report_stats(bundle, runtime, generation)


def _open_runtime(bundle: Path, progress: ui.ConsoleProgress, **options: Any) -> Any:
    from xpress_export.manifest import read_manifest
    from xpress_export.runtime import Runtime

    with progress.step("Opening the bundle", total=read_manifest(bundle).num_bytes) as advance:
        return Runtime.open(bundle, on_verify=advance, **options)


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
    if generation.logprobs:
        fields["logprobs"] = [asdict(entry) for entry in generation.logprobs]
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    ui.write(json.dumps({**fields, "stats": generation.stats.to_dict()}, ensure_ascii=not is_unicode) + "\n")


def _stream(chunks: Iterator[Any]) -> None:
    on_terminal = sys.stdout.isatty()
    try:
        for chunk in chunks:
            ui.write(chunk.text.translate(_VISIBLE) if on_terminal else chunk.text)
    finally:
        ui.write("\n")


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
    elif chat and runtime.codec.config.chat_template is None:
        raise click.UsageError("this model has no chat template; leave out --chat")
    if not chat:
        if system is not None:
            raise click.UsageError("--system needs the chat template; leave out --raw")
        return runtime.codec.encode(text)  # type: ignore[no-any-return]
    messages = [{"role": "system", "content": system}] if system is not None else []
    return runtime.codec.encode_chat([*messages, {"role": "user", "content": text}])  # type: ignore[no-any-return]


def _report_stats(bundle: Path, runtime: Any, generation: Any) -> None:
    stats = generation.stats
    why = "ended by itself" if generation.finish_reason == "stop" else "limit reached"
    speed = f", {stats.tokens_per_s:.1f} tokens/s, tau {stats.tau:.2f} (tokens per target step)"
    err.print(f"\n{stats.num_generated_tokens} tokens ({why}){speed if stats.num_verify_steps else ''}", style="dim")
    seed = "" if stats.seed is None else f"seed {stats.seed}, "
    err.print(f"mode {stats.mode}, {seed}executed on {executed_on(runtime.device)}, bundle {bundle}", style="dim")
    if stats.mode != names.MODE_TARGET:
        warn_untrained(runtime.manifest)


def warn_untrained(manifest: Any) -> None:
    if manifest.draft is not None and not manifest.draft.trained:
        err.print(
            "The drafter of this bundle is untrained: it drafts nothing useful and only costs time.", style="yellow"
        )
