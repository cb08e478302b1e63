import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.errors import InputError
from dflash_core.packing import Pack, plan_packs


def best_fit_decreasing(lengths, pack_tokens):
    """Samples of each pack by the plain rule: longest first, into the fullest pack with room."""
    packs: list[list[int]] = []
    for sample in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        free = [pack_tokens - sum(lengths[i] for i in pack) for pack in packs]
        fitting = [(room, pack) for pack, room in enumerate(free) if room >= lengths[sample]]
        if fitting:
            packs[min(fitting)[1]].append(sample)
        else:
            packs.append([sample])
    return packs


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60))
def test_a_plan_is_best_fit_decreasing_and_no_samples_overlap(lengths):
    pack, row, num_packs = plan_packs(np.array(lengths, dtype=int), 40)
    oracle = best_fit_decreasing(lengths, 40)
    assert num_packs == len(oracle)
    # Which of two equally full packs is taken is free; how full the packs get is not.
    fill = sorted(sum(lengths[i] for i in np.flatnonzero(pack == p)) for p in range(num_packs))
    assert fill == sorted(sum(lengths[i] for i in group) for group in oracle)
    for p in range(num_packs):
        rows = [r for i in np.flatnonzero(pack == p) for r in range(row[i], row[i] + lengths[i])]
        assert sorted(rows) == list(range(len(rows)))
        assert len(rows) <= 40


def test_packs_of_realistic_lengths_are_almost_full():
    lengths = np.random.default_rng(0).lognormal(6.3, 1.1, 3000).astype(int).clip(8, 16_384)
    _, _, num_packs = plan_packs(lengths, 16_384)
    assert lengths.sum() / (num_packs * 16_384) > 0.98


@pytest.mark.parametrize("length", [0, 65])
def test_a_sample_that_cannot_lie_in_a_pack_is_named(length):
    with pytest.raises(InputError, match=f"sample 1 has {length} tokens, expected 1 to 64"):
        plan_packs(np.array([64, length]), 64)


def test_document_ids_and_positions_restart_with_each_sample_and_end_with_the_last():
    start, length = np.array([0, 3], np.int32), np.array([3, 2], np.int32)
    pack = Pack(0, np.zeros(8, np.uint32), np.zeros(8, np.uint8), start, length, start)
    assert pack.num_tokens == 5
    assert pack.document_ids.tolist() == [0, 0, 0, 1, 1, -1, -1, -1]
    assert pack.positions.tolist() == [0, 1, 2, 0, 1, 0, 0, 0]
    assert pack.document_ids.dtype == pack.positions.dtype == np.int32
