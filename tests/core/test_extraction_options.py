"""What `ExtractConfig` can ask for beyond the states of a drafter's layers."""

from __future__ import annotations

import pytest
import torch

from dflash_core.errors import InputError
from dflash_core.hidden_states import HiddenStates
from dflash_core.storage import Storage
from dflash_core.target import load_causal_lm
from tests.core.test_extraction import CONFIG, extract, plan, tokenize
from tests.targets import qwen3_5_text

TAPS = CONFIG.model_copy(update={"target_layer_ids": [0, 1]})  # of four layers


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Root, tokens, target, and the states without any option."""
    target = qwen3_5_text(tmp_path_factory.mktemp("target"))
    root = Storage.from_url(str(tmp_path_factory.mktemp("root")))
    tokens = tokenize(root, target)
    dataset, _ = extract(root, tokens, target, TAPS)
    return root, tokens, target, HiddenStates.open(dataset)


def options(case, **changes):
    root, tokens, target, plain = case
    dataset, _ = extract(root, tokens, target, TAPS.model_copy(update=changes))
    return dataset, plain


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_codec_changes_no_bit(case, codec):
    dataset, plain = options(case, codec=codec)
    store = HiddenStates.open(dataset)
    for pack in range(store.num_packs):
        assert torch.equal(store.read_pack(pack)[1], plain.read_pack(pack)[1])
    assert dataset.facts["size_bytes"] < plain.dataset.facts["size_bytes"]


def test_float8_is_off_by_a_sixteenth_at_most(case):
    dataset, plain = options(case, dtype="float8_e4m3")
    store = HiddenStates.open(dataset)
    assert store.contract["dtype"] == "float8_e4m3"
    for pack in range(store.num_packs):
        found, want = store.read_pack(pack)[1].float(), plain.read_pack(pack)[1].float()
        largest = want.abs().amax(-1, keepdim=True)
        assert ((found - want).abs() <= want.abs() / 15 + largest / 448 / 512 + 1e-6).all()
        assert not torch.equal(found, want)


def logits(target, ids):
    model = load_causal_lm(target, torch.device("cpu"))
    return model(input_ids=torch.from_numpy(ids.astype("int64"))[None]).logits[0]


@pytest.mark.parametrize("last", [False, True])
def test_final_states_and_most_likely_tokens(case, last):
    target = case[2]
    dataset, plain = options(case, last=last, teacher_top_k=4)
    store = HiddenStates.open(dataset)
    pack, hidden = store.read_pack(0)
    assert torch.equal(hidden, plain.read_pack(0)[1])
    rows = slice(int(pack.start[0]), int(pack.start[0] + pack.length[0]))
    top = logits(target, pack.input_ids[rows]).log_softmax(-1).topk(4)
    logprobs = torch.from_numpy(store.read_side(0, "teacher_logprobs")[rows]).float()
    # The states are rounded to bfloat16 before the head.
    torch.testing.assert_close(logprobs, top.values, rtol=0.05, atol=0.05)
    ids = torch.from_numpy(store.read_side(0, "teacher_ids")[rows].astype("int64"))
    assert (ids[:, 0] == top.indices[:, 0]).float().mean() > 0.9
    if last:
        whole = HiddenStates.open(dataset, last=True).read_pack(0)[1]
        model = load_causal_lm(target, torch.device("cpu"))
        normed = model.model.norm(whole[rows, -1].float())
        torch.testing.assert_close(
            model.lm_head(normed).log_softmax(-1).topk(4).values, top.values, rtol=0.05, atol=0.05
        )
    else:
        with pytest.raises(InputError, match="no final hidden states"):
            HiddenStates.open(dataset, last=True)


@pytest.mark.parametrize("changes", [{"last": True}, {"teacher_top_k": 2}])
def test_the_last_layer_is_not_tapped_twice(case, changes):
    root, tokens, target, _ = case
    config = TAPS.model_copy(update={"target_layer_ids": [1, 3], **changes})
    with pytest.raises(InputError, match=r"holds the last layer, 3"):
        plan(root, tokens, target, config)
