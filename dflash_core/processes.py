"""Pools of processes that do not outlive the process they work for."""

from __future__ import annotations

import multiprocessing
import os
import threading
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
