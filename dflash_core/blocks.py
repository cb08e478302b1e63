"""Anchors, blocks and attention masks of a pack: what is predicted, from what, with which weight.

A block starts at an anchor, a token that is already known; its other slots are mask tokens, and slot j
predicts the token j rows after the anchor. Everything here is small integer work on the CPU.

Shape letters: T rows of a pack, N anchors, K block slots, M supervised slots.
Reference: DFlash, https://arxiv.org/abs/2602.06036, sections on training and on the block mask.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from dflash_core.model import SLIDING, DrafterShape

_NO_DOCUMENT = -2  # of dummy blocks; rows past the last sample have -1, so it equals none


@dataclass(frozen=True)
class Blocks:
    """N blocks of K slots drawn from one pack; blocks that could not be drawn are dummies at the end.

    A dummy has its anchor on the pack's last row, belongs to no document, sees no context and carries
    no weight. It only keeps shapes static.
    """

    anchors_N: Tensor
    """Row of each anchor in the pack, int64, rising."""
    documents_N: Tensor
    """Document of each block, int64; -2 for a dummy."""
    token_ids_NK: Tensor
    """Drafter input, int64: the anchor's token, then mask tokens."""
    positions_NK: Tensor
    """Position of each slot in its document, int64."""
    labels_NK: Tensor
    """Token that each slot is to predict, int64; meaningless where the weight is 0."""
    weights_NK: Tensor
    """Weight of each slot in the loss, float32; slot 0 and unsupervised slots have 0."""
    supervised_M: Tensor
    """Slots with a weight, as rising indices into the N * K slots, int64."""

    def to(self, device: torch.device) -> Blocks:
        moved = (getattr(self, field.name).to(device, non_blocking=True) for field in fields(self))
        return Blocks(*moved)


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
    mask_token_id: int,
    loss_decay: float,
) -> Blocks:
    """The blocks that start at `anchors`.

    A slot is supervised while it and every slot before it are rows of the anchor's document with a
    loss: a gap (a user's turn) ends the block, because decoding never continues past one. Slot j then
    weighs exp(-(j - 1) / loss_decay).

    Args:
        input_ids_T: token ids, any integer type.
        loss_mask_T: 1 where a token is the target's own.
        document_ids_T: sample of each row, -1 past the last.
        positions_T: position of each row in its sample.
        anchors: what `sample_anchors` returned.
        block_size: K.
        mask_token_id: input of the unknown slots.
        loss_decay: gamma of the paper's weights.
    """
    anchors_N, valid_N = anchors
    slots_K = torch.arange(block_size)
    rows_NK = anchors_N[:, None] + slots_K
    inside_NK = rows_NK < len(input_ids_T)
    rows_NK = rows_NK.clamp(max=len(input_ids_T) - 1)
    supervised_NK = (
        inside_NK
        & valid_N[:, None]
        & loss_mask_T.bool()[rows_NK]
        & (document_ids_T[rows_NK] == document_ids_T[anchors_N, None])
    )
    prefix_NK = supervised_NK.long().cumprod(dim=1)
    prefix_NK[:, 0] = 0
    weights_NK = prefix_NK * torch.exp(-(slots_K - 1) / loss_decay)
    labels_NK = input_ids_T.long()[rows_NK]
    token_ids_NK = torch.full_like(labels_NK, mask_token_id)
    token_ids_NK[:, 0] = labels_NK[:, 0]
    return Blocks(
        anchors_N=anchors_N,
        documents_N=document_ids_T.long()[anchors_N].where(valid_N, _NO_DOCUMENT),
        token_ids_NK=token_ids_NK,
        positions_NK=positions_T.long()[anchors_N, None] + slots_K,
        labels_NK=labels_NK,
        weights_NK=weights_NK,
        supervised_M=prefix_NK.flatten().nonzero().flatten(),
    )


def block_mask(
    anchors_N: Tensor,
    documents_N: Tensor,
    document_ids_T: Tensor,
    block_size: int,
    *,
    window: int | None,
    causal: bool,
) -> Tensor:
    """Who sees whom: bool [1, 1, N * K, T + N * K], True = may attend, context keys first.

    Slot j of a block with anchor a sees context row i when i < a, strictly, and i is of its document:
    the target's row a was computed after reading the anchor and gives away the label of slot 1. With a
    window W it also needs i >= a + j - (W - 1). Of slots it sees those of its own block only, itself
    always, so no row is empty.

    Args:
        anchors_N: rows of the anchors.
        documents_N: their documents; one that no row has (a dummy) sees no context.
        document_ids_T: document of each context row.
        block_size: K.
        window: rows that a sliding layer sees, the current one counted; None for a full layer.
        causal: whether a slot sees only itself and earlier slots of its block.
    """
    device, num_blocks = anchors_N.device, len(anchors_N)
    rows_T = torch.arange(len(document_ids_T), device=device)
    slots_K = torch.arange(block_size, device=device)
    before_NT = (rows_T < anchors_N[:, None]) & (document_ids_T == documents_N[:, None])
    context_NKT = before_NT[:, None].expand(-1, block_size, -1)
    distance_KK = slots_K[:, None] - slots_K
    block_KK = torch.ones_like(distance_KK, dtype=torch.bool)
    if window is not None:
        first_NK = anchors_N[:, None] + slots_K - (window - 1)
        context_NKT = context_NKT & (rows_T >= first_NK[..., None])
        block_KK = distance_KK.abs() < window
    if causal:
        block_KK = block_KK & (distance_KK >= 0)
    same_block = torch.eye(num_blocks, dtype=torch.bool, device=device)
    slots = same_block[:, None, :, None] & block_KK[None, :, None, :]
    size = num_blocks * block_size
    mask = torch.cat((context_NKT.reshape(size, -1), slots.reshape(size, size)), dim=1)
    return mask[None, None]


def attention_masks(
    shape: DrafterShape, anchors_N: Tensor, documents_N: Tensor, document_ids_T: Tensor
) -> dict[str, Tensor]:
    """The mask of each kind of layer that a drafter of `shape` has; see `block_mask`."""
    return {
        kind: block_mask(
            anchors_N,
            documents_N,
            document_ids_T,
            shape.block_size,
            window=shape.sliding_window if kind == SLIDING else None,
            causal=shape.causal_in_block(kind),
        )
        for kind in sorted(set(shape.layer_types))
    }
