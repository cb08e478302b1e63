"""Two processes on a CPU train what one does, and go on after a kill with the same bits."""

import pytest
import torch

from dflash_core import launch
from dflash_core.checkpoint import load_drafter, read_metrics, restore_optimizer
from dflash_core.config import Runtime, TrainConfig
from dflash_core.errors import DeviceError, DFlashError, InputError
from dflash_core.optim import Optimizer
from dflash_core.ranks import Ranks
from dflash_core.storage import Storage
from dflash_core.train import Trainer, plan
from tests import targets
from tests.core.test_train import CONFIG, make_hidden, without_clocks
from tests.drafters import tiny_drafter

LAST = CONFIG.num_steps
AVERAGED = CONFIG.model_copy(update={"ema_decay": 0.9})
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.qwen3(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return Storage.from_url(tmp_path_factory.mktemp("root").as_uri())


@pytest.fixture(scope="module")
def hidden(root, target):
    return make_hidden(root, target)


def train(
    root,
    hidden,
    target,
    name,
    processes,
    sharding="replicate",
    *,
    stop_after=None,
    config=CONFIG,
):
    def progress(done, total, numbers):
        assert total == LAST
        if done == stop_after:
            raise KeyboardInterrupt

    dataset = plan(root, name, hidden, target, config)
    runtime = Runtime(device="cpu", train_processes=processes, sharding=sharding)
    launch.run(dataset, hidden, target, runtime, progress)
    return dataset


def weights(run, averaged=False):
    drafter = load_drafter(run, LAST, averaged=averaged)[0]
    return torch.cat([p.detach().flatten() for p in drafter.parameters()])


def moments(run):
    drafter = load_drafter(run, LAST)[0]
    optimizer = Optimizer(drafter, CONFIG)
    restore_optimizer(run, LAST, drafter, optimizer)
    return torch.cat([optimizer.state[p]["exp_avg_sq"].flatten() for p in drafter.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["replicate", "shard"])
def test_two_ranks_train_as_one_and_resume_to_the_bit(root, hidden, target, sharding, caplog):
    one = train(root, hidden, target, "one", 1, config=AVERAGED)
    with caplog.at_level("INFO", logger="dflash_core"):
        two = train(root, hidden, target, f"two-{sharding}", 2, sharding, config=AVERAGED)
    committed = [line for line in caplog.messages if line.startswith(f"step {LAST}: ")]
    assert len(committed) == 1, "the log of the first rank, once"
    for averaged in (False, True):
        torch.testing.assert_close(
            weights(two, averaged), weights(one, averaged), atol=1e-6, rtol=1e-5
        )
    assert not torch.allclose(weights(two), weights(two, averaged=True), atol=1e-4)
    torch.testing.assert_close(moments(two), moments(one), atol=1e-9, rtol=1e-4)
    for mine, theirs in zip(read_metrics(two), read_metrics(one), strict=True):
        assert mine.keys() == theirs.keys()
        for name in ("loss", "grad_norm", "acceptance_length", "accuracy"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-5)
        assert mine["packs"] == theirs["packs"]
    with pytest.raises(KeyboardInterrupt):
        train(root, hidden, target, f"cut-{sharding}", 2, sharding, stop_after=3, config=AVERAGED)
    cut = train(root, hidden, target, f"cut-{sharding}", 2, sharding, config=AVERAGED)
    for averaged in (False, True):
        assert torch.equal(weights(cut, averaged), weights(two, averaged))
    assert torch.equal(moments(cut), moments(two))
    assert without_clocks(read_metrics(cut)) == without_clocks(read_metrics(two))


@pytest.mark.slow
def test_two_ranks_learn_from_most_likely_tokens_as_one(root, target):
    hidden = make_hidden(root, target, last=True, top_k=8)
    changes = {"loss": "lk", "teacher": "top-k", "visits_per_pack": 2}
    config = CONFIG.model_copy(update=changes)
    one = train(root, hidden, target, "top-k-one", 1, config=config)
    two = train(root, hidden, target, "top-k-two", 2, "shard", config=config)
    torch.testing.assert_close(weights(two), weights(one), atol=1e-6, rtol=1e-5)


@pytest.mark.slow
def test_a_rank_without_anchors_does_not_hang_the_other_and_a_nan_stops_both(root, target):
    sparse = make_hidden(root, target, silent=1)
    one = train(root, sparse, target, "sparse-one", 1)
    two = train(root, sparse, target, "sparse-two", 2)
    torch.testing.assert_close(weights(two), weights(one), atol=1e-6, rtol=1e-5)
    broken = make_hidden(root, target, broken=1)
    with pytest.raises(DFlashError, match=r"loss is nan and gradient norm nan on packs"):
        train(root, broken, target, "broken", 2)


@pytest.mark.slow
def test_a_gpu_is_trained_on_in_a_child_whose_log_is_passed_on(
    root, hidden, target, monkeypatch, caplog
):
    here = train(root, hidden, target, "here", 1)
    monkeypatch.setattr(launch, "resolve_device", lambda device: torch.device("cuda"))
    monkeypatch.setattr(launch.train, "run", None)  # of this process
    with caplog.at_level("INFO", logger="dflash_core"):
        child = train(root, hidden, target, "child", 1)
    assert torch.equal(weights(child), weights(here))
    said = [record.getMessage() for record in caplog.records if record.name == "dflash_core.train"]
    assert [line.partition(":")[0] for line in said if "committed" in line] == [
        f"step {step}" for step in range(CONFIG.checkpoint_every, LAST, CONFIG.checkpoint_every)
    ] + [f"step {LAST}"]


def test_a_step_needs_a_pack_for_every_rank():
    embedding = torch.randn(32, 16)
    with pytest.raises(InputError, match=r"packs_per_step is 1 and there are 2 processes"):
        Trainer(tiny_drafter(), embedding, embedding, TrainConfig(), ranks=Ranks(1, 2))
    three = TrainConfig(
        packs_per_step=3
    )  # shards are gathered and reduced once a pack, by all ranks
    with pytest.raises(InputError, match="set packs_per_step to a multiple of 2"):
        Trainer(tiny_drafter(), embedding, embedding, three, ranks=Ranks(1, 2), sharded=True)
    muon = TrainConfig(optimizer="muon", packs_per_step=2)
    with pytest.raises(InputError, match="Muon steps whole matrices"):
        Trainer(tiny_drafter(), embedding, embedding, muon, ranks=Ranks(1, 2), sharded=True)


def test_a_child_that_dies_is_reported_with_its_last_lines(root, hidden, target):
    dataset = plan(root, "gone", hidden, target, CONFIG)
    gone = hidden.__class__(root, "hidden/gone-000000000000", hidden.request)
    runtime = Runtime(device="cpu", train_processes=2)
    with pytest.raises(DeviceError, match=r"ended with 1:\n(.|\n)*is not a dataset"):
        launch.run(dataset, gone, target, runtime)
