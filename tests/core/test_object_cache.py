"""Packs from a local disk: kept within the budget, checked, and never in the way of the read."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from dflash_core.errors import CorruptError
from dflash_core.hidden_states import HiddenStates
from dflash_core.object_cache import ObjectCache
from dflash_core.storage import Storage
from tests.core.test_hidden_states import CONFIG, LENGTHS, SMALL_SHARDS, T, plan, states_of, write
from tests.stores import PlannedTokens

TOKENS = PlannedTokens(np.array(LENGTHS), T)


@pytest.fixture
def stored():
    config = CONFIG.model_copy(update={"shard_bytes": SMALL_SHARDS})
    return write(plan(Storage.from_url("memory://"), TOKENS, config), TOKENS)


@pytest.fixture
def fetched(monkeypatch):
    """Keys of objects that are read from the store."""
    keys, real = [], Storage.stream
    monkeypatch.setattr(Storage, "stream", lambda *a: keys.append(a[1]) or real(*a))
    return keys


def files(folder):
    return sorted(path for path in folder.iterdir() if path.is_file())


def read_all(reader) -> None:
    for index in range(TOKENS.num_packs):
        assert torch.equal(reader.read_pack(index)[1], states_of(TOKENS.read_pack(index)))


def test_the_second_epoch_reads_nothing_from_the_store(stored, tmp_path, fetched):
    cache = ObjectCache(tmp_path, 10**6)
    reader = HiddenStates.open(stored, cache=cache)
    read_all(reader)
    assert len(fetched) == len(set(fetched)) == len(files(tmp_path)) > 6
    fetched.clear()
    read_all(reader)
    read_all(HiddenStates.open(stored, cache=ObjectCache(tmp_path, 10**6)))
    assert fetched == []


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_file_is_dropped_and_read_anew(stored, tmp_path, fetched, damage):
    reader = HiddenStates.open(stored, cache=ObjectCache(tmp_path, 10**6))
    read_all(reader)
    fetched.clear()
    for path in files(tmp_path):
        data = bytearray(path.read_bytes())
        data[10] ^= damage == "flipped"
        path.write_bytes(data[:-3] if damage == "cut" else data)
    read_all(reader)
    assert len(fetched) == len(files(tmp_path))
    fetched.clear()
    read_all(reader)
    assert fetched == []


def test_damage_in_the_store_is_never_kept(stored, tmp_path):
    key = stored.record("00000000")["shards"][0]["key"]
    stored.storage.put(key, stored.storage.get(key)[:-1] + b"?")
    reader = HiddenStates.open(stored, cache=ObjectCache(tmp_path, 10**6))
    for _ in range(2):
        with pytest.raises(CorruptError, match=key):
            reader.read_pack(0)
    sizes = {path.stat().st_size for path in files(tmp_path)}
    assert stored.record("00000000")["shards"][0]["size"] not in sizes or len(sizes) > 1
    assert not list(tmp_path.glob("*.part"))


def test_what_is_in_it_stays_when_the_budget_is_spent(stored, tmp_path, fetched):
    budget = 8000
    reader = HiddenStates.open(stored, cache=ObjectCache(tmp_path, budget))
    read_all(reader)
    kept = files(tmp_path)
    assert 0 < sum(path.stat().st_size for path in kept) <= budget
    everything = len(fetched)
    fetched.clear()
    read_all(reader)
    assert files(tmp_path) == kept
    assert len(fetched) == everything - len(kept)


def test_what_nobody_uses_any_more_makes_room(stored, tmp_path):
    old = tmp_path / ("0" * 32)  # of another run
    old.write_bytes(bytes(7000))
    os.utime(old, (1, 1))
    read_all(HiddenStates.open(stored, cache=ObjectCache(tmp_path, 8000)))
    assert not old.exists()
    assert files(tmp_path)


def test_what_others_keep_in_the_folder_is_left_alone(stored, tmp_path):
    theirs = tmp_path / "thesis.tar"
    theirs.write_bytes(bytes(9000))
    (tmp_path / "lost+found").mkdir()
    os.utime(theirs, (1, 1))
    os.utime(tmp_path / "lost+found", (1, 1))
    read_all(HiddenStates.open(stored, cache=ObjectCache(tmp_path, 8000)))
    assert theirs.exists()
    assert len(files(tmp_path)) > 1


def test_a_cache_disk_that_refuses_costs_a_warning_and_no_read(stored, tmp_path, caplog):
    folder = tmp_path / "cache"
    cache = ObjectCache(folder, 10**6)
    folder.rmdir()
    folder.write_text("not a folder any more")
    read_all(HiddenStates.open(stored, cache=cache))
    assert "nothing more is kept" in caplog.text
