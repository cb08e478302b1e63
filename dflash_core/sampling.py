"""Sampling as served, and speculative rejection sampling, which leaves its distribution as it is.

Shape letters: B sequences, R rows of the target, D = R - 1 drafts of a chain, V vocabulary.
Reference: Leviathan et al., https://arxiv.org/abs/2211.17192, algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Only the smallest set of most likely tokens with at least this probability."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


GREEDY = Sampling()


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that is sampled from, float32 [..., V]; sums to 1 up to rounding."""
    found = (logits.float() / sampling.temperature).softmax(-1)
    if sampling.top_p >= 1:
        return found
    ordered, order = found.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    ordered = ordered.masked_fill(before >= sampling.top_p, 0)
    nucleus = torch.zeros_like(found).scatter(-1, order, ordered)
    return nucleus / nucleus.sum(-1, keepdim=True)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """A token in proportion to its weight, by inverting the cumulative sum at `uniform` in [0, 1).

    Args:
        weights: [..., V], at least 0, not all of them 0; need not sum to 1. uniform: [...].

    Returns:
        int64 [...]; never a token of weight 0.
    """
    cumulative = weights.double().cumsum(-1)
    wanted = uniform[..., None] * cumulative[..., -1:]
    token = torch.searchsorted(cumulative, wanted, right=True)
    # Rounding can carry `wanted` up to the whole sum, which only a token past the last would exceed.
    last = torch.searchsorted(cumulative, cumulative[..., -1:].contiguous())
    return torch.minimum(token, last)[..., 0]


def accept(
    target_BRV: Tensor,
    drafter_BDV: Tensor,
    drafts_BD: Tensor,
    num_drafts_B: Tensor,
    uniform_BR: Tensor,
) -> tuple[list[int], list[int]]:
    """Judges drafts so that what is emitted is distributed as the target's own samples.

    Draft d of a chain is accepted with probability min(1, p(d) / q(d)) if all before it were. After the
    first that is not, a token from max(p - q, 0); after the last draft one from p.

    Args:
        target_BRV: p, the target's distribution after each row; row 0 is the token before the drafts.
        drafter_BDV: q, the distribution that each draft was drawn from.
        num_drafts_B: how many of the D drafts are real, int64.
        uniform_BR: fresh numbers in [0, 1).

    Returns:
        For each sequence the number of accepted drafts, and the token that follows them.
    """
    num_drafts = drafts_BD.shape[1]
    p_BD = target_BRV[:, :num_drafts].gather(2, drafts_BD[..., None])[..., 0]
    q_BD = drafter_BDV.gather(2, drafts_BD[..., None])[..., 0]
    real_BD = torch.arange(num_drafts, device=drafts_BD.device) < num_drafts_B[:, None]
    good_BD = real_BD & (uniform_BR[:, :num_drafts] * q_BD < p_BD)
    accepted_B = good_BD.long().cumprod(1).sum(1)
    sequences_B = torch.arange(len(accepted_B), device=accepted_B.device)
    next_BV = target_BRV[sequences_B, accepted_B]
    if num_drafts:
        q_BV = drafter_BDV[sequences_B, accepted_B.clamp(max=num_drafts - 1)]
        rest_BV = (next_BV - q_BV).clamp(min=0)
        # A rejection leaves some p above q; rounding alone could leave none.
        use_rest_B = (accepted_B < num_drafts_B) & (rest_BV.sum(1) > 0)
        next_BV = torch.where(use_rest_B[:, None], rest_BV, next_BV)
    next_B = draw(next_BV, uniform_BR[:, num_drafts])
    return accepted_B.tolist(), next_B.tolist()
