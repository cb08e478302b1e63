"""Decoding with and without a drafter: draft, verify, accept. Chains or trees, greedy or sampled.

Greedy output is the target's own token for token, up to rounding: a forward of several rows and one of a
single row may differ in the last bits, which decides a token only where two logits are nearly equal.
Sampled output is distributed as the target's own samples: drafts of a chain are accepted by rejection
sampling, in a tree every token is a fresh sample of the target and the tree is only where it is looked for.

Several sequences are decoded together; what comes out of one does not depend on the others.

Shape letters: B sequences, T context rows, K block slots, D drafts (at most K - 1), R rows of a verify
forward, P rows of the longest accepted path, L taps, H hidden size, C = L * H, V vocabulary.
Reference: DFlash, https://arxiv.org/abs/2602.06036; z-lab/dflash dflash/model.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from dflash_core.attention import sequence_masks
from dflash_core.blocks import ranges_by_kind
from dflash_core.draft_tree import DraftTree, best_first, chain
from dflash_core.errors import InputError
from dflash_core.model import Drafter, DrafterShape
from dflash_core.row_cache import KeyValues, RowCache, Rows, takes_rows_back, teach_rows
from dflash_core.sampling import GREEDY, Sampling, accept, draw, probabilities
from dflash_core.target_cache import Snapshot, cache_name


@dataclass(frozen=True)
class Decoding:
    """How to decode."""

    max_new_tokens: int
    """Longest answer, at least 1."""
    stop_ids: Collection[int] = ()
    """Tokens that end an answer; the one that did is part of it."""
    sampling: Sampling = GREEDY
    max_drafts: int = 0
    """Drafts of a step, one after another; 0 takes block_size - 1, the most there is."""
    tree_nodes: int = 0
    """Drafts of a step in all branches of a tree; 0 drafts a single chain."""
    batch: int = 1
    """Sequences decoded together."""


@dataclass
class Generation:
    """What decoding produced.

    The first token comes from the prompt's forward; each verify step then emits its accepted drafts and
    one token of the target's own. So `len(tokens) == 1 + sum(accepted) + len(accepted)`, one less when
    an accepted draft is a stop token, because nothing is emitted after it.
    """

    tokens: list[int] = field(default_factory=list)
    """Answer, its stop token included."""
    accepted: list[int] = field(default_factory=list)
    """For each verify step, drafts emitted."""
    judged: list[int] = field(default_factory=list)
    """For each verify step, drafts that could have been emitted: block_size - 1 or the depth of the tree,
    fewer at the end of the budget and before a stop token."""

    @property
    def num_verified(self) -> int:
        """Tokens emitted by verify steps; over the number of steps it is the acceptance length."""
        return max(len(self.tokens) - 1, 0)


@dataclass(frozen=True)
class Step:
    """Tokens that one sequence gained."""

    sequence: int
    """Index of its prompt."""
    tokens: list[int]
    accepted: int
    """How many of them were drafts: the first ones."""
    judged: int
    """How many drafts could have been emitted."""
    verified: bool
    """False for the token that comes from the prompt's forward."""
    ended: bool
    """Whether the answer is complete."""


class Proposer(Protocol):
    """What drafts, for a batch that sequences join and leave."""

    def admit(self, taps_TC: Tensor) -> None:
        """A new sequence at the end of the batch: the rows of its prompt, their L taps joined."""

    def append(self, taps_BPC: Tensor, counts: list[int]) -> None:
        """The next committed rows of each sequence: the first `counts` of the P that are given."""

    def keep(self, sequences: list[int]) -> None:
        """Only these sequences stay, in this order."""

    def propose(self, bonus: list[int], num_drafts: int) -> Tensor:
        """Logits [B, num_drafts, V] of the tokens after `bonus`, which stand behind the committed rows."""


class NoProposer:
    """Drafts nothing: decoding with the target alone."""

    def admit(self, taps_TC: Tensor) -> None: ...
    def append(self, taps_BPC: Tensor, counts: list[int]) -> None: ...
    def keep(self, sequences: list[int]) -> None: ...
    def propose(self, bonus: list[int], num_drafts: int) -> Tensor:
        raise AssertionError("nothing to propose")


# --- the drafter -------------------------------------------------------------------------------


class BlockProposer:
    """A drafter whose context keys and values grow with the committed rows only.

    Args, see `speculate_steps`: embedding, head, token_ids.
    """

    def __init__(
        self,
        drafter: Drafter,
        embedding: Tensor,
        head: Tensor,
        token_ids: Tensor | None = None,
    ) -> None:
        self._drafter = drafter
        self._shape = drafter.shape
        self._head = head
        self._embedding = embedding
        self._token_ids = token_ids
        self._context: list[KeyValues] = []
        self._lengths: list[int] = []

    def admit(self, taps_TC: Tensor) -> None:
        positions_BT = torch.arange(len(taps_TC), device=taps_TC.device)[None]
        new = [KeyValues(*kv) for kv in self._drafter.project_context(taps_TC[None], positions_BT)]
        self._lengths.append(len(taps_TC))
        if not self._context:
            self._context = new
            return
        for context, more in zip(self._context, new, strict=True):
            context.add(more)

    def append(self, taps_BPC: Tensor, counts: list[int]) -> None:
        # Rows past a sequence's count are written, too, and overwritten by what comes next.
        new = self._drafter.project_context(taps_BPC, self._positions(taps_BPC.shape[1]))
        for context, (keys, values) in zip(self._context, new, strict=True):
            context.write(keys, values, self._lengths)
        self._lengths = [n + more for n, more in zip(self._lengths, counts, strict=True)]

    def keep(self, sequences: list[int]) -> None:
        self._lengths = [self._lengths[sequence] for sequence in sequences]
        if not sequences:
            self._context = []
        for context in self._context:
            context.keep(torch.tensor(sequences, device=self._head.device))

    def propose(self, bonus: list[int], num_drafts: int) -> Tensor:
        """The first drafts of a whole block: with fewer mask slots it would not be what was trained."""
        slots, mask = self._shape.block_size, self._shape.mask_token_id
        ids = torch.tensor([[token, *[mask] * (slots - 1)] for token in bonus])
        embeds_BKH = self._embedding[ids.to(self._head.device)].to(self._drafter.fc.weight.dtype)
        context = [layer.view(max(self._lengths)) for layer in self._context]
        masks = block_masks(self._shape, self._lengths, self._head.device)
        hidden_BKH = self._drafter(embeds_BKH, self._positions(slots), context, masks)
        first = self._shape.first_slot
        wanted_BDH = hidden_BKH[:, first : first + num_drafts].to(self._head.dtype)
        logits_BDV = wanted_BDH @ self._head.T
        if self._token_ids is None:
            return logits_BDV
        whole_BDV = logits_BDV.new_full((*logits_BDV.shape[:2], len(self._embedding)), -torch.inf)
        whole_BDV[..., self._token_ids] = logits_BDV
        return whole_BDV

    def _positions(self, num_rows: int) -> Tensor:
        """The next positions of each sequence, [B, num_rows]."""
        device = self._head.device
        return torch.tensor(self._lengths, device=device)[:, None] + torch.arange(
            num_rows, device=device
        )


def block_masks(
    shape: DrafterShape, num_context: list[int], device: torch.device
) -> dict[str, Tensor]:
    """What the slots of a block may attend to behind so many rows of each sequence; as in training.

    Returns:
        For each kind of layer, bool [B, 1, K, T + K] with T the most rows, True where a slot may attend;
        context keys first.
    """
    lengths_B = torch.tensor(num_context, device=device)
    ranges = ranges_by_kind(shape, lengths_B, torch.zeros_like(lengths_B))
    longest = max(num_context)
    return {kind: sequence_masks(r, longest, shape.block_size) for kind, r in ranges.items()}


# --- the target alone --------------------------------------------------------------------------


@torch.no_grad()
def greedy(
    model: Any, input_ids: list[int], max_new_tokens: int, stop_ids: Collection[int]
) -> list[int]:
    """The target alone: its most likely token, one row per forward, with Transformers' own cache.

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


# --- with a drafter ----------------------------------------------------------------------------


def speculate(
    model: Any,
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    input_ids: list[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> Generation:
    """One prompt, greedy, with chains of drafts: the tokens of `greedy` in fewer forwards.

    Args, raises: see `speculate_steps`.
    """
    decoding = Decoding(max_new_tokens, stop_ids)
    steps = speculate_steps(model, drafter, embedding, head, [input_ids], decoding)
    return next(answers(steps))[1]


def answers(steps: Iterator[Step]) -> Iterator[tuple[int, Generation]]:
    """The answers that these steps make up, each as soon as it is complete, with its prompt's index."""
    begun: dict[int, Generation] = {}
    for step in steps:
        generation = begun.setdefault(step.sequence, Generation())
        generation.tokens.extend(step.tokens)
        if step.verified:
            generation.accepted.append(step.accepted)
            generation.judged.append(step.judged)
        if step.ended:
            yield step.sequence, begun.pop(step.sequence)


def plain_steps(
    model: Any,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    seeds: Sequence[int] | None = None,
) -> Iterator[Step]:
    """The target alone, in the loop and the batches of `speculate_steps`; every step is one token."""
    return decode_steps(model, NoProposer(), (0,), 0, prompts, decoding, seeds)


def speculate_steps(
    model: Any,
    drafter: Drafter,
    embedding: Tensor,
    head: Tensor,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    seeds: Sequence[int] | None = None,
    token_ids: Tensor | None = None,
) -> Iterator[Step]:
    """The target with a drafter on several prompts; steps of different prompts come interleaved.

    Args:
        model: the target, as `load_causal_lm` returns it.
        embedding, head: the target's [V, H], on the drafter's device; or a head of the drafter's own.
        prompts: token ids, at least one each.
        seeds: of each prompt's samples; their index when None. Samples do not depend on the batch.
        token_ids: target's token of each row of a head over a reduced vocabulary, int64.

    Raises:
        InputError: the drafter was made for a target of another size or for shorter blocks, or trees are
            asked for on a target that cannot verify them.
    """
    shape, width = drafter.shape, embedding.shape[1]
    if shape.hidden_size != width or shape.vocab_size > embedding.shape[0]:
        raise InputError(
            f"the drafter is for a target of hidden size {shape.hidden_size} and {shape.vocab_size} tokens, "
            f"this one has {width} and {embedding.shape[0]}; use the target it was trained on"
        )
    most = shape.num_drafts
    if decoding.max_drafts > most:
        raise InputError(
            f"max_drafts is {decoding.max_drafts}, but the drafter was trained for blocks of "
            f"{shape.block_size}, the bonus token included; use at most {most}"
        )
    proposer = BlockProposer(drafter, embedding, head, token_ids)
    max_drafts = decoding.max_drafts or most
    return decode_steps(
        model, proposer, shape.target_layer_ids, max_drafts, prompts, decoding, seeds
    )


@dataclass
class _Sequence:
    """An answer in the making."""

    index: int
    tokens: list[int]
    left: int
    """Tokens it may still gain."""
    generator: torch.Generator
    most_rows: int
    """Rows of the largest step."""

    def uniform(self) -> Tensor:
        """Fresh numbers in [0, 1) for a step: to draw drafts, to judge them, and for the token after.

        Each has its place, so that samples do not depend on what else is in the batch.
        """
        return torch.rand(2 * self.most_rows + 1, generator=self.generator)


@torch.no_grad()
def decode_steps(
    model: Any,
    proposer: Proposer,
    target_layer_ids: Collection[int],
    max_drafts: int,
    prompts: Sequence[list[int]],
    decoding: Decoding,
    seeds: Sequence[int] | None = None,
) -> Iterator[Step]:
    """Decoding with whatever proposes.

    Between steps the target's cache holds the committed rows, the proposer has seen their taps, and the
    last token of each sequence (the bonus) is emitted but in neither: it is the first row of the next
    verify forward.

    Args:
        target_layer_ids: layers whose taps the proposer gets.
        max_drafts: the most it proposes in a step, one after another.
    """
    from dflash_core.target import tap_layers

    batch = decoding.batch
    if takes_rows_back(model):
        kind: Any = _RowTarget
    else:
        if decoding.tree_nodes:
            raise InputError(
                f"{type(model).__name__} has layers that cannot verify a tree; leave tree_nodes at 0"
            )
        kind, batch = _ReplayTarget, 1
    most_rows = max(max_drafts, decoding.tree_nodes) + 1
    waiting = list(range(len(prompts)))[::-1]
    active: list[_Sequence] = []
    with tap_layers(model, list(target_layer_ids)) as taps:
        target = kind(model, taps)
        while waiting or active:
            while waiting and len(active) < batch:
                index = waiting.pop()
                logits_V, taps_TC = target.admit(prompts[index])
                generator = torch.Generator().manual_seed(seeds[index] if seeds else index)
                sequence = _Sequence(index, [], decoding.max_new_tokens, generator, most_rows)
                uniform_BU = _uniform([sequence], logits_V.device)
                token = _choose(logits_V[None, None], decoding.sampling, uniform_BU)[0][0]
                step = _step(sequence, [token], 0, 0, decoding.stop_ids, verified=False)
                proposer.admit(taps_TC)
                active.append(sequence)
                yield step
                if step.ended:
                    active.pop()
                    target.keep(list(range(len(active))))
                    proposer.keep(list(range(len(active))))
            if not active:
                continue
            paths, steps = _verify(target, proposer, max_drafts, decoding, active)
            yield from steps
            alive = [row for row, step in enumerate(steps) if not step.ended]
            if alive:
                proposer.append(target.commit(paths), [len(path) for path in paths])
            if len(alive) < len(active):
                active = [active[row] for row in alive]
                target.keep(alive)
                proposer.keep(alive)


def _verify(
    target: _RowTarget | _ReplayTarget,
    proposer: Proposer,
    max_drafts: int,
    decoding: Decoding,
    active: list[_Sequence],
) -> tuple[list[list[int]], list[Step]]:
    """Drafts, runs the target over them and judges; returns the rows to commit and what is emitted."""
    sampling = decoding.sampling
    bonus = [sequence.tokens[-1] for sequence in active]
    depths = [min(max_drafts, sequence.left - 1) for sequence in active]
    most = max(depths)
    uniform_BU = _uniform(active, target.device)
    drafter_BDV = torch.empty(len(active), 0, 1, device=target.device)
    if most:
        drafter_BDV = proposer.propose(bonus, most).to(target.device)
    drafts: list[list[int]] = []
    if decoding.tree_nodes:
        tempered_BDV = drafter_BDV if sampling.greedy else drafter_BDV / sampling.temperature
        trees = best_first(tempered_BDV, bonus, depths, decoding.tree_nodes)
    else:
        drafts = _choose(drafter_BDV, sampling, uniform_BU)
        trees = [chain(bonus[row], drafts[row][:depth]) for row, depth in enumerate(depths)]
    target_BRV = target.forward(trees)
    if sampling.greedy or decoding.tree_nodes:
        chosen = _choose(target_BRV, sampling, uniform_BU)
        paths = [tree.walk(chosen[row]) for row, tree in enumerate(trees)]
        following = [chosen[row][path[-1]] for row, path in enumerate(paths)]
    else:
        half = uniform_BU.shape[1] // 2
        accepted, following = accept(
            probabilities(target_BRV, sampling),
            probabilities(drafter_BDV, sampling),
            torch.tensor(drafts, dtype=torch.int64, device=target.device),
            torch.tensor(depths, device=target.device),
            torch.cat((uniform_BU[:, half : half + most], uniform_BU[:, -1:]), dim=1),
        )
        paths = [list(range(count + 1)) for count in accepted]
    steps = []
    for row, (sequence, tree, path) in enumerate(zip(active, trees, paths, strict=True)):
        new = [*[tree.tokens[entry] for entry in path[1:]], following[row]]
        steps.append(_step(sequence, new, len(path) - 1, tree.depth, decoding.stop_ids))
    return paths, steps


def _step(
    sequence: _Sequence,
    new: list[int],
    num_matching: int,
    num_drafts: int,
    stop_ids: Collection[int],
    *,
    verified: bool = True,
) -> Step:
    """Adds matching drafts and one more token to the sequence, up to the first stop token."""
    stop = next((i for i, token in enumerate(new) if token in stop_ids), None)
    if stop is not None and stop < num_matching:
        new = new[: stop + 1]
        num_matching = num_drafts = stop + 1
    sequence.tokens.extend(new)
    sequence.left -= len(new)
    ended = stop is not None or sequence.left == 0
    return Step(sequence.index, new, num_matching, num_drafts, verified, ended)


def _choose(logits_BRV: Tensor, sampling: Sampling, uniform_BU: Tensor) -> list[list[int]]:
    """A token for every row: the most likely one, or a sample."""
    if sampling.greedy:
        return logits_BRV.argmax(-1).tolist()
    uniform_BR = uniform_BU[:, : logits_BRV.shape[1]]
    return draw(probabilities(logits_BRV, sampling), uniform_BR).tolist()


def _uniform(sequences: list[_Sequence], device: torch.device) -> Tensor:
    return torch.stack([sequence.uniform() for sequence in sequences]).to(device)


class _RowTarget:
    """The target in the middle of several answers, with a cache that takes rows back."""

    def __init__(self, model: Any, taps: Any) -> None:
        from dflash_core.target import gdn_modules

        self._model, self._taps = model, taps
        self.device: torch.device = model.device
        self._cache = RowCache()
        for module in gdn_modules(model):
            teach_rows(module)

    def admit(self, input_ids: list[int]) -> tuple[Tensor, Tensor]:
        """Runs a prompt, which joins the batch; its last logits [V] and its taps [T, C]."""
        logits_TV, prefilled = _forward(self._model, input_ids, None, num_logits=1)
        self._cache.admit(prefilled)
        return logits_TV[-1], self._taps.stack().flatten(2)[0]

    def forward(self, trees: list[DraftTree]) -> Tensor:
        """Logits [B, R, V] after every row of the trees; rows past the end of a tree mean nothing."""
        tokens = [tree.tokens for tree in trees]
        if all(tree.is_chain for tree in trees):
            rows = Rows.chains(tokens, self.device)
        else:
            rows = Rows.trees(tokens, [tree.parents for tree in trees], self.device)
        self._cache.begin(rows)
        out = self._model(
            input_ids=rows.tokens_BR,
            position_ids=self._cache.positions_BR,
            attention_mask=self._cache.masks(self._model.dtype),
            use_cache=True,
            **{cache_name(type(self._model)): self._cache},
        )
        return out.logits

    def commit(self, paths: list[list[int]]) -> Tensor:
        """Keeps these rows of the last forward; their joined taps [B, P, C]."""
        self._cache.commit(paths)
        longest = max(map(len, paths))
        filled = [[*path, *[0] * (longest - len(path))] for path in paths]
        rows_BP = torch.tensor(filled, device=self.device)
        sequences_B1 = torch.arange(len(paths), device=rows_BP.device)[:, None]
        return self._taps.stack().flatten(2)[sequences_B1, rows_BP]

    def keep(self, sequences: list[int]) -> None:
        """Only these sequences stay."""
        self._cache.keep(sequences)


class _ReplayTarget:
    """The target in the middle of one answer, for layers whose rows cannot be taken back.

    The cache is put back to where it was before the forward, and the accepted rows are run again.
    """

    def __init__(self, model: Any, taps: Any) -> None:
        self._model, self._taps = model, taps
        self.device: torch.device = model.device

    def admit(self, input_ids: list[int]) -> tuple[Tensor, Tensor]:
        logits_TV, self._cache = _forward(self._model, input_ids, None, num_logits=1)
        return logits_TV[-1], self._taps.stack().flatten(2)[0]

    def forward(self, trees: list[DraftTree]) -> Tensor:
        self._rows = trees[0].tokens
        self._before = Snapshot(self._cache)
        return _forward(self._model, self._rows, self._cache)[0][None]

    def commit(self, paths: list[list[int]]) -> Tensor:
        num_rows = len(paths[0])
        taps_BPC = self._taps.stack().flatten(2)[:, :num_rows]
        if not self._before.rollback(num_rows):
            _forward(self._model, self._rows[:num_rows], self._cache, num_logits=1)
        return taps_BPC

    def keep(self, sequences: list[int]) -> None:
        """Nothing: an answer that has ended is the only one."""


def _forward(model: Any, rows: list[int], cache: Any, num_logits: int = 0) -> tuple[Tensor, Any]:
    """The target over the next rows: logits of the last `num_logits` of them, 0 for all, and its cache."""
    input_ids_BT = torch.tensor([rows], device=model.device)
    name = cache_name(type(model))
    options = {name: cache, "use_cache": True, "logits_to_keep": num_logits}
    out = model(input_ids=input_ids_BT, **options)
    return out.logits[0], getattr(out, name)
