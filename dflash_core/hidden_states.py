"""The hidden-state store: a Zarr v3 group that one writer per pack fills and any Zarr library reads.

    zarr.json                 group; attributes hold the layout and the compatibility contract
    hidden/c/<i>/0/0          bfloat16 [packs * T, L, H]; shard i is `shard_rows` rows, one object
    input_ids/c/<pack>        uint32 [packs * T]
    loss_mask/c/<pack>        uint8 [packs * T]
    start, length             int64, int32 [num_samples]: rows start .. start + length are the sample's
    _commits/<pack>.json      commit records: which objects count, with size and a crc32c for each chunk

and, where they were asked for, one object a pack each:

    scale/c/<pack>/0          float32 [packs * T, L], when `hidden` is float8
    teacher_ids, teacher_logprobs   uint32, float16 [packs * T, K]

zarr-python writes the metadata, once. Objects of packs are encoded here and sent as one PUT each, which
costs a fraction of the time and CPU; the bytes are those of the `sharding_indexed` codec. A pack that
has no commit record does not exist, whatever objects lie there.

Shape letters: T rows of a pack, L taps, H hidden size, K most likely tokens.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import google_crc32c
import numpy as np
import torch
from torch import Tensor

from dflash_core import float8
from dflash_core.config import ExtractConfig
from dflash_core.errors import CorruptError, IncompleteError, InputError, StorageError
from dflash_core.manifest import Dataset, finite, require_same
from dflash_core.object_cache import ObjectCache
from dflash_core.pack_memory import PackMemory
from dflash_core.packing import Pack
from dflash_core.record_index import RecordIndex
from dflash_core.shards import (
    CODECS,
    CRC_BYTES,
    Chunks,
    Damaged,
    decompress,
    encode,
    inspect,
    receive,
    shard_tail,
)
from dflash_core.storage import stream_file

if TYPE_CHECKING:
    from dflash_core.tokenization import Tokens

log = logging.getLogger(__name__)

FORMAT, FORMAT_VERSION = "dflash-hidden-states", 1
# Objects of a pack that move at once; one S3 connection carries 50 to 90 MB/s.
_WRITERS, _READERS = 4, 8
_NOTHING: Mapping[str, Tensor] = MappingProxyType({})


# --- layout ------------------------------------------------------------------------------------


class SideArray(NamedTuple):
    """An array beside `hidden` with one chunk, hence one object, a pack."""

    dtype: str
    columns: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Shapes of a store and the place of every byte in it.

    Attributes:
        num_taps: L, with the tap `last` when there is one.
        last: the last tap is the target's final hidden state, before the norm; no context of a drafter.
        dtype, codec, teacher_top_k: as in `ExtractConfig`.
    """

    num_packs: int
    pack_tokens: int
    num_taps: int
    hidden_size: int
    chunk_rows: int
    shard_rows: int
    # Stores from before these existed do not name them.
    dtype: str = "bfloat16"
    codec: str = "none"
    last: bool = False
    teacher_top_k: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of the values as they are stored."""
        return float8.DTYPE if self.dtype == "float8_e4m3" else torch.bfloat16

    @property
    def row_bytes(self) -> int:
        return self.num_taps * self.hidden_size * self.torch_dtype.itemsize

    @property
    def chunk_bytes(self) -> int:
        """Bytes of an inner chunk before a codec and without its checksum."""
        return self.chunk_rows * self.row_bytes

    @property
    def chunks_per_shard(self) -> int:
        return self.shard_rows // self.chunk_rows

    @property
    def shards_per_pack(self) -> int:
        return self.pack_tokens // self.shard_rows

    @property
    def side_arrays(self) -> dict[str, SideArray]:
        """Names and types of the other arrays with an object a pack."""
        arrays = {"input_ids": SideArray("<u4", ()), "loss_mask": SideArray("|u1", ())}
        if self.torch_dtype == float8.DTYPE:
            arrays["scale"] = SideArray("<f4", (self.num_taps,))
        if self.teacher_top_k:
            arrays["teacher_ids"] = SideArray("<u4", (self.teacher_top_k,))
            arrays["teacher_logprobs"] = SideArray("<f2", (self.teacher_top_k,))
        return arrays

    def shard_key(self, pack: int, shard: int) -> str:
        return f"hidden/c/{pack * self.shards_per_pack + shard}/0/0"

    def side_key(self, name: str, pack: int) -> str:
        return f"{name}/c/{pack}" + "/0" * len(self.side_arrays[name].columns)

    def keys(self, pack: int) -> list[str]:
        """Every object that the pack can have."""
        shards = [self.shard_key(pack, shard) for shard in range(self.shards_per_pack)]
        return [*shards, *(self.side_key(name, pack) for name in self.side_arrays)]

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
    layout = Layout(
        num_packs=num_packs,
        pack_tokens=pack_tokens,
        num_taps=num_taps,
        hidden_size=hidden_size,
        chunk_rows=chunk_rows,
        shard_rows=chunk_rows,
        dtype=config.dtype,
        codec=config.codec,
        last=config.last,
        teacher_top_k=config.teacher_top_k,
    )
    fitting = [
        d
        for d in _divisors(pack_tokens // chunk_rows)
        if d * layout.chunk_bytes <= config.shard_bytes
    ]
    return replace(layout, shard_rows=chunk_rows * max(fitting, default=1))


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
    from zarr.codecs import BloscCodec, Crc32cCodec
    from zarr.storage import MemoryStore

    from dflash_core.zarr_bfloat16 import BFloat16, Float8E4M3

    objects: dict = {}
    store = MemoryStore(objects)
    rows, taps = layout.num_packs * layout.pack_tokens, (layout.num_taps, layout.hidden_size)
    checked: dict[str, Any] = {"compressors": [Crc32cCodec()], "filters": None, "fill_value": 0}
    compressors: list[Any] = [Crc32cCodec()]
    if blosc := CODECS[layout.codec]:
        options: dict[str, Any] = blosc._asdict()
        compressors.insert(0, BloscCodec(typesize=layout.torch_dtype.itemsize, **options))
    zarr.create_array(
        store,
        name="hidden",
        shape=(rows, *taps),
        shards=(layout.shard_rows, *taps),
        chunks=(layout.chunk_rows, *taps),
        dtype=Float8E4M3() if layout.torch_dtype == float8.DTYPE else BFloat16(),
        dimension_names=("row", "tap", "hidden"),
        compressors=compressors,
        filters=None,
        fill_value=0,
    )
    for name, (dtype, columns) in layout.side_arrays.items():
        zarr.create_array(
            store,
            name=name,
            shape=(rows, *columns),
            chunks=(layout.pack_tokens, *columns),
            dtype=np.dtype(dtype).name,
            **checked,
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
    dataset: Dataset,
    layout: Layout,
    pack: Pack,
    hidden_TLH: Tensor,
    absmax: float,
    facts: dict,
    extras: Mapping[str, Tensor] = _NOTHING,
) -> Written:
    """Encodes, uploads and commits one pack. Safe to call from threads, and again after any failure.

    Objects are create-only. Where an earlier or parallel attempt left one, it is verified and adopted, so
    that the record and the bytes agree whoever wins; a damaged leftover of an uncommitted pack is replaced.

    Args:
        hidden_TLH: [T, L, H] on the CPU, zeros past the pack's last sample: bfloat16, or, for a float8 store
            and with `scale` among the extras, float8. A float8 store quantizes bfloat16 here, slowly. The
            memory is sent as it is, without a copy, so leave it alone until this returns.
        absmax: what `check_rows` returned.
        facts: more fields for the record.
        extras: the store's other arrays on the CPU: `scale` float32 [T, L], `teacher_ids` and
            `teacher_logprobs` [T, K].
    """
    shape = (layout.pack_tokens, layout.num_taps, layout.hidden_size)
    assert hidden_TLH.shape == shape, f"{tuple(hidden_TLH.shape)} for a store of {shape}"
    arrays = {name: values.numpy() for name, values in extras.items()}
    arrays |= {"input_ids": pack.input_ids, "loss_mask": pack.loss_mask}
    if layout.torch_dtype == float8.DTYPE and "scale" not in arrays:
        arrays["scale"] = float8.scales(hidden_TLH).numpy()
    sides = {
        name: _put_side_array(dataset, layout, pack.index, name, arrays[name])
        for name in layout.side_arrays
    }
    made_with_TL = scale_TL = None
    if layout.torch_dtype == float8.DTYPE:
        made_with_TL = torch.from_numpy(arrays["scale"])
        scale_TL = _standing_scale(dataset, sides["scale"], made_with_TL)
    num_chunks = layout.chunks_in_shards(pack.num_tokens)

    def write_shard(shard: int) -> tuple[dict, float, float]:
        began = time.perf_counter()
        first = shard * layout.shard_rows
        rows = slice(first, first + num_chunks[shard] * layout.chunk_rows)
        states_TLH = hidden_TLH[rows].contiguous()
        if scale_TL is not None and made_with_TL is not None:
            states_TLH = _in_float8(states_TLH, made_with_TL[rows], scale_TL[rows])
        bits = states_TLH.view(torch.int16 if states_TLH.itemsize == 2 else torch.uint8).numpy()
        encoded = encode(bits.reshape(num_chunks[shard], -1), layout.codec, layout.chunks_per_shard)
        ready = time.perf_counter()
        key = layout.shard_key(pack.index, shard)
        item = _put_object(dataset, pack.index, key, *encoded, layout)
        return item, ready - began, time.perf_counter() - ready

    with ThreadPoolExecutor(min(_WRITERS, len(num_chunks))) as pool:
        written = list(pool.map(write_shard, range(len(num_chunks))))
    record = {
        "shards": [item for item, _, _ in written],
        **sides,
        "num_tokens": pack.num_tokens,
        "num_samples": len(pack.samples),
        "first_row": pack.index * layout.pack_tokens,
        "last_row": pack.index * layout.pack_tokens + pack.num_tokens - 1,
        "absmax": finite(absmax),
        "num_nan": 0,
        **facts,
    }
    return Written(
        dataset.commit(pack_unit(pack.index), record),
        encode_s=sum(seconds for _, seconds, _ in written),
        upload_s=sum(seconds for _, _, seconds in written),
    )


def _put_side_array(
    dataset: Dataset, layout: Layout, pack: int, name: str, values: np.ndarray
) -> dict:
    """The pack's chunk of one of the other arrays."""
    flat = np.ascontiguousarray(values, layout.side_arrays[name].dtype).reshape(-1)
    return _put_object(dataset, pack, layout.side_key(name, pack), *encode([flat], "none"), layout)


def _put_object(
    dataset: Dataset, pack: int, key: str, chunks: Chunks, parts: list, layout: Layout
) -> dict:
    """Creates the object, or adopts what is there; returns what the commit record says of it."""
    storage, size = dataset.storage, sum(len(part) for part in parts)
    sharded = key.startswith("hidden/")
    if not storage.put_new(key, parts):
        theirs, version = storage.get_version(key)
        found = inspect(theirs, layout.chunks_per_shard if sharded else 0)
        fits = found is not None and len(found.sizes) == len(chunks.sizes)
        if fits and (found.sizes == chunks.sizes or (sharded and CODECS[layout.codec])):
            chunks, size = found, len(theirs)
        elif storage.exists(f"_commits/{pack_unit(pack)}.json"):
            raise CorruptError(
                f"{dataset.url}/{key} of committed pack {pack} is damaged; "
                f"`dflash store repair {dataset.path}` turns the pack into work for the extract stage"
            )
        else:
            log.warning("replacing a damaged leftover: %s/%s", dataset.url, key)
            if not storage.replace(key, parts, version):  # another writer did it meanwhile
                return _put_object(dataset, pack, key, chunks, parts, layout)
    item = {"key": key, "size": size, "crc32c": [f"{value:08x}" for value in chunks.checksums]}
    return {**item, "chunks": chunks.sizes} if sharded and CODECS[layout.codec] else item


def _standing_scale(dataset: Dataset, item: dict, ours_TL: Tensor) -> Tensor:
    """The scale that stands in the store: ours, or, when another writer was first, his."""
    if int(item["crc32c"][0], 16) == google_crc32c.value(ours_TL.numpy().tobytes()):
        return ours_TL
    theirs = np.frombuffer(dataset.storage.get(item["key"])[:-CRC_BYTES], "<f4")
    return torch.from_numpy(theirs.copy()).view(ours_TL.shape)


def _in_float8(states_TLH: Tensor, made_with_TL: Tensor, scale_TL: Tensor) -> Tensor:
    """The states as float8 of this scale, whichever type and scale they have."""
    if states_TLH.dtype == float8.DTYPE:
        if torch.equal(made_with_TL, scale_TL):
            return states_TLH
        states_TLH = float8.dequantize(states_TLH, made_with_TL)
    return float8.quantize(states_TLH, scale_TL)


# --- reading -----------------------------------------------------------------------------------


class HiddenStates:
    """Reads a store by pack or by sample. Safe to use from threads; needs no zarr.

    Memory: the packs that are in use, which it keeps for the next ones, and about 1 MB for each object that is being
    fetched; two chunks more each where there is a codec, float8, or a tap that is left out.

    Attributes:
        start: int64 [num_samples], first row of each sample.
        length: int32 [num_samples].
        num_taps: L, the taps that are returned.
    """

    def __init__(
        self,
        dataset: Dataset,
        layout: Layout,
        contract: dict,
        start: np.ndarray,
        length: np.ndarray,
        *,
        last: bool = False,
        top_k: bool = False,
        index: RecordIndex | None = None,
        cache: ObjectCache | None = None,
        memory: PackMemory | None = None,
    ) -> None:
        self.dataset = dataset
        self.layout = layout
        self.contract = contract
        self.start = start
        self.length = length
        self.num_taps = layout.num_taps - (layout.last and not last)
        self._sides = [
            "input_ids",
            "loss_mask",
            *(["teacher_ids", "teacher_logprobs"] if top_k else []),
        ]
        self._index = index
        self._cache = cache
        self._memory = memory or PackMemory()
        self._records: dict[int, dict] = {}
        self._order = np.argsort(start, kind="stable").astype(np.int32)
        bounds = np.arange(layout.num_packs + 1) * layout.pack_tokens
        self._bounds = np.searchsorted(start[self._order], bounds)

    @classmethod
    def open(
        cls,
        dataset: Dataset,
        *,
        last: bool = False,
        top_k: bool = False,
        cache: ObjectCache | None = None,
        memory: PackMemory | None = None,
        use_index: bool = True,
    ) -> HiddenStates:
        """Opens a planned store, complete or not; whether a pack exists is found out when it is read.

        Args:
            last: return the tap `last`, too, behind the others.
            top_k: packs hold the target's most likely tokens, too.
            cache: keeps the objects of whole packs on a local disk.
            memory: shared with other readers of packs of the same size.
            use_index: of a sealed store take the records from its index, not one by one.

        Raises:
            InputError: the store has no tap `last`, or no most likely tokens.
        """
        attributes = _read_attributes(dataset)
        layout = Layout(**attributes["layout"])
        if last and not layout.last:
            raise InputError(
                f"{dataset.url} holds no final hidden states; extract with extract.last=true"
            )
        if top_k and not layout.teacher_top_k:
            raise InputError(
                f"{dataset.url} holds no most likely tokens of the target: its teacher_top_k is 0, expected 1 or "
                "more; extract with extract.teacher_top_k=64, for example"
            )
        start = _read_array(dataset, "start", "<i8")
        length = _read_array(dataset, "length", "<i4")
        return cls(
            dataset,
            layout,
            attributes["contract"],
            start,
            length,
            last=last,
            top_k=top_k,
            index=RecordIndex.open(dataset, layout) if use_index else None,
            cache=cache,
            memory=memory,
        )

    @property
    def num_packs(self) -> int:
        return self.layout.num_packs

    @property
    def pack_tokens(self) -> int:
        return self.layout.pack_tokens

    @property
    def pack_bytes(self) -> int:
        """Memory of the hidden states that `read_pack` returns, in bytes."""
        return self.pack_tokens * self.num_taps * self.hidden_size * torch.bfloat16.itemsize

    @property
    def hidden_size(self) -> int:
        return self.layout.hidden_size

    def require(self, advice: str, **expected: Any) -> None:
        """Compares fields of the contract, such as `target_revision`, with what a reader was made for.

        Raises:
            MismatchError: lists every field that differs, then the advice.
        """
        found = {name: self.contract.get(name) for name in expected}
        require_same(f"store {self.dataset.path}", expected, found, advice)

    def read_pack(self, index: int) -> tuple[Pack, Tensor]:
        """The pack and its states, bfloat16 [T, L, H], every byte checked against the commit record.

        One request an object, `_READERS` of them at once.

        Raises:
            IncompleteError: the pack has no commit record.
            CorruptError: an object is missing or altered; never zeros in its place.
        """
        layout = self.layout
        counts = [len(item["crc32c"]) for item in self._record(index)["shards"]]
        shape = (layout.pack_tokens, self.num_taps, layout.hidden_size)
        hidden_TLH = self._memory.take(self.pack_bytes).view(torch.bfloat16).view(shape)
        with ThreadPoolExecutor(min(_READERS, len(counts) + len(self._sides))) as pool:
            sides = {name: pool.submit(self._side, index, name) for name in self._sides}
            scale = self._scale(index, pool)
            rows = hidden_TLH.split(layout.shard_rows)
            shards = [
                pool.submit(self._read_chunks, index, shard, 0, count, rows[shard], scale)
                for shard, count in enumerate(counts)
            ]
            for future in shards:
                future.result()
            arrays = {name: future.result() for name, future in sides.items()}
        hidden_TLH[sum(counts) * layout.chunk_rows :] = 0
        return self._pack(index, arrays), hidden_TLH

    def read_sample(self, index: int, first: int = 0, stop: int | None = None) -> Tensor:
        """Tokens first .. stop of one sample, bfloat16 [stop - first, L, H]; all of them by default.

        Fetches only the chunks that hold them, with one request for each shard that they lie in: one or two for
        up to `shard_rows` tokens. A float8 store needs one more for the scales.

        Raises:
            InputError: there is no such sample, or no such tokens in it.
            IncompleteError, CorruptError: as `read_pack`.
        """
        if not 0 <= index < len(self.start):
            raise InputError(
                f"sample {index} is not in {self.dataset.path}, which has {len(self.start)}"
            )
        length = int(self.length[index])
        stop = length if stop is None else stop
        if not 0 <= first < stop <= length:
            raise InputError(
                f"tokens {first} to {stop} are not in sample {index}, which has {length}"
            )
        layout = self.layout
        pack, row = divmod(int(self.start[index]), self.pack_tokens)
        begin, end = (row + first) // layout.chunk_rows, -(-(row + stop) // layout.chunk_rows)
        shape = ((end - begin) * layout.chunk_rows, self.num_taps, layout.hidden_size)
        states_TLH = torch.empty(shape, dtype=torch.bfloat16)
        with ThreadPoolExecutor(_READERS) as pool:
            scale, futures, chunk = self._scale(pack, pool), [], begin
            while chunk < end:
                shard, inner = divmod(chunk, layout.chunks_per_shard)
                count = min(end - chunk, layout.chunks_per_shard - inner)
                rows = states_TLH[(chunk - begin) * layout.chunk_rows :]
                futures.append(
                    pool.submit(self._read_chunks, pack, shard, inner, count, rows, scale)
                )
                chunk += count
            for future in futures:
                future.result()
        skip = row + first - begin * layout.chunk_rows
        return states_TLH[skip : skip + stop - first]

    def read_side(self, index: int, name: str) -> np.ndarray:
        """A pack's rows of another array of the store, such as `teacher_ids` [T, K].

        Raises:
            InputError: the store has no such array.
        """
        if name not in self.layout.side_arrays:
            raise InputError(
                f"{self.dataset.url} has no array {name!r}, only {list(self.layout.side_arrays)}"
            )
        return self._side(index, name)

    def _record(self, pack: int) -> dict:
        if self._index is not None:
            return self._index.record(pack)
        if pack not in self._records:
            try:
                self._records[pack] = self.dataset.record(pack_unit(pack))
            except FileNotFoundError:
                raise IncompleteError(
                    f"{self.dataset.url}: pack {pack} of {self.num_packs} has no commit record; "
                    "run the extract stage again, it continues where it stopped"
                ) from None
        return self._records[pack]

    def _pack(self, index: int, arrays: dict[str, np.ndarray]) -> Pack:
        samples = self._order[self._bounds[index] : self._bounds[index + 1]]
        return Pack(
            index=index,
            start=(self.start[samples] - index * self.pack_tokens).astype(np.int32),
            length=self.length[samples],
            samples=samples,
            **arrays,
        )

    def _side(self, pack: int, name: str) -> np.ndarray:
        side, item = self.layout.side_arrays[name], self._record(pack)[name]
        values = np.empty((self.pack_tokens, *side.columns), side.dtype)
        chunks = Chunks([values.nbytes], [int(item["crc32c"][0], 16)])
        flat = values.reshape(-1).view(np.uint8)
        self._receive(pack, item, 0, item["size"], chunks, b"", lambda: iter([flat]))
        return values

    def _scale(self, pack: int, pool: ThreadPoolExecutor) -> Future[np.ndarray] | None:
        if "scale" not in self.layout.side_arrays:
            return None
        return pool.submit(self._side, pack, "scale")

    def _read_chunks(
        self, pack: int, shard: int, first: int, count: int, into_TLH: Tensor, scale: Future | None
    ) -> None:
        """Chunks first .. first + count of a shard, in one request, into the leading rows of `into_TLH`.

        The layout and the commit record say where they are and what they are, so the index is read only where the
        whole object is.
        """
        layout, item = self.layout, self._record(pack)["shards"][shard]
        sizes = item.get("chunks") or [layout.chunk_bytes] * len(item["crc32c"])
        begin = sum(sizes[:first]) + CRC_BYTES * first
        chunks = Chunks(
            sizes[first : first + count],
            [int(text, 16) for text in item["crc32c"][first : first + count]],
        )
        length, tail = sum(chunks.sizes) + CRC_BYTES * count, b""
        if count == len(sizes):
            tail = shard_tail(sizes, layout.chunks_per_shard)
            length = item["size"]
        scale_TL = None
        if scale is not None:
            row = shard * layout.shard_rows + first * layout.chunk_rows
            scale_TL = torch.from_numpy(scale.result())[row:]
        buffers = partial(self._buffers, chunks.sizes, into_TLH, scale_TL)
        self._receive(pack, item, begin, length, chunks, tail, buffers)

    def _buffers(
        self, sizes: list[int], into_TLH: Tensor, scale_TL: Tensor | None
    ) -> Iterator[np.ndarray]:
        """For each chunk a buffer to be filled: the rows themselves where the bytes are theirs already."""
        layout = self.layout
        plain = CODECS[layout.codec] is None
        shape = (layout.chunk_rows, layout.num_taps, layout.hidden_size)
        for chunk, size in enumerate(sizes):
            rows = slice(chunk * layout.chunk_rows, (chunk + 1) * layout.chunk_rows)
            out_TLH = into_TLH[rows]
            if plain and scale_TL is None and self.num_taps == layout.num_taps:
                yield out_TLH.view(torch.int16).numpy().reshape(-1).view(np.uint8)
                continue
            stored = np.empty(size, np.uint8)
            yield stored
            raw = stored if plain else np.empty(layout.chunk_bytes, np.uint8)
            if not plain:
                decompress(stored, raw)
            values_TLH = torch.from_numpy(raw).view(layout.torch_dtype).view(shape)
            if scale_TL is not None:
                values_TLH = float8.dequantize(values_TLH, scale_TL[rows])
            out_TLH.copy_(values_TLH[:, : self.num_taps])

    def _receive(
        self,
        pack: int,
        item: dict,
        start: int,
        length: int,
        chunks: Chunks,
        tail: bytes,
        buffers: Callable[[], Iterator[np.ndarray]],
    ) -> None:
        """Bytes start .. start + length of an object into the buffers, from the cache or the store."""
        storage, key = self.dataset.storage, item["key"]
        try:
            if self._cache is None or length != item["size"]:
                receive(storage.stream(key, start, length), chunks, tail, buffers())
            elif not self._receive_cached(self._cache, item, chunks, tail, buffers):
                with self._cache.keeping(self.dataset.url, item) as keep:
                    receive(keep(storage.stream(key, start, length)), chunks, tail, buffers())
        except FileNotFoundError:
            raise self._corrupt(pack, item, "the object is missing") from None
        except Damaged as error:
            raise self._corrupt(pack, item, str(error)) from None
        except StorageError:
            found = storage.size(key)
            if found == item["size"]:
                raise
            text = f"it has {found} bytes, expected {item['size']}"
            raise self._corrupt(pack, item, text) from None

    def _receive_cached(
        self,
        cache: ObjectCache,
        item: dict,
        chunks: Chunks,
        tail: bytes,
        buffers: Callable[[], Iterator[np.ndarray]],
    ) -> bool:
        """False when the cache has no such object, or a damaged one, which goes."""
        path = cache.find(self.dataset.url, item)
        if path is None:
            return False
        try:
            receive(stream_file(path, 0, item["size"]), chunks, tail, buffers())
        except (OSError, Damaged) as error:
            log.warning("%s in the cache is damaged: %s", path, error)
            path.unlink(missing_ok=True)
            return False
        return True

    def _corrupt(self, pack: int, item: dict, what: str) -> CorruptError:
        return CorruptError(
            f"{self.dataset.url}/{item['key']} of pack {pack} is damaged: {what}; "
            f"`dflash store repair {self.dataset.path}` turns the pack into work for the extract stage"
        )


def _read_array(dataset: Dataset, name: str, dtype: str) -> np.ndarray:
    """An array that is one chunk of raw little-endian values and a crc32c."""
    data = dataset.storage.get(f"{name}/c/0")
    if inspect(data, 0) is None:
        raise CorruptError(f"{dataset.url}/{name}/c/0 is damaged; its checksum does not fit")
    return np.frombuffer(data[:-CRC_BYTES], dtype)
