"""Speculative decoding on a GPU: fused kernels that write states in place, and bfloat16 rounding."""

import random

import pytest
import torch

from dflash_core.decode import greedy, verify_chain
from dflash_core.target import load_causal_lm
from tests import targets
from tests.core.test_decode import MAX_DRAFTS, TAPS, Oracle, random_prompt

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def decoded(model, rng, answers=12):
    """Prompts, plain answers and speculative answers with a proposer that errs at random."""
    for trial in range(answers):
        prompt, budget = random_prompt(rng), rng.randint(8, 32)
        whole = greedy(model, prompt, budget + MAX_DRAFTS, [])
        accuracy = [0.5, 0.8, 1.0][trial % 3]
        oracle = Oracle(len(prompt), whole, rng, accuracy, strict=False)
        out = verify_chain(model, oracle, TAPS, MAX_DRAFTS, prompt, budget, [])
        yield prompt, whole[:budget], out.tokens


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_5_text"])
def test_output_is_the_targets_own_in_float32(tmp_path, family):
    torch.backends.cuda.matmul.allow_tf32 = False
    model = load_causal_lm(targets.FAMILIES[family](tmp_path), CUDA)
    for _, plain, tokens in decoded(model, random.Random(family)):
        assert tokens == plain


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5_text"])
def test_answers_in_bfloat16_part_only_where_logits_are_nearly_equal(tmp_path, family):
    target = targets.FAMILIES[family](tmp_path).model_copy(update={"dtype": "bfloat16"})
    model = load_causal_lm(target, CUDA)
    num_equal, num_answers = 0, 12
    for prompt, plain, tokens in decoded(model, random.Random(family), num_answers):
        if plain == tokens:
            num_equal += 1
            continue
        at = next(i for i, (a, b) in enumerate(zip(plain, tokens, strict=True)) if a != b)
        rows = torch.tensor([[*prompt, *plain[:at]]], device=CUDA)
        with torch.no_grad():
            logits = model(rows, use_cache=False).logits[0, -1].float()
        gap = abs(logits[plain[at]] - logits[tokens[at]])
        assert gap <= 0.03 * logits.abs().max(), (at, gap)
    assert num_equal >= num_answers // 2
