"""Keeping a hidden-state store: what it will cost, how far it is, whether it is whole, and mending it.

Nothing here computes hidden states. A pack that is found bad loses its commit record and so becomes work
again; the extract stage does it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

import numpy as np
import torch
from safetensors.torch import save

from dflash_core import extraction
from dflash_core.config import DEFAULT_CARD, Card, ExtractConfig, TargetConfig
from dflash_core.errors import CorruptError, InputError
from dflash_core.hidden_states import HiddenStates, Layout, choose_layout, pack_unit, read_layout
from dflash_core.manifest import Dataset
from dflash_core.progress import Progress, silent
from dflash_core.storage import ObjectInfo, Storage
from dflash_core.target import check_layer_ids, default_target_layer_ids, text_config
from dflash_core.union import parts_of

Level = Literal["index", "list", "full"]
_READERS = 4  # packs checked at once; each holds its bytes in memory
_RECORD_READERS = 16  # latency-bound


def open_store(root: Storage, path: str) -> Dataset:
    """The store at `path`, complete or not.

    Raises:
        FileNotFoundError: there is nothing.
        InputError: another stage made it, or it is a union of stores.
    """
    dataset = Dataset.open(root, path)
    if dataset.stage != extraction.STAGE:
        raise InputError(
            f"{path} is an output of the {dataset.stage} stage, expected a path like hidden/demo-0123456789ab"
        )
    if parts := parts_of(dataset):
        raise InputError(f"{path} is a union and holds no states; name one of {', '.join(parts)}")
    return dataset


# How much smaller a codec makes the states of real models, from small measurements; real stores will differ.
_SHRINKS = {
    ("bfloat16", "lz4"): 1.2,
    ("bfloat16", "zstd"): 1.39,
    ("float8_e4m3", "zstd"): 1.14,
}
_DOLLARS_PER_PUT, _DOLLARS_PER_GET = 5e-6, 4e-7


@dataclass(frozen=True)
class Estimate:
    """What extraction will make and cost, before anything is spent.

    Attributes:
        num_objects: objects written, commit records included.
        size_bytes: of all objects; for a codec, with the ratio that is usual.
        tokens_per_s: of one device, as measured or estimated.
        dollars_to_write: requests of one extraction.
        dollars_per_epoch: requests of reading every pack once.
    """

    num_tokens: int
    num_packs: int
    num_objects: int
    size_bytes: int
    tokens_per_s: float
    device_hours: float
    dollars_per_month: float
    dollars_to_write: float
    dollars_per_epoch: float


def estimate(
    tokens: Dataset,
    target: TargetConfig,
    config: ExtractConfig,
    *,
    tokens_per_s: float = 0.0,
    card: Card = DEFAULT_CARD,
    dollars_per_gb_month: float,
) -> Estimate:
    """Size, time and price of extracting `tokens`; reads the target's configuration only.

    Requests are priced as S3 does in us-east-1, $5 for a million PUT and $0.4 for a million GET.

    Args:
        tokens_per_s: measured rate of one device; 0 estimates it for `card`.
        card: one of `cards.DENSE_TFLOPS`.
        dollars_per_gb_month: price of storage, 10^9 bytes.
    """
    facts, shape = tokens.require_stage("tokens").facts, text_config(target)
    layer_ids = config.target_layer_ids or default_target_layer_ids(shape.num_hidden_layers)
    check_layer_ids(layer_ids, shape.num_hidden_layers)
    num_packs, pack_tokens = facts["num_packs"], facts["pack_tokens"]
    num_taps = len(layer_ids) + config.last
    layout = choose_layout(num_packs, pack_tokens, num_taps, shape.hidden_size, config)
    # Chunks past a pack's last token are not stored; the last one that is holds half a chunk of zeros.
    rows = facts["total_tokens"] + num_packs * layout.chunk_rows // 2
    hidden_bytes = min(rows, num_packs * pack_tokens) * layout.row_bytes
    side_bytes = sum(
        np.dtype(side.dtype).itemsize * math.prod(side.columns)
        for side in layout.side_arrays.values()
    )
    size_bytes = (
        int(hidden_bytes / _SHRINKS.get((config.dtype, config.codec), 1.0))
        + num_packs * pack_tokens * side_bytes
    )
    rate = tokens_per_s or _estimated_rate(target, layer_ids, config, card)
    num_data = num_packs * (layout.shards_per_pack + len(layout.side_arrays))
    return Estimate(
        num_tokens=facts["total_tokens"],
        num_packs=num_packs,
        num_objects=num_data + num_packs,
        size_bytes=size_bytes,
        tokens_per_s=rate,
        device_hours=facts["total_tokens"] / rate / 3600,
        dollars_per_month=size_bytes / 1e9 * dollars_per_gb_month,
        dollars_to_write=(num_data + num_packs) * _DOLLARS_PER_PUT,
        dollars_per_epoch=num_data * _DOLLARS_PER_GET,
    )


def _estimated_rate(
    target: TargetConfig, layer_ids: list[int], config: ExtractConfig, card: Card
) -> float:
    from dflash_core import cards  # Transformers' model classes take seconds to import

    deepest = text_config(target).num_hidden_layers - 1
    last = deepest if config.taps_last_layer else layer_ids[-1]
    return cards.tokens_per_s(target, [last], card)


@dataclass(frozen=True)
class Status:
    """How far a store is.

    Attributes:
        size_bytes: of the committed packs' states; None until the store is sealed.
    """

    num_packs: int
    num_committed: int
    num_samples: int
    sealed: bool
    size_bytes: int | None
    layout: dict
    contract: dict


def status(dataset: Dataset) -> Status:
    """LIST requests over the commit records, and three small objects."""
    store = HiddenStates.open(dataset, use_index=False)
    sealed = dataset.complete
    return Status(
        num_packs=store.num_packs,
        num_committed=store.num_packs - len(extraction.missing(dataset)),
        num_samples=len(store.start),
        sealed=sealed,
        size_bytes=dataset.facts.get("size_bytes") if sealed else None,
        layout=asdict(store.layout),
        contract=store.contract,
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
        # A reader asks for the bytes it knows of, so it does not see what was appended.
        findings += _wrong_sizes(dataset, chosen)
        wrong = {finding.pack for finding in findings}
        findings += _unreadable(dataset, [p for p in chosen if p not in wrong], progress)
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
    storage.delete([key for pack in packs for key in layout.keys(pack)])
    return packs


def garbage(dataset: Dataset, *, older_than: timedelta = timedelta(days=1)) -> list[ObjectInfo]:
    """What no record names: objects that killed writers left, and indices that a newer one replaced.

    Younger ones are passed over, because their writer may be alive. Deleting them is always safe for
    readers; `clear` does it.
    """
    layout, missing = read_layout(dataset), set(extraction.missing(dataset))
    current = dataset.facts.get("records", {}).get("key") if dataset.complete else None
    newest = datetime.now(UTC) - older_than
    found = [info for info in dataset.storage.list("_index") if info.key != current]
    for folder in ("hidden/c", *(f"{name}/c" for name in layout.side_arrays)):
        listed = dataset.storage.list(folder)
        found += [info for info in listed if _pack_of(layout, info.key) in missing]
    found += dataset.storage.leftovers()
    return [info for info in found if info.modified < newest]


def _pack_of(layout: Layout, key: str) -> int | None:
    """The pack that an object would belong to; None for indices."""
    name, _, rest = key.partition("/c/")
    number = rest.partition("/")[0]
    if not number.isdigit():
        return None
    return int(number) // layout.shards_per_pack if name == "hidden" else int(number)


def clear(dataset: Dataset, found: Iterable[ObjectInfo]) -> None:
    """Deletes what `garbage` found, but nothing of a pack that was committed meanwhile.

    A writer adopts objects that it finds. One that does so and commits in the very moment of deletion has its
    pack taken back, which is work again.
    """
    hidden, plain, folder = [], [], dataset.storage.local_path
    layout, missing = read_layout(dataset), set(extraction.missing(dataset))
    for info in found:
        if folder and "#" in info.key:
            hidden.append(info.key)
        elif (pack := _pack_of(layout, info.key)) is None or pack in missing:
            plain.append(info.key)
    dataset.storage.delete(plain)
    for key in hidden if folder else ():
        (folder / key).unlink(missing_ok=True)  # the client refuses to name what it hides
    raced = missing - set(extraction.missing(dataset))
    hit = raced & {_pack_of(layout, key) for key in plain}
    repair(dataset, [Finding(pack, "was cleared away") for pack in hit])


def export_sample(dataset: Dataset, index: int) -> bytes:
    """One sample as a safetensors file: `hidden` bfloat16 [S, L, H], `input_ids`, `loss_mask` [S]."""
    store = HiddenStates.open(dataset)
    hidden_SLH = store.read_sample(index)
    pack, row = divmod(int(store.start[index]), store.pack_tokens)
    rows = slice(row, row + len(hidden_SLH))
    tensors = {
        "hidden": hidden_SLH.contiguous(),
        "input_ids": torch.from_numpy(store.read_side(pack, "input_ids")[rows].astype("int64")),
        "loss_mask": torch.from_numpy(store.read_side(pack, "loss_mask")[rows].copy()),
    }
    return save(tensors, metadata={"format": "pt", "dataset": dataset.path, "sample": str(index)})


def _wrong_sizes(dataset: Dataset, packs: list[int]) -> list[Finding]:
    layout = read_layout(dataset)
    folders = ("hidden/c", *(f"{name}/c" for name in layout.side_arrays))
    sizes = {info.key: info.size for folder in folders for info in dataset.storage.list(folder)}

    def check(pack: int) -> Finding | None:
        try:
            record = dataset.record(pack_unit(pack))
        except CorruptError as error:
            return Finding(pack, str(error))
        for item in (*record["shards"], *(record[name] for name in layout.side_arrays)):
            found = sizes.get(item["key"])
            if found != item["size"]:
                what = "is missing" if found is None else f"has {found} bytes"
                return Finding(pack, f"{item['key']} {what}, expected {item['size']}")
        return None

    with ThreadPoolExecutor(_RECORD_READERS) as pool:
        return [finding for finding in pool.map(check, packs) if finding]


def _unreadable(dataset: Dataset, packs: list[int], progress: Progress) -> list[Finding]:
    store = HiddenStates.open(dataset, use_index=False)

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
