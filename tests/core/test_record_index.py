"""The index of a sealed store says what its commit records say, and is not needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dflash_core.hidden_states import HiddenStates, read_layout
from dflash_core.record_index import RecordIndex, write_record_index
from dflash_core.storage import Storage
from tests.core.test_hidden_states import CONFIG, LENGTHS, SMALL_SHARDS, T, plan, write
from tests.stores import PlannedTokens

TOKENS = PlannedTokens(np.array(LENGTHS), T)
OPTIONS = [{}, {"codec": "zstd"}, {"dtype": "float8_e4m3", "codec": "lz4"}]


@pytest.fixture(params=OPTIONS, ids=str)
def sealed(request, tmp_path):
    config = CONFIG.model_copy(update={"shard_bytes": SMALL_SHARDS, **request.param})
    dataset = write(plan(Storage.from_url(str(tmp_path)), TOKENS, config), TOKENS)
    records = dataset.records()
    facts = {"records": write_record_index(dataset, read_layout(dataset), records.values())}
    dataset.seal(records, facts)
    return dataset


def test_the_index_is_the_records(sealed):
    layout = read_layout(sealed)
    index = RecordIndex.open(sealed, layout)
    assert index is not None
    for pack in range(TOKENS.num_packs):
        record = sealed.record(f"{pack:08d}")
        found = index.record(pack)
        assert found == {name: record[name] for name in ("shards", *layout.side_arrays)}


def test_a_sealed_store_is_read_without_its_records(sealed, monkeypatch):
    want = [HiddenStates.open(sealed, use_index=False).read_pack(i) for i in range(3)]
    monkeypatch.setattr(type(sealed), "record", lambda *_: pytest.fail("a record was read"))
    reader = HiddenStates.open(sealed)
    for index, (pack, hidden) in enumerate(want):
        found, states = reader.read_pack(index)
        assert torch.equal(states, hidden)
        assert np.array_equal(found.input_ids, pack.input_ids)


@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_without_a_sound_index_the_records_are_read(sealed, damage):
    key = sealed.facts["records"]["key"]
    if damage == "gone":
        sealed.storage.delete([key])
    else:
        data = bytearray(sealed.storage.get(key))
        data[-1] ^= 1
        sealed.storage.put(key, data)
    assert RecordIndex.open(sealed, read_layout(sealed)) is None
    assert HiddenStates.open(sealed).read_pack(0)[1].any()
