"""Progress of a stage or a task: a bar on the run's page, lines in its log, events, and the way to stop it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from threading import Event, Lock
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.runtime import flow_run

from dflash_core.errors import DFlashError
from dflash_core.progress import Progress
from flows import events
from flows.server import once

SHOW_EVERY_S = 5.0  # an update costs the server about 90 ms
LOG_EVERY_S = 60.0

stopping = Event()  # the run was cancelled: threads of tasks end at their next step

_bars: Counter[str | None] = Counter()  # that are open, by run: of its stage, of its tasks
_bars_lock = Lock()


class Stopped(DFlashError):
    """The run was cancelled or told to end; what is committed stays."""


@contextmanager
def progress_on_page(
    stage: str, what: str, *, start: int = 0, key: str = "progress"
) -> Generator[Progress]:
    """A progress bar on the run's page, a line a minute in its log, and the events of `flows.events`.

    The progress raises `Stopped` once the run is cancelled.

    Args:
        start: units that were done before; they say nothing about the time that is left.
        key: the artifact is `<stage>-<key>`, letters, digits and dashes.
    """
    with _told(), ThreadPoolExecutor(1) as sender:
        yield _Bar(f"{stage}-{key}".replace("_", "-"), what, start, sender)


@contextmanager
def _told() -> Generator[None]:
    """Tells the server that the stage runs, and when the last bar of the run is closed, that it does not any more.

    A bar commits, and what has committed counts as running until it is told to have ended.
    """
    run_id = flow_run.id
    with _bars_lock:
        _bars[run_id] += 1
        if _bars[run_id] == 1:
            events.emit(events.STARTED, run_id)
    try:
        yield
    finally:
        with _bars_lock:
            _bars[run_id] -= 1
            if not _bars[run_id]:
                del _bars[run_id]
                events.emit(events.ENDED, run_id)


class _Bar:
    """The progress of one task or stage. Safe to call from threads.

    It is sent from a thread: while the server is slow or away, the work goes on. What ends within
    `SHOW_EVERY_S` is shown once, at its end.
    """

    def __init__(self, key: str, what: str, start: int, sender: ThreadPoolExecutor) -> None:
        self._key, self._what, self._start = key, what, start
        self._sender = sender
        self._sending: Future | None = None
        self._context = copy_context()  # of the run that the artifact belongs to
        self._artifact: Any = None
        self._logger, self._run_id = get_run_logger(), flow_run.id
        self._lock = Lock()
        self._shown_at = self._logged_at = self._told_at = time.monotonic()
        self._told = start
        # Time and units at the first unit: loading a model says nothing about the rest.
        self._first: tuple[float, int] | None = None

    def __call__(self, done: int, total: int, numbers: dict[str, float]) -> None:
        if stopping.is_set():
            raise Stopped(f"{self._what}: stopped at {done} of {total}")
        with self._lock:
            now, last = time.monotonic(), done >= total
            if self._first is None and done > self._start:
                self._first = (now, done)
            if done > self._told and now - self._told_at >= events.EVERY_S:
                self._told, self._told_at = done, now
                events.emit(events.COMMITTED, self._run_id, done=done, total=total)
            busy = self._sending is not None and not self._sending.done()
            if not last and (busy or now - self._shown_at < SHOW_EVERY_S):
                return
            self._shown_at = now
            left_s = _seconds_left(self._first, now, done, total)
            text = f"{self._what}: {progress_text(done, total, left_s, numbers)}"
            percent = 100.0 * done / max(total, 1)
            self._sending = self._sender.submit(self._context.run, once, self._show, percent, text)
            if last or now - self._logged_at >= LOG_EVERY_S:
                self._logged_at = now
                self._logger.info(text)

    def _show(self, percent: float, text: str) -> None:
        if self._artifact is None:
            self._artifact = create_progress_artifact(percent, key=self._key, description=text)
        else:
            update_progress_artifact(self._artifact, progress=percent, description=text)


def _seconds_left(
    first: tuple[float, int] | None, now: float, done: int, total: int
) -> float | None:
    """From the rate since the first unit; None until there is one."""
    if first is None or done <= first[1]:
        return None
    began, reached = first
    return (now - began) / (done - reached) * (total - done)


def progress_text(done: int, total: int, left_s: float | None, numbers: dict[str, float]) -> str:
    """`120/299, 4 min left, tokens_per_s 310`: for the page and the log."""
    parts = [f"{done:,}/{total:,}"]
    if done < total and left_s is not None:
        parts.append(f"{left_s:.0f} s left" if left_s < 90 else f"{left_s / 60:,.0f} min left")
    return ", ".join([*parts, *(f"{key} {value:,.4g}" for key, value in numbers.items())])
