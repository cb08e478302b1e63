"""Why matrix work stays on one thread: time of a small operation on a first and on a second thread.

Run: python benchmarks/compute_thread.py
"""

from __future__ import annotations

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
    measure("first thread")
    second = threading.Thread(target=measure, args=("second thread",))
    second.start()
    second.join()
    measure("first thread again, alone")


if __name__ == "__main__":
    main()
