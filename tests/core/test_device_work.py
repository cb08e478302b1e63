"""Device processes: units are fed to them, their words reach the parent, and their death is survived."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import pytest
import torch

from dflash_core import device_work
from dflash_core.config import Runtime, TargetConfig
from dflash_core.device_work import DeviceProcesses, InProcess, Job, devices_of, smaller
from dflash_core.devices import share_of_threads
from dflash_core.errors import DeviceError, InputError
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage


def job(root: str = "", path: str = "", **runtime) -> Job:
    values = {"device": "cpu", **runtime}
    return Job(
        stage="extract",
        root=root,
        path=path,
        source="",
        target=TargetConfig(),
        runtime=Runtime(**values),
    )


def test_a_cpu_is_used_by_this_process_unless_told_otherwise():
    assert devices_of(Runtime(device="cpu"), "extract") == []
    two = devices_of(Runtime(device="cpu", device_processes=2), "extract")
    assert two == [["cpu"], ["cpu"]]


def test_there_is_a_process_for_each_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert devices_of(Runtime(), "extract") == [["cuda:0"], ["cuda:1"], ["cuda:2"]]
    assert devices_of(Runtime(device_processes=2), "extract") == [["cuda:0"], ["cuda:1"]]
    assert devices_of(Runtime(device="cuda:1"), "extract") == [["cuda:1"]]
    assert devices_of(Runtime(device="cpu"), "extract") == []
    with pytest.raises(InputError, match="this machine has 3 GPUs"):
        devices_of(Runtime(device_processes=4), "extract")


def test_a_process_takes_several_gpus_for_a_large_target(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    runtime = Runtime(gpus_per_target=2)
    assert devices_of(runtime, "extract") == [["cuda:0", "cuda:1"], ["cuda:2", "cuda:3"]]
    assert len(devices_of(runtime, "regenerate")) == 5
    second = runtime.model_copy(update={"device": "cuda:1"})
    assert devices_of(second, "extract") == [["cuda:1", "cuda:2"]]
    with pytest.raises(InputError, match="machine has 5 GPUs"):
        devices_of(Runtime(gpus_per_target=2, device_processes=3), "extract")


class Crowded:
    """Work that fits only in batches of at most `room` tokens."""

    def __init__(self, room: int, done: list) -> None:
        self.room, self.done = room, done

    def __call__(self, job: Job):
        def work(units, progress):
            if job.runtime.batch_tokens > self.room:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.done.append((job.runtime.batch_tokens, list(units)))

        return work


def test_out_of_memory_is_answered_with_smaller_batches(monkeypatch, caplog):
    done: list = []
    monkeypatch.setitem(device_work.OPEN, "extract", Crowded(1500, done))
    workers = InProcess(job(batch_tokens=4096, forward="padded"))
    with caplog.at_level(logging.WARNING):
        workers.run([1, 2])
        workers.run([3])
    assert done == [(1024, [1, 2]), (1024, [3])], "the smaller batch is kept"
    assert "'batch_tokens': 1024" in caplog.text


def test_out_of_memory_ends_when_batches_cannot_shrink(monkeypatch):
    monkeypatch.setitem(device_work.OPEN, "extract", Crowded(0, []))
    with pytest.raises(torch.OutOfMemoryError):
        InProcess(job(batch_tokens=4096)).run([1])


def test_whole_packs_become_padded_batches_before_batches_become_smaller():
    first = smaller(job(batch_tokens=1024))
    second = smaller(first)
    assert (first.runtime.forward, first.runtime.batch_tokens) == ("padded", 1024)
    assert (second.runtime.forward, second.runtime.batch_tokens) == ("padded", 512)
    answering = job(generate_batch=2).model_copy(update={"stage": "regenerate"})
    fewer = smaller(answering)
    assert (fewer.runtime.generate_batch, fewer.runtime.forward) == (1, "auto")
    assert smaller(fewer) is None


# The child imports this module's stage by name, so the stage lives in the package of the tests.
CHILD = """
import os, sys, time, logging
sys.path[:0] = {path!r}
from dflash_core import device_work
from dflash_core.errors import InputError
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage

def opened(job):
    dataset = Dataset.open(Storage.from_url(job.root), job.path)
    logging.getLogger("dflash_core.test").info("opened in %d", os.getpid())
    def work(units, progress):
        for number, unit in enumerate(units, 1):
            if unit == "bad":
                raise InputError("unit 'bad' is bad")
            if unit == "slow":
                time.sleep(60)
            print("a library prints")
            dataset.commit(str(unit), {{"pid": os.getpid(), "device": job.runtime.device,
                                       "threads": os.environ.get("OMP_NUM_THREADS")}})
            progress(number, len(units), {{"tokens_per_s": 1.5}})
    return work

device_work.OPEN["extract"] = opened
device_work.main()
"""


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """Two device processes whose work is to commit units, and the dataset they fill."""
    root = Storage.from_url(str(tmp_path / "root"))
    dataset = Dataset.create(root, "hidden", "x", version=1, config={}, inputs={})
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(path=[os.getcwd()]))
    popen = device_work.subprocess.Popen
    monkeypatch.setattr(
        device_work.subprocess,
        "Popen",
        lambda command, **options: popen([command[0], str(script)], **options),
    )
    workers = DeviceProcesses(job(root.url, dataset.path), ["cpu", "cpu"])
    yield workers, dataset
    workers.close()


def pids(dataset: Dataset) -> dict[str, int]:
    return {unit: record["pid"] for unit, record in dataset.records().items()}


def test_units_progress_and_logs_cross_the_pipe_and_the_process_stays(processes, caplog):
    workers, dataset = processes
    seen: list = []
    with caplog.at_level(logging.INFO, "dflash_core"):
        workers.run(["a", "b"], lambda *state: seen.append(state))
        workers.run(["c"])
        workers.run(["d"])
    assert seen == [(1, 2, {"tokens_per_s": 1.5}), (2, 2, {"tokens_per_s": 1.5})]
    assert f"cpu: opened in {pids(dataset)['a']}" in caplog.text
    assert pids(dataset)["a"] == pids(dataset)["d"] != pids(dataset)["c"], "two take turns"


def test_processes_on_a_cpu_share_its_threads(processes, monkeypatch):
    workers, dataset = processes
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    workers.run(["a"])
    assert dataset.record("a")["threads"] == "2"
    assert share_of_threads("cpu", 8) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert share_of_threads("cuda:1", 2) == {}


def test_an_error_keeps_its_type_and_the_process(processes):
    workers, dataset = processes
    with pytest.raises(InputError, match="unit 'bad' is bad"):
        workers.run(["a", "bad", "b"])
    workers.run(["c"])
    workers.run(["d"])
    assert set(pids(dataset)) == {"a", "c", "d"}
    assert pids(dataset)["a"] == pids(dataset)["d"]


def test_a_progress_that_raises_ends_the_span_and_the_next_one_starts_clean(processes):
    workers, dataset = processes

    def stop(done, total, numbers):
        raise InputError("stopped here")

    for unit in ("a", "b"):  # both processes
        with pytest.raises(InputError, match="stopped here"):
            workers.run([unit, "slow"], stop)
    seen: list = []
    workers.run(["c"], lambda *state: seen.append(state))
    assert [state[:2] for state in seen] == [(1, 1)], "no word of the span before"
    assert set(pids(dataset)) == {"a", "b", "c"}


def test_a_killed_process_is_an_error_worth_retrying_and_is_replaced(processes):
    workers, dataset = processes
    killed = {}

    def kill(done, total, numbers):
        killed.update(pids(dataset))
        os.kill(killed["a"], signal.SIGKILL)

    with pytest.raises(DeviceError, match="SIGKILL"):
        workers.run(["a", "slow"], kill)
    workers.run(["b"])
    workers.run(["c"])
    assert killed["a"] not in {pids(dataset)["b"], pids(dataset)["c"]}


def test_closing_stops_a_span_at_once(processes):
    workers, dataset = processes
    errors: list = []

    def run():
        try:
            workers.run(["a", "slow"])
        except DeviceError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not dataset.committed():
        time.sleep(0.02)
    began = time.monotonic()
    workers.close()
    thread.join(5)
    assert time.monotonic() - began < 5
    assert errors
    assert not thread.is_alive()
    assert set(dataset.committed()) == {"a"}


def test_a_process_ends_when_its_parent_is_gone(processes):
    workers, _ = processes
    workers.run(["a"])
    child = workers._processes[0]._child
    child.stdin.close()  # what the kernel does when the parent is killed
    assert child.wait(10) != 0
