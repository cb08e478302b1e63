"""The training step on a GPU: bfloat16 next to the CPU's float32, and a run that learns and resumes."""

import itertools

import pytest
import torch

from dflash_core import launch
from dflash_core.checkpoint import load_drafter, restore_optimizer, save_checkpoint
from dflash_core.config import Runtime, TrainConfig
from dflash_core.data import read_ahead
from dflash_core.loss import DISTILLATIONS, LastStates, TopK, frozen_head_loss
from dflash_core.manifest import Dataset
from dflash_core.model import Drafter
from dflash_core.optim import Optimizer, bfloat16_copy
from dflash_core.storage import Storage
from dflash_core.train import Trainer, missing, plan
from tests import targets
from tests.core.test_train import CONFIG, make_hidden
from tests.drafters import ATTENTION, make_blocks, make_pack, random_taps, tiny_shape

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def make_trainer(device, shape, compiled=False, **changes):
    drafter = Drafter(shape, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(9)
    embedding = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator)
    embedding = embedding.to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    values = {"num_steps": 150, "anchors_per_pack": 32, "loss_decay": 3.0, "learning_rate": 1e-2}
    config = TrainConfig(**{**values, **changes})
    return Trainer(drafter.to(device), embedding, embedding, config, compiled=compiled)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("attention", ATTENTION)
def test_loss_and_gradient_in_bfloat16_are_close_to_float32_on_the_cpu(attention, compiled):
    shape = tiny_shape(
        hidden_size=64,
        intermediate_size=128,
        head_dim=16,
        vocab_size=512,
        mask_token_id=511,
        attention=attention,
    )
    pack = make_pack([60, 40], 128, vocab=500)
    taps, blocks = random_taps(pack, shape), make_blocks(pack, shape, 32)
    results = []
    for device in ("cpu", "cuda"):
        trainer = make_trainer(device, shape, compiled and device == "cuda")
        total, counts = trainer.pack_loss(trainer.prepare(pack, taps, blocks))
        mean = total / counts.weight
        mean.backward()
        made = map(trainer.optimizer.gradient, trainer.drafter.parameters())
        gradients = [gradient.flatten().float().cpu() for gradient in made]
        results.append((mean.item(), torch.cat(gradients)))
    (expected, expected_gradient), (found, gradient) = results
    assert found == pytest.approx(expected, rel=5e-3)
    assert torch.cosine_similarity(gradient, expected_gradient, dim=0) > 0.999
    assert gradient.norm() == pytest.approx(expected_gradient.norm().item(), rel=0.02)


@pytest.mark.parametrize(
    ("compiled", "changes"),
    [
        (False, {}),
        (True, {}),
        (True, {"packs_per_step": 2, "slot_weights": "dpace"}),
        (True, {"optimizer": "muon"}),
    ],
)
def test_a_tiny_drafter_learns_by_heart_and_its_checkpoint_comes_back(compiled, changes):
    shape = tiny_shape(
        hidden_size=32, intermediate_size=64, head_dim=16, block_size=5, rope_theta=1e4
    )
    packs = [make_pack([24, 24], 48, index=index) for index in range(2)]

    class Packs:
        num_packs = 2

        def read_pack(self, index):
            return packs[index], random_taps(packs[index], shape)

    trainer = make_trainer("cuda", shape, compiled, **changes)
    order = itertools.islice(itertools.cycle(range(2)), 150 * trainer.num_packs)
    with read_ahead(Packs(), order, 2, torch.device("cuda")) as stream:
        entries = [trainer.train_step(stream) for _ in range(150)]
    assert entries[0]["acceptance_length"] < 1.3
    assert entries[-1]["acceptance_length"] > 4
    assert all(0 < entry["mfu"] < 1 for entry in entries)
    root = Storage.from_url("memory://")
    run = Dataset.create(root, "runs", "demo", version=1, config=TrainConfig(), inputs={})
    save_checkpoint(run, 150, trainer.drafter, trainer.optimizer, entries)
    drafter = load_drafter(run)[0].to("cuda")
    optimizer = Optimizer(drafter, trainer.config, bfloat16_copy(drafter))
    restore_optimizer(run, 150, drafter, optimizer)
    for ours, theirs in zip(trainer.drafter.parameters(), drafter.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        for field, value in trainer.optimizer.state[ours].items():
            assert torch.equal(value, optimizer.state[theirs][field])


@pytest.mark.parametrize("top_k", [0, 8])
@pytest.mark.parametrize("kind", ["ce", *DISTILLATIONS])
def test_compiled_losses_are_those_of_plain_code_on_the_cpu(kind, top_k):
    generator = torch.Generator().manual_seed(0)
    hidden, teacher = (torch.randn(300, 32, generator=generator) for _ in range(2))
    head, labels = torch.randn(1000, 32, generator=generator), torch.arange(300)
    results = []
    for device in ("cpu", "cuda"):
        states = hidden.detach().to(device).requires_grad_()
        known = None if kind == "ce" else LastStates(teacher.to(device))
        if known and top_k:
            logprobs, ids = (teacher @ head.T).log_softmax(-1).topk(top_k)
            known = TopK(ids.int().to(device), logprobs.half().to(device))
        loss, correct = frozen_head_loss(states, head.to(device), labels.to(device), kind, known)
        loss.sum().backward()
        results.append((loss.cpu(), correct.cpu(), states.grad.cpu()))
    (expected, hits, gradient), (found, our_hits, our_gradient) = results
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
    assert (our_hits == hits).float().mean() > 0.99
    assert torch.cosine_similarity(our_gradient.flatten(), gradient.flatten(), dim=0) > 0.999


def test_a_run_takes_place_in_a_child_and_goes_on_after_an_interruption(tmp_path, caplog):
    root = Storage.from_url(str(tmp_path / "root"))
    target = targets.qwen3(tmp_path / "target")
    hidden = make_hidden(root, target)
    runtime = Runtime(device=DEVICE, compile=False)
    run = plan(root, "demo", hidden, target, CONFIG)

    def interrupt(done, total, numbers):
        if done == 3:
            raise KeyboardInterrupt

    before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
    with pytest.raises(KeyboardInterrupt):
        launch.run(run, hidden, target, runtime, interrupt)
    assert missing(run)
    with caplog.at_level("INFO", logger="dflash_core"):
        launch.run(run, hidden, target, runtime)
    assert missing(run) == []
    assert any("continues from step 2 of 5" in line for line in caplog.messages)
    if DEVICE == "cuda":
        assert torch.cuda.memory_allocated() == before, "all of it was the child's"
