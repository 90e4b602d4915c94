"""The target's answers are those of plain greedy decoding, and their hidden states those of its forward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from xpress_export.exporter.checkpoints import read_target
from xpress_export.training.answers import ChatTokenizer, make_data, read_prompts
from xpress_export.training.config import DataOptions
from xpress_export.training.errors import TrainingError
from xpress_export.training.store import ANSWERS, DataReader

TEXTS = ["draft", "the target verifies what the drafter drafts", "in one block at a time", "refine"]
FLOAT_TOLERANCE = 0.01  # stored as bfloat16


@pytest.fixture
def data_options(tiny_trio: Any, tmp_path: Path) -> DataOptions:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"source": "s", "prompt": text}) for text in TEXTS))
    return DataOptions(
        target=str(tiny_trio.target),
        prompts=(str(prompts),),
        out=str(tmp_path / "data"),
        target_layer_ids=(1, 0, -1, 2),
        max_new_tokens=20,
        wave=3,
    )


def test_answers_and_states_are_the_targets(tiny_trio: Any, data_options: DataOptions) -> None:
    result = make_data(data_options)
    target = read_target(str(tiny_trio.target))
    reader = DataReader((data_options.out,), target.digest)
    assert result.num_answers == len(TEXTS) == len(reader)
    tokenizer = ChatTokenizer(target)
    assert {a.prompt for a in reader.answers} == {tokenizer.encode(text) for text in TEXTS}
    for index, answer in enumerate(reader.answers):
        prompt = torch.tensor([answer.prompt])
        out = tiny_trio.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=list(tokenizer.stop_token_ids),
            pad_token_id=0,
        )[0]
        assert tuple(out.tolist()) == answer.prompt + answer.response
        with torch.no_grad():
            states = tiny_trio.model(out[None, :-1], output_hidden_states=True).hidden_states
        sample = reader.sample(index)
        assert sample.final_hidden is not None
        expected = torch.cat([states[tap + 1][0] for tap in (1, 0, -1, 2)], dim=-1)
        for found, wanted in ((sample.features, expected), (sample.final_hidden, states[-1][0])):
            assert (found.float() - wanted).abs().max() < FLOAT_TOLERANCE * wanted.abs().max()


def test_a_second_call_answers_only_what_is_missing(data_options: DataOptions) -> None:
    make_data(data_options)
    path = Path(data_options.out) / ANSWERS
    before = path.read_bytes()
    make_data(data_options)
    assert path.read_bytes() == before
    lines = before.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    make_data(data_options)
    assert sorted(path.read_bytes().splitlines(keepends=True)) == sorted(lines)


def test_sampled_answers_depend_on_the_seed(data_options: DataOptions, tmp_path: Path) -> None:
    from dataclasses import replace

    answers = []
    for seed in (1, 2):
        out = tmp_path / str(seed)
        make_data(replace(data_options, temperature=1.0, seed=seed, out=str(out)))
        answers.append((out / ANSWERS).read_text())
    assert answers[0] != answers[1]


def test_rows_without_a_prompt_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n{"text": "c"}\n')
    with pytest.raises(TrainingError, match="line 2"):
        list(read_prompts(path))
