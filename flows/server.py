"""Calls of the server's API that outlive a restart of the server.

The work itself does not need the server: what a run computes and commits goes on while it is away.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
from prefect import get_run_logger
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError

PATIENCE_S = 600.0  # as long as `dflash_core.storage` waits for a bucket
PAUSE_S = 3.0


def is_away(error: Exception) -> bool:
    """True when the server did not answer, or was not ready to."""
    if isinstance(error, ConcurrencySlotAcquisitionError):
        return isinstance(error.__cause__, Exception) and is_away(error.__cause__)
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, httpx.TransportError)


def patiently(call: Callable, *args: Any, **kwargs: Any) -> Any:
    """`call(...)`, tried until the server answers or has been away for `PATIENCE_S`.

    A call may last for hours, as one that waits for a GPU, and find the server away then.
    """
    away_since: float | None = None
    while True:
        asked = time.monotonic()
        try:
            return call(*args, **kwargs)
        except (httpx.HTTPError, ConcurrencySlotAcquisitionError) as error:
            now = time.monotonic()
            if away_since is None or now - asked > PATIENCE_S:
                away_since = now
            if not is_away(error) or now - away_since > PATIENCE_S:
                raise
            get_run_logger().warning("the Prefect server is away: %s", error)
        time.sleep(PAUSE_S)


def once(call: Callable, *args: Any, **kwargs: Any) -> None:
    """`call(...)` unless the server is away: for what the next update will show anyway."""
    try:
        call(*args, **kwargs)
    except httpx.HTTPError as error:
        if not is_away(error):
            raise
