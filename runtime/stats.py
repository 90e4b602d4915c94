"""What a generation and a runtime counted. Definitions are the field's; see each property."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stats:
    """Counts and times of one request; times in milliseconds of wall clock.

    num_prefilled_tokens: prompt tokens the target has read so far.
    num_verify_steps: target calls after the prefill. num_plain_steps: those of them without a draft.
    num_draft_tokens: draft tokens they checked. num_accepted: draft tokens that were right; the bonus token each
    step adds is not among them. acceptance_histogram[a]: steps that accepted exactly a draft tokens.
    num_refine_passes: refiner calls; a block that a pass leaves unchanged needs no further one.
    queue_ms: from submission to the first prefill call. ttft_ms: from submission to the first token.
    prefill_ms: inside engine calls for its own prompt. decode_ms: from the first token to the last; of that,
    draft_ms, refine_ms, verify_ms: inside engine calls, which it may have shared with other requests, and
    stall_ms: inside engine calls for the prompts of others.
    mode: as asked, "adaptive" where the runtime chose. speculation_off: why the last step had no draft, None if it
    had one. seed: of the random numbers, None where none were used.
    """

    num_prompt_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_generated_tokens: int = 0
    num_verify_steps: int = 0
    num_plain_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_refine_passes: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    draft_ms: float = 0.0
    refine_ms: float = 0.0
    verify_ms: float = 0.0
    stall_ms: float = 0.0
    mode: str = ""
    speculation_off: str | None = None
    seed: int | None = None

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
        return self.decode_ms - self.draft_ms - self.refine_ms - self.verify_ms - self.stall_ms

    def count_step(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Record one verify step."""
        self.num_verify_steps += 1
        self.num_plain_steps += num_draft_tokens == 0
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted += num_accepted
        missing = num_accepted + 1 - len(self.acceptance_histogram)
        self.acceptance_histogram += [0] * missing
        self.acceptance_histogram[num_accepted] += 1

    def to_dict(self) -> dict[str, Any]:
        """Every count, time and derived figure, JSON-ready."""
        return {**vars(self), "tau": self.tau, "tokens_per_s": self.tokens_per_s, "host_ms": self.host_ms}


@dataclass
class RuntimeStats:
    """What a runtime is doing, and what it did since it was opened.

    num_running: requests that hold a slot. num_waiting: that wait for one. num_finished, num_failed,
    num_cancelled: ended requests. num_cycles: decode cycles of the whole batch, whose engine time is draft_ms,
    refine_ms and verify_ms. host_ms: time outside engine calls while there was work. num_verify_steps,
    num_draft_tokens, num_accepted: summed over requests. kv_rows_used: committed rows of running requests.
    kv_capacity: rows of each slot's cache. kv_bytes: bytes of the caches' address space. num_graphs: CUDA graphs that
    were captured.
    """

    num_slots: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_cycles: int = 0
    num_verify_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    prefill_ms: float = 0.0
    draft_ms: float = 0.0
    refine_ms: float = 0.0
    verify_ms: float = 0.0
    host_ms: float = 0.0
    kv_rows_used: int = 0
    kv_capacity: int = 0
    kv_bytes: int = 0
    num_graphs: int = 0

    @property
    def tau(self) -> float:
        """Mean acceptance length over all verify steps of all requests; 0 before the first."""
        return 1 + self.num_accepted / self.num_verify_steps if self.num_verify_steps else 0.0
