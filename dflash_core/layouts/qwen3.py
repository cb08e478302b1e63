"""What both layouts share: a drafter's decoder in the terms of Transformers' Qwen3 configuration."""

from __future__ import annotations

from typing import Any

from dflash_core.config import DrafterConfig
from dflash_core.errors import InputError
from dflash_core.model import FULL, SLIDING, DrafterShape


def terms(shape: DrafterShape, target_text_config: Any) -> dict:
    """The drafter's decoder as a Qwen3 configuration."""
    slides = SLIDING in shape.layer_types
    body = {
        # vLLM takes any type it knows; with the target's own (qwen3_5_text) it does not load.
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "layer_types": list(shape.layer_types),
        "sliding_window": shape.sliding_window if slides else None,
        "use_sliding_window": slides,
        "max_window_layers": shape.num_hidden_layers,
        # Transformers 4 and the engines read the first, Transformers 5 the second.
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_scaling": None,
        "max_position_embeddings": target_text_config.max_position_embeddings,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
    }
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        body[key] = getattr(target_text_config, key, None)
    return body


def shape_fields(body: dict) -> dict:
    """The fields of `DrafterShape` that stand in a Qwen3 configuration.

    Raises:
        InputError: something that this drafter does not compute: another model, biases, YaRN; or sliding
            layers without a window.
    """
    window = body.get("sliding_window")
    if SLIDING in (body.get("layer_types") or ()) and not window:
        raise InputError(
            f"config.json has sliding layers and sliding_window {window!r}; set sliding_window to the window that "
            "the drafter was trained with"
        )
    rope = body.get("rope_parameters") or {}
    surprises = {
        "model_type": body.get("model_type") != "qwen3",
        "attention_bias": bool(body.get("attention_bias")),
        "hidden_act": body.get("hidden_act", "silu") != "silu",
        "rope_scaling": bool(body.get("rope_scaling")),
        "rope_parameters": rope.get("rope_type", "default") != "default",
        "is_neox_style": not body.get("is_neox_style", True),
    }
    refuse([f"{key} {body.get(key)!r}" for key, odd in surprises.items() if odd])
    return {
        "hidden_size": body["hidden_size"],
        "num_hidden_layers": body["num_hidden_layers"],
        "intermediate_size": body["intermediate_size"],
        "num_attention_heads": body["num_attention_heads"],
        "num_key_value_heads": body["num_key_value_heads"],
        "head_dim": body["head_dim"],
        "sliding_window": window or DrafterConfig.model_fields["sliding_window"].default,
        "rope_theta": float(rope.get("rope_theta") or body["rope_theta"]),
        "rms_norm_eps": body["rms_norm_eps"],
        "vocab_size": body["vocab_size"],
    }


def refuse(found: list[str]) -> None:
    """Raises InputError when config.json asks for anything in `found`."""
    if found:
        raise InputError(
            f"config.json asks for {'; '.join(found)}, which this version does not compute; expected "
            "architecture DFlashDraftModel, model_type qwen3, plain rotary embedding, no bias"
        )


def attention_contract(body: dict, *, sliding_causal: bool, all_causal: bool | None) -> str:
    """The attention contract behind `layer_types` and what a layout says of causality.

    Args:
        sliding_causal: whether sliding layers are causal in the block where nothing overrides it.
        all_causal: one value for every layer, which overrides; None for none.
    """
    kinds = tuple(body.get("layer_types") or [FULL] * body["num_hidden_layers"])
    sliding, full = (sliding_causal, False) if all_causal is None else (all_causal, all_causal)
    if len(kinds) == body["num_hidden_layers"]:
        if set(kinds) == {FULL} and not full:
            return "full-bidir"
        if set(kinds) == {SLIDING}:
            return "swa-causal" if sliding else "swa-bidir"
        if set(kinds[:-1]) == {SLIDING} and kinds[-1] == FULL and sliding and not full:
            return "mixed"
    raise InputError(
        f"config.json has layer_types {list(kinds)}, causal in the block: sliding {sliding}, full {full}, for "
        f"{body['num_hidden_layers']} layers; expected all full and not causal, all sliding, or sliding and "
        "causal with a full last layer that is not"
    )
