"""Alpaca rows: columns `instruction`, `input` (may be empty), `output` and perhaps `system`."""

from __future__ import annotations

from typing import Any

from dflash_core.corpus.readers import files
from dflash_core.corpus.rows import Malformed


def layout(record: dict) -> tuple[Any, Any, dict]:
    instruction = files.text_of(record, "instruction")
    if instruction is None:
        raise Malformed("no instruction column", ", ".join(map(str, record)))
    extra = files.text_of(record, "input")
    prompt = f"{instruction}\n\n{extra}" if extra else instruction
    system = files.text_of(record, "system")
    return (
        files.exchange(prompt, files.text_of(record, "output"), system),
        None,
        files.metadata_of(record),
    )
