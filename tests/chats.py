"""A small byte-level BPE tokenizer with chat templates, and targets that have it but no weights."""

from __future__ import annotations

import functools
from pathlib import Path

from dflash_core.config import TargetConfig

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

_TOOLS = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
)
_CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)

STABLE = (
    _TOOLS + "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}" + _CALLS + "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Prints every message the same, whatever follows it. Has no thinking switch."""

REWRITING = (
    _TOOLS
    + "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{% if m.role == 'user' %}"
    + "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    + "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    + "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}"
    + "{{ m.content or '' }}"
    + _CALLS
    + "<|im_end|>\n{% endfor %}"
    + "{% if add_generation_prompt %}<|im_start|>assistant\n"
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Like Qwen3's: earlier reasoning is dropped, and only the last answer carries a (perhaps empty) think block."""

GLUED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Its generation prompt ends with a space, which tokenizers merge with the answer's first word."""

_TEXT = (
    """the quick brown fox jumps over the lazy dog and the assistant answers the user
def add(a, b):\n    return a + b\n\nsystem user assistant tool\n\n\n  the end of the turn, the name and the arguments
"""
    * 3
)


@functools.cache
def _trained():
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    words = Regex(r"\p{N}| ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    raw.train_from_iterator([_TEXT], trainer)
    raw.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    raw.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return raw.to_str()


def tokenizer(
    template: str | None = STABLE, markers: tuple[str, ...] = (), eos: str = "<|im_end|>"
):
    """The tokenizer with a chat template and the special tokens it needs beside those above."""
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    made.add_tokens([AddedToken(marker, special=True) for marker in markers])
    made.eos_token = eos
    made.chat_template = template
    return made


def target(folder: Path, template: str | None = STABLE) -> TargetConfig:
    """A target without weights, which is all that tokenizing needs."""
    from transformers import Qwen3Config

    Qwen3Config(vocab_size=448, hidden_size=32, num_hidden_layers=2).save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return TargetConfig(id=str(folder), dtype="float32")


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str | None, **more) -> dict:
    return {"role": "assistant", "content": content, **more}
