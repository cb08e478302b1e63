"""Knowing what is left of a large store: time, requests and memory; prints the tables of docs/store.md.

First a store of 914,000 samples in 20,000 packs, whose records really lie in a SeaweedFS server on this machine. Then
the records and the index of 10 million samples in 219,000 packs, in memory: one bucket's listing of them would be the
same code with 219 requests.

Run: PYTHONPATH=. python benchmarks/store_planning.py [--packs 20000] [--folder /dev/shm]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from dflash_core import extraction
from dflash_core.config import ExtractConfig
from dflash_core.hidden_states import HiddenStates, Layout, create_store, pack_unit
from dflash_core.manifest import Dataset
from dflash_core.record_index import write_record_index
from dflash_core.storage import Storage
from tests.s3 import BUCKET, S3Server

PACK_TOKENS, TAPS, HIDDEN = 16_384, 5, 5120  # Qwen3.6-27B
SAMPLES_PER_PACK = 45.7
LEFT = 500  # packs that are not there yet
CONFIG = ExtractConfig()


def made_up_tokens(num_packs: int) -> Any:
    """What `create_store` needs of a tokens dataset with samples of equal length."""
    per_pack = np.diff(np.round(np.arange(num_packs + 1) * SAMPLES_PER_PACK).astype(np.int64))
    length = PACK_TOKENS // (int(SAMPLES_PER_PACK) + 1)
    pack = np.repeat(np.arange(num_packs, dtype=np.int32), per_pack)
    first = np.repeat(np.cumsum(per_pack) - per_pack, per_pack)
    row = ((np.arange(len(pack)) - first) * length).astype(np.int32)
    offset = np.arange(len(pack) + 1, dtype=np.int64) * length
    return SimpleNamespace(
        num_packs=num_packs, pack_tokens=PACK_TOKENS, offset=offset, pack=pack, row=row
    )


def record(layout: Layout, pack: int) -> dict:
    """A commit record as `write_pack` makes it, with checksums that mean nothing."""
    num_tokens = PACK_TOKENS - 100
    checksums = np.random.default_rng(pack).integers(0, 2**32, 66)
    texts, first, shards = [f"{value:08x}" for value in checksums], 0, []
    for shard, count in enumerate(layout.chunks_in_shards(num_tokens)):
        size = count * (layout.chunk_bytes + 4) + 16 * layout.chunks_per_shard + 4
        item = {"key": layout.shard_key(pack, shard), "size": size}
        shards.append({**item, "crc32c": texts[first : first + count]})
        first += count
    sides = {
        name: {"key": layout.side_key(name, pack), "size": 65_540, "crc32c": [texts[first + i]]}
        for i, name in enumerate(layout.side_arrays)
    }
    facts = {"num_tokens": num_tokens, "num_samples": 46, "absmax": 123.0, "num_nan": 0}
    return {"shards": shards, **sides, **facts}


def planned(root: Storage, num_packs: int) -> tuple[Dataset, Layout]:
    dataset = Dataset.create(root, "hidden", "plan", version=1, config=CONFIG, inputs={})
    tokens = made_up_tokens(num_packs)
    return dataset, create_store(dataset, tokens, TAPS, HIDDEN, {"target": "27b"}, CONFIG)


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def step(what: str, server: S3Server | None = None) -> Iterator[None]:
    """Prints a row: what, seconds, requests, MB that stay resident."""
    requests = server.requests() if server else None
    memory, began = resident_mb(), time.perf_counter()
    yield
    seconds, memory = time.perf_counter() - began, resident_mb() - memory
    count = (server.requests() - requests).total() if server and requests is not None else "-"
    print(f"| {what} | {seconds:.2f} | {count} | {max(memory, 0):.0f} |", flush=True)


def in_a_bucket(num_packs: int, folder: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        server = S3Server(Path(place))
        server.start()
        os.environ.update(server.environment)
        try:
            root = Storage.from_url(f"s3://{BUCKET}/planning")
            dataset, layout = planned(root, num_packs)
            done = num_packs - LEFT
            with ThreadPoolExecutor(16) as pool:
                list(
                    pool.map(lambda p: dataset.commit(pack_unit(p), record(layout, p)), range(done))
                )
            print(f"\n{num_packs:,} packs, {LEFT} of them missing, records in SeaweedFS\n")
            print("| step | seconds | requests | MB kept |\n| --- | --- | --- | --- |")
            with step("what is left", server):
                again = Dataset.open(Storage.from_url(root.url), dataset.path)
                left = extraction.missing(again)
            assert left == list(range(done, num_packs))
            for pack in left:
                dataset.commit(pack_unit(pack), record(layout, pack))
            with step(
                "reading all records and writing the index, when the store is sealed", server
            ):
                names = [pack_unit(pack) for pack in range(num_packs)]
                place_of_index = write_record_index(
                    dataset, layout, dataset.records(names).values()
                )
            dataset.seal([], {"records": place_of_index})
            with step("opening the sealed store, all records known", server):
                store = HiddenStates.open(Dataset.open(Storage.from_url(root.url), dataset.path))
            assert store._record(num_packs - 1)["shards"] == record(layout, num_packs - 1)["shards"]
        finally:
            server.stop()


def in_memory(num_packs: int) -> None:
    dataset, layout = planned(Storage.from_url("memory://"), num_packs)
    samples = round(num_packs * SAMPLES_PER_PACK)
    print(f"\n{samples:,} samples in {num_packs:,} packs, in memory\n")
    print("| step | seconds | requests of a bucket | MB kept |\n| --- | --- | --- | --- |")
    for pack in range(num_packs):
        dataset.storage.put(f"_commits/{pack_unit(pack)}.json", b"{}")
    with step(f"what is left (a bucket: {-(-num_packs // 1000) + 2} requests)"):
        assert extraction.missing(dataset) == []
    with step("writing the index from the records"):
        place = write_record_index(dataset, layout, (record(layout, p) for p in range(num_packs)))
    size = dataset.storage.size(place["key"]) / 1e6
    dataset.seal([], {"records": place})
    with step(f"opening the sealed store (a bucket: 6 requests, index {size:.0f} MB)"):
        store = HiddenStates.open(dataset)
    assert store._index is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packs", type=int, default=20_000)
    parser.add_argument("--packs-in-memory", type=int, default=219_000)
    parser.add_argument("--folder", default="/dev/shm", help="where the server keeps its data")
    options = parser.parse_args()
    in_a_bucket(options.packs, options.folder)
    in_memory(options.packs_in_memory)


if __name__ == "__main__":
    main()
