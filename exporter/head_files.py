"""Opening what drafters and refiners come in: a folder or hub id, or a training `.pt` file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from xpress_export.errors import CheckpointError
from xpress_export.exporter.checkpoint_files import (
    Json,
    digest_files,
    optional_json,
    read_json,
    resolve_source,
    weight_files,
)
from xpress_export.exporter.weights import SafetensorsWeights, TensorWeights, WeightSource, load_torch_file

TORCH_SUFFIXES = (".pt", ".pth")


@dataclass(frozen=True, kw_only=True)
class HeadFiles:
    """A drafter's or refiner's opened files; `raw` is its config.json, empty if a `.pt` has none beside."""

    raw: Json
    config_path: Path
    weights: WeightSource
    path: Path
    files: tuple[Path, ...]

    @property
    def where(self) -> str:
        """What messages about configuration keys name."""
        return str(self.config_path)

    def digest(self) -> str:
        return digest_files(self.files)


def open_head_files(source: str, role: str, section: str) -> HeadFiles:
    """Open `source`; `section` is the entry of a training `.pt` that holds this role's state dict."""
    path = resolve_source(source)
    if path.is_dir():
        return _open_folder(path, role, section)
    if path.suffix not in TORCH_SUFFIXES:
        raise CheckpointError(
            f"{path} is not a {role} checkpoint; give a folder with config.json and model.safetensors, "
            f"or a training .pt file"
        )
    return _open_torch(path, section)


def _open_folder(folder: Path, role: str, section: str) -> HeadFiles:
    trained = sorted(path for path in folder.iterdir() if path.suffix in TORCH_SUFFIXES)
    if len(trained) == 1 and not any(folder.glob("*.safetensors*")):
        return _open_torch(trained[0], section)
    if any(folder.glob("*.gguf")) and not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds a GGUF model, not a {role}; GGUF is only read as a target")
    config_path = folder / "config.json"
    raw = read_json(config_path)
    return HeadFiles(
        raw=raw,
        config_path=config_path,
        weights=SafetensorsWeights(folder),
        path=folder,
        files=(config_path, *weight_files(folder)),
    )


def _open_torch(path: Path, section: str) -> HeadFiles:
    config_path = path.parent / "config.json"
    files = (config_path, path) if config_path.is_file() else (path,)
    tensors = _torch_section(path, section)
    return HeadFiles(
        raw=optional_json(config_path),
        config_path=config_path,
        weights=TensorWeights(tensors, str(path)),
        path=path,
        files=files,
    )


def _torch_section(path: Path, section: str) -> dict[str, torch.Tensor]:
    content = load_torch_file(path)
    tensors = content.get(section)
    if not isinstance(tensors, dict):
        found = ", ".join(sorted(map(str, content))[:5])
        raise CheckpointError(f"{path} has no '{section}' (found {found}); give a training file that has it")
    return {str(name): value for name, value in tensors.items() if isinstance(value, torch.Tensor)}
