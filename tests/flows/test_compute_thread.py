"""Matrix work of all tasks runs on the thread that waits for them."""

from __future__ import annotations

import contextvars
import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest

from flows import compute_thread
from flows.compute_thread import on_compute_thread, serving, wake

WHO = contextvars.ContextVar("who", default="nobody")


def waking(future: Future) -> Future:
    future.add_done_callback(lambda _: wake())
    return future


def test_callers_in_many_threads_share_the_serving_thread_and_keep_their_context():
    names, together = ["a", "b", "c", "d"], threading.Barrier(4)

    def task(name: str) -> tuple[str, int]:
        WHO.set(name)
        together.wait()
        return on_compute_thread(lambda: (WHO.get(), threading.get_ident()))

    with ThreadPoolExecutor(4) as pool, serving() as serve_until:
        futures = [waking(pool.submit(task, name)) for name in names]
        serve_until(lambda: all(future.done() for future in futures))
    assert [future.result()[0] for future in futures] == names
    assert {future.result()[1] for future in futures} == {threading.get_ident()}


def test_where_no_thread_serves_the_caller_computes():
    assert on_compute_thread(threading.get_ident) == threading.get_ident()


def test_an_error_reaches_the_caller_and_the_serving_goes_on():
    with ThreadPoolExecutor(1) as pool, serving() as serve_until:
        bad = waking(pool.submit(on_compute_thread, divmod, 1, 0))
        good = waking(pool.submit(on_compute_thread, divmod, 7, 2))
        serve_until(lambda: bad.done() and good.done())
    with pytest.raises(ZeroDivisionError):
        bad.result()
    assert good.result() == (3, 1)


def test_an_interrupt_ends_call_and_serving_and_a_waiting_call_is_cancelled():
    def interrupted() -> None:
        futures.append(pool.submit(on_compute_thread, divmod, 7, 2))
        while compute_thread._calls.empty():
            time.sleep(0.001)
        raise KeyboardInterrupt

    def serve_forever() -> None:
        with serving() as serve_until:
            futures.append(pool.submit(on_compute_thread, interrupted))
            serve_until(lambda: False)

    futures: list[Future] = []
    with ThreadPoolExecutor(1) as runner, ThreadPoolExecutor(2) as pool:
        with pytest.raises(KeyboardInterrupt):
            runner.submit(serve_forever).result(10)
        interrupt, cancelled = (future.exception(10) for future in futures)
    assert isinstance(interrupt, KeyboardInterrupt)
    assert isinstance(cancelled, CancelledError)
