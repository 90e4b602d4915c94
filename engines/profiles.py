"""Optimization profiles, derived from the shapes that the manifest records; nobody types one by hand.

    symbol   meaning                  in an engine
    B        slots                    1 .. max_batch
    C        rows of a cache          one size, part of the plan
    S        tokens of a call         `prefill`: 1 .. chunk; `verify` (target, and others for theirs): 1 .. 1 + drafts
    N        slots of a draft block   2 .. block; "N-1" follows from it

A graph with S gets two profiles, so that the kernels of a verify step are chosen for a block and not for a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from xpress_export import names
from xpress_export.errors import EngineBuildError
from xpress_export.records import GraphRecord, ProfileRecord

_ALIGNMENT = 16
_STATIC = "C"
_EXPRESSION = re.compile(r"([A-Za-z]\w*?)([+-]\d+)?")
_SHORT = {
    names.TARGET: "verify",
    names.DRAFTER: "draft",
    names.REFINER: "refine",
    names.ACCEPT: names.ACCEPT,
    names.STEP: names.STEP,
}

Range = tuple[int, int, int]
Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that one platform's engines share. block: slots of a draft block; first_slot: its first draft token."""

    max_context: int
    max_batch: int
    chunk: int
    block: int
    first_slot: int = 1

    @property
    def verify(self) -> int:
        """Tokens of a verify call: one and the drafts after it."""
        return 1 + self.block - self.first_slot

    @property
    def capacity(self) -> int:
        """Rows of each cache: the context, room for a block that is written and then rejected, and for one more that a
        host which learns of a stop a cycle late has started by then."""
        rows = self.max_context + 2 * self.verify
        return -(-rows // _ALIGNMENT) * _ALIGNMENT

    @property
    def static(self) -> dict[str, int]:
        return {_STATIC: self.capacity}


def derive_profiles(role: str, graph: GraphRecord, sizes: Sizes) -> tuple[ProfileRecord, ...]:
    """The profiles of one graph: a range for each symbol of its inputs, the capacity aside."""
    symbols = {_parse(d, t.name)[0] for t in graph.inputs for d in t.shape if isinstance(d, str)} - {_STATIC}
    batch, block = (1, sizes.max_batch, sizes.max_batch), (2, sizes.block, sizes.block)
    known: dict[str, Range] = {"B": batch, "N": block, "S": (1, sizes.verify, sizes.verify)}
    for tensor in graph.inputs:
        for dim in tensor.shape:
            if isinstance(dim, str) and _parse(dim, tensor.name)[0] not in {*known, _STATIC}:
                raise EngineBuildError(
                    f"input {tensor.name} of the {role} graph has dimension {dim!r}, which has no known range; "
                    f"known are {', '.join((*known, _STATIC))}"
                )
    short = {symbol: known[symbol] for symbol in sorted(symbols)}
    if "S" not in symbols:
        return (ProfileRecord(name=_SHORT[role], sizes=short),)
    chunk = min(sizes.chunk, sizes.max_context)
    usual = max(1, min(chunk, 64 if chunk > 64 else chunk))
    return (
        ProfileRecord(name="prefill", sizes={**short, "S": (1, usual, chunk)}),
        ProfileRecord(name=_SHORT[role], sizes=short),
    )


def input_shapes(graph: GraphRecord, profile: ProfileRecord, static: Mapping[str, int]) -> Shapes:
    """Least, usual and greatest shape of each input under a profile; checked to be in that order and positive."""
    shapes: Shapes = {}
    for tensor in graph.inputs:
        axes = [_range(dim, tensor.name, profile.sizes, static) for dim in tensor.shape]
        least, usual, greatest = (tuple(axis[k] for axis in axes) for k in range(3))
        if not all(1 <= a <= b <= c for a, b, c in axes):
            raise EngineBuildError(
                f"profile {profile.name}: input {tensor.name} needs 1 <= min <= opt <= max on every axis, "
                f"got min {least}, opt {usual}, max {greatest}"
            )
        shapes[tensor.name] = (least, usual, greatest)
    return shapes


def _range(dim: int | str, tensor: str, sizes: Mapping[str, tuple[int, ...]], static: Mapping[str, int]) -> Range:
    if isinstance(dim, int):
        return (dim, dim, dim)
    symbol, shift = _parse(dim, tensor)
    if symbol in static:
        size = static[symbol] + shift
        return (size, size, size)
    if symbol not in sizes:
        raise EngineBuildError(f"input {tensor} has dimension {dim!r}, for which the profile has no sizes")
    least, usual, greatest = sizes[symbol]
    return (least + shift, usual + shift, greatest + shift)


def _parse(dim: str, tensor: str) -> tuple[str, int]:
    """ "N-1" as ("N", -1)."""
    match = _EXPRESSION.fullmatch(dim)
    if match is None:
        raise EngineBuildError(f"input {tensor} has dimension {dim!r}; a symbol such as 'B' or 'N-1' was expected")
    return match[1], int(match[2] or 0)
