"""Rolling a target's cache back, on tiny random targets of each kind of layer."""

import pytest
import torch

from dflash_core.target_cache import Snapshot, cache_name

CPU = torch.device("cpu")
WINDOW = 8  # of the sliding families in tests/targets.py
KINDS = ["llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_5_text", "qwen3_5_moe"]
HYBRID = {"qwen3_5_text", "qwen3_5_moe"}


def ids(num_rows, seed):
    return torch.randint(0, 256, (1, num_rows), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def run(model, rows, cache=None):
    """Logits and the cache after these rows."""
    name = cache_name(type(model))
    out = model(input_ids=rows, use_cache=True, **{name: cache})
    return out.logits, getattr(out, name)


def tensors(cache):
    """All state that later rows read, by layer and name; keys of sliding layers cut to the window."""
    found = {}
    for index, layer in enumerate(cache.layers):
        for name in ("keys", "values"):
            if isinstance(getattr(layer, name, None), torch.Tensor):
                found[index, name] = getattr(layer, name)
        for name in ("conv_states", "recurrent_states"):
            for key, state in getattr(layer, name, {}).items():
                found[index, name, key] = state
    return found


def assert_same_state(model, cache, reference):
    ours, theirs = tensors(cache), tensors(reference)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=5e-5, rtol=1e-4, msg=str(name))
    assert cache.get_seq_length() == reference.get_seq_length()
    # Counters that are no tensors show in what comes next: one more row, then several.
    for rows in (ids(1, seed=7), ids(5, seed=8)):
        torch.testing.assert_close(
            run(model, rows, cache)[0], run(model, rows, reference)[0], atol=2e-3, rtol=1e-3
        )


@pytest.mark.parametrize("family", KINDS)
# A prompt inside the sliding window, one that fills it, one beyond it.
@pytest.mark.parametrize("num_prompt", [3, WINDOW - 1, 21])
# More rows than the window holds leave nothing of the old entries.
@pytest.mark.parametrize("num_rows", [1, 6, WINDOW + 3])
def test_state_after_rollback_is_that_of_the_kept_rows_alone(models, family, num_prompt, num_rows):
    model = models(family)
    prompt, block = ids(num_prompt, seed=1), ids(num_rows, seed=2)
    for num_keep in {0, 1, num_rows // 2, num_rows - 1, num_rows}:
        cache = run(model, prompt)[1]
        snapshot = Snapshot(cache)
        run(model, block, cache)
        if not snapshot.rollback(num_keep):
            run(model, block[:, :num_keep], cache)
        reference = run(model, prompt)[1]
        if num_keep:
            run(model, block[:, :num_keep], reference)
        assert_same_state(model, cache, reference)


@pytest.mark.parametrize("family", KINDS)
def test_only_recurrent_layers_and_overrun_windows_need_the_rows_again(models, family):
    model = models(family)
    for num_rows in (4, WINDOW):
        cache = run(model, ids(20, seed=1))[1]
        snapshot = Snapshot(cache)
        run(model, ids(num_rows, seed=2), cache)
        overrun = num_rows >= WINDOW and family in {"gemma3_text", "gpt_oss"}
        assert snapshot.rollback(2) is not (family in HYBRID or overrun)


@pytest.mark.parametrize("family", KINDS)
def test_a_snapshot_is_not_changed_by_later_forwards(models, family):
    model = models(family)
    cache = run(model, ids(20, seed=1))[1]
    before = {name: tensor.clone() for name, tensor in tensors(cache).items()}
    snapshot = Snapshot(cache)
    run(model, ids(1, seed=2), cache)  # one row takes another path through the convolution
    run(model, ids(5, seed=3), cache)
    snapshot.rollback(0)
    for name, tensor in tensors(cache).items():
        assert torch.equal(tensor, before[name]), name
