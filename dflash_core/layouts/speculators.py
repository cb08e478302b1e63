"""The speculators layout: Qwen3's terms under `transformer_layer_config`, and who verifies.

vLLM and the speculators package read it. Layer ids are counted as vLLM counts them, one more than
everywhere else in this project. Reference: speculators 0.9.0 models/dflash/config.py, and vLLM 0.33
transformers_utils/configs/speculators/algos.py.
"""

from __future__ import annotations

import logging
from typing import Any

from dflash_core.errors import InputError
from dflash_core.layouts import qwen3
from dflash_core.model import SLIDING, DrafterShape

log = logging.getLogger(__name__)

VERSION = "0.9.0"  # of the package whose format this is
_TYPE = "dflash"


def config_json(
    shape: DrafterShape,
    target_text_config: Any,
    target_name: str,
    draft_vocab_size: int | None = None,
) -> dict:
    """See `Layout.config_json`. Every flag is explicit: vLLM and speculators default to opposite values."""
    causal = {shape.causal_in_block(kind) for kind in shape.layer_types}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": shape.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "dtype": "bfloat16",
        "speculators_model_type": _TYPE,
        "speculators_version": VERSION,
        "block_size": shape.block_size,
        "draft_vocab_size": draft_vocab_size or shape.vocab_size,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [k + 1 for k in shape.target_layer_ids],
        "mask_token_id": shape.mask_token_id,
        # For speculators it concerns sliding layers only; vLLM takes its opposite as the causality of
        # all layers, so a drafter of full layers needs it too, and none fits a drafter of both kinds.
        "sliding_window_non_causal": True not in causal,
        "sample_from_anchor": False,
        # Not of the format; without it an import has to be told the target.
        "num_target_layers": shape.num_target_layers,
        "transformer_layer_config": qwen3.terms(shape, target_text_config),
        "speculators_config": {
            "algorithm": _TYPE,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": target_name,
                "architectures": list(getattr(target_text_config, "architectures", None) or []),
            },
        },
    }


def shape_from_config(body: dict, num_target_layers: int | None) -> DrafterShape:
    """See `Layout.shape_from_config`."""
    if body.get("speculators_model_type") != _TYPE:
        qwen3.refuse([f"speculators_model_type {body.get('speculators_model_type')!r}"])
    if body.get("sample_from_anchor"):
        qwen3.refuse(["sample_from_anchor true"])
    layers = body.get("num_target_layers") or num_target_layers
    if not layers:
        raise InputError(
            "config.json of the speculators layout does not say how many layers the target has; give the "
            "target, or num_target_layers"
        )
    try:
        terms = _with_defaults(body["transformer_layer_config"])
        non_causal = body.get("sliding_window_non_causal")
        if non_causal is None and SLIDING in (terms.get("layer_types") or ()):
            log.warning(
                "config.json has no sliding_window_non_causal: speculators trains its sliding layers causal, "
                "vLLM serves all layers non-causal; read as trained"
            )
        mask = body.get("mask_token_id")
        return DrafterShape(
            **qwen3.shape_fields(terms),
            attention=qwen3.attention_contract(
                terms, sliding_causal=not non_causal, all_causal=None
            ),
            block_size=body["block_size"],
            mask_token_id=-1 if mask is None else mask,
            target_layer_ids=tuple(k - 1 for k in body["aux_hidden_state_layer_ids"]),
            num_target_layers=layers,
        )
    except KeyError as error:
        raise InputError(
            f"config.json has no {error.args[0]}; expected a drafter in the speculators layout"
        ) from error


def recognises(body: dict) -> bool:
    """See `Layout.recognises`."""
    return "speculators_model_type" in body


def _with_defaults(terms: dict) -> dict:
    """The decoder's configuration with the values that speculators leaves out because they are Qwen3's own."""
    from transformers import Qwen3Config

    if terms.get("model_type") != "qwen3":
        qwen3.refuse([f"model_type {terms.get('model_type')!r}"])
    full = Qwen3Config(**terms).to_dict()
    # Qwen3Config drops the window unless use_sliding_window is true; layer_types alone say who slides.
    return full | {"sliding_window": terms.get("sliding_window") or full["sliding_window"]}
