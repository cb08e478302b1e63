"""Draft trees (DDTree): many likely continuations from one block, verified in one forward.

A block gives a distribution for every slot, each blind to what the others turn out to be. The product of
these marginals ranks all continuations, and the tree holds the most likely ones.

Shape letters: B sequences, D slots (drafts of a block), V vocabulary.
Reference: DDTree, https://arxiv.org/abs/2604.12989.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """Drafts after a bonus token. Entry 0 is that token, the root; parents come before their children."""

    tokens: list[int]
    parents: list[int]
    """Entry of each token's parent; -1 for the root."""
    depth: int
    """Drafts on the longest branch."""

    @property
    def is_chain(self) -> bool:
        """Whether there is one branch only."""
        return self.depth == len(self.tokens) - 1

    def walk(self, answers: list[int]) -> list[int]:
        """Entries from the root down to where the target's answer is not a child any more.

        Args:
            answers: the target's own next token after each entry.
        """
        children = {
            (parent, token): entry
            for entry, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))
        }
        path = [0]
        while (child := children.get((path[-1], answers[path[-1]]))) is not None:
            path.append(child)
        return path


def chain(bonus: int, drafts: list[int]) -> DraftTree:
    """One branch."""
    return DraftTree([bonus, *drafts], list(range(-1, len(drafts))), len(drafts))


def best_first(
    logits_BDV: Tensor, bonus: list[int], depths: list[int], num_nodes: int
) -> list[DraftTree]:
    """For each sequence the `num_nodes` most likely prefixes under the product of the marginals.

    Best-first search: from a prefix the next one is either its last token replaced by the next likely,
    or the likeliest token after it. A prefix never comes before its own beginning, which is at least as
    likely, so the result is a tree.

    Args:
        logits_BDV: the drafter's, already divided by the temperature.
        bonus: token before the drafts.
        depths: how many slots to use, at most D.
    """
    ranks = min(num_nodes, logits_BDV.shape[-1])
    top = logits_BDV.float().log_softmax(-1).topk(ranks, dim=-1)
    scores, tokens = top.values.tolist(), top.indices.tolist()
    return [
        _search(scores[i], tokens[i], bonus[i], depths[i], num_nodes) for i in range(len(bonus))
    ]


def _search(
    scores: list[list[float]], tokens: list[list[int]], bonus: int, depth: int, num_nodes: int
) -> DraftTree:
    """The search over the sorted scores and tokens of each slot."""
    tree = DraftTree([bonus], [-1], 0)
    deepest = 0
    # Sum of the scores negated, parent's entry, parent's sum, slot, rank.
    heap = [(-scores[0][0], 0, 0.0, 0, 0)] if depth else []
    while heap and len(tree.tokens) <= num_nodes:
        negated, parent, before, slot, rank = heapq.heappop(heap)
        entry = len(tree.tokens)
        tree.tokens.append(tokens[slot][rank])
        tree.parents.append(parent)
        deepest = max(deepest, slot + 1)
        if rank + 1 < len(scores[slot]):
            sibling = before + scores[slot][rank + 1]
            heapq.heappush(heap, (-sibling, parent, before, slot, rank + 1))
        if slot + 1 < depth:
            child = -negated + scores[slot + 1][0]
            heapq.heappush(heap, (-child, entry, -negated, slot + 1, 0))
    return DraftTree(tree.tokens, tree.parents, deepest)
