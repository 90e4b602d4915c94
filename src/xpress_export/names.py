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
             out        logits                   float   [B, S, V]     bound only where a request samples
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
             out        refined_logits           float   [B, N-first, Vd]  bound only to sample
"""

from __future__ import annotations

TARGET = "target"
DRAFTER = "drafter"
REFINER = "refiner"
ROLES = (TARGET, DRAFTER, REFINER)

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

ACTIVATION_ZERO = "activation_zero_point"
"""Initializer of a quantized graph: the zero that all its activations are quantized with."""


def past_key(layer: int) -> str:
    return f"past_key_{layer}"


def past_value(layer: int) -> str:
    return f"past_value_{layer}"


def present_key(layer: int) -> str:
    return f"present_key_{layer}"


def present_value(layer: int) -> str:
    return f"present_value_{layer}"
