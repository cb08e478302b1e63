"""Host memory of packs, used again instead of being asked for anew.

A GB of fresh memory costs a quarter to half a second of page faults in small pages, as much as its bytes take from a
server, and no less where a virtual machine's host has to find the memory, too.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque

import numpy as np
import torch
from torch import Tensor


class PackMemory:
    """Gives out memory that comes back by itself when no tensor, view or array points to it any more.

    Keeps as many blocks of a size as were in use at once. Safe to use from threads.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, deque[np.ndarray]] = defaultdict(deque)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] with any content."""
        free = self._free[num_bytes]
        try:
            block = free.pop()
        except IndexError:
            block = np.empty(num_bytes, np.uint8)  # in large pages, where numpy knows how
        # Whatever points into the tensor's memory keeps this one alive.
        view = block.view()
        weakref.finalize(view, free.append, block).atexit = False
        return torch.from_numpy(view)
