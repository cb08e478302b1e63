"""Checkpoints: whole, believed by record, pruned by rule."""

import pytest
import torch

from dflash_core import checkpoint
from dflash_core.checkpoint import (
    load_drafter,
    read_metrics,
    readable_steps,
    restore_optimizer,
    save_checkpoint,
    unit_of,
)
from dflash_core.config import TrainConfig
from dflash_core.errors import CorruptError, IncompleteError, InputError
from dflash_core.manifest import Dataset
from dflash_core.optim import Optimizer
from dflash_core.storage import Storage
from tests.drafters import tiny_drafter

CONFIG = TrainConfig(num_steps=100, keep_checkpoints=2)


@pytest.fixture
def run():
    root = Storage.from_url("memory://")
    return Dataset.create(root, "runs", "demo", version=1, config=CONFIG, inputs={})


def trained(seed=0, average_decay=0.0):
    """A drafter one optimiser step from its start."""
    drafter = tiny_drafter(seed)
    optimizer = Optimizer(drafter, CONFIG)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step(average_decay=average_decay)
    return drafter, optimizer


def objects(run):
    return {info.key for info in run.storage.list("checkpoints")}


def test_drafter_shape_and_optimizer_come_back_bit_for_bit(run):
    drafter, optimizer = trained()
    save_checkpoint(run, 10, drafter, optimizer, [])
    loaded, shape, step = load_drafter(run)
    assert (step, shape) == (10, drafter.shape)
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    assert all(map(torch.equal, loaded.parameters(), drafter.parameters()))
    fresh = Optimizer(loaded, CONFIG)
    restore_optimizer(run, 10, loaded, fresh)
    for ours, theirs in zip(drafter.parameters(), loaded.parameters(), strict=True):
        expected, found = optimizer.state[ours], fresh.state[theirs]
        assert expected.keys() == found.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(expected[field], found[field]) for field in expected)


def test_averages_are_objects_of_their_own_and_what_others_load(run):
    drafter, optimizer = trained(average_decay=0.5)
    save_checkpoint(run, 10, drafter, optimizer, [])
    averages = [optimizer.state[p]["average"] for p in drafter.parameters()]
    assert all(map(torch.equal, load_drafter(run)[0].parameters(), averages))
    raw = load_drafter(run, averaged=False)[0]
    assert all(map(torch.equal, raw.parameters(), drafter.parameters()))
    fresh = Optimizer(raw, CONFIG)
    restore_optimizer(run, 10, raw, fresh)
    for ours, theirs in zip(drafter.parameters(), raw.parameters(), strict=True):
        expected, found = optimizer.state[ours], fresh.state[theirs]
        assert expected.keys() == found.keys() == {"average", "step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(expected[field], found[field]) for field in expected)
    with_averages = run.record(unit_of(10))
    save_checkpoint(run, 20, *trained(), [])
    without = run.record(unit_of(20))
    assert with_averages.keys() - without.keys() == {"average"}
    sizes = [sum(item["size"] for item in r["optimizer"]) for r in (with_averages, without)]
    assert sizes[0] == sizes[1]


def test_large_checkpoints_are_cut_into_several_objects(run, monkeypatch):
    monkeypatch.setattr(checkpoint, "_OBJECT_BYTES", 3000)
    drafter, optimizer = trained()
    save_checkpoint(run, 10, drafter, optimizer, [])
    assert len(run.record(unit_of(10))["drafter"]) > 2
    assert all(map(torch.equal, load_drafter(run)[0].parameters(), drafter.parameters()))


def test_the_untrained_and_the_newest_checkpoints_stay_and_the_others_data_goes(run):
    drafter, optimizer = trained()
    for step in (0, 10, 20, 30):
        save_checkpoint(run, step, drafter, optimizer, [{"step": step}])
    assert readable_steps(run) == [0, 20, 30]
    assert {key.split("/")[1] for key in objects(run)} == {unit_of(step) for step in (0, 20, 30)}
    assert run.committed() == {unit_of(step) for step in (0, 10, 20, 30)}
    assert [entry["step"] for entry in read_metrics(run)] == [0, 10, 20, 30]
    with pytest.raises(InputError, match=r"step 10; choose one of \[0, 20, 30\]"):
        load_drafter(run, 10)
    assert load_drafter(run, 20)[2] == 20
    assert load_drafter(run)[2] == 30


def test_pruning_takes_leftovers_of_old_steps_and_spares_a_writer_ahead(run):
    drafter, optimizer = trained()
    for step in (0, 10):
        save_checkpoint(run, step, drafter, optimizer, [])
    run.storage.put("checkpoints/step-00000010/drafter-leftover.safetensors", b"x")
    run.storage.put("checkpoints/step-00000040/drafter-ahead.safetensors", b"x")
    for step in (20, 30):
        save_checkpoint(run, step, drafter, optimizer, [])
    assert not any("leftover" in key for key in objects(run))
    assert any("ahead" in key for key in objects(run))


def test_data_without_a_record_is_not_a_checkpoint(run, monkeypatch):
    drafter, optimizer = trained()
    save_checkpoint(run, 0, drafter, optimizer, [])

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Dataset, "commit", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(run, 10, *trained(1), [])
    assert any("step-00000010" in key for key in objects(run))
    assert load_drafter(run)[2] == 0


@pytest.mark.parametrize("damage", ["altered", "cut", "missing"])
def test_a_damaged_object_is_an_error_that_names_it(run, damage):
    save_checkpoint(run, 10, *trained(), [])
    key = run.record(unit_of(10))["drafter"][0]["key"]
    data = run.storage.get(key)
    if damage == "missing":
        run.storage.delete([key])
    else:
        run.storage.put(key, data[:-1] + (b"" if damage == "cut" else bytes([data[-1] ^ 1])))
    with pytest.raises(CorruptError, match=key):
        load_drafter(run)


def test_a_run_without_checkpoints_says_so(run):
    with pytest.raises(IncompleteError, match="no checkpoint yet"):
        load_drafter(run)
