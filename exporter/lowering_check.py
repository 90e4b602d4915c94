"""Are the two forms of a graph the same function? Both run on ONNX Runtime CPU, on the same calls."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from xpress_export import names
from xpress_export.exporter.parity import TOLERANCE, Check, GraphRunner, relative_error

_CALLS = (((0, 0), (6, 3)), ((6, 3), (2, 5)))
"""For each call, the row where each of two slots writes and how many of the rows written before it count."""

_NUM_ROWS = 6


def check_lowering(role: str, native: Path, decomposed: Path, vocab_size: int, block: int, precision: str) -> Check:
    """Compare all outputs, caches included, over two calls in which the slots stand at different rows."""
    runners = [GraphRunner(path) for path in (native, decomposed)]
    generator = torch.Generator().manual_seed(3)
    errors = []
    for starts, committed in _CALLS:
        feeds = _feeds(runners[0], starts, committed, vocab_size, block, generator)
        wanted, got = (runner(**feeds) for runner in runners)
        floats = {name for name, value in wanted.items() if value.is_floating_point()}
        errors += [relative_error(got[name], wanted[name]) for name in floats]
        errors += [
            relative_error(torch.from_numpy(runners[1].cache[name]), torch.from_numpy(value))
            for name, value in runners[0].cache.items()
        ]
    tolerance = TOLERANCE[precision]
    check = Check(role, "its native form (decomposed)", "relative error", max(errors), tolerance, 2 * _NUM_ROWS)
    return check.require()


def _feeds(
    runner: GraphRunner,
    starts: tuple[int, int],
    committed: tuple[int, int],
    vocab_size: int,
    block: int,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    sizes = {"B": 2, "S": _NUM_ROWS, "N": block, "N-1": block - 1}
    known = {names.WRITE_INDEX: torch.tensor(starts), names.NUM_COMMITTED: torch.tensor(committed)}
    feeds = {}
    for value in runner.session.get_inputs():
        if value.name in runner.cache:
            continue
        shape = [sizes[size] if isinstance(size, str) else size for size in value.shape]
        if value.type == "tensor(int64)":
            random = torch.randint(0, vocab_size, shape, generator=generator)
            feeds[value.name] = known.get(value.name, random)
        else:
            feeds[value.name] = torch.randn(shape, generator=generator)
    return feeds
