"""What the store does when things break, the same on a folder and on a real S3 server."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import subprocess
import threading
import time

import pytest
import torch

from dflash_core.errors import CorruptError, StorageError
from dflash_core.hidden_states import HiddenStates
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from dflash_core.store import repair, verify
from tests import stores
from tests.s3 import BUCKET, S3Server
from tests.stores import PACKS, missing_packs, plan_store, states_of, write_packs

KILLS, OUTAGE_S = 20, 20

# Children fork from a process that has the imports behind it and no store open.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.stores"])


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.server)])
def url(request, tmp_path):
    return str(tmp_path) if request.param == "folder" else request.getfixturevalue("s3_url")


@pytest.fixture
def stored(url):
    """A complete store."""
    dataset = plan_store(Storage.from_url(url))
    write_packs(dataset, list(range(PACKS)))
    return dataset


def assert_committed_packs_are_whole(dataset: Dataset, packs) -> None:
    reader = HiddenStates.open(dataset)
    for pack in packs:
        assert torch.equal(reader.read_pack(pack)[1], states_of(pack)), pack


def contents(dataset: Dataset) -> dict[str, bytes]:
    """Every object but the records, which hold the time of writing."""
    storage = dataset.storage
    keys = [info.key for info in storage.list() if not info.key.startswith("_commits")]
    return {key: storage.get(key) for key in keys if key != "request.json"}


def num_shards(dataset: Dataset) -> int:
    return sum(1 for _ in dataset.storage.list("hidden/c"))


# --- killed writers


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_of_a_writer_killed_at_random_points_every_pack_is_absent_or_whole(url):
    root, random_ = Storage.from_url(url), random.Random(0)
    whole = plan_store(root, "whole")
    write_packs(whole, list(range(PACKS)))
    wanted, kills, left_behind, number = contents(whole), 0, 0, 0
    # How often a kill falls between an upload and its record is up to the machine.
    while kills < KILLS or left_behind < KILLS // 4:
        assert kills < 10 * KILLS, "the kills come before or after the uploads"
        dataset, seen = plan_store(root, f"killed{number}"), set()
        number += 1
        while missing_packs(dataset):
            started = PROCESSES.Event()
            arguments = (root.url, dataset.path, dict(os.environ), started)
            writer = PROCESSES.Process(target=stores.write_missing, args=arguments)
            writer.start()
            assert started.wait(60)
            if kills < KILLS or left_behind < KILLS // 4:
                goal = num_shards(dataset) + random_.randint(0, 9)
                while writer.is_alive() and num_shards(dataset) < goal:
                    time.sleep(0.001)
                time.sleep(random_.uniform(0, 0.01))
                kills += writer.is_alive()
                writer.kill()
            writer.join()
            assert writer.exitcode in (0, -9)
            committed = set(range(PACKS)) - set(missing_packs(dataset))
            assert_committed_packs_are_whole(dataset, committed - seen)
            left_behind += num_shards(dataset) > 4 * len(committed)
            seen = committed
        assert contents(dataset) == wanted


# --- a server that goes away


@contextlib.contextmanager
def an_outage(server: S3Server):
    """The server dies when the context is entered, and is back after `OUTAGE_S`."""
    server.kill()
    revive = threading.Timer(OUTAGE_S, server.start)
    revive.start()
    try:
        yield
    finally:
        revive.join()


@pytest.mark.server
@pytest.mark.timeout(400)
def test_an_outage_in_the_middle_of_writing_and_of_reading_loses_nothing(tmp_path, monkeypatch):
    server = S3Server(tmp_path)
    server.start()
    try:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        dataset = plan_store(Storage.from_url(f"s3://{BUCKET}/outage"))
        writer = threading.Thread(target=write_packs, args=(dataset, list(range(PACKS))))
        writer.start()
        while len(missing_packs(dataset)) > PACKS - 2:
            time.sleep(0.01)
        with an_outage(server):
            assert writer.is_alive(), "the outage came too late"
        writer.join()
        assert missing_packs(dataset) == []
        read: list[torch.Tensor] = []
        reader = HiddenStates.open(dataset)

        def read_all() -> None:
            read.extend(reader.read_pack(pack)[1] for pack in range(PACKS))

        thread = threading.Thread(target=read_all)
        thread.start()
        while len(read) < 2:
            time.sleep(0.001)
        with an_outage(server):
            assert thread.is_alive(), "the outage came too late"
        thread.join()
        for pack, hidden in enumerate(read):
            assert torch.equal(hidden, states_of(pack)), pack
        assert len(read) == PACKS
    finally:
        server.stop()


# --- damage


def flipped(data: bytes, position: int) -> bytes:
    altered = bytearray(data)
    altered[position] ^= 1
    return bytes(altered)


DAMAGE = {
    "bit of the payload": lambda data: flipped(data, 1000),
    "bit of the index": lambda data: flipped(data, -12),
    "cut in the index": lambda data: data[:-1],
    "cut in half": lambda data: data[: len(data) // 2],
    "empty": lambda _: b"",
    "grown": lambda data: data + b"x",
}


def test_every_kind_of_damage_is_an_error_and_repair_makes_it_whole(stored):
    storage, reader = stored.storage, HiddenStates.open(stored)
    kinds = [*DAMAGE, "of another pack", "deleted"]
    shards = [reader.layout.shard_key(pack, 1) for pack in range(len(kinds))]
    for kind, key in zip(kinds, shards, strict=True):
        if kind in DAMAGE:
            storage.put(key, DAMAGE[kind](storage.get(key)))
    storage.put(shards[-2], storage.get(reader.layout.shard_key(PACKS - 1, 1)))
    storage.delete([shards[-1]])
    for pack, (kind, key) in enumerate(zip(kinds, shards, strict=True)):
        if kind == "grown":
            continue  # what was appended is never fetched; `verify` sees it
        with pytest.raises(CorruptError, match=rf"{key} of pack {pack} is damaged"):
            reader.read_pack(pack)
        with pytest.raises(CorruptError, match=rf"{key} of pack {pack} is damaged"):
            reader.read_sample(int(stores.TOKENS.read_pack(pack).samples[1]))
    findings = verify(stored, "full")
    assert [finding.pack for finding in findings] == list(range(len(kinds)))
    repair(stored, findings)
    assert missing_packs(stored) == list(range(len(kinds)))
    write_packs(stored, missing_packs(stored))
    assert verify(stored, "full") == []


@pytest.mark.parametrize("damage", ["flip", "cut", "of another pack", "of another store"])
def test_a_damaged_or_foreign_commit_record_is_an_error(stored, url, damage):
    storage, key = stored.storage, "_commits/00000003.json"
    if damage == "flip":
        body = json.loads(storage.get(key))
        body["shards"][0]["crc32c"][0] = "00000000"
        storage.put(key, json.dumps(body).encode())
    elif damage == "cut":
        storage.put(key, storage.get(key)[:-9])
    elif damage == "of another pack":
        storage.put(key, storage.get("_commits/00000004.json"))
    else:
        other = Dataset.create(stored.root, "hidden", "b", version=2, config={}, inputs={})
        other.commit("00000003", {})
        storage.put(key, other.storage.get(key))
    with pytest.raises(CorruptError, match="00000003"):
        HiddenStates.open(stored).read_pack(3)
    assert [finding.pack for finding in verify(stored, "full")] == [3]


def test_the_objects_of_another_pack_under_this_packs_keys_are_an_error(stored):
    layout = HiddenStates.open(stored).layout
    for ours, theirs in zip(layout.keys(3), layout.keys(4), strict=True):
        stored.storage.put(ours, stored.storage.get(theirs))
    with pytest.raises(CorruptError, match="of pack 3 is damaged"):
        HiddenStates.open(stored).read_pack(3)


# --- several writers


@pytest.mark.slow
def test_writers_racing_for_every_pack_leave_one_consistent_store(url):
    dataset = plan_store(Storage.from_url(url))
    barrier, environment = PROCESSES.Barrier(2), dict(os.environ)
    writers = [
        PROCESSES.Process(
            target=stores.race_for_packs,
            args=(dataset.root.url, dataset.path, environment, seed, barrier),
        )
        for seed in range(2)
    ]
    [writer.start() for writer in writers]
    [writer.join() for writer in writers]
    assert [writer.exitcode for writer in writers] == [0, 0]
    reader = HiddenStates.open(dataset)
    for pack in range(PACKS):
        shards = reader.read_pack(pack)[1].split(reader.layout.shard_rows)
        candidates = [states_of(pack, seed).split(reader.layout.shard_rows) for seed in range(2)]
        for shard, found in enumerate(shards):
            assert any(torch.equal(found, states[shard]) for states in candidates), (pack, shard)


# --- a full disk


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 8 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = os.geteuid() == 0 and not subprocess.call(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], stderr=subprocess.DEVNULL
    )
    if not mounted:
        pytest.skip("mounting a small disk needs to be root")
    yield folder
    subprocess.call(["umount", "-l", folder])


def test_a_full_disk_is_named_and_what_is_committed_stays_whole(small_disk):
    root = Storage.from_url(str(small_disk / "data"))
    filler = small_disk / "filler"
    filler.write_bytes(bytes(3 * 2**20))
    dataset = plan_store(root)
    with pytest.raises(StorageError, match="no space is left"):
        write_packs(dataset, list(range(PACKS)))
    committed = sorted(set(range(PACKS)) - set(missing_packs(dataset)))
    assert committed
    assert_committed_packs_are_whole(dataset, committed)
    filler.unlink()
    write_packs(dataset, missing_packs(dataset)[:1])
    assert len(missing_packs(dataset)) == PACKS - len(committed) - 1


# --- fork


def test_a_reader_raises_after_a_fork_instead_of_hanging(stored):
    reader = HiddenStates.open(stored)
    reader.read_pack(0)
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    child = context.Process(target=stores.read_in_child, args=(reader, theirs))
    child.start()
    assert ours.poll(30), "the child hangs"
    assert "spawn or forkserver" in ours.recv()
    child.join(10)
