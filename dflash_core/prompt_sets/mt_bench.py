"""MT-Bench: 80 conversations of two questions; the second is asked after the target's own answer."""

from __future__ import annotations

from dflash_core.config import SourceConfig
from dflash_core.prompt_sets.prompt import Prompt, asked

SOURCE = SourceConfig(
    name="mt-bench", reader="rows", path="HuggingFaceH4/mt_bench_prompts", split="train"
)


def prompt(record: dict) -> Prompt:
    first, *rest = record.get("prompt") or record["turns"]
    return asked(first, group=record.get("category") or "", follow_ups=list(rest))
