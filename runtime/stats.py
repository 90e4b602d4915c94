"""What a generation counted. Definitions are the field's; see each property."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stats:
    """Counts and times of one request; times in milliseconds of wall clock.

    num_prefilled_tokens: prompt tokens the target has read so far.
    num_verify_steps: target calls after the prefill. num_draft_tokens: draft tokens they checked.
    num_accepted: draft tokens that were right; the bonus token each step adds is not among them.
    acceptance_histogram[a]: steps that accepted exactly a draft tokens.
    num_refine_passes: refiner calls; a block that a pass leaves unchanged needs no further one.
    draft_ms, refine_ms, verify_ms: time inside engine calls while decoding.
    """

    num_prompt_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0
    num_verify_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_refine_passes: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    draft_ms: float = 0.0
    refine_ms: float = 0.0
    verify_ms: float = 0.0

    @property
    def tau(self) -> float:
        """Mean acceptance length: accepted draft tokens plus the bonus token, per verify step; 0 before the first."""
        return 1 + self.num_accepted / self.num_verify_steps if self.num_verify_steps else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed: tokens after the first (which the prefill yields) per second of decoding."""
        return 1e3 * (self.num_generated_tokens - 1) / self.decode_ms if self.decode_ms else 0.0

    @property
    def host_ms(self) -> float:
        """Decoding time outside engine calls."""
        return self.decode_ms - self.draft_ms - self.refine_ms - self.verify_ms

    def count_step(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Record one verify step."""
        self.num_verify_steps += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted += num_accepted
        missing = num_accepted + 1 - len(self.acceptance_histogram)
        self.acceptance_histogram += [0] * missing
        self.acceptance_histogram[num_accepted] += 1

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of the block to the field `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            setattr(self, name, getattr(self, name) + 1e3 * (time.perf_counter() - start))

    def to_dict(self) -> dict[str, Any]:
        """Every count, time and derived figure, JSON-ready."""
        return {**vars(self), "tau": self.tau, "tokens_per_s": self.tokens_per_s, "host_ms": self.host_ms}
