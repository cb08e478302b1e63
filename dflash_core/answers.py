"""An assistant's turn as a target wrote it, read as a message that the chat template prints back.

Every reading is checked: the message is kept in parts (reasoning, content, calls) only where the template
prints exactly the text that was written; otherwise the text stays content, as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from dflash_core.chat import Chat, Unrenderable
from dflash_core.corpus.normalization import split_reasoning, tool_call
from dflash_core.corpus.rows import Malformed, Message

# gpt-oss: reasoning, unless there is none, then the answer, unless the text was cut before it.
_CHANNELS = re.compile(
    r"(?=<\|channel\|>)(?:<\|channel\|>analysis<\|message\|>(.*?)(?:<\|end\|><\|start\|>assistant|\Z))?"
    r"(?:<\|channel\|>final<\|message\|>(.*))?",
    re.DOTALL,
)
_CALL = re.compile(r"\s*<tool_call>\s*(.*?)\s*</tool_call>\s*", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]+)>\n(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>\n", re.DOTALL)


@dataclass(frozen=True)
class Prompt:
    """What an assistant turn is asked for.

    `conversation` is the same for all turns of a row, `key` is unique in the corpus and seeds sampling.
    """

    key: str
    messages: list[Message]
    tools: list[dict] | None
    thinking: bool = False

    @property
    def conversation(self) -> str:
        return self.key.partition(":")[0]


@dataclass(frozen=True)
class Answer:
    """One assistant turn, or None and the reason why there is none.

    Attributes:
        message: the turn in the OpenAI form.
        num_tokens: tokens the target wrote, its end token included.
        cut: the answer reached the longest length and has no end.
        exact: the chat template prints the message as the target wrote it.
        num_characters: characters the target wrote, its end token not counted; 0 where that is not known.
        prompt_differs: the server's prompt had another number of tokens than the target's template gives.
        reason, detail: why the prompt cannot be answered.
    """

    message: Message | None
    num_tokens: int = 0
    cut: bool = False
    exact: bool = True
    num_characters: int = 0
    prompt_differs: bool = False
    reason: str = ""
    detail: str = ""


def read_answer(
    chat: Chat, prompt: Prompt, prompt_text: str, tokens: list[int], stop_ids: Collection[int]
) -> Answer:
    """The tokens a target wrote as a message that the template prints as they were written, where there is one."""
    cut = not tokens or tokens[-1] not in stop_ids
    text = chat.decode(tokens if cut else tokens[:-1])
    message, exact = read_text(chat, prompt, prompt_text, text, cut=cut)
    return Answer(message, len(tokens), cut, exact, len(text) if exact else 0)


def read_text(
    chat: Chat, prompt: Prompt, prompt_text: str, text: str, *, cut: bool
) -> tuple[Message, bool]:
    """The text after a prompt as a message, and whether the template prints that message as the text.

    Args:
        chat: the target's template, in the prompt's thinking mode.
        prompt: what was asked.
        prompt_text: the prompt as the template prints it.
        text: what the target wrote, without its end token.
        cut: the text reached the longest length; the template prints an end that was not written.
    """
    readings = readings_of(text, opened=prompt_text.rstrip().endswith("<think>"))
    for message in readings:
        try:
            shown = chat.render([*prompt.messages, message], prompt.tools, prompt=False)
        except Unrenderable:
            continue
        if shown.startswith(prompt_text + text):
            rest = shown[len(prompt_text) + len(text) :]
            if cut or rest in chat.after_turn:
                return message, True
    return readings[0], False


def readings_of(text: str, *, opened: bool) -> list[Message]:
    """Messages an assistant's text may stand for, the most structured first, the text as it is last.

    Args:
        text: what the target wrote, without its end token.
        opened: the prompt ended inside a reasoning block.
    """
    if match := _CHANNELS.fullmatch(text):
        reasoning, content = match.group(1), match.group(2) or ""
    else:
        reasoning, content = split_reasoning(text, opened=opened)
    if reasoning is None and opened and "</think>" not in text:
        reasoning, content = text, ""
    found = []
    for thought, rest in ((reasoning, content), (None, text)):
        base: Message = {"role": "assistant", "content": rest}
        if thought:
            base["reasoning_content"] = thought
        if calls := _calls(rest):
            before = rest[: rest.index("<tool_call>")]
            for kept in (before.rstrip("\n"), before):
                found.append({**base, "content": kept or None, "tool_calls": calls})
        found.append(base)
    return found


def _calls(text: str) -> list[dict]:
    """The calls a text ends with, when all of them parse; else none."""
    start = text.find("<tool_call>")
    blocks = text[start:] if start >= 0 else ""
    if not blocks or _CALL.sub("", blocks):
        return []
    try:
        return [tool_call(_call(block)) for block in _CALL.findall(blocks)]
    except (ValueError, RecursionError, Malformed):
        return []


def _call(block: str) -> dict:
    """One call: a JSON object (Hermes, Qwen3), or Qwen3.5's function and parameter tags."""
    if not (function := _FUNCTION.fullmatch(block)):
        return json.loads(block)
    name, body = function.groups()
    if _PARAMETER.sub("", body):
        raise ValueError(f"text beside the parameters: {body!r}")
    return {"name": name, "arguments": dict(_parameters(body))}


def _parameters(body: str) -> Iterator[tuple[str, object]]:
    """Names and values; templates print strings as they are and other values as JSON."""
    for name, value in _PARAMETER.findall(body):
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            parsed = value
        yield name, value if isinstance(parsed, str) else parsed
