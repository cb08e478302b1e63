"""How a stage says where it is; the callers draw it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, dict[str, float]], None]
"""Called with units done, units in all, and numbers such as {"tokens_per_s": 310.0}."""


def silent(done: int, total: int, numbers: dict[str, float]) -> None:
    """The progress of callers that do not look."""
