"""A whole pack as one row through the target, on a GPU: no padding, and samples do not see each other.

Attention runs over `cu_seqlens` with torch's varlen kernel, Gated DeltaNet with flash-linear-attention's,
its short convolution included: Transformers' own torch fallback of that convolution silently mixes
neighbouring samples. Norms, MLPs and attention layers are compiled, which takes their float32 arithmetic
and copies out of memory traffic. Families are listed by hand, and the extractor compares the first pack
with packs of one sample before it trusts this path.

Shape letters: T tokens of a pack, H hidden size, D head size.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Generator
from functools import cache
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_core.devices import to_device
from dflash_core.packing import Pack
from dflash_core.target import gdn_backend, gdn_modules, unwrapped

FAMILIES = (
    "gemma3_text",
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
_ATTENTION = "dflash_varlen"
_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")  # Gated DeltaNet of Qwen3.5
_GDN_CHUNK = 64  # tokens that the kernels of Gated DeltaNet and its convolution take at a time
_COMPILED = re.compile(r"(RMSNorm|RMSNormGated|MLP|Attention)$")


def can_pack(body: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether family, data type and kernels allow the packed path."""
    kernels = all(
        gdn_backend(module)["torch_chunk_gated_delta_rule"].startswith("fla")
        for module in gdn_modules(body)
    )
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and body.config.model_type in FAMILIES
        and importlib.util.find_spec("torch.nn.attention.varlen") is not None
        and kernels
    )


def enable_packing(body: nn.Module) -> None:
    """Makes the attention known to Transformers and teaches Gated DeltaNet about `cu_seqlens`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _varlen_attention())
    ALL_MASK_ATTENTION_FUNCTIONS.register(_ATTENTION, lambda *args, **options: None)
    for module in gdn_modules(body):
        if not hasattr(module.causal_conv1d_fn, "packs"):
            module.causal_conv1d_fn = _packed_convolution(module.causal_conv1d_fn)
    for part in body.modules():
        whole = all(hasattr(part, name) for name in _PROJECTIONS)
        if whole and "forward" not in vars(part):  # not done before
            part.forward = MethodType(_gated_deltanet(part), part)


def compile_parts(body: nn.Module) -> None:
    """Compiles norms, MLPs and attention of every layer, once for each class and shape of weights.

    Whole layers are not compiled: it took minutes and gave nothing over these parts.
    """
    compiled: dict[type, Callable] = {}
    for part in body.modules():
        kind = type(part)
        if _COMPILED.search(kind.__name__) and "forward" not in vars(part):
            if kind not in compiled:
                compiled[kind] = torch.compile(kind.forward, dynamic=True)
            part.forward = MethodType(compiled[kind], part)


def packed_forward(body: nn.Module, pack: Pack, device: torch.device) -> None:
    """One forward over the pack's tokens as a batch of one row; taps see [1, num_tokens, H].

    Nothing here waits for the device.
    """
    num_tokens = pack.num_tokens
    chunks = torch.from_numpy(_chunk_indices(pack.length))
    ends = torch.from_numpy(pack.length).cumsum(0, dtype=torch.int32)
    cu_seqlens = to_device(torch.cat([torch.zeros(1, dtype=torch.int32), ends]), device)
    ids = torch.from_numpy(pack.input_ids[:num_tokens].astype("int64"))
    positions = torch.from_numpy(pack.positions[:num_tokens].astype("int64"))
    # The kernel needs a bound only; few different ones mean few compilations.
    longest = 1 << (int(pack.length.max()) - 1).bit_length()
    with _attention(body, _ATTENTION):
        body(
            input_ids=to_device(ids, device)[None],
            position_ids=to_device(positions, device)[None],
            cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens,
            max_length_q=longest,
            max_length_k=longest,
            gdn_chunks=to_device(chunks, device),
            use_cache=False,
        )


def _chunk_indices(length: np.ndarray) -> np.ndarray:
    """Sample and number of each chunk of a sample, int32 [chunks, 2], as the kernels of Gated DeltaNet want it.

    They make it themselves where it is not given, which waits for the device.
    """
    counts = -(-length // _GDN_CHUNK)
    firsts = np.cumsum(counts) - counts
    samples = np.repeat(np.arange(len(length)), counts)
    return np.stack([samples, np.arange(counts.sum()) - firsts[samples]], axis=1).astype(np.int32)


@contextlib.contextmanager
def _attention(body: nn.Module, name: str) -> Generator[None, None, None]:
    """Runs the body with another attention, for which Transformers looks at no positions to make a mask.

    That look waits for the device. One-sample forwards keep their own attention.
    """
    from transformers import masking_utils

    configs: dict[int, Any] = {
        id(part.config): part.config for part in body.modules() if hasattr(part, "config")
    }
    before = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = name
    look = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda _: None  # ty: ignore[invalid-assignment]
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = look
        for key, config in configs.items():
            config._attn_implementation = before[key]


def _varlen_attention() -> Callable:
    """The attention as Transformers calls it: causal, within each sample."""
    varlen_attn: Any = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    # torch 2.12 and later want to be told that query heads share keys and values; 2.11 just does it.
    grouped = (
        {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    )

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        *,
        cu_seq_lens_q: Tensor,
        cu_seq_lens_k: Tensor,
        max_length_q: int,
        max_length_k: int,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Query, key, value [1, heads, T, D]; result [1, T, heads, D]."""
        q_TND, k_TND, v_TND = (x[0].transpose(0, 1) for x in (query, key, value))
        attended_TND = varlen_attn(
            q_TND,
            k_TND,
            v_TND,
            cu_seq_lens_q,
            cu_seq_lens_k,
            max_length_q,
            max_length_k,
            # A window counts the current token; everything before where there is none.
            window_size=((sliding_window or 0) - 1, 0),
            scale=scaling,
            **grouped,
        )
        return attended_TND[None], None

    return attention


@cache
def _convolution_kernel() -> Callable:
    return importlib.import_module("fla.modules.causal_conv1d").causal_conv1d


def _convolve(
    x_1TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    activation: str | None,
    cu_seqlens: Tensor,
    chunks: Tensor | None,
) -> Tensor:
    """The short convolution within each sample; columns of a wider tensor are taken as they lie."""
    result = _convolution_kernel()(
        x_1TC,
        weight=weight_CW,
        bias=bias_C,
        activation=activation,
        cu_seqlens=cu_seqlens,
        chunk_indices=chunks,
    )
    return result[0] if isinstance(result, tuple) else result


def _gated_deltanet(layer: Any) -> Callable:
    """The forward of a Gated DeltaNet layer with separate projections (Qwen3.5) over `cu_seqlens`.

    Two differences from Transformers, of about 3 % of a 27B target's time each. The four projections are one
    matrix product: the narrow ones use the matrix units badly. And queries, keys and values are convolved
    one by one, straight from its columns, so that each is contiguous without a copy.
    """
    original = layer.forward
    fused, sizes = _fuse([getattr(layer, name) for name in _PROJECTIONS])
    qkv_sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
    head_dims = [layer.head_k_dim, layer.head_k_dim, layer.head_v_dim]

    def forward(
        self: Any,
        hidden_states: Tensor,
        *args: Any,
        cu_seq_lens_q: Tensor | None = None,
        gdn_chunks: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        if cu_seq_lens_q is None:
            return original(hidden_states, *args, **options)
        qkv, z, b, a = F.linear(hidden_states, fused).split(sizes, dim=-1)
        weights = self.conv1d.weight.squeeze(1).split(qkv_sizes)
        biases = [None] * 3 if self.conv1d.bias is None else self.conv1d.bias.split(qkv_sizes)
        columns = zip(qkv.split(qkv_sizes, dim=-1), weights, biases, head_dims, strict=True)
        query, key, value = (
            _convolve(x, weight, bias, self.activation, cu_seq_lens_q, gdn_chunks).unflatten(
                -1, (-1, size)
            )
            for x, weight, bias, size in columns
        )
        mixed, _ = _delta_rule()(
            query,
            key,
            value,
            # float32, because exp overflows in float16.
            g=-self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias),
            beta=b.sigmoid(),
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=cu_seq_lens_q,
            chunk_indices=gdn_chunks,
        )
        return self.out_proj(self.norm(mixed, z.unflatten(-1, (-1, self.head_v_dim))).flatten(-2))

    return forward


def _fuse(projections: list[nn.Linear]) -> tuple[Tensor, list[int]]:
    """The weights as one matrix, of which the layers' own become parts, and their numbers of rows."""
    sizes = [projection.out_features for projection in projections]
    fused = torch.cat([projection.weight.detach() for projection in projections])
    for projection, weight in zip(projections, fused.split(sizes), strict=True):
        assert projection.bias is None, "Gated DeltaNet projections have no bias"
        projection.weight = nn.Parameter(weight, requires_grad=False)
    return fused, sizes


@cache
def _delta_rule() -> Callable:
    return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule


def _packed_convolution(original: Callable) -> Callable:
    """The convolution as Transformers calls it, [1, C, T], for layers that keep their own forward."""

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
        x_1TC = hidden_states.transpose(1, 2)
        return _convolve(x_1TC, weight, bias, activation, cu_seq_lens_q, None).transpose(1, 2)

    convolve.packs = True  # ty: ignore[missing-attribute]
    # What `target.gdn_backend` looks through to name the implementation.
    convolve.by_device = unwrapped(original)  # ty: ignore[missing-attribute]
    return convolve
