"""What the command line calls: data, three kinds of training, evaluation.

    make_data(DataOptions)           the target's own answers          answers.py
    train_drafter(TrainOptions)      a dFlash drafter                  out/drafter
    train_refiner(TrainOptions)      a head on a frozen drafter        out/refiner, out/drafter as it was
    train_joint(TrainOptions)        both together                     out/drafter, out/refiner
    evaluate_trio(EvalOptions)       tau of a trio on prompts          a table

Training is resumable: the same call on the same `out` goes on from the last checkpoint.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xpress_export.exporter.drafter_checkpoint import read_drafter
from xpress_export.exporter.modules import Drafter, Refiner
from xpress_export.exporter.refiner_checkpoint import read_refiner
from xpress_export.exporter.target_checkpoint import TargetCheckpoint, read_target
from xpress_export.progress import Progress, Silent
from xpress_export.training.answers import make_data
from xpress_export.training.blocks import Sample
from xpress_export.training.config import DataOptions, TrainOptions, read_train_options
from xpress_export.training.devices import COMPUTE_DTYPES, pick_device
from xpress_export.training.errors import TrainingError
from xpress_export.training.evaluate import Tally, as_json, evaluate
from xpress_export.training.loop import Loop, LoopResult
from xpress_export.training.models import (
    bigram_factors,
    drafter_config,
    frequent_ids,
    load_drafter,
    load_refiner,
    new_drafter,
    new_refiner,
    refiner_config,
    save_drafter,
    save_refiner,
    unused_id,
)
from xpress_export.training.objective import Objective
from xpress_export.training.store import DataReader
from xpress_export.training.target_runner import TargetRunner, load_target

__all__ = [
    "DataOptions",
    "EvalOptions",
    "EvalReport",
    "TrainOptions",
    "TrainResult",
    "evaluate_trio",
    "make_data",
    "read_train_options",
    "train_drafter",
    "train_joint",
    "train_refiner",
]

DRAFTER_FOLDER, REFINER_FOLDER = "drafter", "refiner"


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """drafter, refiner: folders in the public formats. held_out: the last measurement, as `evaluate.as_json`."""

    drafter: Path
    refiner: Path | None
    loop: LoopResult
    held_out: dict[str, Any]


def train_drafter(options: TrainOptions, progress: Progress | None = None) -> TrainResult:
    """Train a drafter alone."""
    return _train(options, progress or Silent(), with_head=False, train_drafter=True)


def train_refiner(options: TrainOptions, progress: Progress | None = None) -> TrainResult:
    """Train a head on the frozen drafter `options.drafter.init`."""
    if options.drafter.init is None:
        raise TrainingError("a head is trained on an existing drafter; set drafter.init to its folder")
    return _train(options, progress or Silent(), with_head=True, train_drafter=False)


def train_joint(options: TrainOptions, progress: Progress | None = None) -> TrainResult:
    """Train drafter and head together, the bare drafter's loss weighted by loss.anchor_start..anchor_end."""
    return _train(options, progress or Silent(), with_head=True, train_drafter=True)


def _train(options: TrainOptions, progress: Progress, *, with_head: bool, train_drafter: bool) -> TrainResult:
    with progress.step("Reading models and data", expected_s=20):
        target = read_target(options.target)
        data = DataReader(options.data, target.digest)
        drafter = _drafter(options, target, data)
        refiner = _refiner(options, drafter, data, target) if with_head else None
        sample = _sampler(data, target)
    held_out, training = split(len(data), options.report.held_out)
    objective = Objective(
        drafter,
        refiner,
        options.loss,
        token_counts=draft_counts(drafter, data),
        train_drafter=train_drafter,
        dtype=COMPUTE_DTYPES[options.run.precision],
    )

    def measure() -> dict[str, Any]:
        samples = ((data.answers[i].source, sample(i)) for i in held_out)
        return as_json(evaluate(drafter, inference_refiner(objective), samples))

    loop = Loop(
        options,
        objective,
        lengths=[data.answers[i].num_rows for i in training],
        first_anchor=shared_prefix(data),
        sample=lambda i: sample(training[i]),
        measure=measure,
        progress=progress,
    )
    result = loop.run()
    folders = _save(options, objective)
    return TrainResult(drafter=folders[0], refiner=folders[1], loop=result, held_out=measure())


def split(count: int, wanted: int) -> tuple[list[int], list[int]]:
    """(held out, training) indices: `wanted` answers at equal distances are kept out."""
    wanted = min(wanted, count // 2)
    held = {i * count // wanted for i in range(wanted)} if wanted else set()
    return sorted(held), [i for i in range(count) if i not in held]


def shared_prefix(data: DataReader) -> int:
    """Tokens that all prompts begin with, such as a system prompt: nothing to learn from again and again."""
    prompts = [answer.prompt for answer in data.answers]
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False)))


def token_counts(data: DataReader, vocab_size: int) -> Tensor:
    """How often each target id occurs in the answers, int64 [V]; prompts count a fifth."""
    answers = torch.cat([torch.tensor(a.response) for a in data.answers])
    prompts = torch.cat([torch.tensor(a.prompt) for a in data.answers])
    return 5 * torch.bincount(answers, minlength=vocab_size) + torch.bincount(prompts, minlength=vocab_size)


def draft_counts(drafter: Drafter, data: DataReader) -> Tensor:
    """The same for the rows of the drafter's head, int64 [Vd]."""
    counts = token_counts(data, drafter.config.decoder.vocab_size)
    return counts if drafter.vocab.target_ids is None else counts[drafter.vocab.target_ids]


def inference_refiner(objective: Objective) -> Refiner | None:
    """The objective's head, whole again (its W2 is the loss's while training)."""
    if objective.refiner is None:
        return None
    refiner = Refiner(objective.refiner.config, objective.refiner.first_slot)
    refiner.vocab.target_ids = objective.refiner.vocab.target_ids
    refiner.load_state_dict(objective.refiner_state())
    return refiner.to(objective.drafter.norm.weight.device)


def _drafter(options: TrainOptions, target: TargetCheckpoint, data: DataReader) -> Drafter:
    if options.drafter.init is not None:
        checkpoint = read_drafter(options.drafter.init, target)
        if checkpoint.config.target_layer_ids != data.target_layer_ids:
            raise TrainingError(
                f"the data taps layers {list(data.target_layer_ids)} but the drafter reads "
                f"{list(checkpoint.config.target_layer_ids)}; make the data with the drafter's"
            )
        return load_drafter(checkpoint, target)
    wanted = options.drafter.target_layer_ids
    if wanted and wanted != data.target_layer_ids:
        raise TrainingError(f"the data taps layers {list(data.target_layer_ids)}, not {list(wanted)}")
    counts = token_counts(data, target.config.vocab_size)
    mask = options.drafter.mask_token_id
    mask = unused_id(counts) if mask is None else mask
    config = drafter_config(options.drafter, target.config, data.target_layer_ids, mask)
    ids = frequent_ids(counts, config.draft_vocab_size)
    return new_drafter(config, target, ids, options.run.seed)


def _refiner(options: TrainOptions, drafter: Drafter, data: DataReader, target: TargetCheckpoint) -> Refiner:
    if options.refiner.init is not None:
        assert options.drafter.init is not None, "a head goes on with the drafter it was trained with"
        base = read_drafter(options.drafter.init, target)
        return load_refiner(read_refiner(options.refiner.init, target, base), base)
    config = refiner_config(options.refiner, drafter.config)
    ids = drafter.vocab.target_ids
    bigrams = None
    if options.refiner.bigram_init:
        place = torch.full((config.vocab_size,), -1)
        place[torch.arange(config.vocab_size) if ids is None else ids] = torch.arange(config.draft_vocab_size)
        responses = (answer.response for answer in data.answers)
        scale = options.refiner.bigram_scale
        bigrams = bigram_factors(responses, place, config.draft_vocab_size, config.rank, scale)
    return new_refiner(config, drafter.config.first_slot, ids, options.run.seed + 1, bigrams)


def _sampler(data: DataReader, target: TargetCheckpoint) -> Callable[[int], Sample]:
    """Answers by index, with stored hidden states or ones computed when asked for."""
    if data.has_features:
        return data.sample
    device = pick_device()
    runner = TargetRunner(load_target(target, data.target_layer_ids, torch.float32, device))

    def sample(index: int) -> Sample:
        answer = data.answers[index]
        tokens = torch.tensor(answer.prompt + answer.response)
        states = runner.prefill(tokens[:-1].unsqueeze(0).to(device))
        features, final = states.features[0].cpu(), states.final[0].cpu()
        return Sample(tokens=tokens, num_prompt=len(answer.prompt), features=features, final_hidden=final)

    return sample


def _save(options: TrainOptions, objective: Objective) -> tuple[Path, Path | None]:
    """Write the run's models; a drafter that was only read is copied as it is."""
    out, drafter = Path(options.out), objective.drafter
    folder = out / DRAFTER_FOLDER
    if objective.train_drafter:
        save_drafter(folder, drafter, options.drafter.rope_theta)
    elif options.drafter.init is not None and not folder.exists():
        shutil.copytree(options.drafter.init, folder)
    if objective.refiner is None:
        return folder, None
    config, state = objective.refiner.config, objective.refiner_state()
    save_refiner(out / REFINER_FOLDER, config, state, drafter.config.first_slot)
    return folder, out / REFINER_FOLDER


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """A trio and prompts to measure it on. work: folder for the target's answers, made once and reused.

    modes: of dflash, markov, xpress; None: those the trio has. passes: Jacobi passes of the head to report beside
    the checkpoint's own number, each a line; None stands for one per draft token.
    block_size: slots to draft if fewer than the drafter has.
    """

    target: str
    drafter: str
    refiner: str | None = None
    prompts: tuple[str, ...] = ()
    work: str
    limit: int | None = 64
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    modes: tuple[str, ...] | None = None
    passes: tuple[int | None, ...] = ()
    block_size: int | None = None
    wave: int = 32


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """tallies: by arm: `dflash`, `xpress` (or `markov`), and for each further number of passes `xpress K=...`."""

    tallies: dict[str, Tally]

    def as_json(self) -> dict[str, Any]:
        return {mode: as_json(tally) for mode, tally in self.tallies.items()}


def evaluate_trio(options: EvalOptions, progress: Progress | None = None) -> EvalReport:
    """tau of the bare drafter and of the head, on the target's own answers to the prompts of each file."""
    progress = progress or Silent()
    target = read_target(options.target)
    base = read_drafter(options.drafter, target)
    drafter = load_drafter(base, target)
    refiner = None
    if options.refiner is not None:
        refiner = load_refiner(read_refiner(options.refiner, target, base), base)
    samples = _eval_samples(options, target, base.config.target_layer_ids, progress)
    size = options.block_size or base.config.block_size
    settings = _eval_settings(options, refiner, size - base.config.first_slot)
    tallies = {}
    with progress.step("Drafting", total=len(settings) * len(samples)) as advance:
        for name, head, num_passes in settings:
            tally = Tally()
            for sample in samples:
                found = evaluate(drafter, head, [sample], num_passes=num_passes, block_size=size)
                tally.walks += found.walks
                advance(1)
            tallies[name] = tally
    return EvalReport(tallies=tallies)


def _eval_settings(
    options: EvalOptions, refiner: Refiner | None, num_drafts: int
) -> list[tuple[str, Refiner | None, int]]:
    """(label, head, passes) of every arm."""
    settings: list[tuple[str, Refiner | None, int]] = [("dflash", None, 0)]
    if refiner is not None:
        kind = refiner.config.kind
        settings.append((kind, refiner, min(refiner.config.num_passes, num_drafts)))
        sweep = [num_drafts if k is None else k for k in options.passes]
        settings += [(f"{kind} K={k}", refiner, k) for k in sweep]
    if options.modes is None:
        return settings
    return [setting for setting in settings if setting[0].split()[0] in options.modes]


def _eval_samples(
    options: EvalOptions, target: TargetCheckpoint, taps: tuple[int, ...], progress: Progress
) -> list[tuple[str, Sample]]:
    """The target's answers (float32), one data folder per prompts file, read back with their hidden states."""
    found: list[tuple[str, Sample]] = []
    for path in options.prompts:
        folder = Path(options.work) / Path(path).stem
        make_data(_data_options(options, path, str(folder), taps), progress)
        data = DataReader((str(folder),), target.digest)
        sample = _sampler(data, target)
        found += [(Path(path).stem, sample(i)) for i in range(len(data))]
    return [(source, replace(s, final_hidden=None)) for source, s in found]


def _data_options(options: EvalOptions, path: str, out: str, taps: tuple[int, ...]) -> DataOptions:
    return DataOptions(
        target=options.target,
        prompts=(path,),
        out=out,
        target_layer_ids=taps,
        max_prompt_tokens=1024,
        max_new_tokens=options.max_new_tokens + 1,  # the first token is the prefill's, not a draft's
        temperature=options.temperature,
        seed=options.seed,
        limit=options.limit,
        wave=options.wave,
    )
