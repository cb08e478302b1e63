"""One form for conversations of every layout, or the reason why there is none.

The policy, in full:

- Roles: developer is system; human is user; gpt, model and bot are assistant; function is tool.
- Content is text, null, or a list of text parts (joined). Other parts reject the row.
- System messages come first; several in a row are joined, equal ones once.
- Two user messages in a row are joined with an empty line.
- Calls: `function_call` and bare {name, arguments} become `tool_calls`; all parallel calls are kept;
  arguments become JSON text in one spelling, in the order in which they were written.
- Reasoning: `reasoning_content` (or `reasoning`) is kept; `<think>...</think>` at the beginning of an
  assistant's content is moved there.
- A conversation ends at the first message that has no place in this form: an unknown role, an empty user
  or assistant message, a call that cannot be read, two assistant messages in a row (joined, they would be
  a text that no model wrote in one turn), a late system message, a tool result after no assistant. The
  complete exchanges before it are kept. Where there is none, as in a conversation that the assistant
  begins, the row is rejected.
- Turns after the last assistant turn are dropped. A conversation without any is a prompt, to be answered
  by regeneration.

Rejects are counted by their reason, and so are repairs: see `normalize`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
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


def normalize(
    messages: Any, tools: Any, repairs: Counter[str] | None = None
) -> tuple[list[Message], list[dict] | None]:
    """Messages and tools in the OpenAI chat form, by the policy of this module.

    Takes any JSON value; JSON text of one too, as Parquet columns often hold. What had to be joined, cut
    or moved is added to `repairs`, each kind once for the row.

    Raises:
        Malformed: the conversation cannot be brought into that form.
    """
    messages = _loaded(messages, "messages")
    if not isinstance(messages, list):
        raise Malformed("messages are not a list", type(messages).__name__)
    found: set[str] = set()
    turns = _in_order(messages, found)
    declared = _tools(tools)
    try:
        json.dumps([turns, declared], allow_nan=False, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Malformed("text is not Unicode", "half of a surrogate pair") from error
    except (ValueError, TypeError, RecursionError) as error:
        raise Malformed("value has no JSON form", error) from error
    if repairs is not None:
        repairs.update(found)
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


def _message(message: Any, repairs: set[str]) -> Message:
    if not isinstance(message, dict):
        raise Malformed("message is not an object", type(message).__name__)
    role = message.get("role")
    role = ROLES.get(role) if isinstance(role, str) else None
    if role is None:
        raise Malformed("unknown role", repr(message.get("role"))[:80])
    content = _text(message.get("content"))
    if role == "assistant":
        return _assistant(message, content, repairs)
    if role == "user" and not (content or "").strip():
        raise Malformed("empty user message")
    found: Message = {"role": role, "content": content or ""}
    if role == "tool":
        for key in ("tool_call_id", "name"):
            if isinstance(message.get(key), str):
                found[key] = message[key]
    return found


def _assistant(message: dict, content: str | None, repairs: set[str]) -> Message:
    reasoning = _text(message.get("reasoning_content") or message.get("reasoning"))
    if content and not reasoning:
        reasoning, content = split_reasoning(content)
        if reasoning:
            repairs.add("reasoning moved out of the content")
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


def _in_order(messages: list[Any], repairs: set[str]) -> list[Message]:
    """The turns up to the last answer, or up to the first message that has no place."""
    turns: list[Message] = []
    answered = 0  # turns up to the last answer, it included
    for message in messages:
        try:
            turn = _message(message, repairs)
            _require_place(turn, turns)
        except Malformed as error:
            if not answered:
                raise
            repairs.add(f"cut: {error.reason}")
            break
        if turn["role"] in ("system", "user") and turns and turns[-1]["role"] == turn["role"]:
            repairs.add(f"two {turn['role']} messages in a row joined")
            turns[-1] = _joined(turns[-1], turn)
            continue
        turns.append(turn)
        if turn["role"] == "assistant":
            answered = len(turns)
    else:
        if answered and len(turns) > answered:
            repairs.add("turns after the last answer dropped")
    turns = turns[:answered] if answered else turns
    if turns and turns[0]["role"] == "system" and not turns[0]["content"].strip():
        turns = turns[1:]
    if not turns or turns[-1]["role"] == "system":
        raise Malformed("no user message")
    return turns


def _require_place(turn: Message, turns: list[Message]) -> None:
    """Raises Malformed when the turn cannot follow the last one."""
    role, before = turn["role"], turns[-1]["role"] if turns else None
    if role == "system" and before not in (None, "system"):
        raise Malformed("system message after the first turn")
    if role == "assistant" and before == "assistant":
        raise Malformed("two assistant messages in a row")
    if role == "assistant" and before not in ("user", "tool"):
        raise Malformed("assistant first")
    if role == "tool" and before not in ("assistant", "tool"):
        raise Malformed("tool message without an assistant turn before it")


def _joined(first: Message, second: Message) -> Message:
    if first["role"] == "system" and first["content"] == second["content"]:
        return first
    return {"role": first["role"], "content": f"{first['content']}\n\n{second['content']}"}


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
