"""Anchors and blocks of a pack: what is predicted, from what, with which weight.

A block starts at an anchor, a token that is already known; its other slots are mask tokens. In the
in-place layout slot j predicts the token j rows after the anchor and slot 0 nothing; in the shifted one
slot j predicts the token j + 1 rows after it. Everything here is small integer work on the CPU.

Shape letters: T rows of a pack, N anchors, K block slots, M supervised slots.
Reference: DFlash, https://arxiv.org/abs/2602.06036, section on training.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dflash_core.attention import KeyRanges, key_ranges
from dflash_core.devices import to_device
from dflash_core.model import SLIDING, DrafterShape


@dataclass(frozen=True)
class Blocks:
    """N blocks of K slots drawn from one pack; blocks that could not be drawn are dummies at the end.

    A dummy has its anchor on the pack's last row, sees no context and carries no weight. It only keeps
    shapes static.
    """

    anchors_N: Tensor
    """Row of each anchor in the pack, int64, rising."""
    starts_N: Tensor
    """First row of each anchor's document, int64; the anchor itself for a dummy."""
    token_ids_NK: Tensor
    """Drafter input, int64: the anchor's token, then mask tokens."""
    positions_NK: Tensor
    """Position of each slot in its document, int64."""
    labels_NK: Tensor
    """Token that each slot is to predict, int64; meaningless where the weight is 0."""
    weights_NK: Tensor
    """Weight of each slot in the loss, float32; 0 for unsupervised ones, and slot 0 in place."""
    supervised_M: Tensor
    """Slots with a weight, as rising indices into the N * K slots, int64."""

    def to(self, device: torch.device) -> Blocks:
        return Blocks(*(to_device(getattr(self, field.name), device) for field in fields(self)))


def sample_anchors(
    loss_mask_T: Tensor, document_ids_T: Tensor, num_anchors: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Rows to start blocks from, drawn evenly without replacement.

    Row a is eligible when rows a and a + 1 are supervised and of one document, so the first anchor of
    an answer is its first token and slot 1 always has a label.

    Returns:
        anchors_N: int64, rising; the rows past the drawn ones hold T - 1, which is never eligible.
        valid_N: bool, False for those; fewer eligible rows than `num_anchors` leave some.
    """
    supervised = loss_mask_T.bool()
    pairs = supervised[:-1] & supervised[1:] & (document_ids_T[:-1] == document_ids_T[1:])
    eligible = pairs.nonzero().flatten()
    drawn = torch.randperm(len(eligible), generator=generator)[:num_anchors]
    anchors_N = torch.full((num_anchors,), len(loss_mask_T) - 1)
    anchors_N[: len(drawn)] = eligible[drawn].sort().values
    return anchors_N, torch.arange(num_anchors) < len(drawn)


def build_blocks(
    input_ids_T: Tensor,
    loss_mask_T: Tensor,
    document_ids_T: Tensor,
    positions_T: Tensor,
    anchors: tuple[Tensor, Tensor],
    *,
    block_size: int,
    first_slot: int,
    mask_token_id: int,
    loss_decay: float,
) -> Blocks:
    """The blocks that start at `anchors`.

    A slot is supervised while its label and every one before it are rows of the anchor's document with
    a loss: a gap (a user's turn) ends the block, because decoding never continues past one. Slot j then
    weighs exp(-(j - first_slot) / loss_decay).

    Args:
        input_ids_T: token ids, any integer type.
        loss_mask_T: 1 where a token is the target's own.
        document_ids_T: sample of each row, -1 past the last.
        positions_T: position of each row in its sample.
        anchors: what `sample_anchors` returned.
        block_size: K.
        first_slot: first slot that predicts: 1 in place, 0 shifted.
        mask_token_id: input of the unknown slots.
        loss_decay: gamma of the paper's weights.
    """
    anchors_N, valid_N = anchors
    slots_K = torch.arange(block_size)
    rows_NK = anchors_N[:, None] + slots_K + 1 - first_slot
    inside_NK = rows_NK < len(input_ids_T)
    rows_NK = rows_NK.clamp(max=len(input_ids_T) - 1)
    supervised_NK = (
        inside_NK
        & valid_N[:, None]
        & _at(loss_mask_T, rows_NK).bool()
        & (_at(document_ids_T, rows_NK) == _at(document_ids_T, anchors_N)[:, None])
    )
    prefix_NK = supervised_NK.long().cumprod(dim=1)
    prefix_NK[:, :first_slot] = 0
    token_ids_NK = torch.full_like(rows_NK, mask_token_id)
    token_ids_NK[:, 0] = _at(input_ids_T, anchors_N)
    first_positions_N = _at(positions_T, anchors_N).long()
    return Blocks(
        anchors_N=anchors_N,
        starts_N=anchors_N - first_positions_N.where(valid_N, 0),
        token_ids_NK=token_ids_NK,
        positions_NK=first_positions_N[:, None] + slots_K,
        labels_NK=_at(input_ids_T, rows_NK).long(),
        weights_NK=prefix_NK * torch.exp(-(slots_K - first_slot) / loss_decay),
        supervised_M=prefix_NK.flatten().nonzero().flatten(),
    )


def _at(values_T: Tensor, rows: Tensor) -> Tensor:
    """`values_T[rows]` by numpy: torch wakes all its threads for 8,192 numbers, 8 ms on 32 cores."""
    return torch.from_numpy(values_T.numpy()[rows.numpy()])


def ranges_by_kind(
    shape: DrafterShape, anchors_N: Tensor, starts_N: Tensor
) -> dict[str, KeyRanges]:
    """What the slots of blocks see in each kind of layer that a drafter of `shape` has."""
    return {
        kind: key_ranges(
            anchors_N,
            starts_N,
            shape.block_size,
            window=shape.sliding_window if kind == SLIDING else None,
            causal=shape.causal_in_block(kind),
        )
        for kind in sorted(set(shape.layer_types))
    }
