"""Runs of words as 64-bit hashes, for many texts at once: what near-duplicates and contamination share.

A word is a run of letters, digits and underscores, in lower case; a Chinese or Japanese character is a word
by itself. Hashes are the same on every machine. Shape letters: C bytes (UTF-8) of all texts, W words of
all texts, G runs of all texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

BYTES_AT_ONCE = 2**20
"""Bytes of text that `batches` puts together, which bounds its memory."""

_BASE = 0x9E3779B97F4A7C15  # odd, so it has an inverse modulo 2^64
_INVERSE = pow(_BASE, -1, 2**64)


@dataclass(frozen=True)
class Words:
    """Texts as word hashes: the words of text i are `hashes_W[offsets[i] : offsets[i + 1]]`."""

    hashes_W: np.ndarray
    offsets: np.ndarray

    def grams(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Hashes of all runs of `length` words, and where those of each text begin.

        A text of fewer words is one run; one without words has none. uint64 [G], int64 [texts + 1].
        """
        counts, num_words = np.diff(self.offsets), len(self.hashes_W)
        padded = np.concatenate([self.hashes_W, np.zeros(length, np.uint64)])
        starts_W = np.arange(num_words)
        room_W = np.repeat(self.offsets[1:], counts) - starts_W  # words up to the text's end
        rolled_W = np.zeros(num_words, np.uint64)
        for place in range(length):
            word_W = np.where(room_W > place, padded[place : place + num_words], np.uint64(0))
            rolled_W = rolled_W * np.uint64(_BASE) + word_W
        is_start_W = (room_W >= length) | (starts_W == np.repeat(self.offsets[:-1], counts))
        ends = np.concatenate([[0], np.cumsum(is_start_W)])
        return rolled_W[is_start_W], ends[self.offsets]


def batches(texts: list[str]) -> Iterator[tuple[int, Words]]:
    """Consecutive texts as (index of the first, words), a bounded number of bytes together."""
    first, size = 0, 0
    encoded: list[bytes] = []
    for index, text in enumerate(texts):
        encoded.append(text.lower().encode())
        size += len(encoded[-1])
        if size >= BYTES_AT_ONCE or index == len(texts) - 1:
            yield first, words_of(encoded)
            first, size, encoded = index + 1, 0, []


def words_of(encoded: list[bytes]) -> Words:
    """Words of lower-case UTF-8 texts."""
    bytes_C = np.frombuffer(b"\n".join([*encoded, b""]), np.uint8)
    is_word_C, alone_C = _classes(bytes_C)
    goes_on_C = np.zeros(len(bytes_C), bool)  # belongs to the same word as the byte before
    goes_on_C[1:] = is_word_C[1:] & is_word_C[:-1] & ~alone_C[1:]
    goes_on_C[1:] &= ~np.concatenate([np.zeros(2, bool), alone_C[:-3]])[: len(bytes_C) - 1]
    starts_W = np.flatnonzero(is_word_C & ~goes_on_C)
    ends_W = np.flatnonzero(is_word_C & ~np.append(goes_on_C[1:], False)) + 1
    lengths = np.array([len(text) + 1 for text in encoded])
    offsets = np.searchsorted(starts_W, np.concatenate([[0], np.cumsum(lengths)]))
    return Words(_hashes(bytes_C, starts_W, ends_W), offsets)


def _classes(bytes_C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which bytes belong to words, and which begin a character that is a word by itself."""
    is_word_C = _IS_WORD[bytes_C]
    following = np.append(bytes_C[1:], 0)
    # U+2000 to 2FFF and U+3000 to 303F are punctuation and symbols, so are U+0080 to 00BF.
    three_C = (bytes_C == 0xE2) | ((bytes_C == 0xE3) & (following == 0x80))
    two_C = bytes_C == 0xC2
    for lead_C, width in ((three_C, 3), (two_C, 2)):
        for place in range(width):
            is_word_C[np.flatnonzero(lead_C) + place] = False
    alone_C = (bytes_C >= 0xE3) & (bytes_C <= 0xE9) & is_word_C
    return is_word_C, alone_C


def _hashes(bytes_C: np.ndarray, starts_W: np.ndarray, ends_W: np.ndarray) -> np.ndarray:
    """Sum of byte * base^place of each word, by differences of running sums, modulo 2^64."""
    powers_C = np.full(len(bytes_C), _BASE, np.uint64)
    powers_C[:1] = 1
    np.cumprod(powers_C, out=powers_C)
    running = np.zeros(len(bytes_C) + 1, np.uint64)
    np.cumsum(bytes_C * powers_C, out=running[1:])
    inverses_C = np.full(len(bytes_C), _INVERSE, np.uint64)
    inverses_C[:1] = 1
    np.cumprod(inverses_C, out=inverses_C)
    hashes_W = (running[ends_W] - running[starts_W]) * inverses_C[starts_W]
    return hashes_W ^ (hashes_W >> np.uint64(29))  # the low bits of such a sum depend on few bytes


_IS_WORD = np.zeros(256, bool)
_IS_WORD[list(b"abcdefghijklmnopqrstuvwxyz0123456789_")] = True
_IS_WORD[0x80:] = True
