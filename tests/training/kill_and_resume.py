"""A run that is killed ten times beside one that never is; run as a program by `test_kill.py`.

    python kill_and_resume.py TARGET DATA OUT STEPS KILLS SEED

Runs are forked from this process, which has imported everything and computed nothing: a start costs no imports.
Each step a run writes one byte to a pipe. For a kill the parent counts a random number of bytes, waits a random part
of a step, and sends SIGKILL: the moment may fall in a step, in the writing of a checkpoint, or before the first one.
Prints, as JSON, the step of the checkpoint that each kill left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401  (imported once, before the forks)
import torch
import torch._dynamo  # (what constructing an optimiser imports)

from xpress_export.exporter.target_checkpoint import read_target
from xpress_export.training.api import train_joint
from xpress_export.training.config import (
    DrafterOptions,
    LossOptions,
    RefinerOptions,
    ReportOptions,
    RunOptions,
    TrainOptions,
)
from xpress_export.training.loop import CHECKPOINT

STEP_S = 0.02
"""About what a step of the tiny run takes."""


class Pipe:
    """Progress that writes one byte per step of the step called Training."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @contextlib.contextmanager
    def step(self, name: str, **_: Any) -> Iterator[Callable[[int], None]]:
        yield lambda count: os.write(self._descriptor, b"." * count) and None if name == "Training" else None


def options(target: str, data: str, out: Path, steps: int) -> TrainOptions:
    """Drafter and head together, a checkpoint every third step."""
    return TrainOptions(
        target=target,
        data=(data,),
        out=str(out),
        drafter=DrafterOptions(
            intermediate_size=32, num_layers=1, block_size=4, mask_token_id=317, draft_vocab_size=99
        ),
        refiner=RefinerOptions(rank=4),
        loss=LossOptions(sampled_vocab=50, jacobi_rounds=1),
        run=RunOptions(steps=steps, sequences=1, anchors=2, warmup=2),
        report=ReportOptions(held_out=1, every=steps, checkpoint_every=3),
    )


def start(run: TrainOptions) -> tuple[int, int]:
    """Fork a run; returns its process id and the reading end of its pipe."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        status = 1
        try:
            torch.set_num_threads(1)
            train_joint(run, Pipe(writing))
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    return child, reading


def finish(run: TrainOptions) -> None:
    """Run to the end."""
    child, reading = start(run)
    while os.read(reading, 4096):
        pass
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"a run that nobody killed ended with status {status}")


def kill(run: TrainOptions, num_steps: int, wait_s: float) -> int:
    """Kill a run `wait_s` after its `num_steps`-th step; returns the step of the checkpoint it leaves, 0 for none."""
    child, reading = start(run)
    seen = 0
    while seen < num_steps:
        got = os.read(reading, num_steps - seen)
        if not got:
            raise SystemExit(f"the run ended by itself before step {num_steps}")
        seen += len(got)
    time.sleep(wait_s)
    os.kill(child, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        raise SystemExit("the run had ended before it was killed")
    path = Path(run.out) / CHECKPOINT
    return int(torch.load(path, weights_only=True)["step"]) if path.is_file() else 0


def main() -> None:
    target, data, out = sys.argv[1:4]
    steps, kills, seed = map(int, sys.argv[4:])
    draw = random.Random(seed)
    read_target(target)  # imports transformers' configuration classes
    finish(options(target, data, Path(out, "whole"), steps))
    killed = options(target, data, Path(out, "killed"), steps)
    reached = [kill(killed, draw.randint(1, 9), draw.uniform(0, STEP_S)) for _ in range(kills)]
    finish(killed)
    print(json.dumps(reached))


if __name__ == "__main__":
    main()
