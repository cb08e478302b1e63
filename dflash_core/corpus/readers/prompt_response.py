"""Plain rows: one column of `prompt`, `question`, `query` or `input`, one of `response`, `answer`, `completion` or `output`."""

from __future__ import annotations

from typing import Any

from dflash_core.corpus.readers import files
from dflash_core.corpus.rows import Malformed

PROMPTS = ("prompt", "question", "query", "input")
RESPONSES = ("response", "answer", "completion", "output")


def layout(record: dict) -> tuple[Any, Any, dict]:
    prompt = files.text_of(record, *PROMPTS)
    if prompt is None:
        raise Malformed("no prompt column", ", ".join(map(str, record)))
    system = files.text_of(record, "system")
    response = files.text_of(record, *RESPONSES)
    return files.exchange(prompt, response, system), None, files.metadata_of(record)
