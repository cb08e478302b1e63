"""Long context: 973 government reports to summarise, about 10,000 tokens each."""

from __future__ import annotations

from dflash_core.config import SourceConfig
from dflash_core.prompt_sets.prompt import Prompt, asked

SOURCE = SourceConfig(
    name="long-context", reader="rows", path="ccdv/govreport-summarization", split="test"
)


def prompt(record: dict) -> Prompt:
    return asked(f"Summarise this report in one page.\n\n{record['report']}")
