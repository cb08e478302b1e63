"""Qwen3.5 Tool Calling v2 (Mustafaege/qwen3.5-toolcalling-v2): column `messages` of role and content, calls and reasoning inside the text."""

from __future__ import annotations

from typing import Any

from dflash_core.corpus.readers import files, inline_calls
from dflash_core.corpus.rows import Malformed

HUB_ID = "Mustafaege/qwen3.5-toolcalling-v2"


def layout(record: dict) -> tuple[Any, Any, dict]:
    files.require_columns(record, "messages")
    messages = record["messages"]
    if not isinstance(messages, list):
        raise Malformed("messages are not a list", type(messages).__name__)
    tools = record.get("tools")
    found = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(content := message.get("content"), str):
            found.append(message)
        elif message.get("role") == "system" and not tools:
            content, tools = inline_calls.split_tools(content)
            found.append({**message, "content": content})
        elif message.get("role") in ("assistant", "gpt") and not message.get("tool_calls"):
            content, calls = inline_calls.split_calls(content)
            found.append({**message, "content": content, "tool_calls": calls})
        elif results := inline_calls.split_results(content):
            found += [{"role": "tool", "content": result} for result in results]
        else:
            found.append(message)
    return found, tools, files.metadata_of(record)
