"""Plain rows: one column of `prompt`, `question`, `query` or `input`, one of `response`, `answer`, `completion` or `output`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dflash_core.config import SourceConfig
from dflash_core.corpus.readers import files
from dflash_core.corpus.readers.files import identity
from dflash_core.corpus.rows import Conversation, Malformed, Reject

__all__ = ["identity", "read"]

PROMPTS = ("prompt", "question", "query", "input")
RESPONSES = ("response", "answer", "completion", "output")


def read(source: SourceConfig) -> Iterator[Conversation | Reject]:
    return files.read(source, layout)


def layout(record: dict) -> tuple[Any, Any, dict]:
    prompt = files.text_of(record, *PROMPTS)
    if prompt is None:
        raise Malformed("no prompt column", ", ".join(map(str, record)))
    system = files.text_of(record, "system")
    response = files.text_of(record, *RESPONSES)
    return files.exchange(prompt, response, system), None, files.metadata_of(record)
