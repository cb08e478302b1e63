"""GSM8K, test: 1,319 grade-school word problems."""

from __future__ import annotations

from dflash_core.config import SourceConfig
from dflash_core.prompt_sets.prompt import BOXED, Prompt, asked

SOURCE = SourceConfig(name="gsm8k", reader="rows", path="openai/gsm8k", subset="main", split="test")


def prompt(record: dict) -> Prompt:
    return asked(f"{record['question']}\n{BOXED}")
