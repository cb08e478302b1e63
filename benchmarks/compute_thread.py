"""Why matrix work runs on a process's first thread: time of a small operation there and elsewhere.

Run: GOMP_SPINCOUNT=10000 python benchmarks/compute_thread.py
"""

from __future__ import annotations

import multiprocessing
import threading
import time

import torch

ROWS, WIDTH, SECONDS = 64, 256, 2.0


def measure(name: str) -> None:
    x, w = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)
    count, end = 0, time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        torch.nn.functional.silu(x @ w)
        count += 1
    print(f"| {name} | {SECONDS / count * 1e6:.0f} |", flush=True)


def main() -> None:
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print("| where | microseconds |\n| --- | --- |")
    for where in ("first thread", "second thread"):
        # Each in a process of its own, whose other threads compute nothing.
        child = multiprocessing.get_context("spawn").Process(target=alone, args=(where,))
        child.start()
        child.join()


def alone(where: str) -> None:
    if where == "first thread":
        measure(where)
        return
    second = threading.Thread(target=measure, args=(where,))
    second.start()
    second.join()


if __name__ == "__main__":
    main()
