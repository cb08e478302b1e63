"""The chunked frozen-head loss against the naive one, and the counts by enumeration."""

import math

import pytest
import torch
from torch.nn import functional as F

from dflash_core import loss as loss_module
from dflash_core.loss import (
    DISTILLATIONS,
    LastStates,
    TopK,
    cross_entropy_,
    distil_,
    dpace_weights,
    fused_cross_entropy_,
    log_p_of_logits,
    weighted_loss,
)
from tests.drafters import make_blocks, make_pack, tiny_shape


def setup(num_anchors=6, lengths=(9, 7)):
    shape = tiny_shape()
    blocks = make_blocks(make_pack(list(lengths), 18), shape, num_anchors)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(num_anchors, 4, 16, generator=generator, requires_grad=True)
    head = torch.randn(32, 16, generator=generator)
    return blocks, hidden, head


@pytest.mark.parametrize("elements", [1, 32 * 5, 2**26])
def test_loss_and_gradient_equal_the_full_logits_computation(elements, monkeypatch):
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", elements)
    blocks, hidden, head = setup()
    total, counts = weighted_loss(hidden, head, blocks)
    (total / counts.weight).backward()
    naive = hidden.detach().clone().requires_grad_()
    logits = (naive @ head.T).flatten(0, 1)
    ce = F.cross_entropy(logits, blocks.labels_NK.flatten(), reduction="none")
    weights = blocks.weights_NK.flatten()
    expected = (ce * weights).sum() / weights.sum()
    expected.backward()
    torch.testing.assert_close(total / counts.weight, expected)
    torch.testing.assert_close(hidden.grad, naive.grad)


@pytest.mark.parametrize("function", [cross_entropy_, fused_cross_entropy_])
def test_loss_and_slope_of_logits_far_apart_are_exact(function):
    logits = torch.tensor([[300.0, -300.0, 0.0], [1e4, 1e4, -1e4], [-3.0, 1.0, 0.5]])
    labels = torch.tensor([1, 0, 2])
    naive = logits.double().requires_grad_()
    expected = F.cross_entropy(naive, labels, reduction="none")
    expected.sum().backward()
    loss, correct = function(logits, labels)
    torch.testing.assert_close(loss.double(), expected.detach())
    torch.testing.assert_close(logits.double(), naive.grad)
    assert correct.tolist() == [False, True, False]


def test_gradient_passes_through_the_scale_of_the_sum():
    blocks, hidden, head = setup()
    gradients = [
        torch.autograd.grad(weighted_loss(hidden, head, blocks)[0] * scale, hidden)[0]
        for scale in (1.0, -2.5)
    ]
    torch.testing.assert_close(gradients[1], -2.5 * gradients[0])


def test_logits_of_all_slots_never_exist_at_once(monkeypatch):
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", 32 * 3)
    seen = []
    original = loss_module.cross_entropy_
    monkeypatch.setattr(
        loss_module, "cross_entropy_", lambda x, labels: seen.append(len(x)) or original(x, labels)
    )
    blocks, hidden, head = setup()
    weighted_loss(hidden, head, blocks)
    assert len(seen) > 1
    assert set(seen) == {3}


def test_slots_without_weight_never_reach_the_head():
    blocks, hidden, head = setup()
    poisoned = hidden.detach().clone()
    poisoned.view(-1, 16)[(blocks.weights_NK == 0).flatten()] = float("nan")
    expected, _ = weighted_loss(hidden, head, blocks)
    assert torch.equal(weighted_loss(poisoned, head, blocks)[0], expected.detach())


def test_no_supervised_slot_gives_zero_loss_and_zero_gradients():
    blocks, hidden, head = setup(lengths=(3, 2))
    total, counts = weighted_loss(hidden, head, blocks)
    total.backward()
    assert total.item() == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert counts.acceptance_length() == 1
    assert counts.accuracy() == [0, 0, 0]


def test_accuracy_and_acceptance_count_right_slots_and_unbroken_prefixes():
    blocks, _, _ = setup()
    head = torch.eye(32)
    # Slot j of block n is right when (n + j) % 3 != 0.
    right_NK = torch.tensor([[(n + j) % 3 != 0 for j in range(4)] for n in range(6)])
    predicted = torch.where(right_NK, blocks.labels_NK, (blocks.labels_NK + 1) % 32)
    _, counts = weighted_loss(F.one_hot(predicted, 32).float() * 9, head, blocks)
    supervised, correct, survived = [0] * 4, [0] * 4, [0] * 4
    for n in range(6):
        alive = True
        for j in range(1, 4):
            if blocks.weights_NK[n, j] == 0:
                break
            supervised[j] += 1
            correct[j] += int(right_NK[n, j])
            alive = alive and bool(right_NK[n, j])
            survived[j] += alive
    assert counts.supervised_P.tolist() == supervised[1:]
    assert counts.correct_P.tolist() == correct[1:]
    assert counts.survived_P.tolist() == survived[1:]
    assert counts.accuracy() == pytest.approx(
        [c / s for c, s in zip(correct[1:], supervised[1:], strict=True)]
    )
    assert counts.acceptance_length() == pytest.approx(1 + sum(survived) / supervised[1])
    double = counts + counts
    assert double.survived_P.tolist() == [2 * value for value in survived[1:]]
    assert double.acceptance_length() == pytest.approx(counts.acceptance_length())


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weights_are_the_sums_of_survival_products(alpha):
    generator = torch.Generator().manual_seed(0)
    loss = torch.rand(3, 5, generator=generator) * 3
    supervised = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    weights = dpace_weights(loss, supervised, alpha)
    for n, row in enumerate(supervised.tolist()):
        slots = [j for j, valid in enumerate(row) if valid]
        confidence = {j: (1 - alpha) * math.exp(-loss[n, j]) + alpha for j in slots}
        for j in range(5):
            expected = sum(
                math.prod(confidence[i] for i in slots if i <= m) for m in slots if m >= j
            )
            assert weights[n, j] == pytest.approx(expected if j in slots else 0, rel=1e-5)


def test_dpace_follows_the_gradient_of_the_expected_acceptance_length():
    # With alpha = 0 a weight is d E[accepted] / d log q of its slot: the surrogate's gradient.
    logits = torch.randn(2, 4, requires_grad=True, generator=torch.Generator().manual_seed(1))
    log_q = torch.nn.functional.logsigmoid(logits)
    accepted = log_q.exp()[:, 1:].cumprod(dim=1).sum()
    (expected,) = torch.autograd.grad(accepted, log_q)
    supervised = torch.tensor([False, True, True, True]).expand(2, 4)
    torch.testing.assert_close(dpace_weights(-log_q, supervised, 0.0), expected)


def test_dpace_loss_and_its_denominator_take_weights_from_the_losses_of_the_block():
    blocks, hidden, head = setup()
    total, counts = weighted_loss(hidden, head, blocks, dpace_alpha=0.5)
    logits = (hidden @ head.T).flatten(0, 1)
    ce = F.cross_entropy(logits, blocks.labels_NK.flatten(), reduction="none").view(6, 4)
    weights = dpace_weights(ce, blocks.weights_NK > 0, 0.5)
    torch.testing.assert_close(total, (weights * ce).sum())
    torch.testing.assert_close(counts.weight, weights.sum())
    (found,) = torch.autograd.grad(total, hidden, retain_graph=True)
    (expected,) = torch.autograd.grad((weights * ce).sum(), hidden)
    torch.testing.assert_close(found, expected)


def naive_distillation(kind, logits, teacher):
    return naive_divergence(kind, logits.softmax(-1), teacher.softmax(-1))


def naive_divergence(kind, q, p):
    kl = (p * (p.log() - q.log())).sum(-1)
    if kind == "kl":
        return kl
    overlap = torch.minimum(p, q).sum(-1)
    weight = (-3 * overlap).exp().detach()
    return weight * kl + (1 - weight) * (1 - overlap)


@pytest.mark.parametrize("kind", DISTILLATIONS)
def test_distillation_and_its_slope_are_those_of_autograd(kind):
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(5, 40, generator=generator) * 3 for _ in range(2))
    teacher[0] = logits[0]  # equal distributions: no loss, no slope
    labels = torch.cat((logits[:2].argmax(-1), logits[2:].argmin(-1)))
    naive = logits.double().requires_grad_()
    expected = naive_distillation(kind, naive, teacher.double())
    expected.sum().backward()
    loss, correct = distil_(logits, labels, DISTILLATIONS[kind], log_p_of_logits, teacher)
    torch.testing.assert_close(loss.double(), expected.detach(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(logits.double(), naive.grad, atol=1e-6, rtol=1e-5)
    assert correct.tolist() == [True, True, False, False, False]
    assert loss[0] == pytest.approx(0, abs=1e-6)


def naive_top_k(kind, logits, ids, logprobs):
    """Of distributions over the most likely tokens and one bucket."""
    q, p = logits.softmax(-1), logprobs.exp()
    rest = q.scatter(-1, ids, 0).sum(-1, keepdim=True)
    q = torch.cat((q.gather(-1, ids), rest), -1)
    return naive_divergence(kind, q, torch.cat((p, 1 - p.sum(-1, keepdim=True)), -1))


def distil_top_k(kind, logits, labels, ids, logprobs):
    """As `frozen_head_loss` does it, on logits that it replaces by the slope."""
    teacher = TopK(ids.int(), logprobs)
    known = teacher.buffer(logits)
    teacher.write(known, torch.empty(0))
    return distil_(logits, labels, DISTILLATIONS[kind], teacher.log_p_of, known)


@pytest.mark.parametrize("kind", DISTILLATIONS)
def test_distillation_from_the_most_likely_tokens_and_a_bucket_is_that_of_autograd(kind):
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(6, 40, generator=generator) * 3 for _ in range(2))
    logprobs, ids = teacher.log_softmax(-1).topk(5)
    logits[1] = logits[1].scatter_add(0, ids[1], torch.full((5,), 40.0))  # an empty bucket
    logits[2] -= 40 * (torch.arange(40) != 7)  # one token without doubt
    naive = logits.double().requires_grad_()
    expected = naive_top_k(kind, naive, ids, logprobs.double())
    expected.sum().backward()
    loss, correct = distil_top_k(kind, logits, teacher.argmax(-1), ids, logprobs)
    torch.testing.assert_close(loss.double(), expected.detach(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(logits.double(), naive.grad, atol=2e-6, rtol=1e-5)
    assert correct.tolist() == (naive.argmax(-1) == teacher.argmax(-1)).tolist()
    same = teacher.clone()
    loss, _ = distil_top_k(kind, same, ids[:, 0], ids, logprobs)
    torch.testing.assert_close(loss, torch.zeros(6), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", DISTILLATIONS)
def test_all_tokens_as_the_most_likely_ones_are_the_whole_distribution(kind):
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(5, 40, generator=generator) * 3 for _ in range(2))
    labels, slope = torch.arange(5), logits.clone()
    logprobs, ids = teacher.log_softmax(-1).topk(40)
    expected = distil_(logits, labels, DISTILLATIONS[kind], log_p_of_logits, teacher)
    found = distil_top_k(kind, slope, labels, ids, logprobs)
    for ours, theirs in zip((*found, slope), (*expected, logits), strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", DISTILLATIONS)
def test_rounded_probabilities_of_more_than_1_leave_a_distribution(kind):
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    logprobs, ids = torch.tensor([[0.505, 0.5]]).log().half(), torch.tensor([[3, 8]])
    naive = logits.double().requires_grad_()
    p = torch.full((1, 40), 1e-12, dtype=torch.float64).scatter(1, ids, logprobs.double().exp())
    expected = naive_divergence(kind, naive.softmax(-1), p / p.sum())
    expected.sum().backward()
    loss, _ = distil_top_k(kind, logits, torch.tensor([3]), ids, logprobs)
    torch.testing.assert_close(loss.double(), expected.detach(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits.double(), naive.grad, atol=1e-4, rtol=1e-4)
    assert logits.sum() == pytest.approx(0, abs=1e-6)


def test_distillations_are_traced_whole_by_the_compiler():
    compiled = torch.compile(distil_, backend="eager", fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(4, 9, generator=generator) for _ in range(2))
    logprobs, ids = teacher.log_softmax(-1).topk(3)
    for rows in (LastStates(teacher), TopK(ids, logprobs)):
        known = rows.buffer(logits)
        rows.write(known, torch.eye(9))
        for divergence in DISTILLATIONS.values():
            rest = (torch.arange(4), divergence, rows.log_p_of, known)
            plain, traced = logits.clone(), logits.clone()
            for ours, theirs in zip(compiled(traced, *rest), distil_(plain, *rest), strict=True):
                assert torch.equal(ours, theirs)
            assert torch.equal(traced, plain)


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("first_slot", [0, 1])
@pytest.mark.parametrize("kind", DISTILLATIONS)
def test_the_teacher_of_a_slot_is_the_row_before_its_label(kind, first_slot, top_k, monkeypatch):
    monkeypatch.setitem(loss_module.CHUNK_ELEMENTS, "cpu", 32 * 4)
    shape = tiny_shape(layout="shifted" if first_slot == 0 else "in-place")
    blocks = make_blocks(make_pack([9, 7], 18), shape, 6)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(6, 4, 16, generator=generator, requires_grad=True)
    head = torch.randn(32, 16, generator=generator)
    teacher = torch.randn(18, 16, generator=generator)
    logprobs, ids = (teacher @ head.T).log_softmax(-1).topk(top_k or 1)
    known = TopK(ids, logprobs) if top_k else LastStates(teacher)
    total, _ = weighted_loss(hidden, head, blocks, first_slot=first_slot, kind=kind, teacher=known)
    expected = torch.zeros(())
    for n, anchor in enumerate(blocks.anchors_N.tolist()):
        for j in range(4):
            if blocks.weights_NK[n, j] > 0:
                row = anchor + j - first_slot
                logits = hidden[n, j] @ head.T
                if top_k:
                    loss = naive_top_k(kind, logits, ids[row], logprobs[row])
                else:
                    loss = naive_distillation(kind, logits, teacher[row] @ head.T)
                expected = expected + blocks.weights_NK[n, j] * loss
    torch.testing.assert_close(total, expected, atol=1e-5, rtol=1e-5)
    ours, theirs = (torch.autograd.grad(value, hidden)[0] for value in (total, expected))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
