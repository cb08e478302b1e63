"""The drafter against a plain-loop oracle, its leaks, its names, and the shapes it accepts."""

import math
import types

import numpy as np
import pytest
import torch

from dflash_core.attention import dense_mask
from dflash_core.blocks import ranges_by_kind
from dflash_core.config import DrafterConfig
from dflash_core.errors import InputError
from dflash_core.model import FULL, SLIDING, Drafter, resolve_shape
from tests.drafters import (
    ATTENTION,
    make_blocks,
    make_pack,
    random_taps,
    tiny_drafter,
    tiny_shape,
)


def run_drafter(drafter, pack, taps_TLH, blocks, embedding_VH):
    """Hidden states [N, K, H] of all blocks of a pack in one forward."""
    positions = torch.from_numpy(pack.positions)[None]
    context = drafter.project_context(taps_TLH.flatten(1)[None], positions)
    ranges = ranges_by_kind(drafter.shape, blocks.anchors_N, blocks.starts_N)
    masks = {kind: dense_mask(seen, len(taps_TLH)) for kind, seen in ranges.items()}
    embeds = embedding_VH[blocks.token_ids_NK.flatten()][None]
    out = drafter(embeds, blocks.positions_NK.flatten()[None], context, masks)
    return out.view(*blocks.labels_NK.shape, -1)


# --- oracle: one block, one row, one head at a time, in float64 ------------------------------------


def norm(x, weight, eps):
    return weight * x / math.sqrt((x * x).mean() + eps)


def rope(x, position, theta):
    out, half = np.empty_like(x), len(x) // 2
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def oracle_block(drafter, sample_taps, embedding, anchor_token, anchor):
    """Output rows of one block of a sample, given the sample alone; `anchor` is a position in it."""
    s = drafter.shape
    w = {name: p.detach().double().numpy() for name, p in drafter.named_parameters()}
    eps, group = s.rms_norm_eps, s.num_attention_heads // s.num_key_value_heads
    tokens = [anchor_token] + [s.mask_token_id] * (s.block_size - 1)
    x = [embedding[token] for token in tokens]
    context = [
        norm(w["fc.weight"] @ sample_taps[i].reshape(-1), w["hidden_norm.weight"], eps)
        for i in range(anchor)
    ]
    for number in range(s.num_hidden_layers):
        p = f"layers.{number}."
        last = number == s.num_hidden_layers - 1
        sliding = s.attention in ("swa-causal", "swa-bidir") or (
            s.attention == "mixed" and not last
        )
        causal = s.attention == "swa-causal" or (s.attention == "mixed" and not last)
        u = [norm(row, w[p + "input_layernorm.weight"], eps) for row in x]
        rows = [(i, c) for i, c in enumerate(context)] + [(anchor + j, u[j]) for j in range(len(u))]
        keys = [split(w[p + "self_attn.k_proj.weight"] @ row, s.head_dim) for _, row in rows]
        values = [split(w[p + "self_attn.v_proj.weight"] @ row, s.head_dim) for _, row in rows]
        k_norm, q_norm = w[p + "self_attn.k_norm.weight"], w[p + "self_attn.q_norm.weight"]
        new = []
        for j, row in enumerate(u):
            here, heads = anchor + j, []
            for h, q in enumerate(split(w[p + "self_attn.q_proj.weight"] @ row, s.head_dim)):
                q = rope(norm(q, q_norm, eps), here, s.rope_theta)
                scores, seen = [], []
                for r, (position, _) in enumerate(rows):
                    if sliding and abs(here - position) >= s.sliding_window:
                        continue
                    if causal and position > here:
                        continue
                    k = rope(norm(keys[r][h // group], k_norm, eps), position, s.rope_theta)
                    scores.append(q @ k / math.sqrt(s.head_dim))
                    seen.append(values[r][h // group])
                weights = np.exp(np.array(scores) - max(scores))
                heads.append(weights / weights.sum() @ np.array(seen))
            new.append(x[j] + w[p + "self_attn.o_proj.weight"] @ np.concatenate(heads))
        x = []
        for row in new:
            v = norm(row, w[p + "post_attention_layernorm.weight"], eps)
            gate = w[p + "mlp.gate_proj.weight"] @ v
            inner = gate / (1 + np.exp(-gate)) * (w[p + "mlp.up_proj.weight"] @ v)
            x.append(row + w[p + "mlp.down_proj.weight"] @ inner)
    return np.array([norm(row, w["norm.weight"], eps) for row in x])


def split(x, width):
    return [x[i : i + width] for i in range(0, len(x), width)]


@pytest.mark.parametrize("attention", ATTENTION)
def test_blocks_of_a_pack_equal_the_oracle_on_each_sample_alone(attention):
    drafter = tiny_drafter(attention=attention)
    pack = make_pack([9, 7], 18)
    taps = random_taps(pack, drafter.shape)
    embedding = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    blocks = make_blocks(pack, drafter.shape, 6)
    with torch.no_grad():
        out = run_drafter(drafter, pack, taps, blocks, embedding)
    for n, row in enumerate(blocks.anchors_N):
        document = pack.document_ids[row]
        start, length = int(pack.start[document]), int(pack.length[document])
        expected = oracle_block(
            drafter,
            taps[start : start + length].double().numpy(),
            embedding.double().numpy(),
            int(pack.input_ids[row]),
            int(row) - start,
        )
        torch.testing.assert_close(
            out[n].double(), torch.from_numpy(expected), atol=2e-5, rtol=2e-5
        )


@pytest.mark.parametrize("attention", ATTENTION)
def test_hidden_states_at_or_after_the_anchor_do_not_reach_its_block(attention):
    drafter, pack = tiny_drafter(attention=attention), make_pack([16], 16)
    blocks = make_blocks(pack, drafter.shape, 4)
    taps, embedding = random_taps(pack, drafter.shape), torch.randn(32, 16)
    with torch.no_grad():
        before = run_drafter(drafter, pack, taps, blocks, embedding)
        for n, anchor in enumerate(blocks.anchors_N.tolist()):
            changed = taps.clone()
            changed[anchor:] += 5
            after = run_drafter(drafter, pack, changed, blocks, embedding)
            assert torch.equal(after[n], before[n])
            changed[anchor - 1] += 5
            after = run_drafter(drafter, pack, changed, blocks, embedding)
            assert not torch.equal(after[n], before[n])


@pytest.mark.parametrize("attention", ATTENTION)
def test_changing_one_sample_of_a_pack_changes_nothing_in_another(attention):
    drafter, pack = tiny_drafter(attention=attention), make_pack([8, 8], 16)
    blocks = make_blocks(pack, drafter.shape, 8)
    taps, embedding = random_taps(pack, drafter.shape), torch.randn(32, 16)
    changed = taps.clone()
    changed[:8] += 5
    with torch.no_grad():
        before = run_drafter(drafter, pack, taps, blocks, embedding)
        after = run_drafter(drafter, pack, changed, blocks, embedding)
    second = blocks.starts_N == 8
    assert second.any()
    assert not second.all()
    assert torch.equal(after[second], before[second])
    assert not torch.equal(after[~second], before[~second])


def test_context_projected_in_pieces_equals_context_projected_at_once():
    drafter = tiny_drafter()
    taps, positions = torch.randn(1, 10, 48), torch.arange(10)[None]
    whole = drafter.project_context(taps, positions)
    parts = [drafter.project_context(taps[:, a:b], positions[:, a:b]) for a, b in ((0, 3), (3, 10))]
    for (key, value), first, second in zip(whole, *parts, strict=True):
        torch.testing.assert_close(torch.cat((first[0], second[0]), 2), key)
        torch.testing.assert_close(torch.cat((first[1], second[1]), 2), value)


def test_rotary_tables_stay_exact_in_a_bfloat16_model():
    exact = tiny_drafter(head_dim=16, rope_theta=1e6)
    taps, far = torch.randn(1, 1, 48), torch.tensor([[100_003]])
    cast = Drafter(exact.shape).bfloat16()
    cast.load_state_dict({name: p.bfloat16() for name, p in exact.state_dict().items()})
    expected, _ = exact.project_context(taps, far)[0]
    found, _ = cast.project_context(taps, far)[0]
    assert torch.nn.functional.cosine_similarity(found.float(), expected, dim=-1).min() > 0.999


def test_parameter_names_and_shapes_are_those_of_the_z_lab_checkpoints():
    drafter = tiny_drafter(num_hidden_layers=1)
    shapes = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    assert shapes == {
        "fc.weight": (16, 48),
        "hidden_norm.weight": (16,),
        "norm.weight": (16,),
        "layers.0.input_layernorm.weight": (16,),
        "layers.0.post_attention_layernorm.weight": (16,),
        "layers.0.self_attn.q_proj.weight": (24, 16),
        "layers.0.self_attn.k_proj.weight": (12, 16),
        "layers.0.self_attn.v_proj.weight": (12, 16),
        "layers.0.self_attn.o_proj.weight": (16, 24),
        "layers.0.self_attn.q_norm.weight": (6,),
        "layers.0.self_attn.k_norm.weight": (6,),
        "layers.0.mlp.gate_proj.weight": (24, 16),
        "layers.0.mlp.up_proj.weight": (24, 16),
        "layers.0.mlp.down_proj.weight": (16, 24),
    }


def test_fresh_weights_are_normal_with_unit_norms_and_follow_the_generator():
    shape = tiny_shape(hidden_size=64, intermediate_size=256)
    first, second = (Drafter(shape, torch.Generator().manual_seed(5)) for _ in range(2))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    for parameter in first.parameters():
        if parameter.ndim == 1:
            assert (parameter == 1).all()
        else:
            width = parameter.shape[1]
            std = max(0.02, width**-0.5)
            assert float(parameter.detach().std()) == pytest.approx(std, rel=0.1)


# --- shapes ----------------------------------------------------------------------------------------


def target(**changes):
    values = {
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "rms_norm_eps": 1e-6,
        "partial_rotary_factor": 0.25,
    }
    return types.SimpleNamespace(**{**values, **changes})


def test_zeros_take_the_targets_values_but_never_its_head_width():
    shape = resolve_shape(DrafterConfig(), target(), [1, 16, 31, 46, 61], 248070)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (24, 4, 128)
    assert (shape.hidden_size, shape.intermediate_size, shape.vocab_size) == (5120, 17408, 248320)
    small = target(hidden_size=576, num_attention_heads=9, num_key_value_heads=3)
    assert resolve_shape(DrafterConfig(), small, [1], 0).head_dim == 64
    asked = DrafterConfig(num_attention_heads=32, num_key_value_heads=8, head_dim=64)
    chosen = resolve_shape(asked, target(), [1], 0)
    assert (chosen.num_attention_heads, chosen.num_key_value_heads, chosen.head_dim) == (32, 8, 64)


def test_attention_contracts_name_the_kind_and_causality_of_each_layer():
    kinds = {name: tiny_shape(num_hidden_layers=3, attention=name) for name in ATTENTION}
    assert kinds["full-bidir"].layer_types == (FULL,) * 3
    assert kinds["swa-causal"].layer_types == (SLIDING,) * 3
    assert kinds["mixed"].layer_types == (SLIDING, SLIDING, FULL)
    assert kinds["swa-bidir"].layer_types == (SLIDING,) * 3
    assert [kinds[name].causal_in_block(SLIDING) for name in ATTENTION[1:]] == [True, True, False]
    assert not kinds["mixed"].causal_in_block(FULL)


@pytest.mark.parametrize(
    ("config", "changes", "taps", "mask", "message"),
    [
        ({"num_attention_heads": 6}, {}, [1], 0, "num_attention_heads 6 is not a multiple"),
        ({"head_dim": 65}, {}, [1], 0, "head_dim 65"),
        ({}, {}, [1], 248320, "mask_token_id 248320 has no embedding row"),
        ({}, {}, [1], -1, "mask_token_id -1"),
        ({}, {}, [1, 64], 0, r"\[1, 64\] do not fit a target of 64 layers"),
        ({}, {}, [], 0, "at least one id"),
        ({}, {}, [9, 1], 0, r"rising order.*\[1, 9\]"),
        ({}, {"intermediate_size": None}, [1], 0, "set drafter.intermediate_size"),
        ({}, {"vocab_size": None}, [1], 0, "no vocab_size"),
        (
            {"attention": "mixed", "num_hidden_layers": 1},
            {},
            [1],
            0,
            "num_hidden_layers is 1; give it 2 or more",
        ),
    ],
)
def test_a_shape_that_cannot_work_is_refused_by_name(config, changes, taps, mask, message):
    with pytest.raises(InputError, match=message):
        resolve_shape(DrafterConfig(**config), target(**changes), taps, mask)
