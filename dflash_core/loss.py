"""Position-weighted losses through the target's frozen head, and what they say about acceptance.

Shape letters: N blocks, K block slots, M supervised slots, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from dflash_core.blocks import Blocks

# Logits that exist at once. CPU: 256 MiB in float32. GPU: 805 MB in bfloat16, 1,621 slots of a
# 248,320-token vocabulary; every chunk reads the head twice, so small ones cost more than they save.
CHUNK_ELEMENTS = {"cpu": 2**26, "cuda": 3 * 2**27}
_NOT_STORED = 1.0  # no log-probability: those are 0 at most
# A bucket that neither a rounded sum nor a drafter without doubts may empty: float16 holds log-probabilities
# near 0 to 1e-7, others to 1/2048 of themselves.
_LEAST_BUCKET, _TINY = 1e-6, 1e-30


def frozen_head_loss(
    hidden_MH: Tensor,
    head_VH: Tensor,
    labels_M: Tensor,
    kind: str = "ce",
    teacher: Teacher | None = None,
) -> tuple[Tensor, Tensor]:
    """Loss of each slot's logits, float32 [M], and whether the label is its likeliest token.

    The head is frozen, so all that backward needs is one [M, H] tensor: it is made in the forward pass
    while a chunk's logits are there, and backward only scales its rows. Nothing is computed twice, and
    logits of all slots never exist at once.

    Args:
        kind: `ce`, or one of `DISTILLATIONS`.
        teacher: for those, what is known of the target at the positions that predict the labels.
    """
    return _FrozenHeadLoss.apply(hidden_MH, head_VH, labels_M, kind, teacher)


class _FrozenHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden_MH: Tensor,
        head_VH: Tensor,
        labels_M: Tensor,
        kind: str,
        teacher: Teacher | None,
    ):
        device = hidden_MH.device
        loss_M = torch.empty(len(labels_M), device=device)
        correct_M = torch.empty_like(labels_M, dtype=torch.bool)
        grad_MH = torch.empty_like(hidden_MH) if ctx.needs_input_grad[0] else None
        rows = max(1, min(CHUNK_ELEMENTS[device.type] // len(head_VH), len(labels_M)))
        if device.type == "cuda":
            rows = -(-rows // _GPU_ROWS) * _GPU_ROWS  # few shapes to compile, and whole tiles
        logits_RV = torch.zeros(rows, len(head_VH), dtype=head_VH.dtype, device=device)
        labels_R = torch.zeros(rows, dtype=labels_M.dtype, device=device)
        loss_of = _loss_function(kind, device.type == "cuda")
        inputs, known_RV = (logits_RV, labels_R), None
        if kind in DISTILLATIONS:
            assert teacher is not None, "a distillation needs a teacher"
            known_RV = teacher.buffer(logits_RV)
            inputs += (DISTILLATIONS[kind], teacher.log_p_of, known_RV)
        for start in range(0, len(labels_M), rows):
            part = slice(start, start + rows)
            size = len(labels_M[part])
            torch.mm(hidden_MH[part].to(head_VH.dtype), head_VH.T, out=logits_RV[:size])
            if teacher is not None and known_RV is not None:
                teacher.rows(part).write(known_RV[:size], head_VH)
            labels_R[:size] = labels_M[part]
            loss_R, correct_R = loss_of(*inputs)
            loss_M[part], correct_M[part] = loss_R[:size], correct_R[:size]
            if grad_MH is not None:
                grad_MH[part] = logits_RV[:size] @ head_VH
        ctx.save_for_backward(grad_MH)
        ctx.mark_non_differentiable(correct_M)
        return loss_M, correct_M

    @staticmethod
    def backward(ctx, *grads):  # of the losses, and None of correct_M
        (grad_MH,) = ctx.saved_tensors
        return grads[0][:, None] * grad_MH, None, None, None, None


def cross_entropy_(logits_RV: Tensor, labels_R: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and hits of logits, which are replaced by the slope of each loss: softmax - one_hot.

    Computed in float32 whatever the type of the logits.
    """
    scores_RV = logits_RV.float()
    top_R = scores_RV.amax(dim=-1)
    label_R = scores_RV.gather(1, labels_R[:, None])[:, 0]
    slope_RV = scores_RV.softmax(dim=-1)
    # The likeliest token has the probability 1 / sum(exp(score - top)).
    loss_R = top_R - label_R - slope_RV.amax(dim=-1).log()
    slope_RV[torch.arange(len(labels_R), device=labels_R.device), labels_R] -= 1
    logits_RV.copy_(slope_RV)
    return loss_R, label_R == top_R


def fused_cross_entropy_(logits_RV: Tensor, labels_R: Tensor) -> tuple[Tensor, Tensor]:
    """`cross_entropy_` in the form that compiles to two passes over the logits."""
    scores_RV = logits_RV.float()
    top_R1 = scores_RV.amax(dim=-1, keepdim=True)
    weights_RV = (scores_RV - top_R1).exp()
    total_R1 = weights_RV.sum(dim=-1, keepdim=True)
    label_R1 = logits_RV.gather(1, labels_R[:, None]).float()
    is_label_RV = torch.arange(logits_RV.shape[1], device=labels_R.device) == labels_R[:, None]
    logits_RV.copy_(weights_RV / total_R1 - is_label_RV.float())
    loss_R1 = (top_R1 - label_R1) + total_R1.log()
    return loss_R1[:, 0], (label_R1 == top_R1)[:, 0]


def distil_(
    logits_RV: Tensor,
    labels_R: Tensor,
    divergence: Divergence,
    log_p_of: Callable[[Tensor, Tensor], Tensor],
    known_RV: Tensor,
) -> tuple[Tensor, Tensor]:
    """Losses and hits as `cross_entropy_`, against the target's distribution p in place of the label.

    Args:
        divergence: one of `DISTILLATIONS`.
        log_p_of, known_RV: of a `Teacher`: logarithms of p from those of the drafter's q and from what is
            known of p.
    """
    log_q_RV = logits_RV.float().log_softmax(dim=-1)
    loss_R, slope_RV = divergence(log_q_RV, log_p_of(log_q_RV, known_RV))
    correct_R = _is_top(logits_RV, labels_R)
    logits_RV.copy_(slope_RV)
    return loss_R, correct_R


def kl(log_q_RV: Tensor, log_p_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Divergence KL(p to q) of the target's distribution p from the drafter's q, and its slope."""
    q_RV, p_RV = log_q_RV.exp(), log_p_RV.exp()
    return (p_RV * (log_p_RV - log_q_RV)).sum(-1), q_RV - p_RV


def lk(log_q_RV: Tensor, log_p_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Hybrid LK: weight * KL + (1 - weight) * (1 - overlap), and its slope.

    The overlap sum(min(p, q)) is the chance that sampled decoding accepts the slot. The weight
    exp(-3 overlap), without a gradient, leads from KL to the overlap as the drafter gets better.

    Reference: https://arxiv.org/abs/2602.23881
    """
    q_RV, p_RV = log_q_RV.exp(), log_p_RV.exp()
    kl_R, kl_slope_RV = kl(log_q_RV, log_p_RV)
    overlap_R = torch.minimum(p_RV, q_RV).sum(-1)
    weight_R = (-3 * overlap_R).exp()
    weight_R1 = weight_R[:, None]
    # More of a token that the drafter gives too little helps; softmax takes it from all tokens.
    short_RV = q_RV * (q_RV < p_RV)
    overlap_slope_RV = short_RV - q_RV * short_RV.sum(-1, keepdim=True)
    slope_RV = weight_R1 * kl_slope_RV - (1 - weight_R1) * overlap_slope_RV
    return weight_R * kl_R + (1 - weight_R) * (1 - overlap_R), slope_RV


def log_p_of_logits(log_q_RV: Tensor, logits_RV: Tensor) -> Tensor:
    """The target's log-probabilities from its logits, whatever the drafter's are."""
    return logits_RV.float().log_softmax(dim=-1)


def log_p_of_top_k(log_q_RV: Tensor, stored_RV: Tensor) -> Tensor:
    """The target's log-probabilities from those of its most likely tokens, all others being one bucket.

    In the bucket p is spread like q. That makes the KL divergence, the overlap and their slopes over all
    tokens those over the most likely tokens and the bucket.

    Args:
        stored_RV: log-probabilities of the most likely tokens, `_NOT_STORED` for the others.
    """
    in_bucket_RV = stored_RV == _NOT_STORED
    stored_RV = stored_RV.float()
    top_R1 = stored_RV.exp().masked_fill(in_bucket_RV, 0).sum(-1, keepdim=True)
    bucket_R1 = (1 - top_R1).clamp(min=_LEAST_BUCKET)
    drafters_R1 = log_q_RV.exp().where(in_bucket_RV, 0).sum(-1, keepdim=True).clamp(min=_TINY)
    log_p_RV = torch.where(in_bucket_RV, log_q_RV + (bucket_R1 / drafters_R1).log(), stored_RV)
    # What is stored is rounded and may add up to more than 1.
    return log_p_RV - (top_R1 + bucket_R1).log()


@dataclass(frozen=True)
class LastStates:
    """A teacher that knows the target's whole distribution."""

    states_MH: Tensor
    """The target's last hidden states, behind its final norm."""

    log_p_of: ClassVar = staticmethod(log_p_of_logits)

    def __len__(self) -> int:
        return len(self.states_MH)

    def rows(self, chosen: Tensor | slice) -> LastStates:
        return LastStates(self.states_MH[chosen])

    def buffer(self, logits_RV: Tensor) -> Tensor:
        """Zeros to be filled with what is known of as many rows as there are logits."""
        return torch.zeros_like(logits_RV)

    def write(self, known_MV: Tensor, head_VH: Tensor) -> None:
        """Fills rows of a buffer with logits."""
        torch.mm(self.states_MH.to(head_VH.dtype), head_VH.T, out=known_MV)


@dataclass(frozen=True)
class TopK:
    """A teacher that knows the target's most likely tokens."""

    ids_MK: Tensor
    """Integers, different ones in a row."""
    logprobs_MK: Tensor
    """Their log-probabilities among the whole vocabulary."""

    log_p_of: ClassVar = staticmethod(log_p_of_top_k)

    def __len__(self) -> int:
        return len(self.ids_MK)

    def rows(self, chosen: Tensor | slice) -> TopK:
        return TopK(self.ids_MK[chosen], self.logprobs_MK[chosen])

    def buffer(self, logits_RV: Tensor) -> Tensor:
        """As that of `LastStates`."""
        return torch.zeros_like(logits_RV, dtype=self.logprobs_MK.dtype)

    def write(self, known_MV: Tensor, head_VH: Tensor) -> None:
        """Fills rows of a buffer with log-probabilities, `_NOT_STORED` between them."""
        known_MV.fill_(_NOT_STORED).scatter_(1, self.ids_MK.long(), self.logprobs_MK)


def _is_top(logits_RV: Tensor, labels_R: Tensor) -> Tensor:
    return logits_RV.gather(1, labels_R[:, None])[:, 0] == logits_RV.amax(dim=-1)


LossFunction: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
Divergence: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Teacher: TypeAlias = LastStates | TopK
DISTILLATIONS: dict[str, Divergence] = {"kl": kl, "lk": lk}
_GPU_ROWS = 256


def _loss_function(kind: str, compiled: bool) -> LossFunction:
    if compiled:
        return _compiled(distil_ if kind in DISTILLATIONS else fused_cross_entropy_)
    return distil_ if kind in DISTILLATIONS else cross_entropy_


@lru_cache
def _compiled(function: LossFunction) -> LossFunction:
    return torch.compile(function)


def dpace_weights(loss_NK: Tensor, supervised_NK: Tensor, alpha: float) -> Tensor:
    """D-PACE: what a slot's log-likelihood contributes to a smooth form of the expected acceptance.

    With q the drafter's probability of each label and s = (1 - alpha) q + alpha, slot j weighs the sum
    over m >= j of the products of s up to m. Weights carry no gradient.

    Args:
        loss_NK: cross-entropies; of no account where not supervised.
        supervised_NK: bool; a prefix of the predicting slots of each block.
        alpha: 0 to 1.

    Reference: https://arxiv.org/abs/2605.18810
    """
    confidence = (1 - alpha) * (-loss_NK.detach()).exp() + alpha
    survival = confidence.where(supervised_NK, 1).cumprod(dim=1) * supervised_NK
    return survival.flip(1).cumsum(dim=1).flip(1) * supervised_NK


@dataclass(frozen=True)
class SlotCounts:
    """Counts over blocks from which accuracy and acceptance follow; add those of several packs.

    P are the slots that predict: all but the first in the in-place layout, all in the shifted one.
    """

    supervised_P: Tensor
    """Blocks in which the slot is supervised."""
    correct_P: Tensor
    """Of those, blocks in which its likeliest token is the label."""
    survived_P: Tensor
    """Of those, blocks in which every slot up to it is right."""
    weight: Tensor
    """Sum of all weights, the denominator of the loss."""

    def fields(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def __add__(self, other: SlotCounts) -> SlotCounts:
        return SlotCounts(*map(torch.add, self.fields(), other.fields()))

    def accuracy(self) -> list[float]:
        """Share of right tokens in each slot; 0 where nothing was supervised."""
        return (self.correct_P / self.supervised_P.clamp(min=1)).tolist()

    def acceptance_length(self) -> float:
        """1 + mean over blocks of the drafts that greedy decoding would accept on this text.

        The first slot is supervised in every block that is not a dummy, so it counts the blocks.
        Comparable with decoding only on text that the target itself wrote greedily.
        """
        blocks = self.supervised_P[0].clamp(min=1)
        return 1 + float(self.survived_P.sum() / blocks)


def weighted_loss(
    hidden_NKH: Tensor,
    head_VH: Tensor,
    blocks: Blocks,
    *,
    first_slot: int = 1,
    dpace_alpha: float | None = None,
    kind: str = "ce",
    teacher: Teacher | None = None,
) -> tuple[Tensor, SlotCounts]:
    """Sum over supervised slots of weight times loss, and the counts beside it.

    A sum, not a mean: packs and ranks are added first and divided once by the sum of all weights
    (`SlotCounts.weight`), so a step's gradient does not depend on how it was cut. Slots without weight
    are left out before the head and cost nothing; with none at all the loss and its gradients are 0.

    Args:
        hidden_NKH: the drafter's output, float.
        head_VH: the target's output head, frozen; logits are computed in its type, the loss in float32.
        blocks: on the same device.
        first_slot: first slot that predicts.
        dpace_alpha: weigh by `dpace_weights`, with `ce` only; None takes the weights of `blocks`.
        kind: `ce`, or one of `DISTILLATIONS`.
        teacher: for those, what is known of the target at each row of the pack.
    """
    chosen_M, size = blocks.supervised_M, blocks.labels_NK.shape
    if teacher is not None:
        # The target's row i predicts token i + 1: slot j's label is predicted a row before it.
        slots_K = torch.arange(size[1], device=chosen_M.device) - first_slot
        rows_NK = (blocks.anchors_N[:, None] + slots_K).clamp(max=len(teacher) - 1)
        teacher = teacher.rows(rows_NK.flatten()[chosen_M])
    loss_M, correct_M = frozen_head_loss(
        hidden_NKH.reshape(size.numel(), -1).index_select(0, chosen_M),
        head_VH,
        blocks.labels_NK.flatten()[chosen_M],
        kind,
        teacher,
    )

    def spread(values_M: Tensor) -> Tensor:
        zeros = torch.zeros(size.numel(), dtype=values_M.dtype, device=values_M.device)
        return zeros.index_copy(0, chosen_M, values_M).view(size)

    weights_NK, supervised_NK = blocks.weights_NK, blocks.weights_NK > 0
    if dpace_alpha is not None:
        weights_NK = dpace_weights(spread(loss_M.detach()), supervised_NK, dpace_alpha)
    predicting = slice(first_slot, None)
    supervised_NP, correct_NP = supervised_NK[:, predicting], spread(correct_M)[:, predicting]
    counts = SlotCounts(
        supervised_P=supervised_NP.sum(0),
        correct_P=correct_NP.sum(0),
        survived_P=correct_NP.long().cumprod(dim=1).sum(0),
        weight=weights_NK.sum(),
    )
    return (weights_NK.flatten()[chosen_M] * loss_M).sum(), counts
