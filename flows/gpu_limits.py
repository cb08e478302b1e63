"""One global concurrency limit for each GPU, so that two runs on a machine do not share one."""

from __future__ import annotations

import re
import socket
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager

from flows.server import patiently


def limit_name(host: str, index: int) -> str:
    """The limit of a GPU; `dflash deploy --profile node` makes them."""
    return f"dflash-gpu-{re.sub(r'[^A-Za-z0-9-]', '-', host)}-{index}"


@contextmanager
def holding(devices: Iterable[str]) -> Generator[None]:
    """Waits for the GPUs among `devices` (`cuda:0`, ...) and keeps them until the block is left.

    A machine whose limits were never made waits for nothing, and a lease that cannot be renewed, as when the
    server is away, stops nothing.
    """
    indices = [device.partition(":")[2] for device in devices if device.startswith("cuda")]
    with ExitStack() as held:
        if indices:
            from prefect.concurrency.sync import concurrency

            names = [limit_name(socket.gethostname(), int(index or 0)) for index in indices]
            patiently(
                lambda: held.enter_context(concurrency(names, lease_duration=120, strict=False))
            )
        yield
