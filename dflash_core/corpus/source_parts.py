"""One source, read in parts: normalize, filter, decontaminate, sign; every row is accepted or rejected.

A part is a run of `rows_per_part` rows of the source, whatever becomes of them. It is committed whole,
so a killed run loses at most one part for each process, and processes share the parts by their numbers.
Beside its rows a part has an index, which holds what the selection needs to know of each accepted row.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from dflash_core.config import CurateConfig, SourceConfig
from dflash_core.corpus.decontamination import PromptIndex
from dflash_core.corpus.deduplication import SLOTS, signatures
from dflash_core.corpus.filters import cleared_of_secrets, redacted_text, require_fit
from dflash_core.corpus.grams import batches
from dflash_core.corpus.mixing import draw_value
from dflash_core.corpus.normalization import is_prompt_only, normalize
from dflash_core.corpus.readers import reader_of
from dflash_core.corpus.readers.files import everything
from dflash_core.corpus.rows import (
    Conversation,
    Malformed,
    PartWriter,
    Reject,
    RejectWriter,
    Row,
    content_id,
    group_of,
    is_held_out,
    num_answer_characters,
    num_characters,
    read_table,
    write_table,
)
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage

STAGES_OWN = ("prompt_only", "asked_to_think", "cut_by_length", "written_characters", "tokens")
"""Metadata that the stages write and believe, and that is dropped where a source brings it."""
_SHORT_TURN = 400  # characters beyond which no turn has fewer words than a run


class SourceReader:
    """Reads parts of one source in one process; what it needs for all of them is loaded once."""

    def __init__(
        self,
        dataset: Dataset,
        config: CurateConfig,
        source: SourceConfig,
        unit: str,
        prompts: dict[str, list[str]] | None,
    ) -> None:
        self.dataset, self.config, self.source, self.unit = dataset, config, source, unit
        self._lowest = _Lowest(source.limit)
        self._texts = _TextChecks(prompts, config.near_duplicates > 0)

    def run(
        self,
        share: int = 0,
        num_shares: int = 1,
        stop: int | None = None,
        report: Callable[[dict], None] | None = None,
    ) -> int | None:
        """Commits every part whose number modulo `num_shares` is `share` and that is not committed yet.

        Args:
            share: which of the parts.
            num_shares: processes among which the parts are shared.
            stop: number of the part at which to stop.
            report: called with the record of each part.

        Returns:
            Rows of the source, or None when it has more than the parts before `stop`.
        """
        done, rows_per_part = self._done(), self.config.rows_per_part
        part: _Part | None = None
        position = -1

        def wanted(position: int) -> bool:
            number = position // rows_per_part
            return number % num_shares == share and number not in done

        for position, item in enumerate(read(self.source, self.identity, wanted)):
            number = position // rows_per_part
            if part is not None and part.number != number:
                self._commit(part, report)
                part = None
            if number == stop:
                return None
            if item is not None:
                part = part or _Part(number, self.source.name, self.config)
                part.take(item)
        if part is not None:
            self._commit(part, report)
        return position + 1

    @property
    def identity(self) -> str:
        """What the source held when the corpus was planned."""
        return self.dataset.request["inputs"][self.source.name]

    def _done(self) -> set[int]:
        """Numbers of the committed parts, after learning from them what is too high to be drawn."""
        names = part_units(self.dataset, self.unit)
        if self.source.limit:
            for record in self.dataset.records(names).values():
                index = read_table(self.dataset.storage, record["index"], ["id"])
                self._lowest.learn(index["id"].to_pylist(), self.config.seed)
        return {int(name.rpartition("-")[2]) for name in names}

    def _commit(self, part: _Part, report: Callable[[dict], None] | None) -> None:
        record = part.write(self.dataset.storage, self._texts, self._lowest)
        self.dataset.commit(part_unit(self.unit, part.number), record)
        if report is not None:
            report(record)


def read(
    source: SourceConfig, identity: str, wanted: Callable[[int], bool] = everything
) -> Iterator[Conversation | Reject | None]:
    """The rows of a source as it was when it had this identity."""
    # For a Hugging Face id the identity is the commit, so every part reads what was planned.
    return reader_of(source).read(source.model_copy(update={"revision": identity}), wanted)


def part_unit(unit: str, number: int) -> str:
    """Name of the commit record of a part of a unit."""
    return f"{unit}.part-{number:06d}"


def part_units(dataset: Dataset, unit: str) -> list[str]:
    """Names of the committed parts of a unit, in order."""
    return sorted(name for name in dataset.committed() if name.startswith(f"{unit}.part-"))


class _Lowest:
    """The lowest draws that were seen: a row above all of them cannot be among the source's limit."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._heap: list[int] = []  # negative, so that the highest is on top
        self._members: set[int] = set()

    def learn(self, ids: list[bytes], seed: int) -> None:
        for row_id in ids:
            self.add(_draw(row_id.hex(), seed))

    def add(self, value: int) -> None:
        if not self.limit or value in self._members or not self.admits(value):
            return
        self._members.add(value)
        heapq.heappush(self._heap, -value)
        if len(self._heap) > self.limit:
            self._members.remove(-heapq.heappop(self._heap))

    def admits(self, value: int) -> bool:
        return len(self._heap) < self.limit or not self.limit or value <= -self._heap[0]


class _TextChecks:
    """What is looked for in the words of many rows together: evaluation prompts and near-duplicates."""

    def __init__(self, prompts: dict[str, list[str]] | None, sign: bool) -> None:
        self._sign = sign
        self._index = PromptIndex.of(prompts) if prompts else None

    def run(self, rows: list[Row]) -> tuple[dict[int, str], np.ndarray | None]:
        """Prompts that rows contain, by the row's place, and the rows' signatures (None without)."""
        if self._index is None and not self._sign:
            return {}, None
        contained: dict[int, str] = {}
        signed = [np.zeros((0, SLOTS), np.uint32)]
        for first, words in batches([_spoken(row) for row in rows]):
            if self._index is not None:
                found = self._index.contained(words)
                contained.update((first + text, name) for text, name in found.items())
            if self._sign:
                signed.append(signatures(words))
        if self._index is not None and self._index.short:
            contained.update(self._equal_turns(rows, self._index))
        return contained, np.concatenate(signed) if self._sign else None

    def _equal_turns(self, rows: list[Row], index: PromptIndex) -> dict[int, str]:
        """Rows in which a user says exactly what a short prompt says."""
        turns = [
            (place, message["content"])
            for place, row in enumerate(rows)
            for message in row.messages
            if message["role"] == "user" and len(message["content"]) < _SHORT_TURN
        ]
        found = {}
        for first, words in batches([text for _, text in turns]):
            for text, name in index.equal(words).items():
                found[turns[first + text][0]] = name
        return found


def _spoken(row: Row) -> str:
    """What users and the assistant say and call; system messages and tools repeat from row to row."""
    texts = []
    for message in row.messages:
        if message["role"] in ("user", "assistant"):
            texts += [message["content"] or "", message.get("reasoning_content") or ""]
            calls = message.get("tool_calls") or ()
            texts += [call["function"]["arguments"] for call in calls]
    return "\n".join(texts)


class _Part:
    """Rows of one part on their way into the store."""

    def __init__(self, number: int, source: str, config: CurateConfig) -> None:
        self.number = number
        self._source, self._config = source, config
        self._rows: list[Row] = []
        self._places: list[tuple[str, int]] = []  # file and line of each accepted row
        self._rejects: list[Reject] = []
        self._rows_in = 0
        self._repaired: Counter[str] = Counter()
        self._redacted: Counter[str] = Counter()

    def take(self, item: Conversation | Reject) -> None:
        """Accepts the row or rejects it with its reason."""
        self._rows_in += 1
        if isinstance(item, Reject):
            self._rejects.append(item)
            return
        try:
            row = self._row(item)
        except Malformed as error:
            self._rejects.append(Reject(item.line, error.reason, error.detail, item.file))
        else:
            self._rows.append(row)
            self._places.append((item.file, item.line))

    def _row(self, item: Conversation) -> Row:
        repairs: Counter[str] = Counter()
        redacted: Counter[str] = Counter()
        metadata = _json_values(item.metadata)
        if item.messages is None and "tokens" in metadata:
            return Row(content_id([metadata["tokens"]], None), self._source, [], None, metadata)
        for key in STAGES_OWN:
            metadata.pop(key, None)
        messages, tools = normalize(item.messages, item.tools, repairs)
        messages, tools = cleared_of_secrets((messages, tools), self._config.filters, redacted)
        if is_prompt_only(messages):
            metadata["prompt_only"] = True
        row = Row(content_id(messages, tools), self._source, messages, tools, metadata)
        require_fit(row, self._config.filters)
        self._repaired.update(repairs)
        self._redacted.update(redacted.keys())
        return row

    def write(self, storage: Storage, texts: _TextChecks, lowest: _Lowest) -> dict:
        """Writes rows, index and rejects. Returns the commit record.

        Index columns: `id` (32 bytes), `row` (place in the part's rows, -1 for a row that is over the limit
        for certain and not written), `file`, `line`, `held_out`, `characters`, `answer_characters`, `turns`
        (of the assistant), `calling`, `prompt_only`, and `signature` (uint32 [P]) where near-duplicates
        are looked for.
        """
        contained, signatures_NP = texts.run(self._rows)
        for place, name in contained.items():
            file, line = self._places[place]
            self._rejects.append(Reject(line, "contaminated", name, file))
        kept = [place for place in range(len(self._rows)) if place not in contained]
        order, parts = self._write_rows(storage, kept, lowest)
        index = self._index(kept, order)
        if signatures_NP is not None:
            signed = [row.tobytes() for row in signatures_NP[kept]]
            index = index.append_column("signature", [signed])
        rejects = RejectWriter(storage, f"sources/{self._source}/rejects")
        for reject in sorted(self._rejects, key=lambda reject: (reject.file, reject.line)):
            rejects.write(replace(reject, detail=redacted_text(reject.detail)))
        return {
            "source": self._source,
            "rows_in": self._rows_in,
            "accepted": len(kept),
            "rejected": dict(sorted(rejects.reasons.items())),
            "repaired": dict(sorted(self._repaired.items())),
            "redacted": dict(sorted(self._redacted.items())),
            "rejects": rejects.close(),
            "parts": parts,
            "index": write_table(storage, f"sources/{self._source}/index", index),
        }

    def _write_rows(
        self, storage: Storage, kept: list[int], lowest: _Lowest
    ) -> tuple[dict[int, int], list[dict]]:
        """Writes the rows that may be drawn. Returns where each of them is among those, and the files.

        Rows of a source with a limit are written in the order in which they are drawn.
        """
        if lowest.limit:
            draws = {place: _draw(self._rows[place].id, self._config.seed) for place in kept}
            for value in draws.values():
                lowest.add(value)
            kept = sorted((p for p in kept if lowest.admits(draws[p])), key=draws.__getitem__)
        writer = PartWriter(storage, f"sources/{self._source}")
        for place in kept:
            writer.write(self._rows[place])
        return {place: order for order, place in enumerate(kept)}, writer.close()

    def _index(self, kept: list[int], order: dict[int, int]) -> Any:
        import pyarrow as pa

        rows = [self._rows[place] for place in kept]
        fraction = self._config.held_out_fraction
        columns = {
            "id": pa.array([bytes.fromhex(row.id) for row in rows], pa.binary(32)),
            "row": pa.array([order.get(place, -1) for place in kept], pa.int32()),
            "file": pa.array([self._places[place][0] for place in kept], pa.string()),
            "line": pa.array([self._places[place][1] for place in kept], pa.int64()),
            # Tokens have no prompt that an evaluation could decode.
            "held_out": pa.array(
                [bool(row.messages) and is_held_out(group_of(row), fraction) for row in rows],
                pa.bool_(),
            ),
            "characters": pa.array(map(num_characters, rows), pa.int64()),
            "answer_characters": pa.array(map(num_answer_characters, rows), pa.int64()),
            "turns": pa.array(
                [sum(message["role"] == "assistant" for message in row.messages) for row in rows],
                pa.int32(),
            ),
            "calling": pa.array(
                [any("tool_calls" in message for message in row.messages) for row in rows],
                pa.bool_(),
            ),
            "prompt_only": pa.array(
                [bool(row.metadata.get("prompt_only")) for row in rows], pa.bool_()
            ),
        }
        return pa.table(columns)


def _draw(row_id: str, seed: int) -> int:
    return draw_value(int(row_id[:16], 16), seed)


def _json_values(metadata: dict) -> dict:
    """Metadata in JSON values; dates and other types of Parquet become text."""
    try:
        text = json.dumps(metadata, default=str, allow_nan=False, ensure_ascii=False)
        return json.loads(text.encode())
    except (ValueError, TypeError, RecursionError) as error:
        raise Malformed("metadata has no JSON form", error) from error
