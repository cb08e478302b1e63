"""Drafter weights in fewer bits: bfloat16, or INT8 and FP8 in the form of compressed-tensors.

Quantised are the MLPs and the output projections, 80 to 90 % of a drafter. The projections of the context
stay in bfloat16: their error would stay in every cached key and value, and engines fuse them across
layers. One scale for each output channel; activations are scaled for each token as they come.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

_QUANTISED = re.compile(r"\.(mlp\.(gate|up|down)_proj|self_attn\.o_proj)\.weight$")
_FORMATS = {
    # name: type, largest value, number type and format of compressed-tensors
    "int8": (torch.int8, 127.0, "int", "int-quantized"),
    "fp8": (torch.float8_e4m3fn, 448.0, "float", "float-quantized"),
}


def quantise(
    state_dict: dict[str, Tensor], weights: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors to write, and what they stand for.

    Args:
        state_dict: the drafter's parameters, float32.
        weights: `bfloat16`, `int8` or `fp8`.

    Returns:
        tensors: bfloat16, and for quantised weights their values and a scale [out, 1] each.
        rounded: the parameters that these compute, by name.
    """
    tensors, rounded = {}, {}
    for name, tensor in state_dict.items():
        if weights == "bfloat16" or not _QUANTISED.search(name):
            tensors[name] = rounded[name] = tensor.bfloat16()
            continue
        kind, largest, *_ = _FORMATS[weights]
        # Engines keep scales in float32; an all-zero channel has any scale.
        scale = (tensor.abs().amax(dim=1, keepdim=True) / largest).clamp_min(1e-12)
        values = tensor / scale
        tensors[name] = (values.round() if weights == "int8" else values).to(kind)
        tensors[name + "_scale"] = scale
        rounded[name] = tensors[name].float() * scale
    return tensors, rounded


def config_section(weights: str) -> dict:
    """`quantization_config` of config.json.

    Layers are left out by pattern: vLLM numbers a drafter's layers after the target's.
    """
    _, _, number, format_name = _FORMATS[weights]
    common = {"num_bits": 8, "type": number, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "strategy": "channel", "dynamic": False},
        "input_activations": {**common, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [
            "re:.*self_attn\\.[qkv]_proj$",
            "re:.*self_attn\\.qkv_proj$",
            "re:.*fc$",
            "lm_head",
        ],
        "kv_cache_scheme": None,
    }
