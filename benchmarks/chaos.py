"""Chaos: a pipeline on two workers, a Prefect server and an S3 server, while all of them are killed.

    python -m benchmarks.chaos --rounds 10 --log chaos.log

An undisturbed run comes first. Then the same request runs in an empty bucket prefix, spread over workers, and
each round kills one thing with SIGKILL at a random time: a worker, the process of a run, the S3 server, the
Prefect server. What was killed is started again a few seconds later, as systemd would; runs are started
again by the automations of `dflash deploy`. A pipeline that ends before the rounds do is followed by another.
At the end every object of hidden states, checkpoints and export must have the bytes of the undisturbed
run, and no object of a committed pack may be younger than its commit record.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from dflash_core.manifest import Dataset, sha256
from dflash_core.storage import Storage
from tests import targets
from tests.flows import pipeline_case as case
from tests.prefect_server import RUNS, PrefectServer, end, processes_of
from tests.s3 import BUCKET, S3Server

COMPARED = ("tokens", "hidden", "runs", "exports")
# Who wrote what when, and what quotes measured speed (model card and provenance): these differ between two runs.
NOT_COMPARED = ("_commits/", "manifest.json", "README.md", "provenance.json", "metrics/")
VICTIMS = ("worker", "run", "s3", "server")
PATIENCE_S = 150.0  # an automation whose server was killed while it acted may have forgotten
FINAL = ("Completed", "Failed", "Cancelled")


@dataclass
class Service:
    """The processes of a small installation; a supervisor starts again whatever is not running."""

    folder: Path
    log: Callable[[str], None]
    workers: dict[str, subprocess.Popen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("s3", "prefect"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.s3 = S3Server(self.folder / "s3")
        self.s3.start()
        os.environ.update(self.s3.environment)
        self.server = PrefectServer(self.folder / "prefect")
        self.server.start()
        os.environ.update(self.server.environment)
        self.server.deploy("-s", "gpu_runs=2", "-s", "start_minutes=3")

    def supervise(self) -> None:
        """Starts each worker that is not running."""
        for name, queue in (("cpu", "cpu"), ("gpu-one", "gpu"), ("gpu-two", "gpu")):
            worker = self.workers.get(name)
            if worker is None or worker.poll() is not None:
                if worker is not None:
                    self.log(f"worker {name} is gone (exit status {worker.poll()}), started again")
                limit = "4" if queue == "cpu" else "1"
                self.workers[name] = self.server.worker(name, queue, limit=limit)

    def kill(self, victim: str, chance: random.Random) -> str:
        """Kills it, waits a few seconds, starts it again. Returns what it was."""
        pause = chance.uniform(2, 8)
        if victim == "s3":
            self.s3.kill()
            time.sleep(pause)
            self.s3.start()
            return f"S3 server, away for {pause:.0f} s"
        if victim == "server":
            self.server.kill()
            time.sleep(pause)
            self.server.start()
            return f"Prefect server, away for {pause:.0f} s and its start"
        if victim == "worker":
            name = chance.choice(list(self.workers))
            end(self.workers[name], signal.SIGKILL)
            time.sleep(pause)
            return f"worker {name}"
        runs = processes_of(self.server.folder, *RUNS)
        if not runs:
            return "no run: none had a process"
        chosen = chance.choice(runs)
        os.kill(chosen, signal.SIGKILL)
        return f"process of a run, one of {len(runs)}"

    def close(self) -> None:
        """Ends everything that was started here."""
        for worker in self.workers.values():
            end(worker, signal.SIGTERM)
        for pid in processes_of(self.server.folder, *RUNS, "dflash_core"):
            os.kill(pid, signal.SIGKILL)
        self.server.stop()
        self.s3.stop()


class Pipeline:
    """The whole way, each stage as a run of its own deployment."""

    deployment = "pipeline/cluster"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._target = targets.qwen3_5_text(folder / "target")

    def undisturbed(self, url: str) -> None:
        """All stages in one process."""
        params = case.parameters(self._folder, url, self._target)
        case.finish(self._folder, case.start(self._folder, params, {}), timeout_s=900)

    def parameters(self, url: str) -> dict:
        """Parameters of the deployment."""
        params = case.parameters(self._folder, url, self._target)
        runtime = params["runtime"] | {"child_runs": 3, "span_packs": 4}
        return params | {"stages_run": "as-deployments", "runtime": runtime}


class Extraction:
    """Extraction alone, over child runs: what a test has time for."""

    deployment = "extract/fan-out"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._target = targets.qwen3_5_text(folder / "target")

    def undisturbed(self, url: str) -> None:
        """All packs in this process."""
        root = Storage.from_url(url)
        made = case.tokens(self._folder, root, self._target, count=32)
        case.extract_alone(root, made, self._target, name="case")

    def parameters(self, url: str) -> dict:
        """Parameters of the deployment, after making the tokens."""
        root = Storage.from_url(url)
        made = case.tokens(self._folder, root, self._target, count=32)
        params = case.extract_params(root, made, self._target, child_runs=3, span_packs=2)
        return params.model_dump(mode="json")


SCENARIOS = {"pipeline": Pipeline, "extraction": Extraction}


def start(deployment: str, params: dict) -> str:
    """A run of the deployment; returns its id."""
    code = (
        "import json, sys; from prefect.deployments import run_deployment; "
        "run = run_deployment(sys.argv[1], parameters={'params': json.load(sys.stdin)}, timeout=0); "
        "print(run.id)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, deployment],
        input=json.dumps(params),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()[-1]


def state_of(service: Service, run_id: str) -> str:
    """Name of the run's state; empty while the server does not answer."""
    try:
        with urllib.request.urlopen(
            f"{service.server.api_url}/flow_runs/{run_id}", timeout=5
        ) as got:
            return json.load(got)["state"]["name"]
    except OSError:
        return ""


def retry(service: Service, run_id: str) -> None:
    """What *Retry* in the UI does."""
    body = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True}
    request = urllib.request.Request(
        f"{service.server.api_url}/flow_runs/{run_id}/set_state",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=10).close()


def contents(root: Storage) -> dict[str, str]:
    """sha256 by key of every object that must be the same after any history.

    Without the random part of the names of objects that a record names (`Storage.put_fresh`).
    """
    return {
        re.sub(r"-[0-9a-f]{12}(?=\.)", "", f"{stage}/{info.key}"): sha256(
            root.child(stage).get(info.key)
        )
        for stage in COMPARED
        for info in root.child(stage).list()
        if not any(part in info.key for part in NOT_COMPARED)
    }


def run(
    rounds: int, seed: int, folder: Path, limit_s: float, scenario: type[Pipeline | Extraction]
) -> Iterator[str]:
    """Lines of the log; raises AssertionError when something is not as it must be."""
    lines: list[str] = []
    began = time.monotonic()
    chance = random.Random(seed)
    wanted = scenario(folder)
    service = Service(folder, lines.append)

    def stamp(text: str) -> str:
        return f"{time.monotonic() - began:7.1f} s  {text}"

    def pending() -> Iterator[str]:
        while lines:
            yield stamp(lines.pop(0))

    try:
        whole = f"s3://{BUCKET}/undisturbed"
        wanted.undisturbed(whole)
        expected = contents(Storage.from_url(whole))
        yield stamp(f"undisturbed run done: {len(expected)} objects to compare")
        service.supervise()
        victims = chance.sample(VICTIMS * -(-rounds // len(VICTIMS)), rounds)
        number = 0
        while victims or not number:
            number += 1
            url = f"s3://{BUCKET}/chaos-{number}"
            run_id = start(wanted.deployment, wanted.parameters(url))
            yield stamp(f"{wanted.deployment} {number} started")
            next_kill = time.monotonic() + chance.uniform(5, 40)
            crashed_at = 0.0
            while (state := state_of(service, run_id)) not in FINAL:
                assert time.monotonic() - began < limit_s, f"{state}: no end within {limit_s:.0f} s"
                service.supervise()
                yield from pending()
                crashed_at = (crashed_at or time.monotonic()) if state == "Crashed" else 0.0
                if crashed_at and time.monotonic() - crashed_at > PATIENCE_S:
                    retry(service, run_id)
                    yield stamp("crashed and not started again: retried by hand")
                working = processes_of(service.server.folder, *RUNS)
                if victims and working and time.monotonic() > next_kill:
                    what = service.kill(victims.pop(), chance)
                    done = rounds - len(victims)
                    yield stamp(f"round {done}: killed {what}")
                    next_kill = time.monotonic() + chance.uniform(5, 40)
                time.sleep(1)
            yield stamp(f"{wanted.deployment} {number} ended as {state}")
            assert state == "Completed", "it did not complete"
            root = Storage.from_url(url)
            found = contents(root)
            differing = sorted(
                key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)
            )
            assert not differing, f"objects differ from the undisturbed run: {differing[:10]}"
            store: Dataset = case.only(root, "hidden")
            twice = case.done_twice(store)
            assert not twice, f"written after they were committed: {twice[:10]}"
            yield stamp(f"{len(found)} objects equal, no committed pack written twice")
        yield stamp(f"{rounds} kills, {number} runs, all as undisturbed")
    finally:
        service.close()


def main() -> None:
    """Prints the log and keeps it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60, help="give up after so long")
    parser.add_argument("--log", type=Path, default=Path("chaos.log"))
    parser.add_argument("--scenario", choices=list(SCENARIOS), default="pipeline")
    parser.add_argument("--folder", type=Path, help="keep data and logs of all processes here")
    options = parser.parse_args()
    kept = nullcontext(options.folder) if options.folder else tempfile.TemporaryDirectory()
    with kept as folder, options.log.open("w") as log:
        scenario = SCENARIOS[options.scenario]
        limit_s = options.minutes * 60
        for line in run(options.rounds, options.seed, Path(folder), limit_s, scenario):
            print(line, flush=True)
            print(line, file=log, flush=True)


if __name__ == "__main__":
    main()
