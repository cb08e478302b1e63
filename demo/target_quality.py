"""What the demo target writes: greedy answers to prompts of held-out modules, and how many are well formed."""

import json
import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM

from dflash_core.corpus.readers.python_stdlib import Chat, Message, parses

_FENCE = re.compile(r"```python\n(.*?)```", re.DOTALL)
_TOOL_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)

REPETITIVE_BELOW = 0.5
"""Share of distinct 4-grams of tokens under which an answer counts as repetitive."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One greedy answer."""

    chat: Chat
    """The chat whose first request was asked."""
    text: str
    num_tokens: int
    """Tokens written, the end-of-turn token included."""
    ended: bool
    """Whether it closed its turn within the limit."""
    distinct: float
    """Distinct 4-grams over all 4-grams of its tokens; 1 for an answer shorter than four tokens."""


def request_of(chat: Chat) -> list[Message]:
    """The messages before the first assistant turn."""
    roles = [message["role"] for message in chat["messages"]]
    return chat["messages"][: roles.index("assistant")]


@torch.inference_mode()
def answer_all(
    model: Qwen3_5ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    chats: list[Chat],
    max_new_tokens: int,
    batch_size: int = 512,
) -> list[Answer]:
    """Greedy answers to the first request of each chat, thinking off; left padding, so states are exact."""
    answers = []
    for first in range(0, len(chats), batch_size):
        batch = chats[first : first + batch_size]
        prompts = [
            tokenizer.apply_chat_template(
                request_of(chat),
                tools=chat["tools"],
                add_generation_prompt=True,
                enable_thinking=False,
                tokenize=False,
            )
            for chat in batch
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        inputs = inputs.to(model.device)
        output = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        for chat, ids in zip(
            batch, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True
        ):
            answers.append(_answer(tokenizer, chat, ids))
    return answers


def _answer(tokenizer: PreTrainedTokenizerFast, chat: Chat, ids: list[int]) -> Answer:
    ended = tokenizer.eos_token_id in ids
    if ended:
        ids = ids[: ids.index(tokenizer.eos_token_id) + 1]
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    distinct = len(set(grams)) / len(grams) if grams else 1.0
    text = str(tokenizer.decode(ids[:-1] if ended else ids))
    return Answer(chat, text, len(ids), ended, distinct)


def code_parses(answer: Answer) -> bool:
    """Whether the answer holds a closed Python fence whose code parses."""
    fence = _FENCE.search(answer.text)
    return fence is not None and bool(fence[1].strip()) and parses(fence[1])


def tool_call_of(answer: Answer) -> dict[str, Any] | None:
    """The answer's tool call when it is well formed: JSON, an offered tool, exactly its parameters."""
    found = _TOOL_CALL.search(answer.text)
    try:
        call = json.loads(found[1]) if found else None
    except json.JSONDecodeError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
        return None
    offered = {tool["function"]["name"]: tool["function"] for tool in answer.chat["tools"] or []}
    function = offered.get(call.get("name"))
    if function is None or set(call["arguments"]) != set(function["parameters"]["required"]):
        return None
    return call


def call_is_expected(answer: Answer) -> bool:
    """Whether the tool call equals the one in the chat, arguments included."""
    expected = next(m for m in answer.chat["messages"] if m.get("tool_calls"))["tool_calls"][0]
    return tool_call_of(answer) == {
        "name": expected["function"]["name"],
        "arguments": json.loads(expected["function"]["arguments"]),
    }


def measure(answers: list[Answer]) -> dict[str, dict[str, float]]:
    """Shares by kind of chat; "prompts" is the number asked."""
    kinds = sorted({answer.chat["metadata"]["kind"] for answer in answers})
    return {
        kind: _measure_kind(kind, [a for a in answers if a.chat["metadata"]["kind"] == kind])
        for kind in kinds
    }


def _measure_kind(kind: str, answers: list[Answer]) -> dict[str, float]:
    def share(flags: list[bool]) -> float:
        return round(sum(flags) / len(flags), 4)

    measures: dict[str, float] = {
        "prompts": len(answers),
        "ended": share([answer.ended for answer in answers]),
        "repetitive": share([answer.distinct < REPETITIVE_BELOW for answer in answers]),
        "mean_tokens": round(sum(answer.num_tokens for answer in answers) / len(answers), 1),
        "distinct_answers": share_distinct(answers),
    }
    if kind == "tool":
        measures["well_formed_call"] = share([tool_call_of(a) is not None for a in answers])
        measures["expected_call"] = share([call_is_expected(a) for a in answers])
    elif kind in ("code", "complete"):
        measures["parses"] = share([code_parses(answer) for answer in answers])
    return measures


def share_distinct(answers: list[Answer]) -> float:
    """Different texts over all texts."""
    return round(len({answer.text for answer in answers}) / len(answers), 4)


def samples_text(answers: list[Answer], count: int) -> str:
    """The first `count` answers with their requests, to be read by a person."""
    blocks = []
    for answer in answers[:count]:
        about = answer.chat["metadata"]
        request = request_of(answer.chat)[-1]["content"]
        head = (
            f"===== {about['kind']}: {about['group']}.{about['name']} ({answer.num_tokens} tokens)"
        )
        ending = "" if answer.ended else "\n[cut at the limit]"
        blocks.append(f"{head}\n{request}\n----- answer\n{answer.text}{ending}\n")
    return "\n".join(blocks)
