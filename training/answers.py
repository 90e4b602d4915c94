"""Training data: the target's own answers to prompts, with the hidden states that produced them.

Greedy by default, since a drafter is judged by the target's own choices. Prompts go through the target's chat
template. Runs in waves of prompts of similar length; each finished wave is on disk, so a killed run continues.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xpress_export.exporter.drafter_checkpoint import default_target_layer_ids
from xpress_export.exporter.target_checkpoint import TargetCheckpoint, read_target
from xpress_export.exporter.tokenizer import TEXT_FILE, TOKENIZER_FILE, export_tokenizer
from xpress_export.progress import Progress, Silent
from xpress_export.training.config import DataOptions
from xpress_export.training.devices import COMPUTE_DTYPES, pick_device
from xpress_export.training.errors import TrainingError
from xpress_export.training.store import Answer, DataInfo, DataWriter
from xpress_export.training.target_runner import TargetRunner, load_target


@dataclass(frozen=True, kw_only=True)
class DataResult:
    """num_skipped: prompts longer than `max_prompt_tokens`."""

    folder: Path
    num_answers: int
    num_answer_tokens: int
    num_skipped: int


@dataclass(frozen=True)
class Prompt:
    source: str
    ids: tuple[int, ...]


class ChatTokenizer:
    """The target's tokenizer and chat template, for one user turn; without a template, the plain text."""

    def __init__(self, checkpoint: TargetCheckpoint) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from tokenizers import Tokenizer

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            info = export_tokenizer(checkpoint.folder_or_file, path, stop_token_ids=checkpoint.stop_token_ids)
            self._tokenizer = Tokenizer.from_file(str(path / TOKENIZER_FILE))
            self._text: dict[str, Any] = json.loads((path / TEXT_FILE).read_text(encoding="utf-8"))
        self.stop_token_ids = info.stop_token_ids
        template = self._text["chat_template"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(template) if template else None

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of the prompt that asks `text`."""
        if self._template is not None:
            messages = [{"role": "user", "content": text}]
            text = self._template.render(
                messages=messages, add_generation_prompt=True, enable_thinking=False, **self._text
            )
        return tuple(self._tokenizer.encode(text, add_special_tokens=self._template is None).ids)


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """(source, text) of each row: `prompt`, the first of `turns`, or the row itself if it is a string.

    source: the row's own, or the file's name.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        raise TrainingError(f"{path} cannot be read as UTF-8 text: {err}") from err
    found = [_prompt(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise TrainingError(f"{path} holds no prompts; each line is a JSON object with 'prompt' or 'turns'")
    return found


def _prompt(line: str, path: Path, number: int) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except ValueError as err:
        raise TrainingError(f"{path}, line {number} is not JSON ({err})") from err
    source, text = path.stem, row
    if isinstance(row, dict):
        source, text = str(row.get("source", source)), row.get("prompt") or (row.get("turns") or [None])[0]
    if not isinstance(text, str) or not text.strip():
        raise TrainingError(f"{path}, line {number}: neither 'prompt' nor 'turns' holds a text")
    return source, text


def make_data(options: DataOptions, progress: Progress | None = None) -> DataResult:
    """Answer every prompt that the folder does not hold yet."""
    progress = progress or Silent()
    device = pick_device()
    rows = [row for path in options.prompts for row in read_prompts(Path(path))[: options.limit]]
    with progress.step("Reading the target", expected_s=10):
        checkpoint = read_target(options.target)
        taps = options.target_layer_ids or default_target_layer_ids(checkpoint.config.num_layers, options.num_taps)
        target = load_target(checkpoint, taps, COMPUTE_DTYPES[options.precision], device)
        tokenizer = ChatTokenizer(checkpoint)
    prompts, num_skipped = _prompts(rows, options, tokenizer)
    writer = DataWriter(Path(options.out), _info(options, checkpoint, taps))
    done = {answer.prompt for answer in writer.answers}
    left = sorted((p for p in prompts if p.ids not in done), key=lambda p: len(p.ids))
    waves = [left[i : i + options.wave] for i in range(0, len(left), options.wave)]
    generator = torch.Generator(device).manual_seed(options.seed)
    with progress.step("Answering prompts", total=len(left)) as advance:
        for wave in _spread(waves):
            _answer(wave, TargetRunner(target), writer, options, tokenizer.stop_token_ids, generator)
            advance(len(wave))
    tokens = sum(len(answer.response) for answer in writer.answers)
    return DataResult(
        folder=Path(options.out),
        num_answers=len(writer.answers),
        num_answer_tokens=tokens,
        num_skipped=num_skipped,
    )


def _prompts(
    rows: Sequence[tuple[str, str]], options: DataOptions, tokenizer: ChatTokenizer
) -> tuple[list[Prompt], int]:
    """The different prompts that are short enough, and how many are not."""
    found = [Prompt(source, tokenizer.encode(text)) for source, text in rows]
    kept = [prompt for prompt in found if len(prompt.ids) <= options.max_prompt_tokens]
    if not kept:
        raise TrainingError(f"no prompt of {', '.join(options.prompts)} has at most {options.max_prompt_tokens} tokens")
    return list({prompt.ids: prompt for prompt in kept}.values()), len(found) - len(kept)


def _info(options: DataOptions, checkpoint: TargetCheckpoint, taps: tuple[int, ...]) -> DataInfo:
    hidden = checkpoint.config.hidden_size
    return DataInfo(
        target_digest=checkpoint.digest,
        target_layer_ids=taps,
        hidden_size=hidden,
        vocab_size=checkpoint.config.vocab_size,
        width=(len(taps) + 1) * hidden if options.store_features else 0,
    )


def _spread(waves: list[list[Prompt]]) -> list[list[Prompt]]:
    """Waves of all lengths early on, so that data cut short is still varied: every fourth one first."""
    return [wave for offset in range(4) for wave in waves[offset::4]]


@dataclass
class _Wave:
    """A wave in flight. responses, states: per prompt. live: prompts still in the runner's cache."""

    prompts: list[Prompt]
    responses: list[list[int]]
    states: list[list[Tensor]]
    live: list[int]

    def finished(self, index: int, stops: tuple[int, ...]) -> bool:
        return self.responses[index][-1] in stops

    def finished_answers(self) -> Iterator[tuple[Answer, Tensor]]:
        """Answers and their hidden states [num_rows, width]."""
        for prompt, response, states in zip(self.prompts, self.responses, self.states, strict=True):
            answer = Answer(source=prompt.source, prompt=prompt.ids, response=tuple(response))
            yield answer, torch.cat(states)[: answer.num_rows]


def _answer(
    prompts: list[Prompt],
    runner: TargetRunner,
    writer: DataWriter,
    options: DataOptions,
    stops: tuple[int, ...],
    generator: torch.Generator,
) -> None:
    """Answer one wave and write it. A sequence that has stopped is dropped from the batch once several have."""
    lengths = torch.tensor([len(p.ids) for p in prompts], device=generator.device)
    ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64, device=generator.device)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt.ids)] = torch.tensor(prompt.ids)
    states = runner.prefill(ids, ids.shape[1] + options.max_new_tokens)
    both = torch.cat((states.features, states.final), dim=-1)
    last = states.final[torch.arange(len(prompts)), lengths - 1]
    token = _pick(runner.target.lm_head(last), options.temperature, generator)
    wave = _Wave(
        prompts,
        [[t] for t in token.tolist()],
        [[b[: len(p.ids)]] for b, p in zip(both, prompts, strict=True)],
        list(range(len(prompts))),
    )
    position = lengths
    for _ in range(options.max_new_tokens - 1):
        unfinished = [row for row, index in enumerate(wave.live) if not wave.finished(index, stops)]
        if not unfinished:
            break
        if len(unfinished) <= 0.85 * len(wave.live):
            rows = torch.tensor(unfinished, device=token.device)
            runner.keep(rows)
            token, position, wave.live = token[rows], position[rows], [wave.live[row] for row in unfinished]
        states = runner.decode(token, position)
        token, position = (
            _pick(runner.target.lm_head(states.final), options.temperature, generator),
            position + 1,
        )
        _collect(wave, torch.cat((states.features, states.final), dim=-1), token.tolist(), stops)
    for answer, rows in wave.finished_answers():
        writer.append(answer, rows if options.store_features else None)


def _collect(wave: _Wave, states: Tensor, tokens: list[int], stops: tuple[int, ...]) -> None:
    """Append one decoded token, and the states of the one before it, to every unfinished answer."""
    for row, index in enumerate(wave.live):
        if not wave.finished(index, stops):
            wave.states[index].append(states[row].unsqueeze(0))
            wave.responses[index].append(tokens[row])


def _pick(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Next tokens int64 [B]: the argmax, or a draw at `temperature`."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    weights = torch.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(weights, 1, generator=generator).squeeze(-1)
