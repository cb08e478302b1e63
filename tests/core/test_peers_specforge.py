"""The same weights, blocks and labels give the same loss in SpecForge 0.2.

`make test-peers` installs the package apart and runs this.
"""

import pytest
import torch

from dflash_core.attention import dense_mask
from dflash_core.blocks import build_blocks, ranges_by_kind
from dflash_core.loss import weighted_loss
from tests.drafters import make_pack, qwen3_config, random_taps, tiny_drafter

pytestmark = pytest.mark.peers

ANCHORS = [3, 6, 11, 20]


def their_trainer(ours, loss_type):
    """Their model with our weights, a random embedding and head, and `ANCHORS` as its anchors."""
    pytest.importorskip("specforge", reason="SpecForge is not installed")
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    shape = ours.shape
    config = qwen3_config(
        shape,
        attn_implementation="sdpa",
        block_size=shape.block_size,
        num_target_layers=shape.num_target_layers,
        dflash_config={
            "target_layer_ids": list(shape.target_layer_ids),
            "mask_token_id": shape.mask_token_id,
        },
    )
    drafter = DFlashDraftModel(config)
    drafter.load_state_dict(ours.state_dict())
    generator = torch.Generator().manual_seed(4)
    head = torch.nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
    embedding = torch.nn.Embedding(shape.vocab_size, shape.hidden_size)
    with torch.no_grad():
        for part in (head, embedding):
            part.weight.normal_(generator=generator)
    trainer = OnlineDFlashModel(
        drafter,
        head,
        embedding,
        mask_token_id=shape.mask_token_id,
        block_size=shape.block_size,
        attention_backend="sdpa",
        num_anchors=len(ANCHORS),
        loss_decay_gamma=4.0,
        loss_type=loss_type,
    )
    anchors = torch.tensor([ANCHORS]), torch.ones(1, len(ANCHORS), dtype=torch.bool)
    trainer._sample_anchor_positions = lambda *_: anchors
    return trainer


@pytest.mark.parametrize("attention", ["full-bidir", "mixed"])
@pytest.mark.parametrize(("loss_type", "dpace_alpha"), [("dflash", None), ("dpace", 0.5)])
def test_loss_and_gradient_equal_those_of_specforge(attention, loss_type, dpace_alpha):
    ours = tiny_drafter(attention=attention, sliding_window=64, head_dim=8)
    theirs = their_trainer(ours, loss_type)
    shape, pack = ours.shape, make_pack([26], 26)
    taps = random_taps(pack, shape).float()
    input_ids = torch.from_numpy(pack.input_ids.astype("int64"))
    loss_mask = torch.from_numpy(pack.loss_mask)
    positions = torch.from_numpy(pack.positions).long()
    blocks = build_blocks(
        input_ids,
        loss_mask,
        torch.from_numpy(pack.document_ids),
        positions,
        (torch.tensor(ANCHORS), torch.ones(len(ANCHORS), dtype=torch.bool)),
        block_size=shape.block_size,
        first_slot=shape.first_slot,
        mask_token_id=shape.mask_token_id,
        loss_decay=4.0,
    )
    ranges = ranges_by_kind(shape, blocks.anchors_N, blocks.starts_N)
    masks = {kind: dense_mask(seen, len(taps)) for kind, seen in ranges.items()}
    embeds = theirs.embed_tokens.weight[blocks.token_ids_NK.flatten()][None].detach()
    hidden = ours.forward_pack(
        taps.flatten(1)[None], positions[None], embeds, blocks.positions_NK.flatten()[None], masks
    )
    total, counts = weighted_loss(
        hidden.view(*blocks.labels_NK.shape, -1),
        theirs.lm_head.weight.detach(),
        blocks,
        dpace_alpha=dpace_alpha,
    )
    total.backward()
    loss, _, metrics = theirs(input_ids[None], taps.flatten(1)[None], loss_mask[None].float())
    their_total, their_weight = metrics["loss_terms"]
    assert total.item() == pytest.approx(their_total.item(), rel=1e-6)
    if loss_type == "dflash":  # with D-PACE they divide by the number of samples
        assert (total / counts.weight).item() == pytest.approx(loss.item(), rel=1e-6)
    (loss * their_weight).backward()
    gradients = {name: weight.grad for name, weight in theirs.draft_model.named_parameters()}
    for name, weight in ours.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], atol=1e-4, rtol=1e-4)
