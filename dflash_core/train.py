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
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_core import replay
from dflash_core.attention import Mask, flex_mask, tiles
from dflash_core.blocks import Blocks, build_blocks, ranges_by_kind, sample_anchors
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
from dflash_core.config import DrafterConfig, EvaluateConfig, Runtime, TargetConfig, TrainConfig
from dflash_core.data import (
    PackReader,
    packs_ahead,
    packs_of_step,
    read_ahead,
    reads,
    visits,
)
from dflash_core.devices import resolve_device, to_device
from dflash_core.errors import DFlashError, InputError, MismatchError
from dflash_core.flops import flops_of_step, matmul_flops_per_s
from dflash_core.loss import LastStates, SlotCounts, Teacher, TopK, weighted_loss
from dflash_core.manifest import Dataset, require_same, sha256
from dflash_core.model import Drafter, DrafterShape, resolve_shape
from dflash_core.optim import Optimizer, average_decay, bfloat16_copy, learning_rate
from dflash_core.packing import Pack
from dflash_core.progress import Progress, silent
from dflash_core.ranks import ALONE, GradientSums, Ranks, gathered, joined, own_part, shard
from dflash_core.replay import Answer
from dflash_core.storage import Storage
from dflash_core.training_log import TrainingLog, picture

if TYPE_CHECKING:
    from dflash_core.object_cache import ObjectCache
    from dflash_core.union import HiddenStates, UnitedStates

    States = HiddenStates | UnitedStates

log = logging.getLogger(__name__)

STAGE, VERSION = "runs", 2
PICTURE = "training.png"
_WORTH_A_WARNING = 0.5  # accepted drafts a step; below it a drafter has learned little anyway
_SUMMARY_STEPS = 100  # last steps that the manifest's averages cover


def plan(
    root: Storage, name: str, hidden: Dataset, target: TargetConfig, config: TrainConfig
) -> Dataset:
    """The run of this request, new or continued, after checking that its inputs fit each other.

    Raises:
        MismatchError: the hidden states come from another target.
        InputError: the drafter cannot have the shape that `config` asks for, or not start from the one
            that it names.
        IncompleteError: the hidden states are not complete.
    """
    store = _open(hidden, config)
    shape = _resolve(store, target, config)
    inputs = {"hidden": hidden.fingerprint}
    if config.warm_start:
        tensors, inputs["warm_start"] = read_start(root, config.warm_start, shape)
        start_from(Drafter(shape), tensors, config.warm_start)
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
    corpus: Dataset | None = None,
) -> None:
    """Trains from the newest checkpoint to the last step, committing a checkpoint per interval.

    Args:
        corpus: whose held-out prompts the checks use; needed where `check_every` is set.
        progress: called after every step with steps done, steps in all, and loss, acceptance_length,
            tokens_per_s, and mfu on a GPU.

    Raises:
        DFlashError: a loss or gradient is not finite; names step and packs, and nothing is committed.
    """
    from dflash_core.object_cache import ObjectCache

    if not missing(dataset):
        return
    config = _config(dataset)
    with joined(resolve_device(runtime.device)) as (ranks, device):
        store = _open(hidden, config, ObjectCache.of(runtime))
        answers = _answers(corpus, store, target, config, runtime)
        trainer = _start(dataset, store, target, config, runtime, ranks, device)
        _train(dataset, store, trainer, answers, runtime, progress or silent)


def _open(hidden: Dataset, config: TrainConfig, cache: ObjectCache | None = None) -> States:
    """The hidden states, with what the loss needs beside them."""
    from dflash_core.union import open_states

    return open_states(
        hidden.require_stage("hidden"),
        last=config.learns_from == "last",
        top_k=config.learns_from == "top-k",
        cache=cache,
    )


def _answers(
    corpus: Dataset | None,
    store: States,
    target: TargetConfig,
    config: TrainConfig,
    runtime: Runtime,
) -> list[Answer]:
    """What the checks replay. Every process asks the target itself, before its memory is needed."""
    if not config.check_every:
        return []
    if corpus is None:
        raise InputError(
            f"check_every is {config.check_every} and there is no corpus to take held-out prompts from; name "
            "one, or set check_every to 0"
        )
    asked = EvaluateConfig(
        num_prompts=config.check_prompts,
        max_new_tokens=config.check_new_tokens,
        thinking=[bool(store.contract.get("thinking", False))],
    )
    layer_ids = tuple(store.contract["target_layer_ids"])
    return replay.answers(corpus, target, layer_ids, asked, runtime)


def _train(
    dataset: Dataset,
    store: PackReader,
    trainer: Trainer,
    answers: list[Answer],
    runtime: Runtime,
    report: Progress,
) -> None:
    config, share = trainer.config, trainer.share
    steps = range(trainer.step, config.num_steps)
    again = config.visits_per_pack
    order = reads(config.seed, steps, config.packs_per_step, store.num_packs, again, share)
    metrics: list[dict] = []
    is_first = trainer.ranks.is_first
    logs = TrainingLog(runtime if is_first else Runtime(), dataset.path)
    with (
        closing(logs),
        read_ahead(store, order, packs_ahead(store, runtime), trainer.device) as packs,
    ):
        visited = visits(packs, steps, trainer.num_packs, again)
        for step in steps:
            entry = trainer.train_step(visited)
            entry["packs"] = packs_of_step(
                config.seed, step, config.packs_per_step, store.num_packs, again
            )
            if answers and trainer.step % config.check_every == 0:
                entry |= trainer.check(answers)
                _warn_if_apart(entry)
            metrics.append(entry)
            if is_first:
                shown = ("loss", "acceptance_length", "tokens_per_s", "mfu")
                numbers = {name: entry[name] for name in shown if name in entry}
                report(trainer.step, config.num_steps, numbers)
            if trainer.step % config.checkpoint_every == 0 or trainer.step == config.num_steps:
                entry["unchanged_weights"] = trainer.unchanged_weights()
                trainer.save(dataset, metrics)
                log.info("step %d: loss %.4f, committed", trainer.step, entry["loss"])
                metrics = []
            logs.write(entry)


def _warn_if_apart(entry: dict[str, Any]) -> None:
    """Says so when held-out text is predicted far worse than the text that is trained on."""
    trained, held_out = entry["acceptance_length"] - 1, entry["held_out_simulated"] - 1
    if trained > _WORTH_A_WARNING and held_out < trained / 2:
        log.warning(
            "step %d: simulated acceptance length is %.2f on training text and %.2f on the target's own "
            "answers to held-out prompts; the drafter learns the text by heart, or the text is not what "
            "the target writes",
            entry["step"],
            trained + 1,
            held_out + 1,
        )


def seal(dataset: Dataset, hidden: Dataset) -> dict:
    """The manifest, written once every checkpoint is committed; averages are over the last 100 steps."""
    from dflash_core.union import open_states

    config = _config(dataset)
    if missing(dataset):
        return dataset.seal(units(config), {})  # raises, naming what is missing
    shape = read_shape(dataset, config.num_steps)
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in Drafter(shape).parameters())
    entries = read_metrics(dataset)
    last = entries[-_SUMMARY_STEPS:]
    image = picture(entries)
    if image:
        dataset.storage.put(PICTURE, image)
    facts = {
        "num_steps": config.num_steps,
        "hidden": hidden.path,
        "num_parameters": num_parameters,
        "shape": shape_as_json(shape),
        "contract": open_states(hidden).contract,
        "loss": sum(entry["loss"] for entry in last) / len(last),
        "acceptance_length": sum(entry["acceptance_length"] for entry in last) / len(last),
    }
    return dataset.seal(units(config), facts)


@dataclass(frozen=True)
class Batch:
    """A pack and the blocks drawn from it, on the device: all that a forward pass reads."""

    pack: Pack
    hidden_TLH: Tensor
    positions_T: Tensor
    blocks: Blocks
    masks: dict[str, Mask]


class Trainer:
    """Drafter, optimiser and the target's frozen ends, with the step they are at.

    On a GPU the products run in bfloat16, with a copy of the weights in that type.

    Args:
        drafter: float32 weights, on the device.
        embedding_VH, head_VH: the target's, on the device; computed with in their own type.
        step: optimiser steps behind it.
        ranks: the processes that train together.
        sharded: each rank keeps a part of the drafter.
        compiled: compile the drafter and attend with FlexAttention, which needs Triton; else the drafter
            runs as it is, with attention in tiles.
        recompute: keep no activations inside layers.
        teacher_norm: the target's final norm, on the device, where the loss learns from last states.

    Raises:
        InputError: values that do not go together.
    """

    def __init__(
        self,
        drafter: Drafter,
        embedding_VH: Tensor,
        head_VH: Tensor,
        config: TrainConfig,
        step: int = 0,
        *,
        ranks: Ranks = ALONE,
        sharded: bool = False,
        compiled: bool = False,
        recompute: bool = False,
        teacher_norm: nn.Module | None = None,
    ) -> None:
        if config.packs_per_step < ranks.size:
            raise InputError(
                f"packs_per_step is {config.packs_per_step} and there are {ranks.size} processes; each needs "
                f"a pack in every step, set packs_per_step to {ranks.size} or a multiple"
            )
        if config.slot_weights == "dpace" and config.loss != "ce":
            raise InputError(
                f"slot_weights dpace weighs likelihoods and loss is {config.loss!r}; use loss ce, or decay"
            )
        if sharded and config.packs_per_step % ranks.size:
            raise InputError(
                f"packs_per_step is {config.packs_per_step} and {ranks.size} processes share the drafter; with sharding "
                f"each needs the same number of packs, set packs_per_step to a multiple of {ranks.size}"
            )
        if sharded and config.optimizer == "muon":
            raise InputError("Muon steps whole matrices; set sharding to replicate, or use adamw")
        self.device = embedding_VH.device
        self.drafter, self.step, self.ranks, self.config = drafter, step, ranks, config
        self.share = slice(ranks.rank, None, ranks.size)
        self.num_packs = len(range(config.packs_per_step)[self.share])
        self._compute, self._sharded = drafter, sharded
        if sharded:
            shard(drafter)
        elif self.device.type == "cuda":
            self._compute = bfloat16_copy(drafter)
        self.optimizer = Optimizer(drafter, config, self._compute)
        self._sums = None
        # The same for all ranks, also where some have a pack more: they add the same tensors.
        accumulates = config.packs_per_step > ranks.size
        has_copy = self._compute is not drafter
        if not sharded and (ranks.size > 1 or (accumulates and has_copy)):
            self._sums = GradientSums(self.optimizer, ranks, accumulates=accumulates)
        self._embedding_VH, self._head_VH = embedding_VH, head_VH
        self._compiled, self._teacher_norm = compiled, teacher_norm
        self._flops_per_s = None
        if self.device.type == "cuda":
            self._flops_per_s = matmul_flops_per_s(self.device, torch.bfloat16)
        self._ahead: Batch | Exception | None = None
        self._rounded = self._rounded_weights()
        self._compute.recompute = recompute
        if compiled:
            self._compute.compile_parts()

    def train_step(self, packs: Iterator[tuple[Pack, Tensor]]) -> dict[str, Any]:
        """One optimiser step over the next packs, of which this rank takes `num_packs`.

        Gradients of sums are added over packs and ranks and divided once by the sum of all weights, so
        the result is that of one large batch, and only one pack's hidden states are held at a time.

        Returns:
            Metrics of all ranks: step (1-based), loss, acceptance_length, accuracy of each predicting
            slot, grad_norm, learning_rate, tokens_per_s (context rows and block slots); and of this one:
            packs, wait_s for input and, on a GPU, mfu (share of the measured speed of a large product).

        Raises:
            DFlashError: loss or gradient is not finite; the weights are as before.
        """
        start, self._waited, indices = time.perf_counter(), 0.0, []
        total, tokens, flops = torch.zeros((), device=self.device), 0, 0
        counts = None
        for slot in range(self.num_packs):
            if self._sums:
                self._sums.is_last_pack = slot == self.num_packs - 1
            batch, self._ahead = self._ahead or self._next(packs, self.step, slot), None
            if isinstance(batch, Exception):
                raise batch
            assert batch is not None, "the reader ended before the run did"
            loss, pack_counts = self.pack_loss(batch)
            loss.backward()
            total += loss.detach()
            counts = pack_counts if counts is None else counts + pack_counts
            tokens += batch.pack.num_tokens + batch.blocks.labels_NK.numel()
            if self._flops_per_s is not None:
                flops += self._flops(batch)
            indices.append(batch.pack.index)
            del batch, loss
            # Many small things, made ready while a GPU is busy with backward. What goes wrong is raised when
            # the batch is due, so that what comes before it is done and committed.
            behind = divmod(slot + 1, self.num_packs)
            self._ahead = self._next(packs, self.step + behind[0], behind[1])
        assert counts is not None, "every rank has a pack"
        loss, norm, rate, all_tokens, counts = self._update(total, tokens, counts, indices)
        seconds = time.perf_counter() - start
        entry = {
            "step": self.step,
            "loss": loss,
            "acceptance_length": counts.acceptance_length(),
            "accuracy": counts.accuracy(),
            "grad_norm": norm,
            "learning_rate": rate,
            "packs": indices,
            "tokens_per_s": all_tokens / seconds,
            "wait_s": self._waited,
        }
        if self._flops_per_s is not None:
            entry["mfu"] = flops / seconds / self._flops_per_s
        return entry

    def _next(
        self, packs: Iterator[tuple[Pack, Tensor]], step: int, slot: int
    ) -> Batch | Exception | None:
        """The batch of a slot of a step, or what kept it from being made; None when there is no pack."""
        asked = time.perf_counter()
        try:
            found = next(packs, None)
        except Exception as error:  # noqa: BLE001 - raised when it is due
            return error
        finally:
            self._waited += time.perf_counter() - asked
        if found is None:
            return None
        pack, hidden_TLH = found
        return self.prepare(pack, hidden_TLH, self._blocks(pack, step, slot))

    def _flops(self, batch: Batch) -> int:
        return flops_of_step(
            self.drafter,
            self._head_VH,
            num_rows=len(batch.positions_T),
            num_slots=batch.blocks.labels_NK.numel(),
            num_supervised=len(batch.blocks.supervised_M),
            teacher_has_logits=self._teacher_norm is not None,
        )

    def check(self, answers: list[Answer]) -> dict[str, float]:
        """Acceptance on held-out answers: decoding's own, and simulated as on training text.

        It is that of the averaged weights, where there are any.
        """
        # Eager: answers have many lengths, and a compiled layer would be compiled for each.
        with (
            self.optimizer.averaged(),
            torch.compiler.set_stance("force_eager"),
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"),
            gathered(self.drafter),
        ):
            found = replay.acceptance(self.drafter, self._embedding_VH, self._head_VH, answers)
        return {
            "held_out_acceptance_length": found.decoded,
            "held_out_simulated": found.simulated,
        }

    def unchanged_weights(self) -> float:
        """Share of the weights that, in bfloat16, are what they were at the last call, or at the start.

        Near 1 the steps are lost in the rounding of what is exported.
        """
        before, self._rounded = self._rounded, self._rounded_weights()
        same = sum(int((a == b).sum()) for a, b in zip(before, self._rounded, strict=True))
        counts = torch.tensor([same, sum(weight.numel() for weight in before)], device=self.device)
        same, total = self.ranks.add(counts).tolist()
        return same / total

    def _rounded_weights(self) -> list[Tensor]:
        """What this rank holds of each weight, bfloat16, on the CPU."""
        parts = (own_part(weight.detach()) for weight in self.drafter.parameters())
        return [part.to("cpu", torch.bfloat16, copy=True) for part in parts]

    def save(self, dataset: Dataset, metrics: list[dict]) -> None:
        """Commits a checkpoint; every rank calls it, the first one writes."""
        save_checkpoint(
            dataset,
            self.step,
            self.drafter,
            self.optimizer,
            metrics,
            writes=self.ranks.is_first,
        )
        self.ranks.wait()

    def prepare(self, pack: Pack, hidden_TLH: Tensor, blocks: Blocks) -> Batch:
        """What `pack_loss` takes; nothing waits for the device."""
        blocks = blocks.to(self.device)
        return Batch(
            pack=pack,
            hidden_TLH=hidden_TLH.to(self.device, non_blocking=True),
            positions_T=to_device(torch.tensor(pack.positions), self.device),
            blocks=blocks,
            masks=self._masks(blocks, len(pack.input_ids)),
        )

    def pack_loss(self, batch: Batch) -> tuple[Tensor, SlotCounts]:
        """Weighted sum of the losses of a pack's blocks, with its graph, and the counts."""
        drafter, device, blocks = self._compute, self.device, batch.blocks
        num_taps = len(drafter.shape.target_layer_ids)
        # The residual stream stays float32, also where the embedding is bfloat16.
        embeds_BQH = F.embedding(blocks.token_ids_NK.flatten(), self._embedding_VH).float()[None]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            out = drafter.forward_pack(
                batch.hidden_TLH[:, :num_taps].flatten(1)[None],
                batch.positions_T[None],
                embeds_BQH,
                blocks.positions_NK.flatten()[None],
                batch.masks,
            )
        return weighted_loss(
            out.view(*blocks.labels_NK.shape, -1),
            self._head_VH,
            blocks,
            first_slot=drafter.shape.first_slot,
            dpace_alpha=self.config.dpace_alpha if self.config.slot_weights == "dpace" else None,
            kind=self.config.loss,
            teacher=self._teacher(batch),
        )

    def _teacher(self, batch: Batch) -> Teacher | None:
        """What is known of the target's distribution at each row, where the loss learns that."""
        pack = batch.pack
        if self._teacher_norm is not None:
            num_taps = len(self.drafter.shape.target_layer_ids)
            return LastStates(self._teacher_norm(batch.hidden_TLH[:, num_taps]))
        if pack.teacher_ids is None or pack.teacher_logprobs is None:
            return None
        ids_TK = torch.from_numpy(pack.teacher_ids.view("int32"))  # torch indexes with signed ones
        logprobs_TK = torch.from_numpy(pack.teacher_logprobs)
        return TopK(to_device(ids_TK, self.device), to_device(logprobs_TK, self.device))

    def _masks(self, blocks: Blocks, num_rows: int) -> dict[str, Mask]:
        shape = self.drafter.shape
        ranges = ranges_by_kind(shape, blocks.anchors_N, blocks.starts_N)
        if self._compiled:
            return {kind: flex_mask(seen, num_rows) for kind, seen in ranges.items()}
        return {kind: tiles(seen, num_rows, shape.block_size) for kind, seen in ranges.items()}

    def _blocks(self, pack: Pack, step: int, slot: int) -> Blocks:
        """The blocks that step `step` draws from this rank's `slot`-th pack, on the CPU."""
        config, shape = self.config, self.drafter.shape
        slot_of_all = self.ranks.rank + slot * self.ranks.size
        loss_mask_T = torch.tensor(pack.loss_mask)
        documents_T = torch.tensor(pack.document_ids)
        generator = anchor_generator(config.seed, step, slot_of_all)
        anchors = sample_anchors(loss_mask_T, documents_T, config.anchors_per_pack, generator)
        return build_blocks(
            torch.tensor(pack.input_ids, dtype=torch.int64),
            loss_mask_T,
            documents_T,
            torch.tensor(pack.positions),
            anchors,
            block_size=shape.block_size,
            first_slot=shape.first_slot,
            mask_token_id=shape.mask_token_id,
            loss_decay=config.loss_decay,
        )

    def _update(
        self, total: Tensor, tokens: int, counts: SlotCounts, indices: list[int]
    ) -> tuple[float, float, float, float, SlotCounts]:
        """Divides, clips, checks and steps; returns loss, gradient norm, rate, tokens and counts."""
        if self._sums:
            self._sums.wait()
        # The one wait for the GPU in a step; what follows is launched while the weights are stepped.
        loss, all_tokens, norm, counts = self._fetch(total, tokens, counts)
        denominator = float(counts.weight) or 1.0  # 0 when no slot is supervised: all is 0 then
        loss, norm = loss / denominator, norm / denominator
        if not (math.isfinite(loss) and math.isfinite(norm)):
            packs = self._packs_of_all(indices)
            raise DFlashError(
                f"step {self.step + 1}: loss is {loss} and gradient norm {norm} on packs {packs}; "
                "training stopped with the last checkpoint intact, lower learning_rate or look for "
                "damaged hidden states in these packs"
            )
        rate = learning_rate(self.step, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        scale = min(1.0, self.config.max_grad_norm / (norm + 1e-6)) / denominator
        self.optimizer.step(scale, average_decay(self.step, self.config))
        self.step += 1
        return loss, norm, rate, all_tokens, counts

    def _packs_of_all(self, indices: list[int]) -> list[int]:
        """The packs of a step, of all ranks."""
        packs = torch.zeros(self.config.packs_per_step, dtype=torch.int64, device=self.device)
        packs[self.share] = torch.tensor(indices, device=self.device)
        return self.ranks.add(packs).tolist()

    def _fetch(
        self, total: Tensor, tokens: int, counts: SlotCounts
    ) -> tuple[float, float, float, SlotCounts]:
        """Loss, tokens, gradient norm and counts of all ranks, on the host, in one copy."""
        square = self._squared_norm()
        values = [square, total.new_tensor(float(tokens)), total, *counts.fields()]
        flat = self.ranks.add(torch.cat([value.reshape(-1).double() for value in values])).cpu()
        square, tokens, total, *parts = flat.split([value.numel() for value in values])
        return float(total), float(tokens), math.sqrt(float(square)), SlotCounts(*parts)

    def _squared_norm(self) -> Tensor:
        """What this rank adds to the square of the gradient's length, float64."""
        gradients = [own_part(self.optimizer.gradient(weight)) for weight in self.optimizer.copies]
        norms = [torch.linalg.vector_norm(part, dtype=torch.float32) for part in gradients]
        square = torch.stack(norms).double().square().sum()
        # Unless parts are sharded, every rank has the whole gradient.
        return square if self._sharded else square / self.ranks.size


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


def _resolve(store: States, target: TargetConfig, config: TrainConfig) -> DrafterShape:
    """The drafter's shape, after checking that the store belongs to this target."""
    from dflash_core.target import identify

    ours = identify(target).contract()
    theirs = {key: store.contract.get(key) for key in ours}
    advice = "extract with this target, or train with the target of the hidden states"
    require_same(f"target {target.id!r} and the hidden states", ours, theirs, advice)
    layer_ids = store.contract["target_layer_ids"]
    shape = drafter_shape(target, layer_ids, config.drafter)
    num_taps = len(layer_ids) + (config.learns_from == "last")
    if (store.hidden_size, store.num_taps) != (shape.hidden_size, num_taps):
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
    store: States,
    target: TargetConfig,
    config: TrainConfig,
    runtime: Runtime,
    ranks: Ranks,
    device: torch.device,
) -> Trainer:
    """The trainer at the newest checkpoint; commits the untrained one when there is none."""
    shape = _resolve(store, target, config)
    embedding, head = _frozen_ends(target, shape, device)
    # One look: the first rank may commit while others would look again.
    step, begun = 0, bool(committed_steps(dataset))
    if begun:
        drafter, _, step = load_drafter(dataset, averaged=False)
    else:
        drafter = Drafter(shape, torch.Generator().manual_seed(config.seed))
        if config.warm_start:
            tensors, content = read_start(dataset.root, config.warm_start, shape)
            planned = dataset.request["inputs"]["warm_start"]
            require_same(
                f"warm_start {config.warm_start!r}",
                {"content": content},
                {"content": planned},
                "it changed since the run was planned; start the run again",
            )
            start_from(drafter, tensors, config.warm_start)
    trainer = Trainer(
        drafter.to(device),
        embedding,
        head,
        config,
        step,
        ranks=ranks,
        sharded=ranks.size > 1 and runtime.sharding == "shard",
        compiled=device.type == "cuda" and runtime.compile,
        recompute=runtime.recompute,
        teacher_norm=_teacher_norm(target, device) if config.learns_from == "last" else None,
    )
    ranks.wait()  # nobody commits before all have looked
    if begun:
        restore_optimizer(dataset, step, trainer.drafter, trainer.optimizer)
        log.info("%s continues from step %d of %d", dataset.path, step, config.num_steps)
    else:
        trainer.save(dataset, [])
    return trainer


def read_start(root: Storage, source: str, shape: DrafterShape) -> tuple[dict[str, Tensor], str]:
    """Weights of the drafter that a run starts from, float32, and what identifies them.

    Args:
        source: path of a run under the root, or what `read_drafter` takes.
        shape: of the drafter to be trained.
    """
    if source.startswith(f"{STAGE}/"):
        run = Dataset.open(root, source).require_stage(STAGE)
        drafter, _, step = load_drafter(run)
        return drafter.state_dict(), f"{run.fingerprint}/{step}"
    from dflash_core.import_drafter import read_drafter

    found = read_drafter(source, num_target_layers=shape.num_target_layers)
    if found.head_DH is not None:
        raise InputError(
            f"warm_start {source!r} proposes from a vocabulary of its own; training uses the target's, start "
            "from another drafter"
        )
    return found.state_dict, found.content


def start_from(drafter: Drafter, tensors: dict[str, Tensor], source: str) -> None:
    """Gives a fresh drafter these weights; layers that they lack become the identity.

    Raises:
        InputError: a weight has another shape, or no place.
    """
    own = drafter.state_dict()
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            there = list(own[name].shape) if name in own else "none"
            raise InputError(
                f"warm_start {source!r} has {name} of shape {list(tensor.shape)}, this drafter {there}; give "
                "train.drafter the values of that one"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            if name in tensors:
                tensor.copy_(tensors[name])
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()


def _teacher_norm(target: TargetConfig, device: torch.device) -> nn.Module:
    """The target's final norm, of its own kind, float32 in and out."""
    from dflash_core.target import load_body

    norm = load_body(target, [0], torch.device("cpu")).final_norm
    assert isinstance(norm, nn.Module)
    return norm.float().to(device)


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
