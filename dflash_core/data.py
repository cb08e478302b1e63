"""Which packs a training step reads, and reading them ahead of it.

The position in the data is the step number and nothing else: which packs step s reads follows from the
seed and s, so a resumed run reads what the unbroken one would have read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dflash_core.config import Runtime
from dflash_core.devices import to_device
from dflash_core.packing import Pack

CPU = torch.device("cpu")


class PackReader(Protocol):
    """What training needs of a hidden-state store; safe to read from several threads."""

    @property
    def num_packs(self) -> int: ...

    @property
    def pack_bytes(self) -> int:
        """Memory of one pack's hidden states."""
        ...

    def read_pack(self, index: int) -> tuple[Pack, Tensor]:
        """The pack and its hidden states, bfloat16 [T, L, H]."""


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, num_packs: int) -> np.ndarray:
    """Order of the packs in an epoch, a permutation of 0 .. num_packs - 1.

    Sorts raw words of a bit generator, whose stream numpy guarantees for all versions; it does not for
    `permutation`.
    """
    words = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_packs)
    return np.argsort(words, kind="stable")


def packs_of_step(
    seed: int, step: int, packs_per_step: int, num_packs: int, visits_per_pack: int = 1
) -> list[int]:
    """Packs of step `step` (0-based), in order: those of `visits_per_pack` steps in a row are the same.

    A step may straddle two epochs.
    """
    first = step // visits_per_pack * packs_per_step
    return [
        int(epoch_order(seed, read // num_packs, num_packs)[read % num_packs])
        for read in range(first, first + packs_per_step)
    ]


def reads(
    seed: int, steps: range, packs_per_step: int, num_packs: int, visits_per_pack: int, share: slice
) -> Iterator[int]:
    """Packs to read for `steps`, in order, each once for all the steps in a row that visit it.

    Args:
        share: which of a step's packs are read here; the others are other ranks'.
    """
    for step in steps:
        if step == steps.start or step % visits_per_pack == 0:
            yield from packs_of_step(seed, step, packs_per_step, num_packs, visits_per_pack)[share]


def visits(
    packs: Iterator[tuple[Pack, Tensor]], steps: range, packs_per_step: int, visits_per_pack: int
) -> Iterator[tuple[Pack, Tensor]]:
    """What `steps` visit, from packs in the order of `reads`.

    Args:
        packs_per_step: packs of a step that are read here; all are held when they are visited again.
    """
    if visits_per_pack == 1:
        yield from packs
        return
    held: list[tuple[Pack, Tensor]] = []
    for step in steps:
        if step == steps.start or step % visits_per_pack == 0:
            held.clear()
            held.extend(islice(packs, packs_per_step))
        yield from held


def packs_ahead(store: PackReader, runtime: Runtime) -> int:
    """Packs to read ahead: one for each thread, within `Runtime.prefetch_bytes`, at least one."""
    return max(1, min(runtime.reader_threads, runtime.prefetch_bytes // store.pack_bytes))


@contextmanager
def read_ahead(
    store: PackReader,
    indices: Iterable[int],
    num_ahead: int,
    device: torch.device = CPU,
) -> Generator[Iterator[tuple[Pack, Tensor]]]:
    """An iterator over the packs `indices`, in order, that threads read before they are asked for.

    At most `num_ahead` packs are read or being read beyond the one in use. An error of a reader
    is raised where its pack would have come. Leaving the context drops what nobody asked for.

    The readers also copy the states to a GPU, each on a stream of its own from page-locked memory, so
    that a step waits for neither (8 ms of it for 420 MB, on an H200).
    """

    def read(index: int) -> tuple[Pack, Tensor]:
        pack, hidden_TLH = store.read_pack(index)
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)
            with torch.cuda.stream(stream):
                hidden_TLH = to_device(hidden_TLH, device)
            stream.synchronize()
        return pack, hidden_TLH

    pool = ThreadPoolExecutor(num_ahead, thread_name_prefix="read-pack")
    try:
        yield _in_order(pool, read, iter(indices), num_ahead)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _in_order(
    pool: ThreadPoolExecutor,
    read: Callable[[int], tuple[Pack, Tensor]],
    indices: Iterator[int],
    num_ahead: int,
) -> Iterator[tuple[Pack, Tensor]]:
    waiting: deque[Future] = deque()

    def submit_next() -> None:
        for index in indices:
            waiting.append(pool.submit(read, index))
            return

    for _ in range(num_ahead):
        submit_next()
    while waiting:
        pack, hidden_TLH = waiting.popleft().result()
        if hidden_TLH.is_cuda:  # its memory was of the reader's stream, and this one uses it now
            hidden_TLH.record_stream(torch.cuda.current_stream(hidden_TLH.device))
        submit_next()
        yield pack, hidden_TLH
        del hidden_TLH  # else it would stay alive while the next one is awaited
