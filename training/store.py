"""A data folder: the target's answers, and optionally its hidden states.

    data.json        what the rows were made with: target digest, taps, sizes
    answers.jsonl    one row per answer: source, prompt (token ids), response (token ids)
    features.bin     bfloat16 [rows, (K + 1) * E]: per token the taps, then the post-norm state;
                     P + R - 1 rows per answer, in the order of answers.jsonl

An answer's line is written after its features, so a kill leaves at most a tail that `DataWriter` cuts off.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xpress_export.training.blocks import Sample
from xpress_export.training.errors import TrainingError

INFO, ANSWERS, FEATURES = "data.json", "answers.jsonl", "features.bin"
BYTES = 2  # of one bfloat16


@dataclass(frozen=True, kw_only=True)
class DataInfo:
    """target_digest: of the checkpoint. width: columns of features.bin, 0 where none are stored."""

    target_digest: str
    target_layer_ids: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One row of answers.jsonl; token ids."""

    source: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Rows of hidden states: every token but the last, which nothing follows."""
        return len(self.prompt) + len(self.response) - 1


def read_info(folder: Path) -> DataInfo:
    try:
        raw = json.loads((folder / INFO).read_text(encoding="utf-8"))
        return DataInfo(**raw | {"target_layer_ids": tuple(raw["target_layer_ids"])})
    except (OSError, ValueError, TypeError, KeyError) as err:
        raise TrainingError(f"{folder} is not a data folder ({err}); make one with: train data") from err


def _read_answers(folder: Path) -> tuple[list[Answer], int]:
    """Complete rows of answers.jsonl, and the bytes they take."""
    path, answers, size = folder / ANSWERS, [], 0
    for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else []:
        if not line.endswith(b"\n"):
            break
        raw = json.loads(line)
        answers.append(Answer(source=raw["source"], prompt=tuple(raw["prompt"]), response=tuple(raw["response"])))
        size += len(line)
    return answers, size


class DataWriter:
    """Appends answers to a data folder; opening one again continues it."""

    def __init__(self, folder: Path, info: DataInfo) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / INFO).is_file() and read_info(folder) != info:
            raise TrainingError(f"{folder} was made with other options or another target; choose a new folder")
        (folder / INFO).write_text(json.dumps(asdict(info), indent=2) + "\n", encoding="utf-8")
        self._folder, self._info = folder, info
        self.answers, size = _read_answers(folder)
        self._cut(ANSWERS, size)
        if info.width:
            self._cut(FEATURES, sum(a.num_rows for a in self.answers) * info.width * BYTES)

    def append(self, answer: Answer, features: Tensor | None) -> None:
        """features: [num_rows, width], or None where none are stored."""
        if self._info.width:
            if features is None or features.shape != (answer.num_rows, self._info.width):
                raise ValueError(f"features should be [{answer.num_rows}, {self._info.width}]")
            with (self._folder / FEATURES).open("ab") as stream:
                stream.write(features.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
        with (self._folder / ANSWERS).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(asdict(answer)) + "\n")
        self.answers.append(answer)

    def _cut(self, name: str, size: int) -> None:
        path = self._folder / name
        if path.is_file():
            if path.stat().st_size < size:
                raise TrainingError(f"{path} is shorter than {ANSWERS} says; make the folder again")
            os.truncate(path, size)


class DataReader:
    """Answers of several data folders as `Sample`s; hidden states are memory-mapped."""

    def __init__(self, folders: tuple[str, ...], target_digest: str) -> None:
        self.infos = [read_info(Path(folder)) for folder in folders]
        for folder, info in zip(folders, self.infos, strict=True):
            if info.target_digest != target_digest:
                raise TrainingError(f"{folder} holds answers of another target; make the data with this one")
            if info.target_layer_ids != self.infos[0].target_layer_ids:
                raise TrainingError(f"{folder} taps other layers than {folders[0]}; use data with the same taps")
        self.answers: list[Answer] = []
        self._where: list[tuple[np.ndarray[Any, Any] | None, int]] = []
        for folder, info in zip(folders, self.infos, strict=True):
            self._add(Path(folder), info)
        if not self.answers:
            raise TrainingError(f"{', '.join(folders)}: no answers yet; run train data first")

    @property
    def target_layer_ids(self) -> tuple[int, ...]:
        return self.infos[0].target_layer_ids

    @property
    def has_features(self) -> bool:
        return all(info.width for info in self.infos)

    def __len__(self) -> int:
        return len(self.answers)

    def sample(self, index: int) -> Sample:
        """Answer `index` with its stored hidden states."""
        answer = self.answers[index]
        rows, start = self._where[index]
        if rows is None:
            raise TrainingError("this data has no stored features; make it with store_features")
        stored = torch.from_numpy(np.array(rows[start : start + answer.num_rows])).view(torch.bfloat16)
        taps = len(self.target_layer_ids) * self.infos[0].hidden_size
        return Sample(
            tokens=torch.tensor(answer.prompt + answer.response),
            num_prompt=len(answer.prompt),
            features=stored[:, :taps],
            final_hidden=stored[:, taps:],
        )

    def _add(self, folder: Path, info: DataInfo) -> None:
        answers, _ = _read_answers(folder)
        total = sum(a.num_rows for a in answers)
        rows = None
        if info.width and total:
            rows = np.memmap(folder / FEATURES, dtype=np.int16, mode="r", shape=(total, info.width))
        start = 0
        for answer in answers:
            if len(answer.response) > 1:  # an answer of one token leaves nothing to draft
                self.answers.append(answer)
                self._where.append((rows, start))
            start += answer.num_rows
