"""One process for each GPU, on one store; one of them is killed in the middle."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from benchmarks.extraction import make_tokens, realistic_lengths
from dflash_core import extraction
from dflash_core.config import ExtractConfig, Runtime, TargetConfig
from dflash_core.device_work import DeviceProcesses, InProcess, Job
from dflash_core.errors import DeviceError
from dflash_core.hidden_states import HiddenStates
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from tests.gpu.test_packed_forward import HYBRID, LAYERS
from tests.targets import qwen3_5_text

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]
DEVICES = ["cuda:0", "cuda:1"]
PACKS, SPAN = 32, 8


def plan(folder, target: TargetConfig) -> tuple[Dataset, Job]:
    root = Storage.from_url(str(folder))
    tokens = make_tokens(root, target, realistic_lengths(PACKS, 4096, 256), 4096)
    config = ExtractConfig(target_layer_ids=LAYERS, chunk_rows=64)
    dataset = extraction.plan(root, "test", tokens, target, config)
    runtime = Runtime(device=DEVICES[0], compile=False)
    return dataset, Job.filling(dataset, tokens.path, target, runtime, stage="extract")


def test_one_of_two_is_killed_and_nothing_is_missing_or_twice(tmp_path):
    if DEVICES[0] != "cpu":
        pytest.importorskip("fla")
    changes = {**HYBRID, "vocab_size": 512}
    dtype = "float32" if DEVICES[0] == "cpu" else "bfloat16"
    target = TargetConfig(id=qwen3_5_text(tmp_path / "target", **changes).id, dtype=dtype)
    undisturbed, job = plan(tmp_path / "one", target)
    InProcess(job).run(extraction.missing(undisturbed))

    dataset, job = plan(tmp_path / "two", target)
    workers = DeviceProcesses(job, DEVICES)
    committed_at_death: set[str] = set()
    lock = threading.Lock()

    def kill(done: int, total: int, numbers: dict) -> None:
        """Kills the process that reports first, once, in the middle of its span."""
        with lock:
            if not committed_at_death and done == SPAN // 2:
                committed_at_death.update(dataset.committed())
                victim = next(p for p in workers._processes if p._child is not None)
                os.kill(victim._child.pid, signal.SIGKILL)

    def span(packs: list[int]) -> int:
        """Times that the span was begun: a flow's task does it again after a DeviceError."""
        for times in range(1, 4):
            try:
                workers.run(packs, kill)
                return times
            except DeviceError:
                continue
        raise AssertionError(f"packs {packs} failed three times")

    packs = extraction.units(dataset)
    spans = [packs[first : first + SPAN] for first in range(0, len(packs), SPAN)]
    with ThreadPoolExecutor(len(DEVICES)) as pool:
        times = list(pool.map(span, spans))
    workers.close()
    assert committed_at_death, "the kill came too late to interrupt anything"
    assert sum(times) == len(spans) + 1, "one span was begun again"
    assert extraction.missing(dataset) == []
    extraction.seal(dataset)
    extraction.seal(undisturbed)
    ours, theirs = HiddenStates.open(dataset), HiddenStates.open(undisturbed)
    for pack in packs:
        assert torch.equal(ours.read_pack(pack)[1], theirs.read_pack(pack)[1])
    objects = [len(list(store.storage.list("hidden/c/"))) for store in (dataset, undisturbed)]
    assert objects[0] == objects[1], "an object too many or too few"


def test_a_target_over_two_gpus_gives_the_same_states_as_on_one(tmp_path):
    pytest.importorskip("fla")
    changes = {**HYBRID, "vocab_size": 512}
    target = TargetConfig(id=qwen3_5_text(tmp_path / "target", **changes).id, dtype="bfloat16")
    stores = []
    for each in (1, 2):
        dataset, job = plan(tmp_path / str(each), target)
        runtime = job.runtime.model_copy(update={"gpus_per_target": each})
        InProcess(job.model_copy(update={"runtime": runtime})).run(extraction.missing(dataset))
        extraction.seal(dataset)
        stores.append(HiddenStates.open(dataset))
    whole, split = stores
    for pack in range(whole.num_packs):
        assert torch.equal(whole.read_pack(pack)[1], split.read_pack(pack)[1])
