"""Verify forwards over trees against one forward over each branch, on tiny random targets in float32."""

import random

import pytest
import torch

from dflash_core.row_cache import RowCache, Rows, takes_rows_back, teach_rows
from dflash_core.target import gdn_backend, gdn_modules
from dflash_core.target_cache import cache_name

CPU = torch.device("cpu")
KINDS = ["llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_5_text", "qwen3_5_moe"]


def random_ids(rng, count):
    return [rng.randrange(256) for _ in range(count)]


def random_parents(rng, num_rows):
    return [-1, *(rng.randrange(row) for row in range(1, num_rows))]


def path_to(row, parents):
    path = [row]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@torch.no_grad()
def admit(model, cache, prompt):
    for module in gdn_modules(model):
        teach_rows(module)
    out = model(torch.tensor([prompt]), use_cache=True)
    cache.admit(getattr(out, cache_name(type(model))))


@torch.no_grad()
def forward(model, cache, rows):
    cache.begin(rows)
    return model(
        input_ids=rows.tokens_BR,
        position_ids=cache.positions_BR,
        attention_mask=cache.masks(model.dtype),
        use_cache=True,
        **{cache_name(type(model)): cache},
    ).logits


@torch.no_grad()
def last_logits(model, tokens):
    return model(torch.tensor([tokens]), use_cache=False).logits[0, -1]


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("family", KINDS)
def test_every_row_sees_its_own_branch_and_commits_leave_nothing_behind(models, family):
    """Three sequences of different lengths, some inside the window of 8 and some beyond, four steps."""
    model, rng = models(family), random.Random(family)
    told = [random_ids(rng, count) for count in (3, 9, 25)]
    cache = RowCache()
    for prompt in told:
        admit(model, cache, prompt)
    for step in range(4):
        sizes = [rng.randint(1, 9) for _ in told]
        parents = [random_parents(rng, size) for size in sizes]
        tokens = [random_ids(rng, size) for size in sizes]
        logits = forward(model, cache, Rows.trees(tokens, parents, CPU))
        paths = []
        for sequence, size in enumerate(sizes):
            for row in range(size):
                branch = [tokens[sequence][i] for i in path_to(row, parents[sequence])]
                wanted = last_logits(model, [*told[sequence], *branch])
                assert_close(logits[sequence, row], wanted)
            paths.append(path_to(rng.randrange(size), parents[sequence]))
        cache.commit(paths)
        for sequence, path in enumerate(paths):
            told[sequence] += [tokens[sequence][row] for row in path]
        assert cache.lengths == [len(one) for one in told], step


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
def test_sequences_join_and_leave(models, family):
    model, rng = models(family), random.Random(family)
    told, cache = [], RowCache()
    for keep, num_new in [([], 2), ([1], 2), ([2, 0], 0), ([], 1)]:
        cache.keep(keep)
        told = [told[index] for index in keep]
        for _ in range(num_new):
            told.append(random_ids(rng, rng.randint(1, 300)))  # past the spare slots, too
            admit(model, cache, told[-1])
        new = [random_ids(rng, 5) for _ in told]
        logits = forward(model, cache, Rows.chains(new, CPU))
        cache.commit([[0, 1, 2]] * len(told))
        for sequence, tokens in enumerate(new):
            assert_close(logits[sequence, -1], last_logits(model, [*told[sequence], *tokens]))
            told[sequence] += tokens[:3]


def test_a_chain_is_the_tree_of_one_branch():
    tokens, parents = [[5, 6, 7], [8]], [[-1, 0, 1], [-1]]
    chains, trees = Rows.chains(tokens, CPU), Rows.trees(tokens, parents, CPU)
    for name in ("tokens_BR", "parents_BR", "depth_BR", "ancestors_BRR"):
        # The second sequence is filled up with rows that mean nothing.
        assert torch.equal(getattr(chains, name)[0], getattr(trees, name)[0])
    assert torch.equal(chains.lineage_BRW(4)[0], trees.lineage_BRW(4)[0])


@pytest.mark.parametrize("seed", range(5))
def test_lineage_matches_a_walk_up_the_tree(seed):
    rng = random.Random(seed)
    parents = random_parents(rng, 12)
    rows = Rows.trees([[0] * 12], [parents], CPU)
    for width in (2, 4, 6):
        lineage = rows.lineage_BRW(width)[0]
        for row in range(12):
            columns = [*range(width - 1), *(width - 1 + i for i in path_to(row, parents))]
            assert lineage[row].tolist() == columns[-width:]
    for row in range(12):
        above = rows.ancestors_BRR[0, row].nonzero().flatten().tolist()
        assert above == path_to(row, parents)
        assert rows.depth_BR[0, row] == len(above) - 1


def test_taught_modules_work_as_before_and_name_their_kernels(models):
    model = models("qwen3_5_text")
    module = gdn_modules(model)[0]
    before = module.causal_conv1d_fn
    teach_rows(module)
    assert module.causal_conv1d_fn is before  # once is enough
    assert set(gdn_backend(module).values()) == {module.__name__}


def test_kinds_of_layers_that_are_not_known_are_not_taken(tmp_path):
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention"],
    )
    assert not takes_rows_back(Lfm2ForCausalLM(config))


@pytest.mark.parametrize("family", KINDS)
def test_supported_families_are_taken(models, family):
    assert takes_rows_back(models(family))
