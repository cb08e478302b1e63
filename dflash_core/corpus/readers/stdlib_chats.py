"""Chats about the source code of Python's own standard library; needs no download."""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Iterator

from dflash_core.config import SourceConfig
from dflash_core.corpus.readers import python_stdlib
from dflash_core.corpus.rows import Conversation, Reject


def read(source: SourceConfig) -> Iterator[Conversation | Reject]:
    for line, chat in enumerate(python_stdlib.read(), 1):
        yield Conversation(line, chat["messages"], chat["tools"], chat["metadata"])


def identity(source: SourceConfig) -> str:
    """The Python version and a hash of the library's modules, which distributions patch."""
    return f"python-{platform.python_version()}:{_hash_of_modules()}"


@functools.cache  # about 3 s, and asked for more than once before a run
def _hash_of_modules() -> str:
    digest = hashlib.sha256()
    for name, text in python_stdlib.module_sources():
        digest.update(f"{name}:{hashlib.sha256(text.encode()).hexdigest()}\n".encode())
    return digest.hexdigest()
