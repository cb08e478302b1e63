"""One form for conversations of every layout, or the reason why there is none.

The policy, in full:

- Roles: developer is system; human is user; gpt, model and bot are assistant; function is tool.
- Content is text, null, or a list of text parts (joined). Other parts reject the row.
- System messages come first; several in a row are joined, equal ones once; a later one rejects the row.
- Two user messages in a row are joined with an empty line. Two assistant messages in a row reject the
  row: joined, they would be a text no model wrote in one turn.
- An assistant message that comes first, a tool message with no assistant turn before it, an empty user or
  assistant message, an unknown role: the row is rejected.
- Calls: `function_call` and bare {name, arguments} become `tool_calls`; all parallel calls are kept;
  arguments become JSON text in one spelling, in the order in which they were written.
- Reasoning: `reasoning_content` (or `reasoning`) is kept; `<think>...</think>` at the beginning of an
  assistant's content is moved there.
- Turns after the last assistant turn are dropped. A conversation without any is a prompt, to be answered
  by regeneration.
"""

from __future__ import annotations

import json
import re
from typing import Any

from dflash_core.corpus.rows import Malformed, Message

ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function": "tool",
}
_THINK = re.compile(r"\s*<think>(.*?)</think>(.*)", re.DOTALL)


def normalize(messages: Any, tools: Any) -> tuple[list[Message], list[dict] | None]:
    """Messages and tools in the OpenAI chat form, by the policy of this module.

    Takes any JSON value; JSON text of one too, as Parquet columns often hold.

    Raises:
        Malformed: the conversation cannot be brought into that form.
    """
    messages = _loaded(messages, "messages")
    if not isinstance(messages, list):
        raise Malformed("messages are not a list", type(messages).__name__)
    turns = _in_order([_message(message) for message in messages])
    declared = _tools(tools)
    try:
        json.dumps([turns, declared], allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Malformed("text is not Unicode", "half of a surrogate pair") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise Malformed("value has no JSON form", error) from error
    return turns, declared


def is_prompt_only(messages: list[Message]) -> bool:
    """Whether a normalized conversation still has to be answered."""
    return messages[-1]["role"] != "assistant"


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str | None, str]:
    """Parts an assistant's text into (reasoning or None, content).

    Args:
        text: what the assistant wrote.
        opened: the prompt ended inside the reasoning, so the text begins without `<think>`.
    """
    match = _THINK.fullmatch(f"<think>{text}" if opened else text)
    if match is None:
        return None, text
    reasoning, content = match.group(1).strip("\n"), match.group(2).lstrip("\n")
    return (reasoning if reasoning.strip() else None), content


def tool_call(call: Any) -> dict:
    """One call in the OpenAI form; arguments are JSON text of an object. Raises Malformed."""
    if not isinstance(call, dict):
        raise Malformed("tool call is not an object", type(call).__name__)
    function = call.get("function") if isinstance(call.get("function"), dict) else call
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise Malformed("tool call has no name", repr(name)[:80])
    arguments = function.get("arguments", function.get("parameters"))
    arguments = {} if arguments in (None, "") else _loaded(arguments, "arguments")
    if not isinstance(arguments, dict):
        raise Malformed("arguments are not an object", f"{name}: {type(arguments).__name__}")
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise Malformed("value has no JSON form", error) from error
    found = {"type": "function", "function": {"name": name, "arguments": text}}
    return {"id": call["id"], **found} if isinstance(call.get("id"), str) else found


# --- messages ----------------------------------------------------------------------------------


def _message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise Malformed("message is not an object", type(message).__name__)
    role = message.get("role")
    role = ROLES.get(role) if isinstance(role, str) else None
    if role is None:
        raise Malformed("unknown role", repr(message.get("role"))[:80])
    content = _text(message.get("content"))
    if role == "assistant":
        return _assistant(message, content)
    if role == "user" and not (content or "").strip():
        raise Malformed("empty user message")
    found: Message = {"role": role, "content": content or ""}
    if role == "tool":
        for key in ("tool_call_id", "name"):
            if isinstance(message.get(key), str):
                found[key] = message[key]
    return found


def _assistant(message: dict, content: str | None) -> Message:
    reasoning = _text(message.get("reasoning_content") or message.get("reasoning"))
    if content and not reasoning:
        reasoning, content = split_reasoning(content)
    calls = _loaded(message.get("tool_calls"), "tool_calls") or []
    if not isinstance(calls, list):
        raise Malformed("tool_calls are not a list", type(calls).__name__)
    if message.get("function_call"):
        calls = [*calls, message["function_call"]]
    found: Message = {"role": "assistant", "content": content if content or not calls else None}
    if reasoning:
        found["reasoning_content"] = reasoning
    if calls:
        found["tool_calls"] = [tool_call(call) for call in calls]
    elif not (content or "").strip():
        raise Malformed("empty assistant message")
    return found


def _text(content: Any) -> str | None:
    """Text of a content field: a string, null, or a list of text parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Malformed("content is not text", type(content).__name__)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise Malformed("content part is not text", repr(kind)[:80])
        texts.append(text)
    return "".join(texts)


def _in_order(messages: list[Message]) -> list[Message]:
    """Joins and checks the sequence of roles, and drops what comes after the last answer."""
    turns: list[Message] = []
    for message in messages:
        role, before = message["role"], turns[-1]["role"] if turns else None
        if role == "system" and before not in (None, "system"):
            raise Malformed("system message after the first turn")
        if role == "assistant" and before not in ("user", "tool"):
            first = (
                "two assistant messages in a row" if before == "assistant" else "assistant first"
            )
            raise Malformed(first)
        if role == "tool" and before not in ("assistant", "tool"):
            raise Malformed("tool message without an assistant turn before it")
        if role == before and role in ("system", "user"):
            if message["content"] != turns[-1]["content"] or role == "user":
                joined = f"{turns[-1]['content']}\n\n{message['content']}"
                turns[-1] = {"role": role, "content": joined}
            continue
        turns.append(message)
    if turns and turns[0]["role"] == "system" and not turns[0]["content"].strip():
        turns = turns[1:]
    if not turns or turns[-1]["role"] == "system":
        raise Malformed("no user message")
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    return turns[: answers[-1] + 1] if answers else turns


# --- tools -------------------------------------------------------------------------------------


def _tools(tools: Any) -> list[dict] | None:
    tools = _loaded(tools, "tools")
    if not tools:
        return None
    if not isinstance(tools, list):
        raise Malformed("tools are not a list", type(tools).__name__)
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict:
    if not isinstance(tool, dict):
        raise Malformed("tool is not an object", type(tool).__name__)
    function = tool["function"] if isinstance(tool.get("function"), dict) else tool
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise Malformed("tool has no name", repr(function.get("name"))[:80])
    return {"type": "function", "function": function}


def _loaded(value: Any, what: str) -> Any:
    """The value of JSON text; other values as they are."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{what} are not JSON", value[:80]) from error
