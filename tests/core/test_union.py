"""Several stores under one path: which packs training reads, and what may be united."""

import numpy as np
import pytest

from dflash_core.config import ExtractConfig
from dflash_core.errors import IncompleteError, InputError, MismatchError
from dflash_core.extraction import KERNELS
from dflash_core.hidden_states import (
    HiddenStates,
    check_rows,
    create_store,
    read_layout,
    write_pack,
)
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from dflash_core.store import open_store
from dflash_core.union import open_states, unite
from tests.stores import PlannedTokens, made_up_states

TAPS, HIDDEN = 2, 16
CONTRACT = {"target": "acme/tiny", "target_layer_ids": [0, 2], "thinking": False}


def make_store(root, name, num_packs, *, pack_tokens=64, seal=True, **changes):
    """A store of that many packs, each with other states."""
    config = ExtractConfig(target_layer_ids=[0, 2], chunk_rows=16)
    dataset = Dataset.create(
        root, "hidden", name, version=1, config=config, inputs={"tokens": name}
    )
    tokens = PlannedTokens(np.full(num_packs * 2, pack_tokens // 2), pack_tokens)
    contract = {**CONTRACT, "tokens": name, **changes}
    create_store(dataset, tokens, TAPS, HIDDEN, contract, config)
    layout = read_layout(dataset)
    for index in range(num_packs):
        pack = tokens.read_pack(index)
        states = made_up_states(pack, TAPS, HIDDEN, seed=len(name))
        write_pack(dataset, layout, pack, states, check_rows(pack, states), {})
    if seal:
        dataset.seal(dataset.committed(), {})
    return dataset


@pytest.fixture
def root(tmp_path):
    return Storage.from_url(str(tmp_path))


def test_packs_of_a_union_are_those_of_its_stores_in_the_order_of_their_paths(root):
    late, early = make_store(root, "later", 3), make_store(root, "early-one", 2)
    union = unite(root, "both", [late.path, early.path])
    states = open_states(Dataset.open(root, union.path))
    assert states.num_packs == 5
    wanted = [(early, 0), (early, 1), (late, 0), (late, 1), (late, 2)]
    for index, (dataset, own) in enumerate(wanted):
        pack, hidden = states.read_pack(index)
        theirs, expected = HiddenStates.open(dataset).read_pack(own)
        assert pack.index == index
        assert (pack.input_ids == theirs.input_ids).all()
        assert (pack.samples == theirs.samples).all()
        assert (hidden == expected).all()
    assert (states.pack_tokens, states.hidden_size, states.num_taps) == (64, HIDDEN, TAPS)
    assert states.pack_bytes == HiddenStates.open(late).pack_bytes
    assert states.contract == CONTRACT
    assert union.facts == {"num_packs": 5, "num_samples": 10, "contract": CONTRACT}


def test_the_same_stores_are_the_same_union_and_more_of_them_another(root):
    a, b, c = (make_store(root, name, 1).path for name in ("a", "b", "c"))
    both = unite(root, "all", [a, b])
    assert unite(root, "all", [b, a, a]).path == both.path
    grown = unite(root, "all", [both.path, c])
    assert grown.path != both.path
    assert grown.path == unite(root, "all", [a, b, c]).path
    assert open_states(grown).num_packs == 3


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"target": "acme/other"}, "target: have 'acme/other', want 'acme/tiny'"),
        ({"thinking": True}, "thinking: have True, want False"),
        ({"pack_tokens": 32}, "pack_tokens: have 32, want 64"),
    ],
)
def test_stores_that_differ_are_refused_by_field(root, changes, field):
    first, second = make_store(root, "first", 1), make_store(root, "second", 1, **changes)
    with pytest.raises(MismatchError, match=field):
        unite(root, "all", [first.path, second.path])


@pytest.mark.parametrize("name", ["team/chat", "", "../x"])
def test_names_are_those_that_datasets_may_have(root, name):
    paths = [make_store(root, part, 1).path for part in ("a", "b")]
    with pytest.raises(InputError, match="cannot be called"):
        unite(root, name, paths)


def test_stores_of_other_kernels_are_not_united(root):
    first, second = make_store(root, "first", 1), make_store(root, "second", 1)
    second.storage.put(KERNELS, b'{"convolution":"torch"}')
    with pytest.raises(MismatchError, match="kernels"):
        unite(root, "all", [first.path, second.path])


def test_one_store_and_an_incomplete_one_make_no_union(root):
    whole, half = make_store(root, "whole", 1), make_store(root, "half", 1, seal=False)
    with pytest.raises(InputError, match="needs two stores or more"):
        unite(root, "all", [whole.path, whole.path])
    with pytest.raises(IncompleteError, match="half"):
        unite(root, "all", [whole.path, half.path])


def test_commands_that_keep_a_store_name_the_stores_of_a_union(root):
    paths = [make_store(root, name, 1).path for name in ("a", "b")]
    union = unite(root, "all", paths)
    with pytest.raises(InputError, match=f"holds no states; name one of {paths[0]}, {paths[1]}"):
        open_store(root, union.path)
