"""Rows that contain the prompts of evaluation sets.

A prompt of at least eight words is contained when half of its runs of eight words stand in the
conversation; a shorter one when a user says exactly that. Words are compared without case and
punctuation, see `grams`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_core.config import SourceConfig
from dflash_core.corpus.grams import Words, batches
from dflash_core.corpus.readers import READERS, files
from dflash_core.corpus.rows import Conversation
from dflash_core.errors import InputError
from dflash_core.prompt_sets import SETS

RUN_WORDS = 8
SHARE = 0.5

KNOWN = sorted(set(SETS) - {"file"})
"""Sets that evaluations know by name; every other name is a place where prompts are."""

_PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "text", "query", "report")


def source_of(name: str) -> SourceConfig:
    """Where the prompts of a set are."""
    if name in KNOWN:
        return SETS[name].SOURCE
    return SourceConfig(name="decontaminate", reader="rows", path=name)


def label_of(name: str) -> str:
    """What a set is called in reports and fingerprints: a known name, or the last part of a path."""
    return name if name in KNOWN else name.rstrip("/").rpartition("/")[2]


def identity(name: str) -> str:
    """What the set holds, as for a source. Raises InputError when it cannot be read."""
    source = source_of(name)
    reader = READERS.get(source.reader)
    return reader.identity(source) if reader else files.identity(source)


def prompts(name: str, revision: str) -> Iterator[str]:
    """Every prompt of a set; a conversation is as many as its user turns.

    Raises:
        InputError: the set cannot be read, or has no prompts.
    """
    source = source_of(name).model_copy(update={"revision": revision})
    found = 0
    for prompt in _prompts(source):
        if prompt.strip():
            found += 1
            yield prompt.encode(errors="replace").decode()
    if not found:
        raise InputError(
            f"decontaminate {name!r}: no prompts found; expected a column "
            f"{', '.join(_PROMPT_COLUMNS)} or messages"
        )


def _prompts(source: SourceConfig) -> Iterator[str]:
    if reader := READERS.get(source.reader):
        for item in reader.read(source):
            if isinstance(item, Conversation):
                yield from _of_messages(item.messages)
        return
    for _, _, load in files.rows(source):
        record = load()
        if isinstance(record, dict):
            yield from _of_record(record)


def _of_record(record: dict) -> Iterator[str]:
    turns = record.get("messages") or record.get("conversations") or record.get("turns")
    if isinstance(turns, list):
        yield from _of_messages(turns)
        return
    for name in _PROMPT_COLUMNS:
        value = record.get(name)
        if isinstance(value, list):  # MT-Bench: the turns of one question
            yield from _of_messages(value)
            return
        if isinstance(value, str) and value:
            extra = record.get("input") if name == "instruction" else None
            yield f"{value}\n\n{extra}" if isinstance(extra, str) and extra else value
            return


def _of_messages(turns: list[Any]) -> Iterator[str]:
    for turn in turns:
        if isinstance(turn, str):
            yield turn
        elif isinstance(turn, dict) and (turn.get("role") or turn.get("from")) in ("user", "human"):
            yield str(turn.get("content") or turn.get("value") or "")


@dataclass(frozen=True)
class PromptIndex:
    """Runs of words of evaluation prompts, ready to be looked up.

    Attributes:
        names: set and number of each prompt, such as gsm8k[12].
        num_runs: different runs of each prompt, int64.
        runs: their hashes, sorted, uint64.
        prompt: whose run each is, int32.
        short: hash of the words of each short prompt, to its name.
    """

    names: list[str]
    num_runs: np.ndarray
    runs: np.ndarray
    prompt: np.ndarray
    short: dict[int, str]

    @classmethod
    def of(cls, sets: dict[str, list[str]]) -> PromptIndex:
        """The index of named sets of prompts."""
        names = [f"{name}[{i}]" for name, texts in sets.items() for i in range(len(texts))]
        runs, prompt, short = [], [], {}
        texts = [text for texts in sets.values() for text in texts]
        for first, words in batches(texts):
            runs_G, offsets = words.grams(RUN_WORDS)
            for index in range(len(offsets) - 1):
                found = np.unique(runs_G[offsets[index] : offsets[index + 1]])
                if words.offsets[index + 1] - words.offsets[index] < RUN_WORDS:
                    short.update((int(run), names[first + index]) for run in found)
                    continue
                runs.append(found)
                prompt.append(np.full(len(found), first + index, np.int32))
        all_runs = np.concatenate([np.zeros(0, np.uint64), *runs])
        whose = np.concatenate([np.zeros(0, np.int32), *prompt])
        order = np.argsort(all_runs, kind="stable")
        num_runs = np.bincount(whose, minlength=len(names))
        return cls(names, num_runs, all_runs[order], whose[order], short)

    def contained(self, words: Words) -> dict[int, str]:
        """Texts that contain a long prompt: the text's place, and the prompt's name."""
        runs_G, offsets = words.grams(RUN_WORDS)
        hit_G = np.isin(runs_G, self.runs)
        texts = np.unique(np.searchsorted(offsets, np.flatnonzero(hit_G), "right") - 1)
        found = {}
        for text in texts.tolist():
            inside = slice(offsets[text], offsets[text + 1])
            if name := self._prompt_of(np.unique(runs_G[inside][hit_G[inside]])):
                found[text] = name
        return found

    def equal(self, words: Words) -> dict[int, str]:
        """Texts that are a short prompt: the text's place, and the prompt's name."""
        runs_G, offsets = words.grams(RUN_WORDS)
        is_short = (np.diff(words.offsets) < RUN_WORDS) & (np.diff(words.offsets) > 0)
        runs = {text: int(runs_G[offsets[text]]) for text in np.flatnonzero(is_short).tolist()}
        return {text: self.short[run] for text, run in runs.items() if run in self.short}

    def _prompt_of(self, runs: np.ndarray) -> str | None:
        """The prompt of which these different runs are a large enough share."""
        first = np.searchsorted(self.runs, runs, "left").tolist()
        last = np.searchsorted(self.runs, runs, "right").tolist()
        inside = [self.prompt[a:b] for a, b in zip(first, last, strict=True)]
        counts = Counter(np.concatenate(inside).tolist())
        for prompt, count in sorted(counts.items()):
            if count >= SHARE * self.num_runs[prompt]:
                return self.names[prompt]
        return None
