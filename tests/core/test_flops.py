"""Operations that are reckoned against those that are done."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dflash_core.flops import flops_of_step
from tests.core.test_train import make_trainer
from tests.drafters import make_blocks, make_pack, random_taps, tiny_drafter


class Products(TorchDispatchMode):
    """Counts the operations of all products of two matrices; attention has batches of them."""

    flops = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket is torch.ops.aten.mm:
            (rows, inner), (_, columns) = (matrix.shape for matrix in args)
            self.flops += 2 * rows * inner * columns
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_operations_of_a_step_are_those_of_its_products(loss):
    drafter, pack = tiny_drafter(), make_pack([9, 7], 18)
    trainer = make_trainer(drafter, loss=loss)
    trainer._teacher_norm = torch.nn.Identity() if loss == "kl" else None
    blocks = make_blocks(pack, drafter.shape, 12)
    taps = random_taps(pack, drafter.shape)
    taps = torch.cat((taps, taps[:, :1]), 1).float()
    batch = trainer.prepare(pack, taps, blocks)
    with Products() as products:
        trainer.pack_loss(batch)[0].backward()
    assert 0 < len(blocks.supervised_M) < blocks.labels_NK.numel()
    assert products.flops == trainer._flops(batch)
    assert products.flops == flops_of_step(
        drafter,
        trainer._head_VH,
        num_rows=18,
        num_slots=12 * 4,
        num_supervised=len(blocks.supervised_M),
        teacher_has_logits=loss == "kl",
    )


def test_steps_on_a_cpu_have_no_share_of_a_speed():
    trainer, pack = make_trainer(tiny_drafter()), make_pack([9, 7], 16)
    entry = trainer.train_step(iter([(pack, random_taps(pack, trainer.drafter.shape))]))
    assert "mfu" not in entry
