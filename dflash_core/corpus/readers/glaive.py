"""Glaive Function Calling v2 (glaiveai/glaive-function-calling-v2): text columns `system` and `chat`."""

from __future__ import annotations

import json
import re
from typing import Any

from dflash_core.corpus.readers import files, inline_calls
from dflash_core.corpus.rows import Malformed

HUB_ID = "glaiveai/glaive-function-calling-v2"

ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_TURN = re.compile(rf"(?:\A|\n\n)\s*({'|'.join(ROLES)}):")
_CALL = re.compile(
    r"\s*\{\s*\"name\":\s*\"([^\"]+)\"\s*(?:,\s*\"arguments\":\s*(.*?)\s*)?\}\s*", re.DOTALL
)
_ANNOUNCEMENT = re.compile(r"[^.\n]*access to the following functions\.[^\n]*")


def layout(record: dict) -> tuple[Any, Any, dict]:
    files.require_columns(record, "system", "chat")
    system, tools = _system(files.text_of(record, "system") or "")
    chat = files.text_of(record, "chat") or ""
    start, *turns = _TURN.split(chat)
    if start.strip() or not turns:
        raise Malformed("chat does not begin with USER:", chat[:80])
    messages = [{"role": "system", "content": system}] if system else []
    for speaker, text in zip(turns[::2], turns[1::2], strict=True):
        text = text.replace("<|endoftext|>", "").strip()
        messages.append(_assistant(text) if speaker == "ASSISTANT" else _turn(speaker, text))
    return messages, tools, {}


def _turn(speaker: str, text: str) -> dict:
    return {"role": ROLES[speaker], "content": text}


def _assistant(text: str) -> dict:
    """The text before `<functioncall>` and the calls behind it."""
    content, *calls = text.split("<functioncall>")
    message: dict = _turn("ASSISTANT", content.strip())
    if calls:
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _call(text: str) -> dict:
    """{"name": ..., "arguments": '...'}: JSON but for the arguments, which are JSON in single quotes."""
    match = _CALL.fullmatch(text)
    if match is None:
        raise Malformed("function call is not readable", text[:80])
    name, arguments = match.group(1), match.group(2) or "{}"
    if arguments[0] == arguments[-1] == "'":
        arguments = arguments[1:-1]
    for spelling in (arguments, arguments.replace("\\'", "'")):
        try:
            value = json.loads(spelling, strict=False)  # line breaks stand unescaped in some
        except (ValueError, RecursionError):
            continue
        return {"name": name, "arguments": value}
    raise Malformed("function call is not readable", text[:80])


def _system(text: str) -> tuple[str, list[dict] | None]:
    """The system message and the functions that stand in it as JSON objects one after another.

    Where there are some, the sentence that announces them goes: templates announce tools themselves.
    """
    text = text.strip().removeprefix("SYSTEM:").strip()
    start = text.find("{")
    if start < 0:
        return text, None
    tools = inline_calls.json_values(text[start:])
    return _ANNOUNCEMENT.sub("", text[:start]).strip(), tools
