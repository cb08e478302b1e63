"""Keeping a hidden-state store: what it will cost, how far it is, whether it is whole, and mending it.

Nothing here computes hidden states. A pack that is found bad loses its commit record and so becomes work
again; the extract stage does it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

import torch
from safetensors.torch import save

from dflash_core import extraction
from dflash_core.config import ExtractConfig, TargetConfig
from dflash_core.errors import CorruptError, InputError
from dflash_core.hidden_states import HiddenStates, choose_layout, pack_unit, read_layout
from dflash_core.manifest import Dataset
from dflash_core.progress import Progress, silent
from dflash_core.storage import ObjectInfo
from dflash_core.target import check_layer_ids, default_target_layer_ids, text_config

Level = Literal["index", "list", "full"]
_DATA = ("hidden/c", "input_ids/c", "loss_mask/c")
_READERS = 4  # packs checked at once; each holds its bytes in memory


@dataclass(frozen=True)
class Estimate:
    """What extraction will make and cost, before anything is spent."""

    num_tokens: int
    num_packs: int
    num_objects: int
    size_bytes: int
    device_hours: float
    dollars_per_month: float


def estimate(
    tokens: Dataset,
    target: TargetConfig,
    config: ExtractConfig,
    *,
    tokens_per_s: float,
    dollars_per_gb_month: float,
) -> Estimate:
    """Size, time and price of extracting `tokens`; reads the target's configuration only.

    Args:
        tokens_per_s: measured rate of one device.
        dollars_per_gb_month: price of storage, 10^9 bytes.
    """
    facts, shape = tokens.require_stage("tokens").facts, text_config(target)
    layer_ids = config.target_layer_ids or default_target_layer_ids(shape.num_hidden_layers)
    check_layer_ids(layer_ids, shape.num_hidden_layers)
    num_packs, pack_tokens = facts["num_packs"], facts["pack_tokens"]
    layout = choose_layout(num_packs, pack_tokens, len(layer_ids), shape.hidden_size, config)
    # Chunks past a pack's last token are not stored; the last one that is holds half a chunk of zeros.
    rows = facts["total_tokens"] + num_packs * layout.chunk_rows // 2
    size_bytes = min(rows, num_packs * pack_tokens) * layout.row_bytes + num_packs * pack_tokens * 5
    return Estimate(
        num_tokens=facts["total_tokens"],
        num_packs=num_packs,
        num_objects=num_packs * (layout.shards_per_pack + 3),
        size_bytes=size_bytes,
        device_hours=facts["total_tokens"] / tokens_per_s / 3600,
        dollars_per_month=size_bytes / 1e9 * dollars_per_gb_month,
    )


@dataclass(frozen=True)
class Finding:
    """A pack that is not what its commit record says, or that has none."""

    pack: int
    problem: str


def verify(
    dataset: Dataset,
    level: Level,
    *,
    sample: float = 1.0,
    seed: int = 0,
    progress: Progress = silent,
) -> list[Finding]:
    """Packs with something wrong, in order.

    Args:
        level: `index` asks which packs have a commit record (LIST requests only), `list` compares the
            objects' sizes with the records too, `full` reads and checks every byte of the packs.
        sample: share of the committed packs that `full` reads, drawn by `seed`.
    """
    missing = extraction.missing(dataset)
    findings = [Finding(pack, "has no commit record") for pack in missing]
    committed = sorted(set(extraction.units(dataset)) - set(missing))
    if level == "list":
        findings += _wrong_sizes(dataset, committed)
    elif level == "full":
        count = max(1, round(len(committed) * sample)) if committed else 0
        chosen = sorted(random.Random(seed).sample(committed, count))
        findings += _unreadable(dataset, chosen, progress)
    return sorted(findings, key=lambda finding: finding.pack)


def repair(dataset: Dataset, findings: Iterable[Finding]) -> list[int]:
    """Turns bad packs into work: manifest, commit record and objects go, in this order.

    A reader in between sees an incomplete store, never a wrong one. Returns the packs; run the extract
    stage with the request of the store to fill them.
    """
    packs = sorted({finding.pack for finding in findings})
    if not packs:
        return []
    storage, layout = dataset.storage, read_layout(dataset)
    storage.delete(["manifest.json"])
    storage.delete([f"_commits/{pack_unit(pack)}.json" for pack in packs])
    for pack in packs:
        shards = [layout.shard_key(pack, shard) for shard in range(layout.shards_per_pack)]
        storage.delete([*shards, f"input_ids/c/{pack}", f"loss_mask/c/{pack}"])
    return packs


def garbage(dataset: Dataset, *, older_than: timedelta = timedelta(days=1)) -> list[ObjectInfo]:
    """Objects of packs without a commit record: what killed writers left.

    Younger ones are passed over, because their writer may be alive. Deleting them is always safe for
    readers; `dataset.storage.delete` does it.
    """
    layout, missing = read_layout(dataset), set(extraction.missing(dataset))
    newest = datetime.now(UTC) - older_than
    found = []
    for folder in _DATA:
        for info in dataset.storage.list(folder):
            number = int(info.key.removeprefix(f"{folder}/").split("/")[0])
            pack = number // layout.shards_per_pack if folder == "hidden/c" else number
            if pack in missing and info.modified < newest:
                found.append(info)
    return found


def export_sample(dataset: Dataset, index: int) -> bytes:
    """One sample as a safetensors file: `hidden` bfloat16 [S, L, H], `input_ids`, `loss_mask` [S]."""
    store = HiddenStates.open(dataset)
    if not 0 <= index < len(store.start):
        raise InputError(f"sample {index} is not in {dataset.path}; it has {len(store.start)}")
    pack_index, row = divmod(int(store.start[index]), store.pack_tokens)
    pack, hidden_TLH = store.read_pack(pack_index)
    rows = slice(row, row + int(store.length[index]))
    tensors = {
        "hidden": hidden_TLH[rows].contiguous(),
        "input_ids": torch.from_numpy(pack.input_ids[rows].astype("int64")),
        "loss_mask": torch.from_numpy(pack.loss_mask[rows].copy()),
    }
    return save(tensors, metadata={"format": "pt", "dataset": dataset.path, "sample": str(index)})


def _wrong_sizes(dataset: Dataset, packs: list[int]) -> list[Finding]:
    sizes = {info.key: info.size for folder in _DATA for info in dataset.storage.list(folder)}
    findings = []
    for pack in packs:
        record = dataset.record(pack_unit(pack))
        for item in (*record["shards"], record["input_ids"], record["loss_mask"]):
            found = sizes.get(item["key"])
            if found != item["size"]:
                what = "is missing" if found is None else f"has {found} bytes"
                findings.append(Finding(pack, f"{item['key']} {what}, expected {item['size']}"))
                break
    return findings


def _unreadable(dataset: Dataset, packs: list[int], progress: Progress) -> list[Finding]:
    store = HiddenStates.open(dataset)

    def check(pack: int) -> Finding | None:
        try:
            _, hidden_TLH = store.read_pack(pack)
        except CorruptError as error:
            return Finding(pack, str(error))
        if not torch.isfinite(hidden_TLH).all():
            return Finding(pack, "holds NaN or infinity")
        return None

    findings = []
    with ThreadPoolExecutor(_READERS) as pool:
        for done, finding in enumerate(pool.map(check, packs), 1):
            if finding:
                findings.append(finding)
            progress(done, len(packs), {"bad": len(findings)})
    return findings
