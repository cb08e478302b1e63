"""MBPP, sanitized test: 257 short Python tasks."""

from __future__ import annotations

from dflash_core.config import SourceConfig
from dflash_core.prompt_sets.prompt import Prompt, asked

SOURCE = SourceConfig(
    name="mbpp",
    reader="rows",
    path="google-research-datasets/mbpp",
    subset="sanitized",
    split="test",
)


def prompt(record: dict) -> Prompt:
    return asked(record.get("prompt") or record["text"])
