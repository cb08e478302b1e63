import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.corpus.mixing import draw_order, draw_value, rows_to_take


@pytest.mark.parametrize(
    ("available", "weights", "temperature", "num_rows", "expected"),
    [
        ([100, 50], [0, 0], 1, 0, [100, 50]),  # everything
        ([100, 50], [0, 0], 1, 30, [20, 10]),  # by rows
        ([100, 50], [1, 1], 1, 0, [50, 50]),  # as many as equal shares allow
        ([100, 50], [3, 1], 1, 0, [100, 33]),
        ([100, 50], [3, 1], 1, 40, [30, 10]),
        ([100, 10], [1, 1], 1, 60, [50, 10]),  # the small one gives all, the other fills up
        ([100, 10], [1, 1], 1, 500, [100, 10]),
        ([900, 100], [0, 0], 2, 100, [75, 25]),  # square roots: 30 to 10
        ([0, 10], [1, 1], 1, 0, [0, 10]),
        ([0, 0], [1, 1], 1, 5, [0, 0]),
    ],
)
def test_shares(available, weights, temperature, num_rows, expected):
    assert rows_to_take(available, weights, temperature, num_rows) == expected


def test_a_high_temperature_takes_equal_numbers():
    assert rows_to_take([10_000, 100, 3000], [0, 0, 0], 1e6, 300) == [100, 100, 100]


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.floats(0.1, 100)), min_size=1, max_size=6),
    st.floats(0.2, 50),
    st.integers(0, 30_000),
)
def test_no_source_gives_more_than_it_has_and_the_total_is_met(sources, temperature, num_rows):
    available, weights = [rows for rows, _ in sources], [weight for _, weight in sources]
    taken = rows_to_take(available, weights, temperature, num_rows)
    assert all(0 <= count <= rows for count, rows in zip(taken, available, strict=True))
    if num_rows:
        assert sum(taken) == min(num_rows, sum(available))


@given(st.lists(st.integers(0, 20_000), min_size=1, max_size=6))
def test_without_weights_and_numbers_every_row_is_taken(available):
    assert rows_to_take(available, [0] * len(available), 1.0, 0) == available


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1), st.integers(-5, 5))
def test_the_draw_of_one_row_is_its_place_in_the_draw_of_all(heads, seed):
    order = draw_order(np.array(heads, np.uint64), seed)
    assert order.tolist() == [draw_value(head, seed) for head in heads]
    if seed == 0:
        assert order.tolist() == heads


def test_seeds_draw_other_rows():
    heads = np.random.default_rng(0).integers(0, 2**64, 10_000, np.uint64)
    drawn = [set(np.argsort(draw_order(heads, seed))[:1000].tolist()) for seed in (0, 1, 2)]
    assert len(drawn[0] & drawn[1]) < 200
    assert len(drawn[1] & drawn[2]) < 200
