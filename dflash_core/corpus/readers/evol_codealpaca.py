"""Evol-CodeAlpaca (theblackcat102/evol-codealpaca-v1): columns `instruction`, `output`."""

from __future__ import annotations

from typing import Any

from dflash_core.corpus.readers import files

HUB_ID = "theblackcat102/evol-codealpaca-v1"


def layout(record: dict) -> tuple[Any, Any, dict]:
    files.require_columns(record, "instruction", "output")
    prompt, answer = files.text_of(record, "instruction"), files.text_of(record, "output")
    return files.exchange(prompt, answer), None, {}
