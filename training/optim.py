"""Muon for the weight matrices, AdamW for everything else, and the learning-rate schedule.

Muon: momentum, then the update's nearest semi-orthogonal matrix (five Newton-Schulz steps), scaled so that its
entries have the root-mean-square of an AdamW step: one learning rate serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
ADAMW_RMS = 0.2


def orthogonalized(matrix: Tensor, dtype: torch.dtype, steps: int = 5) -> Tensor:
    """The semi-orthogonal matrix nearest to `matrix` [m, n], singular values within about 0.7..1.2."""
    a, b, c = NEWTON_SCHULZ
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = (wide / (wide.norm() + 1e-7)).to(dtype)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = x if wide is matrix else x.T
    return result.to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Muon over 2-D parameters. dtype: of the Newton-Schulz products; bfloat16 is enough where it is fast."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        grad, momentum = parameter.grad, state["momentum"]
        assert grad is not None
        momentum.lerp_(grad, 1 - group["momentum"])
        nesterov = grad.lerp(momentum, group["momentum"])
        update = orthogonalized(nesterov, self._dtype)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * ADAMW_RMS * math.sqrt(max(parameter.shape)))


def cosine_rate(step: int, total: int, warmup: int, floor: float = 0.0) -> float:
    """Factor of the learning rate at `step`: linear up over `warmup` steps, cosine down to `floor` at `total`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def stable_rate(step: int, total: int, warmup: int, decay_fraction: float) -> float:
    """Factor of the learning rate at `step`: linear up, constant, then linear down over the last part."""
    left = (total - step) / max(1.0, total * decay_fraction)
    return min(1.0, (step + 1) / max(1, warmup), left)
