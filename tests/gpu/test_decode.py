"""Speculative decoding on a GPU: fused kernels that write states in place, and coarse rounding."""

import random

import pytest
import torch

from dflash_core.decode import greedy, verify_chain
from dflash_core.target import load_causal_lm
from dflash_core.target_cache import Snapshot
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


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_output_is_the_targets_own_in_float32(tmp_path, family):
    model = load_causal_lm(targets.FAMILIES[family](tmp_path), CUDA)
    for _, plain, tokens in decoded(model, random.Random(family)):
        assert tokens == plain


def test_answers_in_bfloat16_are_mostly_the_same(tmp_path):
    target = targets.qwen3(tmp_path).model_copy(update={"dtype": "bfloat16"})
    model = load_causal_lm(target, CUDA)
    equal = [tokens == plain for _, plain, tokens in decoded(model, random.Random(0))]
    assert sum(equal) >= len(equal) // 2


@torch.no_grad()
def logits_in_blocks(model, rows, start, rng, *, junk):
    """Logits of the rows from `start` on, in cached blocks, with or without rows to take back."""
    out = model(rows[:, :start], use_cache=True)
    cache, found = out.past_key_values, []
    while start < rows.shape[1]:
        block = rows[:, start : start + rng.randint(1, 8)]
        size = block.shape[1]
        more = rows[:, : rng.randint(1, 6)] if junk else rows[:, :0]
        before = Snapshot(cache)
        logits = model(torch.cat((block, more), 1), past_key_values=cache, use_cache=True).logits
        if not before.rollback(size):
            model(block, past_key_values=cache, use_cache=True)
        found.append(logits[0, :size].float().cpu())
        start += size
    return torch.cat(found)


def test_rollback_of_fused_recurrent_kernels_adds_no_error_of_its_own(tmp_path):
    """Those kernels round coarsely and a random target amplifies it, so errors are compared.

    Measured on an H200 (fla 0.6.0, three seeds): up to 0.16 standard deviations of the logits without
    rollback and 0.15 with it. Logits after a wrong rollback are off by several.
    """
    target = targets.qwen3_5_text(tmp_path)
    reference, model = load_causal_lm(target, torch.device("cpu")), load_causal_lm(target, CUDA)
    errors = {True: 0.0, False: 0.0}
    for seed in range(3):
        rng = random.Random(seed)
        start = rng.randint(3, 30)
        rows = torch.tensor([[rng.randrange(256) for _ in range(start + 48)]])
        with torch.no_grad():
            wanted = reference(rows, use_cache=False).logits[0, start:]
        for junk in (False, True):
            found = logits_in_blocks(model, rows.to(CUDA), start, rng, junk=junk)
            error = float((found - wanted).abs().max() / wanted.std())
            errors[junk] = max(errors[junk], error)
    assert errors[False] < 0.5
    assert errors[True] < 3 * errors[False] + 0.05
