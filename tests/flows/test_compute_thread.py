"""Matrix work of all tasks runs on one thread."""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flows.compute_thread import on_compute_thread

WHO = contextvars.ContextVar("who", default="nobody")


def test_callers_in_many_threads_share_one_thread_and_keep_their_context():
    def task(name: str) -> tuple[str, int]:
        WHO.set(name)
        return on_compute_thread(lambda: (WHO.get(), threading.get_ident()))

    together = threading.Barrier(4)

    def at_once(name: str) -> tuple[str, int]:
        together.wait()
        return task(name)

    names = ["a", "b", "c", "d"]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(at_once, names))
    assert [name for name, _ in found] == names
    threads = {thread for _, thread in found}
    assert len(threads) == 1
    assert threads.isdisjoint({threading.get_ident()})


def test_an_error_reaches_the_caller_and_the_thread_goes_on():
    with pytest.raises(ZeroDivisionError):
        on_compute_thread(divmod, 1, 0)
    assert on_compute_thread(divmod, 7, 2) == (3, 1)
