"""What orchestration costs: the time of a stage's flow that is not spent in `dflash_core`.

    python -m benchmarks.overhead

Runs extraction and training of the demo (its target, packs of 512, chats of the standard library) as flows, once on
the ephemeral API and once on a server, and subtracts the time inside plan, work and seal. Curation and tokenization
come first, as in the pipeline: they pay for the start of Prefect and for imports, and are printed as a row.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import flows  # noqa: F401 - settings, before Prefect is imported
from dflash_core import extraction
from dflash_core import train as training
from dflash_core.config import (
    CurateConfig,
    DrafterConfig,
    Runtime,
    SourceConfig,
    TargetConfig,
    TokenizeConfig,
    TrainConfig,
)
from dflash_core.device_work import InProcess
from tests.prefect_server import PrefectServer

TARGET = TargetConfig(id="demo/target", dtype="float32")
CHATS, STEPS = 400, 200


class Clock:
    """Seconds inside the functions that it was put around."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, owner: Any, *names: str) -> None:
        """Replaces the functions by ones that are timed."""
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable) -> Callable:
        @wraps(function)
        def timed(*args, **kwargs):
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def tokens(common: dict[str, Any]) -> str:
    """Path of the demo's tokens, on the corpus' own answers."""
    from flows.curate import curate
    from flows.params import CurateParams, TokenizeParams
    from flows.tokenize import tokenize

    source = SourceConfig(name="python-stdlib", reader="python-stdlib", limit=CHATS)
    corpus = curate(CurateParams(**common, curate=CurateConfig(sources=[source])))
    packs = TokenizeConfig(pack_tokens=512)
    return tokenize(
        TokenizeParams(**common, target=TARGET, corpus=corpus.path, tokenize=packs)
    ).path


def measure(api: str) -> None:
    """Prints a row of the table for each stage."""
    from flows.extract import extract
    from flows.params import ExtractParams, TrainParams
    from flows.train import train

    clock = Clock()
    clock.around(extraction, "plan", "missing", "seal")
    clock.around(InProcess, "run")
    clock.around(training, "plan", "missing", "run", "seal")
    train_config = TrainConfig(
        drafter=DrafterConfig(num_hidden_layers=2, block_size=8),
        num_steps=STEPS,
        anchors_per_pack=64,
        checkpoint_every=STEPS,
    )
    with tempfile.TemporaryDirectory() as folder:
        common: dict[str, Any] = {"root": folder, "name": "overhead"}
        runtime = Runtime(device="cpu", span_packs=64)
        began = time.perf_counter()
        path = tokens(common)
        print(f"| curate and tokenize | {api} | {time.perf_counter() - began:.1f} | | |")
        common["target"] = TARGET
        began, clock.seconds = time.perf_counter(), 0.0
        hidden = extract(ExtractParams(**common, runtime=runtime, tokens=path))
        row("extract", api, time.perf_counter() - began, clock.seconds)
        began, clock.seconds = time.perf_counter(), 0.0
        train(TrainParams(**common, runtime=runtime, hidden=hidden.path, train=train_config))
        row("train", api, time.perf_counter() - began, clock.seconds)


def row(stage: str, api: str, wall_s: float, core_s: float) -> None:
    """One line of the table."""
    share = (wall_s - core_s) / wall_s
    print(f"| {stage} | {api} | {wall_s:.1f} | {wall_s - core_s:.2f} | {share:.1%} |", flush=True)


def main() -> None:
    """Each API in a process of its own, since a process talks to one."""
    if len(sys.argv) > 1:
        measure(sys.argv[1])
        return
    print(
        "| stage | API | wall s | orchestration s | share |\n| --- | --- | --- | --- | --- |",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        server = PrefectServer(Path(folder))
        ephemeral = {
            "PREFECT_HOME": folder,
            "OMP_NUM_THREADS": "1",
            "PREFECT_LOGGING_LEVEL": "ERROR",
        }
        server.start()
        try:
            run("server", ephemeral | {"PREFECT_API_URL": server.api_url})
        finally:
            server.stop()
        run("ephemeral", ephemeral)


def run(api: str, environment: dict[str, str]) -> None:
    """This script again, for one API."""
    inherited = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    subprocess.run(
        [sys.executable, "-m", "benchmarks.overhead", api], env=inherited | environment, check=True
    )


if __name__ == "__main__":
    main()
