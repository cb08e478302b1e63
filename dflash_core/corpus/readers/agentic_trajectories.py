"""Agentic-Coding-Trajectories (thoughtworks/agentic-coding-trajectories): columns `session_id`, `source_dataset`, `messages_json` and others."""

from __future__ import annotations

import json
from typing import Any

from dflash_core.corpus.readers import files
from dflash_core.corpus.rows import Malformed

HUB_ID = "thoughtworks/agentic-coding-trajectories"


def layout(record: dict) -> tuple[Any, Any, dict]:
    files.require_columns(record, "session_id", "source_dataset", "messages_json")
    messages = _json(record, "messages_json")
    if not isinstance(messages, list):
        raise Malformed("messages are not a list", type(messages).__name__)
    metadata = {"session": record["session_id"], "framework": record.get("agent_framework")}
    about = _json(record, "ground_truth_meta_json") if "ground_truth_meta_json" in record else None
    if isinstance(about, dict) and isinstance(about.get("instance_id"), str):
        metadata["group"] = about["instance_id"]  # all attempts at a task are held out together
    return [_message(message) for message in messages], None, metadata


def _message(message: Any) -> Any:
    """Calls are JSON text of their own, in `tool_calls_json`."""
    if not isinstance(message, dict) or "tool_calls_json" not in message:
        return message
    return {**message, "tool_calls": message["tool_calls_json"]}


def _json(record: dict, column: str) -> Any:
    text = files.text_of(record, column)
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{column} is not JSON", (text or "")[:80]) from error
