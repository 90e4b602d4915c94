"""The names that cross a boundary: graph bindings, roles, modes. A literal binding name elsewhere is a mistake.

Shape letters, everywhere in this project:

    B  slots (batch)                    C  KV capacity in rows
    S  tokens per call                  L  layers
    N  slots of a draft block           H  KV heads
    E  hidden size                      D  head size
    K  tapped target layers             V  vocabulary (Vd: the drafter's head)

Bindings (all graphs; dtype `float` is the graph's precision):

    graph    direction  name                     dtype   shape
    target   in         input_ids                int64   [B, S]
             in         write_index              int64   [B]           rows already committed to the cache
             in/out     past_* / present_*       float   [B, H, C, D]  present aliases past
             out        next_token               int64   [B, S]        argmax of the logits of each row
             out        target_hidden            float   [B, S, K*E]   absent in a target-only bundle
             out        logits                   float   [B, S, V]     the host reads it where a request samples
    drafter  in         target_hidden            float   [B, S, K*E]   rows of the last target call
             in         num_committed            int64   [B]           how many of those rows count
             in         write_index              int64   [B]           rows already in the drafter's cache
             in         block_ids                int64   [B, N]        anchor, then mask ids
             in/out     past_* / present_*       float   [B, H, C, D]
             out        draft_tokens             int64   [B, N-first]  first = 1 (fill-in) or 0 (anchor-sampled)
             out        draft_hidden             float   [B, N, E]     only with a refiner
             out        draft_logits             float   [B, N-first, Vd]  read by the refiner, or to sample
    refiner  in         draft_hidden, draft_logits, draft_tokens (as above)
             in         anchor                   int64   [B]
             in         previous                 int64   [B]           the token before the anchor
             out        refined_tokens           int64   [B, N-first]  one Jacobi pass
             out        refined_logits           float   [B, N-first, Vd]  the host reads it to sample
    accept   in         input_ids                int64   [B, S]        first the given tokens, then drafts
             in         next_token               int64   [B, S]        of the target call over them
             in         num_given                int64   [B]           how many tokens are given; 0: idle slot
             in         max_accept               int64   [B]           drafts that may be accepted at most
             in         write_index              int64   [B]
             out        num_committed            int64   [B]           given and accepted; 0: idle slot
             out        anchor, previous         int64   [B]           of the next block; any valid id if idle
             out        next_write_index         int64   [B]           write_index + num_committed
             out        next_given               int64   [B]           1, or 0 if idle
    step     in         input_ids                int64   [B, S]        as for accept
             in         num_given, max_accept, write_index  int64 [B]  one write_index for both caches
             in         block_ids                int64   [B, N]        mask ids; the anchor replaces slot 0
             in/out     past_* / present_*       float   [B, H, C, D]  the target's cache
             in/out     draft_past_* / draft_present_*  float [B, H, C, D]  the drafter's
             out        next_token               int64   [B, S]
             out        num_committed            int64   [B]
             out        next_ids                 int64   [B, 1+N-first]  anchor, refined draft tokens
             out        next_given               int64   [B]
             out        next_write_index         int64   [B]

`accept` decides what a cycle commits where the host would. `step` is a whole cycle in one graph: the target over
`input_ids`, `accept`, the drafter and its refiner; `next_*` are the inputs of the next cycle.
"""

from __future__ import annotations

TARGET = "target"
DRAFTER = "drafter"
REFINER = "refiner"
ROLES = (TARGET, DRAFTER, REFINER)

ACCEPT = "accept"
STEP = "step"
CYCLE = (ACCEPT, STEP)
"""Graphs that are no model's own."""

LAYOUT_SPLIT = "split"
LAYOUT_FUSED = "fused"
LAYOUTS = (LAYOUT_SPLIT, LAYOUT_FUSED)
"""How a cycle runs: a graph for each model and `accept` between them, or `step` alone."""

MODE_TARGET = "target"
MODE_DFLASH = "dflash"
MODE_XPRESS = "xpress"
MODES = (MODE_TARGET, MODE_DFLASH, MODE_XPRESS)

INPUT_IDS = "input_ids"
WRITE_INDEX = "write_index"
NEXT_TOKEN = "next_token"
LOGITS = "logits"
TARGET_HIDDEN = "target_hidden"
NUM_COMMITTED = "num_committed"
BLOCK_IDS = "block_ids"
DRAFT_TOKENS = "draft_tokens"
DRAFT_HIDDEN = "draft_hidden"
DRAFT_LOGITS = "draft_logits"
ANCHOR = "anchor"
PREVIOUS = "previous"
REFINED_TOKENS = "refined_tokens"
REFINED_LOGITS = "refined_logits"
NUM_GIVEN = "num_given"
MAX_ACCEPT = "max_accept"
NEXT_IDS = "next_ids"
NEXT_GIVEN = "next_given"
NEXT_WRITE_INDEX = "next_write_index"

ACTIVATION_ZERO = "activation_zero_point"
"""Initializer of a quantized graph: the zero that all its activations are quantized with."""

INT4_OPSET, INT4_IR_VERSION = 21, 10
"""The first of ONNX with INT4, and with one scale for each block of a weight; between the two lowerings' opsets."""


def past_key(layer: int) -> str:
    return f"past_key_{layer}"


def past_value(layer: int) -> str:
    return f"past_value_{layer}"


def present_key(layer: int) -> str:
    return f"present_key_{layer}"


def present_value(layer: int) -> str:
    return f"present_value_{layer}"


def of_drafter(name: str) -> str:
    """A tensor of the drafter's cache, as `step` calls it beside the target's."""
    return f"draft_{name}"


def is_past(name: str) -> bool:
    """Whether an input is a cache, of the target or, in `step`, of the drafter."""
    return name.startswith(("past_", of_drafter("past_")))


def present_of(past: str) -> str:
    """The output that is the update of a cache."""
    return past.replace("past_", "present_")
