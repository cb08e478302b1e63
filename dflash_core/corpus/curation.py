"""Raw conversations to a clean corpus, with every row accounted for.

Units: `evaluation-prompts` where the corpus is decontaminated; one for each source, committed part by
part (`source_parts`); then `publish`, which decides over all sources together (`selection`) and copies
the rows that stay into the parts that `rows.read_rows` reads. For every source, rows in = kept + rejected
+ duplicates + near-duplicates + over the limit + not drawn.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, wait
from itertools import islice
from typing import Any

from dflash_core.config import CurateConfig, SourceConfig
from dflash_core.corpus import decontamination, report
from dflash_core.corpus.normalization import normalize
from dflash_core.corpus.readers import reader_of
from dflash_core.corpus.rows import (
    CORPORA,
    Conversation,
    Malformed,
    Reject,
    read_table,
    write_table,
)
from dflash_core.corpus.selection import select
from dflash_core.corpus.source_parts import SourceReader, part_unit, part_units, read
from dflash_core.errors import CorruptError, IncompleteError, InputError
from dflash_core.manifest import Dataset
from dflash_core.processes import process_pool
from dflash_core.progress import Progress, silent
from dflash_core.storage import Storage

log = logging.getLogger(__name__)

STAGE = CORPORA
VERSION = 2

PROMPTS = "evaluation-prompts"
PUBLISH = "publish"
_SELECTION = f"{PUBLISH}.selection"
_LOOKED_AT = 100  # rows among which one must be readable before any work
_ALONE = 4  # parts that are read before it is worth starting processes
_MOST_READERS = 8  # each reads the whole source, though it parses only its own parts
_POLL_S = 5.0
Tell = Callable[[dict[str, float]], None]
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
    request["decontaminate"] = list(_labels(config))
    return Dataset.create(root, STAGE, name, version=VERSION, config=request, inputs=identities)


def check_sources(config: CurateConfig) -> dict[str, str]:
    """What each source holds (see `Reader.identity`), after finding a row in each that can be read.

    Evaluation sets are among them, as `decontaminate:<name>`.

    Raises:
        InputError: a source is named badly or twice, has an unknown reader, cannot be read, or is laid
            out in another way than its reader expects; some sources have weights and others have none.
    """
    names = [source.name for source in config.sources]
    if not names:
        raise InputError("sources is empty; name at least one")
    for source in config.sources:
        if not _NAME.fullmatch(source.name) or names.count(source.name) > 1:
            raise InputError(
                f"source name {source.name!r} must be unique and made of letters, digits, '.', '_' and '-'"
            )
    weightless = [source.name for source in config.sources if not source.weight]
    if 0 < len(weightless) < len(names):
        raise InputError(
            f"source {weightless[0]!r} has no weight and others have; give every source one, or none"
        )
    identities = {source.name: reader_of(source).identity(source) for source in config.sources}
    for label, name in _labels(config).items():
        identities[f"decontaminate:{label}"] = decontamination.identity(name)
    for source in config.sources:
        _require_layout(source, read(source, identities[source.name]))
    return identities


def missing(dataset: Dataset) -> list[str]:
    """Units without a commit record, in the order in which they have to run."""
    done = dataset.committed()
    return [unit for unit in units(dataset) if unit not in done]


def units(dataset: Dataset) -> list[str]:
    """All units in the order in which they have to run."""
    names = [source["name"] for source in dataset.config["sources"]]
    sources = [f"source-{index:03d}-{name}" for index, name in enumerate(names)]
    return [PROMPTS] * bool(dataset.config["decontaminate"]) + sources + [PUBLISH]


def run_units(
    dataset: Dataset,
    config: CurateConfig,
    todo: list[str],
    progress: Progress = silent,
    *,
    processes: int = 1,
) -> None:
    """Does the units `todo` and commits each.

    Args:
        dataset: the planned corpus.
        config: the same as it was planned with.
        todo: some of `units`, in their order.
        progress: called as units and parts are done.
        processes: how many read a large source side by side; 0 for one on each core, at most 8. Never
            changes the corpus.

    Raises:
        InputError: a source has no row that its reader can read, or nothing is left to train on.
        IncompleteError: a unit is asked for while one that it builds on is missing.
    """
    sources = dict(zip(_source_units(dataset), config.sources, strict=True))
    for done, unit in enumerate(todo):

        def tell(numbers: dict[str, float], done: int = done) -> None:
            progress(done, len(todo), numbers)

        if unit == PROMPTS:
            record = _collect_prompts(dataset, config)
        elif unit == PUBLISH:
            record = _publish(dataset, config, tell)
        else:
            workers = processes or min(os.cpu_count() or 1, _MOST_READERS)
            record = _read_source(dataset, config, sources[unit], unit, workers, tell)
        dataset.commit(unit, record)
        progress(done + 1, len(todo), {})


def seal(dataset: Dataset) -> dict:
    """Checks the sums, writes the report (see `report`) and the manifest.

    Facts: `sources` (counts of each), `rejected` (by reason, over all), `parts` (of each split),
    `num_train`, `num_held_out`, `report`.
    """
    every = units(dataset)
    if missing(dataset):
        return dataset.seal(every, {})  # says what is missing
    published = dataset.record(PUBLISH)
    selected = dataset.record(_SELECTION)["sources"]
    sources = {}
    for unit in _source_units(dataset):
        record = dataset.record(unit)
        name = record["source"]
        sources[name] = counts = _counts(record, selected[name])
        if (found := accounted(counts)) != counts["rows_in"]:
            raise CorruptError(
                f"{dataset.url}: source {name!r} had {counts['rows_in']} rows and {found} are accounted "
                "for; delete the dataset's folder and curate again"
            )
    parts = published["parts"]
    totals = {f"num_{split}": sum(part["rows"] for part in parts[split]) for split in parts}
    rejected = sum((Counter(counts["rejected"]) for counts in sources.values()), Counter())
    facts = {"sources": sources, "rejected": dict(rejected), "parts": parts, **totals}
    return dataset.seal(every, {**facts, "report": report.write(dataset, sources)})


def accounted(counts: dict) -> int:
    """Rows whose fate a source's counts tell."""
    fates = ("kept", "duplicates", "near_duplicates", "over_limit", "not_drawn")
    return sum(counts[fate] for fate in fates) + sum(counts["rejected"].values())


def _source_units(dataset: Dataset) -> list[str]:
    return [unit for unit in units(dataset) if unit not in (PROMPTS, PUBLISH)]


def _require_layout(source: SourceConfig, rows: Iterator[Conversation | Reject | None]) -> None:
    """Raises InputError when none of the first rows is a conversation in the reader's layout."""
    reasons: Counter[str] = Counter()
    details: dict[str, str] = {}
    for item in islice(rows, _LOOKED_AT):
        assert item is not None  # every row is wanted
        try:
            if isinstance(item, Reject):
                raise Malformed(item.reason, item.detail)
            if item.messages is not None:
                normalize(item.messages, item.tools)
            return
        except Malformed as error:
            reasons[error.reason] += 1
            details.setdefault(error.reason, error.detail)
    where = repr(source.path) if source.path else f"reader {source.reader!r}"
    if not reasons:
        raise InputError(f"source {source.name!r} has no rows; check {where}")
    [(reason, times)] = reasons.most_common(1)
    layout = (reader_of(source).__doc__ or "").strip().split("\n")[0].rstrip(".")
    detail = f", such as {details[reason]}" if details[reason] else ""
    raise InputError(
        f"source {source.name!r}: none of the first {reasons.total()} rows of {where} can be read "
        f"({times} times: {reason}{detail}); reader {source.reader!r} expects {layout}"
    )


# --- evaluation prompts ------------------------------------------------------------------------


def _labels(config: CurateConfig) -> dict[str, str]:
    """The evaluation sets by their labels, which like sources do not depend on where a file lies."""
    labels = {decontamination.label_of(name): name for name in config.decontaminate}
    if len(labels) < len(config.decontaminate):
        raise InputError("decontaminate names two sets alike; give their files different names")
    return labels


def _collect_prompts(dataset: Dataset, config: CurateConfig) -> dict:
    """Keeps the prompts with the corpus, so that a restart needs no set again."""
    sets, prompts = [], []
    for label, name in _labels(config).items():
        identity = dataset.request["inputs"][f"decontaminate:{label}"]
        found = list(decontamination.prompts(name, identity))
        sets += [label] * len(found)
        prompts += found
    table = write_table(dataset.storage, PROMPTS, {"set": sets, "prompt": prompts})
    return {"table": table, "prompts": dict(Counter(sets))}


def _prompts(dataset: Dataset) -> dict[str, list[str]] | None:
    if not dataset.config["decontaminate"]:
        return None
    if PROMPTS not in dataset.committed():
        raise IncompleteError(
            f"{dataset.url}: {PROMPTS} is not committed; run it before the sources"
        )
    found: dict[str, list[str]] = {}
    for line in read_table(dataset.storage, dataset.record(PROMPTS)["table"]).to_pylist():
        found.setdefault(line["set"], []).append(line["prompt"])
    return found


# --- one source --------------------------------------------------------------------------------


def _read_source(
    dataset: Dataset,
    config: CurateConfig,
    source: SourceConfig,
    unit: str,
    processes: int,
    tell: Tell,
) -> dict:
    """Commits the parts of a source that are missing. Returns the record of all."""
    reader = SourceReader(dataset, config, source, unit, _prompts(dataset))
    totals: Counter[str] = Counter()

    def count(record: dict) -> None:
        totals["rows"] += record["rows_in"]
        totals["rejected"] += sum(record["rejected"].values())
        tell(dict(totals))

    num_rows = reader.run(stop=_ALONE if processes > 1 else None, report=count)
    if num_rows is None:
        num_rows = _read_side_by_side(dataset, config, unit, processes, tell)
    names = [part_unit(unit, number) for number in range(-(-num_rows // config.rows_per_part))]
    records = list(dataset.records(names).values())
    sums = {
        key: dict(sorted(sum((Counter(record[key]) for record in records), Counter()).items()))
        for key in ("rejected", "repaired", "redacted")
    }
    if not sum(record["accepted"] for record in records):
        [(reason, times)] = Counter(sums["rejected"]).most_common(1)
        raise InputError(
            f"source {source.name!r}: reader {source.reader!r} can read none of its "
            f"{num_rows} rows ({times} times: {reason}); check the reader and the path"
        )
    num_rejected = sum(sums["rejected"].values())
    log.info("source %s: %d rows in, %d rejected", source.name, num_rows, num_rejected)
    return {
        "source": source.name,
        "rows_in": sum(record["rows_in"] for record in records),
        **sums,
        "rejects": [key for record in records for key in record["rejects"]],
        "num_parts": len(names),
    }


def _read_side_by_side(
    dataset: Dataset, config: CurateConfig, unit: str, processes: int, tell: Tell
) -> int:
    """Reads a source in several processes, each of which parses its own parts. Returns its rows."""
    common = (dataset.root.url, dataset.path, config.model_dump_json(), unit, processes)
    with process_pool(processes) as pool:
        shares = [pool.submit(_read_share, *common, share) for share in range(processes)]
        going = set(shares)
        while going:
            done, going = wait(going, _POLL_S, FIRST_EXCEPTION)
            if any(share.exception() for share in done):
                break
            tell({"parts": len(part_units(dataset, unit))})
        return max(share.result() for share in shares)


def _read_share(root: str, path: str, config: str, unit: str, num_shares: int, share: int) -> int:
    """One process of `_read_side_by_side`."""
    dataset = Dataset.open(Storage.from_url(root), path)
    curate = CurateConfig.model_validate_json(config)
    source = curate.sources[_source_units(dataset).index(unit)]
    reader = SourceReader(dataset, curate, source, unit, _prompts(dataset))
    num_rows = reader.run(share, num_shares)
    assert num_rows is not None  # nothing stops it before the end
    return num_rows


# --- publish -----------------------------------------------------------------------------------


def _publish(dataset: Dataset, config: CurateConfig, tell: Tell) -> dict:
    """Selects, then copies the kept rows group by group; each group is committed by itself."""
    committed = dataset.committed()
    if _SELECTION not in committed:
        dataset.commit(_SELECTION, _select(dataset, config))
    selected = dataset.record(_SELECTION)
    for name, counts in selected["sources"].items():
        log.info("source %s: %d rows kept", name, counts["kept"])
    if not selected["num_groups"]:
        raise _nothing_left(config)
    selection = read_table(dataset.storage, selected["selection"])
    groups = [part_unit(PUBLISH, number) for number in range(selected["num_groups"])]
    group_N = selection["group"].to_numpy()
    starts = group_N.searchsorted(range(len(groups) + 1))
    for number, unit in enumerate(groups):
        if unit not in committed:
            rows = selection.slice(starts[number], starts[number + 1] - starts[number])
            dataset.commit(unit, _publish_group(dataset, selected["files"], rows))
        tell({"parts": number + 1})
    records = dataset.records(groups).values()
    parts = {
        split: [part for record in records for part in record["parts"][split]]
        for split in ("train", "held_out")
    }
    if not parts["train"]:
        raise _nothing_left(config)
    return {"parts": parts}


def _select(dataset: Dataset, config: CurateConfig) -> dict:
    committed = dataset.committed()
    parts = {}
    for unit in _source_units(dataset):
        if unit not in committed:
            raise IncompleteError(f"{dataset.url}: {unit} is not committed; run it before publish")
        source = dataset.record(unit)
        names = [part_unit(unit, number) for number in range(source["num_parts"])]
        parts[source["source"]] = list(dataset.records(names).values())
    return select(dataset, config, parts)


def _publish_group(dataset: Dataset, files: list[dict], rows: Any) -> dict:
    """Copies the selected rows of a few files into one part of each split, as Arrow tables."""
    import pyarrow as pa

    file_N, row_N, held_out_N = (rows[name].to_numpy() for name in ("file", "row", "held_out"))
    tables: dict[str, list[pa.Table]] = {"train": [], "held_out": []}
    for file in range(file_N[0], file_N[-1] + 1):
        table = read_table(dataset.storage, files[file])
        mine_N = file_N == file
        tables["train"].append(table.take(row_N[mine_N & ~held_out_N]))
        tables["held_out"].append(table.take(row_N[mine_N & held_out_N]))
    parts = {}
    for split, found in tables.items():
        table = pa.concat_tables(found).combine_chunks()
        folder = f"parts/{split}"
        parts[split] = [write_table(dataset.storage, folder, table)] if table.num_rows else []
    return {"parts": parts}


def _nothing_left(config: CurateConfig) -> InputError:
    return InputError(
        "no row is left to train on; add sources, or lower held_out_fraction "
        f"(now {config.held_out_fraction})"
    )


def _counts(source: dict, selected: dict) -> dict:
    """The report of one source, from its own record and its share of the selection."""
    kept, characters = selected["kept"], selected["characters"]
    return {
        "rows_in": source["rows_in"],
        "kept": kept,
        "rejected": source["rejected"],
        **{
            fate: selected[fate]
            for fate in ("duplicates", "near_duplicates", "over_limit", "not_drawn")
        },
        "repaired": source["repaired"],
        "redacted": source["redacted"],
        "train": kept - selected["held_out"],
        "held_out": selected["held_out"],
        "prompt_only": selected["prompt_only"],
        "turns": selected["turns"],
        "characters": characters,
        "supervised_share": round(selected["answer_characters"] / max(characters, 1), 4),
        "tool_call_share": round(selected["calling"] / max(kept, 1), 4),
        "lengths": selected["lengths"],
        "rejects": source["rejects"] + selected["rejects"],
    }
