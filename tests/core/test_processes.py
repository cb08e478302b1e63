"""Pools end with the process that they work for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = """
import os, time
from dflash_core.processes import process_pool

if __name__ == "__main__":
    with process_pool(2) as pool:
        pids = {pool.submit(os.getpid).result() for _ in range(8)}
        print(*pids, flush=True)
        pool.submit(time.sleep, 600).result()
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_pool_of_a_killed_process_is_gone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        pids = [int(text) for text in process.stdout.readline().split()]
        assert pids
        assert all(map(alive, pids))
        process.kill()
    deadline = time.monotonic() + 30
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, "they live on"
        time.sleep(0.1)
