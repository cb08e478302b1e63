"""The single-turn function-calling questions of the installed package bfcl-eval; an evaluation set.

Questions that need the package's simulated services (several turns, memory, web search) declare no
functions and are left to the rejects.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dflash_core.config import SourceConfig
from dflash_core.corpus.readers import packages
from dflash_core.corpus.rows import Conversation, Reject

# The package's type names (Python, Java and JavaScript words) in JSON Schema.
SCHEMA_TYPES = {
    **dict.fromkeys(("dict", "HashMap", "Hashtable"), "object"),
    **dict.fromkeys(("list", "tuple", "ArrayList", "Array", "Queue", "Stack"), "array"),
    **dict.fromkeys(("float", "double"), "number"),
    **dict.fromkeys(("byte", "short", "long", "Bigint"), "integer"),
    **dict.fromkeys(("any", "Any", "char", "String"), "string"),
    **dict.fromkeys(("bool", "Boolean"), "boolean"),
}


def read(source: SourceConfig) -> Iterator[Conversation | Reject]:
    for file in _files():
        for line, task in packages.lines(file):
            turns, functions = task["question"], task.get("function")
            if len(turns) != 1 or not functions:
                yield Reject(
                    line, "question is not a single turn with functions", task["id"], file.name
                )
                continue
            metadata = {"group": task["id"], "evaluation_set": "bfcl"}
            yield Conversation(line, turns[0], _schema(functions), metadata, file.name)


def identity(source: SourceConfig) -> str:
    return packages.identity_of(_files())


def _files() -> list[Path]:
    folder = packages.data_folder("bfcl_eval", "--no-deps bfcl-eval")
    # format_sensitivity lists ids of other files.
    return sorted(set(folder.glob("BFCL_v*.json")) - set(folder.glob("*format_sensitivity.json")))


def _schema(value: Any) -> Any:
    if isinstance(value, list):
        return [_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    # A parameter may be called "type"; its value is then an object.
    return {
        key: SCHEMA_TYPES.get(item, item)
        if key == "type" and isinstance(item, str)
        else _schema(item)
        for key, item in value.items()
    }
