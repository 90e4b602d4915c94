"""Losses of the published recipes, with their gradients in closed form.

For a prediction with logits z (p = softmax z), the target's distribution q and the data token t:

    term   value                    gradient with respect to z
    tv     sum |p - q|              p * (s - <p, s>), s = sign(p - q)      (twice the total variation)
    ce     -log p[t]                p - onehot(t)
    kl     -sum q log p             p - q                                  (cross-entropy with soft labels)

The head is frozen, so the gradient reaches the drafter as one matrix product; nothing of vocabulary size is kept
for the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True, kw_only=True)
class LossMix:
    """Weights of the three terms: dFlash is ce alone, xPress 0.9 tv + 0.1 ce."""

    tv: float = 0.0
    ce: float = 1.0
    kl: float = 0.0

    @property
    def needs_target(self) -> bool:
        """Whether the target's distribution is read at all."""
        return self.tv > 0 or self.kl > 0


def slot_weights(valid: Tensor, decay: float) -> Tensor:
    """Weights [..., J] of the predictions: exp(-k / decay) for the k-th of a block, 0 where invalid."""
    slot = torch.arange(valid.shape[-1], device=valid.device)
    return torch.exp(-slot / decay) * valid


def mixed_loss(logits: Tensor, labels: Tensor, target: Tensor | None, mix: LossMix) -> tuple[Tensor, Tensor]:
    """Loss of each row [R] and its gradient [R, V] with respect to `logits` [R, V].

    labels: int64 [R]. target: probabilities [R, V], needed by tv and kl.
    """
    if mix.needs_target and target is None:
        raise ValueError("tv and kl compare with the target's distribution; pass final_hidden")
    log_p = torch.log_softmax(logits.float(), dim=-1)
    p = log_p.exp()
    value = -mix.ce * log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    grad = p * (mix.ce + mix.kl)
    grad.scatter_add_(-1, labels.unsqueeze(-1), grad.new_full((len(labels), 1), -mix.ce))
    if target is not None and mix.kl:
        value = value - mix.kl * (target * log_p).sum(-1)
        grad -= mix.kl * target
    if target is not None and mix.tv:
        difference = p - target
        sign = difference.sign()
        value = value + mix.tv * (difference * sign).sum(-1)
        grad += mix.tv * p * (sign - (p * sign).sum(-1, keepdim=True))
    return value, grad


class _HeadLoss(torch.autograd.Function):
    """sum over rows of weight * mixed_loss(hidden head^T + latent w2^T), gradients taken in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, latent: Tensor | None, w2: Tensor | None, rows: _HeadRows
    ) -> tuple[Tensor, Tensor]:
        grads = [torch.zeros_like(x) if x is not None else None for x in (hidden, latent, w2)]
        values = [rows.chunk(part, hidden, latent, w2, grads) for part in rows.parts(len(hidden))]
        value = torch.cat(values)
        ctx.grads = grads
        ctx.mark_non_differentiable(value)
        return (value * rows.weights).sum(), value

    @staticmethod
    def backward(ctx: FunctionCtx, grad_sum: Tensor, grad_value: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor | None] = ctx.grads  # type: ignore[attr-defined]
        return (*(None if g is None else g * grad_sum.to(g.dtype) for g in grads), None)


@dataclass(frozen=True, kw_only=True)
class _HeadRows:
    """What the loss of R rows needs besides what it is differentiated by. head: [V, E], final_hidden: [R, E]."""

    head: Tensor
    labels: Tensor
    weights: Tensor
    final_hidden: Tensor | None
    mix: LossMix
    chunk_rows: int

    def parts(self, count: int) -> list[slice]:
        return [slice(i, min(i + self.chunk_rows, count)) for i in range(0, count, self.chunk_rows)]

    def chunk(
        self,
        part: slice,
        hidden: Tensor,
        latent: Tensor | None,
        w2: Tensor | None,
        grads: list[Tensor | None],
    ) -> Tensor:
        """Values of the rows `part`; adds their gradients to `grads` (hidden, latent, w2)."""
        logits = hidden[part] @ self.head.T
        if latent is not None and w2 is not None:
            logits = logits + latent[part] @ w2.T
        target = None
        if self.mix.needs_target and self.final_hidden is not None:
            target = torch.softmax((self.final_hidden[part] @ self.head.T).float(), dim=-1)
        value, grad = mixed_loss(logits, self.labels[part], target, self.mix)
        grad = (grad * self.weights[part].unsqueeze(-1)).to(hidden.dtype)
        to_hidden, to_latent, to_w2 = grads
        if to_hidden is not None:
            to_hidden[part] = grad @ self.head
        if latent is not None and w2 is not None and to_latent is not None and to_w2 is not None:
            to_latent[part] = grad @ w2
            to_w2 += grad.T @ latent[part]
        return value


def head_loss(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    mix: LossMix,
    final_hidden: Tensor | None = None,
    latent: Tensor | None = None,
    w2: Tensor | None = None,
    chunk_rows: int = 512,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the loss over R rows, and the loss of each row [R] (not differentiable).

    hidden: [R, E], the drafter's states. head: [V, E], frozen rows of the target's head, over which the softmax
    runs. labels: int64 [R], rows of `head`. weights: float [R]. final_hidden: [R, E], the target's own states.
    latent [R, r] and w2 [V, r]: the refiner's bias, added to the logits.
    """
    rows = _HeadRows(
        head=head, labels=labels, weights=weights, final_hidden=final_hidden, mix=mix, chunk_rows=chunk_rows
    )
    total, value = _HeadLoss.apply(hidden, latent, w2, rows)  # type: ignore[no-untyped-call]
    return total, value
