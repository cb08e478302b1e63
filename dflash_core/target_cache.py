"""Takes back rows that a target has already written into its cache.

Verifying a draft runs the target over rows of which some are rejected. Transformers can drop rows only
from layers that keep every key and value: a sliding layer has thrown old entries away, a recurrent layer
has folded the rejected rows into its state. So the state is kept before each verify forward and put back
after it. What that costs depends on the layers:

    full attention                      nothing: the last rows are cut off
    sliding attention                   nothing: old entries are still held by reference
    recurrent and convolution states    a copy per verify forward, and the accepted rows are run again

Written against the layers' attributes: `crop` changed its meaning between Transformers 5.17 and 5.20,
and its recording mode does not cover recurrent states (huggingface/transformers#49036).
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import Cache

# Attributes that every update replaces by a longer tensor and never writes into, with the dimension
# that grows. Anything else may be written in place (convolution and recurrent states are) and is copied.
_GROWING = {"keys": -2, "values": -2}


class Snapshot:
    """The state of a cache before a forward of which some rows may be rejected.

    Good for one `rollback`, after exactly one forward. Batch size 1.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._length = int(cache.get_seq_length())
        self._saved = [_saved_state(layer) for layer in cache.layers]

    def rollback(self, num_keep: int) -> bool:
        """Leaves the cache as if only the first `num_keep` rows of that forward had been run.

        Returns:
            True when it does. False when some layer cannot drop rows: then the cache is back at the
            snapshot, and the caller has to run those rows again.
        """
        num_rows = int(self._cache.get_seq_length()) - self._length
        assert 0 <= num_keep <= num_rows, (num_keep, num_rows)
        if num_keep == num_rows:
            return True
        layers = self._cache.layers
        # A layer that did not exist at the snapshot has seen the rejected rows only.
        del layers[len(self._saved) :]
        pairs = list(zip(layers, self._saved, strict=True))
        if all(_can_drop_rows(layer, saved, num_rows) for layer, saved in pairs):
            for layer, saved in pairs:
                _drop_rows(layer, saved, num_rows, num_keep)
            return True
        for layer, saved in pairs:
            _restore(layer, saved)
        return num_keep == 0


@functools.cache
def cache_name(kind: type) -> str:
    """What models of this class call their cache; Transformers is renaming it and warns about the old name."""
    names = inspect.signature(kind.forward).parameters  # ty: ignore[missing-attribute]
    return "cache" if "cache" in names else "past_key_values"


def _saved_state(layer: Any) -> dict[str, Any]:
    """Everything a forward may change in a layer: growing tensors by reference, the rest copied."""
    from transformers.cache_utils import DynamicLayer

    grows = isinstance(layer, DynamicLayer)  # static layers write into their keys and values
    return {
        name: value if grows and name in _GROWING else _copy(value)
        for name, value in vars(layer).items()
    }


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value


def _restore(layer: Any, saved: dict[str, Any]) -> None:
    """Puts the saved attributes back; attributes that appeared since are dropped."""
    vars(layer).clear()
    vars(layer).update(saved)


def _can_drop_rows(layer: Any, saved: dict[str, Any], num_rows: int) -> bool:
    """Whether a layer's state is its keys and values only, and still holds those of the last rows."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    if type(layer) is DynamicSlidingWindowLayer:
        return saved["is_initialized"] and num_rows < layer.sliding_window
    return type(layer) is DynamicLayer


def _drop_rows(layer: Any, saved: dict[str, Any], num_rows: int, num_keep: int) -> None:
    """Old entries from the snapshot, then the first `num_keep` of the last `num_rows`."""
    if not layer.is_initialized:  # a layer that shares another's keys and values
        return
    window = getattr(layer, "sliding_window", None)
    for name, dim in _GROWING.items():
        now = getattr(layer, name)
        first_new = now.shape[dim] - num_rows
        if window is None:
            kept = now.narrow(dim, 0, first_new + num_keep)
        else:
            kept = torch.cat((saved[name], now.narrow(dim, first_new, num_keep)), dim)
            kept = kept[..., -window + 1 :, :]
        setattr(layer, name, kept)
    if window is not None:
        layer.cumulative_length = saved["cumulative_length"] + num_keep
