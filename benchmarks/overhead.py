"""What orchestration costs: the time of a stage's flow that is not spent in `dflash_core`.

    python -m benchmarks.overhead

Runs extraction and training of the demo (its target, packs of 512, chats of the standard library) as flows, once on
the ephemeral API and once on a server, and subtracts the time inside plan, work and seal. A flow of no work comes
first, as other stages do in a pipeline: it pays for imports, which are printed as a row of their own.
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
from dflash_core import extraction, tokenization
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
from dflash_core.corpus import curation
from dflash_core.device_work import InProcess
from dflash_core.storage import Storage
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


def tokens(root: Storage) -> str:
    """Path of the demo's tokens, on the corpus' own answers."""
    source = SourceConfig(name="python-stdlib", reader="python-stdlib", limit=CHATS)
    config = CurateConfig(sources=[source])
    corpus = curation.plan(root, "overhead", config)
    curation.run_units(corpus, config, curation.units(corpus))
    curation.seal(corpus)
    packs = TokenizeConfig(pack_tokens=512)
    made = tokenization.plan(root, "overhead", corpus, TARGET, packs)
    tokenization.run_units(made, corpus, TARGET, tokenization.units(made, corpus))
    tokenization.seal(made, corpus)
    return made.path


def measure(api: str) -> None:
    """Prints a row of the table for each stage."""
    from flows.extract import extract
    from flows.params import ExtractParams, PlanParams, TrainParams
    from flows.plan import plan
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
        root = Storage.from_url(folder)
        common: dict[str, Any] = {"root": folder, "name": "overhead", "target": TARGET}
        runtime = Runtime(device="cpu", span_packs=64)
        path = tokens(root)
        began = time.perf_counter()
        plan(PlanParams(**common, tokens=path))
        print(
            f"| first flow of the process, no work | {api} | {time.perf_counter() - began:.1f} | | |"
        )
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
