"""One thread for all matrix work of a process.

libgomp keeps a team of threads for every thread that ever ran a parallel operation. Once all teams together
have more threads than the machine has cores, threads that wait for each other sleep instead of spinning, and
small operations take four times as long (benchmarks/compute_thread.py). Tasks of a flow run in threads that
come and go; they hand their matrix work to this one.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_THREAD = ThreadPoolExecutor(1, thread_name_prefix="compute")


def on_compute_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls `function` there, in the caller's context; returns or raises what it does. Not to be nested."""
    call: Callable[[], R] = partial(contextvars.copy_context().run, function, *args, **kwargs)
    return _THREAD.submit(call).result()
