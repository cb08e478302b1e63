"""Position-weighted cross-entropy through the target's frozen head, and what it says about acceptance.

Shape letters: N blocks, K block slots, M supervised slots, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dflash_core.blocks import Blocks

# Logits that exist at once: 256 MiB in float32, 270 slots of a 248,320-token vocabulary.
CHUNK_ELEMENTS = 2**26


class _FrozenHeadLoss(torch.autograd.Function):
    """Sum of weighted cross-entropies of linear logits, without ever holding all of them.

    The head is frozen, so the gradient is one [M, H] tensor: it is made in the forward pass while a
    chunk's logits are there, and backward only scales it. Nothing is computed twice.
    """

    @staticmethod
    def forward(ctx, hidden_MH: Tensor, head_VH: Tensor, labels_M: Tensor, weights_M: Tensor):
        wants_grad = ctx.needs_input_grad[0]
        total = torch.zeros((), device=hidden_MH.device)
        correct_M = torch.empty_like(labels_M, dtype=torch.bool)
        grad_MH = torch.empty_like(hidden_MH) if wants_grad else None
        rows = max(1, CHUNK_ELEMENTS // len(head_VH))
        for start in range(0, len(hidden_MH), rows):
            part = slice(start, start + rows)
            labels, weights = labels_M[part], weights_M[part]
            logits = (hidden_MH[part].to(head_VH.dtype) @ head_VH.T).float()
            correct_M[part] = logits.argmax(dim=-1) == labels
            log_sum = logits.logsumexp(dim=-1)
            label_logits = logits.gather(1, labels[:, None])[:, 0]
            total += (weights * (log_sum - label_logits)).sum()
            if grad_MH is not None:
                # d ce / d logits = softmax - one_hot, in place of the logits
                slope = logits.sub_(log_sum[:, None]).exp_()
                slope[torch.arange(len(labels), device=labels.device), labels] -= 1
                slope *= weights[:, None]
                grad_MH[part] = slope.to(head_VH.dtype) @ head_VH
        ctx.save_for_backward(grad_MH)
        ctx.mark_non_differentiable(correct_M)
        return total, correct_M

    @staticmethod
    def backward(ctx, *grads):  # of the total, and None of correct_M
        (grad_MH,) = ctx.saved_tensors
        return grads[0] * grad_MH, None, None, None


@dataclass(frozen=True)
class SlotCounts:
    """Counts over blocks from which accuracy and acceptance follow; add those of several packs."""

    supervised_K: Tensor
    """Blocks in which the slot is supervised."""
    correct_K: Tensor
    """Of those, blocks in which its most likely token is the label."""
    survived_K: Tensor
    """Of those, blocks in which every slot up to it is right."""
    weight: Tensor
    """Sum of all weights, the denominator of the loss."""

    def __add__(self, other: SlotCounts) -> SlotCounts:
        names = [field.name for field in fields(self)]
        return SlotCounts(*(getattr(self, name) + getattr(other, name) for name in names))

    def accuracy(self) -> list[float]:
        """Share of right tokens in slots 1 .. K - 1; 0 where nothing was supervised."""
        return (self.correct_K / self.supervised_K.clamp(min=1))[1:].tolist()

    def acceptance_length(self) -> float:
        """1 + mean over blocks of the drafts that greedy decoding would accept on this text.

        Slot 1 is supervised in every block that is not a dummy, so it counts the blocks. Comparable
        with decoding only on text that the target itself wrote greedily.
        """
        blocks = self.supervised_K[1].clamp(min=1)
        return 1 + float(self.survived_K.sum() / blocks)


def weighted_loss(hidden_NKH: Tensor, head_VH: Tensor, blocks: Blocks) -> tuple[Tensor, SlotCounts]:
    """Sum over supervised slots of weight times cross-entropy, and the counts beside it.

    A sum, not a mean: packs and ranks are added first and divided once by the sum of all weights
    (`SlotCounts.weight`), so a step's gradient does not depend on how it was cut. Slots without weight
    are left out before the head and cost nothing; with none at all the loss and its gradients are 0.

    Args:
        hidden_NKH: the drafter's output, float.
        head_VH: the target's output head, frozen; logits are computed in its type, the loss in float32.
        blocks: on the same device.
    """
    num_blocks, block_size = blocks.labels_NK.shape
    chosen_M = blocks.supervised_M
    total, correct_M = _FrozenHeadLoss.apply(
        hidden_NKH.reshape(num_blocks * block_size, -1)[chosen_M],
        head_VH,
        blocks.labels_NK.flatten()[chosen_M],
        blocks.weights_NK.flatten()[chosen_M],
    )
    supervised_NK = torch.zeros_like(blocks.labels_NK, dtype=torch.bool)
    correct_NK = supervised_NK.clone()
    supervised_NK.view(-1)[chosen_M] = True
    correct_NK.view(-1)[chosen_M] = correct_M
    survived_NK = correct_NK.clone()
    survived_NK[:, 1:] = correct_NK[:, 1:].long().cumprod(dim=1).bool()
    counts = SlotCounts(
        supervised_K=supervised_NK.sum(0),
        correct_K=correct_NK.sum(0),
        survived_K=survived_NK.sum(0),
        weight=blocks.weights_NK.sum(),
    )
    return total, counts
