"""Near-duplicates by MinHash signatures and locality-sensitive hashing, over arrays.

Signatures come from rensa and are stored with the rows, so they are computed once, part by part and side by
side. Rows are compared afterwards in the corpus' order: a row goes when an earlier row that stays is
similar to it. Shape letters: N rows, P slots of a signature, B bands of slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dflash_core.corpus.grams import Words
from dflash_core.errors import InputError

SLOTS = 128
SHINGLE_WORDS = 5
_SEED = 42
_RECALL = 0.9  # share of pairs right at the threshold that are to become candidates
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


def signatures(words: Words) -> np.ndarray:
    """MinHash signatures of texts by their runs of five words: uint32 [N, P], zeros for texts without words.

    Raises:
        InputError: rensa is not installed.
    """
    try:
        import rensa
    except ImportError as error:
        raise InputError(
            "near_duplicates needs the package rensa; install it with: uv pip install -e '.[curate]'"
        ) from error
    grams_G, offsets = words.grams(SHINGLE_WORDS)
    minhash: Any = rensa.RMinHash  # ty: ignore[missing-attribute]
    matrix = minhash.digest_matrix_from_flat_token_hashes(
        grams_G, offsets.astype(np.uint64), SLOTS, _SEED
    )
    signatures_NP = np.array(matrix.to_rows(), np.uint32).reshape(-1, SLOTS)
    signatures_NP[np.diff(offsets) == 0] = 0
    return signatures_NP


def first_of_equal(keys_N2: np.ndarray) -> np.ndarray:
    """For each row the index of the first row with the same key, its own where it is the first.

    Args:
        keys_N2: two numbers of each row.
    """
    order = np.lexsort((keys_N2[:, 1], keys_N2[:, 0]))  # stable: equal keys stay in order
    in_order = keys_N2[order]
    starts = np.ones(len(order), bool)
    starts[1:] = (in_order[1:] != in_order[:-1]).any(1)
    first = np.empty(len(order), np.int64)
    first[order] = order[starts][np.cumsum(starts) - 1]
    return first


def near_duplicates(signatures_NP: np.ndarray, threshold: float) -> np.ndarray:
    """For each row the index of an earlier row it is a duplicate of, or -1 where it stays: int64 [N].

    Two rows are duplicates when at least `threshold` of their slots agree, an estimate of the Jaccard
    similarity with a standard deviation of at most 0.044. Pairs near the threshold may be missed, since
    only rows that agree in a whole band of slots are compared.
    """
    bands_NB = np.stack([_band(signatures_NP[:, slots]) for slots in _bands(threshold)], axis=1)
    compared = _shared(bands_NB) & signatures_NP.any(1)
    duplicate_of = np.full(len(signatures_NP), -1, np.int64)
    kept: list[dict[int, list[int]]] = [{} for _ in range(bands_NB.shape[1])]
    for row in np.flatnonzero(compared).tolist():
        keys = bands_NB[row].tolist()
        candidates = sorted(
            {index for seen, key in zip(kept, keys, strict=True) for index in seen.get(key, ())}
        )
        if candidates:
            agreeing = (signatures_NP[candidates] == signatures_NP[row]).mean(1)
            best = int(agreeing.argmax())
            if agreeing[best] >= threshold:
                duplicate_of[row] = candidates[best]
                continue
        for seen, key in zip(kept, keys, strict=True):
            seen.setdefault(key, []).append(row)
    return duplicate_of


def _shared(bands_NB: np.ndarray) -> np.ndarray:
    """Rows that have some band in common with another row: bool [N]."""
    shared = np.zeros(len(bands_NB), bool)
    for band_N in bands_NB.T:
        order = np.argsort(band_N)
        in_order = band_N[order]
        equal = in_order[1:] == in_order[:-1]
        shared[order[1:][equal]] = shared[order[:-1][equal]] = True
    return shared


def _bands(threshold: float) -> list[slice]:
    """The widest bands with which a pair right at the threshold is found with `_RECALL`."""
    for width in (16, 8, 4, 2):
        count = SLOTS // width
        if 1 - (1 - threshold**width) ** count >= _RECALL:
            break
    return [slice(start, start + width) for start in range(0, SLOTS, width)]


def _band(slots: np.ndarray) -> np.ndarray:
    """One hash of each row's slots: uint64 [N]."""
    hashes_N = np.zeros(len(slots), np.uint64)
    for slot_N in slots.T:
        hashes_N = hashes_N * _MULTIPLIER + slot_N
    return hashes_N
