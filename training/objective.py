"""What one training step minimises, for the drafter alone, a head on it, or both together.

    drafter alone    l(base)
    with a head      l(refined | true previous tokens)
                     + jacobi_weight * mean over rounds j of l(refined | the argmax of round j - 1)
                     + anchor weight * l(base)

l is the weighted mean of `losses.head_loss` over the predictions of all blocks; the softmax runs over the rows of
the drafter's head that `Vocabulary` picks. Round 0 is the bare drafter's own argmax. An argmax cuts the graph, so
rounds are independent of one another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from xpress_export.exporter.modules import Drafter, Refiner
from xpress_export.training.blocks import BlockBatch, draft_blocks
from xpress_export.training.config import LossOptions
from xpress_export.training.losses import LossMix, head_loss, slot_weights


@dataclass(frozen=True)
class Vocabulary:
    """The rows of the drafter's head that one step's softmax runs over.

    rows: int64 [U], ascending draft ids. place: int64 [Vd], position in `rows`, 0 for rows left out.
    """

    rows: Tensor
    place: Tensor


@dataclass(frozen=True)
class Targets:
    """The R predictions of a batch that count. index: int64 [R] into the flattened [S * A * J] predictions.

    labels: draft ids, int64 [R]. weights: float [R], summing to 1. final_hidden: [R, E] or None.
    """

    index: Tensor
    labels: Tensor
    weights: Tensor
    slots: Tensor
    final_hidden: Tensor | None


@dataclass(frozen=True)
class StepLoss:
    """total: differentiable. parts: the terms by name. per_slot: mean loss of each prediction slot [J]."""

    total: Tensor
    parts: dict[str, float]
    per_slot: Tensor


class Objective(nn.Module):
    """Drafter and refiner with their loss, as one module whose `forward` is a training step's forward.

    Products run in `dtype`: parameters are cast once per step and the gradients reach the float32 originals.
    token_counts: how often the data holds each draft id, int64 [Vd].
    """

    target_ids: Tensor
    draft_ids: Tensor
    by_frequency: Tensor

    def __init__(
        self,
        drafter: Drafter,
        refiner: Refiner | None,
        options: LossOptions,
        *,
        token_counts: Tensor,
        train_drafter: bool,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.drafter, self.refiner, self.options = drafter, refiner, options
        self._frozen: dict[str, Tensor] = {}
        self.w2: nn.Parameter | None = None
        if refiner is not None:  # its last product belongs to the loss, which keeps nothing of vocabulary size
            self.w2 = nn.Parameter(refiner.w2.weight.detach().clone())
            refiner.w2 = nn.Identity()  # type: ignore[assignment]
        self.train_drafter, self.dtype = train_drafter, dtype
        self.mix = LossMix(tv=options.tv, ce=options.ce, kl=options.kl)
        size = drafter.config.decoder.vocab_size
        ids = drafter.vocab.target_ids
        ids = torch.arange(size) if ids is None else ids
        draft_ids = torch.full((size,), -1)
        draft_ids[ids] = torch.arange(len(ids))
        self.register_buffer("target_ids", ids, persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.register_buffer("by_frequency", token_counts.argsort(descending=True, stable=True), persistent=False)
        drafter.embed_tokens.requires_grad_(False)
        drafter.lm_head.requires_grad_(False)
        if not train_drafter:
            drafter.requires_grad_(False)

    def forward(self, batch: BlockBatch, anchor_weight: float) -> StepLoss:
        """The loss of one batch; `anchor_weight` is that of the bare drafter beside a head."""
        weights = {name: self._low_precision(name, p) for name, p in self.named_parameters()}
        return functional_call(_Cast(self), weights_of(weights), (batch, anchor_weight))  # type: ignore[no-any-return]

    def _low_precision(self, name: str, parameter: nn.Parameter) -> Tensor:
        """`parameter` in `dtype`; what is frozen is cast once."""
        if parameter.requires_grad or parameter.dtype == self.dtype:
            return parameter.to(self.dtype)
        if name not in self._frozen:
            self._frozen[name] = parameter.detach().to(self.dtype)
        return self._frozen[name]

    def compute(self, batch: BlockBatch, anchor_weight: float) -> StepLoss:
        """`forward` in the precision the parameters have now."""
        targets = self._targets(batch)
        vocabulary = self.vocabulary(targets.labels)
        with torch.set_grad_enabled(self.train_drafter and torch.is_grad_enabled()):
            states = draft_blocks(self.drafter, batch)  # (S, A, N, E)
        hidden = states[:, :, self.drafter.config.first_slot :].flatten(0, 2)[targets.index]
        if self.refiner is None:
            return self._step({"base": (1.0, self._loss(hidden, targets, vocabulary))}, targets)
        terms = self._refined(batch, states, hidden, targets, vocabulary)
        if self.train_drafter:
            terms["base"] = (anchor_weight, self._loss(hidden, targets, vocabulary))
        return self._step(terms, targets)

    def refiner_state(self) -> dict[str, Tensor]:
        """The head's tensors under their own names."""
        assert self.refiner is not None and self.w2 is not None
        return {**self.refiner.state_dict(), "w2.weight": self.w2.detach()}

    def vocabulary(self, labels: Tensor) -> Vocabulary:
        """All rows, or the most frequent `sampled_vocab` ones and the batch's labels."""
        size, wanted = len(self.by_frequency), self.options.sampled_vocab
        if wanted is None or wanted >= size:
            rows = torch.arange(size, device=labels.device)
            return Vocabulary(rows, rows)
        rows = torch.cat((self.by_frequency[:wanted], labels)).unique()  # type: ignore[no-untyped-call]
        place = torch.zeros(size, dtype=torch.int64, device=labels.device)
        place[rows] = torch.arange(len(rows), device=labels.device)
        return Vocabulary(rows, place)

    def _targets(self, batch: BlockBatch) -> Targets:
        """Predictions with a label in the drafter's vocabulary; other labels only cost their own weight."""
        labels = self.draft_ids[batch.labels]
        weights = slot_weights(batch.valid, self.options.slot_decay)
        counted = batch.valid & (labels >= 0)
        index = counted.flatten().nonzero().squeeze(-1)
        final = batch.final_hidden
        return Targets(
            index=index,
            labels=labels.flatten()[index],
            weights=(weights / weights.sum().clamp(min=1e-9)).flatten()[index],
            slots=index % batch.labels.shape[-1],
            final_hidden=None if final is None else final.flatten(0, 2)[index],
        )

    def _loss(
        self, hidden: Tensor, targets: Targets, vocabulary: Vocabulary, latent: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        w2 = None if latent is None or self.w2 is None else self.w2[vocabulary.rows]
        return head_loss(
            hidden,
            self.drafter.lm_head.weight[vocabulary.rows],
            vocabulary.place[targets.labels],
            targets.weights,
            mix=self.mix,
            final_hidden=targets.final_hidden,
            latent=latent,
            w2=w2,
        )

    def _refined(
        self, batch: BlockBatch, states: Tensor, hidden: Tensor, targets: Targets, vocabulary: Vocabulary
    ) -> dict[str, tuple[float, tuple[Tensor, Tensor]]]:
        """Teacher-forced and free-running terms of the head."""
        refiner, options = self.refiner, self.options
        assert refiner is not None
        block = states.flatten(0, 1)  # (S*A, N, E)
        anchor, previous = batch.block_ids[..., 0].flatten(), batch.previous.flatten()

        def term(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            latent = refiner.bias(block, refiner.previous_ids(tokens, anchor, previous)).flatten(0, 1)
            value, rows = self._loss(hidden, targets, vocabulary, latent[targets.index])
            return value, rows, latent

        value, rows, _ = term(batch.labels.flatten(0, 1))
        terms = {"teacher_forced": (1.0, (value, rows))}
        tokens = self._argmax(states, None, vocabulary.rows)
        for j in range(options.jacobi_rounds):
            value, rows, latent = term(tokens)
            terms[f"jacobi_{j + 1}"] = (options.jacobi_weight / options.jacobi_rounds, (value, rows))
            if j + 1 < options.jacobi_rounds:
                tokens = self._argmax(states, latent.detach(), vocabulary.rows)
        return terms

    @torch.no_grad()
    def _argmax(self, states: Tensor, latent: Tensor | None, rows: Tensor) -> Tensor:
        """Tokens int64 [S*A, J] that the drafter, or the head with `latent` [S*A*J, r], would draft of `rows`."""
        drafts = states[:, :, self.drafter.config.first_slot :]
        logits = drafts.flatten(0, 2) @ self.drafter.lm_head.weight[rows].T
        if latent is not None and self.w2 is not None:
            logits = logits + latent @ self.w2[rows].T
        return self.target_ids[rows[logits.argmax(dim=-1)]].view(-1, drafts.shape[2])

    def _step(self, terms: dict[str, tuple[float, tuple[Tensor, Tensor]]], targets: Targets) -> StepLoss:
        total = torch.stack([weight * value for weight, (value, _) in terms.values()]).sum()
        rows = next(iter(terms.values()))[1][1]
        num_slots = self.drafter.config.num_draft_tokens
        sums = torch.zeros(num_slots, device=rows.device).index_add_(0, targets.slots, rows)
        counts = torch.bincount(targets.slots, minlength=num_slots).clamp(min=1)
        return StepLoss(total, {name: float(value.detach()) for name, (_, (value, _)) in terms.items()}, sums / counts)


class _Cast(nn.Module):
    """Calls `Objective.compute`; its parameters are named as the objective's, behind `objective.`."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, batch: BlockBatch, anchor_weight: float) -> StepLoss:
        return self.objective.compute(batch, anchor_weight)


def weights_of(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameter names as `_Cast` has them."""
    return {f"objective.{name}": weight for name, weight in weights.items()}
