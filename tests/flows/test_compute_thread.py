"""Matrix work of all tasks runs on one thread."""

from __future__ import annotations

import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flows.compute_thread import on_compute_thread

WHO = contextvars.ContextVar("who", default="nobody")


def test_callers_in_many_threads_share_one_thread_and_keep_their_context():
    names, together = ["a", "b", "c", "d"], threading.Barrier(4)

    def task(name: str) -> tuple[str, int]:
        WHO.set(name)
        together.wait()
        return on_compute_thread(lambda: (WHO.get(), threading.get_ident()))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(task, names))
    assert [name for name, _ in found] == names
    (thread,) = {thread for _, thread in found}
    assert thread != threading.get_ident()


def test_an_error_reaches_the_caller_and_the_thread_goes_on():
    with pytest.raises(ZeroDivisionError):
        on_compute_thread(divmod, 1, 0)
    assert on_compute_thread(divmod, 7, 2) == (3, 1)
