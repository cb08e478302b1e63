"""States of a packed row against those of its samples alone, on a GPU: worst cosines by family, as a table.

    python benchmarks/parity.py

Random weights, 12 layers, bfloat16, ten samples of 1 to 1,000 tokens in one row, three taps. "Alone, same
kernels" runs each sample as a row of its own; "Transformers" is the family's own forward of one sample. Random
weights exaggerate rounding: real ones are closer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import AutoModel, Gemma3TextConfig, LlamaConfig, Qwen3Config
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from dflash_core.extractor import split_pack
from dflash_core.packed_forward import can_pack, enable_packing, packed_forward
from dflash_core.packing import Pack
from dflash_core.target import tap_layers

DEVICE = torch.device("cuda")
LENGTHS = [1000, 1, 700, 3, 64, 129, 511, 17, 300, 2]
LAYERS = 12
TAPS = [1, 6, 11]
PLAIN = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
    "mrope_section": [6, 5, 5],
}
HYBRID = {**PLAIN, "linear_num_value_heads": 16, "linear_num_key_heads": 8, "rope_parameters": ROPE}
EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
FAMILIES: dict[str, Any] = {
    "Qwen3.5 (3 of 4 layers Gated DeltaNet)": lambda: Qwen3_5TextConfig(**HYBRID),
    "Qwen3.5 MoE": lambda: Qwen3_5MoeTextConfig(**HYBRID, **EXPERTS),
    "Qwen3": lambda: Qwen3Config(**PLAIN),
    "Llama": lambda: LlamaConfig(**PLAIN),
    "Gemma 3": lambda: Gemma3TextConfig(**PLAIN, sliding_window=256),
}


def make_body(config: Any) -> Any:
    torch.manual_seed(0)
    config._attn_implementation = "sdpa"
    body = AutoModel.from_config(config).to(DEVICE, torch.bfloat16).eval().requires_grad_(False)
    body.norm = torch.nn.Identity()
    return body


def make_pack(lengths: list[int]) -> Pack:
    length = np.array(lengths, np.int32)
    start = np.concatenate([[0], np.cumsum(length)[:-1]]).astype(np.int32)
    ids = np.random.default_rng(0).integers(0, 4096, length.sum()).astype(np.uint32)
    return Pack(0, ids, np.ones(len(ids), np.uint8), start, length, np.arange(len(length)))


def packed(body: Any, pack: Pack) -> Tensor:
    """States of the taps, float32 [T, L, H]."""
    with tap_layers(body, TAPS) as taps:
        packed_forward(body, pack, DEVICE)
    return taps.stack()[0].float()


def native(body: Any, pack: Pack) -> Tensor:
    ids = torch.from_numpy(pack.input_ids.astype(np.int64)).to(DEVICE)[None]
    with tap_layers(body, TAPS) as taps:
        body(input_ids=ids, use_cache=False)
    return taps.stack()[0].float()


def cosines(row_TLH: Tensor, pack: Pack, singles: list[Tensor]) -> tuple[float, float]:
    """Least mean of a sample and tap, least of all rows and taps."""
    means, rows = [], []
    for start, single_SLH in zip(pack.start.tolist(), singles, strict=True):
        cosine_SL = cosine_similarity(
            row_TLH[start : start + len(single_SLH)], single_SLH, dim=-1
        ).nan_to_num(-1.0)
        means.append(cosine_SL.mean(0).min())
        rows.append(cosine_SL.min())
    return float(min(means)), float(min(rows))


@torch.inference_mode()
def measure(config: Any) -> list[str]:
    body, pack = make_body(config), make_pack(LENGTHS)
    samples = [sample for _, sample in split_pack(pack, 1)]
    theirs = [native(body, sample) for sample in samples]
    assert can_pack(body, DEVICE, torch.bfloat16), "kernels of the packed path are missing"
    enable_packing(body)
    row_TLH = packed(body, pack)
    cells = []
    for singles in ([packed(body, sample) for sample in samples], theirs):
        cells += [f"{value:.6f}" for value in cosines(row_TLH, pack, singles)]
    return cells


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| family | alone, same kernels: mean | row | Transformers: mean | row |")
    print("| --- | --- | --- | --- | --- |")
    for name, config in FAMILIES.items():
        print(f"| {name} | {' | '.join(measure(config()))} |", flush=True)


if __name__ == "__main__":
    main()
