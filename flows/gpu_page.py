"""This machine's GPUs on the page of a run: how busy, how full, without ssh."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import copy_context
from threading import Event, Thread
from typing import Any, NamedTuple

from prefect.artifacts import create_progress_artifact, update_progress_artifact

from flows.server import once, patiently

EVERY_S = 10.0
_FIELDS = "index,name,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu"


class Gpu(NamedTuple):
    """One line of nvidia-smi."""

    index: int
    busy: float
    text: str


def read() -> list[Gpu]:
    """The GPUs of this machine; empty where there are none, or nvidia-smi does not answer."""
    command = ["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return []
    return [_gpu(*line.split(", ")) for line in answer.stdout.strip().splitlines()]


def _gpu(index: str, name: str, busy: str, used: str, total: str, watts: str, heat: str) -> Gpu:
    """A value that a card does not know is printed as [N/A]."""
    gib = [f"{int(mib) / 1024:.1f}" if mib.isdigit() else mib for mib in (used, total)]
    text = f"{name}: {busy} % busy, {gib[0]} of {gib[1]} GiB, {watts} W, {heat} °C"
    return Gpu(int(index), float(busy) if busy.isdigit() else 0.0, text)


@contextmanager
def gpus_on_page() -> Generator[None]:
    """Keeps one progress artifact for each GPU up to date: its bar is how busy the GPU is."""
    gpus = read() if shutil.which("nvidia-smi") else []
    if not gpus:
        yield
        return
    host = re.sub(r"[^a-z0-9-]", "-", socket.gethostname().lower())
    artifacts: dict[int, Any] = {
        gpu.index: patiently(
            create_progress_artifact,
            progress=gpu.busy,
            key=f"gpu-{host}-{gpu.index}",
            description=gpu.text,
        )
        for gpu in gpus
    }
    ended = Event()

    def watch() -> None:
        while not ended.wait(EVERY_S):
            for gpu in read():
                once(
                    update_progress_artifact,
                    artifacts[gpu.index],
                    progress=gpu.busy,
                    description=gpu.text,
                )

    watcher = Thread(target=copy_context().run, args=(watch,), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
