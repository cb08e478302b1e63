"""The bytes of one object of the store: inner chunks that end in a crc32c each, and the index of a Zarr shard.

Nothing is joined: an object is written as a list of buffers, the chunks being views of the caller's memory, and
read by copying its bytes to where they belong while they arrive. What is left is the checksum, 4 to 8 GB/s on a core, and
the codec when there is one.

A chunk's payload is raw little-endian values, or a Blosc frame of them, which is what the Zarr codecs `bytes`,
`blosc` and `crc32c` make.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import google_crc32c
import numpy as np

CRC_BYTES = 4
_MISSING = 2**64 - 1  # offset and size of a chunk that is not there, in a Zarr shard index


class Blosc(NamedTuple):
    """Parameters of the codec `blosc`, under the names that Zarr gives them."""

    cname: str
    clevel: int
    shuffle: str
    blocksize: int


# Blosc's automatic block is small and loses most of the gain: on real hidden states zstd saves 28 % with
# blocks of 1 MiB and 19 % with its own choice.
CODECS: dict[str, Blosc | None] = {
    "none": None,
    "lz4": Blosc("lz4", 5, "bitshuffle", 2**18),
    "zstd": Blosc("zstd", 1, "shuffle", 2**20),
}
_SHUFFLES = {"noshuffle": 0, "shuffle": 1, "bitshuffle": 2}


class Chunks(NamedTuple):
    """The chunks of one object, in their order: stored bytes without the checksum, and the checksum."""

    sizes: list[int]
    checksums: list[int]


class Damaged(Exception):
    """Bytes that are not those of a whole object; the text says in which way."""


def encode(
    payloads: Iterable[np.ndarray], codec: str, slots: int = 0
) -> tuple[Chunks, list[memoryview | bytes]]:
    """One object as buffers to be sent one behind the other, none of them copied when the codec is `none`.

    Args:
        payloads: values of each chunk, contiguous; the width of their type is what Blosc shuffles by.
        slots: chunks that the shard has room for; 0 for an object that is one chunk and no shard.
    """
    chunks, parts = Chunks([], []), []
    for payload in payloads:
        data = memoryview(compress(payload, codec)).cast("B")
        checksum = google_crc32c.value(np.frombuffer(data, np.uint8))
        parts += [data, checksum.to_bytes(CRC_BYTES, "little")]
        chunks.sizes.append(data.nbytes)
        chunks.checksums.append(checksum)
    return chunks, [*parts, shard_tail(chunks.sizes, slots)] if slots else parts


def shard_tail(sizes: Sequence[int], slots: int) -> bytes:
    """The index at a shard's end: offset and size of each chunk, little-endian uint64, and a crc32c."""
    index = np.full((slots, 2), _MISSING, "<u8")
    stored = np.asarray(sizes, "<u8") + np.uint64(CRC_BYTES)
    index[: len(sizes), 0] = np.cumsum(stored) - stored
    index[: len(sizes), 1] = stored
    raw = index.tobytes()
    return raw + google_crc32c.value(raw).to_bytes(CRC_BYTES, "little")


def receive(
    pieces: Iterator[memoryview],
    chunks: Chunks,
    tail: bytes,
    buffers: Iterator[np.ndarray],
) -> None:
    """Copies payloads into buffers while their bytes arrive, and checks every byte.

    Args:
        pieces: the object's bytes, cut anywhere.
        chunks: what they must be.
        tail: what must follow the last chunk.
        buffers: gives for each chunk a uint8 array of its size. It is asked for the next one, and at the end
            once more, when the one before is filled and found right.

    Raises:
        Damaged: too few bytes, too many, or others.
    """
    rest = memoryview(b"")

    def take(into: np.ndarray) -> int:
        """Fills the array from the stream; returns its crc32c."""
        nonlocal rest
        filled = checksum = 0
        while filled < len(into):
            if not rest:
                rest = next(pieces, memoryview(b""))
                if not rest:
                    raise Damaged("it is too short")
            count = min(len(rest), len(into) - filled)
            piece = np.frombuffer(rest[:count], np.uint8)
            into[filled : filled + count] = piece
            checksum = google_crc32c.extend(checksum, piece)
            filled, rest = filled + count, rest[count:]
        return checksum

    stored = np.empty(CRC_BYTES, np.uint8)
    for wanted in chunks.checksums:
        found = take(next(buffers))
        take(stored)
        if not found == wanted == int(stored.view("<u4")[0]):
            raise Damaged("its bytes are not those of the commit record")
    last = np.empty(len(tail), np.uint8)
    take(last)
    if last.tobytes() != tail or rest or next(pieces, None):
        raise Damaged("its index is not that of the commit record")
    next(buffers, None)


def inspect(data: bytes, slots: int) -> Chunks | None:
    """The chunks of an object that lies there without a record, or None unless it is whole.

    Args:
        slots: as in `encode`.
    """
    body = memoryview(data)
    if slots:
        tail = 16 * slots + CRC_BYTES
        if len(body) < tail:
            return None
        body, index = body[:-tail], body[-tail:]
        stored = np.frombuffer(index[:-CRC_BYTES], "<u8")[1::2]
        stored = stored[: np.count_nonzero(stored != _MISSING)]
        if np.any((stored < CRC_BYTES) | (stored > len(body))):
            return None
        sizes = [int(size) - CRC_BYTES for size in stored]
        if shard_tail(sizes, slots) != index:
            return None
    else:
        sizes = [max(len(body) - CRC_BYTES, 0)]
    if len(body) != sum(sizes) + CRC_BYTES * len(sizes):
        return None
    checksums, start = [], 0
    for size in sizes:
        end = start + size
        checksum = google_crc32c.value(np.frombuffer(body[start:end], np.uint8))
        if checksum.to_bytes(CRC_BYTES, "little") != body[end : end + CRC_BYTES]:
            return None
        checksums.append(checksum)
        start = end + CRC_BYTES
    return Chunks(sizes, checksums)


def compress(payload: np.ndarray, codec: str):
    """The payload itself, or a Blosc frame of it."""
    parameters = CODECS[codec]
    if parameters is None:
        return payload
    from numcodecs import blosc

    name, level, shuffle, block = parameters
    return blosc.compress(
        payload, name.encode(), level, _SHUFFLES[shuffle], block, payload.itemsize
    )


def decompress(data: np.ndarray, into: np.ndarray) -> None:
    """Unpacks a Blosc frame into an array of exactly its content's size. Raises Damaged when it has another."""
    from numcodecs import blosc

    # A frame begins with 16 bytes that name the size of its content at byte 4.
    if len(data) < 16 or int(data[4:8].view("<u4")[0]) != len(into):
        raise Damaged("a chunk holds another number of values")
    blosc.decompress(data, into)
