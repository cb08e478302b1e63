"""What serving engines make of a drafter's config.json, by their own rules, and what they insist on.

No engine is needed here: each function below reads a config as that engine's loader does, with its
defaults and precedence, so that an export is refused before somebody serves it wrongly and sees only a
lower acceptance. A newer engine is a new function and one line in ENGINES.

References: vLLM 0.33 model_executor/models/qwen3_dflash.py and transformers_utils/configs/speculators/;
SGLang 0.5.23 srt/models/dflash.py and srt/speculative/dflash_utils.py; z-lab dflash 0.1.0 dflash/model.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dflash_core.errors import InputError
from dflash_core.model import SLIDING, DrafterShape

_HEAD_DIMS = (
    32,
    64,
    96,
    128,
    160,
    192,
    224,
    256,
)  # of FlashAttention, which vLLM needs for non-causal layers


@dataclass(frozen=True)
class Served:
    """A drafter as an engine would run it."""

    layers: tuple[tuple[int | None, bool], ...]
    """For each layer its window (None: full) and whether it is causal in the block."""
    target_layer_ids: tuple[int, ...] | None
    """Tapped layers, 0-based; None when the engine would make up its own."""
    mask_token_id: int | None
    """Token in the unknown slots; None when the engine would add a token of its own."""
    block_size: int | None
    """Tokens of a block; None when the user says it at start."""
    rope_theta: float
    """Base of the rotary embedding."""


class Unreadable(Exception):
    """An engine does not load this config; the text says why."""


def trained(shape: DrafterShape) -> Served:
    """What an engine has to compute to serve the drafter as it was trained."""
    layers = tuple(
        (shape.sliding_window if kind == SLIDING else None, shape.causal_in_block(kind))
        for kind in shape.layer_types
    )
    return Served(
        layers=layers,
        target_layer_ids=shape.target_layer_ids,
        mask_token_id=shape.mask_token_id,
        block_size=shape.block_size,
        rope_theta=shape.rope_theta,
    )


def vllm(body: dict) -> Served:
    """vLLM 0.33."""
    terms, block_size = body, None
    section: dict[str, Any] = dict(body.get("dflash_config") or {})
    if "speculators_model_type" in body:
        if body.get("sample_from_anchor"):
            raise Unreadable("sample_from_anchor is refused for dflash")
        try:
            method = body["speculators_config"]["proposal_methods"][0]
            block_size = method["speculative_tokens"] + 1
            body["speculators_config"]["verifier"]["name_or_path"]
            terms = body["transformer_layer_config"]
        except (KeyError, IndexError) as error:
            raise Unreadable(f"speculators_config has no {error}") from error
        section = {
            "mask_token_id": body.get("mask_token_id"),
            "target_layer_ids": [k - 1 for k in body["aux_hidden_state_layer_ids"]],
            # One value for every layer, whatever its kind; a missing flag counts as non-causal.
            "causal": not body.get("sliding_window_non_causal", True),
        }
    _require_qwen3(terms)
    kinds = terms.get("layer_types")
    slides = SLIDING in (kinds or ())
    every_layer = section.get("use_swa", False) and not slides
    window = section.get("swa_window_size", terms.get("sliding_window"))
    layers = []
    for index in range(terms["num_hidden_layers"]):
        sliding = every_layer or bool(kinds and kinds[index] == SLIDING)
        if sliding and window is None:
            raise Unreadable("sliding layers need sliding_window")
        told = [
            terms.get("is_causal"),
            section.get("causal"),
            bool(kinds and kinds[index] == SLIDING),
        ]
        causal = next(value for value in told if value is not None)
        layers.append((window if sliding else None, bool(causal)))
    ids = section.get("target_layer_ids")
    return Served(
        layers=tuple(layers),
        target_layer_ids=tuple(ids) if ids else None,
        mask_token_id=section.get("mask_token_id", terms.get("mask_token_id")),
        block_size=block_size,
        rope_theta=_rope_theta(terms),
    )


def sglang(body: dict) -> Served:
    """SGLang 0.5.23."""
    if "speculators_model_type" in body:
        raise Unreadable("the speculators layout is not read (sgl-project/sglang#40630)")
    return _nested_first(body, is_causal=body.get("is_causal"), default_block_size=None)


def zlab(body: dict) -> Served:
    """The z-lab package dflash 0.1.0."""
    if "speculators_model_type" in body:
        raise Unreadable("the speculators layout is not read")
    return _nested_first(body, is_causal=body.get("is_causal"), default_block_size=16)


ENGINES: dict[str, Callable[[dict], Served]] = {
    "vLLM 0.33": vllm,
    "SGLang 0.5.23": sglang,
    "z-lab 0.1.0": zlab,
}


def verdict(engine: str, body: dict, shape: DrafterShape) -> list[str]:
    """How the engine would serve a drafter of `shape` differently from how it was trained; empty: as trained.

    Raises:
        Unreadable: the engine does not load this config.
    """
    served, wanted = ENGINES[engine](body), trained(shape)
    problems = [
        f"layer {index} would have {_layer(got)}, trained with {_layer(want)}"
        for index, (got, want) in enumerate(zip(served.layers, wanted.layers, strict=False))
        if got != want
    ]
    if len(served.layers) != len(wanted.layers):
        problems.append(f"{len(served.layers)} layers, trained with {len(wanted.layers)}")
    for field in ("target_layer_ids", "mask_token_id", "rope_theta", "block_size"):
        got, want = getattr(served, field), getattr(wanted, field)
        if got != want and not (field == "block_size" and got is None):
            problems.append(f"{field} would be {got}, trained with {want}")
    return problems


def require_servable(body: dict, shape: DrafterShape) -> None:
    """Checks that every engine that loads this config serves what was trained.

    Raises:
        InputError: one would serve it differently, or none loads it; names engine and reason.
    """
    refused = []
    for engine in ENGINES:
        try:
            problems = verdict(engine, body, shape)
        except Unreadable as error:
            refused.append(f"{engine}: {error}")
            continue
        if problems:
            raise InputError(
                f"{engine} would serve this drafter (attention {shape.attention!r}) differently from how it was "
                f"trained: {'; '.join(problems[:3])}; export another layout"
            )
    if len(refused) == len(ENGINES):
        raise InputError(f"no engine loads this drafter: {'; '.join(refused)}")


def serving_notes(shape: DrafterShape) -> list[str]:
    """What vLLM needs at its start to serve the drafter as trained."""
    causal = {shape.causal_in_block(kind) for kind in shape.layer_types}
    notes = []
    if causal != {True}:
        notes.append(
            "layers are not causal in the block: start vLLM with `--attention-backend flash_attn`"
        )
        if shape.head_dim not in _HEAD_DIMS:
            notes.append(
                f"head_dim {shape.head_dim} is none of FlashAttention's: vLLM needs 64 or 128"
            )
    if len(causal) > 1:
        notes.append("sliding and full layers together need vLLM's V2 model runner")
    return notes


def _nested_first(body: dict, *, is_causal: bool | None, default_block_size: int | None) -> Served:
    """Reads `dflash_config` first and the top level second, as SGLang and the z-lab package do."""
    _require_qwen3(body)
    section = body.get("dflash_config") or {}
    kinds = body.get("layer_types") or ["full_attention"] * body["num_hidden_layers"]
    layers = []
    for kind in kinds:
        sliding = kind == SLIDING
        if sliding and body.get("sliding_window") is None:
            raise Unreadable("sliding layers need sliding_window")
        causal = sliding if is_causal is None else bool(is_causal)
        layers.append((body["sliding_window"] if sliding else None, causal))
    ids = section.get("target_layer_ids", body.get("target_layer_ids"))
    return Served(
        layers=tuple(layers),
        target_layer_ids=tuple(ids) if ids else None,
        mask_token_id=section.get("mask_token_id", body.get("mask_token_id")),
        block_size=section.get("block_size", body.get("block_size", default_block_size)),
        rope_theta=_rope_theta(body),
    )


def _require_qwen3(terms: dict) -> None:
    if terms.get("model_type") != "qwen3":
        raise Unreadable(f"model_type {terms.get('model_type')!r} does not load, expected qwen3")


def _rope_theta(terms: dict) -> float:
    rope = terms.get("rope_parameters") or {}
    return float(rope.get("rope_theta") or terms.get("rope_theta") or 1e6)


def _layer(layer: tuple[int | None, bool]) -> str:
    window, causal = layer
    kind = "full attention" if window is None else f"a window of {window}"
    return f"{kind}, {'causal' if causal else 'not causal'} in the block"
