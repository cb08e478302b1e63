"""The commit records of a sealed store in one object, so that opening it takes one request instead of one a pack.

The records stay the truth: the manifest names this object with its sha256, a repair takes the manifest away, and a
reader that finds the object missing or altered goes back to the records. 20,000 packs of a 27B target make 6 MB.

Shape letters: P packs, O objects of a pack (its shards, then its other arrays), C inner chunks of a pack.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dflash_core.errors import DFlashError
from dflash_core.manifest import Dataset, sha256

if TYPE_CHECKING:
    from dflash_core.hidden_states import Layout

log = logging.getLogger(__name__)


def write_record_index(dataset: Dataset, layout: Layout, records: Iterable[dict]) -> dict[str, str]:
    """Writes the object; returns what the manifest says of it.

    Args:
        records: commit records of all packs, in order.
    """
    sides = list(layout.side_arrays)
    num_chunks = layout.pack_tokens // layout.chunk_rows
    size_PO = np.zeros((layout.num_packs, layout.shards_per_pack + len(sides)), np.int64)
    crc_PC = np.zeros((layout.num_packs, num_chunks), np.uint32)
    crc_PS = np.zeros((layout.num_packs, len(sides)), np.uint32)
    chunk_PC = np.zeros((layout.num_packs, num_chunks), np.int32)
    tokens_P = np.zeros(layout.num_packs, np.int32)
    for pack, record in enumerate(records):
        shards, tokens_P[pack] = record["shards"], record["num_tokens"]
        size_PO[pack, : len(shards)] = [item["size"] for item in shards]
        checksums = [int(text, 16) for item in shards for text in item["crc32c"]]
        crc_PC[pack, : len(checksums)] = checksums
        sizes = [size for item in shards for size in item.get("chunks", ())]
        chunk_PC[pack, : len(sizes)] = sizes
        for column, name in enumerate(sides):
            size_PO[pack, layout.shards_per_pack + column] = record[name]["size"]
            crc_PS[pack, column] = int(record[name]["crc32c"][0], 16)
    columns = {
        "num_tokens": tokens_P,
        "object_bytes": size_PO,
        "chunk_crc32c": crc_PC,
        "side_crc32c": crc_PS,
    }
    data = save(columns if layout.codec == "none" else {**columns, "chunk_bytes": chunk_PC})
    digest = sha256(data)
    key = f"_index/{digest[:12]}.safetensors"
    dataset.storage.put(key, data)
    return {"key": key, "sha256": digest}


class RecordIndex:
    """What commit records say of a store's objects."""

    def __init__(self, layout: Layout, columns: dict[str, np.ndarray]) -> None:
        self._layout = layout
        self._columns = columns

    @classmethod
    def open(cls, dataset: Dataset, layout: Layout) -> RecordIndex | None:
        """The index of a sealed store, or None where there is none that can be trusted."""
        try:
            place = dataset.facts["records"]
        except (DFlashError, KeyError):
            return None
        try:
            data = dataset.storage.get(place["key"])
            if sha256(data) == place["sha256"]:
                return cls(layout, load(data))
        except (FileNotFoundError, SafetensorError):
            pass
        log.warning(
            "%s/%s is missing or altered; reading commit records", dataset.url, place["key"]
        )
        return None

    def record(self, pack: int) -> dict:
        """The part of the pack's commit record that names its objects."""
        layout, columns = self._layout, self._columns
        sizes = columns["object_bytes"][pack].tolist()
        checksums = [f"{value:08x}" for value in columns["chunk_crc32c"][pack].tolist()]
        record: dict[str, Any] = {"shards": []}
        first = 0
        for shard, count in enumerate(layout.chunks_in_shards(int(columns["num_tokens"][pack]))):
            chunks = slice(first, first + count)
            item = {
                "key": layout.shard_key(pack, shard),
                "size": sizes[shard],
                "crc32c": checksums[chunks],
            }
            if "chunk_bytes" in columns:
                item["chunks"] = columns["chunk_bytes"][pack, chunks].tolist()
            record["shards"].append(item)
            first += count
        for column, name in enumerate(layout.side_arrays):
            record[name] = {
                "key": layout.side_key(name, pack),
                "size": sizes[layout.shards_per_pack + column],
                "crc32c": [f"{columns['side_crc32c'][pack, column]:08x}"],
            }
        return record
