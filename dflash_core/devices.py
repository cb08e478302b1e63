"""Which device, and small copies to it that nothing waits for."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_core.errors import InputError


def resolve_device(device: str) -> torch.device:
    """`auto` takes a GPU when there is one. Raises InputError for a device that is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise InputError(
            f"device {device!r} is not known; expected auto, cpu, cuda or cuda:1"
        ) from error
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        raise InputError(
            f"device {device!r} is not there: torch {torch.__version__} sees {count} CUDA devices"
        )
    return found


def resolve_devices(device: str, count: int) -> list[torch.device]:
    """The device and the `count - 1` GPUs after it. Raises InputError for one that is not there."""
    first = resolve_device(device)
    if count == 1:
        return [first]
    if first.type != "cuda":
        raise InputError(
            f"gpus_per_target is {count}, which needs GPUs; the device is {first.type}"
        )
    start = first.index or 0
    return [resolve_device(f"cuda:{index}") for index in range(start, start + count)]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy of host memory on the device, in the order of its stream.

    A copy from memory that is not page-locked first waits for all that was launched before it.
    """
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def share_of_threads(device: str, processes: int) -> dict[str, str]:
    """Environment of one of several processes that compute side by side: on a CPU, its part of the threads.

    With all threads in each process they wait for one another, and small models take ten times as long.
    """
    if resolve_device(device).type != "cpu":
        return {}
    return {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // processes))}
