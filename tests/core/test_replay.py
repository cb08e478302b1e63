"""Replayed answers give the acceptance that decoding them gives, step by step."""

import pytest
import torch

from dflash_core import replay
from dflash_core.config import EvaluateConfig, Runtime
from dflash_core.decode import speculate
from dflash_core.evaluation_prompts import choose_prompts
from dflash_core.storage import Storage
from dflash_core.target import load_causal_lm
from tests import targets
from tests.drafters import tiny_drafter
from tests.runs import make_row, question, sealed_corpus

CPU = Runtime(device="cpu")
CONFIG = EvaluateConfig(num_prompts=4, max_new_tokens=24)
TAPS = (0, 1, 3)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.qwen3(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def corpus():
    rows = [make_row(question(index)) for index in range(5)]
    return sealed_corpus(Storage.from_url("memory://"), rows)


def drafter_for(model, made, layout):
    """One whose drafts are right about half the time: its head rows are swapped towards the answers."""
    config = model.config
    return tiny_drafter(
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        mask_token_id=260,
        target_layer_ids=TAPS,
        num_target_layers=config.num_hidden_layers,
        head_dim=8,
        block_size=5,
        layout=layout,
    )


@pytest.mark.parametrize("layout", ["in-place", "shifted"])
def test_replayed_acceptance_is_that_of_decoding(target, corpus, layout):
    made = replay.answers(corpus, target, TAPS, CONFIG, CPU)
    assert len(made) == 4
    model = load_causal_lm(target, torch.device("cpu"))
    drafter = drafter_for(model, made, layout)
    embedding = model.get_input_embeddings().weight.detach()
    # A head that knows few tokens: those the target writes most, so that some drafts are right.
    head = model.get_output_embeddings().weight.detach().clone()
    written = torch.cat([answer.input_ids_T[answer.num_prompt :] for answer in made])
    common = written.bincount(minlength=len(head)).topk(2).indices
    rare = torch.ones(len(head), dtype=torch.bool)
    rare[common] = False
    head[rare] = 0
    stop_ids = set(choose_prompts(corpus, target, CONFIG)["stop_ids"])
    tokens = steps = 0
    for answer in made:
        prompt = answer.input_ids_T[: answer.num_prompt].tolist()
        out = speculate(model, drafter, embedding, head, prompt, CONFIG.max_new_tokens, stop_ids)
        assert out.tokens == answer.input_ids_T[answer.num_prompt :].tolist()
        tokens += len(out.tokens) - 1
        steps += len(out.accepted)
    with torch.no_grad():
        found = replay.acceptance(drafter, embedding, head, made)
    assert tokens > steps  # else nothing was accepted and nothing is tested
    assert found.decoded == pytest.approx(tokens / steps)
    assert 1 < found.simulated < drafter.shape.block_size


def test_an_answer_of_one_token_counts_nothing():
    drafter = tiny_drafter()
    embedding = torch.randn(32, 16)
    answer = replay.Answer(torch.arange(5), 4, torch.zeros(5, 3, 16, dtype=torch.bfloat16))
    found = replay.acceptance(drafter, embedding, embedding, [answer])
    assert (found.decoded, found.simulated) == (0, 1)
