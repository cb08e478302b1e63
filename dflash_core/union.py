"""Several hidden-state stores read as one: a corpus that grows, or one too large for a single store.

A union is a sealed dataset of the hidden stage without states of its own: it names the stores, whose packs it
counts through in the order of their paths. New rows become a new store and a new union; nothing that was
computed is touched.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import re
from typing import Any

from torch import Tensor

from dflash_core.config import NAME
from dflash_core.errors import InputError
from dflash_core.extraction import read_kernels
from dflash_core.hidden_states import HiddenStates
from dflash_core.manifest import Dataset, require_same
from dflash_core.pack_memory import PackMemory
from dflash_core.packing import Pack
from dflash_core.storage import Storage

STAGE, VERSION = "hidden", 1
_OWN = "tokens"  # the one field of a contract that stores of a union need not share


def unite(root: Storage, name: str, paths: list[str]) -> Dataset:
    """The union of complete stores under one root; unions among them count as their stores.

    Raises:
        InputError: fewer than two stores, or a name that no folder should have.
        IncompleteError: one is not complete.
        MismatchError: they differ in target, tokenizer, template, taps, types or tokens of a pack.
    """
    if not re.match(NAME, name):
        raise InputError(f"a union cannot be called {name!r}; expected letters, digits and . _ -")
    given = [Dataset.open(root, path).require_stage(STAGE) for path in paths]
    parts = sorted({path for dataset in given for path in parts_of(dataset) or [dataset.path]})
    if len(parts) < 2:
        raise InputError(f"a union needs two stores or more, and {paths} holds {len(parts)}")
    datasets = [Dataset.open(root, path).require_stage(STAGE) for path in parts]
    stores = [HiddenStates.open(dataset) for dataset in datasets]
    advice = "unite stores that were extracted from one target with the same settings"
    for store in stores[1:]:
        what = f"store {store.dataset.path}, beside {stores[0].dataset.path},"
        require_same(what, _shared(stores[0]), _shared(store), advice)
    inputs = {dataset.path: dataset.fingerprint for dataset in datasets}
    union = Dataset.create(
        root, STAGE, name, version=VERSION, config={"union": parts}, inputs=inputs
    )
    facts = {
        "num_packs": sum(store.num_packs for store in stores),
        "num_samples": sum(len(store.start) for store in stores),
        "contract": _contract(stores[0]),
    }
    union.seal([], facts)
    return union


def parts_of(dataset: Dataset) -> list[str]:
    """Paths of the stores of a union; empty for a store."""
    return dataset.config.get("union", [])


def open_states(dataset: Dataset, **options: Any) -> HiddenStates | UnitedStates:
    """A store, or a union of some, for training; `options` are those of `HiddenStates.open`."""
    parts = parts_of(dataset)
    if not parts:
        return HiddenStates.open(dataset, **options)
    datasets = [Dataset.open(dataset.root, path).require_stage(STAGE) for path in parts]
    memory = PackMemory()
    return UnitedStates([HiddenStates.open(part, memory=memory, **options) for part in datasets])


class UnitedStates:
    """Packs of several stores under one numbering. Safe to use from threads.

    Attributes:
        contract: what the stores share.
    """

    def __init__(self, stores: list[HiddenStates]) -> None:
        first = stores[0]
        self._stores = stores
        self._firsts = [0, *itertools.accumulate(store.num_packs for store in stores)]
        self.contract = _contract(first)
        self.pack_tokens, self.pack_bytes = first.pack_tokens, first.pack_bytes
        self.hidden_size, self.num_taps = first.hidden_size, first.num_taps

    @property
    def num_packs(self) -> int:
        return self._firsts[-1]

    def read_pack(self, index: int) -> tuple[Pack, Tensor]:
        """See `HiddenStates.read_pack`; the pack's `index` is the union's, its `samples` are its store's."""
        store = bisect.bisect_right(self._firsts, index) - 1
        pack, hidden_TLH = self._stores[store].read_pack(index - self._firsts[store])
        return dataclasses.replace(pack, index=index), hidden_TLH


def _contract(store: HiddenStates) -> dict:
    return {key: value for key, value in store.contract.items() if key != _OWN}


def _shared(store: HiddenStates) -> dict:
    layout = store.layout
    return {
        **_contract(store),
        "kernels": read_kernels(store.dataset),
        "pack_tokens": layout.pack_tokens,
        "last": layout.last,
        "teacher_top_k": layout.teacher_top_k,
    }
