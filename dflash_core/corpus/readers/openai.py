"""OpenAI chat rows: column `messages` (or `conversations`) of role and content, and `tools`."""

from __future__ import annotations

from typing import Any

from dflash_core.corpus.readers import files
from dflash_core.corpus.rows import Malformed


def layout(record: dict) -> tuple[Any, Any, dict]:
    messages = record.get("messages")
    if messages is None:
        messages = record.get("conversations")
    if messages is None:
        raise Malformed("no messages column", ", ".join(map(str, record)))
    return messages, record.get("tools") or record.get("functions"), files.metadata_of(record)
