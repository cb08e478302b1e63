"""Alpaca: 52,002 short instructions of every kind."""

from __future__ import annotations

from dflash_core.config import SourceConfig
from dflash_core.prompt_sets.prompt import Prompt, asked

SOURCE = SourceConfig(name="alpaca", reader="rows", path="tatsu-lab/alpaca", split="train")


def prompt(record: dict) -> Prompt:
    parts = (record["instruction"], record.get("input"))
    return asked("\n\n".join(part for part in parts if part))
