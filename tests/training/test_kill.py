"""Killing a run costs time and nothing else: ten kills at random moments, the same weights in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from xpress_export.training.loop import CHECKPOINT

STEPS, KILLS, SEED = 100, 10, 3


def test_ten_kills_at_random_moments_change_no_weight(tiny_trio: Any, tiny_data: Path, tmp_path: Path) -> None:
    program = Path(__file__).with_name("kill_and_resume.py")
    arguments = [str(tiny_trio.target), str(tiny_data), str(tmp_path), str(STEPS), str(KILLS), str(SEED)]
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    reached = json.loads(done.stdout)
    assert len(reached) == KILLS and reached == sorted(reached)
    assert 0 < reached[-1] < STEPS and len(set(reached)) > KILLS // 2, reached
    for folder in ("drafter", "refiner"):
        ours, theirs = (load_file(tmp_path / run / folder / "model.safetensors") for run in ("whole", "killed"))
        assert ours and all(torch.equal(ours[name], theirs[name]) for name in ours), folder
    whole, killed = (torch.load(tmp_path / run / CHECKPOINT, weights_only=True) for run in ("whole", "killed"))
    assert whole["step"] == killed["step"] == STEPS
    assert all(torch.equal(whole["parameters"][name], killed["parameters"][name]) for name in whole["parameters"])
