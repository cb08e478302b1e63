"""Which keys a block slot attends to, and attention over them: dense, in tiles, or by FlexAttention.

The keys of a pack are its context rows and, behind them, all slots of its blocks. A slot sees one range
of each: rows of its document before its anchor, and slots of its own block. The three ways to compute
attention follow from these ranges and differ in speed alone: a dense mask for one block (decoding),
tiles for many blocks on a CPU, FlexAttention for many blocks on a GPU.

Shape letters: B sequences, T context rows, N anchors, K block slots, Q = N * K slots, S = T + Q keys,
h heads, D head width, R query tiles, C key tiles.
Reference: DFlash, https://arxiv.org/abs/2602.06036, section on the block mask.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

_TILE_SLOTS = 32  # 16 to 64 measured alike
FLEX_TILE = 128  # rows and keys of a FlexAttention tile; a wider one computes more that is masked


@dataclass(frozen=True)
class KeyRanges:
    """For each slot the keys that it sees, as two half-open ranges, int32 [Q]."""

    first_row_Q: Tensor
    end_row_Q: Tensor
    """Context rows; first = end for a dummy block, which sees none."""
    first_slot_Q: Tensor
    end_slot_Q: Tensor
    """Slots of all blocks, counted from 0; never empty, a slot always sees itself."""

    def part(self, slots: slice) -> KeyRanges:
        return KeyRanges(*(getattr(self, field.name)[slots] for field in fields(self)))


def key_ranges(
    anchors_N: Tensor, starts_N: Tensor, block_size: int, *, window: int | None, causal: bool
) -> KeyRanges:
    """Slot j of a block with anchor a sees context row i when start <= i < a, strictly: the target's
    row a was computed after reading the anchor and gives away the label of slot 1. With a window W it
    also needs i >= a + j - (W - 1). Of slots it sees those of its own block only.

    Args:
        anchors_N: rows of the anchors.
        starts_N: first rows of their documents; a dummy's is its anchor.
        block_size: K.
        window: rows that a sliding layer sees, the current one counted; None for a full layer.
        causal: whether a slot sees only itself and earlier slots of its block.
    """
    slots_K = torch.arange(block_size, device=anchors_N.device)
    blocks_N1 = torch.arange(len(anchors_N), device=anchors_N.device)[:, None] * block_size
    first_row = starts_N[:, None].expand(-1, block_size)
    end_row = anchors_N[:, None].expand(-1, block_size)
    first_slot, end_slot = torch.zeros_like(slots_K), torch.full_like(slots_K, block_size)
    if window is not None:
        oldest = anchors_N[:, None] + slots_K - (window - 1)
        first_row = torch.maximum(first_row, oldest).minimum(end_row)
        first_slot = (slots_K - (window - 1)).clamp(min=0)
        end_slot = (slots_K + window).clamp(max=block_size)
    if causal:
        end_slot = slots_K + 1
    ranges = (first_row, end_row, blocks_N1 + first_slot, blocks_N1 + end_slot)
    return KeyRanges(*(bound.flatten().int() for bound in ranges))


def dense_mask(ranges: KeyRanges, num_rows: int) -> Tensor:
    """Bool [1, 1, Q, T + Q] with T = `num_rows`, True where a slot may attend; no row is all False."""
    device, num_slots = ranges.end_row_Q.device, len(ranges.end_row_Q)
    rows = _inside(torch.arange(num_rows, device=device), ranges.first_row_Q, ranges.end_row_Q)
    slots = _inside(torch.arange(num_slots, device=device), ranges.first_slot_Q, ranges.end_slot_Q)
    return torch.cat((rows, slots), dim=1)[None, None]


def sequence_masks(ranges: KeyRanges, num_rows: int, block_size: int) -> Tensor:
    """As `dense_mask`, of blocks that are each behind a sequence of their own: bool [N, 1, K, T + K]."""
    device, num_slots = ranges.end_row_Q.device, len(ranges.end_row_Q)
    before_Q = torch.arange(num_slots, device=device) // block_size * block_size
    slots = torch.arange(block_size, device=device)
    rows_QT = _inside(torch.arange(num_rows, device=device), ranges.first_row_Q, ranges.end_row_Q)
    slots_QK = _inside(slots, ranges.first_slot_Q - before_Q, ranges.end_slot_Q - before_Q)
    return torch.cat((rows_QT, slots_QK), dim=1).unflatten(0, (-1, block_size))[:, None]


def _inside(keys_S: Tensor, first_Q: Tensor, end_Q: Tensor) -> Tensor:
    return (keys_S >= first_Q[:, None]) & (keys_S < end_Q[:, None])


@dataclass(frozen=True)
class Tiles:
    """Neighbouring blocks together, with the keys that any of them sees and no others."""

    num_slots: list[int]
    """Slots of each tile."""
    num_keys: list[int]
    """Keys of each tile."""
    keys: Tensor
    """The keys of all tiles, as indices into the T + Q keys, int64."""
    masks: list[Tensor]
    """For each tile bool [1, 1, slots, keys], True where a slot may attend."""


def tiles(ranges: KeyRanges, num_rows: int, block_size: int) -> Tiles:
    """Tiles of whole blocks, `_TILE_SLOTS` slots or one block each; of use when anchors rise."""
    size = max(1, _TILE_SLOTS // block_size) * block_size
    num_slots, keys, masks = [], [], []
    for start in range(0, len(ranges.end_row_Q), size):
        part = ranges.part(slice(start, start + size))
        seen = part.first_row_Q < part.end_row_Q
        first = int(part.first_row_Q.where(seen, num_rows).min())
        end = int(part.end_row_Q.where(seen, first).max())
        rows = torch.arange(first, end, device=seen.device)
        slots = torch.arange(start, start + len(seen), device=seen.device)
        row_mask = _inside(rows, part.first_row_Q, part.end_row_Q)
        slot_mask = _inside(slots, part.first_slot_Q, part.end_slot_Q)
        num_slots.append(len(seen))
        keys.append(torch.cat((rows, slots + num_rows)))
        masks.append(torch.cat((row_mask, slot_mask), dim=1)[None, None])
    return Tiles(num_slots, [len(part) for part in keys], torch.cat(keys), masks)


def flex_mask(ranges: KeyRanges, num_rows: int) -> BlockMask:
    """The mask of FlexAttention, its table of tiles counted from the ranges: no [Q, T + Q] exists."""
    first_row_Q, end_row_Q = ranges.first_row_Q, ranges.end_row_Q
    first_slot_Q, end_slot_Q = ranges.first_slot_Q + num_rows, ranges.end_slot_Q + num_rows

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = (key >= first_row_Q[query]) & (key < end_row_Q[query])
        return row | ((key >= first_slot_Q[query]) & (key < end_slot_Q[query]))

    num_slots = len(end_row_Q)
    num_keys = num_rows + num_slots
    starts_C = torch.arange(0, num_keys, FLEX_TILE, device=end_row_Q.device)
    ends_C = (starts_C + FLEX_TILE).clamp(max=num_keys)
    seen_QC = _overlap(first_row_Q, end_row_Q, starts_C, ends_C)
    seen_QC += _overlap(first_slot_Q, end_slot_Q, starts_C, ends_C)
    pad = -num_slots % FLEX_TILE
    some_QC, all_QC = seen_QC > 0, seen_QC == ends_C - starts_C
    some_RC = F.pad(some_QC, (0, 0, 0, pad)).unflatten(0, (-1, FLEX_TILE)).any(1)
    all_RC = F.pad(all_QC, (0, 0, 0, pad), value=True).unflatten(0, (-1, FLEX_TILE)).all(1)
    return BlockMask.from_kv_blocks(
        *_listed(some_RC & ~all_RC),
        *_listed(all_RC),
        BLOCK_SIZE=FLEX_TILE,
        mask_mod=sees,
        seq_lengths=(num_slots, num_keys),
    )


def _overlap(first_Q: Tensor, end_Q: Tensor, starts_C: Tensor, ends_C: Tensor) -> Tensor:
    """Keys that the range of each slot has in each tile, [Q, C]."""
    return (end_Q[:, None].minimum(ends_C) - first_Q[:, None].maximum(starts_C)).clamp(min=0)


def _listed(chosen_RC: Tensor) -> tuple[Tensor, Tensor]:
    """For each query tile the number of key tiles and their numbers, the chosen ones first."""
    order = chosen_RC.int().argsort(dim=-1, descending=True, stable=True)
    return chosen_RC.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]


Mask: TypeAlias = Tensor | Tiles | BlockMask


def attend(
    query_BhQD: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], mask: Mask
) -> Tensor:
    """Softmax attention of slots over context and slots, [B, h, Q, D].

    Args:
        query_BhQD: queries of all slots.
        context: keys and values of the context rows, [B, key-value heads, T, D].
        own: those of the slots, [B, key-value heads, Q, D].
        mask: what `dense_mask`, `tiles` or `flex_mask` made.
    """
    key, value = (torch.cat(pair, dim=2) for pair in zip(context, own, strict=True))
    if isinstance(mask, BlockMask):
        out = flex_attention(query_BhQD, key, value, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out
    if isinstance(mask, Tensor):
        return _attend_dense(query_BhQD, key, value, mask)
    # One gather and one split each: a slice per tile would be a full-size gradient per tile.
    queries = query_BhQD.split(mask.num_slots, dim=2)
    keys, values = (x.index_select(2, mask.keys).split(mask.num_keys, dim=2) for x in (key, value))
    parts = zip(queries, keys, values, mask.masks, strict=True)
    return torch.cat([_attend_dense(*part) for part in parts], dim=2)


def _attend_dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    if query.is_cuda and groups > 1:
        # CUDA's memory-efficient kernel takes a mask but no grouped heads; asked for both, torch would
        # hold every score of every head.
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    grouped = key.shape[1] < query.shape[1]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
