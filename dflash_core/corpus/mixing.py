"""How many rows of each source a weighted corpus takes, and which.

A draw is by content hash: the same rows whatever else the corpus holds and however many workers there
are, and a smaller draw is part of a larger one.
"""

from __future__ import annotations

import numpy as np

from dflash_core.manifest import sha256

_MASK = 2**64 - 1


def draw_order(heads: np.ndarray, seed: int) -> np.ndarray:
    """Rows with the lowest values are drawn first.

    Args:
        heads: first 64 bits of the content hashes, uint64.
        seed: 0 draws by the hashes themselves.
    """
    return heads * np.uint64(_odd(seed))


def draw_value(head: int, seed: int) -> int:
    """`draw_order` of one row."""
    return head * _odd(seed) & _MASK


def _odd(seed: int) -> int:
    # Multiplying by an odd number permutes the hashes.
    return int(sha256(f"draw {seed}")[:16], 16) | 1 if seed else 1


def rows_to_take(
    available: list[int], weights: list[float], temperature: float, num_rows: int
) -> list[int]:
    """Rows of each source in the mix; none is asked for more than it has.

    Shares are weights, or rows where no weights are given, raised to 1 / temperature. With `num_rows`, a
    source that has too few gives all of its rows and the others fill up in proportion; without, the mix
    is as large as the exact shares allow.

    Args:
        available: rows of each source.
        weights: one for each source; all zero for shares by rows.
    """
    base = weights if any(weights) else [float(rows) for rows in available]
    shares = {
        index: value ** (1 / temperature)
        for index, value in enumerate(base)
        if value and available[index]
    }
    if not shares:
        return [0] * len(available)
    if not num_rows:
        total = sum(shares.values())
        num_rows = int(min(available[i] * total / share for i, share in shares.items()) + 1e-6)
    taken = [0] * len(available)
    left = num_rows
    while shares and left:
        total = sum(shares.values())
        wanted = {index: left * share / total for index, share in shares.items()}
        # A float may fall a hair short of the whole number that it stands for.
        full = [index for index in shares if wanted[index] * (1 + 1e-9) >= available[index]]
        if not full:
            for index, count in _whole(wanted, left).items():
                taken[index] = min(count, available[index])
            break
        for index in full:
            taken[index] = available[index]
            left -= available[index]
            del shares[index]
        left = max(left, 0)
    return taken


def _whole(wanted: dict[int, float], total: int) -> dict[int, int]:
    """Whole numbers that add up to `total`, by largest remainder."""
    counts = {index: int(value) for index, value in wanted.items()}
    by_remainder = sorted(wanted, key=lambda index: (counts[index] - wanted[index], index))
    for index in by_remainder[: total - sum(counts.values())]:
        counts[index] += 1
    return counts
