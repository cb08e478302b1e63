"""The processes of a training run: one, or several that torchrun started, each with packs of its own.

Gradients, losses and counts are sums over packs, so ranks add them and nothing is averaged: a step of
several ranks is the step of one rank over all their packs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dflash_core.model import MLP, Drafter

if TYPE_CHECKING:
    from dflash_core.optim import Optimizer


# Of ranks for the first one, which writes checkpoints, tens of gigabytes, to a bucket that may be away meanwhile.
_LONGEST_WAIT = timedelta(hours=2)


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """The first rank alone writes."""
        return self.rank == 0

    def add(self, values: Tensor) -> Tensor:
        """The sum over the ranks; every rank gets it."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def wait(self) -> None:
        """Returns when every rank is here."""
        if self.size > 1:
            dist.barrier()


ALONE = Ranks()


@contextmanager
def joined(device: torch.device) -> Generator[tuple[Ranks, torch.device]]:
    """The ranks that torchrun started, or this process alone; and the device of this rank."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE, device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=_LONGEST_WAIT)
    try:
        yield Ranks(dist.get_rank(), size), device
    finally:
        dist.destroy_process_group()


def shard(drafter: Drafter) -> None:
    """FSDP2: every rank keeps a part of each parameter in float32 and computes with all of them.

    Each MLP is a group of its own, gathered and reduced beside the work on the others: three quarters of
    the parameters. The rest is one group, because keys and values of the context are made for all layers
    at once. All stay gathered until backward is done: 3.5 GB in bfloat16 for 1.73 B parameters. Gradients
    are added in the type in which backward makes them, as `GradientSums` does.
    """
    from torch.distributed.fsdp import (
        MixedPrecisionPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    on_gpu = next(drafter.parameters()).is_cuda
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if on_gpu else None, cast_forward_inputs=False
    )
    mlps = [module for module in drafter.modules() if isinstance(module, MLP)]
    for module in (*mlps, drafter):
        fully_shard(module, mp_policy=policy, reshard_after_forward=False)
    register_fsdp_forward_method(drafter, "forward_pack")
    for group in _groups(drafter):
        # A sum over the ranks, not a mean.
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(not on_gpu)


@contextmanager
def gathered(drafter: Drafter) -> Generator[None]:
    """Every rank has all parameters meanwhile; nothing changes when they are not sharded."""
    groups = _groups(drafter)
    for group in groups:
        group.unshard()
    try:
        yield
    finally:
        for group in groups:
            group.reshard()


def _groups(drafter: Drafter) -> list[Any]:
    # Known by what they can do: the class takes a second to import, also where nothing is sharded.
    return [module for module in drafter.modules() if hasattr(module, "unshard")]


def is_sharded(tensor: Any) -> bool:
    """Whether each rank holds a part of it: a DTensor, whose import would take a second."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Any) -> Tensor:
    """The tensor; put together where each rank holds a part, which all ranks must ask for."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def own_part(tensor: Any) -> Tensor:
    """What this rank holds of the tensor, in the same memory: all of it, or its part."""
    return tensor.to_local() if is_sharded(tensor) else tensor


class GradientSums:
    """Adds each gradient over the ranks as soon as backward has made it, while it makes the others.

    With several packs a step it also moves gradients of bfloat16 weights to float32 sums.
    """

    def __init__(self, optimizer: Optimizer, ranks: Ranks, *, accumulates: bool) -> None:
        self._optimizer, self._ranks, self.accumulates = optimizer, ranks, accumulates
        self._running: list[dist.Work] = []
        self.is_last_pack = True
        for parameter, copied in optimizer.copies.items():
            copied.register_post_accumulate_grad_hook(functools.partial(self._made, parameter))

    def _made(self, parameter: nn.Parameter, copied: Tensor) -> None:
        if self.accumulates:
            self._optimizer.accumulate(parameter)
        if self.is_last_pack and self._ranks.size > 1:
            work = dist.all_reduce(self._optimizer.gradient(parameter), async_op=True)
            assert work is not None
            self._running.append(work)

    def wait(self) -> None:
        """Returns when all sums are made; on a GPU, when what is launched next will see them."""
        for work in self._running:
            work.wait()
        self._running.clear()
