"""Compiles the kernels that a target needs on this machine's GPU, so that the first run does not.

    python -m deployments.warm_up FOLDER

Runs a few layers of the target's shape with random weights over one packed row. Triton keeps what it
compiled in its cache folder.
"""

from __future__ import annotations

import sys
import time

import torch

LAYERS, TOKENS = 4, 4096  # a hybrid target repeats its kinds of layers every four


def main(folder: str) -> None:
    """Prints what was compiled and how long it took."""
    from transformers import AutoConfig, AutoModelForCausalLM

    began = time.perf_counter()
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    text.num_hidden_layers = LAYERS
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:LAYERS]
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(text, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        ids = torch.randint(text.vocab_size, (1, TOKENS), device="cuda")
        model.base_model(input_ids=ids, use_cache=False)
    torch.cuda.synchronize()
    kinds = sorted(set(getattr(text, "layer_types", None) or ["full_attention"]))
    print(f"{', '.join(kinds)} layers in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1])
