"""How fast extraction will be on a GPU that nobody has measured yet; for plans only."""

from __future__ import annotations

from dflash_core.config import Card, TargetConfig
from dflash_core.flops import flops_per_token
from dflash_core.target import empty_body

DENSE_TFLOPS: dict[Card, float] = {
    "a100": 312.0,
    "h100": 989.0,
    "h200": 989.0,
    "b200": 2250.0,
    "rtx-pro-6000": 504.0,
}
"""Dense bfloat16 products with float32 sums, as the data sheets have them."""
_SHARE = 0.58  # of that rate, which extraction reached on an H200: docs/extraction.md


def tokens_per_s(target: TargetConfig, layer_ids: list[int], card: Card) -> float:
    """Estimated tokens per second of one card for layers 0 to the last of `layer_ids`."""
    flops = flops_per_token(empty_body(target, layer_ids))
    return _SHARE * DENSE_TFLOPS[card] * 1e12 / flops
