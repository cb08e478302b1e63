"""Checkpoints of a training run: written whole, believed by their commit record, pruned by rule.

A checkpoint is the unit `step-<8 digits>` of a run. Its record names the objects that hold the drafter
(float32), the averages of its weights where the run keeps them, the optimiser's state and the drafter's
shape, and the metrics of the steps since the one before. Tensors are safetensors objects of about a
gigabyte, because a store takes no more than 5 GB in one request.

Of the committed checkpoints the untrained one and the newest `keep_checkpoints` are readable; the
objects of the others are deleted, their records and metrics stay. The rule alone says which ones those
are, so nothing ever looks for a deleted object.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from dflash_core.errors import CorruptError, IncompleteError, InputError
from dflash_core.manifest import Dataset, canonical_json, sha256
from dflash_core.model import Drafter, DrafterShape
from dflash_core.optim import AVERAGE
from dflash_core.ranks import is_sharded, whole

_FOLDER = "checkpoints"
_OBJECT_BYTES = 2**30


def unit_of(step: int) -> str:
    """Name of the checkpoint after `step` optimiser steps; `step-00000000` is untrained."""
    return f"step-{step:08d}"


def committed_steps(run: Dataset) -> list[int]:
    """Steps with a checkpoint, rising, those that were pruned since included."""
    return sorted(_step_of(unit) for unit in run.committed())


def newest_step(run: Dataset) -> int:
    """Step of the newest checkpoint. Raises IncompleteError when there is none."""
    steps = committed_steps(run)
    if not steps:
        raise IncompleteError(f"{run.url} has no checkpoint yet; run the train stage first")
    return steps[-1]


def readable_steps(run: Dataset) -> list[int]:
    """Steps whose checkpoint can be loaded, rising."""
    return _readable(run, committed_steps(run))


def save_checkpoint(
    run: Dataset,
    step: int,
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    metrics: list[dict],
    *,
    writes: bool = True,
) -> None:
    """Writes and commits the checkpoint after `step` steps, then prunes.

    Args:
        metrics: one entry per step since the checkpoint before, JSON values.
        writes: false for all ranks but one; ranks that hold parts of the tensors must all call this.
    """
    state, averages = _flat_state(drafter, optimizer), _averages(drafter, optimizer)
    if not writes:
        for tensor in (*drafter.state_dict().values(), *state.values(), *averages.values()):
            whole(tensor)
        return
    folder = f"{_FOLDER}/{unit_of(step)}"
    lines = "".join(canonical_json(entry) + "\n" for entry in metrics)
    record = {
        "step": step,
        "drafter": _put_tensors(run, f"{folder}/drafter", drafter.state_dict()),
        "optimizer": _put_tensors(run, f"{folder}/optimizer", state),
        "config": _put(run, f"{folder}/config", ".json", _shape_json(drafter.shape)),
        "metrics": _put(run, f"metrics/{unit_of(step)}", ".jsonl", lines.encode()),
    }
    if averages:
        record["average"] = _put_tensors(run, f"{folder}/average", averages)
    run.commit(unit_of(step), record)
    prune(run)


def prune(run: Dataset) -> None:
    """Deletes the objects of checkpoints that are no longer readable, and what crashes left of them."""
    steps = committed_steps(run)
    keep = {unit_of(step) for step in _readable(run, steps)}
    old = {unit_of(step) for step in steps} - keep
    keys = [info.key for info in run.storage.list(_FOLDER) if info.key.split("/")[1] in old]
    if keys:
        run.storage.delete(keys)


def load_drafter(
    run: Dataset, step: int | None = None, *, averaged: bool = True
) -> tuple[Drafter, DrafterShape, int]:
    """The drafter after `step` steps, or the newest: float32, on the CPU; with its shape and step.

    Args:
        averaged: with the averages of its weights, where the run keeps them; false for those that
            training goes on with.

    Raises:
        InputError: there is no such checkpoint, or it was pruned.
        IncompleteError: the run has none yet.
        CorruptError: an object is missing or altered.
    """
    if step is None:
        step = newest_step(run)
    readable = readable_steps(run)
    if step not in readable:
        raise InputError(
            f"{run.path} has no readable checkpoint of step {step}; choose one of {readable}"
        )
    record = run.record(unit_of(step))
    shape = read_shape(run, step)
    with torch.device("meta"):
        drafter = Drafter(shape)
    # Copied into memory of torch's own: on the CPU the last bits of a product depend on alignment.
    drafter = drafter.to_empty(device="cpu")
    own = record.get("average") if averaged else None
    drafter.load_state_dict(_get_tensors(run, own or record["drafter"]))
    return drafter, shape, step


def read_shape(run: Dataset, step: int) -> DrafterShape:
    """The drafter's shape, from the checkpoint after `step` steps, which must be readable."""
    values: dict[str, Any] = json.loads(_get(run, run.record(unit_of(step))["config"]))
    values["target_layer_ids"] = tuple(values["target_layer_ids"])
    return DrafterShape(**values)


def restore_optimizer(
    run: Dataset, step: int, drafter: Drafter, optimizer: torch.optim.Optimizer
) -> None:
    """Gives `optimizer`, made over the parameters of `drafter`, its state after `step` steps."""
    record = run.record(unit_of(step))
    tensors = _get_tensors(run, record["optimizer"])
    averages = _get_tensors(run, record.get("average", []))
    tensors |= {f"{name}:{AVERAGE}": average for name, average in averages.items()}
    parameters: dict[str, Any] = dict(drafter.named_parameters())
    for name, tensor in tensors.items():
        parameter_name, _, field = name.rpartition(":")
        parameter = parameters[parameter_name]
        tensor = tensor.to(parameter.device, copy=True)
        if is_sharded(parameter) and tensor.ndim:
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = parameter.device_mesh, parameter.placements
            tensor = distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        optimizer.state[parameter][field] = tensor


def read_metrics(run: Dataset) -> list[dict]:
    """One entry per step from the first to the newest checkpoint; see `train` for the fields."""
    records = run.records()
    texts = [_get(run, record["metrics"]).decode() for record in records.values()]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def shape_as_json(shape: DrafterShape) -> dict:
    """The shape as JSON values; `DrafterShape(**values)` with a tuple of taps is its inverse."""
    return {**asdict(shape), "target_layer_ids": list(shape.target_layer_ids)}


def _readable(run: Dataset, steps: list[int]) -> list[int]:
    newest = steps[-run.config["keep_checkpoints"] :]
    return sorted({*steps[:1], *newest})


def _step_of(unit: str) -> int:
    return int(unit.removeprefix("step-"))


def _flat_state(drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's tensors, named `<parameter>:<field>`; empty before the first step.

    Without the averages, which others read. In the same order on every rank, also after a restart: ranks
    put tensors together one by one.
    """
    return {
        f"{name}:{field}": tensor
        for name, parameter in drafter.named_parameters()
        for field, tensor in sorted(optimizer.state.get(parameter, {}).items())
        if field != AVERAGE
    }


def _averages(drafter: Drafter, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The averages of the weights by the names of these; empty where there are none, or none yet."""
    return {
        name: optimizer.state[parameter][AVERAGE]
        for name, parameter in drafter.named_parameters()
        if AVERAGE in optimizer.state.get(parameter, {})
    }


def _shape_json(shape: DrafterShape) -> bytes:
    return canonical_json(shape_as_json(shape)).encode()


def _put(run: Dataset, folder: str, suffix: str, data: bytes) -> dict:
    key = run.storage.put_fresh(folder, suffix, data)
    return {"key": key, "size": len(data), "sha256": sha256(data)}


def _get(run: Dataset, reference: dict) -> bytes:
    key = reference["key"]
    try:
        data = run.storage.get(key)
    except FileNotFoundError as error:
        raise CorruptError(
            f"{run.url}/{key} is missing although its checkpoint is committed"
        ) from error
    if sha256(data) != reference["sha256"]:
        raise CorruptError(
            f"{run.url}/{key} is not what was written: {len(data)} bytes of {reference['size']}, "
            "or altered ones; load another checkpoint"
        )
    return data


def _put_tensors(run: Dataset, folder: str, tensors: dict[str, Tensor]) -> list[dict]:
    groups = _grouped(tensors.items())
    return [_put(run, folder, ".safetensors", save(group)) for group in groups]


def _grouped(tensors: Iterable[tuple[str, Tensor]]) -> Iterable[dict[str, Tensor]]:
    """The tensors on the CPU, in order, cut into groups of about `_OBJECT_BYTES`."""
    group: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        group[name] = whole(tensor).detach().cpu().contiguous()
        size += tensor.nbytes
        if size >= _OBJECT_BYTES:
            yield group
            group, size = {}, 0
    if group:
        yield group


def _get_tensors(run: Dataset, references: list[dict]) -> dict[str, Tensor]:
    return {
        name: tensor
        for reference in references
        for name, tensor in load(_get(run, reference)).items()
    }
