"""Lazy weight sources: tensors read by name, one at a time, from safetensors, GGUF or torch files.

    source               file                              dtype read
    SafetensorsWeights   model.safetensors, or shards      as stored
    GgufWeights          .gguf                             float16/bfloat16/float32 as stored, else float32
    TensorWeights        a state dict already at hand      as stored (memory-mapped from `load_torch_file`)

Sources hold open files and tensor tables, never the tensors. `renamed` gives the same tensors other names.
"""

from __future__ import annotations

import pickle
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from xpress_export.errors import CheckpointError
from xpress_export.exporter.checkpoint_files import one_line, shard_map, weight_files

AGAIN = "download or copy it again"


class WeightSource(ABC):
    """Named tensors of one checkpoint; `where` is the path that messages show."""

    where: str

    @abstractmethod
    def names(self) -> frozenset[str]:
        """Every tensor name."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""

    def size(self, name: str, axis: int) -> int:
        """One dimension of a tensor that should have any."""
        shape = self.shape(name)
        if not shape:
            raise CheckpointError(f"{self.where}: tensor {name} is a single number, not a matrix; {AGAIN}")
        return shape[axis]

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU, in its stored floating dtype; never modify it in place."""

    def renamed(self, stored_names: Mapping[str, str]) -> WeightSource:
        """The tensors `stored_names` (new name to stored name) lists, and no others."""
        return RenamedWeights(self, stored_names)

    def subset(self, names: Iterable[str]) -> WeightSource:
        """Only the tensors `names`."""
        return self.renamed({name: name for name in names})

    def without_prefix(self, prefix: str) -> WeightSource:
        """The tensors whose names start with `prefix`, under what follows it."""
        return self.renamed({n.removeprefix(prefix): n for n in self.names() if n.startswith(prefix)})

    def _missing(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self.where} has no tensor {name}; {AGAIN}")


class RenamedWeights(WeightSource):
    """A view of another source under other names."""

    def __init__(self, source: WeightSource, stored_names: Mapping[str, str]) -> None:
        self.where = source.where
        self._source = source
        self._stored = dict(stored_names)

    def names(self) -> frozenset[str]:
        return frozenset(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._stored_name(name))

    def read(self, name: str) -> torch.Tensor:
        return self._source.read(self._stored_name(name))

    def _stored_name(self, name: str) -> str:
        if name not in self._stored:
            raise self._missing(name)
        return self._stored[name]


class TensorWeights(WeightSource):
    """Tensors of a state dict that is already loaded."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], where: str) -> None:
        self.where = where
        self._tensors = dict(tensors)

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.read(name).shape)

    def read(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise self._missing(name)
        return self._tensors[name]


class SafetensorsWeights(WeightSource):
    """A folder with `model.safetensors`, or with `model.safetensors.index.json` and its shards."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        files = weight_files(folder)
        handles = {path.name: _open_safetensors(path) for path in files if path.suffix == ".safetensors"}
        if files[0].suffix == ".safetensors":
            self._handles = dict.fromkeys(handles[files[0].name].keys(), handles[files[0].name])
        else:
            self._handles = _sharded_handles(files[0], handles)

    def names(self) -> frozenset[str]:
        return frozenset(self._handles)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(name).get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handle(name).get_tensor(name)
        return tensor

    def _handle(self, name: str) -> Any:
        if name not in self._handles:
            raise self._missing(name)
        return self._handles[name]


def _open_safetensors(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise CheckpointError(f"{path.parent} lacks {path.name}, which its index names; {AGAIN}")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, ValueError) as err:
        raise CheckpointError(f"{path} is not a complete safetensors file ({one_line(err)}); {AGAIN}") from err


def _sharded_handles(index: Path, handles: Mapping[str, Any]) -> dict[str, Any]:
    stored = {name: set(handle.keys()) for name, handle in handles.items()}
    table = shard_map(index)
    for name, shard in table.items():
        if name not in stored[Path(shard).name]:
            raise CheckpointError(f"{index} places tensor {name} in {shard}, which does not hold it; {AGAIN}")
    return {name: handles[Path(shard).name] for name, shard in table.items()}


def load_torch_file(path: Path) -> dict[str, Any]:
    """The dictionary in a torch `.pt` file, tensors memory-mapped; never runs code from the file."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as err:
        raise CheckpointError(
            f"{path} holds {_foreign_class(err)}, which only unsafe unpickling could load; "
            f"save it again as plain dictionaries of tensors and numbers"
        ) from err
    except (RuntimeError, OSError, ValueError, EOFError) as err:
        raise CheckpointError(
            f"{path} is not a complete torch file of the zip format ({one_line(err)}); {AGAIN}"
        ) from err
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} should hold a dictionary, got {type(content).__name__}; save it as one")
    return content


def _foreign_class(error: Exception) -> str:
    found = re.search(r"GLOBAL (\S+)", str(error))
    return f"Python objects ({found.group(1)})" if found else "Python objects"


class GgufFile(WeightSource):
    """An open `.gguf` file: metadata by key, tensors by their GGUF name."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        self.where = str(path)
        try:
            self._reader = GGUFReader(path)
        except (ValueError, IndexError, KeyError, OverflowError, OSError) as err:
            raise CheckpointError(f"{path} is not a complete GGUF file ({one_line(err)}); {AGAIN}") from err
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def value(self, key: str, default: Any = None) -> Any:
        """Metadata entry `key` as a Python value."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def arch_value(self, key: str, default: Any = None) -> Any:
        """Metadata entry `<architecture>.key`."""
        return self.value(f"{self.value('general.architecture')}.{key}", default)

    def shape(self, name: str) -> tuple[int, ...]:
        """Row-major shape, as torch has it."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str) -> torch.Tensor:
        """One tensor, dequantised to float32 unless it is stored as float16, bfloat16 or float32."""
        from gguf import GGMLQuantizationType, dequantize

        stored = self._tensors[name]
        kind = stored.tensor_type
        if kind in {GGMLQuantizationType.F32, GGMLQuantizationType.F16}:
            return torch.from_numpy(np.array(stored.data)).view(self.shape(name))
        if kind == GGMLQuantizationType.BF16:
            return torch.from_numpy(np.array(stored.data)).view(torch.bfloat16).view(self.shape(name))
        try:
            values = dequantize(stored.data, kind)
        except NotImplementedError as err:
            raise CheckpointError(
                f"{self.path} stores {name} as {kind.name}, which cannot be dequantised; "
                f"use a file of another quantisation, for example Q8_0 or F16"
            ) from err
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(self.shape(name))


class GgufWeights(RenamedWeights):
    """GGUF tensors under Hugging Face names.

    interleaved_heads: for the names whose rows llama.cpp stores in interleaved rotary order, their number of
    heads; `read` puts those rows back in half-split order.
    """

    def __init__(self, file: GgufFile, stored_names: Mapping[str, str], interleaved_heads: Mapping[str, int]) -> None:
        super().__init__(file, stored_names)
        self._interleaved_heads = dict(interleaved_heads)

    def read(self, name: str) -> torch.Tensor:
        tensor, num_heads = super().read(name), self._interleaved_heads.get(name)
        return tensor if num_heads is None else half_split_rows(tensor, num_heads)


def half_split_rows(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from interleaved rotary pairs (0, D/2, 1, D/2+1, ...) to half-split order.

    tensor: [heads*D, ...].
    """
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])  # [heads, D/2, 2, ...]
    return pairs.transpose(1, 2).reshape(tensor.shape)
