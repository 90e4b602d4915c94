"""What one request asks for."""

from __future__ import annotations

from dataclasses import dataclass

from xpress_export import names
from xpress_export.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one generation; the defaults are greedy decoding in the bundle's fastest mode.

    max_new_tokens: at most this many tokens; None: until the context is full.
    stop: strings that end the generation; the text is cut exactly before the first of them.
    stop_token_ids: further ids that end it, beside the model's own.
    ignore_eos: the model's own stop tokens do not end it (for benchmarks).
    mode: "target" (plain decoding), "dflash" (drafter) or "xpress" (drafter and refiner); None: the best the
        bundle has. All modes give the same tokens.
    refine_passes: Jacobi passes of the refiner, 0 to the number of draft tokens; None: the bundle's default.
    num_draft_tokens: draft tokens verified per step, at most the block's; None: the whole block.
    """

    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    mode: str | None = None
    refine_passes: int | None = None
    num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.mode is not None and self.mode not in names.MODES:
            raise RequestError(f"mode must be one of {', '.join(names.MODES)}, got {self.mode!r}")
        for name in ("refine_passes", "num_draft_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise RequestError(f"{name} must not be negative, got {value}")
