"""The chunked frozen-head loss against the naive one, and the counts by enumeration."""

import pytest
import torch
from torch.nn import functional as F

from dflash_core import loss as loss_module
from dflash_core.loss import weighted_loss
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
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", elements)
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


def test_gradient_passes_through_the_scale_of_the_sum():
    blocks, hidden, head = setup()
    gradients = [
        torch.autograd.grad(weighted_loss(hidden, head, blocks)[0] * scale, hidden)[0]
        for scale in (1.0, -2.5)
    ]
    torch.testing.assert_close(gradients[1], -2.5 * gradients[0])


def test_logits_of_all_slots_never_exist_at_once(monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", 32 * 3)
    seen = []
    original = torch.Tensor.logsumexp
    monkeypatch.setattr(
        torch.Tensor, "logsumexp", lambda x, dim: seen.append(x.shape) or original(x, dim)
    )
    blocks, hidden, head = setup()
    weighted_loss(hidden, head, blocks)
    assert len(seen) > 1
    assert max(shape[0] for shape in seen) <= 3
    assert sum(shape[0] for shape in seen) == len(blocks.supervised_M)


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
    assert counts.supervised_K.tolist() == supervised
    assert counts.correct_K.tolist() == correct
    assert counts.survived_K.tolist() == survived
    assert counts.accuracy() == pytest.approx(
        [c / s for c, s in zip(correct[1:], supervised[1:], strict=True)]
    )
    assert counts.acceptance_length() == pytest.approx(1 + sum(survived) / supervised[1])
    double = counts + counts
    assert double.survived_K.tolist() == [2 * value for value in survived]
    assert double.acceptance_length() == pytest.approx(counts.acceptance_length())
