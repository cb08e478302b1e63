"""Training in processes of their own: torchrun as a child, one process for each GPU.

The child finds everything in the root, like any run: one that died is started again and goes on from
its newest checkpoint. What it has to say comes as lines of JSON on its output. A GPU is trained on in
a child also where it is the only one: a lost CUDA context is gone with it, and so is its memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch

from dflash_core import errors, train
from dflash_core.config import Runtime, TargetConfig
from dflash_core.devices import resolve_device, share_of_threads
from dflash_core.errors import DeviceError, DFlashError, InputError
from dflash_core.manifest import Dataset
from dflash_core.processes import forward_log, log_again
from dflash_core.progress import Progress, silent
from dflash_core.storage import Storage

_MARK = "dflash-train: "  # of the lines that are for us, among those of libraries
_LAST_LINES = 80  # of a child's output, in the error when it dies


def devices_of(runtime: Runtime) -> list[str]:
    """The devices that training takes on this machine. Raises InputError when there are too few."""
    device, count = resolve_device(runtime.device), runtime.train_processes
    if device.type != "cuda" or count == 1:
        return [str(device)]
    if count > torch.cuda.device_count():
        raise InputError(
            f"train_processes is {count} and this machine has {torch.cuda.device_count()} GPUs; each process needs "
            "its own, set train_processes to that number or less"
        )
    return [f"cuda:{rank}" for rank in range(count)]


def run(
    dataset: Dataset,
    hidden: Dataset,
    target: TargetConfig,
    runtime: Runtime,
    progress: Progress | None = None,
    corpus: Dataset | None = None,
) -> None:
    """`train.run`, in `runtime.train_processes` children; for one on a CPU, in this process.

    Raises:
        DFlashError: as in `train.run`.
        DeviceError: a process died; holds the last lines it wrote.
    """
    if runtime.train_processes == 1 and resolve_device(runtime.device).type != "cuda":
        train.run(dataset, hidden, target, runtime, progress, corpus)
        return
    request = {
        "root": dataset.root.url,
        "dataset": dataset.path,
        "hidden": hidden.path,
        "corpus": corpus.path if corpus else "",
        "target": target.model_dump(mode="json"),
        "runtime": runtime.model_dump(mode="json"),
    }
    with tempfile.TemporaryDirectory(prefix="dflash-train-") as folder:
        path = Path(folder) / "request.json"
        path.write_text(json.dumps(request))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(runtime.train_processes), "-m", __name__, str(path)]
        threads = share_of_threads(runtime.device, runtime.train_processes)
        _follow(command, threads, progress or silent)


def _follow(command: list[str], environment: dict[str, str], progress: Progress) -> None:
    last: deque[str] = deque(maxlen=_LAST_LINES)
    failure: DFlashError | None = None
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        env=os.environ | environment,
    )
    try:
        assert child.stdout is not None
        for line in _lines(child.stdout):
            if not line.startswith(_MARK):
                last.append(line)
                continue
            message = json.loads(line.removeprefix(_MARK))
            if "error" in message:
                failure = getattr(errors, message["error"])(message["text"])
            elif "log" in message:
                log_again(message)
            else:
                progress(message["done"], message["total"], message["numbers"])
        code = child.wait()
    finally:
        if child.poll() is None:  # we are being stopped: torchrun stops its processes
            child.terminate()
            child.wait()
    if failure is not None:
        raise failure
    if code:
        raise DeviceError(f"training in processes ended with {code}:\n" + "\n".join(last))


def _lines(output: IO[str]) -> Iterator[str]:
    for line in output:
        yield line.rstrip("\n")


def _say(message: dict) -> None:
    # With its newline in one write: ranks share the pipe, and two may have something to say at once.
    sys.stdout.write(f"{_MARK}{json.dumps(message)}\n")
    sys.stdout.flush()


def main() -> None:
    """One rank; the first one reports."""
    if os.environ["RANK"] == "0":
        forward_log(_say)
    request = json.loads(Path(sys.argv[1]).read_text())
    root = Storage.from_url(request["root"])

    def progress(done: int, total: int, numbers: dict[str, float]) -> None:
        _say({"done": done, "total": total, "numbers": numbers})

    try:
        train.run(
            Dataset.open(root, request["dataset"]),
            Dataset.open(root, request["hidden"]),
            TargetConfig.model_validate(request["target"]),
            Runtime.model_validate(request["runtime"]),
            progress,
            Dataset.open(root, request["corpus"]) if request["corpus"] else None,
        )
    except DFlashError as error:
        _say({"error": type(error).__name__, "text": str(error)})
        raise


if __name__ == "__main__":
    main()
