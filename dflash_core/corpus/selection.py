"""Which accepted rows make the corpus: no duplicates, no more than the limits, shares as asked for.

Works on the indexes of all parts, never on texts. The outcome depends on the rows and their order, and on
nothing else. Shape letters: N rows, P slots of a signature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dflash_core.config import CurateConfig
from dflash_core.corpus.deduplication import SLOTS, first_of_equal, near_duplicates
from dflash_core.corpus.mixing import draw_order, rows_to_take
from dflash_core.corpus.rows import (
    PART_CHARACTERS,
    PART_ROWS,
    Reject,
    RejectWriter,
    read_table,
    write_table,
)
from dflash_core.errors import CorruptError
from dflash_core.manifest import Dataset

KEPT, DUPLICATE, NEAR_DUPLICATE, OVER_LIMIT, NOT_DRAWN = range(5)


@dataclass(frozen=True)
class Candidates:
    """The accepted rows of all sources, in order.

    Attributes:
        sources: their names.
        files: Parquet objects of the rows, {"key", "rows", "sha256"}, in order.
        table: the indexes of all parts put together, see `source_parts`; without signatures.
        source_N: place of each row's source.
        row_N: place of each row in `files` put together, -1 for one that was not written.
        id_N4: the content hash as four numbers.
        signature_NP: MinHash signatures, or None.
    """

    sources: list[str]
    files: list[dict]
    table: Any
    source_N: np.ndarray
    row_N: np.ndarray
    id_N4: np.ndarray
    signature_NP: np.ndarray | None

    @classmethod
    def load(cls, dataset: Dataset, parts: dict[str, list[dict]]) -> Candidates:
        """Reads the indexes of the committed parts of every source, by name and in order."""
        import pyarrow as pa

        files: list[dict] = []
        tables, sources, rows, signed = [], [], [], []
        for place, records in enumerate(parts.values()):
            for record in records:
                table = read_table(dataset.storage, record["index"])
                before = sum(file["rows"] for file in files)
                row_N = table["row"].to_numpy()
                rows.append(np.where(row_N < 0, -1, row_N + before))
                sources.append(np.full(table.num_rows, place, np.int16))
                files += record["parts"]
                if "signature" in table.column_names:
                    signed.append(_matrix(table["signature"], np.dtype("<u4"), SLOTS))
                    table = table.drop_columns(["signature"])
                tables.append(table)
        table = pa.concat_tables(tables)
        return cls(
            list(parts),
            files,
            table,
            np.concatenate(sources),
            np.concatenate(rows),
            _matrix(table["id"], np.dtype(">u8"), 4).astype(np.uint64),
            np.concatenate(signed) if signed else None,
        )

    def measure(self, column: str) -> np.ndarray:
        """A column of the index, [N]."""
        return self.table[column].to_numpy()


def _matrix(column: Any, dtype: np.dtype, width: int) -> np.ndarray:
    """A column of byte strings of one length as numbers [N, width]."""
    return np.frombuffer(b"".join(column.to_pylist()), dtype).reshape(-1, width)


def judge(candidates: Candidates, config: CurateConfig) -> tuple[np.ndarray, np.ndarray]:
    """The verdict on every row, uint8 [N], and the row it equals or resembles, int64 [N] (-1 for none).

    In this order: repeats inside a source, limits, repeats of other sources, near-duplicates, shares.
    """
    num_rows, num_sources = len(candidates.source_N), len(candidates.sources)
    verdict_N = np.full(num_rows, KEPT, np.uint8)
    same_as_N = np.full(num_rows, -1, np.int64)
    order_N = draw_order(candidates.id_N4[:, 0], config.seed)

    def drop_equal(rows: np.ndarray) -> None:
        first = rows[first_of_equal(candidates.id_N4[rows, :2])]
        repeats = rows[first != rows]
        verdict_N[repeats], same_as_N[repeats] = DUPLICATE, first[first != rows]

    def left(source: int | None = None) -> np.ndarray:
        is_left = verdict_N == KEPT
        if source is not None:
            is_left &= candidates.source_N == source
        return np.flatnonzero(is_left)

    def take_lowest(source: int, count: int, verdict: int) -> None:
        rows = left(source)
        verdict_N[rows[np.argsort(order_N[rows], kind="stable")[count:]]] = verdict

    for place, source in enumerate(config.sources):
        drop_equal(left(place))
        if source.limit:
            take_lowest(place, source.limit, OVER_LIMIT)
    drop_equal(left())
    if candidates.signature_NP is not None:
        rows = left()
        found = near_duplicates(candidates.signature_NP[rows], config.near_duplicates)
        alike = found >= 0
        verdict_N[rows[alike]], same_as_N[rows[alike]] = NEAR_DUPLICATE, rows[found[alike]]
    available = [len(left(place)) for place in range(num_sources)]
    weights = [source.weight for source in config.sources]
    take = rows_to_take(available, weights, config.temperature, config.num_rows)
    for place, count in enumerate(take):
        take_lowest(place, count, NOT_DRAWN)
    if (candidates.row_N[left()] < 0).any():
        raise CorruptError("a row that was drawn is not in its part; delete the dataset's folder")
    return verdict_N, same_as_N


def select(dataset: Dataset, config: CurateConfig, parts: dict[str, list[dict]]) -> dict:
    """Judges all rows and writes the outcome.

    Args:
        parts: commit records of the parts of every source, by name and in order.

    Returns:
        A record: `files` of rows, in order; `selection`, a table of the kept rows with `file`, `row` in
        it, `held_out` and `group` (rows that are published together); `num_groups`; and `sources`, the
        counts of each.
    """
    candidates = Candidates.load(dataset, parts)
    verdict_N, same_as_N = judge(candidates, config)
    counts = {
        name: _counts(candidates, verdict_N, place) for place, name in enumerate(candidates.sources)
    }
    for name, keys in _write_repeats(dataset, candidates, verdict_N, same_as_N).items():
        counts[name]["rejects"] = keys
    selection = _published_together(candidates, verdict_N)
    return {
        "files": candidates.files,
        "selection": write_table(dataset.storage, "selection", selection),
        "num_groups": int(selection["group"][-1]) + 1 if len(selection["group"]) else 0,
        "sources": counts,
    }


def _counts(candidates: Candidates, verdict_N: np.ndarray, source: int) -> dict:
    mine_N = candidates.source_N == source
    verdicts = np.bincount(verdict_N[mine_N], minlength=5).tolist()
    kept_N = mine_N & (verdict_N == KEPT)
    measures = ("held_out", "characters", "answer_characters", "turns", "calling", "prompt_only")
    return {
        "kept": verdicts[KEPT],
        "duplicates": verdicts[DUPLICATE],
        "near_duplicates": verdicts[NEAR_DUPLICATE],
        "over_limit": verdicts[OVER_LIMIT],
        "not_drawn": verdicts[NOT_DRAWN],
        **{name: int(candidates.measure(name)[kept_N].sum()) for name in measures},
        "lengths": _lengths(candidates.measure("characters")[kept_N]),
        "rejects": [],
    }


def _lengths(characters_N: np.ndarray) -> dict[str, int]:
    """Rows by length: those of fewer characters than the key, and at least half as many."""
    powers = np.ceil(np.log2(characters_N + 1)).astype(int)
    values, counts = np.unique(powers, return_counts=True)
    return {
        str(2**value): count for value, count in zip(values.tolist(), counts.tolist(), strict=True)
    }


def _write_repeats(
    dataset: Dataset, candidates: Candidates, verdict_N: np.ndarray, same_as_N: np.ndarray
) -> dict[str, list[str]]:
    """Repeats with file, line and the id of the row that stays, beside the rejects of their source."""
    reasons = {DUPLICATE: "duplicate", NEAR_DUPLICATE: "near-duplicate"}
    repeats = np.flatnonzero(same_as_N >= 0)
    places = candidates.table.select(["file", "line"]).take(repeats).to_pylist()
    ids = candidates.table["id"].take(same_as_N[repeats]).to_pylist()
    writers: dict[str, RejectWriter] = {}
    for index, place, same in zip(repeats.tolist(), places, ids, strict=True):
        name = candidates.sources[candidates.source_N[index]]
        writer = writers.setdefault(name, RejectWriter(dataset.storage, f"sources/{name}/repeats"))
        writer.write(
            Reject(place["line"], reasons[int(verdict_N[index])], same.hex(), place["file"])
        )
    return {name: writer.close() for name, writer in writers.items()}


def _published_together(candidates: Candidates, verdict_N: np.ndarray) -> dict[str, np.ndarray]:
    """The kept rows in the order of the files, in groups of about one output part.

    A group is whole files of a source: it is published by itself, so a killed run loses at most one.
    """
    kept = np.flatnonzero(verdict_N == KEPT)
    kept = kept[np.argsort(candidates.row_N[kept], kind="stable")]
    row_N = candidates.row_N[kept]
    starts = np.cumsum([0] + [file["rows"] for file in candidates.files])
    file_N = np.searchsorted(starts, row_N, "right") - 1
    held_out_N = candidates.measure("held_out")[kept]
    rows = np.bincount(file_N[~held_out_N], minlength=len(candidates.files))
    sizes = np.bincount(
        file_N, candidates.measure("characters")[kept], minlength=len(candidates.files)
    )
    groups, group, gathered, size = [], 0, 0, 0.0
    for file in range(len(candidates.files)):
        if gathered and (gathered + rows[file] > PART_ROWS or size + sizes[file] > PART_CHARACTERS):
            group, gathered, size = group + 1, 0, 0.0
        groups.append(group)
        gathered, size = gathered + int(rows[file]), size + sizes[file]
    return {
        "group": np.array(groups, np.int32)[file_N],
        "file": file_N.astype(np.int32),
        "row": (row_N - starts[file_N]).astype(np.int32),
        "held_out": held_out_N,
    }
