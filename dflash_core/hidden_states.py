"""The hidden-state store: a Zarr v3 group that one writer per pack fills and any Zarr library reads.

    zarr.json                 group; attributes hold the layout and the compatibility contract
    hidden/c/<i>/0/0          bfloat16 [packs * T, L, H]; shard i is `shard_rows` rows, one object
    input_ids/c/<pack>        uint32 [packs * T]
    loss_mask/c/<pack>        uint8 [packs * T]
    start, length             int64, int32 [num_samples]: rows start .. start + length are the sample's
    _commits/<pack>.json      commit records: which objects count, with size and a crc32c for each chunk

zarr-python writes the metadata, once. Objects of packs are encoded here and sent as one PUT each, which
costs a fraction of the time and CPU; the bytes are those of the `sharding_indexed` codec. A pack that
has no commit record does not exist, whatever objects lie there.

Shape letters: T rows of a pack, L taps, H hidden size.
"""

from __future__ import annotations

import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import google_crc32c
import numpy as np
import torch
from torch import Tensor

from dflash_core.config import ExtractConfig
from dflash_core.errors import CorruptError, IncompleteError, InputError, StorageError
from dflash_core.manifest import Dataset, finite, require_same
from dflash_core.packing import Pack

if TYPE_CHECKING:
    from dflash_core.tokenization import Tokens

log = logging.getLogger(__name__)

FORMAT, FORMAT_VERSION = "dflash-hidden-states", 1
_MISSING = 2**64 - 1  # offset and size of a chunk that is not there, in a Zarr shard index
_CRC_BYTES = 4
_READERS = 8  # objects of a pack fetched at once; one S3 connection carries 50 to 90 MB/s


# --- layout ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Shapes of a store and the place of every byte in it."""

    num_packs: int
    pack_tokens: int
    num_taps: int
    hidden_size: int
    chunk_rows: int
    shard_rows: int

    @property
    def row_bytes(self) -> int:
        return self.num_taps * self.hidden_size * 2

    @property
    def chunk_bytes(self) -> int:
        """Bytes of an inner chunk without its checksum."""
        return self.chunk_rows * self.row_bytes

    @property
    def chunks_per_shard(self) -> int:
        return self.shard_rows // self.chunk_rows

    @property
    def shards_per_pack(self) -> int:
        return self.pack_tokens // self.shard_rows

    def shard_key(self, pack: int, shard: int) -> str:
        return f"hidden/c/{pack * self.shards_per_pack + shard}/0/0"

    def chunks_in_shards(self, num_tokens: int) -> list[int]:
        """Inner chunks of each shard that hold tokens, for the shards of a pack that hold any."""
        chunks = -(-num_tokens // self.chunk_rows)
        full, rest = divmod(chunks, self.chunks_per_shard)
        return [self.chunks_per_shard] * full + [rest] * (rest > 0)


def choose_layout(
    num_packs: int, pack_tokens: int, num_taps: int, hidden_size: int, config: ExtractConfig
) -> Layout:
    """Chunk and shard sizes that divide a pack.

    A chunk is the largest divisor of `pack_tokens` that is not above `config.chunk_rows`. A shard is the
    largest number of chunks that divides a pack and stays within `config.shard_bytes`, at least one.
    """
    chunk_rows = max(d for d in _divisors(pack_tokens) if d <= config.chunk_rows)
    chunk_bytes = chunk_rows * num_taps * hidden_size * 2
    fitting = [
        d for d in _divisors(pack_tokens // chunk_rows) if d * chunk_bytes <= config.shard_bytes
    ]
    return Layout(
        num_packs=num_packs,
        pack_tokens=pack_tokens,
        num_taps=num_taps,
        hidden_size=hidden_size,
        chunk_rows=chunk_rows,
        shard_rows=chunk_rows * max(fitting, default=1),
    )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


# --- metadata ----------------------------------------------------------------------------------


def create_store(
    dataset: Dataset,
    tokens: Tokens,
    num_taps: int,
    hidden_size: int,
    contract: dict,
    config: ExtractConfig,
) -> Layout:
    """Writes metadata, `start` and `length`; a store that is there already is checked and kept.

    Several planners may do this at once: everything is create-only, follows from the fingerprint, and the
    group's zarr.json comes last.

    Raises:
        MismatchError: the store at this place has another layout or contract.
    """
    layout = choose_layout(tokens.num_packs, tokens.pack_tokens, num_taps, hidden_size, config)
    attributes = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "layout": asdict(layout),
        "contract": contract,
    }
    if not dataset.storage.exists("zarr.json"):
        for key, data in _metadata_objects(layout, tokens, attributes).items():
            dataset.storage.put_new(key, data)
    found = _read_attributes(dataset)
    advice = "another version of this project made it; use another root or name"
    require_same(f"store {dataset.url}", _flat(attributes), _flat(found), advice)
    return layout


def _metadata_objects(layout: Layout, tokens: Tokens, attributes: dict) -> dict[str, bytes]:
    """Key and bytes of everything that is known before the first pack, the group last."""
    import zarr
    from zarr.codecs import Crc32cCodec
    from zarr.storage import MemoryStore

    from dflash_core.zarr_bfloat16 import BFloat16

    objects: dict = {}
    store = MemoryStore(objects)
    rows, taps = layout.num_packs * layout.pack_tokens, (layout.num_taps, layout.hidden_size)
    checked: dict[str, Any] = {"compressors": [Crc32cCodec()], "filters": None, "fill_value": 0}
    zarr.create_array(
        store,
        name="hidden",
        shape=(rows, *taps),
        shards=(layout.shard_rows, *taps),
        chunks=(layout.chunk_rows, *taps),
        dtype=BFloat16(),
        dimension_names=("row", "tap", "hidden"),
        **checked,
    )
    for name, dtype in (("input_ids", "uint32"), ("loss_mask", "uint8")):
        zarr.create_array(
            store, name=name, shape=(rows,), chunks=(layout.pack_tokens,), dtype=dtype, **checked
        )
    length = np.diff(tokens.offset).astype(np.int32)
    start = tokens.pack.astype(np.int64) * layout.pack_tokens + tokens.row
    for name, values in (("start", start), ("length", length)):
        zarr.create_array(
            store,
            name=name,
            data=values,
            chunks=values.shape,
            **checked,
            # Else an array of zeros alone would be no object at all.
            config={"write_empty_chunks": True},
        )
    objects.pop("zarr.json", None)
    zarr.create_group(store, attributes=attributes)
    return {key: buffer.to_bytes() for key, buffer in objects.items()}


def _read_attributes(dataset: Dataset) -> dict:
    try:
        attributes = json.loads(dataset.storage.get("zarr.json"))["attributes"]
    except FileNotFoundError:
        raise IncompleteError(
            f"{dataset.url} holds no zarr.json: it was never planned; run the extract stage again"
        ) from None
    except (ValueError, KeyError) as error:
        raise CorruptError(f"{dataset.url}/zarr.json was cut or altered") from error
    if attributes.get("format") != FORMAT or attributes.get("format_version") != FORMAT_VERSION:
        raise InputError(
            f"{dataset.url} has format {attributes.get('format')!r} version "
            f"{attributes.get('format_version')!r}, expected {FORMAT!r} version {FORMAT_VERSION}"
        )
    return attributes


def _flat(attributes: dict) -> dict:
    parts = (attributes["layout"], attributes["contract"])
    return {key: value for part in parts for key, value in part.items()}


def read_layout(dataset: Dataset) -> Layout:
    """The layout of a planned store."""
    return Layout(**_read_attributes(dataset)["layout"])


def read_contract(dataset: Dataset) -> dict:
    """The compatibility contract of a planned store."""
    return _read_attributes(dataset)["contract"]


# --- writing -----------------------------------------------------------------------------------


def pack_unit(pack: int) -> str:
    """Name of a pack's commit record."""
    return f"{pack:08d}"


class Written(NamedTuple):
    """The record that stands for a pack, and where the time went."""

    record: dict
    encode_s: float
    upload_s: float


def check_rows(pack: Pack, hidden_TLH: Tensor) -> float:
    """Largest magnitude in the pack; runs on the tensor's device.

    Raises:
        InputError: a value is NaN or infinite; the message names the first such sample.
    """
    low, high = torch.aminmax(hidden_TLH)  # both are NaN when any value is
    largest = max(-low.item(), high.item())
    if np.isfinite(largest):
        return largest
    bad_T = ~torch.isfinite(hidden_TLH).all(dim=-1).all(dim=-1)
    row = int(bad_T.nonzero()[0])
    document = int(np.searchsorted(pack.start, row, side="right")) - 1
    raise InputError(
        f"the target gives NaN or infinity for sample {pack.samples[document]} (pack {pack.index}, token "
        f"{row - pack.start[document]} of {pack.length[document]}), {int(bad_T.sum())} rows in all; "
        "set the target's dtype to bfloat16 or float32, or drop the sample"
    )


def write_pack(
    dataset: Dataset, layout: Layout, pack: Pack, hidden_TLH: Tensor, absmax: float, facts: dict
) -> Written:
    """Encodes, uploads and commits one pack. Safe to call from threads, and again after any failure.

    Objects are create-only. Where an earlier or parallel attempt left one, it is verified and adopted, so
    that the record and the bytes agree whoever wins; a damaged leftover of an uncommitted pack is replaced.

    Args:
        hidden_TLH: bfloat16 [T, L, H] on the CPU, zeros past the pack's last sample.
        absmax: what `check_rows` returned.
        facts: more fields for the record.
    """
    shape = (layout.pack_tokens, layout.num_taps, layout.hidden_size)
    assert hidden_TLH.shape == shape, f"{tuple(hidden_TLH.shape)} for a store of {shape}"
    assert hidden_TLH.dtype == torch.bfloat16
    raw_T = hidden_TLH.contiguous().view(torch.int16).numpy().reshape(layout.pack_tokens, -1)
    encode_s = upload_s = 0.0
    shards = []
    for shard, num_chunks in enumerate(layout.chunks_in_shards(pack.num_tokens)):
        began = time.perf_counter()
        first = shard * layout.shard_rows
        data = encode_shard(layout, raw_T[first : first + layout.shard_rows], num_chunks)
        encoded = time.perf_counter()
        key, tail = layout.shard_key(pack.index, shard), shard_tail(layout, num_chunks)
        shards.append(_put_object(dataset, pack.index, key, data, layout.chunk_bytes, tail))
        encode_s += encoded - began
        upload_s += time.perf_counter() - encoded
    record = {
        "shards": shards,
        "input_ids": _put_array(dataset, pack.index, "input_ids", pack.input_ids.astype("<u4")),
        "loss_mask": _put_array(dataset, pack.index, "loss_mask", pack.loss_mask.astype("u1")),
        "num_tokens": pack.num_tokens,
        "num_samples": len(pack.samples),
        "first_row": pack.index * layout.pack_tokens,
        "last_row": pack.index * layout.pack_tokens + pack.num_tokens - 1,
        "absmax": finite(absmax),
        "num_nan": 0,
        **facts,
    }
    return Written(dataset.commit(pack_unit(pack.index), record), encode_s, upload_s)


def encode_shard(layout: Layout, rows: np.ndarray, num_chunks: int) -> np.ndarray:
    """One Zarr shard as uint8: chunks with a crc32c each, then the index with its own.

    Args:
        rows: int16 [shard_rows, L * H], the bits of bfloat16 values.
        num_chunks: leading chunks that hold tokens; the others are marked missing and take no space.
    """
    size, step = layout.chunk_bytes, layout.chunk_bytes + _CRC_BYTES
    tail = shard_tail(layout, num_chunks)
    data = np.empty(num_chunks * step + len(tail), np.uint8)
    source = np.ascontiguousarray(rows).view(np.uint8).reshape(-1)
    for chunk in range(num_chunks):
        payload = data[chunk * step : chunk * step + size]
        payload[:] = source[chunk * size : (chunk + 1) * size]
        data[chunk * step + size : (chunk + 1) * step] = _crc(payload)
    data[num_chunks * step :] = np.frombuffer(tail, np.uint8)
    return data


def shard_tail(layout: Layout, num_chunks: int) -> bytes:
    """The index at a shard's end: offset and size of each chunk, little-endian uint64, and a crc32c."""
    index = np.full((layout.chunks_per_shard, 2), _MISSING, "<u8")
    step = layout.chunk_bytes + _CRC_BYTES
    index[:num_chunks, 0] = np.arange(num_chunks, dtype="<u8") * step
    index[:num_chunks, 1] = step
    raw = index.view(np.uint8).reshape(-1)
    return raw.tobytes() + _crc(raw).tobytes()


def chunk_checksums(data: np.ndarray, chunk_bytes: int, tail: bytes) -> list[str] | None:
    """Hex crc32c of each chunk of an object, or None unless the object is whole.

    Commit records keep one checksum a chunk and none over the object: the crc32c of data that ends in
    its own crc32c is the same for all data.

    Args:
        data: uint8, chunks that end in their crc32c, then `tail`.
        chunk_bytes: size of a chunk without its checksum.
    """
    step, end = chunk_bytes + _CRC_BYTES, len(data) - len(tail)
    if end < 0 or end % step or data[end:].tobytes() != tail:
        return None
    found = []
    for start in range(0, end, step):
        checksum = _crc(data[start : start + chunk_bytes])
        if not np.array_equal(checksum, data[start + chunk_bytes : start + step]):
            return None
        found.append(_hex(checksum))
    return found


def _crc(data: np.ndarray) -> np.ndarray:
    """crc32c as 4 little-endian bytes. The C function takes arrays, but no writable memoryview."""
    return np.frombuffer(google_crc32c.value(data).to_bytes(4, "little"), np.uint8)


def _hex(checksum: np.ndarray) -> str:
    return f"{int(checksum.view('<u4')[0]):08x}"


def _put_array(dataset: Dataset, pack: int, name: str, values: np.ndarray) -> dict:
    """The pack's chunk of one of the small arrays, payload and crc32c."""
    payload = np.ascontiguousarray(values).view(np.uint8)
    data = np.concatenate([payload, _crc(payload)])
    return _put_object(dataset, pack, f"{name}/c/{pack}", data, len(payload), b"")


def _put_object(
    dataset: Dataset, pack: int, key: str, data: np.ndarray, chunk_bytes: int, tail: bytes
) -> dict:
    """Creates the object, or adopts what is there; returns what the commit record says of it."""
    step = chunk_bytes + _CRC_BYTES
    ends = range(step, len(data) - len(tail) + 1, step)
    checksums = [_hex(data[end - _CRC_BYTES : end]) for end in ends]
    if not dataset.storage.put_new(key, data.data):
        theirs = np.frombuffer(dataset.storage.get(key), np.uint8)
        whole = chunk_checksums(theirs, chunk_bytes, tail) if len(theirs) == len(data) else None
        if whole is not None:
            checksums = whole
        elif pack_unit(pack) in dataset.committed():
            raise CorruptError(
                f"{dataset.url}/{key} of committed pack {pack} is damaged; delete the pack's commit record "
                f"_commits/{pack_unit(pack)}.json and run the extract stage again"
            )
        else:
            log.warning("replacing a damaged leftover: %s/%s", dataset.url, key)
            dataset.storage.put(key, data.data)
    return {"key": key, "size": len(data), "crc32c": checksums}


# --- reading -----------------------------------------------------------------------------------


class HiddenStates:
    """Reads a store by pack or by sample. Safe to use from threads; needs no zarr.

    Attributes:
        start: int64 [num_samples], first row of each sample.
        length: int32 [num_samples].
        contract: what the states were computed from; readers compare it with what they want.
    """

    def __init__(
        self,
        dataset: Dataset,
        layout: Layout,
        contract: dict,
        start: np.ndarray,
        length: np.ndarray,
    ) -> None:
        self.dataset = dataset
        self.layout = layout
        self.contract = contract
        self.start = start
        self.length = length
        self._records: dict[int, dict] = {}
        self._order = np.argsort(start, kind="stable").astype(np.int32)
        bounds = np.arange(layout.num_packs + 1) * layout.pack_tokens
        self._bounds = np.searchsorted(start[self._order], bounds)

    @classmethod
    def open(cls, dataset: Dataset) -> HiddenStates:
        """Opens a planned store, complete or not; whether a pack exists is found out when it is read."""
        attributes = _read_attributes(dataset)
        start = _read_array(dataset, "start", "<i8")
        length = _read_array(dataset, "length", "<i4")
        return cls(dataset, Layout(**attributes["layout"]), attributes["contract"], start, length)

    @property
    def num_packs(self) -> int:
        return self.layout.num_packs

    @property
    def pack_tokens(self) -> int:
        return self.layout.pack_tokens

    @property
    def num_taps(self) -> int:
        return self.layout.num_taps

    @property
    def hidden_size(self) -> int:
        return self.layout.hidden_size

    def read_pack(self, index: int) -> tuple[Pack, Tensor]:
        """The pack and its states, bfloat16 [T, L, H], every byte checked against the commit record.

        Raises:
            IncompleteError: the pack has no commit record.
            CorruptError: an object is missing or altered; never zeros in its place.
        """
        record = self._record(index)
        objects = [record["input_ids"], record["loss_mask"], *record["shards"]]
        with ThreadPoolExecutor(min(_READERS, len(objects))) as pool:
            ids, mask, *shards = pool.map(lambda item: self._whole_object(index, item), objects)
        hidden_TLH = torch.empty(
            self.pack_tokens, self.num_taps, self.hidden_size, dtype=torch.bfloat16
        )
        raw = hidden_TLH.view(torch.int16).numpy().reshape(-1).view(np.uint8)
        position = 0
        for chunk in (chunk for shard in shards for chunk in shard):
            raw[position : position + len(chunk)] = chunk
            position += len(chunk)
        raw[position:] = 0
        return self._pack(index, ids[0], mask[0]), hidden_TLH

    def read_sample(self, index: int) -> Tensor:
        """The states of one sample, bfloat16 [length, L, H]; fetches only the chunks that hold it."""
        first, length = int(self.start[index]), int(self.length[index])
        pack, row = divmod(first, self.pack_tokens)
        shards = self._record(pack)["shards"]
        layout, parts = self.layout, []
        chunk, last = row // layout.chunk_rows, (row + length - 1) // layout.chunk_rows
        skip = row - chunk * layout.chunk_rows
        while chunk <= last:
            shard, inner = divmod(chunk, layout.chunks_per_shard)
            count = min(last - chunk + 1, layout.chunks_per_shard - inner)
            parts.extend(self._chunks(pack, shards[shard], inner, count))
            chunk += count
        raw = np.concatenate(parts)[skip * layout.row_bytes :][: length * layout.row_bytes]
        values = torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
        return values.reshape(length, self.num_taps, self.hidden_size)

    def _record(self, pack: int) -> dict:
        if pack not in self._records:
            try:
                self._records[pack] = self.dataset.record(pack_unit(pack))
            except FileNotFoundError:
                raise IncompleteError(
                    f"{self.dataset.url}: pack {pack} of {self.num_packs} has no commit record; "
                    "run the extract stage again, it continues where it stopped"
                ) from None
        return self._records[pack]

    def _pack(self, index: int, ids: np.ndarray, mask: np.ndarray) -> Pack:
        samples = self._order[self._bounds[index] : self._bounds[index + 1]]
        return Pack(
            index=index,
            input_ids=ids.view("<u4"),
            loss_mask=mask,
            start=(self.start[samples] - index * self.pack_tokens).astype(np.int32),
            length=self.length[samples],
            samples=samples,
        )

    def _whole_object(self, pack: int, item: dict) -> list[np.ndarray]:
        """The object's chunks, every byte of it checked."""
        tail = b""
        if item["key"].startswith("hidden/"):
            tail = shard_tail(self.layout, len(item["crc32c"]))
        return self._checked(pack, item, 0, item["size"], item["crc32c"], tail)

    def _chunks(self, pack: int, item: dict, first: int, count: int) -> list[np.ndarray]:
        """Chunks first .. first + count of a shard, checked, in one request.

        The layout and the commit record say where they are and what they are, so the index is not read.
        """
        step = self.layout.chunk_bytes + _CRC_BYTES
        wanted = item["crc32c"][first : first + count]
        return self._checked(pack, item, first * step, count * step, wanted, b"")

    def _checked(
        self, pack: int, item: dict, start: int, length: int, wanted: list[str], tail: bytes
    ) -> list[np.ndarray]:
        data = self._range(pack, item, start, length)
        step = (length - len(tail)) // len(wanted)
        if chunk_checksums(data, step - _CRC_BYTES, tail) != wanted:
            raise self._corrupt(pack, item, "its bytes are not those of the commit record")
        return [data[i * step : (i + 1) * step - _CRC_BYTES] for i in range(len(wanted))]

    def _range(self, pack: int, item: dict, start: int, length: int) -> np.ndarray:
        storage, key = self.dataset.storage, item["key"]
        try:
            data = np.frombuffer(storage.get_range(key, start, length), np.uint8)
        except FileNotFoundError:
            raise self._corrupt(pack, item, "the object is missing") from None
        except StorageError:
            if storage.size(key) == item["size"]:
                raise
            data = np.empty(0, np.uint8)
        if len(data) != length:
            raise self._corrupt(pack, item, f"it is shorter than its {item['size']} bytes")
        return data

    def _corrupt(self, pack: int, item: dict, what: str) -> CorruptError:
        return CorruptError(
            f"{self.dataset.url}/{item['key']} of pack {pack} is damaged: {what}; delete "
            f"_commits/{pack_unit(pack)}.json and manifest.json and run the extract stage again"
        )


def _read_array(dataset: Dataset, name: str, dtype: str) -> np.ndarray:
    """An array that is one chunk of raw little-endian values and a crc32c."""
    data = np.frombuffer(dataset.storage.get(f"{name}/c/0"), np.uint8)
    if chunk_checksums(data, len(data) - _CRC_BYTES, b"") is None:
        raise CorruptError(f"{dataset.url}/{name}/c/0 is damaged; its checksum does not fit")
    return data[:-_CRC_BYTES].view(dtype)
