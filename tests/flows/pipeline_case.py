"""A whole pipeline small enough for tests: a random hybrid target, a few dozen chats, seconds a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from dflash_core.config import ExtractConfig, Runtime, TargetConfig
from dflash_core.device_work import InProcess, Job
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from flows.params import ExtractParams

STAGES = ("corpora", "tokens", "hidden", "runs", "evaluations", "exports")


def write_chats(file: Path, count: int = 60) -> None:
    """Chats with answers of varying length, each its own group."""
    with file.open("w") as lines:
        for i in range(count):
            words = " ".join(f"w{(i * 7 + k) % 50}" for k in range(5 + i % 20))
            messages = [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": f"answer {i}: {words}"},
            ]
            lines.write(json.dumps({"messages": messages}) + "\n")


def parameters(folder: Path, root: str, target: TargetConfig) -> dict:
    """Parameters of the pipeline; every size as small as it can be."""
    chats = folder / "chats.jsonl"
    if not chats.exists():
        write_chats(chats)
    return {
        "root": root,
        "name": "case",
        "target": target.model_dump(),
        "curate": {
            "sources": [{"name": "chats", "reader": "openai", "path": str(chats)}],
            "held_out_fraction": 0.1,
        },
        "regenerate": {"num_rows": 48, "max_new_tokens": 24, "rows_per_part": 16},
        "tokenize": {"pack_tokens": 128, "rows_per_part": 16},
        "extract": {"chunk_rows": 32},
        "train": {
            "drafter": {"num_hidden_layers": 1, "block_size": 4},
            "num_steps": 24,
            "anchors_per_pack": 16,
            "checkpoint_every": 4,
        },
        "evaluate": {"num_prompts": 2, "max_new_tokens": 12},
        "runtime": {"device": "cpu", "span_packs": 4, "generate_batch": 16},
    }


def start(folder: Path, params: dict, env: dict[str, str]) -> subprocess.Popen:
    """`dflash run` in a process group of its own, as a user starts it."""
    config = folder / "pipeline.yaml"
    config.write_text(yaml.safe_dump(params))
    log = (folder / "run.log").open("ab")
    return subprocess.Popen(
        [sys.executable, "-m", "flows.pipeline", str(config)],
        stdout=log,
        stderr=log,
        env=os.environ | env,
        start_new_session=True,
    )


def finish(folder: Path, process: subprocess.Popen, timeout_s: float = 240) -> str:
    """Waits for success and returns the log; raises with its end otherwise."""
    code = process.wait(timeout_s)
    log = (folder / "run.log").read_text()
    if code:
        raise AssertionError(f"exit status {code}\n{log[-6000:]}")
    return log


def kill_when(
    process: subprocess.Popen, happened: Callable[[], bool], timeout_s: float = 240
) -> None:
    """kill -9 of the whole process group as soon as `happened()`; fails if the process ends before."""
    deadline = time.monotonic() + timeout_s
    while not happened():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError("the process ended, or the time did, before it could be killed")
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def only(root: Storage, stage: str, suffix: str = "", name: str = "case") -> Dataset:
    """The one dataset of `stage` whose name ends so before the fingerprint."""
    names = {info.key.split("/")[0] for info in root.child(stage).list()}
    names = {found for found in names if found.rpartition("-")[0] == f"{name}{suffix}"}
    assert len(names) == 1, f"{stage}: {sorted(names)}"
    return Dataset.open(root, f"{stage}/{names.pop()}")


def committed(root: Path, stage: str) -> list[Path]:
    """Commit records of a stage in a local root, however far it is."""
    return sorted((root / stage).glob("*/_commits/*.json"))


def write_ids(dataset: Dataset) -> dict[str, str]:
    """Who wrote each unit: the same id means it was not done again."""
    return {unit: record["write_id"] for unit, record in dataset.records().items()}


def tokens(folder: Path, root: Storage, target: TargetConfig, count: int = 60) -> Dataset:
    """Complete tokens of `count` chats, made without Prefect."""
    from dflash_core import tokenization
    from dflash_core.config import CurateConfig, SourceConfig, TokenizeConfig
    from dflash_core.corpus import curation

    chats = folder / "chats.jsonl"
    write_chats(chats, count)
    source = SourceConfig(name="chats", reader="openai", path=str(chats))
    config = CurateConfig(sources=[source], held_out_fraction=0.0)
    corpus = curation.plan(root, "case", config)
    curation.run_units(corpus, config, curation.units(corpus), lambda *_: None)
    curation.seal(corpus)
    packs = TokenizeConfig(pack_tokens=128)
    made = tokenization.plan(root, "case", corpus, target, packs)
    parts = tokenization.units(made, corpus)
    tokenization.run_units(made, corpus, target, parts, lambda *_: None)
    tokenization.seal(made, corpus)
    return made


def extract_params(
    root: Storage, made: Dataset, target: TargetConfig, **runtime: int
) -> ExtractParams:
    """Parameters of an extraction of `made`, tokens of `tokens`."""
    return ExtractParams(
        root=root.url,
        name="case",
        tokens=made.path,
        target=target,
        extract=ExtractConfig(chunk_rows=32),
        runtime=Runtime.model_validate({"device": "cpu", **runtime}),
    )


def extract_alone(
    root: Storage, made: Dataset, target: TargetConfig, name: str = "alone"
) -> Dataset:
    """The store of `extract_params`, extracted in one go in this process."""
    from dflash_core import extraction

    asked = extract_params(root, made, target)
    dataset = extraction.plan(root, name, made, target, asked.extract)
    job = Job.filling(dataset, made.path, target, asked.runtime, stage="extract")
    InProcess(job).run(extraction.units(dataset))
    extraction.seal(dataset)
    return dataset


def done_twice(dataset: Dataset) -> list[str]:
    """Packs whose bytes were written after their commit record: somebody computed them again."""
    from dflash_core.hidden_states import pack_unit, read_layout

    committed = {info.key: info.modified for info in dataset.storage.list("_commits")}
    layout = read_layout(dataset)
    again = []
    for info in dataset.storage.list("hidden/c"):
        number = int(info.key.removeprefix("hidden/c/").split("/")[0])
        record = f"_commits/{pack_unit(number // layout.shards_per_pack)}.json"
        if record in committed and info.modified > committed[record]:
            again.append(info.key)
    return again
