"""Tiny random targets of every supported family, saved as checkpoints with a byte tokenizer.

Each builder takes a folder, makes the checkpoint there and returns its TargetConfig (float32, so that
comparisons are tight). Weights are drawn wide enough that positions differ clearly.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dflash_core.config import TargetConfig

VOCAB = 272  # 256 bytes, three special tokens, and rows past the tokenizer's last id
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "bos_token_id": None,
}
_GDN: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}


def save_tokenizer(folder: Path, *, template: str | None = CHATML) -> None:
    """A tokenizer with one token a byte, ChatML markers and, if given, a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    markers = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    raw.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def save(folder: Path, model: Any, *, template: str | None = CHATML) -> TargetConfig:
    """Random weights from a fixed seed, then checkpoint and tokenizer in `folder`."""
    generator = torch.Generator().manual_seed(0)
    std = 0.3 * (32 / model.config.get_text_config().hidden_size) ** 0.5
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim >= 2:
                tensor.normal_(0, std, generator=generator)
            elif name.endswith("A_log"):  # the decay rates, which Transformers draws unseeded
                tensor.uniform_(1, 16, generator=generator).log_()
    model.save_pretrained(folder)
    save_tokenizer(folder, template=template)
    return TargetConfig(id=str(folder), dtype="float32")


def qwen3_5_text(folder: Path, **changes: Any) -> TargetConfig:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return save(folder, Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**_COMMON, **_GDN, **changes})))


def qwen3_5_wrapper(folder: Path) -> TargetConfig:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }
    config = Qwen3_5Config(text_config={**_COMMON, **_GDN}, vision_config=vision)
    return save(folder, Qwen3_5ForConditionalGeneration(config))


def qwen3_5_moe(folder: Path, **changes: Any) -> TargetConfig:
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    config = Qwen3_5MoeTextConfig(**{**_COMMON, **_GDN, **_MOE, **changes})
    return save(folder, Qwen3_5MoeForCausalLM(config))


def qwen3(folder: Path, **changes: Any) -> TargetConfig:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(**{**_COMMON, "tie_word_embeddings": False, **changes})
    return save(folder, Qwen3ForCausalLM(config))


def llama(folder: Path, **changes: Any) -> TargetConfig:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**_COMMON, "tie_word_embeddings": True, **changes})
    return save(folder, LlamaForCausalLM(config))


def gemma3_text(folder: Path) -> TargetConfig:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(**_COMMON, sliding_window=8, query_pre_attn_scalar=16)
    return save(folder, Gemma3ForCausalLM(config))


def gpt_oss(folder: Path) -> TargetConfig:
    from transformers import GptOssConfig, GptOssForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    return save(folder, GptOssForCausalLM(GptOssConfig(**_COMMON, **experts)))


FAMILIES: dict[str, Callable[[Path], TargetConfig]] = {
    "qwen3_5_text": qwen3_5_text,
    "qwen3_5_wrapper": qwen3_5_wrapper,
    "qwen3_5_moe": qwen3_5_moe,
    "qwen3": qwen3,
    "llama": llama,
    "gemma3_text": gemma3_text,
    "gpt_oss": gpt_oss,
}
