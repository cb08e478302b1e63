"""Which packs a step reads, and reading them ahead."""

import threading
import time

import pytest
import torch

from dflash_core.config import Runtime
from dflash_core.data import (
    epoch_order,
    packs_ahead,
    packs_of_step,
    read_ahead,
    reads,
    visits,
)
from tests.drafters import make_pack


class Packs:
    """A store in memory that notes what it was asked for, and when it breaks."""

    num_packs, pack_bytes = 5, 100

    def __init__(self, broken=()):
        self.asked, self.broken, self.lock = [], broken, threading.Lock()

    def read_pack(self, index):
        with self.lock:
            self.asked.append(index)
        time.sleep(0.002 * (index % 3))
        if index in self.broken:
            raise OSError(f"pack {index} cannot be read")
        return make_pack([4], 8, index=index), torch.zeros(8, 1, 2, dtype=torch.bfloat16)


def test_an_epoch_visits_every_pack_once_in_another_order_than_the_next():
    orders = [epoch_order(3, epoch, 100).tolist() for epoch in range(3)]
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert epoch_order(4, 0, 100).tolist() != orders[0]


def test_the_order_of_a_seed_never_changes():
    assert epoch_order(0, 0, 8).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]


def test_steps_cut_the_epochs_one_behind_the_other():
    steps = [packs_of_step(1, step, 3, 5) for step in range(5)]
    assert all(len(step) == 3 for step in steps)
    visits = [pack for step in steps for pack in step]
    for epoch in range(3):
        assert visits[5 * epoch : 5 * epoch + 5] == epoch_order(1, epoch, 5).tolist()


def test_packs_come_in_the_order_asked_for_and_are_read_ahead_within_bounds():
    store, order = Packs(), [4, 2, 0, 1, 3, 2, 2, 0]
    with read_ahead(store, order, 2) as packs:
        for taken, (pack, hidden) in enumerate(packs):
            assert pack.index == order[taken]
            assert hidden.shape == (8, 1, 2)
            assert len(store.asked) <= taken + 1 + 2
    assert len(store.asked) == len(order)


@pytest.mark.parametrize(
    ("threads", "memory", "ahead"),
    [(4, 1000, 4), (4, 250, 2), (4, 199, 1), (4, 0, 1), (1, 1000, 1)],
)
def test_reading_ahead_takes_no_more_memory_than_was_given(threads, memory, ahead):
    runtime = Runtime(reader_threads=threads, prefetch_bytes=memory)
    assert packs_ahead(Packs(), runtime) == ahead


def test_an_error_of_a_reader_is_raised_where_its_pack_would_have_come():
    with read_ahead(Packs(broken=[1]), [0, 2, 1, 3], 3) as packs:
        assert [next(packs)[0].index for _ in range(2)] == [0, 2]
        with pytest.raises(OSError, match="pack 1 cannot be read"):
            next(packs)


def test_leaving_early_stops_the_readers():
    store, before = Packs(), threading.active_count()
    with read_ahead(store, range(5), 2) as packs:
        next(packs)
    assert len(store.asked) <= 3
    assert threading.active_count() == before


@pytest.mark.parametrize("start", [0, 1, 2, 5])
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("again", [1, 2, 3])
def test_a_pack_is_read_once_for_the_steps_in_a_row_that_visit_it(again, rank, size, start):
    steps, packs_per_step, num_packs = range(start, 8), 3, 5
    share = slice(rank, None, size)
    order = list(reads(7, steps, packs_per_step, num_packs, again, share))
    expected = [packs_of_step(7, step, packs_per_step, num_packs, again)[share] for step in steps]
    held = len(expected[0])
    visited = [index for index, _ in visits(((i, None) for i in order), steps, held, again)]
    assert visited == [index for step in expected for index in step]
    groups = {step // again for step in steps}
    assert len(order) == len(groups) * held


def test_steps_that_share_packs_go_through_an_epoch_more_slowly():
    once = [packs_of_step(1, step, 2, 6) for step in range(3)]
    twice = [packs_of_step(1, step, 2, 6, 2) for step in range(6)]
    assert twice == [pack for pack in once for _ in range(2)]
