"""The best-first tree against an enumeration of all prefixes, and its walk."""

import itertools

import pytest
import torch

from dflash_core.draft_tree import DraftTree, best_first, chain

D, V = 3, 5


def prefixes(tree):
    """Each node as the tokens from under the root down to it."""
    found = [()]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found[1:]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_nodes", [1, 4, 17, 200])
def test_it_holds_the_most_likely_prefixes(seed, num_nodes):
    logits = 2 * torch.randn(1, D, V, generator=torch.Generator().manual_seed(seed))
    (tree,) = best_first(logits, [9], [D], num_nodes)
    scores = logits[0].double().log_softmax(-1)
    everything = {
        prefix: float(sum(scores[slot, token] for slot, token in enumerate(prefix)))
        for depth in range(1, D + 1)
        for prefix in itertools.product(range(V), repeat=depth)
    }
    best = sorted(everything, key=everything.__getitem__, reverse=True)[:num_nodes]
    assert prefixes(tree) == best
    assert tree.tokens[0] == 9
    assert tree.parents[0] == -1
    assert all(parent < entry for entry, parent in enumerate(tree.parents))
    assert tree.depth == max(map(len, best))


def test_it_goes_no_deeper_than_asked_and_may_be_empty():
    logits = torch.randn(3, D, V, generator=torch.Generator().manual_seed(0))
    trees = best_first(logits, [1, 2, 3], [2, 0, 3], 40)
    assert [tree.depth for tree in trees] == [2, 0, 3]
    assert trees[1] == DraftTree([2], [-1], 0)
    assert len(trees[0].tokens) == 1 + V + V**2


def test_the_walk_follows_the_targets_answers():
    #      1
    #    2   3
    #   4 5   2
    tree = DraftTree([1, 2, 3, 4, 5, 2], [-1, 0, 0, 1, 1, 2], 2)
    assert not tree.is_chain
    assert tree.walk([2, 5, 0, 0, 7, 0]) == [0, 1, 4]
    assert tree.walk([3, 5, 2, 0, 0, 2]) == [0, 2, 5]
    assert tree.walk([3, 5, 4, 0, 0, 2]) == [0, 2]
    assert tree.walk([9, 5, 4, 0, 0, 2]) == [0]


def test_a_chain_is_one_branch():
    tree = chain(7, [1, 2])
    assert tree == DraftTree([7, 1, 2], [-1, 0, 1], 2)
    assert tree.is_chain
    assert chain(7, []).is_chain
    assert tree.walk([1, 3, 0]) == [0, 1]
