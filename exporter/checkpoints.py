"""Checkpoints in: one reader for each of target, drafter and refiner, each returning a frozen description.

    read_target(source)                    folder, hub id or .gguf       -> TargetCheckpoint
    read_drafter(source, target)           folder, hub id or .pt         -> DrafterCheckpoint
    read_refiner(source, target, drafter)  folder, hub id or .pt         -> RefinerCheckpoint

Weights stay on disk until `weights.read(name)`. What cannot be exported raises `CheckpointError`.
"""

from __future__ import annotations

from xpress_export.exporter.drafter_checkpoint import DrafterCheckpoint, read_drafter
from xpress_export.exporter.refiner_checkpoint import RefinerCheckpoint, read_refiner
from xpress_export.exporter.target_checkpoint import TargetCheckpoint, read_target

__all__ = [
    "DrafterCheckpoint",
    "RefinerCheckpoint",
    "TargetCheckpoint",
    "read_drafter",
    "read_refiner",
    "read_target",
]
