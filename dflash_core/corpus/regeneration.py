"""A corpus answered again by the target, turn by turn.

Users' turns, tool results and declarations stay as recorded; every assistant turn is the target's own,
and later turns see the earlier ones as the target wrote them. A conversation goes on only while what was
recorded still fits: it ends after a turn that was cut by length, and after one whose number of calls is
not the number of recorded results. Held-out rows are copied: evaluation decodes their prompts itself.
"""

from __future__ import annotations

import functools
import heapq
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from dflash_core.config import RegenerateConfig, Runtime, TargetConfig
from dflash_core.corpus.rows import (
    CORPORA,
    Message,
    PartWriter,
    Row,
    Split,
    content_id,
    group_of,
    num_characters,
    num_rows,
    read_ids,
    read_rows,
    write_part,
)
from dflash_core.errors import InputError
from dflash_core.manifest import Dataset
from dflash_core.progress import Progress, silent
from dflash_core.storage import Storage

log = logging.getLogger(__name__)

STAGE = CORPORA
VERSION = 1

HELD_OUT = "held-out"


@dataclass(frozen=True)
class Prompt:
    """What an assistant turn is asked for. `key` is unique in the corpus and seeds sampling."""

    key: str
    messages: list[Message]
    tools: list[dict] | None


@dataclass(frozen=True)
class Answer:
    """One assistant turn, or None and the reason why there is none.

    Attributes:
        message: the turn in the OpenAI form.
        num_tokens: tokens the target wrote, its end token included.
        cut: the answer reached the longest length and has no end.
        exact: the chat template prints the message as the target wrote it.
        num_characters: characters the target wrote, its end token not counted.
        reason, detail: why the prompt cannot be answered.
    """

    message: Message | None
    num_tokens: int = 0
    cut: bool = False
    exact: bool = True
    num_characters: int = 0
    reason: str = ""
    detail: str = ""


class Answerer(Protocol):
    """A served target."""

    def answer(self, prompts: list[Prompt]) -> list[Answer]:
        """One answer for each prompt, in their order. An answer depends on its own prompt alone."""
        ...


# --- the stage ---------------------------------------------------------------------------------


def plan(
    root: Storage, name: str, corpus: Dataset, target: TargetConfig, config: RegenerateConfig
) -> Dataset:
    """The regenerated corpus of this request, new or continued.

    Raises:
        InputError: the target or its chat template cannot be used, or there is nothing to answer.
        MismatchError, IncompleteError: `corpus` is not a complete corpus.
    """
    from dflash_core.chat import Chat
    from dflash_core.target import identify, load_tokenizer

    available = num_rows(corpus, "train")
    if not available:
        raise InputError(f"{corpus.path} has no training rows to answer; curate more sources")
    identity = identify(target, require_template=True)
    Chat(load_tokenizer(target), config.thinking)
    inputs = {
        "corpus": corpus.fingerprint,
        "rows": str(min(config.num_rows or available, available)),
        "target_dtype": target.dtype,
        **identity.contract(),
    }
    return Dataset.create(
        root, STAGE, f"{name}-regenerated", version=VERSION, config=config, inputs=inputs
    )


def units(dataset: Dataset) -> list[str]:
    """All units: parts of rows to answer, and the held-out rows."""
    rows_per_part = dataset.config["rows_per_part"]
    parts = -(-int(dataset.request["inputs"]["rows"]) // rows_per_part)
    return [*(f"part-{index:06d}" for index in range(parts)), HELD_OUT]


def missing(dataset: Dataset) -> list[str]:
    """Units without a commit record, in order."""
    done = dataset.committed()
    return [unit for unit in units(dataset) if unit not in done]


def run_units(
    dataset: Dataset,
    corpus: Dataset,
    target: TargetConfig,
    todo: list[str],
    runtime: Runtime,
    progress: Progress = silent,
) -> None:
    """Answers the units `todo` with the target in this process, and commits each.

    The target stays loaded for the next call; `seal` lets it go.
    """
    answerer = _local(target, RegenerateConfig(**dataset.config), runtime)
    answer_units(dataset, corpus, answerer, todo, progress)


def answer_units(
    dataset: Dataset,
    corpus: Dataset,
    answerer: Answerer,
    todo: list[str],
    progress: Progress = silent,
) -> None:
    """Answers the units `todo` with any answerer, and commits each."""
    config = RegenerateConfig(**dataset.config)
    positions = _positions(corpus, "train", config.num_rows)
    for done, unit in enumerate(todo):
        if unit == HELD_OUT:
            dataset.commit(unit, _copy_held_out(dataset, corpus, config.num_held_out))
        else:
            start = int(unit.removeprefix("part-")) * config.rows_per_part
            rows = _rows_at(corpus, "train", positions[start : start + config.rows_per_part])
            report = functools.partial(progress, done, len(todo))
            dataset.commit(unit, _answer_part(dataset, unit, rows, answerer, report))
        progress(done + 1, len(todo), {})


def seal(dataset: Dataset) -> dict:
    """Writes the manifest.

    Facts: `parts`, `num_train`, `num_held_out`, `answers`, `answer_tokens`, `cut_by_length`,
    `ended_early`, `inexact` (answers that the template prints otherwise than they were written),
    `rejected` (by reason), `thinking`.
    """
    _local.cache_clear()
    every = units(dataset)
    if missing(dataset):
        return dataset.seal(every, {})  # says what is missing
    records = dataset.records(every)
    counts: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    for unit in every[:-1]:
        counts.update(records[unit]["counts"])
        rejected.update(records[unit]["rejected"])
    train = [records[unit]["part"] for unit in every[:-1] if records[unit]["part"]]
    if not train:
        raise InputError(f"none of the rows could be answered: {dict(rejected)}")
    parts = {"train": train, "held_out": records[HELD_OUT]["parts"]}
    facts = {
        "parts": parts,
        "rejected": dict(rejected),
        "thinking": dataset.config["thinking"],
        **{f"num_{split}": sum(part["rows"] for part in parts[split]) for split in parts},
        **{name: counts[name] for name in COUNTS},
    }
    return dataset.seal(every, facts)


COUNTS = ("answers", "answer_tokens", "cut_by_length", "ended_early", "inexact")


@functools.lru_cache(maxsize=1)
def _local(target: TargetConfig, config: RegenerateConfig, runtime: Runtime) -> Answerer:
    from dflash_core.generation import LocalAnswerer

    return LocalAnswerer(target, config, runtime)


# --- which rows --------------------------------------------------------------------------------


def _positions(corpus: Dataset, split: Split, count: int) -> list[int]:
    """Places of the `count` rows with the lowest ids, ascending; of all rows when `count` is 0."""
    total = num_rows(corpus, split)
    if not count or count >= total:
        return list(range(total))
    ids = zip(read_ids(corpus, split), range(total), strict=True)
    return sorted(place for _, place in heapq.nsmallest(count, ids))


def _rows_at(corpus: Dataset, split: Split, positions: list[int]) -> list[Row]:
    wanted = set(positions)
    rows = read_rows(corpus, split, positions[0], positions[-1] + 1)
    return [row for place, row in enumerate(rows, positions[0]) if place in wanted]


def _copy_held_out(dataset: Dataset, corpus: Dataset, count: int) -> dict:
    writer = PartWriter(dataset.storage, "parts/held_out")
    positions = set(_positions(corpus, "held_out", count))
    for place, row in enumerate(read_rows(corpus, "held_out")):
        if place in positions:
            writer.write(row)
    return {"parts": writer.close()}


# --- one part ----------------------------------------------------------------------------------


@dataclass
class _Dialogue:
    """A recorded conversation on its way to being answered."""

    row: Row
    history: list[Message] = field(default_factory=list)
    place: int = 0  # next recorded message
    answers: int = 0
    cut: bool = False
    written: int = 0
    reason: str = ""
    detail: str = ""
    ended_early: bool = False

    def next_prompt(self) -> Prompt | None:
        """Moves to the next assistant turn; None when there is none, and nothing left to answer."""
        recorded = self.row.messages
        while self.place < len(recorded) and recorded[self.place]["role"] != "assistant":
            self.history.append(recorded[self.place])
            self.place += 1
        if self.place == len(recorded) and self.answers:
            return None
        return Prompt(f"{self.row.id}:{self.answers}", list(self.history), self.row.tools)

    def take(self, answer: Answer) -> bool:
        """Adds the answer. Returns whether the conversation can go on."""
        if answer.message is None:
            self.reason, self.detail = answer.reason, answer.detail
            self.ended_early = self.answers > 0
            return False
        message, results = dict(answer.message), self._results()
        if calls := message.get("tool_calls"):
            ids = [
                result.get("tool_call_id", f"call_{index}") for index, result in enumerate(results)
            ]
            ids += [f"call_{index}" for index in range(len(ids), len(calls))]
            message["tool_calls"] = [
                {"id": call_id, **call} for call_id, call in zip(ids, calls, strict=False)
            ]
        self.history.append(message)
        self.answers += 1
        self.place += 1
        self.cut, self.written = answer.cut, answer.num_characters if answer.exact else 0
        if self.place >= len(self.row.messages):
            return False
        self.ended_early = self.cut or len(calls or ()) != len(results)
        return not self.ended_early

    def _results(self) -> list[Message]:
        """The recorded tool results that follow the turn being answered."""
        results = []
        for message in self.row.messages[self.place + 1 :]:
            if message["role"] != "tool":
                break
            results.append(message)
        return results

    def answered(self) -> Row:
        """The row with the target's answers; what no answer followed is dropped."""
        last = max(i for i, message in enumerate(self.history) if message["role"] == "assistant")
        messages = self.history[: last + 1]
        metadata = {k: v for k, v in self.row.metadata.items() if k != "prompt_only"}
        metadata["group"] = group_of(self.row)
        if self.cut:
            metadata["cut_by_length"] = True
            if self.written:
                metadata["written_characters"] = self.written
        new_id = content_id(messages, self.row.tools)
        return Row(new_id, self.row.source, messages, self.row.tools, metadata)


def _answer_part(dataset: Dataset, unit: str, rows: list[Row], answerer: Answerer, report) -> dict:
    """Answers the rows turn by turn, all rows of the part together. Returns the commit record."""
    counts: Counter[str] = Counter()
    began = time.monotonic()
    dialogues = [_Dialogue(row) for row in sorted(rows, key=num_characters)]
    going = dialogues
    while going:
        asked = [(dialogue, prompt) for dialogue in going if (prompt := dialogue.next_prompt())]
        answers = answerer.answer([prompt for _, prompt in asked])
        going = []
        for (dialogue, _), answer in zip(asked, answers, strict=True):
            if dialogue.take(answer):
                going.append(dialogue)
            if answer.message is not None:
                counts.update(answers=1, answer_tokens=answer.num_tokens, inexact=not answer.exact)
        speed = counts["answer_tokens"] / (time.monotonic() - began)
        report({"tokens_per_s": round(speed, 1), "answers": counts["answers"]})
    answered = [dialogue.answered() for dialogue in dialogues if dialogue.answers]
    counts["cut_by_length"] = sum(dialogue.cut for dialogue in dialogues)
    counts["ended_early"] = sum(dialogue.ended_early for dialogue in dialogues)
    refused = [dialogue for dialogue in dialogues if not dialogue.answers]
    part = write_part(dataset.storage, "parts/train", answered) if answered else None
    return {
        "part": part,
        "counts": {name: int(count) for name, count in counts.items()},
        "rejected": dict(Counter(dialogue.reason for dialogue in refused)),
        "rejects": [{"id": dialogue.row.id, "detail": dialogue.detail} for dialogue in refused],
    }
