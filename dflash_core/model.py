"""The DFlash drafter: a small Qwen3-like stack that reads the target's hidden states as extra keys.

Every layer attends over the context (rows that come from the target, projected once and never changed)
and over the block itself (the anchor token and mask tokens). Embedding and output head are the target's;
they are passed in as tensors and are no part of the drafter. Parameter names are those of the z-lab
checkpoints, so a state dict is an export.

Shape letters: B sequences, T context rows, Q block rows (N blocks of K slots), L taps, H hidden size,
C = L * H, D head width, h heads.
Reference: DFlash, https://arxiv.org/abs/2602.06036, and z-lab/dflash dflash/model.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dflash_core.attention import Mask, attend
from dflash_core.config import DrafterConfig
from dflash_core.errors import InputError

FULL, SLIDING = "full_attention", "sliding_attention"
_INIT_STD = 0.02
_WIDEST_DEFAULT_HEAD = (
    128  # wider heads (Qwen3.5 has 256) upset the engines' shared key-value pages
)


@dataclass(frozen=True)
class DrafterShape:
    """Everything that fixes a drafter's parameters and computation; checked when made.

    Raises:
        InputError: values that cannot go together.
    """

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    attention: str
    sliding_window: int
    rope_theta: float
    rms_norm_eps: float
    mask_token_id: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    layout: str = "in-place"

    def __post_init__(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if min(heads, kv_heads) < 1 or heads % kv_heads:
            raise InputError(
                f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; "
                "choose key-value heads that divide the query heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise InputError(
                f"head_dim {self.head_dim} is not a positive even number; rotary embedding turns pairs, "
                "set drafter.head_dim to 64 or 128"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise InputError(
                f"mask_token_id {self.mask_token_id} has no embedding row; "
                f"choose an unused id from 0 to {self.vocab_size - 1}"
            )
        self._check_taps()
        if self.attention not in _LAYER_TYPES:
            raise InputError(
                f"attention {self.attention!r} is not known; use one of {', '.join(_LAYER_TYPES)}"
            )
        if self.layout not in _FIRST_SLOTS:
            raise InputError(
                f"layout {self.layout!r} is not known; use one of {', '.join(_FIRST_SLOTS)}"
            )

    def _check_taps(self) -> None:
        taps, layers = self.target_layer_ids, self.num_target_layers
        if not taps or min(taps) < 0 or max(taps) >= layers:
            raise InputError(
                f"target_layer_ids {list(taps)} do not fit a target of {layers} layers; "
                f"give at least one id from 0 to {layers - 1}"
            )
        if list(taps) != sorted(set(taps)):
            raise InputError(
                f"target_layer_ids {list(taps)} are not in rising order; serving engines collect taps in "
                f"the order of the layers, use {sorted(set(taps))}"
            )

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Kind of each layer, first to last: FULL or SLIDING."""
        inner, last = _LAYER_TYPES[self.attention]
        return (inner,) * (self.num_hidden_layers - 1) + (last,)

    @property
    def first_slot(self) -> int:
        """First slot of a block that predicts a token."""
        return _FIRST_SLOTS[self.layout]

    @property
    def num_drafts(self) -> int:
        """Tokens that a block proposes."""
        return self.block_size - self.first_slot

    def causal_in_block(self, layer_type: str) -> bool:
        """Whether a slot of such a layer sees only its own and earlier slots of its block."""
        return layer_type == SLIDING and self.attention != "swa-bidir"


# Attention contract: (kind of all layers but the last, kind of the last).
_LAYER_TYPES = {
    "full-bidir": (FULL, FULL),
    "swa-causal": (SLIDING, SLIDING),
    "mixed": (SLIDING, FULL),
    "swa-bidir": (SLIDING, SLIDING),
}
# Slot 0 holds the anchor: in place it predicts nothing, shifted the token behind it.
_FIRST_SLOTS = {"in-place": 1, "shifted": 0}


def resolve_shape(
    config: DrafterConfig,
    target_text_config: Any,
    target_layer_ids: list[int] | tuple[int, ...],
    mask_token_id: int,
) -> DrafterShape:
    """The shape that `config` asks for on a target; a 0 in `config` takes the target's value.

    Head width, rotary embedding and norms are the drafter's own: partial rotary, M-RoPE, heads of 256
    and (1 + w) norms of a target collapse a drafter or are refused by the engines.

    Args:
        target_text_config: the target's text configuration (Hugging Face names).
        target_layer_ids: tapped layers, rising; id k is the output of decoder layer k, 0-based.
        mask_token_id: the resolved id, >= 0.

    Raises:
        InputError: the values cannot go together, or the target has no value to take.
    """
    if config.attention == "mixed" and config.num_hidden_layers < 2:
        raise InputError(
            f"attention 'mixed' needs a sliding layer before the full last one, and num_hidden_layers is "
            f"{config.num_hidden_layers}; give it 2 or more, or use full-bidir"
        )
    hidden_size = _target_value(target_text_config, "hidden_size")
    heads = _from_target(config.num_attention_heads, target_text_config, "num_attention_heads")
    default_head_dim = min(_WIDEST_DEFAULT_HEAD, hidden_size // heads)
    return DrafterShape(
        hidden_size=hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        intermediate_size=_from_target(
            config.intermediate_size, target_text_config, "intermediate_size"
        ),
        num_attention_heads=heads,
        num_key_value_heads=_from_target(
            config.num_key_value_heads, target_text_config, "num_key_value_heads"
        ),
        head_dim=config.head_dim or default_head_dim,
        block_size=config.block_size,
        attention=config.attention,
        sliding_window=config.sliding_window,
        rope_theta=config.rope_theta,
        rms_norm_eps=float(getattr(target_text_config, "rms_norm_eps", None) or 1e-6),
        mask_token_id=mask_token_id,
        vocab_size=_target_value(target_text_config, "vocab_size"),
        target_layer_ids=tuple(target_layer_ids),
        num_target_layers=_target_value(target_text_config, "num_hidden_layers"),
        layout=config.layout,
    )


def _from_target(value: int, target_text_config: Any, name: str) -> int:
    """`value`, or the target's when it is 0."""
    return value or _target_value(target_text_config, name)


def _target_value(target_text_config: Any, name: str) -> int:
    value = getattr(target_text_config, name, None) or 0
    if value < 1:
        way_out = f"set drafter.{name}" if name in DrafterConfig.model_fields else "check its files"
        raise InputError(f"the target's configuration has no {name}, expected 1 or more; {way_out}")
    return int(value)


class RMSNorm(nn.Module):
    """w * x / rms(x) over the last dimension, computed in float32, returned in x's type."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
        return normed.to(x.dtype)


def rotary_tables(positions_BQ: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [B, 1, Q, D] of the rotary embedding, float32 whatever the model's type.

    Frequencies are never stored in the module: a cast to bfloat16 would dephase far positions.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions_BQ.device).float() / head_dim
    angles = positions_BQ[..., None].float() * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x_BhQD: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding in NeoX style: dimension i turns with i + D/2."""
    cos, sin = tables
    left, right = x_BhQD.float().chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    return (x_BhQD.float() * cos + turned * sin).to(x_BhQD.dtype)


class Attention(nn.Module):
    """Grouped-query attention whose key and value projections serve context and block alike."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        width, self.head_dim = shape.hidden_size, shape.head_dim
        q_width = shape.num_attention_heads * self.head_dim
        kv_width = shape.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, q_width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(q_width, width, bias=False)
        self.q_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)

    def keys_values(self, x_BTH: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Turned keys and plain values, each [B, key-value heads, T, D]."""
        key = self._heads(self.k_proj(x_BTH))
        return rotate(self.k_norm(key), tables), self._heads(self.v_proj(x_BTH))

    def forward(
        self,
        x_BQH: Tensor,
        tables: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        mask: Mask,
    ) -> Tensor:
        query = rotate(self.q_norm(self._heads(self.q_proj(x_BQH))), tables)
        out = attend(query, context, self.keys_values(x_BQH, tables), mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP with residuals; only block rows pass through, never the context."""

    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(
        self,
        x_BQH: Tensor,
        tables: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        mask: Mask,
    ) -> Tensor:
        x_BQH = x_BQH + self.self_attn(self.input_layernorm(x_BQH), tables, context, mask)
        return x_BQH + self.mlp(self.post_attention_layernorm(x_BQH))


class Drafter(nn.Module):
    """The drafter; fresh matrices are drawn from a normal distribution, norms are 1.

    Its standard deviation is 0.02, as in every published recipe, or 1 / sqrt(width) where the input is
    narrower than 2,500: with 0.02 a drafter of width 256 starts with nearly dead MLPs.

    Args:
        shape: see `DrafterShape`.
        generator: source of the fresh weights; torch's own when None.

    Attributes:
        recompute: keep no activations inside layers for the backward pass, compute them again.
    """

    def __init__(self, shape: DrafterShape, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.recompute = False
        joined = len(shape.target_layer_ids) * shape.hidden_size
        self.fc = nn.Linear(joined, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                std = max(_INIT_STD, parameter.shape[1] ** -0.5)
                nn.init.normal_(parameter, std=std, generator=generator)

    def project_context(
        self, taps_BTC: Tensor, positions_BT: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of context rows for every layer; computed once, valid for all later blocks.

        Args:
            taps_BTC: the L taps of each row joined in the order of `target_layer_ids`, any float type.
            positions_BT: each row's position in its document, integer.

        Returns:
            For each layer (key, value), both [B, key-value heads, T, D].
        """
        context_BTH = self.hidden_norm(self.fc(taps_BTC.to(self.fc.weight.dtype)))
        tables = rotary_tables(positions_BT, self.shape.head_dim, self.shape.rope_theta)
        return [layer.self_attn.keys_values(context_BTH, tables) for layer in self._layers()]

    def forward(
        self,
        embeds_BQH: Tensor,
        positions_BQ: Tensor,
        context_kv: list[tuple[Tensor, Tensor]],
        masks: Mapping[str, Mask],
    ) -> Tensor:
        """Hidden states [B, Q, H] of block rows after the final norm; the target's head makes logits.

        Args:
            embeds_BQH: the target's embedding rows of the anchors and mask tokens.
            positions_BQ: each row's position in its document, integer.
            context_kv: what `project_context` returned.
            masks: for each kind of layer in use who sees whom, as made in `attention`.
        """
        tables = rotary_tables(positions_BQ, self.shape.head_dim, self.shape.rope_theta)
        x_BQH = embeds_BQH
        kinds = self.shape.layer_types
        for layer, kind, context in zip(self._layers(), kinds, context_kv, strict=True):
            if self.recompute:
                x_BQH = checkpoint(layer, x_BQH, tables, context, masks[kind], use_reentrant=False)
            else:
                x_BQH = layer(x_BQH, tables, context, masks[kind])
        return self.norm(x_BQH)

    def forward_pack(
        self,
        taps_BTC: Tensor,
        positions_BT: Tensor,
        embeds_BQH: Tensor,
        positions_BQ: Tensor,
        masks: Mapping[str, Mask],
    ) -> Tensor:
        """`project_context` and `forward` in one call: a training step over the blocks of a pack."""
        context_kv = self.project_context(taps_BTC, positions_BT)
        return self.forward(embeds_BQH, positions_BQ, context_kv, masks)

    def compile_parts(self) -> None:
        """Compiles the context projection and one layer, whose code serves all layers of any kind."""
        self.project_context = torch.compile(self.project_context)
        for part in (*self._layers(), self.norm):
            part.compile()

    def _layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer
