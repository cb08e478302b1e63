"""Greedy decoding with and without a drafter: draft, verify, accept.

The reference loop: batch 1, one chain of drafts, no kernels of its own. Its output is the target's own
greedy output token for token, up to rounding: a forward of several rows and one of a single row may
differ in the last bits, which decides a token only where two logits are nearly equal.

Shape letters: B = 1 sequence, T context rows, K block slots, L taps, H hidden size, C = L * H, V vocabulary.
Reference: DFlash, https://arxiv.org/abs/2602.06036; z-lab/dflash dflash/model.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_core.blocks import attention_masks
from dflash_core.errors import InputError
from dflash_core.model import Drafter, DrafterShape
from dflash_core.target_cache import Snapshot, cache_name


@dataclass(frozen=True)
class Generation:
    """What speculative decoding produced.

    The first token comes from the prompt's forward; each verify step then emits its accepted drafts and
    one token of the target's own. So `len(tokens) == 1 + sum(accepted) + len(accepted)`, one less when
    an accepted draft is a stop token, because nothing is emitted after it.
    """

    tokens: list[int]
    """Answer, its stop token included."""
    accepted: list[int]
    """For each verify step, drafts emitted."""
    judged: list[int]
    """For each verify step, drafts that could have been emitted: block_size - 1, fewer at the end of the
    budget and before a stop token."""

    @property
    def num_verified(self) -> int:
        """Tokens emitted by verify steps; over the number of steps it is the acceptance length."""
        return max(len(self.tokens) - 1, 0)


class Proposer(Protocol):
    """What drafts: sees the taps of every committed row once, in order."""

    def append(self, taps_BTC: Tensor) -> None:
        """The next committed rows of the target, their L taps joined."""

    def propose(self, bonus: int, num_drafts: int) -> list[int]:
        """Drafts of the tokens after `bonus`, which stands right behind the committed rows."""


class BlockProposer:
    """A drafter over one sequence: its context keys and values grow with the committed rows only.

    Args:
        embedding, head: the target's [V, H], frozen.
    """

    def __init__(self, drafter: Drafter, embedding: Tensor, head: Tensor) -> None:
        self._drafter = drafter
        self._shape = drafter.shape
        self._head = head
        self._dtype = drafter.fc.weight.dtype
        self._mask_H = embedding[self._shape.mask_token_id]
        self._embedding = embedding
        self._context: list[tuple[Tensor, Tensor]] = []
        self._num_rows = 0

    def append(self, taps_BTC: Tensor) -> None:
        start, self._num_rows = self._num_rows, self._num_rows + taps_BTC.shape[1]
        positions_BT = torch.arange(start, self._num_rows, device=taps_BTC.device)[None]
        new = self._drafter.project_context(taps_BTC, positions_BT)
        if not self._context:
            self._context = new
            return
        self._context = [
            (torch.cat((old[0], more[0]), dim=2), torch.cat((old[1], more[1]), dim=2))
            for old, more in zip(self._context, new, strict=True)
        ]

    def propose(self, bonus: int, num_drafts: int) -> list[int]:
        """The first drafts of a whole block: with fewer mask slots it would not be what was trained."""
        if num_drafts == 0:
            return []
        slots, device = self._shape.block_size, self._mask_H.device
        embeds_BKH = self._mask_H.repeat(1, slots, 1).to(self._dtype)
        embeds_BKH[0, 0] = self._embedding[bonus]
        positions_BK = torch.arange(self._num_rows, self._num_rows + slots, device=device)[None]
        masks = block_masks(self._shape, self._num_rows, device)
        hidden_BKH = self._drafter(embeds_BKH, positions_BK, self._context, masks)
        wanted_KH = hidden_BKH[0, 1 : num_drafts + 1].to(self._head.dtype)
        return (wanted_KH @ self._head.T).argmax(-1).tolist()


def block_masks(shape: DrafterShape, num_context: int, device: torch.device) -> dict[str, Tensor]:
    """What the slots of one block behind `num_context` rows may attend to; the masks of training.

    Returns:
        For each kind of layer, bool [1, 1, K, T + K], True where a slot may attend; context keys first.
    """
    one_document_T = torch.zeros(num_context, dtype=torch.int64, device=device)
    anchor_N = torch.tensor([num_context], device=device)
    return attention_masks(shape, anchor_N, torch.zeros_like(anchor_N), one_document_T)


@torch.no_grad()
def greedy(
    model: Any, input_ids: list[int], max_new_tokens: int, stop_ids: Collection[int]
) -> list[int]:
    """The target alone: its most likely token, one row per forward, with a cache.

    Returns:
        At most `max_new_tokens` tokens; the stop token that ended the answer is included.
    """
    logits_TV, cache = _forward(model, input_ids, None, num_logits=1)
    tokens = [int(logits_TV[-1].argmax())]
    while len(tokens) < max_new_tokens and tokens[-1] not in stop_ids:
        logits_TV, cache = _forward(model, tokens[-1:], cache)
        tokens.append(int(logits_TV[-1].argmax()))
    return tokens


@torch.no_grad()
def stepwise_logits(model: Any, input_ids: list[int], tokens: list[int]) -> Tensor:
    """Logits [V] after prompt and tokens, computed as `greedy` does: one row per forward."""
    logits_TV, cache = _forward(model, input_ids, None, num_logits=1)
    for token in tokens:
        logits_TV, cache = _forward(model, [token], cache)
    return logits_TV[-1]


def speculate(
    model: Any,
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    input_ids: list[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> Generation:
    """The target with a drafter; the same tokens as `greedy`, in fewer forwards of the target.

    Args:
        model: the target, as `load_causal_lm` returns it.
        embedding, head: the target's [V, H], on the drafter's device.
        input_ids: the prompt, at least one token.

    Raises:
        InputError: the drafter was made for a target of another size.
    """
    shape, width = drafter.shape, embedding.shape[1]
    if shape.hidden_size != width or shape.vocab_size > embedding.shape[0]:
        raise InputError(
            f"the drafter is for a target of hidden size {shape.hidden_size} and {shape.vocab_size} tokens, "
            f"this one has {width} and {embedding.shape[0]}; use the target it was trained on"
        )
    proposer = BlockProposer(drafter, embedding, head)
    return verify_chain(
        model,
        proposer,
        shape.target_layer_ids,
        shape.block_size - 1,
        input_ids,
        max_new_tokens,
        stop_ids,
    )


@torch.no_grad()
def verify_chain(
    model: Any,
    proposer: Proposer,
    target_layer_ids: Collection[int],
    max_drafts: int,
    input_ids: list[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> Generation:
    """Speculative decoding with whatever proposes.

    Between steps the cache holds the committed rows, the proposer has seen their taps, and the last token
    (the bonus) is emitted but in neither: it is the first row of the next verify forward.
    """
    from dflash_core.target import tap_layers

    result = Generation([], [], [])
    with tap_layers(model, list(target_layer_ids)) as taps:
        target = _Target(model, taps)
        result.tokens.append(target.forward(input_ids, num_logits=1)[-1])
        num_kept = len(input_ids)
        while (left := max_new_tokens - len(result.tokens)) and result.tokens[-1] not in stop_ids:
            proposer.append(target.commit(num_kept))
            bonus = result.tokens[-1]
            drafts = proposer.propose(bonus, min(max_drafts, left - 1))
            answers = target.forward([bonus, *drafts])
            num_matching = _num_matching(drafts, answers)
            _emit(result, answers, num_matching, len(drafts), stop_ids)
            num_kept = num_matching + 1
    return result


class _Target:
    """The target in the middle of one answer: its cache, and what its last forward may have to undo."""

    def __init__(self, model: Any, taps: Any) -> None:
        self._model, self._taps = model, taps
        self._cache: Any = None
        self._before: Snapshot | None = None
        self._rows: list[int] = []

    def forward(self, rows: list[int], num_logits: int = 0) -> list[int]:
        """The target's own next token after each of the last `num_logits` rows, 0 for all."""
        self._before = Snapshot(self._cache) if self._cache is not None else None
        self._rows = rows
        logits_TV, self._cache = _forward(self._model, rows, self._cache, num_logits)
        return logits_TV.argmax(-1).tolist()

    def commit(self, num_rows: int) -> Tensor:
        """Keeps the first rows of the last forward, takes back the others.

        Returns:
            The joined taps [B, num_rows, C] of the rows that stay.
        """
        taps_BTC = self._taps.stack()[:, :num_rows].flatten(2)
        if self._before is not None and not self._before.rollback(num_rows):
            _forward(self._model, self._rows[:num_rows], self._cache, num_logits=1)
        return taps_BTC


def _emit(
    result: Generation,
    answers: list[int],
    num_matching: int,
    num_drafts: int,
    stop_ids: Collection[int],
) -> None:
    """Adds a step's tokens: matching drafts and one more, up to the first stop token."""
    new = _cut_at_stop(answers[: num_matching + 1], stop_ids)
    stopped_early = len(new) <= num_matching
    result.tokens.extend(new)
    result.accepted.append(len(new) if stopped_early else num_matching)
    result.judged.append(len(new) if stopped_early else num_drafts)


def _forward(model: Any, rows: list[int], cache: Any, num_logits: int = 0) -> tuple[Tensor, Any]:
    """The target over the next rows: logits of the last `num_logits` of them, 0 for all, and its cache."""
    input_ids_BT = torch.tensor([rows], device=model.device)
    name = cache_name(type(model))
    options = {name: cache, "use_cache": True, "logits_to_keep": num_logits}
    out = model(input_ids=input_ids_BT, **options)
    return out.logits[0], getattr(out, name)


def _num_matching(drafts: list[int], answers: list[int]) -> int:
    """Length of the leading run in which the target answers what was drafted."""
    for index, (draft, answer) in enumerate(zip(drafts, answers, strict=False)):
        if draft != answer:
            return index
    return len(drafts)


def _cut_at_stop(tokens: list[int], stop_ids: Collection[int]) -> list[int]:
    """The tokens up to the first stop token, which stays."""
    for index, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: index + 1]
    return tokens
