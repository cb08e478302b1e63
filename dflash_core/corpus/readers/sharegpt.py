"""ShareGPT rows: column `conversations` of from and value, with tool calls and observations."""

from __future__ import annotations

import json
from typing import Any

from dflash_core.corpus.readers import files
from dflash_core.corpus.rows import Malformed

ROLES = {"bard": "assistant", "bing": "assistant", "chatgpt": "assistant", "observation": "tool"}
"""Speakers of this layout beside those that every layout knows (human, gpt, model, function)."""


def layout(record: dict) -> tuple[Any, Any, dict]:
    turns = record.get("conversations") or record.get("conversation") or record.get("items")
    if not isinstance(turns, list):
        raise Malformed("no conversations column", ", ".join(map(str, record)))
    messages = [_message(turn) for turn in turns]
    if isinstance(system := record.get("system"), str) and system.strip():
        messages.insert(0, {"role": "system", "content": system})
    return messages, record.get("tools"), files.metadata_of(record)


def _message(turn: Any) -> dict:
    if not isinstance(turn, dict):
        raise Malformed("message is not an object", type(turn).__name__)
    speaker, value = turn.get("from"), turn.get("value")
    if speaker == "function_call":
        return {"role": "assistant", "content": None, "tool_calls": _calls(value)}
    if not isinstance(speaker, str):
        raise Malformed("unknown role", repr(speaker)[:80])
    return {"role": ROLES.get(speaker, speaker), "content": value}


def _calls(value: Any) -> Any:
    """One call or a list of parallel ones, as JSON or as text of it."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise Malformed("tool call is not JSON", str(value)[:80]) from error
    return calls if isinstance(calls, list) else [calls]
