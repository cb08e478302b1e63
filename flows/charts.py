"""Curves in plain text: the UI shows no image that it would have to fetch, and a log shows these too."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH, _HEIGHT = 64, 6


def chart(title: str, values: Sequence[float]) -> str:
    """Bars from 0 to the greatest of the values, each the mean of a run of neighbours.

    Args:
        values: not negative, at least one.
    """
    parts = np.array_split(np.asarray(values, float), min(_WIDTH, len(values)))
    means = [float(part.mean()) for part in parts]
    highest = max(means) or 1.0
    eighths = [round(mean / highest * _HEIGHT * 8) for mean in means]
    lines = [f"{title}: first {means[0]:.4g}, last {means[-1]:.4g}"]
    for row in reversed(range(_HEIGHT)):
        label = f"{highest:.3g}" if row == _HEIGHT - 1 else ""
        bars = "".join(_BARS[min(8, max(0, eighth - 8 * row))] for eighth in eighths)
        lines.append(f"{label:>9} │{bars}")
    return "\n".join([*lines, f"{0:>9} └{'─' * len(means)}"])


def fenced(*charts: str) -> str:
    """Charts as Markdown that keeps their columns."""
    return "```\n" + "\n\n".join(charts) + "\n```"
