"""Speculative decoding loses nothing: greedy token for token, sampled in distribution.

Tiny random targets in float32. Proposers err at random, so every length of accepted run occurs, steps
without drafts included; sequences of different lengths are decoded together, join and leave.
"""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.decode import Decoding, answers, decode_steps, greedy
from dflash_core.sampling import Sampling, probabilities
from tests import targets
from tests.core.test_sampling import assert_distribution
from tests.oracles import Oracle, Waverer, cut

CPU = torch.device("cpu")
FAMILIES = ["llama", "qwen3", "qwen3_5_text", "gemma3_text"]  # the last has windows of 8
TAPS = [1, 3]
LONGEST = 24  # tokens of an answer
TIE = 1e-4  # logits this close may be ordered by rounding


@st.composite
def requests(draw):
    """Prompts and how to decode them."""
    prompts = draw(
        st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=28), min_size=1, max_size=4)
    )
    decoding = Decoding(
        max_new_tokens=draw(st.integers(1, LONGEST)),
        stop_ids=draw(st.sets(st.integers(0, 255), max_size=12)),
        tree_nodes=draw(st.sampled_from([0, 0, 1, 6, 20])),
        batch=draw(st.integers(1, 3)),
    )
    max_drafts = draw(st.integers(0, 9))
    accuracy = draw(st.sampled_from([0.0, 0.5, 0.8, 1.0]))
    return prompts, decoding, max_drafts, accuracy, draw(st.integers(0, 2**32))


def check(model, request):
    prompts, decoding, max_drafts, accuracy, seed = request
    wholes = [greedy(model, prompt, LONGEST + 9, []) for prompt in prompts]
    oracle = Oracle(prompts, wholes, random.Random(seed), accuracy)
    found = dict(answers(decode_steps(model, oracle, TAPS, max_drafts, prompts, decoding)))
    for index, prompt in enumerate(prompts):
        plain = cut(wholes[index], decoding.max_new_tokens, decoding.stop_ids)
        if found[index].tokens != plain:
            assert_tie(model, prompt, plain, found[index].tokens)


def assert_tie(model, prompt, plain, other):
    """The first difference is between two tokens whose logits are equal up to rounding."""
    same = next(i for i, pair in enumerate(zip(plain, other, strict=False)) if pair[0] != pair[1])
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *plain[:same]]]), use_cache=False).logits[0, -1]
    assert abs(logits[plain[same]] - logits[other[same]]) < TIE, (prompt, plain, other)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(request=requests())
def test_greedy_output_is_the_targets_own(models, family, request):
    check(models(family), request)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=80, deadline=None, print_blob=True)
@given(request=requests())
def test_greedy_output_is_the_targets_own_for_hundreds_of_prompts(models, family, request):
    check(models(family), request)


# --- sampled -----------------------------------------------------------------------------------------

SMALL = 6  # tokens of the vocabulary


def small_target(family):
    """Two layers over six tokens, sharp enough that their order matters."""
    import transformers

    shared = {
        "vocab_size": SMALL,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "eos_token_id": None,
        "pad_token_id": None,
        "bos_token_id": None,
    }
    if family == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shared))
    else:
        kinds = {"layer_types": ["linear_attention", "full_attention"]}
        config = transformers.Qwen3_5TextConfig(**{**targets._GDN, **shared, **kinds})
        model = transformers.Qwen3_5ForCausalLM(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.normal_(0, 0.4, generator=generator)
    return model.eval().requires_grad_(False)


def exact_distribution(model, prompt, length, sampling):
    """Probability of each continuation of this length, in lexical order."""
    continuations = torch.tensor(list(itertools.product(range(SMALL), repeat=length)))
    rows = torch.cat((torch.tensor(prompt).expand(len(continuations), -1), continuations), dim=1)
    logits = model(rows, use_cache=False).logits[:, len(prompt) - 1 : -1]
    chosen = probabilities(logits, sampling).gather(2, continuations[..., None])
    return chosen.double().prod(1).flatten().numpy()


def check_sampled(family, nodes, sampling, count):
    model, prompt, length = small_target(family), [3, 1, 4, 1], 3
    decoding = Decoding(length, sampling=sampling, tree_nodes=nodes, batch=64)
    seeds = range(1000, 1000 + count)
    steps = decode_steps(model, Waverer(0, SMALL), [0], 3, [prompt] * count, decoding, seeds)
    observed, accepted = torch.zeros(SMALL**length), set()
    for _, out in answers(steps):
        place = 0
        for token in out.tokens:
            place = place * SMALL + token
        observed[place] += 1
        accepted.update(out.accepted)
    assert max(accepted) >= 1  # some drafts were taken
    assert_distribution(observed.numpy(), exact_distribution(model, prompt, length, sampling))


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
@pytest.mark.parametrize("nodes", [0, 5], ids=["chain", "tree"])
def test_samples_are_the_targets_own(family, nodes):
    check_sampled(family, nodes, Sampling(temperature=0.9), count=600)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
@pytest.mark.parametrize("nodes", [0, 5], ids=["chain", "tree"])
def test_thousands_of_samples_of_a_nucleus_are_the_targets_own(family, nodes):
    check_sampled(family, nodes, Sampling(0.8, 0.9), count=4_000)


@pytest.mark.parametrize("nodes", [0, 5], ids=["chain", "tree"])
def test_samples_depend_on_their_seed_only_not_on_the_batch(nodes):
    model = small_target("qwen3_5_text")
    prompts = [[1], [2, 3, 4], [5, 0], [2] * 9, [1]]
    seeds = [7, 8, 9, 10, 7]

    def sampled(batch):
        # A budget that is reached at different times, so that some draft while others have none left.
        decoding = Decoding(12, sampling=Sampling(1.0), tree_nodes=nodes, batch=batch, stop_ids=[5])
        steps = decode_steps(model, Waverer(0, SMALL), [0], 4, prompts, decoding, seeds)
        return [out for _, out in sorted(answers(steps), key=lambda pair: pair[0])]

    alone = sampled(1)
    assert alone == sampled(3)
    assert alone[0] == alone[4]
