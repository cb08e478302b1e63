"""Trains a drafter on stored hidden states: one resumable loop from step 0 to the last.

Everything random follows from the seed and the step number (pack order, anchors) or is in a checkpoint
(weights, optimiser), so a run that was interrupted ends with the same bits on the CPU as one that was
not. A checkpoint is the unit of work; what was done since the last one is done again.

Shape letters: B sequences, T rows of a pack, N anchors, K block slots, L taps, H hidden size, C = L * H,
V vocabulary.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_core.blocks import Blocks, attention_masks, build_blocks, sample_anchors
from dflash_core.checkpoint import (
    committed_steps,
    load_drafter,
    read_metrics,
    read_shape,
    restore_optimizer,
    save_checkpoint,
    shape_as_json,
    unit_of,
)
from dflash_core.config import DrafterConfig, Runtime, TargetConfig, TrainConfig
from dflash_core.data import packs_of_step, read_ahead
from dflash_core.errors import DFlashError, InputError, MismatchError
from dflash_core.loss import SlotCounts, weighted_loss
from dflash_core.manifest import Dataset, require_same, sha256
from dflash_core.model import Drafter, DrafterShape, resolve_shape
from dflash_core.packing import Pack
from dflash_core.progress import Progress, silent
from dflash_core.storage import Storage

if TYPE_CHECKING:
    from dflash_core.hidden_states import HiddenStates

log = logging.getLogger(__name__)

STAGE, VERSION = "runs", 1
_BETAS = (0.9, 0.95)
_SUMMARY_STEPS = 100  # last steps that the manifest's averages cover


def plan(
    root: Storage, name: str, hidden: Dataset, target: TargetConfig, config: TrainConfig
) -> Dataset:
    """The run of this request, new or continued, after checking that its inputs fit each other.

    Raises:
        MismatchError: the hidden states come from another target.
        InputError: the drafter cannot have the shape that `config` asks for.
        IncompleteError: the hidden states are not complete.
    """
    from dflash_core.hidden_states import HiddenStates

    store = HiddenStates.open(hidden.require_stage("hidden"))
    _resolve(store, target, config)
    inputs = {"hidden": hidden.fingerprint}
    return Dataset.create(root, STAGE, name, version=VERSION, config=config, inputs=inputs)


def units(config: TrainConfig) -> list[str]:
    """Every checkpoint of a run, in order: untrained, each interval, the end."""
    regular = range(0, config.num_steps, config.checkpoint_every)
    return [unit_of(step) for step in (*regular, config.num_steps)]


def missing(dataset: Dataset) -> list[str]:
    """Checkpoints without a commit record, in order; the last one there is says where to go on."""
    committed = committed_steps(dataset)
    newest = unit_of(committed[-1]) if committed else ""
    return [unit for unit in units(_config(dataset)) if unit > newest]


def run(
    dataset: Dataset,
    hidden: Dataset,
    target: TargetConfig,
    runtime: Runtime,
    progress: Progress | None = None,
) -> None:
    """Trains from the newest checkpoint to the last step, committing a checkpoint per interval.

    Args:
        progress: called after every step with steps done, steps in all, and loss, acceptance_length,
            tokens_per_s.

    Raises:
        DFlashError: a loss or gradient is not finite; names step and packs, and nothing is committed.
    """
    from dflash_core.hidden_states import HiddenStates
    from dflash_core.object_cache import ObjectCache

    if not missing(dataset):
        return
    config = _config(dataset)
    store = HiddenStates.open(hidden.require_stage("hidden"), cache=ObjectCache.of(runtime))
    trainer = _start(dataset, store, target, config, runtime)
    report = progress or silent
    steps = range(trainer.step, config.num_steps)
    order = (
        pack
        for step in steps
        for pack in packs_of_step(config.seed, step, config.packs_per_step, store.num_packs)
    )
    metrics: list[dict] = []
    pin = trainer.device.type == "cuda"
    with read_ahead(store, order, runtime.prefetch_packs, pin_memory=pin) as packs:
        for _ in steps:
            entry = trainer.train_step(packs)
            metrics.append(entry)
            shown = ("loss", "acceptance_length", "tokens_per_s")
            report(trainer.step, config.num_steps, {name: entry[name] for name in shown})
            if trainer.step % config.checkpoint_every == 0 or trainer.step == config.num_steps:
                save_checkpoint(dataset, trainer.step, trainer.drafter, trainer.optimizer, metrics)
                log.info("step %d: loss %.4f, committed", trainer.step, entry["loss"])
                metrics = []


def seal(dataset: Dataset, hidden: Dataset) -> dict:
    """The manifest, written once every checkpoint is committed; averages are over the last 100 steps."""
    from dflash_core.hidden_states import HiddenStates

    config = _config(dataset)
    if missing(dataset):
        return dataset.seal(units(config), {})  # raises, naming what is missing
    shape = read_shape(dataset, config.num_steps)
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in Drafter(shape).parameters())
    last = read_metrics(dataset)[-_SUMMARY_STEPS:]
    facts = {
        "num_steps": config.num_steps,
        "num_parameters": num_parameters,
        "shape": shape_as_json(shape),
        "contract": HiddenStates.open(hidden).contract,
        "loss": sum(entry["loss"] for entry in last) / len(last),
        "acceptance_length": sum(entry["acceptance_length"] for entry in last) / len(last),
    }
    return dataset.seal(units(config), facts)


class Trainer:
    """Drafter, optimiser and the target's frozen ends, with the step they are at.

    Args:
        drafter: float32 weights, on the device.
        embedding_VH, head_VH: the target's, on the device; computed with in their own type.
        step: optimiser steps behind it.
    """

    def __init__(
        self,
        drafter: Drafter,
        embedding_VH: Tensor,
        head_VH: Tensor,
        config: TrainConfig,
        step: int = 0,
    ) -> None:
        self.drafter = drafter
        self.optimizer = make_optimizer(drafter, config)
        self.step = step
        self._embedding_VH, self._head_VH = embedding_VH, head_VH
        self._config = config
        self.device = embedding_VH.device

    def train_step(self, packs: Iterator[tuple[Pack, Tensor]]) -> dict[str, Any]:
        """One optimiser step over the next `packs_per_step` packs.

        Gradients of sums are added over the packs and divided once by the sum of all weights, so the
        result is that of one large batch, and only one pack's hidden states are held at a time.

        Returns:
            Metrics: step (1-based), loss, acceptance_length, accuracy of each slot from 1 on, grad_norm,
            learning_rate, packs, tokens_per_s (context rows and block slots) and wait_s for input.
        """
        start, waited, tokens, indices = time.perf_counter(), 0.0, 0, []
        total, counts = torch.zeros((), device=self.device), None
        asked = time.perf_counter()
        for slot, (pack, hidden_TLH) in enumerate(islice(packs, self._config.packs_per_step)):
            waited += time.perf_counter() - asked
            blocks = self._blocks(pack, slot)
            loss, pack_counts = self.pack_loss(pack, hidden_TLH, blocks)
            loss.backward()
            total += loss.detach()
            counts = pack_counts if counts is None else counts + pack_counts
            tokens += pack.num_tokens + blocks.labels_NK.numel()
            indices.append(pack.index)
            asked = time.perf_counter()
        assert counts is not None, "the reader ended before the run did"
        mean, norm, rate = self._update(total, counts, indices)
        return {
            "step": self.step,
            "loss": mean,
            "acceptance_length": counts.acceptance_length(),
            "accuracy": counts.accuracy(),
            "grad_norm": norm,
            "learning_rate": rate,
            "packs": indices,
            "tokens_per_s": tokens / (time.perf_counter() - start),
            "wait_s": waited,
        }

    def pack_loss(
        self, pack: Pack, hidden_TLH: Tensor, blocks: Blocks
    ) -> tuple[Tensor, SlotCounts]:
        """Weighted sum of the cross-entropies of a pack's blocks, with its graph, and the counts."""
        shape, device = self.drafter.shape, self.device
        blocks = blocks.to(device)
        documents_T = torch.tensor(pack.document_ids, device=device)
        positions_T = torch.tensor(pack.positions, device=device)
        masks = attention_masks(shape, blocks.anchors_N, blocks.documents_N, documents_T)
        taps_BTC = hidden_TLH.to(device).flatten(1)[None]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            context = self.drafter.project_context(taps_BTC, positions_T[None])
            # The residual stream stays float32, also where the embedding is bfloat16.
            embeds = F.embedding(blocks.token_ids_NK.flatten(), self._embedding_VH).float()[None]
            out = self.drafter(embeds, blocks.positions_NK.flatten()[None], context, masks)
        return weighted_loss(out.view(*blocks.labels_NK.shape, -1), self._head_VH, blocks)

    def _blocks(self, pack: Pack, slot: int) -> Blocks:
        config, shape = self._config, self.drafter.shape
        loss_mask_T = torch.tensor(pack.loss_mask)
        documents_T = torch.tensor(pack.document_ids)
        generator = anchor_generator(config.seed, self.step, slot)
        anchors = sample_anchors(loss_mask_T, documents_T, config.anchors_per_pack, generator)
        return build_blocks(
            torch.tensor(pack.input_ids, dtype=torch.int64),
            loss_mask_T,
            documents_T,
            torch.tensor(pack.positions),
            anchors,
            block_size=shape.block_size,
            mask_token_id=shape.mask_token_id,
            loss_decay=config.loss_decay,
        )

    def _update(
        self, total: Tensor, counts: SlotCounts, indices: list[int]
    ) -> tuple[float, float, float]:
        """Divides, clips, checks and steps; returns loss, gradient norm and learning rate."""
        config = self._config
        parameters = list(self.drafter.parameters())
        denominator = float(counts.weight) or 1.0  # 0 when no slot is supervised: all is 0 then
        torch._foreach_div_([p.grad for p in parameters if p.grad is not None], denominator)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm))
        mean = float(total) / denominator
        if not (math.isfinite(mean) and math.isfinite(norm)):
            raise DFlashError(
                f"step {self.step + 1}: loss is {mean} and gradient norm {norm} on packs {indices}; "
                "training stopped with the last checkpoint intact, lower learning_rate or look for "
                "damaged hidden states in these packs"
            )
        rate = learning_rate(self.step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return mean, norm, rate


def make_optimizer(drafter: Drafter, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW; matrices decay, norm weights do not."""
    matrices = [parameter for parameter in drafter.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in drafter.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=_BETAS, fused=True)


def learning_rate(step: int, config: TrainConfig) -> float:
    """Rate of step `step` (0-based): linear warm-up, then a cosine that reaches 0 after the last step."""
    warmup = round(config.warmup_fraction * config.num_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, config.num_steps - warmup)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def anchor_generator(seed: int, step: int, slot: int) -> torch.Generator:
    """Randomness of the anchors of the `slot`-th pack of a step: the same whenever it is asked for."""
    digest = sha256(f"anchors/{seed}/{step}/{slot}")
    return torch.Generator().manual_seed(int(digest[:15], 16))


def _config(dataset: Dataset) -> TrainConfig:
    return TrainConfig.model_validate(dataset.config)


def drafter_shape(
    target: TargetConfig, layer_ids: list[int], config: DrafterConfig
) -> DrafterShape:
    """The shape of a drafter for this target; reads its configuration and tokenizer only.

    Raises:
        InputError: the values cannot go together, or no mask token can be found.
    """
    from dflash_core.target import mask_token_id, text_config

    chosen = config.mask_token_id
    mask_id = chosen if chosen >= 0 else mask_token_id(target)
    return resolve_shape(config, text_config(target), layer_ids, mask_id)


def _resolve(store: HiddenStates, target: TargetConfig, config: TrainConfig) -> DrafterShape:
    """The drafter's shape, after checking that the store belongs to this target."""
    from dflash_core.target import identify

    ours = identify(target).contract()
    theirs = {key: store.contract.get(key) for key in ours}
    advice = "extract with this target, or train with the target of the hidden states"
    require_same(f"target {target.id!r} and the hidden states", ours, theirs, advice)
    layer_ids = store.contract["target_layer_ids"]
    shape = drafter_shape(target, layer_ids, config.drafter)
    if (store.hidden_size, store.num_taps) != (shape.hidden_size, len(layer_ids)):
        raise MismatchError(
            f"the hidden states hold {store.num_taps} taps of {store.hidden_size}, expected "
            f"{len(layer_ids)} of {shape.hidden_size} for target {target.id!r}; extract them again"
        )
    if shape.block_size > store.pack_tokens:
        raise InputError(
            f"drafter.block_size {shape.block_size} is larger than a pack of {store.pack_tokens} tokens; "
            "8 to 16 is usual"
        )
    return shape


def _start(
    dataset: Dataset,
    store: HiddenStates,
    target: TargetConfig,
    config: TrainConfig,
    runtime: Runtime,
) -> Trainer:
    """The trainer at the newest checkpoint; commits the untrained one when there is none."""
    from dflash_core.target import resolve_device

    device = resolve_device(runtime.device)
    shape = _resolve(store, target, config)
    embedding, head = _frozen_ends(target, shape, device)
    step = 0
    if committed_steps(dataset):
        drafter, _, step = load_drafter(dataset)
    else:
        drafter = Drafter(shape, torch.Generator().manual_seed(config.seed))
    trainer = Trainer(drafter.to(device), embedding, head, config, step)
    if committed_steps(dataset):
        restore_optimizer(dataset, step, trainer.drafter, trainer.optimizer)
        log.info("%s continues from step %d of %d", dataset.path, step, config.num_steps)
    else:
        save_checkpoint(dataset, 0, trainer.drafter, trainer.optimizer, [])
    return trainer


def _frozen_ends(
    target: TargetConfig, shape: DrafterShape, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Embedding and head [V, H] on the device: float32 on a CPU, bfloat16 on a GPU; one when tied."""
    from dflash_core.target import load_embedding_and_head

    embedding, head = load_embedding_and_head(target)
    for name, tensor in (("embedding", embedding), ("output head", head)):
        if tuple(tensor.shape) != (shape.vocab_size, shape.hidden_size):
            raise MismatchError(
                f"the {name} of target {target.id!r} has shape {list(tensor.shape)}, expected "
                f"{[shape.vocab_size, shape.hidden_size]} from its configuration"
            )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    moved = embedding.to(device, dtype)
    return moved, moved if head is embedding else head.to(device, dtype)
