"""The train loop: the same for drafter, head and both, on the CPU, one GPU, or many through `accelerate`.

Which answers and anchors a step sees is a function of (seed, step, process) alone, so a checkpoint needs no state
of random generators: a run that is killed and started again ends with the weights of one that was not.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xpress_export.errors import MissingDependencyError
from xpress_export.progress import Progress
from xpress_export.training.blocks import BlockBatch, Sample, build_batch, draw_anchors, drop_features
from xpress_export.training.config import RunOptions, TrainOptions
from xpress_export.training.devices import COMPUTE_DTYPES
from xpress_export.training.errors import TrainingError
from xpress_export.training.objective import Objective, StepLoss
from xpress_export.training.optim import Muon, cosine_rate, stable_rate

CHECKPOINT, METRICS = "checkpoint.pt", "metrics.jsonl"
VECTOR_RATE = 1.5
"""Learning rate of norms relative to that of matrices: their entries have to move by about one."""

WINDOW = 8
"""Steps within which answers are sorted by length."""

logger = logging.getLogger(__name__)


class Sampler:
    """Which training answers, and which anchors in them, belong to a step.

    lengths: tokens of each answer; with them a step gets answers of similar length, which wastes less on padding.
    """

    def __init__(
        self, count: int, run: RunOptions, rank: int = 0, world: int = 1, lengths: Sequence[int] | None = None
    ) -> None:
        self._count, self._run, self._rank, self._world = count, run, rank, world
        self._lengths = None if lengths is None else torch.tensor(lengths)
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def indices(self, step: int) -> list[int]:
        """Answers of this process at `step`: every epoch is one permutation, dealt out in turn."""
        first = (step * self._world + self._rank) * self._run.sequences
        return [self._at(i) for i in range(first, first + self._run.sequences)]

    def generator(self, step: int) -> torch.Generator:
        """Source of the step's anchors."""
        return _generator(self._run.seed, 1 + step * self._world + self._rank)

    def _at(self, position: int) -> int:
        epoch, offset = divmod(position, self._count)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = self._deal(epoch, _generator(self._run.seed, -1 - epoch))
        return int(self._order[offset])

    def _deal(self, epoch: int, generator: torch.Generator) -> Tensor:
        """A permutation of all answers; within WINDOW steps of it, those of similar length share a step."""
        order = torch.randperm(self._count, generator=generator)
        if self._lengths is None:
            return order
        size = self._run.sequences * self._world
        begun = -epoch * self._count % size  # answers that complete the step which the epoch before began
        steps = []
        for start in range(begun, self._count, WINDOW * size):
            window = order[start : start + WINDOW * size]
            window = window[self._lengths[window].argsort(stable=True)]
            steps += [window[i : i + size] for i in range(0, len(window), size)]
        full, rest = [s for s in steps if len(s) == size], [s for s in steps if len(s) < size]
        shuffled = [full[i] for i in torch.randperm(len(full), generator=generator)]
        return torch.cat((order[:begun], *shuffled, *rest))


def _generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + stream) % 2**63)


def make_optimizers(objective: Objective, run: RunOptions) -> list[torch.optim.Optimizer]:
    """Muon for the drafter's matrices if asked for; AdamW for the rest, the head with its own learning rate."""
    named = [(name, p) for name, p in objective.named_parameters() if p.requires_grad]
    head = [p for name, p in named if name.startswith(("refiner.", "w2"))]
    body = [p for name, p in named if not name.startswith(("refiner.", "w2"))]
    matrices, vectors = [p for p in body if p.dim() == 2], [p for p in body if p.dim() < 2]
    scale = (run.refiner_learning_rate or run.learning_rate) / run.learning_rate
    groups = [{"params": vectors, "scale": VECTOR_RATE}, {"params": head, "scale": scale}]
    optimizers: list[torch.optim.Optimizer] = []
    if run.optimizer == "muon" and matrices:
        optimizers.append(Muon(matrices, weight_decay=run.weight_decay, dtype=COMPUTE_DTYPES[run.precision]))
    else:
        groups.append({"params": matrices, "scale": 1.0})
    groups = [group for group in groups if group["params"]]
    if groups:
        optimizers.append(torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=run.weight_decay))
    return optimizers


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """steps: done in all. seconds: spent in this call. resumed_from: 0 for a fresh run."""

    steps: int
    seconds: float
    resumed_from: int


@dataclass
class Loop:
    """One run. lengths: tokens of each training answer. sample: training answer by index.

    first_anchor: earliest anchor in a prompt. measure: tau on held-out answers, for the report.
    """

    options: TrainOptions
    objective: Objective
    lengths: Sequence[int]
    first_anchor: int
    sample: Callable[[int], Sample]
    measure: Callable[[], dict[str, Any]]
    progress: Progress

    def run(self) -> LoopResult:
        """Train up to `run.steps`, going on from the run's checkpoint if there is one."""
        accelerator = _accelerator()
        out, run = Path(self.options.out), self.options.run
        out.mkdir(parents=True, exist_ok=True)
        optimizers = make_optimizers(self.objective, run)
        start = self._resume(out, optimizers)
        model = accelerator.prepare(self.objective.to(accelerator.device))
        rank, world = accelerator.process_index, accelerator.num_processes
        sampler = Sampler(len(self.lengths), run, rank, world, self.lengths)
        began = time.monotonic()
        with self.progress.step("Training", total=run.steps - start) as advance:
            for step in range(start, run.steps):
                loss = self._train_step(step, model, optimizers, sampler, accelerator)
                advance(1)
                if accelerator.is_main_process:
                    self._report(step, loss, time.monotonic() - began, step + 1 - start)
                    if (step + 1) % self.options.report.checkpoint_every == 0 or step + 1 == run.steps:
                        self._save(out, step + 1, optimizers)
        return LoopResult(steps=run.steps, seconds=time.monotonic() - began, resumed_from=start)

    def _train_step(
        self,
        step: int,
        model: Any,
        optimizers: list[torch.optim.Optimizer],
        sampler: Sampler,
        accelerator: Any,
    ) -> StepLoss:
        run, loss_options = self.options.run, self.options.loss
        batch = self._batch(sampler, step, accelerator.device)
        done = step / run.steps
        anchor = loss_options.anchor_start + (loss_options.anchor_end - loss_options.anchor_start) * done
        loss: StepLoss = model(batch, anchor)
        accelerator.backward(loss.total)
        trained = [p for p in self.objective.parameters() if p.requires_grad]
        torch.nn.utils.clip_grad_norm_(trained, run.clip)
        rate = run.learning_rate * _rate(run, step)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("scale", 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if not torch.isfinite(loss.total):
            raise TrainingError(f"the loss is {float(loss.total)} at step {step}; lower run.learning_rate")
        return loss

    def _batch(self, sampler: Sampler, step: int, device: torch.device) -> BlockBatch:
        run, config = self.options.run, self.objective.drafter.config
        generator = sampler.generator(step)
        samples = [self.sample(i) for i in sampler.indices(step)]
        anchors = [
            draw_anchors(s, run.anchors, generator, in_prompt=run.prompt_anchors, first=self.first_anchor)
            for s in samples
        ]
        size = run.block_size or config.block_size
        batch = build_batch(samples, anchors, size, config.mask_token_id, config.first_slot)
        if run.feature_dropout:
            batch = replace(batch, features=drop_features(batch.features, run.feature_dropout, generator))
        return batch.to(device, self.objective.dtype)

    def _report(self, step: int, loss: StepLoss, seconds: float, done: int) -> None:
        report, run = self.options.report, self.options.run
        if (step + 1) % report.every and step + 1 != run.steps:
            return
        rows = run.sequences * (run.anchors + run.prompt_anchors) * len(loss.per_slot) * done
        line: dict[str, Any] = {"step": step + 1, "loss": float(loss.total.detach()), **loss.parts}
        line |= {"per_slot": [round(x, 4) for x in loss.per_slot.tolist()]}
        line |= {"rows_per_s": round(rows / max(seconds, 1e-9)), "held_out": self.measure()}
        with (Path(self.options.out) / METRICS).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
        logger.info("step %d: %s", step + 1, json.dumps(line))
        if report.tensorboard:
            _to_tensorboard(Path(self.options.out), line)

    def _save(self, out: Path, step: int, optimizers: list[torch.optim.Optimizer]) -> None:
        state = {
            "step": step,
            "options": json.dumps(asdict(self.options), sort_keys=True),
            "parameters": {name: p.detach() for name, p in self._trained()},
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
        temporary = out / (CHECKPOINT + ".tmp")
        torch.save(state, temporary)
        os.replace(temporary, out / CHECKPOINT)

    def _resume(self, out: Path, optimizers: list[torch.optim.Optimizer]) -> int:
        """Load the checkpoint of `out`, if any; returns the step to go on from."""
        path = out / CHECKPOINT
        if not path.is_file():
            return 0
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["options"] != json.dumps(asdict(self.options), sort_keys=True):
            raise TrainingError(f"{path} belongs to a run with other options; choose another --out")
        for name, parameter in self._trained():
            parameter.data.copy_(state["parameters"][name])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return int(state["step"])

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, p) for name, p in self.objective.named_parameters() if p.requires_grad)


def _accelerator() -> Any:
    try:
        from accelerate import Accelerator
    except ImportError as err:
        raise MissingDependencyError("accelerate", "train", "train") from err
    return Accelerator()


def _rate(run: RunOptions, step: int) -> float:
    if run.schedule == "stable":
        return stable_rate(step, run.steps, run.warmup, run.decay_fraction)
    return cosine_rate(step, run.steps, run.warmup)


def _to_tensorboard(out: Path, line: dict[str, Any]) -> None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as err:
        raise MissingDependencyError("tensorboard", "draw training curves", "train") from err
    with SummaryWriter(str(out / "tensorboard")) as writer:
        for name, value in line.items():
            if isinstance(value, (int, float)) and name != "step":
                writer.add_scalar(name, value, line["step"])
