"""Work that needs the target on a device, done here or by processes that keep it loaded.

    flow process                                      one process for each GPU
    DeviceProcesses.run(units) --- {"units": [...]} --> open the job once (the target is loaded), then
                               <-- {"progress": ...}    work on units, commit each
                               <-- {"log": ...}
                               <-- {"done": true} or {"error": ...}

Messages are JSON lines over pipes. A process that dies takes nothing with it but the units it worked on;
its place is taken by a new one at the next call. A process whose parent is gone commits what is under way and
ends. Running out of device memory is answered here, with smaller batches.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Literal, Protocol

from pydantic import Field

from dflash_core import errors
from dflash_core.config import Config, DrafterSource, RegenerateConfig, Runtime, TargetConfig
from dflash_core.errors import DeviceError, DFlashError, InputError
from dflash_core.manifest import Dataset
from dflash_core.processes import forward_log, log_again
from dflash_core.progress import Progress, silent
from dflash_core.storage import Storage

log = logging.getLogger(__name__)

StageName = Literal["extract", "regenerate", "evaluate"]
Work = Callable[[Sequence, Progress], None]
_LEAST_BATCH_TOKENS = 256
DRAIN_S = 20.0  # what a process that is told to end has for the units under way


class Job(Config):
    """What a device process is for: one dataset of one stage."""

    stage: StageName
    """Which of `OPEN` does the work."""
    root: str
    """URL of the root."""
    path: str
    """Path of the dataset that is filled."""
    source: str
    """Path of the dataset that is read."""
    target: TargetConfig
    """The model."""
    runtime: Runtime
    """Device and batch sizes."""
    compare: list[DrafterSource] = Field(default=[])
    """Other drafters to evaluate."""

    @classmethod
    def filling(
        cls,
        dataset: Dataset,
        source: str,
        target: TargetConfig,
        runtime: Runtime,
        *,
        stage: StageName,
        compare: list[DrafterSource] | None = None,
    ) -> Job:
        """The job of filling `dataset` from the dataset at path `source` under the same root."""
        return cls(
            stage=stage,
            root=dataset.root.url,
            path=dataset.path,
            source=source,
            target=target,
            runtime=runtime,
            compare=compare or [],
        )


class Workers(Protocol):
    """Whoever does a job's units. Safe to call from as many threads as `width`."""

    width: int

    def run(self, units: Sequence, progress: Progress = silent) -> None:
        """Computes and commits those of the units that are not committed yet."""
        ...

    def close(self) -> None:
        """Ends the work: units under way are committed, no further ones are begun."""
        ...


def open_workers(job: Job) -> Workers:
    """One process for each GPU, or this process where there is none; `runtime.device_processes` decides.

    Raises:
        InputError: more processes on GPUs than there are GPUs.
    """
    devices = devices_of(job.runtime, job.stage)
    return DeviceProcesses(job, [first for first, *_ in devices]) if devices else InProcess(job)


def devices_of(runtime: Runtime, stage: str) -> list[list[str]]:
    """The devices of each process that is to be started; empty when this process is to compute."""
    import torch

    from dflash_core.devices import resolve_devices

    count, gpus = runtime.device_processes, torch.cuda.device_count()
    each = runtime.gpus_per_target if stage == "extract" else 1
    if runtime.device not in ("auto", "cuda") or not gpus:
        devices = [str(device) for device in resolve_devices(runtime.device, each)]
        return [devices] * (count or devices[0].startswith("cuda"))
    if max(count, 1) * each > gpus:
        raise InputError(
            f"{max(count, 1)} processes with {each} GPUs each were asked for (device_processes, gpus_per_target), but this "
            f"machine has {gpus} GPUs"
        )
    return [
        [f"cuda:{index * each + further}" for further in range(each)]
        for index in range(count or gpus // each)
    ]


# --- the work itself ---------------------------------------------------------------------------


def _extract(job: Job) -> Work:
    from dflash_core import extraction
    from dflash_core.extractor import Extractor

    dataset, tokens = _datasets(job)
    extractor = Extractor(dataset, tokens, job.target, job.runtime)

    def work(units: Sequence[int], progress: Progress) -> None:
        left = set(extraction.missing(dataset))
        extractor.extract([unit for unit in units if unit in left], progress)

    return work


def _regenerate(job: Job) -> Work:
    from dflash_core.corpus import regeneration
    from dflash_core.generation import LocalAnswerer

    dataset, corpus = _datasets(job)
    answerer = LocalAnswerer(job.target, RegenerateConfig(**dataset.config), job.runtime)

    def work(units: Sequence[str], progress: Progress) -> None:
        left = set(regeneration.missing(dataset))
        todo = [unit for unit in units if unit in left]
        regeneration.answer_units(dataset, corpus, answerer, todo, progress)

    return work


def _evaluate(job: Job) -> Work:
    from dflash_core import evaluation

    dataset, trained = _datasets(job)

    def work(units: Sequence[str], progress: Progress) -> None:
        left = set(evaluation.missing(dataset))
        todo = [unit for unit in units if unit in left]
        evaluation.run(dataset, trained, job.target, job.runtime, todo, progress, job.compare)

    return work


OPEN: dict[str, Callable[[Job], Work]] = {
    "extract": _extract,
    "regenerate": _regenerate,
    "evaluate": _evaluate,
}


def _datasets(job: Job) -> tuple[Dataset, Dataset]:
    root = Storage.from_url(job.root)
    return Dataset.open(root, job.path), Dataset.open(root, job.source)


def smaller(job: Job) -> Job | None:
    """What to try after running out of device memory; None when batches are as small as they get."""
    runtime = job.runtime
    if job.stage == "evaluate":
        return None
    if job.stage == "regenerate":
        if runtime.generate_batch == 1:
            return None
        change: dict = {"generate_batch": runtime.generate_batch // 2}
    elif runtime.forward != "padded":
        change = {"forward": "padded"}
    elif runtime.batch_tokens >= 2 * _LEAST_BATCH_TOKENS:
        change = {"batch_tokens": runtime.batch_tokens // 2}
    else:
        return None
    log.warning("out of device memory; trying %s", change)
    return job.model_copy(update={"runtime": runtime.model_copy(update=change)})


class InProcess:
    """The job's units, computed in this process by one thread at a time."""

    width = 1

    def __init__(self, job: Job) -> None:
        self._job = job
        self._work: Work | None = None

    def run(self, units: Sequence, progress: Progress = silent) -> None:
        """See `Workers`. Loads the target at the first call and keeps it."""
        while True:
            try:
                self._work = self._work or OPEN[self._job.stage](self._job)
                self._work(units, progress)
                return
            except RuntimeError as error:
                less = smaller(self._job) if type(error).__name__ == "OutOfMemoryError" else None
                if less is None:
                    raise
            self._job, self._work = less, None  # outside the handler, whose traceback holds tensors
            _free_device_memory()

    def close(self) -> None:
        """Lets the target go: the next stage needs the memory."""
        self._work = None


def _free_device_memory() -> None:
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- the parent's side -------------------------------------------------------------------------


class DeviceProcesses:
    """One process for each device, each working on one span of units at a time."""

    def __init__(self, job: Job, devices: Sequence[str]) -> None:
        self.width = len(devices)
        self._closed = False
        self._processes = [_Process(job, device, self.width) for device in devices]
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for process in self._processes:
            self._idle.put(process)

    def run(self, units: Sequence, progress: Progress = silent) -> None:
        """See `Workers`. Waits for an idle process.

        Raises:
            DeviceError: the process died, or the device failed; a new one is started at the next call.
            DFlashError: what the process reports, of its own type.
        """
        process = self._idle.get()
        try:
            if self._closed:
                raise DeviceError("the work was stopped")
            process.work(units, progress)
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """See `Workers`. Sends SIGTERM, waits `DRAIN_S`, then kills."""
        self._closed = True
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + DRAIN_S
        for process in self._processes:
            process.end(deadline)


class _Process:
    """One child, started when it is first needed and again after it died."""

    def __init__(self, job: Job, device: str, num_processes: int) -> None:
        self._job = job.model_copy(
            update={"runtime": job.runtime.model_copy(update={"device": device})}
        )
        self._device, self._num_processes = device, num_processes
        self._child: subprocess.Popen[str] | None = None
        self._fresh = False  # it has not been told its job yet

    def work(self, units: Sequence, progress: Progress) -> None:
        child = self._child or self._start()
        try:
            error = self._converse(child, units, progress)
        except BrokenPipeError:
            error = self._death(child)
        except BaseException:
            self.end(time.monotonic())  # it still works on a span that nobody waits for
            raise
        if isinstance(error, DeviceError):
            self.end(time.monotonic())  # dead, or its context is lost; only a new process helps
        if error is not None:
            raise error

    def _converse(
        self, child: subprocess.Popen[str], units: Sequence, progress: Progress
    ) -> Exception | None:
        """Sends a span and listens until it is done; returns what went wrong."""
        if self._fresh:
            _send(child.stdin, self._job.model_dump(mode="json"))
            self._fresh = False
        _send(child.stdin, {"units": list(units)})
        for line in child.stdout or ():
            message = json.loads(line)
            if "progress" in message:
                progress(*message["progress"])
            elif "log" in message:
                log_again(message, f"{self._device}: ")
            elif "error" in message:
                return _error(**message["error"])
            else:
                return None
        return self._death(child)

    def _death(self, child: subprocess.Popen[str]) -> DeviceError:
        code = child.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return DeviceError(f"the process on {self._device} died ({how}); its units are done again")

    def _start(self) -> subprocess.Popen[str]:
        from dflash_core.devices import share_of_threads

        self._child = child = subprocess.Popen(
            [sys.executable, "-m", "dflash_core.device_work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=os.environ | share_of_threads(self._device, self._num_processes),
        )
        self._fresh = True
        return child

    def terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()

    def end(self, deadline: float) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _send(pipe: IO[str] | None, message: dict) -> None:
    assert pipe is not None
    pipe.write(json.dumps(message) + "\n")
    pipe.flush()


def _error(kind: str, text: str) -> Exception:
    passing = {"ConnectionError": ConnectionError, "TimeoutError": TimeoutError}  # worth a retry
    known = getattr(errors, kind, None) or passing.get(kind)
    return known(text) if known else RuntimeError(f"{kind}: {text}")


# --- the child's side --------------------------------------------------------------------------


def main() -> None:
    """Reads a job and then spans of units from stdin; answers on what was stdout."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is for the parent, which ends its children
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a library's print is no message
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    lock = threading.Lock()

    def answer(message: dict) -> None:
        with lock:
            answers.write(json.dumps(message) + "\n")

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")
        os.kill(os.getpid(), signal.SIGTERM)  # the parent is gone: commit what is under way
        time.sleep(DRAIN_S)
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    forward_log(answer)
    _serve(iter(lines.get, ""), answer)


def _serve(lines: Iterable[str], answer: Callable[[dict], None]) -> None:
    workers: InProcess | None = None
    for line in lines:
        message = json.loads(line)
        if workers is None:
            workers = InProcess(Job.model_validate(message))
            continue
        try:
            workers.run(message["units"], lambda *state: answer({"progress": state}))
            answer({"done": True})
        except Exception as error:
            if not isinstance(error, DFlashError):
                log.exception("unexpected")
            kind = "DeviceError" if "CUDA" in str(error) else type(error).__name__
            answer({"error": {"kind": kind, "text": str(error)}})


if __name__ == "__main__":
    main()
