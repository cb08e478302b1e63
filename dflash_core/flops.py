"""Floating-point operations: of a forward, of a training step, and what a device does in a second.

Counted are matrix products with weights, 2 operations for each weight and row; `mfu` is their share of the speed of
one large product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dflash_core.model import Drafter


def flops_per_token(body: Any) -> float:
    """Floating-point operations of the matrix products with weights; of experts, the share that is used."""
    config, embedding = body.config, body.get_input_embeddings()
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    used = config.num_experts_per_tok / experts if experts else 1.0
    total = 0.0
    for name, weight in body.named_parameters():
        if weight.ndim >= 2 and weight is not embedding.weight:
            total += 2 * weight.numel() * (used if ".experts." in name else 1.0)
    return total


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Speed of a large matrix product of random values, measured: what `mfu` is a share of."""
    size, times = 8192, 5
    with torch.cuda.device(device):  # events are recorded on the current one
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for step in range(2 * times):
            if step == times:
                began.record()
            a @ b
        ended.record()
        ended.synchronize()
    return times * 2 * size**3 / (began.elapsed_time(ended) / 1e3)


def flops_of_step(
    drafter: Drafter,
    head_VH: Tensor,
    *,
    num_rows: int,
    num_slots: int,
    num_supervised: int,
    teacher_has_logits: bool = False,
) -> int:
    """Operations of a training step, forward and backward; what `recompute` does again is not counted.

    Backward takes a product for the gradient of the weights and one for that of the inputs. The head is
    frozen, and nothing needs a gradient of the taps.

    Args:
        num_rows: context rows, T of each pack.
        num_slots: slots of all blocks, N * K of each pack.
        num_supervised: slots that reach the head.
        teacher_has_logits: the head makes the teacher's logits, too.
    """
    in_context = in_layers = 0
    for name, weight in drafter.layers.named_parameters():
        if weight.ndim == 2:
            in_layers += weight.numel()
            in_context += weight.numel() * name.endswith(("k_proj.weight", "v_proj.weight"))
    return (
        num_rows * (4 * drafter.fc.weight.numel() + 6 * in_context)
        + num_slots * 6 * in_layers
        + num_supervised * (4 + 2 * teacher_has_logits) * head_VH.numel()
    )
