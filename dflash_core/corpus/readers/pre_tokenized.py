"""Pre-tokenized rows: column `input_ids` of the target's tokenizer and `loss_mask`, or `labels` with -100 where nothing is learned."""

from __future__ import annotations

from typing import Any

from dflash_core.corpus.readers import files
from dflash_core.corpus.rows import Malformed


def layout(record: dict) -> tuple[Any, Any, dict]:
    files.require_columns(record, "input_ids")
    input_ids, loss_mask = _integers(record, "input_ids"), _loss_mask(record)
    if min(input_ids, default=-1) < 0:
        raise Malformed("input_ids are empty or negative", min(input_ids, default=""))
    if len(loss_mask) != len(input_ids):
        raise Malformed("loss_mask has another length", f"{len(loss_mask)} and {len(input_ids)}")
    tokens = {"input_ids": input_ids, "loss_mask": loss_mask}
    return None, None, {**files.metadata_of(record), "tokens": tokens}


def _loss_mask(record: dict) -> list[int]:
    if record.get("loss_mask") is None and record.get("labels") is not None:
        return [int(label != -100) for label in _integers(record, "labels")]
    files.require_columns(record, "loss_mask")
    return [int(flag != 0) for flag in _integers(record, "loss_mask")]


def _integers(record: dict, column: str) -> list[int]:
    value = record[column]
    if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
        raise Malformed(f"{column} are not integers", str(value)[:80])
    return value
