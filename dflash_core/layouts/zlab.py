"""The z-lab layout: Qwen3's terms at the top level and a `dflash_config` section.

SGLang, vLLM, llama.cpp, MLX and the z-lab package read it. Reference: z-lab/dflash dflash/model.py.
"""

from __future__ import annotations

from typing import Any

from dflash_core.errors import InputError
from dflash_core.layouts import qwen3
from dflash_core.model import DrafterShape

ARCHITECTURE = "DFlashDraftModel"
# Values that leave the computation as it is; anything else of these names, or another name, is refused.
_NEUTRAL = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
    "use_aux_hidden_state": True,
    "use_swa": False,
}


def config_json(
    shape: DrafterShape,
    target_text_config: Any,
    target_name: str,
    draft_vocab_size: int | None = None,
) -> dict:
    """See `Layout.config_json`. Not among the keys: `auto_map`, which would name a file that is not shipped."""
    if draft_vocab_size is not None:
        raise InputError(
            "the z-lab layout has no reduced vocabulary: SGLang and the z-lab package pass over its tensors "
            "without a word; leave draft_vocab_size 0, or write the speculators layout only"
        )
    section = {
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.target_layer_ids),
    }
    body = {
        "architectures": [ARCHITECTURE],
        "dtype": "bfloat16",
        # Read in dflash_config first and here second, by older engines only here.
        "block_size": shape.block_size,
        "dflash_config": section,
        "num_target_layers": shape.num_target_layers,
        **qwen3.terms(shape, target_text_config),
    }
    # Without is_causal all engines make sliding layers causal in the block and full ones not: right for
    # every contract but this one. True would turn the full layer of a mixed drafter causal, too.
    if shape.attention == "swa-bidir":
        body["is_causal"] = False
    return body


def shape_from_config(body: dict, num_target_layers: int | None) -> DrafterShape:
    """See `Layout.shape_from_config`."""
    section = body.get("dflash_config") or {}
    if body.get("architectures") != [ARCHITECTURE]:
        qwen3.refuse([f"architectures {body.get('architectures')!r}"])
    _refuse_unknown(section)
    all_causal = body.get("is_causal", section.get("causal"))
    try:
        return DrafterShape(
            **qwen3.shape_fields(body),
            attention=qwen3.attention_contract(body, sliding_causal=True, all_causal=all_causal),
            block_size=section.get("block_size") or body["block_size"],
            mask_token_id=section.get("mask_token_id", body.get("mask_token_id", -1)),
            target_layer_ids=tuple(section.get("target_layer_ids") or body["target_layer_ids"]),
            num_target_layers=body.get("num_target_layers") or num_target_layers or 0,
        )
    except KeyError as error:
        raise InputError(
            f"config.json has no {error.args[0]}; expected a drafter in the z-lab layout"
        ) from error


def recognises(body: dict) -> bool:
    """See `Layout.recognises`."""
    return "speculators_model_type" not in body and (
        "dflash_config" in body or ARCHITECTURE in (body.get("architectures") or [])
    )


def _refuse_unknown(section: dict) -> None:
    """DFlash 2 parts, scales, an attention sink, a separate mask embedding: not what is computed here."""
    known = {"block_size", "mask_token_id", "target_layer_ids", "causal"}
    qwen3.refuse(
        [
            f"dflash_config.{key} {section[key]!r}"
            for key in sorted(section.keys() - known)
            if key not in _NEUTRAL or section[key] != _NEUTRAL[key]
        ]
    )
