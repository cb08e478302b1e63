"""A whole pack as one row through the target, on a GPU: no padding, and samples do not see each other.

Attention runs over `cu_seqlens` with torch's varlen kernel, Gated DeltaNet with flash-linear-attention's,
its short convolution included: Transformers' own torch fallback of that convolution silently mixes
neighbouring samples. Families are listed by hand, and the extractor compares the first pack with
one-sample forwards before it trusts this path.

Shape letters: T tokens of a pack, D head size.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn

from dflash_core.packing import Pack
from dflash_core.target import gdn_backend, gdn_modules

FAMILIES = ("llama", "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text")
_ATTENTION = "dflash_varlen"


def can_pack(body: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether family, layers, data type and kernels allow the packed path."""
    layer_types = getattr(body.config, "layer_types", None) or ()
    kernels = all(
        gdn_backend(module)["torch_chunk_gated_delta_rule"].startswith("fla")
        for module in gdn_modules(body)
    )
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and body.config.model_type in FAMILIES
        and "sliding_attention" not in layer_types
        and importlib.util.find_spec("torch.nn.attention.varlen") is not None
        and kernels
    )


def enable_packing(body: nn.Module) -> None:
    """Makes the attention known to Transformers and teaches the short convolution about `cu_seqlens`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _varlen_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION, lambda *args, **options: None)
    for module in gdn_modules(body):
        if not hasattr(module.causal_conv1d_fn, "packs"):
            module.causal_conv1d_fn = _packed_convolution(module.causal_conv1d_fn)


def packed_forward(body: nn.Module, pack: Pack, device: torch.device) -> None:
    """One forward over the pack's tokens as a batch of one row; taps see [1, num_tokens, H]."""
    num_tokens = pack.num_tokens
    ends = torch.from_numpy(pack.length).cumsum(0, dtype=torch.int32)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), ends]).to(device)
    ids = torch.from_numpy(pack.input_ids[:num_tokens].astype("int64"))
    positions = torch.from_numpy(pack.positions[:num_tokens].astype("int64"))
    longest = int(pack.length.max())
    with _attention(body, _ATTENTION):
        body(
            input_ids=ids.to(device)[None],
            position_ids=positions.to(device)[None],
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens,
            max_length_q=longest,
            max_length_k=longest,
            use_cache=False,
        )


@contextlib.contextmanager
def _attention(body: nn.Module, name: str) -> Generator[None, None, None]:
    """Runs the body with another attention; one-sample forwards keep their own."""
    configs: dict[int, Any] = {
        id(part.config): part.config for part in body.modules() if hasattr(part, "config")
    }
    before = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = name
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _varlen_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor,
    max_length_q: int,
    max_length_k: int,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sample; query [1, heads, T, D], result [1, T, heads, D]."""
    from torch.nn.attention import varlen

    groups = query.shape[1] // key.shape[1]
    q_TND, k_TND, v_TND = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    attended_TND: Any = varlen.varlen_attn(
        q_TND,
        k_TND.repeat_interleave(groups, 1),
        v_TND.repeat_interleave(groups, 1),
        cu_seq_lens_q,
        cu_seq_lens_k,
        max_length_q,
        max_length_k,
        window_size=(-1, 0),  # everything before, nothing after
        scale=scaling,
    )
    return attended_TND[None], None


def _packed_convolution(original: Callable) -> Callable:
    def convolve(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if cu_seq_lens_q is None:
            return original(hidden_states, weight, bias, activation=activation, **options)
        kernel = importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
        result = kernel(
            hidden_states.transpose(1, 2),
            weight=weight,
            bias=bias,
            activation=activation,
            cu_seqlens=cu_seq_lens_q.long(),
        )
        return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)

    convolve.packs = True  # ty: ignore[missing-attribute]
    # What `target.gdn_backend` looks through to name the implementation.
    convolve.by_device = getattr(original, "by_device", original)  # ty: ignore[missing-attribute]
    return convolve
