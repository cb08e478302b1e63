"""Processes that work for another one: pools that do not outlive it, and logs that reach it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor


def process_pool(processes: int) -> ProcessPoolExecutor:
    """A pool whose processes end when this one is killed.

    Spawned, not forked: tokenizers and object stores run threads, which a fork would lose.
    """
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(processes, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """A pool's processes wait for work for ever, also when nobody is left to give them any."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def forward_log(send: Callable[[dict], None]) -> None:
    """In a child: hands what the project logs to `send`, as a message with the key `log`."""
    project = logging.getLogger("dflash_core")
    project.setLevel(logging.INFO)
    project.addHandler(_Forward(send))


def log_again(message: dict, prefix: str = "") -> None:
    """In the process that it works for: logs such a message, in the name of who logged it first."""
    name, level, text = message["log"]
    logging.getLogger(name).log(level, "%s%s", prefix, text)


class _Forward(logging.Handler):
    def __init__(self, send: Callable[[dict], None]) -> None:
        super().__init__()
        self._send = send
        self.setFormatter(logging.Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        self._send({"log": [record.name, record.levelno, self.format(record)]})
