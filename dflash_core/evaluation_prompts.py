"""Which prompts an evaluation asks, as token ids: chosen once, written down, the same for every drafter.

A prompt is asked in every thinking mode and at every temperature that the request names; each of these is
an entry, and an entry is the unit of resume.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Iterator
from typing import NamedTuple

from dflash_core import prompt_sets
from dflash_core.answers import readings_of
from dflash_core.chat import Chat, Unrenderable
from dflash_core.config import EvaluateConfig, PromptSetConfig, TargetConfig
from dflash_core.corpus.rows import Message, Row, content_id, group_of, read_rows
from dflash_core.errors import InputError
from dflash_core.manifest import Dataset
from dflash_core.prompt_sets.prompt import Prompt

log = logging.getLogger(__name__)


class Candidate(NamedTuple):
    """A prompt that may be chosen."""

    id: str
    source: str
    group: str
    prompt: Prompt


def choose_prompts(corpus: Dataset, target: TargetConfig, config: EvaluateConfig) -> dict:
    """For each set the prompts with the lowest content hashes, in every mode.

    Passed over are conversations that the template cannot print and those whose prompt and answer would
    exceed the target's positions.

    Returns:
        `prompts`: entries with id, source, group, set, thinking, temperature, input_ids, and where the
        user goes on `messages`, `tools` and `follow_ups`. `stop_ids`: tokens that end an answer.

    Raises:
        InputError: a set has no prompt that fits, or both modes are asked of a template that has one.
    """
    from dflash_core.target import load_tokenizer, text_config

    tokenizer = load_tokenizer(target)
    options, modes = target.template_options, dict.fromkeys(config.thinking)
    chats = {thinking: Chat(tokenizer, thinking, options) for thinking in modes}
    chat = next(iter(chats.values()))
    if len(chats) > 1 and not chat.switchable:
        raise InputError(
            "the chat template of the target has no thinking switch, so both modes are one; give evaluate.thinking "
            "one value"
        )
    limit = text_config(target).max_position_embeddings - config.max_new_tokens
    entries = []
    for prompt_set in config.prompt_sets:
        fitting = _fitting(_candidates(prompt_set, corpus, config.num_prompts), chats, limit)
        chosen = list(itertools.islice(fitting, config.num_prompts))
        if not chosen:
            raise InputError(
                f"prompt set {prompt_set.label} has no prompt to ask with at most {limit} tokens; lower "
                "max_new_tokens, and for held-out prompts raise held_out_fraction of the curate stage"
            )
        entries += _entries(prompt_set.label, chosen, config)
    stop_ids = sorted({*chat.ends_of_turn, tokenizer.eos_token_id} - {None})
    return {"prompts": entries, "stop_ids": stop_ids}


def encode_prompt(chat: Chat, messages: list[dict], tools: list[dict] | None) -> list[int]:
    """Token ids of a conversation up to where the assistant begins to write."""
    return chat.encode(chat.render(messages, tools, prompt=True))


def answer_message(chat: Chat, prompt: list[int], tokens: list[int]) -> Message:
    """An answer as the message that a client would send back: reasoning, content and calls told apart.

    Args:
        prompt: token ids of what was answered; they say whether it ended inside a reasoning block.
        tokens: the answer, its end-of-turn token included where it has one.
    """
    ended = tokens[-1] in {*chat.ends_of_turn, chat.tokenizer.eos_token_id}
    text = chat.decode(tokens[:-1] if ended else tokens)
    return readings_of(text, opened=chat.decode(prompt).rstrip().endswith("<think>"))[0]


def _candidates(prompt_set: PromptSetConfig, corpus: Dataset, wanted: int) -> list[Candidate]:
    """The prompts of a set with the lowest ids: more than are wanted, since some may not fit."""
    own = prompt_set.set == prompt_sets.HELD_OUT
    found = _held_out(corpus) if own else _of_set(prompt_set)
    return heapq.nsmallest(4 * wanted + 64, found, key=lambda candidate: candidate.id)


def _held_out(corpus: Dataset) -> Iterator[Candidate]:
    for row in read_rows(corpus, "held_out"):
        prompt = _up_to_last_answer(row)
        if prompt.messages:
            yield Candidate(row.id, row.source, group_of(row), prompt)


def _up_to_last_answer(row: Row) -> Prompt:
    answers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    return Prompt(row.messages[: answers[-1]] if answers else row.messages, row.tools)


def _of_set(prompt_set: PromptSetConfig) -> Iterator[Candidate]:
    for prompt in prompt_sets.read_prompts(prompt_set):
        row_id = content_id(prompt.messages, prompt.tools)
        yield Candidate(row_id, prompt_set.label, prompt.group or row_id, prompt)


def _fitting(
    candidates: list[Candidate], chats: dict[bool, Chat], limit: int
) -> Iterator[tuple[Candidate, dict[bool, list[int]]]]:
    """Those that the target can be asked in every mode, with their token ids."""
    for candidate in candidates:
        try:
            ids = {
                thinking: encode_prompt(chat, candidate.prompt.messages, candidate.prompt.tools)
                for thinking, chat in chats.items()
            }
        except Unrenderable as error:
            log.warning("%s %s is passed over: %s", candidate.source, candidate.id, error)
            continue
        if all(0 < len(input_ids) <= limit for input_ids in ids.values()):
            yield candidate, ids


def _entries(label: str, chosen: list, config: EvaluateConfig) -> Iterator[dict]:
    for thinking in dict.fromkeys(config.thinking):
        for temperature in dict.fromkeys(config.temperatures):
            for candidate, ids in chosen:
                entry = {
                    "id": candidate.id,
                    "source": candidate.source,
                    "group": candidate.group,
                    "set": label,
                    "thinking": thinking,
                    "temperature": temperature,
                    "input_ids": ids[thinking],
                }
                if candidate.prompt.follow_ups:
                    entry |= {
                        "messages": candidate.prompt.messages,
                        "tools": candidate.prompt.tools,
                        "follow_ups": candidate.prompt.follow_ups,
                    }
                yield entry
