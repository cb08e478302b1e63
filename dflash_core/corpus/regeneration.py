"""A corpus answered again by the target, turn by turn.

Users' turns, tool results and declarations stay as recorded; every assistant turn is the target's own,
and later turns see the earlier ones as the target wrote them. A conversation goes on only while what was
recorded still fits: it ends after a turn that was cut by length, and after one whose number of calls is
not the number of recorded results. Held-out rows are copied: evaluation decodes their prompts itself.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, Self

from dflash_core.answers import Answer, Prompt
from dflash_core.config import EndpointsConfig, RegenerateConfig, Runtime, TargetConfig
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
from dflash_core.manifest import Dataset, canonical_json, sha256
from dflash_core.progress import Progress, silent
from dflash_core.storage import Storage

log = logging.getLogger(__name__)

STAGE = CORPORA
VERSION = 1

HELD_OUT = "held-out"


class Answerer(Protocol):
    """A target that answers batches."""

    def answer(self, prompts: list[Prompt]) -> list[Answer]:
        """One answer for each prompt, in their order. An answer depends on its own prompt alone."""
        ...


class AsyncAnswerer(Protocol):
    """Servers of the target."""

    concurrency: int

    async def answer(self, prompt: Prompt) -> Answer: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    def describe(self) -> list[dict[str, str]]:
        """The models that answer and the engines that serve them."""
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
    chat = Chat(load_tokenizer(target), config.thinking, target.template_options)
    if config.thinking and config.thinking_share < 1 and not chat.switchable:
        raise InputError(
            f"thinking_share is {config.thinking_share}, but the chat template of {target.id!r} has no thinking "
            "switch; set it to 1"
        )
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


def run_served(
    dataset: Dataset,
    corpus: Dataset,
    target: TargetConfig,
    endpoints: EndpointsConfig,
    todo: list[str],
    progress: Progress = silent,
) -> None:
    """Answers the units `todo` with servers of the target, and commits each.

    Raises:
        InputError, UnreachableError: a server cannot be used, or none answers any more.
    """
    from dflash_core.served import ServedAnswerer

    answerer = ServedAnswerer(target, RegenerateConfig(**dataset.config), endpoints)
    serve_units(dataset, corpus, answerer, todo, progress)


def answer_units(
    dataset: Dataset,
    corpus: Dataset,
    answerer: Answerer,
    todo: list[str],
    progress: Progress = silent,
) -> None:
    """Answers the units `todo` one after the other, all rows of a unit together, and commits each."""
    work = _Work(dataset, corpus)
    for done, unit in enumerate(todo):
        if not work.copied(unit):
            report = functools.partial(progress, done, len(todo))
            dialogues, counts = work.dialogues(unit), Counter()
            began = time.monotonic()
            going = dialogues
            while going:
                asked = [(it, prompt) for it in going if (prompt := it.next_prompt())]
                answers = answerer.answer([prompt for _, prompt in asked])
                going = [
                    it
                    for (it, _), answer in zip(asked, answers, strict=True)
                    if it.take(answer, counts)
                ]
                speed = counts["answer_tokens"] / (time.monotonic() - began)
                report({"tokens_per_s": round(speed, 1), "answers": counts["answers"]})
            work.commit(unit, dialogues, counts)
        progress(done + 1, len(todo), {})


def serve_units(
    dataset: Dataset,
    corpus: Dataset,
    answerer: AsyncAnswerer,
    todo: list[str],
    progress: Progress = silent,
) -> None:
    """Answers the units `todo` side by side, each conversation at its own pace, and commits each when it is done.

    Rows of the next units begin when those of the last leave room, so servers stay busy and memory is bounded
    by what is going on. `progress` counts rows.
    """
    try:
        asyncio.run(_serve_units(dataset, corpus, answerer, todo, progress))
    except ExceptionGroup as group:  # all tasks end with the first error
        raise _first(group) from None


async def _serve_units(
    dataset: Dataset, corpus: Dataset, answerer: AsyncAnswerer, todo: list[str], progress: Progress
) -> None:
    work, room = _Work(dataset, corpus), asyncio.Semaphore(answerer.concurrency)
    meter = _Meter(progress, work.num_rows(todo))

    async def converse(dialogue: _Dialogue, counts: Counter[str]) -> None:
        try:
            while prompt := dialogue.next_prompt():
                answer = await answerer.answer(prompt)
                meter.add(answer.num_tokens)
                if not dialogue.take(answer, counts):
                    break
        finally:
            room.release()
        await meter.row()

    async def finish(unit: str, dialogues: list, counts: Counter[str], rows: list) -> None:
        await asyncio.gather(*rows)
        answered_by = answerer.describe()
        await asyncio.to_thread(work.commit, unit, dialogues, counts, answered_by)

    async with answerer, asyncio.TaskGroup() as tasks:
        for unit in todo:
            if await asyncio.to_thread(work.copied, unit):
                continue
            dialogues = await asyncio.to_thread(work.dialogues, unit)
            counts: Counter[str] = Counter()
            rows = []
            for dialogue in dialogues:
                await room.acquire()
                rows.append(tasks.create_task(converse(dialogue, counts)))
            tasks.create_task(finish(unit, dialogues, counts, rows))


def _first(group: ExceptionGroup) -> Exception:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error


class _Meter:
    """Rows done and tokens a second, reported after each row."""

    def __init__(self, progress: Progress, num_rows: int) -> None:
        self._progress, self._num_rows, self._began = progress, num_rows, time.monotonic()
        self._rows = self._answers = self._tokens = 0

    def add(self, num_tokens: int) -> None:
        self._answers += 1
        self._tokens += num_tokens

    async def row(self) -> None:
        self._rows += 1
        seconds = time.monotonic() - self._began
        numbers = {"tokens_per_s": self._tokens / seconds, "answers": self._answers}
        # In a thread: drawing it may wait for another server, and no answer should.
        await asyncio.to_thread(self._progress, self._rows, self._num_rows, numbers)


def seal(dataset: Dataset) -> dict:
    """Writes the manifest.

    Facts: `parts`, `num_train`, `num_held_out`, `answers`, `answer_tokens`, `thinking_rows`,
    `cut_by_length`, `ended_early`, `inexact` (answers that the template prints otherwise than they were
    written), `prompts_differ` (prompts that a server printed otherwise than the target's template),
    `rejected` (by reason), `thinking`, `answered_by` (models and engines, where servers answered).
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
        "answered_by": _each_once(records[unit].get("answered_by", ()) for unit in every[:-1]),
        **{f"num_{split}": sum(part["rows"] for part in parts[split]) for split in parts},
        **{name: counts[name] for name in COUNTS},
    }
    return dataset.seal(every, facts)


def _each_once(lists: Iterable[Iterable[dict]]) -> list[dict]:
    found = {canonical_json(item): item for items in lists for item in items}
    return [found[text] for text in sorted(found)]


COUNTS = (
    "answers",
    "answer_tokens",
    "thinking_rows",
    "cut_by_length",
    "ended_early",
    "inexact",
    "prompts_differ",
)


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


def thinks(row_id: str, config: RegenerateConfig) -> bool:
    """Whether a row is answered with thinking on; which ones are, only seed and share decide."""
    share = int(sha256(f"thinking:{config.seed}:{row_id}")[:8], 16) / 2**32
    return config.thinking and share < config.thinking_share


class _Work:
    """The units of a dataset: their rows, and how they are committed."""

    def __init__(self, dataset: Dataset, corpus: Dataset) -> None:
        self._dataset, self._corpus = dataset, corpus
        self._config = RegenerateConfig(**dataset.config)
        self._positions = _positions(corpus, "train", self._config.num_rows)

    def num_rows(self, todo: list[str]) -> int:
        return sum(len(self._places(unit)) for unit in todo if unit != HELD_OUT)

    def copied(self, unit: str) -> bool:
        """Commits the unit of held-out rows; False for every other one."""
        if unit != HELD_OUT:
            return False
        record = _copy_held_out(self._dataset, self._corpus, self._config.num_held_out)
        self._dataset.commit(unit, record)
        return True

    def dialogues(self, unit: str) -> list[_Dialogue]:
        """The rows of a unit, short ones first."""
        rows = sorted(_rows_at(self._corpus, "train", self._places(unit)), key=num_characters)
        return [_Dialogue(row, thinks(row.id, self._config)) for row in rows]

    def _places(self, unit: str) -> list[int]:
        start = int(unit.removeprefix("part-")) * self._config.rows_per_part
        return self._positions[start : start + self._config.rows_per_part]

    def commit(
        self,
        unit: str,
        dialogues: list[_Dialogue],
        counts: Counter[str],
        answered_by: list[dict[str, str]] | None = None,
    ) -> None:
        """Writes the answered rows and commits the unit."""
        mixed = self._config.thinking and self._config.thinking_share < 1
        answered = [it for it in dialogues if it.answers]
        refused = [it for it in dialogues if not it.answers and not it.came_tokenized]
        counts["thinking_rows"] = sum(it.thinking for it in answered)
        counts["cut_by_length"] = sum(it.cut for it in dialogues)
        counts["ended_early"] = sum(it.ended_early for it in dialogues)
        rows = [it.answered(mixed) for it in answered]
        rows += [it.row for it in dialogues if it.came_tokenized]
        record = {
            "part": write_part(self._dataset.storage, "parts/train", rows) if rows else None,
            "counts": {name: int(count) for name, count in counts.items()},
            "rejected": dict(Counter(it.reason for it in refused)),
            "rejects": [{"id": it.row.id, "detail": it.detail} for it in refused],
            "answered_by": answered_by or [],
        }
        self._dataset.commit(unit, record)


@dataclass
class _Dialogue:
    """A recorded conversation on its way to being answered."""

    row: Row
    thinking: bool
    history: list[Message] = field(default_factory=list)
    place: int = 0  # next recorded message
    answers: int = 0
    cut: bool = False
    written: int = 0
    reason: str = ""
    detail: str = ""
    ended_early: bool = False

    @property
    def came_tokenized(self) -> bool:
        """Such a row has no messages to answer and is kept as it is."""
        return "tokens" in self.row.metadata

    def next_prompt(self) -> Prompt | None:
        """Moves to the next assistant turn; None when there is none, and nothing left to answer."""
        if self.came_tokenized:
            return None
        recorded = self.row.messages
        while self.place < len(recorded) and recorded[self.place]["role"] != "assistant":
            self.history.append(recorded[self.place])
            self.place += 1
        if self.place == len(recorded) and self.answers:
            return None
        key = f"{self.row.id}:{self.answers}"
        return Prompt(key, list(self.history), self.row.tools, self.thinking)

    def take(self, answer: Answer, counts: Counter[str]) -> bool:
        """Adds the answer. Returns whether the conversation can go on."""
        if answer.message is None:
            self.reason, self.detail = answer.reason, answer.detail
            self.ended_early = self.answers > 0
            return False
        counts.update(answers=1, answer_tokens=answer.num_tokens, inexact=not answer.exact)
        counts["prompts_differ"] += answer.prompt_differs
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
        self.cut, self.written = answer.cut, answer.num_characters
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

    def answered(self, mixed: bool) -> Row:
        """The row with the target's answers; what no answer followed is dropped.

        With `mixed` the row names its thinking mode, because not all rows of the corpus have the same.
        """
        last = max(i for i, message in enumerate(self.history) if message["role"] == "assistant")
        messages = self.history[: last + 1]
        stale = ("prompt_only", "asked_to_think", "cut_by_length", "written_characters")
        metadata = {k: v for k, v in self.row.metadata.items() if k not in stale}
        metadata["group"] = group_of(self.row)
        if mixed:
            metadata["asked_to_think"] = self.thinking
        if self.cut:
            metadata["cut_by_length"] = True
            if self.written:
                metadata["written_characters"] = self.written
        new_id = content_id(messages, self.row.tools)
        return Row(new_id, self.row.source, messages, self.row.tools, metadata)
