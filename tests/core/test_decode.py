"""Speculative decoding against the target alone, on tiny random targets in float32."""

import random
from dataclasses import replace
from operator import itemgetter

import pytest
import torch

from dflash_core import decode
from dflash_core.attention import dense_mask
from dflash_core.blocks import ranges_by_kind
from dflash_core.config import DrafterConfig
from dflash_core.decode import (
    BlockProposer,
    Decoding,
    Generation,
    NoProposer,
    answers,
    decode_steps,
    greedy,
    plain_steps,
    speculate,
    speculate_steps,
)
from dflash_core.errors import InputError
from dflash_core.model import Drafter, resolve_shape
from tests.oracles import Oracle, cut

CPU = torch.device("cpu")
FAMILIES = ["llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_5_text", "qwen3_5_moe"]
CONTRACTS = ["full-bidir", "swa-causal", "mixed", "swa-bidir"]
TAPS = [0, 1, 3]
MAX_DRAFTS = 7
NODES = 12


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


def random_prompt(rng, longest=30):
    return [rng.randrange(256) for _ in range(rng.randint(1, longest))]


def verified(model, proposer, prompts, decoding, max_drafts=MAX_DRAFTS):
    """The answers with this proposer, in the order of the prompts."""
    steps = decode_steps(model, proposer, TAPS, max_drafts, prompts, decoding)
    return [answer for _, answer in sorted(answers(steps), key=itemgetter(0))]


def speculated(model, drafter, prompts, decoding, seeds=None):
    """The answers with this drafter, in the order of the prompts."""
    steps = speculate_steps(model, drafter, *embedding_and_head(model), prompts, decoding, seeds)
    return [answer for _, answer in sorted(answers(steps), key=itemgetter(0))]


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5_moe"])
@pytest.mark.parametrize("nodes", [0, NODES], ids=["chain", "tree"])
def test_output_is_the_targets_own_whatever_is_accepted(models, family, nodes):
    model, rng = models(family), random.Random(family)
    steps = []
    for trial in range(6):
        prompts, budget = [random_prompt(rng) for _ in range(trial % 3 + 1)], rng.randint(8, 32)
        wholes = [greedy(model, prompt, budget + MAX_DRAFTS, []) for prompt in prompts]
        # Every other answer never stops; the others stop at a token that occurs, often inside an accepted run.
        stop_ids = [] if trial % 2 == 0 else [rng.choice(wholes[0]), 271]
        oracle = Oracle(prompts, wholes, rng, accuracy=[0.5, 0.8, 1.0][trial % 3])
        decoding = Decoding(budget, stop_ids, tree_nodes=nodes, batch=2)
        for whole, out in zip(wholes, verified(model, oracle, prompts, decoding), strict=True):
            assert out.tokens == cut(whole, budget, stop_ids)
            steps += out.accepted
    assert set(steps) >= {0, 1, 2, 3 if nodes else MAX_DRAFTS}, "the test lost its variety"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_target_alone_in_batches_answers_as_row_by_row(models, family):
    model, rng = models(family), random.Random(7)
    prompts = [random_prompt(rng) for _ in range(5)]
    stop_ids = set(range(0, 256, 16))
    out = dict(answers(plain_steps(model, prompts, Decoding(20, stop_ids, batch=3))))
    assert [out[i].tokens for i in range(5)] == [greedy(model, p, 20, stop_ids) for p in prompts]
    assert out[0].accepted == [0] * (len(out[0].tokens) - 1)


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


@pytest.mark.parametrize(
    ("attention", "nodes"), [(one, 0) for one in CONTRACTS] + [("mixed", NODES)]
)
def test_a_batch_decodes_as_its_sequences_alone(models, attention, nodes):
    """Token for token and step for step: the drafter's context is right for every length."""
    model, rng = models("qwen3_5_text"), random.Random(11)
    drafter = make_drafter(model, attention)
    prompts = [random_prompt(rng) for _ in range(7)]
    decoding = Decoding(18, tree_nodes=nodes)
    alone = [speculated(model, drafter, [prompt], decoding)[0] for prompt in prompts]
    assert speculated(model, drafter, prompts, replace(decoding, batch=3)) == alone


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "qwen3_5_text"])
@pytest.mark.parametrize("nodes", [0, NODES], ids=["chain", "tree"])
def test_the_proposer_gets_the_taps_of_committed_rows_only_each_once(models, family, nodes):
    model, rng = models(family), random.Random(1)
    prompts = [random_prompt(rng), random_prompt(rng)]
    wholes = [greedy(model, prompt, 40, []) for prompt in prompts]
    oracle = Oracle(prompts, wholes, rng, accuracy=0.7)
    found = verified(model, oracle, prompts, Decoding(30, tree_nodes=nodes, batch=2))
    for prompt, out, seen in zip(prompts, found, oracle.seen, strict=True):
        taps = torch.cat(seen["taps"])
        rows = [*prompt, *out.tokens][: len(taps)]
        with torch.no_grad():
            states = model(torch.tensor([rows]), output_hidden_states=True, use_cache=False)
        # The last layer has no raw entry in hidden_states, so compare the others.
        width = model.config.hidden_size
        for place, layer in enumerate(TAPS[:2]):
            ours, theirs = taps[:, place * width : (place + 1) * width], states.hidden_states
            torch.testing.assert_close(ours, theirs[layer + 1][0], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("attention", CONTRACTS)
def test_drafts_from_a_growing_context_equal_a_fresh_computation(models, attention):
    model = models("qwen3")
    drafter, (embedding, head) = make_drafter(model, attention), embedding_and_head(model)
    generator = torch.Generator().manual_seed(3)
    taps = torch.randn(19, 3 * model.config.hidden_size, generator=generator)
    grown = BlockProposer(drafter, embedding, head)
    grown.admit(taps[:9])
    for start, stop in [(9, 10), (10, 17), (17, 19)]:
        # What is written behind the counted rows must leave no trace.
        given = torch.cat((taps[start:stop], taps[:2]))
        grown.append(given[None], [stop - start])
    whole = BlockProposer(drafter, embedding, head)
    whole.admit(taps)
    reference = whole.propose([65], MAX_DRAFTS)
    torch.testing.assert_close(grown.propose([65], MAX_DRAFTS), reference)
    torch.testing.assert_close(grown.propose([65], 3), reference[:, :3])
    assert not torch.allclose(grown.propose([66], MAX_DRAFTS), reference)


@pytest.mark.parametrize("attention", CONTRACTS)
def test_block_masks_match_an_enumeration(models, attention):
    shape, lengths = make_drafter(models("qwen3"), attention).shape, [3, 12, 1, 5]
    masks = decode.block_masks(shape, lengths, CPU)
    assert set(masks) == set(shape.layer_types)
    for kind, of_batch in masks.items():
        sliding = kind == "sliding_attention"
        causal = sliding and attention != "swa-bidir"
        for mask, length in zip(of_batch, lengths, strict=True):
            keys = [*range(length), *[None] * (12 - length), *range(length, length + 8)]
            for j in range(shape.block_size):
                query = length + j
                for place, key in enumerate(keys):
                    seen = key is not None and not (causal and key > query)
                    if seen and sliding:
                        seen = abs(query - key) <= shape.sliding_window - 1
                    assert bool(mask[0, j, place]) == seen, (kind, length, j, key)


@pytest.mark.parametrize("attention", CONTRACTS)
def test_block_masks_are_those_of_training(models, attention):
    shape = make_drafter(models("qwen3"), attention).shape
    ours = decode.block_masks(shape, [9], CPU)
    ranges = ranges_by_kind(shape, torch.tensor([9]), torch.tensor([0]))
    theirs = {kind: dense_mask(seen, 9) for kind, seen in ranges.items()}
    assert all(torch.equal(ours[kind], theirs[kind]) for kind in ours | theirs)


@pytest.mark.parametrize("nodes", [0, NODES], ids=["chain", "tree"])
def test_a_head_over_a_reduced_vocabulary_drafts_the_tokens_it_stands_for(models, nodes):
    model, rng = models("qwen3"), random.Random(4)
    drafter, (embedding, head) = make_drafter(model), embedding_and_head(model)
    token_ids = torch.tensor(sorted(rng.sample(range(256), 40)))
    proposer = BlockProposer(drafter, embedding, head[token_ids], token_ids)
    whole = BlockProposer(drafter, embedding, head)
    taps = torch.randn(6, 3 * model.config.hidden_size)
    for one in (proposer, whole):
        one.admit(taps)
    ours, theirs = (one.propose([65], MAX_DRAFTS) for one in (proposer, whole))
    torch.testing.assert_close(ours[..., token_ids], theirs[..., token_ids])
    assert ours.isinf().sum() == MAX_DRAFTS * (len(embedding) - 40)
    prompt, decoding = random_prompt(rng), Decoding(16, tree_nodes=nodes)
    steps = speculate_steps(
        model, drafter, embedding, head[token_ids], [prompt], decoding, token_ids=token_ids
    )
    assert next(answers(steps))[1].tokens == greedy(model, prompt, 16, [])


# --- accounts ----------------------------------------------------------------------------------------


class Script:
    """A target that continues with these tokens whatever it is asked."""

    device = CPU

    def __init__(self, tokens):
        self.tokens, self.done = tokens, 0

    def admit(self, input_ids):
        return self._logits(self.tokens[:1])[0], torch.zeros(len(input_ids), 1)

    def forward(self, trees):
        rows = len(trees[0].tokens)
        return self._logits(self.tokens[self.done + 1 : self.done + 1 + rows])[None]

    def commit(self, paths):
        self.done += len(paths[0])
        return torch.zeros(1, len(paths[0]), 1)

    def keep(self, sequences): ...

    def _logits(self, tokens):
        return torch.nn.functional.one_hot(torch.tensor(tokens), 16).float()


class Drafts(NoProposer):
    def __init__(self, tokens):
        self.tokens = tokens

    def propose(self, bonus, num_drafts):
        return torch.nn.functional.one_hot(torch.tensor(self.tokens[:num_drafts]), 16).float()[None]


@pytest.mark.parametrize(
    ("answers", "drafts", "stop_ids", "expected"),
    [
        # a stop token inside the accepted run, at its end, behind it, and at once
        ([5, 6, 7, 8, 9], [6, 7, 8], [7], Generation([5, 6, 7], [2], [2])),
        ([5, 6, 7, 8, 9], [6, 7, 8], [8], Generation([5, 6, 7, 8], [3], [3])),
        ([5, 6, 7, 8, 9], [6, 9, 9], [7], Generation([5, 6, 7], [1], [3])),
        ([5, 6, 7, 8, 9], [6, 7, 8], [9], Generation([5, 6, 7, 8, 9], [3], [3])),
        ([5], [], [5], Generation([5], [], [])),
    ],
)
def test_a_stop_token_ends_the_answer(monkeypatch, answers, drafts, stop_ids, expected):
    class NoTaps:
        def __init__(self, *args): ...
        def __enter__(self): ...
        def __exit__(self, *args): ...

    monkeypatch.setattr(decode, "_RowTarget", lambda *args: Script(answers))
    monkeypatch.setattr(decode, "takes_rows_back", lambda model: True)
    monkeypatch.setattr("dflash_core.target.tap_layers", NoTaps)
    assert verified(None, Drafts(drafts), [[1, 2]], Decoding(20, stop_ids), 3) == [expected]


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
@pytest.mark.parametrize("nodes", [0, NODES], ids=["chain", "tree"])
def test_accounts_add_up_for_every_budget(models, family, nodes):
    """tokens = 1 + accepted + steps; one less when an accepted draft stops the answer."""
    model, rng = models(family), random.Random(5)
    prompt = random_prompt(rng)
    whole = greedy(model, prompt, 40, [])
    for budget in range(1, 20):
        for stop_ids in ([], [whole[6]]):
            oracle = Oracle([prompt], [whole], rng, accuracy=0.9)
            decoding = Decoding(budget, stop_ids, tree_nodes=nodes)
            (out,) = verified(model, oracle, [prompt], decoding)
            assert out.tokens == cut(whole, budget, stop_ids)
            emitted = 1 + sum(out.accepted) + len(out.accepted)
            missing = emitted - len(out.tokens)
            assert missing == 0 or (missing == 1 and out.tokens[-1] in stop_ids)
            assert all(
                0 <= a <= j <= MAX_DRAFTS for a, j in zip(out.accepted, out.judged, strict=True)
            )
            assert out.num_verified == len(out.tokens) - 1


def test_a_perfect_proposer_fills_every_block_and_the_last_step_has_no_drafts(models):
    model, prompt = models("qwen3_5_text"), [1, 2, 3]
    whole = greedy(model, prompt, 40, [])
    oracle = Oracle([prompt], [whole], random.Random(0), accuracy=1.0)
    (out,) = verified(model, oracle, [prompt], Decoding(2 + 2 * (MAX_DRAFTS + 1)))
    assert out.accepted == [MAX_DRAFTS, MAX_DRAFTS, 0]
    assert out.judged == [MAX_DRAFTS, MAX_DRAFTS, 0]


@pytest.mark.parametrize("max_drafts", [1, 3])
def test_fewer_drafts_than_the_block_holds(models, max_drafts):
    model, prompt = models("qwen3"), [1, 2, 3]
    (out,) = speculated(model, make_drafter(model), [prompt], Decoding(20, max_drafts=max_drafts))
    assert out.tokens == greedy(model, prompt, 20, [])
    assert max(out.judged) == max_drafts


# --- targets whose rows cannot be taken back ---------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_5_text"])
def test_other_targets_run_accepted_rows_again(models, family, monkeypatch):
    monkeypatch.setattr(decode, "takes_rows_back", lambda model: False)
    model, rng = models(family), random.Random(2)
    prompts = [random_prompt(rng) for _ in range(3)]
    wholes = [greedy(model, prompt, 40, []) for prompt in prompts]
    oracle = Oracle(prompts, wholes, rng, accuracy=0.7)
    found = verified(model, oracle, prompts, Decoding(30, batch=2))
    assert [out.tokens for out in found] == [whole[:30] for whole in wholes]
    with pytest.raises(InputError, match="cannot verify a tree"):
        verified(model, oracle, prompts, Decoding(30, tree_nodes=4))


# --- refusals ----------------------------------------------------------------------------------------


def test_a_drafter_of_another_target_is_refused(models):
    model = models("qwen3")
    drafter, (embedding, head) = make_drafter(model), embedding_and_head(model)
    with pytest.raises(InputError, match="hidden size 32"):
        speculate(model, drafter, embedding[:, :16], head, [1], 4, [])


def test_more_drafts_than_the_drafter_was_trained_for_are_refused(models):
    model = models("qwen3")
    with pytest.raises(InputError, match="use at most 7"):
        speculated(model, make_drafter(model), [[1]], Decoding(4, max_drafts=8))
