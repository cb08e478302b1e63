"""Conversations to token ids, loss masks and the pack plan.

The mask covers what the target would have generated: from the first token after the generation prompt to
the end-of-turn token, included. `masking` finds it; here it is made of a whole corpus, part by part.

Layout of a sealed dataset, one Zarr v3 group at its root, samples in the order of the packs:

    input_ids uint32 [total_tokens]      loss_mask uint8 [total_tokens]
    offset    int64  [num_samples + 1]   pack, row int32 [num_samples]
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import logging
import os
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import as_completed
from typing import Any

import numpy as np

from dflash_core.chat import Chat, Unrenderable
from dflash_core.config import TargetConfig, TokenizeConfig
from dflash_core.corpus.rows import CORPORA, Row, num_rows, read_rows
from dflash_core.errors import CorruptError, InputError, MismatchError
from dflash_core.manifest import Dataset, sha256
from dflash_core.masking import (
    Rendering,
    Sample,
    left_out,
    renderings,
    samples_of,
    survives,
)
from dflash_core.packing import Pack, plan_packs
from dflash_core.processes import process_pool
from dflash_core.progress import Progress, silent
from dflash_core.storage import Storage
from dflash_core.target import identify, load_tokenizer

log = logging.getLogger(__name__)

STAGE = "tokens"
VERSION = 2

_CHUNK, _SHARD = 2**16, 2**22  # tokens of the smallest read and of one object
_ROWS_WORTH_A_PROCESS = 10_000  # seconds of work, as many as a new process takes to start
_WHOLE_BYTES = 2**30  # datasets below this are read into memory once


# --- the stage ---------------------------------------------------------------------------------


def plan(
    root: Storage, name: str, corpus: Dataset, target: TargetConfig, config: TokenizeConfig
) -> Dataset:
    """The tokens of this request, new or continued.

    The target itself has no part in the fingerprint, only its tokenizer and template have: targets that
    share both share the tokens.

    Raises:
        InputError: the tokenizer has no usable chat template.
        MismatchError: `corpus` is no corpus, or was answered in the other thinking mode.
        IncompleteError: `corpus` is not complete.
    """
    corpus.require_stage(CORPORA)
    identity = identify(target, require_template=True)
    chat = Chat(load_tokenizer(target), config.thinking, target.template_options)
    answered = corpus.facts.get("thinking", config.thinking)
    if chat.switchable and answered != config.thinking:
        raise MismatchError(
            f"{corpus.path} was answered with thinking={answered}, these tokens are asked for with "
            f"thinking={config.thinking}; set both as the target is served"
        )
    inputs = {
        "corpus": corpus.fingerprint,
        "tokenizer": identity.tokenizer_hash,
        "template": identity.template_hash,
    }
    return Dataset.create(root, STAGE, name, version=VERSION, config=config, inputs=inputs)


def missing(dataset: Dataset, corpus: Dataset) -> list[str]:
    """Parts without a commit record, in order."""
    done = dataset.committed()
    return [unit for unit in units(dataset, corpus) if unit not in done]


def run_units(
    dataset: Dataset,
    corpus: Dataset,
    target: TargetConfig,
    todo: list[str],
    progress: Progress = silent,
    processes: int = 1,
) -> None:
    """Tokenizes the parts `todo` and commits each, in this process or side by side in several new ones.

    Args:
        processes: how many; 0 for one on each core, fewer when there is little to do.

    Raises:
        BrokenProcessPool: a process was killed, most likely for memory; what it committed stays.
    """
    tokens, began = 0, time.monotonic()
    for done, counts in enumerate(_run(dataset, corpus, target, todo, processes), 1):
        tokens += counts.get("tokens", 0)
        speed = tokens / (time.monotonic() - began)
        progress(done, len(todo), {"tokens_per_s": round(speed)})


def _run(
    dataset: Dataset, corpus: Dataset, target: TargetConfig, todo: list[str], processes: int
) -> Iterator[dict[str, int]]:
    """Counts of each part as it is committed."""
    config = TokenizeConfig(**dataset.config)
    worthwhile = len(todo) * config.rows_per_part // _ROWS_WORTH_A_PROCESS
    processes = min(processes or min(os.cpu_count() or 1, worthwhile), len(todo))
    if processes <= 1:
        chats = _Chats(target, config.thinking)
        yield from (_run_unit(dataset, corpus, chats, unit) for unit in todo)
        return
    what = (dataset.root.url, dataset.path, corpus.path, target)
    with process_pool(processes) as pool:
        for future in as_completed([pool.submit(_run_in_process, *what, unit) for unit in todo]):
            yield future.result()


def _run_in_process(*what: Any) -> dict[str, int]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    *opened, unit = what
    return _run_unit(*_opened(*opened), unit)


@functools.lru_cache(maxsize=1)
def _opened(
    url: str, path: str, corpus_path: str, target: TargetConfig
) -> tuple[Dataset, Dataset, _Chats]:
    """What a process needs, once for all the parts that it is given."""
    root = Storage.from_url(url)
    dataset = Dataset.open(root, path)
    chats = _Chats(target, TokenizeConfig(**dataset.config).thinking)
    return dataset, Dataset.open(root, corpus_path), chats


def _run_unit(dataset: Dataset, corpus: Dataset, chats: _Chats, unit: str) -> dict[str, int]:
    config = TokenizeConfig(**dataset.config)
    start = int(unit.removeprefix("part-")) * config.rows_per_part
    rows = read_rows(corpus, "train", start, start + config.rows_per_part)
    record = _write_part(dataset, unit, _tokenize(chats, list(rows), config))
    record["target"] = chats.target.model_dump(mode="json")
    dataset.commit(unit, record)
    return record["counts"]


def seal(dataset: Dataset, corpus: Dataset) -> dict:
    """Plans the packs, writes the Zarr group and then the manifest.

    Writing again gives the same bytes, so a seal that was killed is simply repeated. Holds all tokens in
    memory, at 5 bytes each.

    Raises:
        InputError: nothing, or everything, is supervised: the template does not fit the corpus.
        IncompleteError: a part has no commit record.
    """
    every = units(dataset, corpus)
    if missing(dataset, corpus) or dataset.complete:
        return dataset.seal(every, {})  # says what is missing, or returns the manifest that stands
    config = TokenizeConfig(**dataset.config)
    records = dataset.records(every)
    counts: Counter[str] = Counter()
    rejected: Counter[str] = Counter()
    sources: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for record in records.values():
        counts.update(record["counts"])
        rejected.update(record["rejected"])
        for name, of_source in record["sources"].items():
            sources[name].update(of_source)
    _check_supervision(counts, rejected)
    parts = [_read_part(dataset, records[unit]["part"]) for unit in every if records[unit]["part"]]
    contract = _contract(dataset)
    sizes = write_packed(dataset.storage, parts, config.pack_tokens, contract)
    facts = {
        **sizes,
        "supervised_tokens": counts["supervised"],
        "fill": sizes["total_tokens"] / (sizes["num_packs"] * config.pack_tokens),
        "rows_in": counts["rows"],
        "rows_kept": counts["rows"] - rejected.total(),
        "rejected": dict(rejected),
        "sources": {name: dict(sources[name]) for name in sorted(sources)},
        "cut": counts["cut"],
        "history_rewritten": counts["history_rewritten"],
        "unsupervised_turns": counts["unsupervised_turns"],
        "reasoning_left_out": counts["reasoning_left_out"],
        "content_left_out": counts["content_left_out"],
        "dropped_samples": counts["dropped_samples"],
        "renders_per_row": counts["renders"] / counts["rows"],
        "encoded_per_printed_token": counts["encoded_tokens"] / max(counts["printed_tokens"], 1),
        "target": records[every[0]]["target"],  # any that has this tokenizer
        "contract": contract,
    }
    return dataset.seal(every, facts)


def source_table(dataset: Dataset) -> list[dict]:
    """One line for each source of the corpus, for people."""
    return [
        {
            "source": name,
            "rows": counts["rows"],
            "rejected": counts.get("rejected", 0),
            "samples": counts.get("samples", 0),
            "tokens": counts.get("tokens", 0),
            "supervised share": round(
                counts.get("supervised", 0) / max(counts.get("tokens", 0), 1), 3
            ),
        }
        for name, counts in dataset.facts["sources"].items()
    ]


def units(dataset: Dataset, corpus: Dataset) -> list[str]:
    """All parts, in order."""
    parts = -(-num_rows(corpus, "train") // dataset.config["rows_per_part"])
    return [f"part-{index:06d}" for index in range(parts)]


def _contract(dataset: Dataset) -> dict:
    """What a reader compares before it uses these tokens with a target."""
    return {
        "tokenizer_hash": dataset.request["inputs"]["tokenizer"],
        "template_hash": dataset.request["inputs"]["template"],
        "thinking": dataset.config["thinking"],
    }


def _check_supervision(counts: Counter[str], rejected: Counter[str]) -> None:
    if 0 < counts["supervised"] < counts["tokens"]:
        return
    share = "all" if counts["supervised"] else "none"
    most = "; ".join(f"{times} rows: {reason}" for reason, times in rejected.most_common(3))
    raise InputError(
        f"{share} of the {counts['tokens']} tokens would be trained on ({most or 'no row rejected'}); "
        "use a corpus with questions and answers that the target's chat template prints"
    )


# --- one part ----------------------------------------------------------------------------------


class _Chats:
    """The target's chat template in the thinking mode of each row."""

    def __init__(self, target: TargetConfig, thinking: bool) -> None:
        self.target, self._thinking = target, thinking
        self._tokenizer = load_tokenizer(target)
        self._by_mode: dict[bool, Chat] = {}
        self.any = self._in_mode(thinking)

    def of(self, row: Row) -> Chat:
        """In the mode that the row was answered in, or that of the configuration where it does not say."""
        return self._in_mode(row.metadata.get("asked_to_think", self._thinking))

    def _in_mode(self, mode: bool) -> Chat:
        if mode not in self._by_mode:
            self._by_mode[mode] = Chat(self._tokenizer, mode, self.target.template_options)
        return self._by_mode[mode]

    def take_counts(self) -> Counter[str]:
        """Renders and encoded tokens since the last call."""
        taken: Counter[str] = Counter()
        for chat in self._by_mode.values():
            taken += chat.counts
            chat.counts.clear()
        return taken


class _Part:
    """The samples of some rows, and what became of every row."""

    def __init__(self, config: TokenizeConfig) -> None:
        self.counts: Counter[str] = Counter()
        self.sources: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.rejects: list[dict] = []
        self.row_ids: list[str] = []
        self.input_ids: list[np.ndarray] = []
        self.loss_mask: list[np.ndarray] = []
        self._pack_tokens, self._too_long = config.pack_tokens, config.too_long

    def reject(self, row: Row, reason: str, detail: str = "") -> None:
        self.rejects.append({"id": row.id, "reason": reason, "detail": detail})
        self.sources[row.source]["rejected"] += 1

    def add(self, row: Row, samples: list[Sample]) -> None:
        """Keeps the samples that fit; a row without any is rejected."""
        reasons = [reason for sample in samples if (reason := self._add(row, sample))]
        self.counts["dropped_samples"] += len(reasons)
        if len(reasons) == len(samples):
            self.reject(row, reasons[0])

    def _add(self, row: Row, sample: Sample) -> str:
        """Adds one sample, or returns why not."""
        spans, stop = sample.spans, min(len(sample.input_ids), self._pack_tokens)
        longer = len(sample.input_ids) > stop
        self.counts["printed_tokens"] += len(sample.input_ids)
        if longer and self._too_long == "drop":
            return "longer than a pack"
        if longer and self._too_long == "cut at turn":
            spans = [span for span in spans if span[1] <= stop]
            stop = spans[-1][1] if spans else 0
        ids = np.array(sample.input_ids[:stop], dtype=np.uint32)
        mask = np.zeros(len(ids), dtype=np.uint8)
        for first, end in spans:
            mask[first:end] = 1
        supervised = int(mask.sum())
        if not supervised:
            return "no supervised token before the cut" if longer else "no supervised token"
        self.row_ids.append(row.id)
        self.input_ids.append(ids)
        self.loss_mask.append(mask)
        self.counts.update(tokens=len(ids), supervised=supervised, cut=int(longer))
        self.sources[row.source].update(samples=1, tokens=len(ids), supervised=supervised)
        return ""


def _tokenize(chats: _Chats, rows: list[Row], config: TokenizeConfig) -> _Part:
    """Renders all rows, encodes the texts in one call, masks, and checks by decoding."""
    part = _Part(config)
    planned: list[tuple[Row, list[Rendering]]] = []
    for row in rows:
        part.counts["rows"] += 1
        part.sources[row.source]["rows"] += 1
        if tokens := row.metadata.get("tokens"):
            _add_given(part, row, tokens, len(chats.any.tokenizer))
            continue
        try:
            found, unsupervised = renderings(chats.of(row), row)
        except Unrenderable as error:
            part.reject(row, "template cannot print it", str(error))
            continue
        part.counts["unsupervised_turns"] += unsupervised
        part.counts["history_rewritten"] += len(found) > 1
        part.counts["reasoning_left_out"] += left_out(row, found, "reasoning_content")
        part.counts["content_left_out"] += left_out(row, found, "content")
        if found:
            planned.append((row, found))
        else:
            part.reject(row, "prompt is no prefix" if unsupervised else "no assistant turn")
    texts = [[rendering.text for rendering in found] for _, found in planned]
    encoded = itertools.chain.from_iterable(chats.any.encode_chains(texts))
    made: list[tuple[Row, list[tuple[Rendering, Sample]]]] = []
    for row, found in planned:
        chat = chats.of(row)
        made.append(
            (row, [(it, sample) for it in found for sample in samples_of(chat, it, *next(encoded))])
        )
    spans = [ids[a:b] for _, pairs in made for _, (ids, spans, _) in pairs for a, b in spans]
    spoken = iter(chats.any.decode_all(spans))
    for row, pairs in made:
        said = [list(itertools.islice(spoken, len(sample.spans))) for _, sample in pairs]
        if all(survives(chats.any, *pair, texts) for pair, texts in zip(pairs, said, strict=True)):
            part.add(row, [sample for _, sample in pairs])
        else:
            part.reject(row, "answer does not survive the tokenizer")
    part.counts += chats.take_counts()
    return part


def _add_given(part: _Part, row: Row, tokens: dict, vocab_size: int) -> None:
    """A row that came tokenized is one sample, as it came."""
    ids, mask = tokens["input_ids"], np.array(tokens["loss_mask"], dtype=np.int8)
    if max(ids) >= vocab_size:
        part.reject(row, "token is not in the vocabulary", str(max(ids)))
        return
    borders = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    spans = [(int(a), int(b)) for a, b in borders.reshape(-1, 2)]
    part.add(row, [Sample(ids, spans, [])])


def _write_part(dataset: Dataset, unit: str, part: _Part) -> dict:
    """Writes samples and rejects. Returns the commit record; `part` is None without samples."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    record = {
        "part": None,
        "rejects": "",
        "counts": {name: int(count) for name, count in part.counts.items()},
        "sources": {name: dict(counts) for name, counts in part.sources.items()},
        "rejected": dict(Counter(reject["reason"] for reject in part.rejects)),
    }
    if part.row_ids:
        columns = {
            "id": pa.array(part.row_ids, pa.string()),
            "input_ids": pa.array(part.input_ids, pa.large_list(pa.uint32())),
            "loss_mask": pa.array(part.loss_mask, pa.large_list(pa.uint8())),
        }
        sink = io.BytesIO()
        pq.write_table(pa.table(columns), sink, compression="zstd")
        data = sink.getvalue()
        key = dataset.storage.put_fresh(f"parts/{unit}", ".parquet", data)
        record["part"] = {"key": key, "sha256": sha256(data)}
    if part.rejects:
        lines = "".join(json.dumps(reject) + "\n" for reject in part.rejects).encode()
        record["rejects"] = dataset.storage.put_fresh(f"rejects/{unit}", ".jsonl", lines)
    return record


def _read_part(dataset: Dataset, part: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lengths, and all token ids and masks of the part one behind the other."""
    import pyarrow.parquet as pq

    data = dataset.storage.get(part["key"])
    if sha256(data) != part["sha256"]:
        raise CorruptError(
            f"{dataset.url}/{part['key']} does not match its commit record; it was altered or cut; "
            "delete the dataset's folder and tokenize again"
        )
    table = pq.read_table(io.BytesIO(data)).combine_chunks()
    ids, mask = (table[name].combine_chunks() for name in ("input_ids", "loss_mask"))
    lengths = ids.value_lengths().to_numpy().astype(np.int64)
    return lengths, ids.flatten().to_numpy(), mask.flatten().to_numpy()


# --- Zarr --------------------------------------------------------------------------------------


def write_packed(
    storage: Storage,
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
    pack_tokens: int,
    contract: dict,
) -> dict[str, Any]:
    """Plans the packs, writes the samples in their order and where each lies; returns facts for the manifest.

    Zarr reads an object that was lost as zeros, so each pack has a checksum, and the arrays of places are named
    by their hash.

    Args:
        parts: lengths of the samples, int64, and all token ids and masks one behind the other.
        contract: of the dataset, for whoever reads the arrays without its manifest.
    """
    import zarr

    lengths = np.concatenate([part_lengths for part_lengths, _, _ in parts])
    pack, row, num_packs = plan_packs(lengths, pack_tokens)
    order = np.lexsort((row, pack))
    places = {
        "offset": np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int64),
        "pack": pack[order],
        "row": row[order],
        "checksum": np.zeros(num_packs, np.uint32),
    }
    total = int(places["offset"][-1])
    # Mode "a" leaves everything else below the prefix alone; overwriting a group would delete it.
    group: Any = zarr.open_group(storage.zarr_store(), mode="a", zarr_format=3)
    group.update_attributes({**contract, "pack_tokens": pack_tokens})

    def array_of(name: str, length: int, dtype: Any) -> Any:
        return group.require_array(
            name,
            shape=(length,),
            dtype=dtype,
            chunks=(min(_CHUNK, length),),
            shards=(_SHARD,) if length > _CHUNK else None,
        )

    for column, name in enumerate(("input_ids", "loss_mask"), 1):
        array = array_of(name, total, parts[0][column].dtype)
        samples = [
            sample for part in parts for sample in np.split(part[column], np.cumsum(part[0])[:-1])
        ]
        for i in order:
            checksum = int(places["checksum"][pack[i]])
            places["checksum"][pack[i]] = zlib.crc32(samples[i].data, checksum)
        start = 0
        for block in _blocks(samples[i] for i in order):
            array[start : start + len(block)] = block
            start += len(block)
    for name, values in places.items():
        array_of(name, len(values), values.dtype)[:] = values
    return {
        "num_samples": len(lengths),
        "num_packs": num_packs,
        "pack_tokens": pack_tokens,
        "total_tokens": total,
        "places_sha256": _digest(places),
    }


def _digest(places: dict[str, np.ndarray]) -> str:
    return sha256(b"".join(values.tobytes() for values in places.values()))


def _blocks(samples: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The samples one behind the other, cut where objects begin."""
    gathered: list[np.ndarray] = []
    size = 0
    for sample in samples:
        gathered.append(sample)
        size += len(sample)
        if size >= _SHARD:
            joined = np.concatenate(gathered)
            whole = size - size % _SHARD
            yield joined[:whole]
            gathered, size = [joined[whole:]], size - whole
    yield np.concatenate(gathered)


class Tokens:
    """A sealed tokens dataset: samples and packs, read from any thread.

    Attributes:
        num_samples, num_packs, pack_tokens: sizes.
        offset: int64 [num_samples + 1], first token of each sample in the arrays.
        pack, row: int32 [num_samples], where each sample lies. `pack` never decreases.
        contract: tokenizer_hash, template_hash, thinking.
    """

    def __init__(self, dataset: Dataset) -> None:
        import zarr

        facts = dataset.require_stage(STAGE).facts
        group: Any = zarr.open_group(dataset.storage.zarr_store(read_only=True), mode="r")
        self.dataset = dataset
        self.num_samples: int = facts["num_samples"]
        self.num_packs: int = facts["num_packs"]
        self.pack_tokens: int = facts["pack_tokens"]
        self.contract: dict = facts["contract"]
        self.offset, self.pack, self.row = (group[name][:] for name in ("offset", "pack", "row"))
        self._checksum = None
        if "places_sha256" in facts:
            self._checksum = group["checksum"][:]
            places = {"offset": self.offset, "pack": self.pack, "row": self.row}
            if _digest({**places, "checksum": self._checksum}) != facts["places_sha256"]:
                raise self._corrupt("where the samples lie does")
        self._input_ids, self._loss_mask = group["input_ids"], group["loss_mask"]
        if facts["total_tokens"] * 5 < _WHOLE_BYTES:
            self._input_ids, self._loss_mask = self._input_ids[:], self._loss_mask[:]

    def _corrupt(self, what: str) -> CorruptError:
        return CorruptError(
            f"{self.dataset.url}: {what} not match the checksum; an object was lost or altered, tokenize again "
            "with force"
        )

    @classmethod
    def open(cls, dataset: Dataset) -> Tokens:
        """Opens it; raises MismatchError or IncompleteError when it is not a complete tokens dataset."""
        return cls(dataset)

    def sample(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """input_ids uint32 [length] and loss_mask uint8 [length] of one sample."""
        part = slice(self.offset[index], self.offset[index + 1])
        return self._input_ids[part], self._loss_mask[part]

    def read_pack(self, index: int) -> Pack:
        """One pack; its samples lie behind each other in the arrays, so this is one read of each."""
        first, stop = np.searchsorted(self.pack, [index, index + 1])
        assert first < stop, f"pack {index} of {self.num_packs}"
        part = slice(self.offset[first], self.offset[stop])
        ids = np.zeros(self.pack_tokens, dtype=np.uint32)
        mask = np.zeros(self.pack_tokens, dtype=np.uint8)
        ids[: part.stop - part.start] = self._input_ids[part]
        mask[: part.stop - part.start] = self._loss_mask[part]
        if self._checksum is not None:
            size = part.stop - part.start
            checksum = zlib.crc32(mask[:size].data, zlib.crc32(ids[:size].data))
            if checksum != self._checksum[index]:
                raise self._corrupt(f"the tokens of pack {index} do")
        return Pack(
            index=index,
            input_ids=ids,
            loss_mask=mask,
            start=self.row[first:stop],
            length=np.diff(self.offset[first : stop + 1]).astype(np.int32),
            samples=np.arange(first, stop, dtype=np.int32),
        )
