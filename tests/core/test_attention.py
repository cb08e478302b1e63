"""Who sees whom, pair by pair, and three ways to compute attention that agree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core import attention
from dflash_core.attention import attend, dense_mask, flex_mask, key_ranges, tiles
from dflash_core.blocks import ranges_by_kind
from dflash_core.model import SLIDING
from tests.drafters import ATTENTION, make_blocks, make_pack, tiny_shape

HEADS, KV_HEADS, WIDTH = 4, 2, 16  # FlexAttention takes no narrower heads


def sees(contract, kind, window, pack, anchor, is_dummy, j, key):
    """The rule of one pair; key is ("row", i) or ("slot", of the same block, j')."""
    sliding = kind == SLIDING
    causal = sliding and contract in ("swa-causal", "mixed")
    if key[0] == "row":
        i, documents = key[1], pack.document_ids
        inside = not is_dummy and i < anchor and documents[i] == documents[anchor]
        return inside and (not sliding or anchor + j - i < window)
    same, other = key[1], key[2]
    return same and not (causal and other > j) and not (sliding and abs(j - other) >= window)


@pytest.mark.parametrize("window", [1, 2, 3, 6])
@pytest.mark.parametrize("contract", ATTENTION)
def test_dense_masks_equal_the_rule_pair_by_pair(contract, window):
    shape, size = tiny_shape(attention=contract, sliding_window=window), 4
    pack = make_pack([8, 4], 14)
    blocks = make_blocks(pack, shape, 9)
    dummies = (blocks.weights_NK.sum(1) == 0).tolist()
    assert dummies.count(True) == 3
    ranges = ranges_by_kind(shape, blocks.anchors_N, blocks.starts_N)
    assert set(ranges) == set(shape.layer_types)
    for kind, seen in ranges.items():
        mask = dense_mask(seen, 14)
        assert mask.shape == (1, 1, 36, 14 + 36)
        for n, anchor in enumerate(blocks.anchors_N.tolist()):
            for j in range(size):
                keys = [("row", i) for i in range(14)]
                keys += [("slot", n == m, k) for m in range(9) for k in range(size)]
                rule = (contract, kind, window, pack, anchor, dummies[n], j)
                assert mask[0, 0, n * size + j].tolist() == [sees(*rule, key) for key in keys]


def draw_ranges(seed, num_blocks, block_size, window, causal, num_rows):
    """Blocks at random rows of documents of random lengths, the last of them dummies."""
    generator = torch.Generator().manual_seed(seed)
    borders = torch.rand(num_rows, generator=generator) < 0.02
    starts_T = torch.where(borders, torch.arange(num_rows), 0).cummax(0).values
    anchors = torch.randint(0, num_rows, (num_blocks,), generator=generator).sort().values
    starts = torch.where(torch.arange(num_blocks) < num_blocks - 2, starts_T[anchors], anchors)
    return key_ranges(anchors, starts, block_size, window=window, causal=causal)


def random_heads(num_rows, num_slots, *, grad=True):
    generator = torch.Generator().manual_seed(0)
    sizes = [(HEADS, num_slots), *[(KV_HEADS, num_rows)] * 2, *[(KV_HEADS, num_slots)] * 2]
    return [
        torch.randn(1, heads, length, WIDTH, generator=generator).requires_grad_(grad)
        for heads, length in sizes
    ]


def attend_with(mask, heads):
    query, *rest = heads
    return attend(query, (rest[0], rest[1]), (rest[2], rest[3]), mask)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    block_size=st.integers(2, 40),
    window=st.sampled_from([None, 1, 5, 30]),
    causal=st.booleans(),
    tile_slots=st.sampled_from([1, 8, 32]),
)
def test_tiles_give_the_output_and_gradients_of_the_dense_mask(
    seed, block_size, window, causal, tile_slots
):
    num_rows, num_blocks = 50, 7
    ranges = draw_ranges(seed, num_blocks, block_size, window, causal, num_rows)
    heads = random_heads(num_rows, num_blocks * block_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_TILE_SLOTS", tile_slots)
        cut = tiles(ranges, num_rows, block_size)
    found, expected = (attend_with(mask, heads) for mask in (cut, dense_mask(ranges, num_rows)))
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad(out, heads, direction) for out in (found, expected))
    for first, second in zip(ours, theirs, strict=True):
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-4)


def test_tiles_leave_out_what_none_of_their_slots_sees():
    ranges = key_ranges(
        torch.tensor([10, 20, 910, 920]),
        torch.tensor([0, 0, 900, 900]),
        16,
        window=None,
        causal=False,
    )
    assert tiles(ranges, 1000, 16).num_keys == [20 + 32, 20 + 32]


# --- FlexAttention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [256, 200])
@pytest.mark.parametrize(("window", "causal"), [(None, False), (40, True), (40, False)])
@pytest.mark.parametrize("block_size", [16, 7])
def test_the_flex_table_lists_every_tile_once_and_calls_full_what_is_full(
    num_rows, window, causal, block_size, monkeypatch
):
    monkeypatch.setattr(attention, "FLEX_TILE", 32)
    ranges = draw_ranges(1, 20, block_size, window, causal, num_rows)
    mask = flex_mask(ranges, num_rows)
    dense = dense_mask(ranges, num_rows)[0, 0]
    partial, full = set(), set()
    for number, query_tile in enumerate(dense.split(32, dim=0)):
        for key, tile in enumerate(query_tile.split(32, dim=1)):
            if tile.all():
                full.add((number, key))
            elif tile.any():
                partial.add((number, key))
    assert listed(mask.kv_num_blocks, mask.kv_indices) == partial
    assert listed(mask.full_kv_num_blocks, mask.full_kv_indices) == full
    assert window is not None or full
    assert mask.shape == (1, 1, *dense.shape)


def listed(counts, numbers):
    return {
        (row, int(key))
        for row, count in enumerate(counts[0, 0].tolist())
        for key in numbers[0, 0, row, :count]
    }


@pytest.mark.parametrize(("window", "causal"), [(None, False), (5, True), (5, False)])
def test_flex_attention_gives_the_output_of_the_dense_mask(window, causal):
    num_rows, block_size, num_blocks = 70, 4, 20
    ranges = draw_ranges(2, num_blocks, block_size, window, causal, num_rows)
    heads = random_heads(num_rows, num_blocks * block_size, grad=False)  # no backward on a CPU
    found = attend_with(flex_mask(ranges, num_rows), heads)
    torch.testing.assert_close(found, attend_with(dense_mask(ranges, num_rows), heads))


@pytest.mark.slow
def test_compiled_flex_attention_skips_tiles_and_gives_the_output_of_the_dense_mask():
    num_rows, block_size, num_blocks = 256, 16, 16
    ranges = draw_ranges(3, num_blocks, block_size, 40, True, num_rows)
    heads = random_heads(num_rows, num_blocks * block_size, grad=False)
    compiled = torch.compile(attend_with)
    with torch.no_grad():
        found = compiled(flex_mask(ranges, num_rows), heads)
        torch.testing.assert_close(found, attend_with(dense_mask(ranges, num_rows), heads))
