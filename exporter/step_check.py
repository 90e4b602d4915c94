"""Does the step graph do what the graphs do that it was merged from? Both run on ONNX Runtime CPU, cycle by cycle."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from xpress_export import names
from xpress_export.exporter.parity import TOLERANCE, Check, GraphRunner, form_of, relative_error
from xpress_export.records import DraftRecord

Tensors = dict[str, Tensor]

_SLOTS = 3
_INTEGERS = (names.NEXT_TOKEN, names.NUM_COMMITTED, names.NEXT_IDS, names.NEXT_GIVEN, names.NEXT_WRITE_INDEX)


class SplitCycle:
    """A cycle on the graphs of its parts: what a step has to be equal to.

    parts: the files of target, accept, drafter and, where there is one, refiner.
    """

    def __init__(self, parts: Mapping[str, Path], refine_passes: int, batch: int = _SLOTS) -> None:
        self.graphs = {role: GraphRunner(path, batch) for role, path in parts.items()}
        self.refine_passes = refine_passes

    @property
    def cache(self) -> Tensors:
        """The caches of both models, under the names that a step has for them."""
        target, drafter = (self.graphs[role].cache for role in (names.TARGET, names.DRAFTER))
        both = target | {names.of_drafter(name): value for name, value in drafter.items()}
        return {name: torch.from_numpy(value) for name, value in both.items()}

    def __call__(self, **feeds: Tensor) -> Tensors:
        known = dict(feeds)
        known |= self.graphs[names.TARGET](**known)
        known |= self.graphs[names.ACCEPT](**known)
        anchor = known[names.ANCHOR].unsqueeze(1)
        known[names.BLOCK_IDS] = torch.cat((anchor, known[names.BLOCK_IDS][:, 1:]), dim=1)
        known |= self.graphs[names.DRAFTER](**known)
        for _ in range(self.refine_passes):
            known[names.DRAFT_TOKENS] = self.graphs[names.REFINER](**known)[names.REFINED_TOKENS]
        known[names.NEXT_IDS] = torch.cat((anchor, known[names.DRAFT_TOKENS]), dim=1)
        return {name: known[name] for name in _INTEGERS}


def check_step(path: Path, parts: Mapping[str, Path], draft: DraftRecord, precision: str) -> list[Check]:
    """Run a step and its parts through prefill and three cycles with a slot that decodes, one that prefills, one idle.

    precision: of the graphs that the bundle was exported with.
    """
    split, step = SplitCycle(parts, draft.refine_passes), GraphRunner(path, _SLOTS)
    generator = torch.Generator().manual_seed(5)
    outputs = split.graphs[names.TARGET].session.get_outputs()
    vocab_size = next(value.shape[-1] for value in outputs if value.name == names.LOGITS)
    slots = draft.num_draft_tokens + 1
    feeds = {
        names.INPUT_IDS: torch.randint(0, vocab_size, (_SLOTS, slots), generator=generator),
        names.NUM_GIVEN: torch.tensor([slots, 1, 0]),
        names.MAX_ACCEPT: torch.tensor([0, slots - 1, slots - 1]),
        names.WRITE_INDEX: torch.tensor([0, 0, 0]),
        names.BLOCK_IDS: torch.full((_SLOTS, draft.block_size), draft.mask_token_id),
    }
    wrong, rows = 0, 0
    for _ in range(4):
        _agree(split, feeds)
        expected, got = split(**feeds), step(**feeds)
        wrong += sum(int((got[name] != expected[name]).sum()) for name in _INTEGERS)
        rows += sum(expected[name].numel() for name in _INTEGERS)
        feeds[names.INPUT_IDS] = expected[names.NEXT_IDS].clone()
        feeds[names.WRITE_INDEX] = expected[names.NEXT_WRITE_INDEX]
        feeds[names.NUM_GIVEN] = torch.tensor([1, slots, 0])  # the second slot is given another chunk of a prompt
        feeds[names.MAX_ACCEPT] = torch.tensor([slots - 1, 0, 0])
    error = max(relative_error(torch.from_numpy(step.cache[name]), value) for name, value in split.cache.items())
    against = f"the graphs of its parts{form_of(path)}"
    checks = [
        Check(names.STEP, against, "share of wrong integers", wrong / rows, 0.0, rows),
        Check(names.STEP, against, "relative error of caches", error, TOLERANCE[precision], rows),
    ]
    return [check.require() for check in checks]


def _agree(split: SplitCycle, feeds: Tensors) -> None:
    """Make the second token of every slot what the target says after the first, so that a draft is accepted."""
    if feeds[names.INPUT_IDS].shape[1] > 1:
        kept = dict(split.graphs[names.TARGET].cache)
        said = split.graphs[names.TARGET](**feeds)[names.NEXT_TOKEN]
        feeds[names.INPUT_IDS][:, 1] = said[:, 0]
        split.graphs[names.TARGET].cache = kept
