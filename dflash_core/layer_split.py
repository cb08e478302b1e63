"""A target too large for one GPU: a run of its layers on each of several.

While one GPU works on a pack the one before it works on the next, because nobody waits for the device. A copy
between GPUs waits for the work of both, so all that goes from one to the next (the row's states, positions and
lengths, the taps so far) goes together, where the layers change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def stage_of(layer: int, num_layers: int, num_stages: int) -> int:
    """Which run of layers this one belongs to; runs differ by one layer at most."""
    return layer * num_stages // num_layers


def device_map(body: nn.Module, devices: Sequence[torch.device]) -> dict[str, torch.device]:
    """Where each part of a body goes, as `from_pretrained` wants it; the final norm follows the last layer."""
    places: dict[str, torch.device] = {}
    for name, part in body.named_children():
        if name == "layers":
            assert isinstance(part, nn.ModuleList)
            for layer in range(len(part)):
                stage = stage_of(layer, len(part), len(devices))
                places[f"layers.{layer}"] = devices[stage]
        else:
            places[name] = devices[-1 if name == "norm" else 0]
    return places


class LayerSplit:
    """Brings each run of layers what it needs, on its device; hooks stay for as long as the layers live."""

    def __init__(self, layers: nn.ModuleList, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._stage = 0
        self._carried: list[tuple[Tensor, Callable[[Tensor], None]]] = []
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}  # by id: the tensor, and its copy here
        for number, layer in enumerate(layers):
            stage = stage_of(number, len(layers), len(devices))
            enter = partial(self._enter, stage, number == 0)
            layer.register_forward_pre_hook(enter, with_kwargs=True)

    def deliver(self, states: Tensor, put: Callable[[Tensor], None]) -> None:
        """Calls `put` with the states on the last device: at once, or when the forward gets there."""
        if self._stage == len(self._devices) - 1:
            put(states)
        else:
            self._carried.append((states, put))

    def _enter(
        self, stage: int, is_first: bool, layer: nn.Module, args: tuple, options: dict
    ) -> tuple[Any, Any]:
        if is_first:
            self._stage, self._carried = 0, []
        elif stage != self._stage:
            self._stage, self._moved = stage, {}
            carried, self._carried = self._carried, []
            for states, put in carried:
                self.deliver(self._here(states), put)
        if stage == 0:
            return args, options
        return self._all_here(args), self._all_here(options)

    def _all_here(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._here(value)
        if isinstance(value, dict):
            return {key: self._all_here(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(self._all_here(item) for item in value)
        return value

    def _here(self, tensor: Tensor) -> Tensor:
        device = self._devices[self._stage]
        if tensor.device == device:
            return tensor
        if id(tensor) not in self._moved:
            # With the original, so that no other tensor gets its id meanwhile.
            self._moved[id(tensor)] = tensor, tensor.to(device, non_blocking=True)
        return self._moved[id(tensor)][1]
