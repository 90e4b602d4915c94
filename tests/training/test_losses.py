"""The closed-form losses against the formulas written out, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from xpress_export.training.losses import LossMix, head_loss, slot_weights

ROWS, HIDDEN, VOCAB, RANK = 7, 5, 11, 3
DFLASH, XPRESS = LossMix(), LossMix(tv=0.9, ce=0.1)
MIXES = [DFLASH, XPRESS, LossMix(tv=0.0, ce=0.5, kl=0.5), LossMix(tv=0.3, ce=0.2, kl=0.5)]


def naive(logits: Tensor, labels: Tensor, target: Tensor, mix: LossMix) -> Tensor:
    p = torch.softmax(logits, dim=-1)
    tv = (p - target).abs().sum(-1)
    ce = -torch.log(p[torch.arange(len(labels)), labels])
    kl = -(target * torch.log(p)).sum(-1)
    return mix.tv * tv + mix.ce * ce + mix.kl * kl


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    return {
        "hidden": draw(ROWS, HIDDEN).requires_grad_(),
        "latent": draw(ROWS, RANK).requires_grad_(),
        "w2": draw(VOCAB, RANK).requires_grad_(),
        "head": draw(VOCAB, HIDDEN),
        "final_hidden": draw(ROWS, HIDDEN),
        "weights": draw(ROWS).abs(),
        "labels": torch.randint(0, VOCAB, (ROWS,), generator=generator),
    }


@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("with_head", [False, True])
def test_value_and_gradients_are_those_of_the_formula(mix: LossMix, with_head: bool) -> None:
    given = tensors()
    trained = ["hidden", "latent", "w2"] if with_head else ["hidden"]
    extra = {name: given[name] for name in ("latent", "w2") if with_head}
    total, rows = head_loss(
        given["hidden"],
        given["head"],
        given["labels"],
        given["weights"],
        mix=mix,
        final_hidden=given["final_hidden"],
        chunk_rows=3,
        **extra,
    )
    logits = given["hidden"] @ given["head"].T
    logits = logits + given["latent"] @ given["w2"].T if with_head else logits
    target = torch.softmax(given["final_hidden"] @ given["head"].T, dim=-1)
    expected = naive(logits, given["labels"], target, mix)
    torch.testing.assert_close(rows, expected.detach(), rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(3 * total, [given[name] for name in trained])
    wanted = torch.autograd.grad(3 * (expected * given["weights"]).sum(), [given[name] for name in trained])
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_gradient_of_the_smooth_terms_by_differences() -> None:
    given = tensors(torch.float64)
    mix = LossMix(ce=0.4, kl=0.6)

    def total(hidden: Tensor) -> Tensor:
        return head_loss(
            hidden,
            given["head"],
            given["labels"],
            given["weights"],
            mix=mix,
            final_hidden=given["final_hidden"],
        )[0]

    step = torch.zeros_like(given["hidden"])
    step[2, 3] = 1e-3
    hidden = given["hidden"].detach()
    slope = (total(hidden + step) - total(hidden - step)) / 2e-3
    (grad,) = torch.autograd.grad(total(given["hidden"]), given["hidden"])
    assert abs(float(slope - grad[2, 3])) < 1e-2 * abs(float(slope))


def test_soft_terms_without_a_target_are_refused() -> None:
    given = tensors()
    with pytest.raises(ValueError, match="final_hidden"):
        head_loss(given["hidden"], given["head"], given["labels"], given["weights"], mix=XPRESS)


def test_slot_weights_decay_and_stop_where_labels_stop() -> None:
    valid = torch.tensor([[True, True, True, False]])
    weights = slot_weights(valid, decay=4.0)
    expected = torch.tensor([[1.0, 0.7788, 0.6065, 0.0]])
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-6)
