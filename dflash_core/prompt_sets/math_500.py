"""MATH-500: 500 competition problems."""

from __future__ import annotations

from dflash_core.config import SourceConfig
from dflash_core.prompt_sets.prompt import BOXED, Prompt, asked

SOURCE = SourceConfig(name="math-500", reader="rows", path="HuggingFaceH4/MATH-500", split="test")


def prompt(record: dict) -> Prompt:
    return asked(f"{record['problem']}\n{BOXED}", group=record.get("subject") or "")
