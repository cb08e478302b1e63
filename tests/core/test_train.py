"""The loop: accumulation, resume to the bit, refusals, and a drafter that learns."""

import dataclasses
import itertools
import types

import numpy as np
import pytest
import torch

from dflash_core import export, replay
from dflash_core.checkpoint import (
    load_drafter,
    read_metrics,
    readable_steps,
    restore_optimizer,
)
from dflash_core.config import DrafterConfig, ExportConfig, ExtractConfig, Runtime, TrainConfig
from dflash_core.data import packs_of_step
from dflash_core.errors import (
    DFlashError,
    IncompleteError,
    InputError,
    MismatchError,
    StorageError,
)
from dflash_core.hidden_states import HiddenStates, create_store, pack_unit, write_pack
from dflash_core.import_drafter import read_drafter
from dflash_core.manifest import Dataset
from dflash_core.model import Drafter
from dflash_core.optim import Optimizer
from dflash_core.ranks import Ranks
from dflash_core.storage import Storage
from dflash_core.target import identify, load_causal_lm, load_embedding_and_head
from dflash_core.train import (
    PICTURE,
    Trainer,
    _teacher_norm,
    _warn_if_apart,
    anchor_generator,
    missing,
    plan,
    run,
    seal,
    units,
)
from dflash_core.training_log import flat_numbers
from dflash_core.union import unite
from tests import targets
from tests.core.test_model import run_drafter
from tests.drafters import make_blocks, make_pack, random_taps, tiny_drafter, tiny_shape
from tests.runs import make_row, question, sealed_corpus

CLOCKS = {"tokens_per_s", "wait_s"}
CPU = Runtime(device="cpu", reader_threads=2)


def make_trainer(drafter, **changes):
    config = TrainConfig(**{"num_steps": 10, "anchors_per_pack": 20, "loss_decay": 3.0, **changes})
    shape = drafter.shape
    generator = torch.Generator().manual_seed(9)
    embedding = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)
    return Trainer(drafter, embedding, embedding, config)


# --- one step ----------------------------------------------------------------------------------------


def test_a_step_over_two_packs_equals_the_step_over_one_that_holds_both():
    shape = tiny_shape()
    together = make_pack([9, 7], 16)
    taps = random_taps(together, shape)
    one = make_trainer(tiny_drafter())
    expected = one.train_step(iter([(together, taps)]))
    parts = []
    for index, (start, length) in enumerate([(0, 9), (9, 7)]):
        part = make_pack([length], 16, index=index)
        part.input_ids[:length] = together.input_ids[start : start + length]
        part_taps = torch.zeros_like(taps)
        part_taps[:length] = taps[start : start + length]
        parts.append((part, part_taps))
    two = make_trainer(tiny_drafter(), packs_per_step=2)
    found = two.train_step(iter(parts))
    for name in ("loss", "grad_norm", "acceptance_length", "accuracy"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
    for ours, theirs in zip(one.drafter.parameters(), two.drafter.parameters(), strict=True):
        first, second = one.optimizer.state[ours], two.optimizer.state[theirs]
        torch.testing.assert_close(first["exp_avg"], second["exp_avg"], rtol=1e-4, atol=1e-7)


def test_loss_and_gradient_of_a_step_are_those_of_the_weighted_mean():
    shape, pack = tiny_shape(), make_pack([9, 7], 16)
    taps, blocks = random_taps(pack, shape), make_blocks(pack, shape, 20)  # all eligible anchors
    naive = make_trainer(tiny_drafter())
    total, _ = naive.pack_loss(naive.prepare(pack, taps, blocks))
    mean = total / blocks.weights_NK.sum()
    gradients = torch.autograd.grad(mean, list(naive.drafter.parameters()))
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    entry = make_trainer(tiny_drafter()).train_step(iter([(pack, taps)]))
    assert entry["loss"] == pytest.approx(mean.item(), rel=1e-5)
    assert entry["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_a_step_takes_only_its_own_packs_and_measures_itself():
    shape, trainer = tiny_shape(), make_trainer(tiny_drafter(), packs_per_step=2)
    packs = [make_pack([9, 7], 16, index=index) for index in range(3)]
    stream = iter([(pack, random_taps(pack, shape)) for pack in packs])
    entry = trainer.train_step(stream)
    assert entry["packs"] == [0, 1]
    assert entry["step"] == trainer.step == 1
    assert len(entry["accuracy"]) == shape.block_size - 1
    assert entry["tokens_per_s"] > 0
    assert next(stream, None) is None, "the first pack of the next step is made ready in this one"


def test_a_batch_made_ready_early_is_the_one_that_would_be_made_in_time():
    shape = tiny_shape()
    packs = [make_pack([9, 7], 16, index=index) for index in range(4)]
    visited = [(pack, random_taps(pack, shape)) for pack in packs]
    early, in_time = (
        make_trainer(tiny_drafter(), packs_per_step=2, anchors_per_pack=3) for _ in range(2)
    )
    stream = iter(visited)
    for step in range(2):
        found = early.train_step(stream)
        expected = in_time.train_step(iter(visited[2 * step : 2 * step + 2]))
        assert (found["packs"], found["loss"]) == (expected["packs"], expected["loss"])


def test_a_pack_that_cannot_be_read_stops_its_own_step_and_not_the_one_before():
    trainer = make_trainer(tiny_drafter())

    def packs():
        pack = make_pack([9, 7], 16)
        yield pack, random_taps(pack, trainer.drafter.shape)
        raise StorageError("away")

    stream = packs()
    assert trainer.train_step(stream)["step"] == 1
    with pytest.raises(StorageError, match="away"):
        trainer.train_step(stream)
    assert trainer.step == 1


def test_ranks_with_a_pack_more_add_gradients_of_the_same_type():
    """3 packs on 2 ranks: the sums of one rank are float32 on a GPU, so those of the other must be, too."""
    embedding, config = torch.randn(32, 16), TrainConfig(packs_per_step=3)
    pair = [
        Trainer(tiny_drafter(), embedding, embedding, config, ranks=Ranks(rank, 2))
        for rank in range(2)
    ]
    assert [trainer.num_packs for trainer in pair] == [2, 1]
    assert [trainer._sums.accumulates for trainer in pair] == [True, True]


def test_a_pack_without_supervised_tokens_gives_zero_loss_and_finite_weights():
    trainer = make_trainer(tiny_drafter())
    pack = make_pack([3, 2], 16)
    entry = trainer.train_step(iter([(pack, random_taps(pack, trainer.drafter.shape))]))
    assert (entry["loss"], entry["grad_norm"], entry["acceptance_length"]) == (0, 0, 1)
    assert all(parameter.isfinite().all() for parameter in trainer.drafter.parameters())


def test_a_nan_stops_before_the_weights_change_and_names_step_and_packs():
    trainer = make_trainer(tiny_drafter(), packs_per_step=2)
    before = [parameter.clone() for parameter in trainer.drafter.parameters()]
    packs = [make_pack([16], 16, index=index) for index in (4, 7)]
    taps = [random_taps(pack, trainer.drafter.shape) for pack in packs]
    taps[1][0] = float("nan")
    with pytest.raises(DFlashError, match=r"step 1: loss is nan .* packs \[4, 7\]"):
        trainer.train_step(iter(zip(packs, taps, strict=True)))
    assert all(map(torch.equal, trainer.drafter.parameters(), before))


def test_anchors_of_a_visit_are_the_same_whenever_asked_and_differ_between_visits():
    def draw(*visit):
        return torch.rand(1, generator=anchor_generator(*visit)).item()

    visits = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    assert len({draw(*visit) for visit in visits}) == 4
    assert draw(3, 2, 1) == draw(3, 2, 1)


@pytest.mark.parametrize(
    ("layout", "slot_weights", "optimizer"),
    [("in-place", "decay", "adamw"), ("shifted", "dpace", "adamw"), ("in-place", "dpace", "muon")],
)
def test_a_tiny_drafter_learns_a_few_samples_by_heart(layout, slot_weights, optimizer):
    shape = tiny_shape(
        hidden_size=32,
        intermediate_size=64,
        head_dim=8,
        block_size=5 if layout == "in-place" else 4,
        rope_theta=1e4,
        layout=layout,
    )
    trainer = make_trainer(
        Drafter(shape, torch.Generator().manual_seed(0)),
        num_steps=150,
        learning_rate=1e-2,
        anchors_per_pack=32,
        slot_weights=slot_weights,
        optimizer=optimizer,
    )
    packs = [make_pack([24, 24], 48, index=index) for index in range(2)]
    stream = itertools.cycle([(pack, random_taps(pack, shape)) for pack in packs])
    entries = [trainer.train_step(stream) for _ in range(150)]
    assert entries[0]["acceptance_length"] < 1.3
    assert entries[-1]["acceptance_length"] > 4
    assert entries[-1]["loss"] < 0.2


# --- whole runs on a real store and a real target ----------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.qwen3(tmp_path_factory.mktemp("target"))


@pytest.fixture
def root():
    return Storage.from_url("memory://")


CONFIG = TrainConfig(
    drafter=DrafterConfig(num_hidden_layers=1, block_size=4, head_dim=8),
    num_steps=5,
    packs_per_step=2,
    anchors_per_pack=8,
    checkpoint_every=2,
    keep_checkpoints=10,
    learning_rate=1e-2,
)
TAPS = [0, 1, 3]


def make_hidden(root, target, *, broken=None, silent=None, hidden_size=32, last=False, top_k=0):
    """A sealed store of three packs of two samples with random states.

    Those of pack `broken` are NaN, and pack `silent` has no supervised token.
    """
    taps = TAPS
    lengths, pack_tokens = [10, 6], 16
    tokens = types.SimpleNamespace(
        num_packs=3,
        pack_tokens=pack_tokens,
        offset=np.cumsum([0, *lengths * 3]),
        pack=np.repeat(np.arange(3), 2),
        row=np.tile([0, 10], 3),
    )
    config = ExtractConfig(target_layer_ids=taps, chunk_rows=8, last=last, teacher_top_k=top_k)
    inputs = {"tokens": f"{broken} {silent}"}
    hidden = Dataset.create(root, "hidden", "demo", version=1, config=config, inputs=inputs)
    contract = {**identify(target).contract(), "target_layer_ids": taps}
    num_taps = len(taps) + last
    layout = create_store(hidden, tokens, num_taps, hidden_size, contract, config)  # ty: ignore[invalid-argument-type]
    shape = tiny_shape(hidden_size=hidden_size, target_layer_ids=tuple(range(num_taps)))
    for index in range(3):
        pack = make_pack(lengths, pack_tokens, index=index, prompt=10 if index == silent else 2)
        taps_TLH = random_taps(pack, shape)
        if index == broken:
            taps_TLH[3] = float("nan")
        extras = teacher_arrays(target, taps_TLH[:, -1], top_k) if top_k else {}
        write_pack(hidden, layout, pack, taps_TLH, 1.0, {}, extras)
    hidden.seal([pack_unit(index) for index in range(3)], {})
    return hidden


def teacher_arrays(target, last_TH, count):
    """The most likely tokens of the target when its last states are these."""
    norm, (_, head) = _teacher_norm(target, torch.device("cpu")), load_embedding_and_head(target)
    logprobs, ids = (norm(last_TH.float()) @ head.float().T).log_softmax(-1).topk(count)
    return {"teacher_ids": ids.int(), "teacher_logprobs": logprobs.detach().half()}


def train(root, hidden, target, *, interrupt_after=None, name="demo", config=CONFIG):
    """Plans and runs; raises KeyboardInterrupt once `interrupt_after` steps are done."""

    def progress(done, total, numbers):
        assert total == CONFIG.num_steps
        assert numbers.keys() == {"loss", "acceptance_length", "tokens_per_s"}
        if done == interrupt_after:
            raise KeyboardInterrupt

    dataset = plan(root, name, hidden, target, config)
    run(dataset, hidden, target, CPU, progress)
    return dataset


def test_a_run_starts_from_the_drafter_of_another_with_more_layers(root, target):
    hidden = make_hidden(root, target)
    first = train(root, hidden, target)
    drafter = CONFIG.drafter.model_copy(update={"num_hidden_layers": 3})
    config = CONFIG.model_copy(update={"drafter": drafter, "warm_start": first.path})
    with pytest.raises(
        IncompleteError
    ):  # it may still train, and then there is no one drafter of it
        plan(root, "demo", hidden, target, config)
    seal(first, hidden)
    second = plan(root, "demo", hidden, target, config)
    assert second.request["inputs"]["warm_start"] == f"{first.fingerprint}/5"
    run(second, hidden, target, CPU)
    start, shape, _ = load_drafter(second, 0)
    trained, old_shape, _ = load_drafter(first)
    pack = make_pack([10, 6], 16)
    taps, blocks = random_taps(pack, shape), make_blocks(pack, shape, 6)
    outs = [
        run_drafter(model, pack, taps.float(), blocks, torch.ones(272, 32)).detach()
        for model in (start, trained)
    ]
    assert shape.num_hidden_layers == 3 > old_shape.num_hidden_layers
    torch.testing.assert_close(*outs)
    assert not torch.equal(load_drafter(second)[0].fc.weight, start.fc.weight)


def test_a_run_starts_from_an_exported_drafter(root, target, tmp_path):
    hidden = make_hidden(root, target)
    first = train(root, hidden, target)
    seal(first, hidden)
    exported = export.plan(root, "demo", first, target, ExportConfig())
    export.run(exported, first, target)
    copy_folder(exported.storage.child("z-lab"), tmp_path)
    config = CONFIG.model_copy(update={"warm_start": str(tmp_path)})
    second = plan(root, "demo", hidden, target, config)
    run(second, hidden, target, CPU)
    for start, end in zip(
        load_drafter(second, 0)[0].parameters(), load_drafter(first)[0].parameters(), strict=True
    ):
        assert torch.equal(start, end.bfloat16().float())


def test_averages_are_exported_and_started_from_and_leave_the_run_as_it_is(root, target, tmp_path):
    hidden = make_hidden(root, target)
    config = CONFIG.model_copy(update={"ema_decay": 0.9})
    plain = train(root, hidden, target)
    first = train(root, hidden, target, config=config)
    weights = load_drafter(first, averaged=False)[0]
    assert all(map(torch.equal, weights.parameters(), load_drafter(plain)[0].parameters()))
    averages = list(load_drafter(first)[0].parameters())
    assert not any(map(torch.equal, averages, weights.parameters()))
    seal(first, hidden)
    exported = export.plan(root, "demo", first, target, ExportConfig())
    export.run(exported, first, target)
    written = read_drafter(exported.storage.child("z-lab")).build()
    second = plan(
        root, "demo", hidden, target, config.model_copy(update={"warm_start": first.path})
    )
    run(second, hidden, target, CPU)
    start = load_drafter(second, 0)[0]
    for average, other, begun in zip(
        averages, written.parameters(), start.parameters(), strict=True
    ):
        assert torch.equal(other, average.bfloat16().float())
        assert torch.equal(begun, average)


def copy_folder(storage, folder):
    for info in storage.list(""):
        (folder / info.key).write_bytes(storage.get(info.key))


def test_a_drafter_that_does_not_fit_is_no_start(root, target):
    hidden = make_hidden(root, target)
    first = train(root, hidden, target)
    seal(first, hidden)
    drafter = CONFIG.drafter.model_copy(update={"head_dim": 16})
    config = CONFIG.model_copy(update={"drafter": drafter, "warm_start": first.path})
    with pytest.raises(
        InputError, match=r"q_proj.weight of shape \[32, 32\], this drafter \[64, 32\]"
    ):
        plan(root, "demo", hidden, target, config)


def test_checks_on_held_out_prompts_are_noted_and_warn_when_they_part(
    root, target, caplog, monkeypatch
):
    hidden = make_hidden(root, target)
    corpus = sealed_corpus(root, [make_row(question(index)) for index in range(3)])
    config = CONFIG.model_copy(update={"check_every": 2, "check_prompts": 2, "check_new_tokens": 8})
    dataset = plan(root, "demo", hidden, target, config)
    with pytest.raises(InputError, match="check_every is 2 and there is no corpus"):
        run(dataset, hidden, target, CPU)
    run(dataset, hidden, target, CPU, corpus=corpus)
    checked = [e["step"] for e in read_metrics(dataset) if "held_out_acceptance_length" in e]
    assert checked == [2, 4]
    judged = []
    with monkeypatch.context() as patch:
        genuine = replay.acceptance
        patch.setattr(
            replay,
            "acceptance",
            lambda drafter, *rest: (
                judged.append(drafter.fc.weight.clone()) or genuine(drafter, *rest)
            ),
        )
        averaging = config.model_copy(update={"ema_decay": 0.9})
        averaged = plan(root, "demo", hidden, target, averaging)
        run(averaged, hidden, target, CPU, corpus=corpus)
    for step, weight in zip((2, 4), judged, strict=True):
        assert torch.equal(weight, load_drafter(averaged, step)[0].fc.weight)
    plain = train(root, hidden, target, name="plain")
    raw = load_drafter(averaged, averaged=False)[0]
    assert torch.equal(load_drafter(plain)[0].fc.weight, raw.fc.weight)
    assert torch.equal(load_drafter(plain)[0].fc.weight, load_drafter(dataset)[0].fc.weight)
    _warn_if_apart({"step": 7, "acceptance_length": 3.0, "held_out_simulated": 1.9})
    assert "step 7: simulated acceptance length is 3.00 on training text and 1.90" in caplog.text
    caplog.clear()
    _warn_if_apart({"step": 7, "acceptance_length": 3.0, "held_out_simulated": 2.1})
    _warn_if_apart({"step": 7, "acceptance_length": 1.4, "held_out_simulated": 1.0})
    assert not caplog.text


@pytest.mark.parametrize("loss", ["kl", "lk"])
def test_the_targets_distribution_is_learnt_from_its_stored_last_state(root, target, loss):
    hidden = make_hidden(root, target, last=True)
    config = CONFIG.model_copy(update={"loss": loss, "num_steps": 60})
    dataset = plan(root, "demo", hidden, target, config)
    run(dataset, hidden, target, CPU)
    losses = [entry["loss"] for entry in read_metrics(dataset)]
    assert all(value > 0 for value in losses)
    assert np.mean(losses[-6:]) < 0.7 * np.mean(losses[:6])
    ordinary = make_hidden(root, target)
    with pytest.raises(InputError, match=r"extract\.last"):
        plan(root, "demo", ordinary, target, config)
    plain = plan(root, "demo", hidden, target, CONFIG)  # the last tap is no context of a drafter
    run(plain, hidden, target, CPU)
    assert load_drafter(plain)[1] == load_drafter(dataset)[1]


def losses_of(root, hidden, target, config, runtime=CPU):
    dataset = plan(root, "demo", hidden, target, config)
    run(dataset, hidden, target, runtime)
    return [entry["loss"] for entry in read_metrics(dataset)]


@pytest.mark.parametrize("loss", ["kl", "lk"])
def test_the_targets_distribution_is_learnt_from_its_most_likely_tokens(
    root, target, loss, tmp_path
):
    config = CONFIG.model_copy(update={"loss": loss, "teacher": "top-k", "visits_per_pack": 2})
    everything = make_hidden(root, target, last=True, top_k=targets.VOCAB)
    from_last = config.model_copy(update={"teacher": "last"})
    cached = CPU.model_copy(update={"cache_folder": str(tmp_path)})
    expected = losses_of(root, everything, target, from_last)
    found = losses_of(root, everything, target, config, cached)
    assert found == pytest.approx(expected, rel=2e-3)
    few = make_hidden(root, target, last=True, top_k=8)
    losses = losses_of(root, few, target, config.model_copy(update={"num_steps": 60}))
    assert losses[0] < 0.9 * expected[0]  # differences inside the bucket do not count
    assert np.mean(losses[-6:]) < 0.7 * np.mean(losses[:6])


def test_most_likely_tokens_that_were_not_stored_are_refused_before_training(root, target):
    hidden = make_hidden(root, target, last=True)
    config = CONFIG.model_copy(update={"loss": "kl", "teacher": "top-k"})
    with pytest.raises(InputError, match=r"teacher_top_k is 0, .*extract\.teacher_top_k"):
        plan(root, "demo", hidden, target, config)
    assert list(root.list("runs")) == []


@pytest.mark.parametrize("family", [targets.qwen3, targets.qwen3_5_text])
def test_the_teachers_norm_is_that_of_the_target(family, tmp_path):
    config = family(tmp_path)
    model = load_causal_lm(config, torch.device("cpu"))
    with torch.no_grad():
        model.model.norm.weight.uniform_(-0.5, 0.5)
    states = torch.randn(7, model.config.get_text_config().hidden_size)
    model.save_pretrained(tmp_path)
    norm = _teacher_norm(config, torch.device("cpu"))
    torch.testing.assert_close(norm(states), model.model.norm(states))


def test_dpace_needs_likelihoods():
    with pytest.raises(InputError, match="slot_weights dpace weighs likelihoods and loss is 'kl'"):
        make_trainer(tiny_drafter(), slot_weights="dpace", loss="kl")


def test_weights_that_a_step_does_not_move_in_bfloat16_are_counted():
    trainer = make_trainer(tiny_drafter())
    assert trainer.unchanged_weights() == 1
    with torch.no_grad():
        for parameter in trainer.drafter.parameters():
            parameter.mul_(1 + 2**-12)  # less than bfloat16 can hold, for most
        trainer.drafter.fc.weight.mul_(2)
    total = sum(parameter.numel() for parameter in trainer.drafter.parameters())
    moved = trainer.drafter.fc.weight.numel()
    assert (total - moved) * 0.85 < trainer.unchanged_weights() * total < total - moved
    assert trainer.unchanged_weights() == 1


def test_numbers_go_to_tensorboard_and_a_picture(root, target, tmp_path):
    pytest.importorskip("tensorboard")
    hidden = make_hidden(root, target)
    dataset = plan(root, "demo", hidden, target, CONFIG)
    run(dataset, hidden, target, CPU.model_copy(update={"tensorboard_folder": str(tmp_path)}))
    seal(dataset, hidden)
    assert list((tmp_path / dataset.path).glob("events.*"))
    assert dataset.storage.get(PICTURE).startswith(b"\x89PNG")
    numbers = flat_numbers(read_metrics(dataset)[0])
    assert {"loss", "grad_norm", "accuracy/1", "accuracy/3"} <= numbers.keys()
    assert "packs" not in numbers


def without_clocks(entries):
    return [{key: value for key, value in entry.items() if key not in CLOCKS} for entry in entries]


def test_a_run_commits_the_untrained_each_interval_and_the_end(root, target):
    hidden = make_hidden(root, target)
    dataset = plan(root, "demo", hidden, target, CONFIG)
    expected = [f"step-{step:08d}" for step in (0, 2, 4, 5)]
    assert units(CONFIG) == missing(dataset) == expected
    train(root, hidden, target)
    assert missing(dataset) == []
    assert readable_steps(dataset) == [0, 2, 4, 5]
    manifest = seal(dataset, hidden)
    assert manifest["facts"]["num_steps"] == 5
    assert manifest["facts"]["contract"]["target_layer_ids"] == TAPS
    entries = read_metrics(dataset)
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5]
    assert [entry["packs"] for entry in entries] == [
        packs_of_step(CONFIG.seed, step, 2, 3) for step in range(5)
    ]
    assert manifest["facts"]["loss"] == pytest.approx(np.mean([entry["loss"] for entry in entries]))


def test_several_stores_train_as_one(root, target):
    stores = [make_hidden(root, target), make_hidden(root, target, silent=1)]
    union = unite(root, "both", [store.path for store in stores])
    dataset = train(root, union, target)
    entries = read_metrics(dataset)
    assert [entry["packs"] for entry in entries] == [
        packs_of_step(CONFIG.seed, step, 2, 6) for step in range(5)
    ]
    assert seal(dataset, union)["facts"]["contract"]["target_layer_ids"] == TAPS
    assert dataset.request["inputs"] == {"hidden": union.fingerprint}
    # Its first step by hand, from the stores themselves.
    first, again = load_drafter(dataset, 0)[0], []
    for index in packs_of_step(CONFIG.seed, 0, 2, 6):
        store, own = divmod(index, 3)
        path = sorted(part.path for part in stores)[store]
        pack, hidden = HiddenStates.open(Dataset.open(root, path)).read_pack(own)
        again.append((dataclasses.replace(pack, index=index), hidden))
    trainer = Trainer(first, *load_embedding_and_head(target), CONFIG)
    assert trainer.train_step(iter(again))["loss"] == entries[0]["loss"]


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
@pytest.mark.parametrize("interrupt_after", [[1], [2], [3], [1, 3, 4]])
def test_an_interrupted_run_ends_with_the_bits_of_an_unbroken_one(
    root, target, interrupt_after, ema_decay
):
    hidden = make_hidden(root, target)
    config = CONFIG.model_copy(update={"ema_decay": ema_decay})
    whole = train(root, hidden, target, name="whole", config=config)
    for step in interrupt_after:
        with pytest.raises(KeyboardInterrupt):
            train(root, hidden, target, interrupt_after=step, name="cut", config=config)
    cut = train(root, hidden, target, name="cut", config=config)
    for step in (0, 2, 4, 5):
        ours, theirs = (load_drafter(one, step, averaged=False)[0] for one in (whole, cut))
        assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
        optimizers = [Optimizer(drafter, CONFIG) for drafter in (ours, theirs)]
        restore_optimizer(whole, step, ours, optimizers[0])
        restore_optimizer(cut, step, theirs, optimizers[1])
        for first, second in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert ("average" in optimizers[0].state[first]) == (ema_decay > 0 and step > 0)
            for field, value in optimizers[0].state[first].items():
                assert torch.equal(value, optimizers[1].state[second][field])
    assert without_clocks(read_metrics(cut)) == without_clocks(read_metrics(whole))


def test_a_finished_run_is_left_alone(root, target):
    hidden = make_hidden(root, target)
    dataset = train(root, hidden, target)
    before = seal(dataset, hidden)
    train(root, hidden, target, interrupt_after=5)  # would raise if a step were done
    assert seal(dataset, hidden) == before


def test_a_run_that_is_not_finished_cannot_be_sealed(root, target):
    hidden = make_hidden(root, target)
    with pytest.raises(KeyboardInterrupt):
        train(root, hidden, target, interrupt_after=3)
    dataset = plan(root, "demo", hidden, target, CONFIG)
    assert missing(dataset) == ["step-00000004", "step-00000005"]
    with pytest.raises(IncompleteError, match="2 of 4 units"):
        seal(dataset, hidden)


def test_a_nan_in_the_store_stops_the_run_and_keeps_the_last_checkpoint(root, target):
    hidden = make_hidden(root, target, broken=1)
    bad_step = next(step for step in range(5) if 1 in packs_of_step(CONFIG.seed, step, 2, 3))
    dataset = plan(root, "demo", hidden, target, CONFIG)
    with pytest.raises(DFlashError, match=rf"step {bad_step + 1}: loss is nan"):
        run(dataset, hidden, target, CPU)
    assert max(readable_steps(dataset)) <= bad_step


def test_hidden_states_of_another_target_are_refused_field_by_field(root, target, tmp_path):
    hidden = make_hidden(root, target)
    other = targets.qwen3(tmp_path, num_hidden_layers=5)
    with pytest.raises(MismatchError, match=r"target_revision: have .*want"):
        plan(root, "demo", hidden, other, CONFIG)


def test_a_store_of_another_width_is_refused(root, target):
    with pytest.raises(MismatchError, match="3 taps of 16, expected 3 of 32"):
        plan(root, "demo", make_hidden(root, target, hidden_size=16), target, CONFIG)


def test_a_drafter_that_cannot_be_is_refused_before_any_work(root, target):
    hidden = make_hidden(root, target)
    wide = CONFIG.model_copy(update={"drafter": DrafterConfig(block_size=17)})
    with pytest.raises(InputError, match="block_size 17 is larger than a pack of 16"):
        plan(root, "demo", hidden, target, wide)
    mask = CONFIG.model_copy(update={"drafter": DrafterConfig(mask_token_id=272)})
    with pytest.raises(InputError, match="mask_token_id 272"):
        plan(root, "demo", hidden, target, mask)


def test_hidden_states_that_are_not_complete_are_refused(root, target):
    hidden = Dataset.create(root, "hidden", "demo", version=1, config={}, inputs={})
    with pytest.raises(IncompleteError, match="run the hidden stage again"):
        plan(root, "demo", hidden, target, CONFIG)
