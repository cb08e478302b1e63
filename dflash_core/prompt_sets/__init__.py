"""Prompt sets of evaluations: one module for each, registered by name below.

A new set is a new module and one line in SETS. The module says where its rows are (SOURCE) and how one of
them is asked (`prompt`); a SOURCE that names a reader of conversations needs no `prompt`. Its docstring's
first line is what `dflash prompt-sets` prints.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from dflash_core.config import PromptSetConfig, SourceConfig
from dflash_core.corpus.normalization import normalize
from dflash_core.corpus.readers import READERS, files
from dflash_core.corpus.rows import Conversation, Malformed, Reject
from dflash_core.errors import InputError
from dflash_core.prompt_sets import (
    alpaca,
    file,
    gsm8k,
    human_eval,
    long_context,
    math_500,
    mbpp,
    mt_bench,
    tool_calling,
)
from dflash_core.prompt_sets.prompt import Prompt

log = logging.getLogger(__name__)

HELD_OUT = "held-out"  # the corpus' own, chosen by the evaluation


class PromptSet(Protocol):
    """What a module of this folder offers."""

    __doc__: str | None
    SOURCE: SourceConfig


SETS = cast(
    "dict[str, PromptSet]",
    {
        "alpaca": alpaca,
        "file": file,
        "gsm8k": gsm8k,
        "human-eval": human_eval,
        "long-context": long_context,
        "math-500": math_500,
        "mbpp": mbpp,
        "mt-bench": mt_bench,
        "tool-calling": tool_calling,
    },
)


def source_of(config: PromptSetConfig) -> SourceConfig:
    """Where the rows of a set are. Raises InputError for an unknown set, or one that needs a path."""
    if config.set not in SETS:
        raise InputError(
            f"prompt set {config.set!r} is not known; expected {HELD_OUT} or one of {', '.join(SETS)}"
        )
    own = SETS[config.set].SOURCE
    source = own.model_copy(
        update={
            "name": config.label,
            "path": config.path or own.path,
            # Another place has other subsets.
            "subset": config.subset or ("" if config.path else own.subset),
            "split": config.split or own.split,
            "revision": config.revision,
        }
    )
    if not source.path and source.reader not in READERS:
        raise InputError(
            f"prompt set {config.set!r} needs a path: a file, a folder, an s3:// URL or a Hugging Face id"
        )
    return source


def identity(config: PromptSetConfig) -> str:
    """A text that changes when the set does. Raises InputError when it cannot be read."""
    source = source_of(config)
    reader = READERS.get(source.reader)
    return reader.identity(source) if reader else files.identity(source)


def read_prompts(config: PromptSetConfig) -> Iterator[Prompt]:
    """Every prompt of the set in its order; rows that hold none are passed over and counted in the log.

    Raises:
        InputError: the set cannot be read.
    """
    source = source_of(config)
    reader = READERS.get(source.reader)
    skipped, example = 0, ""
    for row in reader.read(source) if reader else files.rows(source):
        try:
            yield _normalised(_prompt(config.set, row))
        except (Malformed, KeyError, TypeError, ValueError, AttributeError) as error:
            skipped, example = skipped + 1, example or f"{type(error).__name__}: {error}"
    if skipped:
        log.warning("prompt set %s: %d rows hold no prompt (%s)", config.label, skipped, example)


def _prompt(name: str, row: Any) -> Prompt:
    """The prompt in what a reader of conversations, or of plain rows, gives."""
    if isinstance(row, Conversation):
        return Prompt(row.messages, row.tools)
    if isinstance(row, Reject):
        raise Malformed(row.reason, row.detail)
    record = row[2]()
    if isinstance(record, Malformed):
        raise record
    if not isinstance(record, dict):
        raise Malformed("row is not an object", type(record).__name__)
    return vars(SETS[name])["prompt"](record)


def _normalised(prompt: Prompt) -> Prompt:
    """The same in the one form that templates are given; answers at the end are left out."""
    turns = list(prompt.messages)
    while turns and turns[-1].get("role", turns[-1].get("from")) in ("assistant", "gpt"):
        turns.pop()
    # What follows the last answer is dropped from a conversation; a stand-in keeps the question.
    messages, tools = normalize([*turns, {"role": "assistant", "content": "-"}], prompt.tools)
    return replace(prompt, messages=messages[:-1], tools=tools)


def require_names(prompt_sets: Sequence[PromptSetConfig]) -> None:
    """Raises InputError when two sets would be reported under one name."""
    labels = [prompt_set.label for prompt_set in prompt_sets]
    if repeated := sorted({label for label in labels if labels.count(label) > 1}):
        raise InputError(
            f"several prompt sets are called {', '.join(repeated)}, so they would be reported as one; give each a "
            "name"
        )
