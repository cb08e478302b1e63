"""Your own: rows with `messages` (or `conversations`), or with a prompt in a column of that name."""

from __future__ import annotations

from dflash_core.config import SourceConfig
from dflash_core.corpus.rows import Malformed
from dflash_core.prompt_sets.prompt import Prompt, asked

SOURCE = SourceConfig(name="file", reader="rows")
_COLUMNS = ("prompt", "question", "instruction", "problem", "text")


def prompt(record: dict) -> Prompt:
    group = record.get("group") or record.get("category") or ""
    turns = record.get("messages") or record.get("conversations")
    if turns:
        return Prompt(turns, record.get("tools"), group)
    for column in _COLUMNS:
        text = record.get(column)
        if isinstance(text, list) and text:
            return asked(text[0], group=group, follow_ups=text[1:])
        if text:
            return asked(text, group=group)
    raise Malformed("no prompt", f"expected messages or one of {', '.join(_COLUMNS)}")
