"""OpenOrca (Open-Orca/OpenOrca): columns `id`, `system_prompt`, `question`, `response`."""

from __future__ import annotations

from typing import Any

from dflash_core.corpus.readers import files

HUB_ID = "Open-Orca/OpenOrca"


def layout(record: dict) -> tuple[Any, Any, dict]:
    files.require_columns(record, "system_prompt", "question", "response")
    question, response = files.text_of(record, "question"), files.text_of(record, "response")
    return files.exchange(question, response, files.text_of(record, "system_prompt")), None, {}
