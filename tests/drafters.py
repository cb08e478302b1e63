"""Tiny drafters and packs that several tests share."""

from __future__ import annotations

import numpy as np
import torch

from dflash_core.blocks import Blocks, build_blocks, sample_anchors
from dflash_core.model import Drafter, DrafterShape
from dflash_core.packing import Pack

ATTENTION = ("full-bidir", "swa-causal", "mixed", "swa-bidir")


def tiny_shape(**changes) -> DrafterShape:
    values = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "block_size": 4,
        "attention": "full-bidir",
        "sliding_window": 3,
        "rope_theta": 100.0,
        "rms_norm_eps": 1e-6,
        "mask_token_id": 31,
        "vocab_size": 32,
        "target_layer_ids": (0, 2, 3),
        "num_target_layers": 6,
    }
    return DrafterShape(**{**values, **changes})


def tiny_drafter(seed: int = 0, **changes) -> Drafter:
    """Weights wide enough that positions, norms and masks all show in the output."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter(tiny_shape(**changes), generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.3, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return drafter


def qwen3_config(shape: DrafterShape, **changes):
    """The shape as the configuration that other trainers build their drafters from."""
    from transformers import Qwen3Config

    return Qwen3Config(
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_hidden_layers,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        vocab_size=shape.vocab_size,
        layer_types=list(shape.layer_types),
        sliding_window=shape.sliding_window,
        use_sliding_window=True,
        **changes,
    )


def make_pack(
    lengths: list[int],
    pack_tokens: int,
    *,
    index: int = 0,
    vocab: int = 31,
    prompt: int = 2,
    seed: int = 0,
) -> Pack:
    """Random samples from row 0 on; the first `prompt` tokens of each are not supervised."""
    generator = np.random.default_rng([seed, index])
    length = np.array(lengths, dtype=np.int32)
    start = np.cumsum(length, dtype=np.int32) - length
    input_ids = np.zeros(pack_tokens, dtype=np.uint32)
    loss_mask = np.zeros(pack_tokens, dtype=np.uint8)
    for first, size in zip(start, length, strict=True):
        input_ids[first : first + size] = generator.integers(0, vocab, size)
        loss_mask[first + prompt : first + size] = 1
    samples = np.arange(len(lengths), dtype=np.int32)
    return Pack(index, input_ids, loss_mask, start, length, samples)


def random_taps(pack: Pack, shape: DrafterShape, seed: int = 0) -> torch.Tensor:
    """Hidden states bfloat16 [T, L, H]."""
    generator = torch.Generator().manual_seed(1000 * seed + pack.index)
    size = (len(pack.input_ids), len(shape.target_layer_ids), shape.hidden_size)
    return torch.randn(size, generator=generator).bfloat16()


def make_blocks(pack: Pack, shape: DrafterShape, num_anchors: int, seed: int = 0) -> Blocks:
    loss_mask = torch.from_numpy(pack.loss_mask)
    documents = torch.from_numpy(pack.document_ids)
    generator = torch.Generator().manual_seed(seed)
    return build_blocks(
        torch.from_numpy(pack.input_ids.astype("int64")),
        loss_mask,
        documents,
        torch.from_numpy(pack.positions),
        sample_anchors(loss_mask, documents, num_anchors, generator),
        block_size=shape.block_size,
        first_slot=shape.first_slot,
        mask_token_id=shape.mask_token_id,
        loss_decay=3.0,
    )
