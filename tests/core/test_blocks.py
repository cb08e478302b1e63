"""Anchors, labels and weights by enumeration."""

import math

import pytest
import torch

from dflash_core.blocks import build_blocks, sample_anchors
from tests.drafters import make_blocks, make_pack, tiny_shape

# Two samples and two empty rows; the first has two answers with a user's turn between them.
LOSS_MASK = torch.tensor([0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0])
DOCUMENTS = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, -1, -1])
POSITIONS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 0, 0])
ELIGIBLE = [1, 2, 6, 9, 10]


def draw(num_anchors, seed=0, loss_mask=LOSS_MASK):
    return sample_anchors(loss_mask, DOCUMENTS, num_anchors, torch.Generator().manual_seed(seed))


def test_anchors_are_eligible_rows_in_rising_order_without_repeats():
    seen = set()
    for seed in range(50):
        anchors, valid = draw(3, seed)
        assert valid.all()
        assert sorted(set(anchors.tolist())) == anchors.tolist()
        seen |= set(anchors.tolist())
    assert sorted(seen) == ELIGIBLE


def test_a_pair_across_two_samples_is_no_anchor():
    everything = torch.ones_like(LOSS_MASK) * (DOCUMENTS >= 0)
    anchors, valid = draw(14, loss_mask=everything)
    assert anchors[valid].tolist() == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10]


def test_every_visit_draws_anew_and_a_seed_repeats_its_draw():
    assert len({tuple(draw(2, seed)[0].tolist()) for seed in range(20)}) > 3
    assert torch.equal(draw(3, 7)[0], draw(3, 7)[0])


def test_missing_anchors_become_dummies_at_the_end():
    anchors, valid = draw(8)
    assert anchors.tolist() == [*ELIGIBLE, 13, 13, 13]
    assert valid.tolist() == [True] * 5 + [False] * 3
    anchors, valid = draw(2, loss_mask=torch.zeros_like(LOSS_MASK))
    assert anchors.tolist() == [13, 13]
    assert not valid.any()


def all_blocks(block_size=4, first_slot=1):
    return build_blocks(
        torch.arange(100, 114),
        LOSS_MASK,
        DOCUMENTS,
        POSITIONS,
        draw(6),
        block_size=block_size,
        first_slot=first_slot,
        mask_token_id=7,
        loss_decay=2.0,
    )


def test_slot_j_predicts_the_token_j_rows_after_the_anchor():
    blocks = all_blocks()
    for n, anchor in enumerate(ELIGIBLE):
        assert blocks.token_ids_NK[n].tolist() == [100 + anchor, 7, 7, 7]
        assert blocks.positions_NK[n].tolist() == [int(POSITIONS[anchor]) + j for j in range(4)]
        for j in range(4):
            if anchor + j < 14:
                assert blocks.labels_NK[n, j] == 100 + anchor + j


def test_shifted_slots_predict_the_tokens_that_in_place_ones_do_a_slot_earlier():
    placed, shifted = all_blocks(block_size=5), all_blocks(block_size=4, first_slot=0)
    assert torch.equal(shifted.token_ids_NK, placed.token_ids_NK[:, :4])
    assert torch.equal(shifted.positions_NK, placed.positions_NK[:, :4])
    assert torch.equal(shifted.weights_NK, placed.weights_NK[:, 1:])
    weighted = shifted.weights_NK > 0
    assert torch.equal(shifted.labels_NK[weighted], placed.labels_NK[:, 1:][weighted])
    assert weighted[:5, 0].all()


def test_a_block_is_supervised_up_to_the_first_gap_sample_border_or_end():
    supervised = all_blocks().weights_NK > 0
    assert supervised.tolist() == [
        [False, True, True, False],  # row 1: rows 2 and 3, then the user's turn
        [False, True, False, False],  # row 2
        [False, True, False, False],  # row 6: row 7, then another sample
        [False, True, True, False],  # row 9: rows 10 and 11, then nothing
        [False, True, False, False],  # row 10
        [False, False, False, False],  # dummy
    ]


def test_a_gap_ends_the_block_even_when_supervised_rows_follow_it():
    blocks = all_blocks(block_size=7)
    assert (blocks.weights_NK[0] > 0).tolist() == [False, True, True, *[False] * 4]
    assert LOSS_MASK[1 + 5] == 1


def test_blocks_know_where_their_document_starts_and_dummies_have_none():
    blocks = all_blocks()
    assert blocks.starts_N.tolist() == [0, 0, 0, 8, 8, 13]


def test_weights_decay_from_slot_one():
    weights = all_blocks().weights_NK[0].tolist()
    assert weights == pytest.approx([0, 1, math.exp(-0.5), 0])


def test_supervised_slots_are_listed_in_order():
    blocks = all_blocks()
    expected = [i for i, weight in enumerate(blocks.weights_NK.flatten().tolist()) if weight > 0]
    assert blocks.supervised_M.tolist() == expected


def test_a_pack_without_a_supervised_pair_gives_only_dummies():
    blocks = make_blocks(make_pack([3, 2], 8), tiny_shape(), 4)
    assert torch.equal(blocks.starts_N, blocks.anchors_N)
    assert blocks.weights_NK.sum() == 0
    assert len(blocks.supervised_M) == 0
