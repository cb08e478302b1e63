"""The optimiser against torch's own, its bfloat16 copies, and the schedules."""

import itertools

import pytest
import torch

from dflash_core import optim
from dflash_core.config import TrainConfig
from dflash_core.optim import (
    Optimizer,
    adamw_,
    average_decay,
    bfloat16_copy,
    learning_rate,
    orthogonal,
)
from tests.drafters import tiny_drafter


def set_gradients(*drafters, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameters in zip(*(drafter.parameters() for drafter in drafters), strict=True):
        gradient = torch.randn(parameters[0].shape, generator=generator)
        for parameter in parameters:
            parameter.grad = gradient.to(parameter.dtype, copy=True)


def step_of(drafter, optimizer, *, steps=3, scale=0.5, rate=0.1):
    for group in optimizer.param_groups:
        group["lr"] = rate
    for seed in range(steps):
        set_gradients(drafter, seed=seed)
        optimizer.step(scale)


def test_adamw_is_that_of_torch_with_scaled_gradients():
    config = TrainConfig(weight_decay=0.3)
    ours, theirs = tiny_drafter(), tiny_drafter()
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    norms = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), weight_decay=0.3)
    step_of(ours, Optimizer(ours, config))
    for seed in range(3):
        set_gradients(theirs, seed=seed)
        for parameter in theirs.parameters():
            parameter.grad *= 0.5
        reference.step()
    for first, second in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-5)
        assert first.grad is None


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(optim, "_compiled_adamw", lambda: adamw_)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_copies_follow_the_float32_weights_and_give_their_gradients(kind, uncompiled):
    config = TrainConfig(weight_decay=0.3, optimizer=kind)
    plain, master = tiny_drafter(), tiny_drafter()
    compute = bfloat16_copy(master)
    plain_optimizer = Optimizer(plain, config)
    optimizer = Optimizer(master, config, compute)
    for seed in range(3):
        set_gradients(compute, seed=seed)
        for mine, copied in zip(plain.parameters(), compute.parameters(), strict=True):
            mine.grad = copied.grad.to(torch.float32, copy=True)
        optimizer.step(0.5)
        plain_optimizer.step(0.5)
    for mine, weight, copied in zip(
        plain.parameters(), master.parameters(), compute.parameters(), strict=True
    ):
        assert weight.dtype == torch.float32
        torch.testing.assert_close(weight, mine, atol=1e-6, rtol=1e-5)
        assert copied.dtype == (torch.bfloat16 if weight.ndim == 2 else torch.float32)
        assert torch.equal(copied, weight.to(copied.dtype))
        assert optimizer.state[weight].keys() == plain_optimizer.state[mine].keys()
        for name, value in optimizer.state[weight].items():
            torch.testing.assert_close(value, plain_optimizer.state[mine][name])


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_averages_are_those_of_a_plain_loop_and_change_no_weight(kind, copies, uncompiled):
    config = TrainConfig(optimizer=kind, ema_decay=0.25)
    plain, drafter = tiny_drafter(), tiny_drafter()
    plain_optimizer = Optimizer(plain, config, bfloat16_copy(plain) if copies else None)
    optimizer = Optimizer(drafter, config, bfloat16_copy(drafter) if copies else None)
    expected = [parameter.detach().double() for parameter in plain.parameters()]
    for step, keep in enumerate([1 / 10, 2 / 11, 0.25, 0.25]):  # 3 / 12 is the decay itself
        assert average_decay(step, config) == pytest.approx(keep)
        for one in (plain_optimizer, optimizer):
            set_gradients_of(one, seed=step)
        plain_optimizer.step(0.5)
        optimizer.step(0.5, average_decay(step, config))
        expected = [
            keep * average + (1 - keep) * parameter.detach().double()
            for average, parameter in zip(expected, plain.parameters(), strict=True)
        ]
    raw = list(plain.parameters())
    assert all(map(torch.equal, raw, drafter.parameters()))
    assert not any("average" in state for state in plain_optimizer.state.values())
    for average, parameter in zip(expected, drafter.parameters(), strict=True):
        found = optimizer.state[parameter]["average"]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), average, atol=1e-7, rtol=1e-6)
        assert not torch.equal(found, parameter)


def set_gradients_of(optimizer, *, seed):
    generator = torch.Generator().manual_seed(seed)
    for copied in optimizer.copies.values():
        copied.grad = torch.randn(copied.shape, generator=generator).to(copied.dtype)


def test_weights_and_averages_change_places_and_come_back():
    config = TrainConfig(ema_decay=0.9)
    drafter = tiny_drafter()
    optimizer = Optimizer(drafter, config)
    set_gradients(drafter)
    optimizer.step(1.0, 0.5)
    places = [parameter.data_ptr() for parameter in drafter.parameters()]
    weights = [parameter.detach().clone() for parameter in drafter.parameters()]
    averages = [optimizer.state[p]["average"].clone() for p in drafter.parameters()]
    with optimizer.averaged():
        assert all(map(torch.equal, drafter.parameters(), averages))
    assert all(map(torch.equal, drafter.parameters(), weights))
    assert [parameter.data_ptr() for parameter in drafter.parameters()] == places
    for parameter, average in zip(drafter.parameters(), averages, strict=True):
        assert torch.equal(optimizer.state[parameter]["average"], average)


def test_steps_smaller_than_bfloat16_can_hold_add_up(uncompiled):
    master = tiny_drafter()
    compute = bfloat16_copy(master)
    optimizer = Optimizer(master, TrainConfig(weight_decay=0.0), compute)
    with torch.no_grad():
        master.fc.weight.fill_(1)
        compute.fc.weight.fill_(1)
    for group in optimizer.param_groups:
        group["lr"] = 1e-4  # a bfloat16 below 1 is 1/256 away
    for _ in range(100):
        for parameter in compute.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    moved = torch.full_like(master.fc.weight, 1 - 100 * 1e-4)
    torch.testing.assert_close(master.fc.weight, moved, atol=1e-5, rtol=0)
    torch.testing.assert_close(compute.fc.weight.float(), moved, atol=2**-8, rtol=0)


def test_gradients_of_several_packs_are_added_in_float32():
    master = tiny_drafter()
    compute = bfloat16_copy(master)
    optimizer = Optimizer(master, TrainConfig(), compute)
    for value in (256.0, 1.0, 1.0):  # 257 is no bfloat16
        for parameter in compute.parameters():
            if parameter.ndim == 2:  # autograd itself adds the others, which are shared
                parameter.grad = torch.full_like(parameter, value)
        for parameter in master.parameters():
            optimizer.accumulate(parameter)
    for parameter in master.parameters():
        if parameter.ndim == 2:
            assert (parameter.grad == 258).all()


def test_muon_is_that_of_torch_with_its_own_orthogonalisation(monkeypatch):
    def exact(matrix, *_args):
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        return left @ right

    monkeypatch.setattr(optim, "orthogonal", exact)
    monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", exact)
    drafter = tiny_drafter()
    optimizer = Optimizer(drafter, TrainConfig(optimizer="muon", weight_decay=0.3))
    weight = drafter.layers[0].mlp.gate_proj.weight
    theirs = torch.nn.Parameter(weight.detach().clone())
    reference = torch.optim.Muon(
        [theirs], lr=0.1, weight_decay=0.3, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    for seed in range(3):
        set_gradients(drafter, seed=seed)
        theirs.grad = weight.grad.clone()
        optimizer.step()
        reference.step()
    torch.testing.assert_close(weight, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (64, 64), (48, 400)])
def test_orthogonal_keeps_the_directions_and_evens_out_the_singular_values(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    rank = min(shape)
    left = torch.linalg.qr(torch.randn(shape[0], rank, generator=generator))[0]
    right = torch.linalg.qr(torch.randn(shape[1], rank, generator=generator))[0]
    values = torch.logspace(-4, 0, rank)
    matrix = 3e-5 * left * values @ right.mT  # gradients are small
    found = left.mT @ orthogonal(matrix, dtype) @ right
    diagonal = found.diagonal()
    large = values >= 0.01 * values.pow(4).sum() ** 0.25
    assert diagonal[large].min() > 0.7
    assert diagonal.max() < 1.3
    assert ((diagonal > 0) | (values < 1e-3)).all()  # the smallest are lost in bfloat16
    off = found - torch.diag(diagonal)
    assert off.abs().max() < (1e-4 if dtype == torch.float32 else 0.03)


def test_orthogonal_of_nothing_is_nothing():
    zeros = torch.zeros(4, 6)
    assert torch.equal(orthogonal(zeros, torch.float32), zeros)


def test_matrices_decay_and_norms_do_not():
    drafter = tiny_drafter()
    optimizer = Optimizer(drafter, TrainConfig(weight_decay=0.5))
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    for name, parameter in drafter.named_parameters():
        assert decay[id(parameter)] == (0.0 if "norm" in name else 0.5)


def test_learning_rate_rises_to_its_peak_and_falls_to_zero():
    config = TrainConfig(num_steps=100, warmup_fraction=0.1, learning_rate=1.0)
    rates = [learning_rate(step, config) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == max(rates) == 1
    assert rates[55] == pytest.approx(0.5)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert rates[100] == pytest.approx(0)
    constant = TrainConfig(num_steps=1, warmup_fraction=1.0, learning_rate=1.0)
    assert learning_rate(0, constant) == 1


def test_wsd_stays_at_its_peak_until_the_last_part():
    config = TrainConfig(
        num_steps=100, warmup_fraction=0.1, learning_rate=1.0, schedule="wsd", decay_fraction=0.2
    )
    rates = [learning_rate(step, config) for step in range(101)]
    assert rates[9:81] == [1.0] * 72
    assert rates[90] == pytest.approx(0.5)
    assert all(a > b for a, b in itertools.pairwise(rates[80:]))
    assert rates[100] == pytest.approx(0)
