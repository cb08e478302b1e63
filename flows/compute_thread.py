"""Matrix work of a flow's tasks runs on the thread that waits for them, which is the process's first.

libgomp counts the first thread of a process and all threads of its teams. On two cores a team that any other
thread leads is one too many, and threads that wait for each other then sleep at once instead of spinning: a
training step of the demo takes 0.42 s instead of 0.27 (benchmarks/compute_thread.py). Tasks run in threads
that come and go, so they hand their matrix work over.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class _Call(NamedTuple):
    function: Callable[[], Any]
    result: Future


_lock = threading.Lock()
_calls: SimpleQueue[_Call | None] = SimpleQueue()
_servers = 0


def on_compute_thread(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls `function` on the thread that serves, in the caller's context; returns or raises what it does.

    Where no thread serves it is called here. Not to be nested.
    """
    call: Callable[[], R] = partial(contextvars.copy_context().run, function, *args, **kwargs)
    result: Future[R] = Future()
    with _lock:
        served = _servers > 0
        if served:
            _calls.put(_Call(call, result))
    return result.result() if served else call()


@contextmanager
def serving() -> Generator[Callable[[Callable[[], bool]], None]]:
    """Yields a function that does the calls of other threads until what it is given returns true.

    It asks after every call and every `wake`. A call that is still waiting at the end is cancelled.
    """
    global _servers
    with _lock:
        _servers += 1
    try:
        yield _serve_until
    finally:
        with _lock:
            _servers -= 1
            while not _servers and not _calls.empty():
                if (call := _calls.get()) is not None:
                    call.result.cancel()


def wake() -> None:
    """Has the thread that serves look whether it is done."""
    _calls.put(None)


def _serve_until(done: Callable[[], bool]) -> None:
    while not done():
        if (call := _calls.get()) is None:
            continue
        try:
            call.result.set_result(call.function())
        except BaseException as error:
            call.result.set_exception(error)
            if not isinstance(error, Exception):
                raise  # an interrupt is for this thread as well
