"""Sampling: the nucleus against a plain loop, draws and rejection sampling against exact distributions."""

import numpy as np
import pytest
import torch

from dflash_core.sampling import Sampling, accept, draw, probabilities

V = 8


def random_logits(seed, *shape):
    return 2 * torch.randn(*shape, V, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 1.0])
def test_the_nucleus_matches_a_plain_loop(temperature, top_p):
    logits = random_logits(0, 6)
    found = probabilities(logits, Sampling(temperature, top_p))
    for row, ours in zip(logits.double(), found, strict=True):
        whole = (row / temperature).softmax(0)
        kept, mass = {}, 0.0
        for token in whole.argsort(descending=True).tolist():
            if mass >= top_p:
                break
            kept[token] = float(whole[token])
            mass += kept[token]
        expected = [kept.get(token, 0.0) / mass for token in range(V)]
        assert ours.tolist() == pytest.approx(expected, abs=1e-6)


def test_draws_never_leave_the_support_and_follow_the_weights():
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0])
    ends = torch.tensor([0.0, 0.749, 0.751, 1 - 2**-24, 1.0])
    assert draw(weights.expand(5, -1), ends).tolist() == [1, 1, 3, 3, 3]
    uniform = torch.rand(40_000, generator=torch.Generator().manual_seed(0))
    drawn = draw(weights.expand(len(uniform), -1), uniform)
    assert drawn.bincount(minlength=5).tolist() == pytest.approx([0, 30_000, 0, 10_000, 0], abs=400)


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
def test_rejection_sampling_emits_the_targets_own_distribution(sharpness):
    """Two drafts and the token after them: all V**3 outcomes, with drafters that are close and far off.

    The target's distribution at each place depends on what came before it, the drafter's does not.
    """
    count, num_drafts = 200_000, 2
    after = random_logits(1, 1 + V + V * V).softmax(-1)  # of every prefix of at most two tokens
    marginals = (sharpness * random_logits(2, num_drafts)).softmax(-1)
    generator = torch.Generator().manual_seed(3)
    uniform = torch.rand(count, 3 * num_drafts + 2, generator=generator)
    q = marginals.expand(count, -1, -1)
    drafts = draw(q, uniform[:, :num_drafts])
    first, second = drafts.T
    p = torch.stack(
        (after[0].expand(count, -1), after[1 + first], after[1 + V + V * first + second]), 1
    )
    accepted, following = accept(
        p, q, drafts, torch.full((count,), num_drafts), uniform[:, num_drafts : 2 * num_drafts + 1]
    )
    accepted, following = torch.tensor(accepted), torch.tensor(following)
    tokens = torch.cat((drafts, torch.zeros(count, 1, dtype=torch.int64)), 1)
    tokens.scatter_(1, accepted[:, None], following[:, None])
    # What a rejection leaves open is drawn from the target, as later steps would.
    for place in (1, 2):
        prefix = 1 + tokens[:, 0] if place == 1 else 1 + V + V * tokens[:, 0] + tokens[:, 1]
        more = draw(after[prefix], uniform[:, 2 * num_drafts + place])
        tokens[:, place] = torch.where(accepted < place, more, tokens[:, place])
    joint = after[0][:, None, None] * after[1 : 1 + V][:, :, None] * after[1 + V :].view(V, V, V)
    observed = (V * V * tokens[:, 0] + V * tokens[:, 1] + tokens[:, 2]).bincount(minlength=V**3)
    assert_distribution(observed.numpy(), joint.flatten().numpy())


def test_filled_up_drafts_are_never_accepted():
    p = torch.full((2, 3, V), 1 / V)
    q = torch.full((2, 2, V), 1 / V)
    drafts = torch.zeros(2, 2, dtype=torch.int64)
    accepted, _ = accept(p, q, drafts, torch.tensor([0, 1]), torch.zeros(2, 3))
    assert accepted == [0, 1]


def assert_distribution(observed, probability):
    """Chi-square goodness of fit; outcomes expected less than 10 times are taken together.

    The bound is passed by chance once in about a million runs, and the draws are fixed anyway.
    """
    expected = probability / probability.sum() * observed.sum()
    rare = expected < 10
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    # Wilson and Hilferty's normal approximation of chi-square.
    deviation = ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / (
        2 / (9 * freedom)
    ) ** 0.5
    assert deviation < 4.9, (statistic, freedom)
