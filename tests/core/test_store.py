"""Finding damage, turning it into work, and clearing away what crashes left."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import pytest
import torch
from safetensors.torch import load

from dflash_core import extraction
from dflash_core.config import ExtractConfig
from dflash_core.errors import IncompleteError, InputError
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from dflash_core.store import Finding, clear, estimate, export_sample, garbage, repair, verify
from tests import targets
from tests.core.test_hidden_states import (
    CONFIG,
    LENGTHS,
    SMALL_SHARDS,
    T,
    plan,
    states_of,
    write,
)
from tests.stores import PlannedTokens


@pytest.fixture
def root(tmp_path):
    return Storage.from_url(str(tmp_path))


@pytest.fixture
def tokens():
    return PlannedTokens(np.array(LENGTHS), T)


@pytest.fixture
def stored(root, tokens):
    """A sealed store of several packs of several shards."""
    config = CONFIG.model_copy(update={"shard_bytes": SMALL_SHARDS})
    dataset = write(plan(root, tokens, config), tokens)
    dataset.seal([f"{pack:08d}" for pack in range(tokens.num_packs)], {})
    return dataset


def damage(dataset: Dataset, pack: int, how: str) -> None:
    key = dataset.record(f"{pack:08d}")["shards"][0]["key"]
    data = bytearray(dataset.storage.get(key))
    if how == "deleted":
        dataset.storage.delete([key])
    elif how == "cut":
        dataset.storage.put(key, data[:-7])
    else:
        data[3] ^= 1
        dataset.storage.put(key, data)


@pytest.mark.parametrize("level", ["index", "list", "full"])
def test_a_whole_store_has_no_findings(stored, level):
    assert verify(stored, level) == []


@pytest.mark.parametrize(
    ("how", "seen_by"),
    [("deleted", {"list", "full"}), ("cut", {"list", "full"}), ("flipped", {"full"})],
)
def test_each_level_finds_what_it_looks_at(stored, how, seen_by):
    damage(stored, 1, how)
    for level in ("index", "list", "full"):
        packs = [finding.pack for finding in verify(stored, level)]
        assert packs == ([1] if level in seen_by else []), level


@pytest.mark.parametrize("level", ["index", "list", "full"])
def test_a_pack_without_a_record_is_found_at_every_level(stored, level):
    stored.storage.delete(["_commits/00000002.json"])
    assert verify(stored, level) == [Finding(2, "has no commit record")]


def test_a_sample_reads_that_share_of_the_packs(stored, tokens):
    seen = []
    verify(stored, "full", sample=0.5, progress=lambda done, total, _: seen.append((done, total)))
    half = round(tokens.num_packs * 0.5)
    assert seen == [(i, half) for i in range(1, half + 1)]


def test_repair_makes_bad_packs_work_and_writing_them_again_makes_the_store_whole(stored, tokens):
    damage(stored, 1, "flipped")
    assert repair(stored, verify(stored, "full")) == [1]
    assert extraction.missing(stored) == [1]
    with pytest.raises(IncompleteError):
        stored.manifest()
    write(stored, tokens, packs=[1])
    assert verify(stored, "full") == []
    hidden = load(export_sample(stored, int(tokens.read_pack(1).samples[0])))["hidden"]
    first = int(tokens.read_pack(1).length[0])
    assert torch.equal(hidden, states_of(tokens.read_pack(1))[:first])


def test_repair_of_nothing_leaves_the_manifest(stored):
    assert repair(stored, []) == []
    assert stored.complete


def test_garbage_is_what_no_record_names_and_is_old_enough(root, tokens):
    dataset = write(plan(root, tokens), tokens)
    dataset.storage.delete(["_commits/00000000.json"])
    assert garbage(dataset) == []
    found = {info.key for info in garbage(dataset, older_than=timedelta(0))}
    assert found == {"hidden/c/0/0/0", "input_ids/c/0", "loss_mask/c/0"}
    dataset.storage.delete(found)
    assert verify(dataset, "full") == [Finding(0, "has no commit record")]


def test_what_was_committed_meanwhile_is_not_cleared(root, tokens):
    dataset = write(plan(root, tokens), tokens)
    dataset.storage.delete(["_commits/00000000.json", "_commits/00000001.json"])
    found = garbage(dataset, older_than=timedelta(0))
    write(dataset, tokens, packs=[0])  # adopts what lies there
    clear(dataset, found)
    assert verify(dataset, "full") == [Finding(1, "has no commit record")]
    assert not [info for info in dataset.storage.list() if "/c/1" in info.key]


def test_a_pack_that_is_committed_while_it_is_cleared_becomes_work(root, tokens, monkeypatch):
    dataset = write(plan(root, tokens), tokens)
    dataset.storage.delete(["_commits/00000000.json"])
    found, delete = garbage(dataset, older_than=timedelta(0)), Storage.delete

    def in_between(storage: Storage, keys: list[str]) -> None:
        monkeypatch.setattr(Storage, "delete", delete)
        write(dataset, tokens, packs=[0])
        delete(storage, keys)

    monkeypatch.setattr(Storage, "delete", in_between)
    clear(dataset, found)
    assert verify(dataset, "full") == [Finding(0, "has no commit record")]


def test_a_sample_is_exported_with_its_tokens(stored, tokens):
    for sample in range(len(LENGTHS)):
        pack = tokens.read_pack(int(tokens.pack[sample]))
        rows = slice(int(tokens.row[sample]), int(tokens.row[sample]) + LENGTHS[sample])
        tensors = load(export_sample(stored, sample))
        assert torch.equal(tensors["hidden"], states_of(pack)[rows])
        np.testing.assert_array_equal(tensors["input_ids"].numpy(), pack.input_ids[rows])
        np.testing.assert_array_equal(tensors["loss_mask"].numpy(), pack.loss_mask[rows])


def test_a_sample_that_is_not_there_is_named(stored):
    with pytest.raises(InputError, match=r"sample 99 is not in .* which has 6"):
        export_sample(stored, 99)


def test_the_rate_of_an_unmeasured_card_follows_from_the_weights_up_to_the_last_tap(root, tmp_path):
    target = targets.qwen3(tmp_path / "target")
    tokens = Dataset.create(root, "tokens", "demo", version=1, config={}, inputs={})
    tokens.seal([], {"num_packs": 3, "pack_tokens": 64, "total_tokens": 170})

    def rate(card, **options):
        config = ExtractConfig(chunk_rows=8, shard_bytes=2**16, **options)
        return estimate(tokens, target, config, card=card, dollars_per_gb_month=0.02).tokens_per_s

    # Width 32, heads of 16: queries and outputs 4, keys and values 2; an MLP of 48.
    layer = 2 * (2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 48)
    assert rate("h200", target_layer_ids=[0, 1]) == pytest.approx(0.58 * 989e12 / (2 * layer))
    assert rate("a100", target_layer_ids=[0, 1]) == pytest.approx(0.58 * 312e12 / (2 * layer))
    assert rate("h200", target_layer_ids=[0], last=True) == pytest.approx(
        0.58 * 989e12 / (4 * layer)
    )


def test_the_estimate_bounds_what_is_written(root, tmp_path):
    target = targets.qwen3(tmp_path / "target")
    facts = {"num_packs": 3, "pack_tokens": 64, "total_tokens": 170}
    tokens = Dataset.create(root, "tokens", "demo", version=1, config={}, inputs={})
    tokens.seal([], facts)
    config = ExtractConfig(target_layer_ids=[0, 2, 3], chunk_rows=8, shard_bytes=2**16)
    found = estimate(tokens, target, config, tokens_per_s=10, dollars_per_gb_month=0.02)
    row_bytes = 3 * 32 * 2
    assert 170 * row_bytes <= found.size_bytes <= 3 * 64 * (row_bytes + 5)
    assert (found.num_tokens, found.num_packs, found.num_objects) == (170, 3, 12)
    assert found.device_hours == pytest.approx(17 / 3600)
    assert found.dollars_per_month == pytest.approx(found.size_bytes / 1e9 * 0.02)
