"""Does the step graph do what the graphs do that it was merged from? Both run on ONNX Runtime CPU, cycle by cycle.

Integers have to be equal, but for tokens at near-ties of float16 graphs: ONNX Runtime computes those in float32 and
rounds where a value leaves a graph, which it does less often in a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from xpress_export import names
from xpress_export.exporter.parity import TOLERANCE, Check, GraphRunner, form_of, is_clear, relative_error
from xpress_export.records import DraftRecord

Tensors = dict[str, Tensor]

_SLOTS = 3
_NUM_CYCLES = 4
_INTEGERS = (names.NEXT_TOKEN, names.NUM_COMMITTED, names.NEXT_IDS, names.NEXT_GIVEN, names.NEXT_WRITE_INDEX)


class SplitCycle:
    """A cycle on the graphs of its parts: what a step has to be equal to.

    parts: the files of target, accept, drafter and, where there is one, refiner. capacity: rows of each cache.
    """

    def __init__(self, parts: Mapping[str, Path], refine_passes: int, batch: int, capacity: int) -> None:
        self.graphs = {role: GraphRunner(path, batch, capacity) for role, path in parts.items()}
        self.refine_passes = refine_passes
        self.logits = torch.zeros(0)  # of the last cycle's target call, [B, S, V]
        self.draft_logits: list[Tensor] = []  # of its drafter and each pass of its refiner, [B, drafts, Vd]

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
        self.logits, self.draft_logits = known[names.LOGITS], [known[names.DRAFT_LOGITS]]
        for _ in range(self.refine_passes):
            refined = self.graphs[names.REFINER](**known)
            self.draft_logits.append(refined[names.REFINED_LOGITS])
            known[names.DRAFT_TOKENS] = refined[names.REFINED_TOKENS]
        known[names.NEXT_IDS] = torch.cat((anchor, known[names.DRAFT_TOKENS]), dim=1)
        return {name: known[name] for name in _INTEGERS}


def check_step(path: Path, parts: Mapping[str, Path], draft: DraftRecord, precision: str) -> list[Check]:
    """Run a step and its parts through prefill and three cycles with a slot that decodes, one that prefills, one idle.

    precision: of the graphs that the bundle was exported with.
    """
    slots = draft.num_draft_tokens + 1
    capacity = (_NUM_CYCLES + 1) * slots
    split, step = SplitCycle(parts, draft.refine_passes, _SLOTS, capacity), GraphRunner(path, _SLOTS, capacity)
    generator = torch.Generator().manual_seed(5)
    outputs = split.graphs[names.TARGET].session.get_outputs()
    vocab_size = next(value.shape[-1] for value in outputs if value.name == names.LOGITS)
    feeds = {
        names.INPUT_IDS: torch.randint(0, vocab_size, (_SLOTS, slots), generator=generator),
        names.NUM_GIVEN: torch.tensor([slots, 1, 0]),
        names.MAX_ACCEPT: torch.tensor([0, slots - 1, slots - 1]),
        names.WRITE_INDEX: torch.tensor([0, 0, 0]),
        names.BLOCK_IDS: torch.full((_SLOTS, draft.block_size), draft.mask_token_id),
    }
    tolerance, wrong, rows = TOLERANCE[precision], 0, 0
    for _ in range(_NUM_CYCLES):
        _agree(split, feeds)
        expected, got = split(**feeds), step(**feeds)
        wrong += int(_wrong(split, expected, got, tolerance).sum())
        rows += _SLOTS
        feeds[names.INPUT_IDS] = expected[names.NEXT_IDS].clone()
        feeds[names.WRITE_INDEX] = expected[names.NEXT_WRITE_INDEX]
        feeds[names.NUM_GIVEN] = torch.tensor([1, slots, 0])  # the second slot is given another chunk of a prompt
        feeds[names.MAX_ACCEPT] = torch.tensor([slots - 1, 0, 0])
    error = max(relative_error(torch.from_numpy(step.cache[name]), value) for name, value in split.cache.items())
    against = f"the graphs of its parts{form_of(path)}"
    checks = [
        Check(names.STEP, against, "share of wrong slots", wrong / rows, 0.0, rows),
        Check(names.STEP, against, "relative error of caches", error, tolerance, rows),
    ]
    return [check.require() for check in checks]


def _wrong(split: SplitCycle, expected: Tensors, got: Tensors, tolerance: float) -> Tensor:
    """Slots, bool [B], whose integers differ and no near-tie explains it.

    A slot is compared up to its first token at a near-tie that came out otherwise; what follows depends on that.
    """
    differ = {name: got[name] != expected[name] for name in _INTEGERS}
    wrong = (differ[names.NEXT_TOKEN] & is_clear(split.logits, tolerance)).any(1)
    same = ~differ[names.NEXT_TOKEN].any(1)
    for name in (names.NUM_COMMITTED, names.NEXT_GIVEN, names.NEXT_WRITE_INDEX):
        wrong |= same & differ[name]
    anchor, drafts = differ[names.NEXT_IDS][:, 0], differ[names.NEXT_IDS][:, 1:]
    ties = torch.stack([~is_clear(logits, tolerance) for logits in split.draft_logits]).any(0)
    explained = ties.long().cummax(1).values.bool()  # a draft depends on those before it
    return wrong | same & (anchor | (drafts & ~explained).any(1))


def _agree(split: SplitCycle, feeds: Tensors) -> None:
    """Make the second token of every slot what the target says after the first, so that a draft is accepted."""
    if feeds[names.INPUT_IDS].shape[1] > 1:
        kept = dict(split.graphs[names.TARGET].cache)
        said = split.graphs[names.TARGET](**feeds)[names.NEXT_TOKEN]
        feeds[names.INPUT_IDS][:, 1] = said[:, 0]
        split.graphs[names.TARGET].cache = kept
