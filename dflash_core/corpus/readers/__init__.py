"""Readers of conversations: one module for each layout, registered by name below.

A new reader is a new module with `read` and `identity`, and one line in READERS. Its docstring's first
line is what `dflash readers` prints.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast

from dflash_core.config import SourceConfig
from dflash_core.corpus.readers import (
    alpaca,
    bfcl,
    human_eval,
    openai,
    prompt_response,
    sharegpt,
    stdlib_chats,
)
from dflash_core.corpus.rows import Conversation, Reject
from dflash_core.errors import InputError


class Reader(Protocol):
    """What a module of this folder offers."""

    __doc__: str | None

    def read(self, source: SourceConfig) -> Iterator[Conversation | Reject]:
        """Every row of the source in a fixed order, readable or not, with its line.

        Raises:
            InputError: the source cannot be read.
        """
        ...

    def identity(self, source: SourceConfig) -> str:
        """A text that changes when what the source holds changes, wherever it lies.

        Raises:
            InputError: the source cannot be read.
        """
        ...


READERS = cast(
    "dict[str, Reader]",
    {
        "alpaca": alpaca,
        "bfcl": bfcl,
        "human-eval": human_eval,
        "openai": openai,
        "prompt-response": prompt_response,
        "python-stdlib": stdlib_chats,
        "sharegpt": sharegpt,
    },
)


def reader_of(source: SourceConfig) -> Reader:
    """The reader that the source names. Raises InputError for an unknown one."""
    if source.reader not in READERS:
        raise InputError(
            f"source {source.name!r}: reader {source.reader!r} is not known; "
            f"expected one of {', '.join(sorted(READERS))}"
        )
    return READERS[source.reader]
