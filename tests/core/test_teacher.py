"""Most likely tokens against the whole model's own logits."""

from __future__ import annotations

import pytest
import torch

from dflash_core.errors import InputError
from dflash_core.target import load_body, load_causal_lm, tap_layers
from dflash_core.teacher import Teacher
from tests import targets

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", [targets.qwen3, targets.qwen3_5_text, targets.gemma3_text])
def test_the_most_likely_tokens_are_those_of_the_model(tmp_path, family):
    target = family(tmp_path / "target")
    ids = torch.randint(0, 250, (1, 33), generator=torch.Generator().manual_seed(0))
    wanted = load_causal_lm(target, CPU)(input_ids=ids).logits[0].log_softmax(-1)
    body = load_body(target, [3], CPU)
    with tap_layers(body, [3]) as taps:
        body(input_ids=ids, use_cache=False)
    found_ids, logprobs = Teacher(target, body).top_k(taps.stack()[0, :, 0], 5)
    top = wanted.topk(5)
    assert torch.equal(found_ids.long(), top.indices)
    torch.testing.assert_close(logprobs.float(), top.values, rtol=1e-3, atol=1e-3)


def test_a_family_that_scales_its_logits_is_refused(tmp_path):
    target = targets.qwen3(tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    path.write_text(path.read_text().replace("{", '{"logit_scale": 0.5,', 1))
    with pytest.raises(InputError, match="logit_scale"):
        Teacher(target, load_body(target, [3], CPU))
