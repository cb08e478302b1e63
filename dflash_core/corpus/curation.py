"""Raw conversations to a clean corpus, with every row accounted for.

Two kinds of units. One for each source: read, normalize, reject with a reason, drop repeats inside the
source, take the limit. Then `publish`: drop repeats across sources, split, write the parts that
`rows.read_rows` reads. For every source, rows in = kept + rejected + duplicates + over the limit.
"""

from __future__ import annotations

import heapq
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from dflash_core.config import CurateConfig, SourceConfig
from dflash_core.corpus.normalization import is_prompt_only, normalize
from dflash_core.corpus.readers import reader_of
from dflash_core.corpus.rows import (
    CORPORA,
    Conversation,
    Malformed,
    PartWriter,
    Reject,
    Row,
    content_id,
    group_of,
    is_held_out,
    num_characters,
    read_part,
)
from dflash_core.errors import CorruptError, IncompleteError, InputError
from dflash_core.manifest import Dataset
from dflash_core.progress import Progress, silent
from dflash_core.storage import Storage

log = logging.getLogger(__name__)

STAGE = CORPORA
VERSION = 1

PUBLISH = "publish"
_LOOKED_AT = 100  # rows among which one must be readable before any work
_REPORT_EVERY = 5000  # rows between two calls of progress
_REJECTS_PER_FILE = 50_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def plan(root: Storage, name: str, config: CurateConfig) -> Dataset:
    """The corpus of this request, new or continued.

    Where a source lies has no part in the fingerprint, only what it holds: a corpus made from a copy of
    the same file is the same corpus.

    Raises:
        InputError: see `check_sources`.
    """
    identities = check_sources(config)
    request = config.model_dump(mode="json")
    for source in request["sources"]:
        del source["path"], source["revision"]
    return Dataset.create(root, STAGE, name, version=VERSION, config=request, inputs=identities)


def check_sources(config: CurateConfig) -> dict[str, str]:
    """What each source holds (see `Reader.identity`), after finding a row in each that can be read.

    Raises:
        InputError: a source is named badly or twice, has an unknown reader, cannot be read, or is laid
            out in another way than its reader expects.
    """
    names = [source.name for source in config.sources]
    if not names:
        raise InputError("sources is empty; name at least one")
    for source in config.sources:
        if not _NAME.fullmatch(source.name) or names.count(source.name) > 1:
            raise InputError(
                f"source name {source.name!r} must be unique and made of letters, digits, '.', '_' and '-'"
            )
    identities = {source.name: reader_of(source).identity(source) for source in config.sources}
    for source in config.sources:
        _require_layout(source, _read(source, identities[source.name]))
    return identities


def missing(dataset: Dataset) -> list[str]:
    """Units without a commit record, in the order in which they have to run."""
    done = dataset.committed()
    return [unit for unit in units(dataset) if unit not in done]


def run_units(
    dataset: Dataset, config: CurateConfig, todo: list[str], progress: Progress = silent
) -> None:
    """Does the units `todo` and commits each. Source units may run side by side, `publish` after all of them.

    Raises:
        InputError: a source has no row that its reader can read, or nothing is left to train on.
        IncompleteError: `publish` is asked for while a source is missing.
    """
    sources = dict(zip(units(dataset), config.sources, strict=False))
    for done, unit in enumerate(todo):
        if unit == PUBLISH:
            record = _publish(dataset, config)
        else:
            identity = dataset.request["inputs"][sources[unit].name]
            record = _Source(dataset, config, sources[unit], identity).run(
                lambda numbers, done=done: progress(done, len(todo), numbers)
            )
        dataset.commit(unit, record)
        progress(done + 1, len(todo), {})


def seal(dataset: Dataset) -> dict:
    """Checks the sums and writes the manifest.

    Facts: `sources` (counts of each), `rejected` (by reason, over all), `parts` (of each split),
    `num_train`, `num_held_out`.
    """
    every = units(dataset)
    if missing(dataset):
        return dataset.seal(every, {})  # says what is missing
    records = dataset.records(every)
    published = records[PUBLISH]
    sources = {}
    for unit in every[:-1]:
        record, name = records[unit], records[unit]["source"]
        sources[name] = counts = _counts(record, published["sources"][name])
        found = counts["kept"] + sum(counts["rejected"].values())
        found += counts["duplicates"] + counts["over_limit"]
        if found != counts["rows_in"]:
            raise CorruptError(
                f"{dataset.url}: source {name!r} had {counts['rows_in']} rows and {found} are accounted "
                "for; delete the dataset's folder and curate again"
            )
    parts = published["parts"]
    totals = {f"num_{split}": sum(part["rows"] for part in parts[split]) for split in parts}
    rejected = sum((Counter(counts["rejected"]) for counts in sources.values()), Counter())
    facts = {"sources": sources, "rejected": dict(rejected), "parts": parts, **totals}
    return dataset.seal(every, facts)


def units(dataset: Dataset) -> list[str]:
    """All units in the order in which they have to run."""
    names = [source["name"] for source in dataset.config["sources"]]
    return [f"source-{index:03d}-{name}" for index, name in enumerate(names)] + [PUBLISH]


def _read(source: SourceConfig, identity: str) -> Iterator[Conversation | Reject]:
    # For a Hugging Face id the identity is the commit, so every unit reads what was planned.
    return reader_of(source).read(source.model_copy(update={"revision": identity}))


def _require_layout(source: SourceConfig, rows: Iterator[Conversation | Reject]) -> None:
    """Raises InputError when none of the first rows is a conversation in the reader's layout."""
    reasons: Counter[str] = Counter()
    for item in islice(rows, _LOOKED_AT):
        if isinstance(item, Reject):
            reasons[item.reason] += 1
            continue
        try:
            normalize(item.messages, item.tools)
        except Malformed as error:
            reasons[error.reason] += 1
        else:
            return
    if not reasons:
        raise InputError(f"source {source.name!r} has no rows; check {source.path!r}")
    [(reason, times)] = reasons.most_common(1)
    layout = (reader_of(source).__doc__ or "").strip().split("\n")[0].rstrip(".")
    raise InputError(
        f"source {source.name!r}: none of the first {reasons.total()} rows of {source.path!r} can be read "
        f"({times} times: {reason}); reader {source.reader!r} expects {layout}"
    )


# --- one source --------------------------------------------------------------------------------


class _Source:
    """One pass over a source; memory is one part, the rows under the limit, and 100 bytes a row."""

    def __init__(
        self, dataset: Dataset, config: CurateConfig, source: SourceConfig, identity: str
    ) -> None:
        self.source = source
        self.rows = _read(source, identity)
        self.max_characters = config.max_characters
        self.writer = PartWriter(dataset.storage, f"sources/{source.name}")
        self.rejects = _RejectWriter(dataset.storage, f"sources/{source.name}")
        self.seen: set[bytes] = set()
        self.lowest: list[tuple[int, Row]] = []  # a heap; the highest id is on top
        self.counts = Counter()

    def run(self, report) -> dict:
        """Reads, keeps and writes everything. Returns the commit record."""
        for item in self.rows:
            self.counts["rows_in"] += 1
            try:
                self._take(self._row(item))
            except Malformed as error:
                file, line = item.file, item.line
                self.rejects.write(Reject(line, error.reason, error.detail, file))
            if self.counts["rows_in"] % _REPORT_EVERY == 0:
                report({"rows": self.counts["rows_in"], "rejected": self.rejects.total})
        for _, row in sorted(self.lowest, key=lambda entry: entry[1].id):
            self.writer.write(row)
        parts, rejects = self.writer.close(), self.rejects.close()
        if not parts:
            self._refuse()
        return {
            "source": self.source.name,
            "rows_in": self.counts["rows_in"],
            "duplicates": self.counts["duplicates"],
            "over_limit": self.counts["over_limit"],
            "rejected": dict(sorted(self.rejects.reasons.items())),
            "rejects": rejects,
            "parts": parts,
        }

    def _row(self, item: Conversation | Reject) -> Row:
        """The normalized row. Raises Malformed for what is to be rejected."""
        if isinstance(item, Reject):
            raise Malformed(item.reason, item.detail)
        messages, tools = normalize(item.messages, item.tools)
        metadata = _json_values(item.metadata)
        if is_prompt_only(messages):
            metadata["prompt_only"] = True
        row = Row(content_id(messages, tools), self.source.name, messages, tools, metadata)
        if (characters := num_characters(row)) > self.max_characters:
            raise Malformed("too many characters", characters)
        return row

    def _take(self, row: Row) -> None:
        digest = bytes.fromhex(row.id)[:16]
        if digest in self.seen:
            self.counts["duplicates"] += 1
            return
        self.seen.add(digest)
        if not self.source.limit:
            self.writer.write(row)
            return
        entry = (-int(row.id, 16), row)
        if len(self.lowest) < self.source.limit:
            heapq.heappush(self.lowest, entry)
        else:
            heapq.heappushpop(self.lowest, entry)
            self.counts["over_limit"] += 1

    def _refuse(self) -> None:
        reason, times = self.rejects.reasons.most_common(1)[0]
        raise InputError(
            f"source {self.source.name!r}: reader {self.source.reader!r} can read none of its "
            f"{self.counts['rows_in']} rows ({times} times: {reason}); check the reader and the path"
        )


class _RejectWriter:
    """Rejected rows as JSON lines {file, line, reason, detail}."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self.reasons: Counter[str] = Counter()
        self._storage, self._folder = storage, folder
        self._lines: list[str] = []
        self._keys: list[str] = []

    @property
    def total(self) -> int:
        return self.reasons.total()

    def write(self, reject: Reject) -> None:
        self.reasons[reject.reason] += 1
        self._lines.append(json.dumps(vars(reject)) + "\n")
        if len(self._lines) >= _REJECTS_PER_FILE:
            self._flush()

    def close(self) -> list[str]:
        """Keys of the files; empty when nothing was rejected."""
        if self._lines:
            self._flush()
        return self._keys

    def _flush(self) -> None:
        data = "".join(self._lines).encode()
        self._keys.append(self._storage.put_fresh(f"{self._folder}/rejects", ".jsonl", data))
        self._lines = []


def _json_values(metadata: dict) -> dict:
    """Metadata in JSON values; dates and other types of Parquet become text."""
    try:
        text = json.dumps(metadata, default=str, allow_nan=False, ensure_ascii=False)
        return json.loads(text.encode())
    except (ValueError, TypeError, RecursionError) as error:
        raise Malformed("metadata has no JSON form", error) from error


# --- publish -----------------------------------------------------------------------------------


def _publish(dataset: Dataset, config: CurateConfig) -> dict:
    """Writes the parts of both splits. A row that several sources have belongs to the first."""
    source_units = units(dataset)[:-1]
    if absent := [unit for unit in source_units if unit not in dataset.committed()]:
        raise IncompleteError(f"{dataset.url}: {absent[0]} is not committed; run it before publish")
    writers = {
        split: PartWriter(dataset.storage, f"parts/{split}") for split in ("train", "held_out")
    }
    seen: set[bytes] = set()
    sources = {}
    for record in dataset.records(source_units).values():
        counts = sources[record["source"]] = Counter(
            dict.fromkeys(
                (
                    "train",
                    "held_out",
                    "duplicates",
                    "turns",
                    "characters",
                    "calling",
                    "prompt_only",
                ),
                0,
            )
        )
        for part in record["parts"]:
            for row in read_part(dataset.storage, part):
                if (digest := bytes.fromhex(row.id)[:16]) in seen:
                    counts["duplicates"] += 1
                    continue
                seen.add(digest)
                split = (
                    "held_out" if is_held_out(group_of(row), config.held_out_fraction) else "train"
                )
                writers[split].write(row)
                counts.update({split: 1, **_measures(row)})
    parts = {split: writer.close() for split, writer in writers.items()}
    if not parts["train"]:
        raise InputError(
            "no row is left to train on; add sources, or lower held_out_fraction "
            f"(now {config.held_out_fraction})"
        )
    return {"parts": parts, "sources": {name: dict(counts) for name, counts in sources.items()}}


def _measures(row: Row) -> dict[str, int]:
    return {
        "turns": sum(message["role"] == "assistant" for message in row.messages),
        "characters": num_characters(row),
        "calling": any("tool_calls" in message for message in row.messages),
        "prompt_only": bool(row.metadata.get("prompt_only")),
    }


def _counts(source: dict, published: dict) -> dict:
    """The report of one source, from its own record and its share of `publish`."""
    kept = published["train"] + published["held_out"]
    return {
        "rows_in": source["rows_in"],
        "kept": kept,
        "rejected": source["rejected"],
        "duplicates": source["duplicates"] + published["duplicates"],
        "over_limit": source["over_limit"],
        "train": published["train"],
        "held_out": published["held_out"],
        "prompt_only": published["prompt_only"],
        "turns": published["turns"],
        "characters": published["characters"],
        "tool_call_share": round(published["calling"] / kept, 4) if kept else 0.0,
        "rejects": source["rejects"],
    }
