"""Memory of packs: used again, and never while anything points into it."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from dflash_core.pack_memory import PackMemory

SIZE = 4096


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_memory_that_nothing_points_to_is_used_again():
    memory = PackMemory()
    first = memory.take(SIZE)
    place = address(first)
    del first
    assert address(memory.take(SIZE)) == place


@pytest.mark.parametrize(
    "point_into",
    [
        lambda tensor: tensor[17:],
        lambda tensor: tensor.view(torch.bfloat16).view(2, -1)[1],
        lambda tensor: tensor.numpy()[5:],
        lambda tensor: memoryview(tensor.numpy())[5:],
        lambda tensor: torch.from_numpy(tensor.numpy()),
        lambda tensor: tensor.requires_grad_(False).detach(),
    ],
)
def test_whatever_points_into_it_keeps_it(point_into):
    memory = PackMemory()
    tensor = memory.take(SIZE)
    place = address(tensor)
    kept = point_into(tensor)
    del tensor
    gc.collect()
    others = [memory.take(SIZE) for _ in range(3)]
    assert place not in map(address, others)
    del kept
    assert address(memory.take(SIZE)) == place


def test_blocks_of_another_size_are_not_given_out():
    memory = PackMemory()
    memory.take(SIZE).fill_(1)
    assert memory.take(2 * SIZE).shape == (2 * SIZE,)


def test_threads_never_share_a_block():
    memory, wrong = PackMemory(), []

    def work(mark: int) -> None:
        for _ in range(300):
            tensor = memory.take(SIZE).fill_(mark)
            if not (tensor == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_tensors_outlive_their_source():
    memory = PackMemory()
    tensor = memory.take(SIZE).fill_(7)
    del memory
    gc.collect()
    assert (tensor == 7).all()
