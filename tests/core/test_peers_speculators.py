"""The same weights, blocks and labels give the same hidden states and loss in speculators 0.9.

`make test-peers` installs the package apart and runs this.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dflash_core.attention import dense_mask
from dflash_core.blocks import build_blocks, ranges_by_kind
from dflash_core.loss import weighted_loss
from tests.drafters import make_pack, qwen3_config, random_taps, tiny_drafter

pytestmark = pytest.mark.peers

ANCHORS = [3, 6, 11, 26, 29]  # blocks of 4 that stay inside their sample


def their_drafter(ours):
    """Their model with our weights and a random frozen embedding and head."""
    pytest.importorskip("speculators", reason="speculators is not installed")
    from speculators.models.dflash.config import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel

    shape = ours.shape
    layer = qwen3_config(shape, attn_implementation="eager")
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape.vocab_size,
        block_size=shape.block_size,
        aux_hidden_state_layer_ids=[k + 1 for k in shape.target_layer_ids],
        mask_token_id=shape.mask_token_id,
        sliding_window_non_causal=shape.attention == "swa-bidir",
    )
    theirs = DFlashDraftModel(config)
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not unexpected
    assert all("verifier" in name or "embed" in name or "lm_head" in name for name in missing)
    with torch.no_grad():
        for name in ("embed_tokens", "lm_head", "verifier_lm_head"):
            getattr(theirs, name).weight.normal_(generator=torch.Generator().manual_seed(4))
        # Only tokens 0 and 1 are ever predicted, and the pack holds no others: half the slots are right.
        theirs.lm_head.weight[1] = -theirs.lm_head.weight[0]
        theirs.lm_head.weight[2:] = 0
    return theirs


# Windows larger than a sample: theirs is counted from the anchor for all slots, ours from each slot.
@pytest.mark.parametrize("attention", ["full-bidir", "swa-causal", "swa-bidir", "mixed"])
def test_hidden_states_loss_accuracy_and_acceptance_equal_those_of_speculators(
    attention, monkeypatch
):
    ours = tiny_drafter(attention=attention, sliding_window=64, head_dim=8)
    theirs = their_drafter(ours)
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash import core
    from speculators.models.dflash.metrics import compute_metrics

    shape, pack = ours.shape, make_pack([20, 16], 40, vocab=2)
    taps = random_taps(pack, shape).float()
    anchors = torch.tensor(ANCHORS), torch.ones(len(ANCHORS), dtype=torch.bool)
    input_ids = torch.tensor(pack.input_ids.astype(np.int64))
    loss_mask, documents = torch.tensor(pack.loss_mask), torch.tensor(pack.document_ids)
    positions = torch.tensor(pack.positions).long()
    blocks = build_blocks(
        input_ids,
        loss_mask,
        documents,
        positions,
        anchors,
        block_size=shape.block_size,
        first_slot=shape.first_slot,
        mask_token_id=shape.mask_token_id,
        loss_decay=4.0,
    )
    assert (blocks.weights_NK[:, 1:] > 0).all()
    embedding, head = theirs.embed_tokens.weight, theirs.lm_head.weight
    context = ours.project_context(taps.flatten(1)[None], positions[None])
    ranges = ranges_by_kind(shape, blocks.anchors_N, blocks.starts_N)
    masks = {kind: dense_mask(seen, len(taps)) for kind, seen in ranges.items()}
    embeds = embedding[blocks.token_ids_NK.flatten()][None]
    hidden = ours(embeds, blocks.positions_NK.flatten()[None], context, masks)
    total, counts = weighted_loss(hidden.view(len(ANCHORS), -1, shape.hidden_size), head, blocks)

    monkeypatch.setattr(core, "select_anchors", lambda *_: anchors)
    their_hidden, logits, _, mask, rows = theirs._backbone_forward(
        taps.flatten(1)[None],
        input_ids[None],
        loss_mask[None].float(),
        taps[None, :, 0],
        documents[None],
        positions[None],
        max_anchors=len(ANCHORS),
    )
    torch.testing.assert_close(hidden, their_hidden, atol=1e-5, rtol=1e-5)
    labels = F.one_hot(input_ids[rows], shape.vocab_size)[None] * 100.0
    loss, metrics = compute_metrics(
        logits,
        labels,
        mask,
        shape.block_size,
        gamma=4.0,
        loss_config=resolve_loss_config("ce", "eager"),
    )
    # They divide by the number of supervised slots, we by the sum of the weights.
    assert total.item() == pytest.approx(loss.item() * mask.sum().item(), rel=1e-6)
    accuracy = [
        (metrics[f"position_{j}_acc_sum"] / metrics[f"position_{j}_acc_total"]).item()
        for j in range(1, shape.block_size)
    ]
    assert 0 < sum(accuracy) < 3
    assert counts.accuracy() == pytest.approx(accuracy)
    acceptance = (metrics["eal_sum"] / metrics["eal_total"]).item()
    assert counts.acceptance_length() == pytest.approx(acceptance)
