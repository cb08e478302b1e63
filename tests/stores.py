"""Hidden-state stores with made-up states, and processes that write and read them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from dflash_core.config import ExtractConfig
from dflash_core.hidden_states import (
    HiddenStates,
    check_rows,
    create_store,
    read_layout,
    write_pack,
)
from dflash_core.manifest import Dataset
from dflash_core.packing import Pack, plan_packs
from dflash_core.storage import Storage


@dataclass
class PlannedTokens:
    """What the store needs to know of a tokens dataset."""

    lengths: np.ndarray
    pack_tokens: int

    def __post_init__(self):
        self.offset = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        self.pack, self.row, self.num_packs = plan_packs(self.lengths, self.pack_tokens)

    def read_pack(self, index: int) -> Pack:
        samples = np.flatnonzero(self.pack == index)
        samples = samples[np.argsort(self.row[samples])].astype(np.int32)
        ids, mask = np.zeros(self.pack_tokens, np.uint32), np.zeros(self.pack_tokens, np.uint8)
        for sample in samples:
            rows = slice(self.row[sample], self.row[sample] + self.lengths[sample])
            ids[rows] = sample * 1000 + np.arange(self.lengths[sample])
            mask[rows] = np.arange(self.lengths[sample]) % 2
        length = self.lengths[samples].astype(np.int32)
        return Pack(index, ids, mask, self.row[samples].astype(np.int32), length, samples)


def made_up_states(pack: Pack, num_taps: int, hidden_size: int, seed: int = 0) -> torch.Tensor:
    """bfloat16 [T, L, H] that pack and seed decide, zeros past the last sample."""
    generator = torch.Generator().manual_seed(1000 * seed + pack.index)
    hidden = torch.zeros(len(pack.input_ids), num_taps, hidden_size)
    hidden[: pack.num_tokens] = torch.randn(
        pack.num_tokens, num_taps, hidden_size, generator=generator
    )
    return hidden.to(torch.bfloat16)


# A store of 24 packs of 4 shards, 1.5 MB a pack: an upload takes long enough to be hit in its middle.
PACK_TOKENS, TAPS, HIDDEN, PACKS = 512, 3, 512, 24
CONFIG = ExtractConfig(
    target_layer_ids=[0, 2, 3], chunk_rows=64, shard_bytes=128 * TAPS * HIDDEN * 2
)
TOKENS = PlannedTokens(np.full(PACKS * 4, PACK_TOKENS // 4 - 1), PACK_TOKENS)


def plan_store(root: Storage, name: str = "demo") -> Dataset:
    dataset = Dataset.create(root, "hidden", name, version=1, config=CONFIG, inputs={})
    create_store(dataset, TOKENS, TAPS, HIDDEN, {"target": "acme/tiny"}, CONFIG)  # ty: ignore[invalid-argument-type]
    return dataset


def states_of(pack: int, seed: int = 0) -> torch.Tensor:
    return made_up_states(TOKENS.read_pack(pack), TAPS, HIDDEN, seed)


def write_packs(dataset: Dataset, packs: list[int], seed: int = 0) -> None:
    """Writes the packs, two at a time."""
    layout = read_layout(dataset)

    def write(index: int) -> None:
        pack, hidden = TOKENS.read_pack(index), states_of(index, seed)
        write_pack(dataset, layout, pack, hidden, check_rows(pack, hidden), {})

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(write, packs))


def missing_packs(dataset: Dataset) -> list[int]:
    return sorted(set(range(PACKS)) - {int(unit) for unit in dataset.committed()})


def write_missing(url: str, path: str, environment: dict[str, str], started) -> None:
    """A writer process: fills what has no commit record, then ends."""
    os.environ.update(environment)
    dataset = Dataset.open(Storage.from_url(url), path)
    started.set()
    write_packs(dataset, missing_packs(dataset))


def race_for_packs(url: str, path: str, environment: dict[str, str], seed: int, barrier) -> None:
    """A writer process that writes every pack, each at the same moment as its rivals."""
    os.environ.update(environment)
    dataset = Dataset.open(Storage.from_url(url), path)
    for pack in range(PACKS):
        barrier.wait(60)
        write_packs(dataset, [pack], seed)


def read_in_child(reader: HiddenStates, connection) -> None:
    try:
        reader.read_pack(0)
        connection.send("read")
    except RuntimeError as error:
        connection.send(str(error))
