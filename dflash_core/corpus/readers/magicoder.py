"""Magicoder OSS-Instruct (ise-uiuc/Magicoder-OSS-Instruct-75K): columns `lang`, `seed`, `problem`, `solution` and others."""

from __future__ import annotations

from typing import Any

from dflash_core.corpus.readers import files

HUB_ID = "ise-uiuc/Magicoder-OSS-Instruct-75K"


def layout(record: dict) -> tuple[Any, Any, dict]:
    files.require_columns(record, "lang", "problem", "solution")
    problem, solution = files.text_of(record, "problem"), files.text_of(record, "solution")
    return files.exchange(problem, solution), None, {"lang": record["lang"]}
