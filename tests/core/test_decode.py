"""Speculative decoding against the target alone, on tiny random targets in float32."""

import random

import pytest
import torch

from dflash_core import decode
from dflash_core.config import DrafterConfig
from dflash_core.decode import BlockProposer, Generation, greedy, speculate, verify_chain
from dflash_core.errors import InputError
from dflash_core.model import Drafter, resolve_shape
from dflash_core.target import load_causal_lm
from tests import targets

CPU = torch.device("cpu")
FAMILIES = ["llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_5_text", "qwen3_5_moe"]
CONTRACTS = ["full-bidir", "swa-causal", "mixed", "swa-bidir"]
TAPS = [0, 1, 3]
MAX_DRAFTS = 7


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = load_causal_lm(targets.FAMILIES[family](folder), CPU)
        return made[family]

    return get


def make_drafter(model, attention="full-bidir", seed=0, block_size=MAX_DRAFTS + 1):
    config = DrafterConfig(
        num_hidden_layers=2, block_size=block_size, attention=attention, sliding_window=5
    )
    shape = resolve_shape(config, model.config, TAPS, mask_token_id=270)
    drafter = Drafter(shape, torch.Generator().manual_seed(seed))
    for parameter in drafter.parameters():
        parameter.data *= 1.5  # wide enough that slots and context rows matter
    return drafter.requires_grad_(False)


def embedding_and_head(model):
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


class Oracle:
    """Drafts the true continuation and errs at random places; checks what it is told."""

    def __init__(self, num_prompt, continuation, rng, accuracy, strict=True):
        self.num_prompt, self.continuation = num_prompt, continuation
        self.rng, self.accuracy = rng, accuracy
        self.taps, self.strict = [], strict

    def append(self, taps_BTC):
        self.taps.append(taps_BTC)

    def propose(self, bonus, num_drafts):
        emitted = sum(taps.shape[1] for taps in self.taps) - self.num_prompt + 1
        # In bfloat16 an answer may leave the continuation; what is proposed then does not matter.
        assert bonus == self.continuation[emitted - 1] or not self.strict
        true = self.continuation[emitted : emitted + num_drafts]
        assert len(true) == num_drafts
        return [
            token if self.rng.random() < self.accuracy else self.rng.randrange(256)
            for token in true
        ]


def random_prompt(rng, longest=30):
    return [rng.randrange(256) for _ in range(rng.randint(1, longest))]


@pytest.mark.parametrize("family", FAMILIES)
def test_output_is_the_targets_own_whatever_is_accepted(models, family):
    model, rng = models(family), random.Random(family)
    steps = []
    for trial in range(15):
        prompt, budget = random_prompt(rng), rng.randint(1, 32)
        whole = greedy(model, prompt, budget + MAX_DRAFTS, [])
        # Every other answer never stops; the others stop at a token that occurs, often inside an accepted run.
        stop_ids = [] if trial % 2 == 0 else [rng.choice(whole), 271]
        plain = greedy(model, prompt, budget, stop_ids)
        oracle = Oracle(len(prompt), whole, rng, accuracy=[0.5, 0.8, 1.0][trial % 3])
        out = verify_chain(model, oracle, TAPS, MAX_DRAFTS, prompt, budget, stop_ids)
        assert out.tokens == plain
        steps += out.accepted
    assert set(steps) >= {0, 1, 2, MAX_DRAFTS}, "the test lost its variety"


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
@pytest.mark.parametrize("attention", CONTRACTS)
def test_output_is_the_targets_own_with_an_untrained_drafter(models, family, attention):
    model, rng = models(family), random.Random(0)
    drafter, (embedding, head) = make_drafter(model, attention), embedding_and_head(model)
    for _ in range(3):
        prompt = random_prompt(rng)
        plain = greedy(model, prompt, 12, [257])
        out = speculate(model, drafter, embedding, head, prompt, 12, [257])
        assert out.tokens == plain


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_5_text"])
def test_the_proposer_gets_the_taps_of_committed_rows_only_each_once(models, family):
    model, rng = models(family), random.Random(1)
    prompt = random_prompt(rng)
    whole = greedy(model, prompt, 40, [])
    oracle = Oracle(len(prompt), whole, rng, accuracy=0.7)
    out = verify_chain(model, oracle, TAPS, MAX_DRAFTS, prompt, 30, [])
    taps = torch.cat(oracle.taps, dim=1)
    rows = [*prompt, *out.tokens][: taps.shape[1]]
    with torch.no_grad():
        states = model(torch.tensor([rows]), output_hidden_states=True, use_cache=False)
    # The last layer has no raw entry in hidden_states, so compare the others.
    width = model.config.hidden_size
    for place, layer in enumerate(TAPS[:2]):
        ours = taps[..., place * width : (place + 1) * width]
        torch.testing.assert_close(ours, states.hidden_states[layer + 1], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("attention", CONTRACTS)
def test_drafts_from_a_growing_context_equal_a_fresh_computation(models, attention):
    model = models("qwen3")
    drafter, (embedding, head) = make_drafter(model, attention), embedding_and_head(model)
    generator = torch.Generator().manual_seed(3)
    taps = torch.randn(1, 19, 3 * model.config.hidden_size, generator=generator)
    grown = BlockProposer(drafter, embedding, head)
    for start, stop in [(0, 9), (9, 10), (10, 17), (17, 19)]:
        grown.append(taps[:, start:stop])
    whole = BlockProposer(drafter, embedding, head)
    whole.append(taps)
    assert grown.propose(65, MAX_DRAFTS) == whole.propose(65, MAX_DRAFTS)
    assert grown.propose(65, 3) == whole.propose(65, MAX_DRAFTS)[:3]
    assert grown.propose(66, MAX_DRAFTS) != whole.propose(65, MAX_DRAFTS)


@pytest.mark.parametrize("attention", CONTRACTS)
@pytest.mark.parametrize("num_context", [1, 3, 5, 12])
def test_block_masks_match_an_enumeration(models, attention, num_context):
    shape = make_drafter(models("qwen3"), attention).shape
    masks = decode.block_masks(shape, num_context, CPU)
    assert set(masks) == set(shape.layer_types)
    for kind, mask in masks.items():
        sliding = kind == "sliding_attention"
        causal = sliding and attention != "swa-bidir"
        for j in range(shape.block_size):
            query = num_context + j
            for key in range(num_context + shape.block_size):
                seen = not (causal and key > query)
                if sliding:
                    seen = seen and abs(query - key) <= shape.sliding_window - 1
                assert bool(mask[0, 0, j, key]) == seen, (kind, j, key)


def test_a_stop_token_inside_an_accepted_run_ends_the_answer(models, monkeypatch):
    out = run_scripted(monkeypatch, answers=[5, 6, 7, 8], drafts=[6, 7, 8], stop_ids=[7])
    assert out == Generation(tokens=[5, 6, 7], accepted=[2], judged=[2])


def test_a_stop_token_behind_the_accepted_run_ends_the_answer_too(monkeypatch):
    out = run_scripted(monkeypatch, answers=[5, 6, 7, 8], drafts=[6, 9, 9], stop_ids=[7])
    assert out == Generation(tokens=[5, 6, 7], accepted=[1], judged=[3])


def test_a_first_token_that_stops_needs_no_step(monkeypatch):
    out = run_scripted(monkeypatch, answers=[5], drafts=[], stop_ids=[5])
    assert out == Generation(tokens=[5], accepted=[], judged=[])


def run_scripted(monkeypatch, answers, drafts, stop_ids):
    """`verify_chain` with a target that continues with `answers` and a proposer of `drafts`."""

    class Scripted:
        def __init__(self, model, taps):
            self.done = 0

        def forward(self, rows, num_logits=0):
            start = self.done
            self.done += 1
            return answers[start : start + 1] if num_logits else answers[start : start + len(rows)]

        def commit(self, num_rows):
            return torch.zeros(1, num_rows, 1)

    class Proposer:
        def append(self, taps_BTC): ...
        def propose(self, bonus, num_drafts):
            return drafts[:num_drafts]

    class NoTaps:
        def __init__(self, *args): ...
        def __enter__(self):
            return self

        def __exit__(self, *args): ...

    monkeypatch.setattr(decode, "_Target", Scripted)
    monkeypatch.setattr("dflash_core.target.tap_layers", NoTaps)
    return verify_chain(None, Proposer(), [0], 3, [1, 2], 20, stop_ids)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_accounts_add_up_for_every_budget(models, family):
    """tokens = 1 + accepted + steps; one less when an accepted draft stops the answer."""
    model, rng = models(family), random.Random(5)
    prompt = random_prompt(rng)
    whole = greedy(model, prompt, 40, [])
    for budget in range(1, 20):
        for stop_ids in ([], [whole[6]]):
            oracle = Oracle(len(prompt), whole, rng, accuracy=0.9)
            out = verify_chain(model, oracle, TAPS, MAX_DRAFTS, prompt, budget, stop_ids)
            assert out.tokens == greedy(model, prompt, budget, stop_ids)
            emitted = 1 + sum(out.accepted) + len(out.accepted)
            cut = emitted - len(out.tokens)
            assert cut == 0 or (cut == 1 and out.tokens[-1] in stop_ids)
            assert all(
                0 <= a <= j <= MAX_DRAFTS for a, j in zip(out.accepted, out.judged, strict=True)
            )
            assert out.num_verified == len(out.tokens) - 1


def test_a_perfect_proposer_fills_every_block_and_the_last_step_has_no_drafts(models):
    model, prompt = models("qwen3_5_text"), [1, 2, 3]
    whole = greedy(model, prompt, 40, [])
    oracle = Oracle(len(prompt), whole, random.Random(0), accuracy=1.0)
    out = verify_chain(model, oracle, TAPS, MAX_DRAFTS, prompt, 2 + 2 * (MAX_DRAFTS + 1), [])
    assert out.accepted == [MAX_DRAFTS, MAX_DRAFTS, 0]
    assert out.judged == [MAX_DRAFTS, MAX_DRAFTS, 0]


def test_a_drafter_of_another_target_is_refused(models):
    model = models("qwen3")
    drafter, (embedding, head) = make_drafter(model), embedding_and_head(model)
    with pytest.raises(InputError, match="hidden size 32"):
        speculate(model, drafter, embedding[:, :16], head, [1], 4, [])
