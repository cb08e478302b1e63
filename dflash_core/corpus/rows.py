"""Conversations: as a reader gives them, and as rows of a corpus in Parquet.

A corpus is a dataset whose manifest lists its parts: facts["parts"][split] is a list of
{"key", "rows", "sha256"}, in order. `read_rows` needs nothing else, so curated and regenerated corpora
read the same.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from dflash_core.errors import CorruptError
from dflash_core.manifest import Dataset, canonical_json, sha256
from dflash_core.storage import Storage

CORPORA = "corpora"
Split = Literal["train", "held_out"]
Message = dict[str, Any]

# A part is closed at whichever comes first: rows for quick seeks, characters for bounded memory.
PART_ROWS = 8192
PART_CHARACTERS = 64 * 2**20
REJECTS_PER_FILE = 50_000


class Malformed(Exception):
    """A conversation that cannot be read; it ends in the rejects file.

    `reason` is one of a few fixed phrases that are counted; `detail` names the offending value.
    """

    def __init__(self, reason: str, detail: object = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail != "" else reason)
        self.reason = reason
        self.detail = str(detail)[:200]


@dataclass(frozen=True)
class Conversation:
    """One conversation as it stands in a source; roles and calls are not normalized yet.

    `line` is the 1-based line, array item or row number in `file`.
    """

    line: int
    messages: Any
    tools: Any = None
    metadata: dict = field(default_factory=dict)
    file: str = ""


@dataclass(frozen=True)
class Reject:
    """A row that is no conversation, and why."""

    line: int
    reason: str
    detail: str = ""
    file: str = ""


@dataclass(frozen=True)
class Row:
    """One conversation of a corpus.

    Attributes:
        id: `content_id` of messages and tools.
        source: name of the source.
        messages: OpenAI chat form; arguments of tool calls are JSON text.
        tools: function declarations in the OpenAI form, or None.
        metadata: JSON values; `group` keeps conversations on one side of the hold-out, `prompt_only`
            marks a conversation without answers, `cut_by_length` one whose last answer has no end.
    """

    id: str
    source: str
    messages: list[Message]
    tools: list[dict] | None
    metadata: dict


def content_id(messages: list[Message], tools: list[dict] | None) -> str:
    """SHA-256 (hex) of the canonical JSON of a conversation; equal for equal content."""
    return sha256(canonical_json({"messages": messages, "tools": tools}))


def is_held_out(group: str, fraction: float) -> bool:
    """Whether a group lies in the held-out share.

    The first 32 bits of its SHA-256 as a number in [0, 1) are compared with `fraction`: what is held out
    at one fraction is held out at every larger one, whatever else the corpus contains.
    """
    return int(sha256(group)[:8], 16) / 2**32 < fraction


def group_of(row: Row) -> str:
    """What a row is held out with: `metadata["group"]`, or the row alone."""
    group = row.metadata.get("group")
    return row.id if group in (None, "") else str(group)


def num_characters(row: Row) -> int:
    """Characters of everything the model reads or writes, tools and arguments included."""
    tools = len(json.dumps(row.tools)) if row.tools else 0
    return tools + sum(map(_characters_of, row.messages))


def num_answer_characters(row: Row) -> int:
    """Characters that the assistant wrote, reasoning and arguments included."""
    return sum(_characters_of(turn) for turn in row.messages if turn["role"] == "assistant")


def _characters_of(message: Message) -> int:
    texts = [message.get("content") or "", message.get("reasoning_content") or ""]
    texts += [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    return sum(map(len, texts))


# --- Parquet -----------------------------------------------------------------------------------


def to_parquet(rows: Iterable[Row]) -> bytes:
    """Rows as one Parquet file: id, source, and messages, tools and metadata as JSON text.

    JSON text, because Arrow would unify the structs: every message would gain every other's fields.
    """
    import pyarrow as pa

    rows = list(rows)
    columns = {
        "id": [row.id for row in rows],
        "source": [row.source for row in rows],
        "messages": [_json(row.messages) for row in rows],
        "tools": [None if row.tools is None else _json(row.tools) for row in rows],
        "metadata": [_json(row.metadata) for row in rows],
    }
    schema = pa.schema([(name, pa.string()) for name in columns])
    return table_to_parquet(pa.table(columns, schema=schema))


def table_to_parquet(table: Any) -> bytes:
    """An Arrow table as one Parquet file."""
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue()


def from_parquet(data: bytes) -> Iterator[Row]:
    """The rows of `to_parquet`."""
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(io.BytesIO(data)).iter_batches(batch_size=1024):
        for record in batch.to_pylist():
            yield Row(
                id=record["id"],
                source=record["source"],
                messages=json.loads(record["messages"]),
                tools=None if record["tools"] is None else json.loads(record["tools"]),
                metadata=json.loads(record["metadata"]),
            )


def _json(value: Any) -> str:
    # Key order is kept: templates print arguments in the order in which the model wrote them.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


# --- rejects -----------------------------------------------------------------------------------


class RejectWriter:
    """Rejected rows as JSON lines {file, line, reason, detail}."""

    def __init__(self, storage: Storage, stem: str) -> None:
        self.reasons: Counter[str] = Counter()
        self._storage, self._stem = storage, stem
        self._lines: list[str] = []
        self._keys: list[str] = []

    def write(self, reject: Reject) -> None:
        self.reasons[reject.reason] += 1
        self._lines.append(json.dumps(vars(reject)) + "\n")
        if len(self._lines) >= REJECTS_PER_FILE:
            self._flush()

    def close(self) -> list[str]:
        """Keys of the files; empty when nothing was rejected."""
        if self._lines:
            self._flush()
        return self._keys

    def _flush(self) -> None:
        data = "".join(self._lines).encode()
        self._keys.append(self._storage.put_fresh(self._stem, ".jsonl", data))
        self._lines = []


# --- parts -------------------------------------------------------------------------------------


class PartWriter:
    """Writes rows as Parquet parts under fresh keys; `close` returns the list for the record."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage = storage
        self._folder = folder
        self._rows: list[Row] = []
        self._characters = 0
        self._parts: list[dict] = []

    def write(self, row: Row) -> None:
        self._rows.append(row)
        self._characters += num_characters(row)
        if len(self._rows) >= PART_ROWS or self._characters >= PART_CHARACTERS:
            self._flush()

    def close(self) -> list[dict]:
        """Writes what is left. Returns {"key", "rows", "sha256"} of each part, in order."""
        if self._rows:
            self._flush()
        return self._parts

    def _flush(self) -> None:
        self._parts.append(write_part(self._storage, self._folder, self._rows))
        self._rows, self._characters = [], 0


def write_part(storage: Storage, folder: str, rows: list[Row]) -> dict:
    """One Parquet part under a fresh key: {"key", "rows", "sha256"}."""
    data = to_parquet(rows)
    key = storage.put_fresh(f"{folder}/part", ".parquet", data)
    return {"key": key, "rows": len(rows), "sha256": sha256(data)}


def write_table(storage: Storage, folder: str, columns: dict[str, Any]) -> dict:
    """A table (columns, or an Arrow table) as one Parquet object: {"key", "rows", "sha256"}."""
    import pyarrow as pa

    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    data = table_to_parquet(table)
    key = storage.put_fresh(f"{folder}/part", ".parquet", data)
    return {"key": key, "rows": table.num_rows, "sha256": sha256(data)}


def read_table(storage: Storage, part: dict, columns: list[str] | None = None) -> Any:
    """The Arrow table of `write_table` or `write_part`. Raises CorruptError, see `read_part`."""
    import pyarrow.parquet as pq

    return pq.read_table(io.BytesIO(_verified(storage, part)), columns=columns)


def read_part(storage: Storage, part: dict) -> Iterator[Row]:
    """The rows of a part. Raises CorruptError when its bytes are not those that were committed."""
    yield from from_parquet(_verified(storage, part))


def _verified(storage: Storage, part: dict) -> bytes:
    data = storage.get(part["key"])
    if sha256(data) != part["sha256"]:
        raise CorruptError(
            f"{storage.url}/{part['key']} does not match its commit record; it was altered or cut; "
            "delete the dataset's folder and run its stage again"
        )
    return data


def read_rows(
    dataset: Dataset, split: Split, start: int = 0, stop: int | None = None
) -> Iterator[Row]:
    """Rows `start` to `stop` of a sealed corpus, in part order; parts outside are not fetched."""
    first = 0
    for part in dataset.require_stage(CORPORA).facts["parts"][split]:
        end = first + part["rows"]
        if end > start and (stop is None or first < stop):
            rows = read_part(dataset.storage, part)
            for index, row in enumerate(rows, first):
                if index >= start and (stop is None or index < stop):
                    yield row
        first = end


def read_ids(dataset: Dataset, split: Split) -> Iterator[str]:
    """Ids of all rows of a split of a sealed corpus, in part order."""
    import pyarrow.parquet as pq

    for part in dataset.require_stage(CORPORA).facts["parts"][split]:
        table = pq.read_table(io.BytesIO(dataset.storage.get(part["key"])), columns=["id"])
        yield from table["id"].to_pylist()


def num_rows(dataset: Dataset, split: Split) -> int:
    """Rows of a split of a sealed corpus."""
    return sum(part["rows"] for part in dataset.require_stage(CORPORA).facts["parts"][split])
