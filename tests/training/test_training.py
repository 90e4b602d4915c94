"""Whole runs on tiny models: resuming after a kill, what is written, data that continues, options that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from xpress_export.exporter.checkpoints import read_drafter, read_refiner, read_target
from xpress_export.training.api import (
    EvalOptions,
    evaluate_trio,
    shared_prefix,
    split,
    train_drafter,
    train_joint,
    train_refiner,
)
from xpress_export.training.config import (
    DrafterOptions,
    LossOptions,
    RefinerOptions,
    ReportOptions,
    RunOptions,
    TrainOptions,
    read_train_options,
)
from xpress_export.training.errors import TrainingError
from xpress_export.training.loop import METRICS, Sampler
from xpress_export.training.store import ANSWERS, FEATURES, DataReader, DataWriter, read_info

STEPS = 24


def options(trio: Any, data: Path, out: Path, **changes: Any) -> TrainOptions:
    """A run of a few steps over a reduced vocabulary."""
    return TrainOptions(
        target=str(trio.target),
        data=(str(data),),
        out=str(out),
        **{
            "drafter": DrafterOptions(
                intermediate_size=64, block_size=5, mask_token_id=317, draft_vocab_size=200, causal=True
            ),
            "refiner": RefinerOptions(rank=8),
            "loss": LossOptions(sampled_vocab=50),
            "run": RunOptions(steps=STEPS, sequences=2, anchors=4, warmup=2),
            "report": ReportOptions(held_out=3, every=STEPS // 2, checkpoint_every=STEPS // 4),
        }
        | changes,
    )


def test_the_folders_of_a_run_are_public_checkpoints(tiny_trio: Any, tiny_data: Path, tmp_path: Path) -> None:
    result = train_joint(options(tiny_trio, tiny_data, tmp_path / "run"))
    target = read_target(str(tiny_trio.target))
    drafter = read_drafter(str(result.drafter), target)
    assert drafter.config.draft_vocab_size == 200 and drafter.config.causal_layers == (True, True)
    assert drafter.weights.read("fc.weight").dtype == torch.float16
    refiner = read_refiner(str(result.refiner), target, drafter)
    assert (refiner.config.kind, refiner.config.rank, refiner.config.draft_vocab_size) == ("xpress", 8, 200)
    lines = [json.loads(line) for line in (tmp_path / "run" / METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines] == [STEPS // 2, STEPS]
    assert lines[-1]["loss"] < lines[0]["loss"] and len(lines[-1]["per_slot"]) == 4


def test_a_head_on_a_frozen_drafter_leaves_it_alone(tiny_trio: Any, tiny_data: Path, tmp_path: Path) -> None:
    base = train_drafter(options(tiny_trio, tiny_data, tmp_path / "base"))
    frozen = options(
        tiny_trio,
        tiny_data,
        tmp_path / "head",
        drafter=DrafterOptions(init=str(base.drafter)),
        refiner=RefinerOptions(kind="markov", rank=8),
    )
    result = train_refiner(frozen)
    before, after = (load_file(folder / "model.safetensors") for folder in (base.drafter, result.drafter))
    assert all(torch.equal(before[name], after[name]) for name in before)
    target = read_target(str(tiny_trio.target))
    assert read_refiner(str(result.refiner), target, read_drafter(str(result.drafter), target)).config.kind == "markov"
    with pytest.raises(TrainingError, match=r"drafter\.init"):
        train_refiner(options(tiny_trio, tiny_data, tmp_path / "none"))


def test_other_options_do_not_continue_a_run(tiny_trio: Any, tiny_data: Path, tmp_path: Path) -> None:
    run = options(tiny_trio, tiny_data, tmp_path / "run")
    train_drafter(run)
    assert train_drafter(run).loop.resumed_from == STEPS
    with pytest.raises(TrainingError, match="other options"):
        train_drafter(replace(run, run=replace(run.run, learning_rate=1.0)))


def test_every_epoch_sees_every_answer_once_on_any_number_of_processes() -> None:
    run = RunOptions(sequences=2, seed=5)
    alone = Sampler(12, run)
    ranks = [Sampler(12, run, rank, 3) for rank in range(3)]
    dealt = [i for step in range(2) for rank in ranks for i in rank.indices(step)]
    assert sorted(dealt) == list(range(12))
    assert dealt == [i for step in range(6) for i in alone.indices(step)]
    assert dealt != [i for step in range(6, 12) for i in alone.indices(step)]


def test_held_out_answers_are_never_trained_on() -> None:
    held, training = split(100, 7)
    assert len(held) == 7 and sorted(held + training) == list(range(100))
    assert split(3, 7)[1] and split(5, 0) == ([], [0, 1, 2, 3, 4])


def test_data_cut_short_continues(tiny_data: Path, tmp_path: Path) -> None:
    """A half-written answer at the end of either file is cut off."""
    info = read_info(tiny_data)
    reader = DataReader((str(tiny_data),), info.target_digest)
    writer = DataWriter(tmp_path, info)
    for i in range(3):
        sample = reader.sample(i)
        assert sample.final_hidden is not None
        writer.append(reader.answers[i], torch.cat((sample.features, sample.final_hidden), dim=1))
    with (tmp_path / FEATURES).open("ab") as stream:
        stream.write(b"half an answer")
    with (tmp_path / ANSWERS).open("a") as stream:
        stream.write('{"source": "half')
    assert DataWriter(tmp_path, info).answers == reader.answers[:3]
    again = DataReader((str(tmp_path),), info.target_digest)
    assert len(again) == 3 and torch.equal(again.sample(2).features, reader.sample(2).features)


def test_data_of_another_target_is_refused(tiny_data: Path) -> None:
    with pytest.raises(TrainingError, match="another target"):
        DataReader((str(tiny_data),), "0" * 64)


def test_evaluation_of_a_trio(tiny_trio: Any, tmp_path: Path) -> None:
    """One pass per slot is the most a head can do, so more passes change nothing; K = 0 is the bare drafter."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "draft and verify"}, {"turns": ["refine the block", "again"]}]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    report = evaluate_trio(
        EvalOptions(
            target=str(tiny_trio.target),
            drafter=str(tiny_trio.drafter),
            refiner=str(tiny_trio.refiner),
            prompts=(str(prompts),),
            work=str(tmp_path / "work"),
            max_new_tokens=12,
            passes=(0, None, 9),
        )
    ).as_json()
    assert list(report) == ["dflash", "xpress", "xpress K=0", "xpress K=7", "xpress K=9"]
    assert report["dflash"] == report["xpress K=0"]
    assert report["xpress K=7"] == report["xpress K=9"]
    assert report["dflash"]["prompts"]["num_answers"] == 2 and report["dflash"]["mean_tau"] >= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nstepz = 3", "unknown key stepz"),
        ("[walk]\nsteps = 3", r"unknown section \[walk\]"),
        ("[run]\nsteps = 'many'", "steps should be of type int, got 'many'"),
        ("[run]\nsteps = true", "steps should be of type int"),
        ("[run]\noptimizer = 'sgd'", "optimizer must be one of"),
        ("[run]\nfeature_dropout = 1.0", "feature_dropout must be at least 0 and below 1"),
        ("[drafter]\nblock_size = 1", "leaves no slot"),
        ("steps = ", "not a readable TOML file"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(TrainingError, match=message):
        read_train_options(path, "target", ("data",), "out")


def test_the_guides_configurations_are_some(tmp_path: Path) -> None:
    guide = Path(__file__).parents[2] / "docs" / "training.md"
    blocks = [part.split("```")[0] for part in guide.read_text(encoding="utf-8").split("```toml\n")[1:]]
    path, found = tmp_path / "run.toml", []
    for block in blocks:
        path.write_text(block)
        found.append(read_train_options(path, "target", ("data",), "out"))
    drafter, joint = found
    assert drafter.drafter.first_slot == 0 and joint.drafter.init == "runs/drafter/drafter"


def test_options_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[drafter]\ntarget_layer_ids = [1, 4]\ndraft_vocab_size = 9\n[run]\nlearning_rate = 1\n")
    read = read_train_options(path, "target", ("data",), "out")
    assert read.drafter.target_layer_ids == (1, 4) and read.drafter.draft_vocab_size == 9
    assert read.run.learning_rate == 1.0 and read.loss == LossOptions()


def test_answers_of_similar_length_share_a_step() -> None:
    """Still every answer once per epoch, on any number of processes, and the last step of an epoch completed."""
    run = RunOptions(sequences=2, seed=5)
    lengths = [10 * (i % 7) + i for i in range(50)]
    ranks = [Sampler(50, run, rank, 2, lengths) for rank in range(2)]
    dealt = [[i for rank in ranks for i in rank.indices(step)] for step in range(25)]  # two epochs of 12.5 steps
    flat = [i for step in dealt for i in step]
    assert sorted(flat[:50]) == sorted(flat[50:]) == list(range(50)) and flat[:50] != flat[50:]
    spread = [max(lengths[i] for i in step) - min(lengths[i] for i in step) for step in dealt]
    plain = Sampler(50, RunOptions(sequences=4, seed=5))
    loose = [[lengths[i] for i in plain.indices(step)] for step in range(25)]
    assert sum(spread) < sum(max(step) - min(step) for step in loose) / 2


def test_anchors_in_prompts_leave_out_what_all_prompts_share(tiny_trio: Any, tiny_data: Path) -> None:
    reader = DataReader((str(tiny_data),), read_info(tiny_data).target_digest)
    assert shared_prefix(reader) == 0
    reader.answers = [replace(a, prompt=(7, 7, 7, *a.prompt)) for a in reader.answers]
    assert shared_prefix(reader) == 3
