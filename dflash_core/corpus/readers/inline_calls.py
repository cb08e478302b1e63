"""Tools, calls and results that stand inside the text of messages, in the tags that Hermes and Qwen models use."""

from __future__ import annotations

import json
import re
from typing import Any

from dflash_core.corpus.rows import Malformed

_TOOLS = re.compile(r"<tools>(.*?)</tools>", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_RESULT = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)


def split_calls(text: str) -> tuple[str | None, list[dict]]:
    """The text before the first `<tool_call>`, and the calls: JSON, or `<function=...>` with parameters.

    Raises:
        Malformed: a call cannot be read, or text follows one.
    """
    calls = [_call(block) for block in _CALL.findall(text)]
    if not calls:
        return text, []
    before, _, behind = text.partition("<tool_call>")
    if rest := _CALL.sub("", f"<tool_call>{behind}").strip():
        raise Malformed("text behind a tool call", rest[:80])
    return before.rstrip() or None, calls


def split_results(text: str) -> list[str]:
    """The texts of `<tool_response>` blocks of a message that holds nothing else; else none."""
    results = _RESULT.findall(text)
    return [result.strip("\n") for result in results] if not _RESULT.sub("", text).strip() else []


def split_tools(text: str) -> tuple[str, list[Any] | None]:
    """A system message without what explains its `<tools>` block, and the tools of that block.

    The explanation reaches from the paragraph before the block to the end: templates write their own.
    """
    # The explanation may name the tags before it uses them.
    match = next((match for match in _TOOLS.finditer(text) if match.group(1).strip()), None)
    if match is None:
        return text, None
    tools = json_values(match.group(1))
    tools = tools[0] if len(tools) == 1 and isinstance(tools[0], list) else tools
    before = text[: match.start()].rstrip()
    kept, _, _ = before.rpartition("\n\n")
    return kept.split("# Tools")[0].strip(), tools


def json_values(text: str) -> list[Any]:
    """JSON values that stand one after another. Raises Malformed."""
    decoder, place, found = json.JSONDecoder(strict=False), 0, []
    text = text.strip()
    while place < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise Malformed("JSON cannot be read", text[place : place + 80]) from error
        found.append(value)
        while place < len(text) and text[place].isspace():
            place += 1
    return found


def _call(block: str) -> dict:
    if match := _FUNCTION.fullmatch(block):
        parameters = _PARAMETER.findall(match.group(2))
        return {
            "name": match.group(1),
            "arguments": {key: _parameter(value) for key, value in parameters},
        }
    try:
        call = json.loads(block)
    except (ValueError, RecursionError) as error:
        raise Malformed("tool call is not JSON", block.strip()[:80]) from error
    return call


def _parameter(text: str) -> Any:
    """The value of a parameter: templates print text as it is and everything else as JSON."""
    text = text.removeprefix("\n").removesuffix("\n")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) else value
