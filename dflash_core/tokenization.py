"""Conversations to token ids, loss masks and the pack plan.

The mask covers what the target would have generated: from the first token after the generation prompt to
the end-of-turn token, included. The borders come from rendering the conversation up to each assistant
turn, without and with it, and comparing; text is never searched for markers, which users may write too.

Layout of a sealed dataset, one Zarr v3 group at its root, samples in the order of the packs:

    input_ids uint32 [total_tokens]      loss_mask uint8 [total_tokens]
    offset    int64  [num_samples + 1]   pack, row int32 [num_samples]
"""

from __future__ import annotations

import io
import json
import time
from bisect import bisect_left
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from dflash_core.chat import Chat, Unrenderable
from dflash_core.config import TargetConfig, TokenizeConfig
from dflash_core.corpus.rows import CORPORA, Row, num_rows, read_rows
from dflash_core.errors import CorruptError, InputError, MismatchError
from dflash_core.manifest import Dataset, sha256
from dflash_core.packing import Pack, plan_packs
from dflash_core.progress import Progress, silent
from dflash_core.storage import Storage
from dflash_core.target import identify, load_tokenizer

STAGE = "tokens"
VERSION = 1

_CHUNK, _SHARD = 2**16, 2**22  # tokens of the smallest read and of one object
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
    chat = Chat(load_tokenizer(target), config.thinking)
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
) -> None:
    """Tokenizes the parts `todo` and commits each."""
    config = TokenizeConfig(**dataset.config)
    chat = Chat(load_tokenizer(target), config.thinking)
    for done, unit in enumerate(todo):
        start = int(unit.removeprefix("part-")) * config.rows_per_part
        rows = read_rows(corpus, "train", start, start + config.rows_per_part)
        began = time.monotonic()
        record = _write_part(dataset, unit, _tokenize(chat, list(rows), config))
        dataset.commit(unit, record)
        tokens_per_s = record["counts"].get("tokens", 0) / (time.monotonic() - began)
        progress(done + 1, len(todo), {"tokens_per_s": round(tokens_per_s)})


def seal(dataset: Dataset, corpus: Dataset) -> dict:
    """Plans the packs, writes the Zarr group and then the manifest.

    Writing again gives the same bytes, so a seal that was killed is simply repeated. Holds all tokens in
    memory, twice, at 5 bytes each.

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
    for record in records.values():
        counts.update(record["counts"])
        rejected.update(record["rejected"])
    _check_supervision(counts, rejected)
    parts = [_read_part(dataset, records[unit]["part"]) for unit in every if records[unit]["part"]]
    lengths, input_ids, loss_mask = (np.concatenate(column) for column in zip(*parts, strict=True))
    pack, row, num_packs = plan_packs(lengths, config.pack_tokens)
    order = np.lexsort((row, pack))
    facts = {
        "num_samples": len(lengths),
        "num_packs": num_packs,
        "pack_tokens": config.pack_tokens,
        "total_tokens": counts["tokens"],
        "supervised_tokens": counts["supervised"],
        "fill": counts["tokens"] / (num_packs * config.pack_tokens),
        "rows_in": counts["rows"],
        "rows_kept": counts["rows"] - rejected.total(),
        "rejected": dict(rejected),
        "cut": counts["cut"],
        "history_rewritten": counts["history_rewritten"],
        "unsupervised_turns": counts["unsupervised_turns"],
        "dropped_samples": counts["dropped_samples"],
        "contract": _contract(dataset),
    }
    arrays = {
        "input_ids": _gather(input_ids, lengths, order),
        "loss_mask": _gather(loss_mask, lengths, order),
        "offset": np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int64),
        "pack": pack[order],
        "row": row[order],
    }
    _write_zarr(dataset.storage, arrays, facts)
    return dataset.seal(every, facts)


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


# --- one conversation --------------------------------------------------------------------------


class Turn(NamedTuple):
    """A supervised turn, in characters of its rendering.

    `begin` is the end of the generation prompt, `end` the end of what the template prints for the turn.
    `ended` is False for an answer that was cut by length; `end` is then the end of what the target wrote,
    because the end of the turn comes from the template and is left out of the mask.
    """

    begin: int
    end: int
    ended: bool


class Rendering(NamedTuple):
    """A text that becomes a sample, and its supervised turns in order; the last one ends the text."""

    text: str
    turns: list[Turn]


class Sample(NamedTuple):
    """Token ids, and the spans (start, stop) of them that the target would have generated."""

    input_ids: list[int]
    spans: list[tuple[int, int]]


def renderings(chat: Chat, row: Row) -> tuple[list[Rendering], int]:
    """The texts that together show each assistant turn as the target was served it.

    A turn lies in the text of a later one when that text begins with everything up to and including the
    turn. Templates that never rewrite history thus give one text for the whole conversation; one that
    does (Qwen3 drops earlier reasoning) gives a text for each turn it prints differently later.

    Returns:
        The renderings in the order of their last turns, and how many turns cannot be supervised because
        the template prints them otherwise than its own generation prompt begins.

    Raises:
        Unrenderable: the template cannot print the conversation, or leaves a tool call out.
    """
    places = [index for index, message in enumerate(row.messages) if message["role"] == "assistant"]
    prompts = [chat.render(row.messages[:place], row.tools, prompt=True) for place in places]
    fulls = [chat.render(row.messages[: place + 1], row.tools, prompt=False) for place in places]
    for place, prompt, full in zip(places, prompts, fulls, strict=True):
        for call in row.messages[place].get("tool_calls") or ():
            if call["function"]["name"] not in full.removeprefix(prompt):
                raise Unrenderable("tool calls are left out")
    servable = [k for k in range(len(places)) if fulls[k].startswith(prompts[k])]
    uncovered, found = set(servable), []
    for last in reversed(servable):
        if last not in uncovered:
            continue
        inside = [k for k in sorted(uncovered) if k <= last and fulls[last].startswith(fulls[k])]
        uncovered -= set(inside)
        turns = [Turn(len(prompts[k]), len(fulls[k]), True) for k in inside]
        if row.metadata.get("cut_by_length") and last == len(places) - 1:
            turns[-1] = _cut_turn(chat, row, turns[-1])
        found.append(Rendering(fulls[last], turns))
    return found[::-1], len(places) - len(servable)


def _cut_turn(chat: Chat, row: Row, turn: Turn) -> Turn:
    """The turn of an answer that the target did not end; regeneration noted how much it wrote."""
    written = row.metadata.get("written_characters")
    end = turn.end - len(chat.after_answer) if written is None else turn.begin + written
    return Turn(turn.begin, min(end, turn.end), False)


def samples_of(
    chat: Chat, rendering: Rendering, ids: list[int], offsets: list[tuple[int, int]]
) -> list[Sample]:
    """Token spans of the turns of an encoded rendering.

    Nearly always one sample. Where the tokenizer merges the end of a prompt with the beginning of its
    answer, the prompt's tokens are no prefix of `ids`; such a turn becomes a sample of its own, made of
    the prompt's tokens and the answer's as the server would have had them.

    Args:
        chat: the template and tokenizer.
        rendering: the text.
        ids: its tokens.
        offsets: for each token, the characters (start, end) it stands for.
    """
    starts = [start for start, _ in offsets]
    samples, spans = [], []
    for turn in rendering.turns:
        first = bisect_left(starts, turn.begin)
        if _is_border(chat, rendering.text, ids, offsets, first, turn.begin):
            stop = bisect_left(starts, turn.end)
            while not turn.ended and stop > first and offsets[stop - 1][1] > turn.end:
                stop -= 1
            spans.append((first, _stop(chat, ids, first, stop) if turn.ended else stop))
            continue
        prompt = chat.encode(rendering.text[: turn.begin])
        whole = prompt + chat.encode(rendering.text[turn.begin : turn.end])
        stop = _stop(chat, whole, len(prompt), len(whole)) if turn.ended else len(whole)
        samples.append(Sample(whole, [(len(prompt), stop)]))
    return [*samples, Sample(ids, spans)] if spans else samples


def _stop(chat: Chat, ids: list[int], first: int, stop: int) -> int:
    """Behind the last end-of-turn token before `stop`; one in the answer's own text is earlier."""
    while stop > first and ids[stop - 1] != chat.end_of_turn:
        stop -= 1
    return stop


def _is_border(
    chat: Chat, text: str, ids: list[int], offsets: list[tuple[int, int]], first: int, begin: int
) -> bool:
    """Whether the tokens before `first` are those of text[:begin] alone.

    Encoding that text anew would cost a pass for each turn. Added tokens cut a text into pieces that are
    encoded apart, so the piece from the last of them to the border decides.
    """
    if first == 0 or offsets[first - 1][1] > begin:
        return begin == 0
    since = first - 1
    while since > 0 and ids[since] not in chat.separators:
        since -= 1
    return ids[since:first] == chat.encode(text[offsets[since][0] : begin])


# --- one part ----------------------------------------------------------------------------------


class _Part:
    """The samples of some rows, and what became of every row."""

    def __init__(self, pack_tokens: int, drop: bool) -> None:
        self.counts: Counter[str] = Counter()
        self.rejects: list[dict] = []
        self.row_ids: list[str] = []
        self.input_ids: list[np.ndarray] = []
        self.loss_mask: list[np.ndarray] = []
        self._pack_tokens, self._drop = pack_tokens, drop

    def reject(self, row: Row, reason: str, detail: str = "") -> None:
        self.rejects.append({"id": row.id, "reason": reason, "detail": detail})

    def add(self, row: Row, samples: list[Sample]) -> None:
        """Keeps the samples that fit; a row without any is rejected."""
        reasons = [reason for sample in samples if (reason := self._add(row, sample))]
        self.counts["dropped_samples"] += len(reasons)
        if len(reasons) == len(samples):
            self.reject(row, reasons[0])

    def _add(self, row: Row, sample: Sample) -> str:
        """Adds one sample, or returns why not."""
        longer = len(sample.input_ids) > self._pack_tokens
        if longer and self._drop:
            return "longer than a pack"
        ids = np.array(sample.input_ids[: self._pack_tokens], dtype=np.uint32)
        mask = np.zeros(len(ids), dtype=np.uint8)
        for first, stop in sample.spans:
            mask[first:stop] = 1
        supervised = int(mask.sum())
        if not supervised:
            return "no supervised token before the cut" if longer else "no supervised token"
        self.row_ids.append(row.id)
        self.input_ids.append(ids)
        self.loss_mask.append(mask)
        self.counts.update(tokens=len(ids), supervised=supervised, cut=int(longer))
        return ""


def _tokenize(chat: Chat, rows: list[Row], config: TokenizeConfig) -> _Part:
    """Renders all rows, encodes the texts in one call, and masks."""
    part = _Part(config.pack_tokens, config.too_long == "drop")
    planned: list[tuple[Row, list[Rendering]]] = []
    for row in rows:
        part.counts["rows"] += 1
        try:
            found, unsupervised = renderings(chat, row)
        except Unrenderable as error:
            part.reject(row, "template cannot print it", str(error))
            continue
        part.counts["unsupervised_turns"] += unsupervised
        part.counts["history_rewritten"] += len(found) > 1
        if found:
            planned.append((row, found))
        else:
            part.reject(row, "prompt is no prefix" if unsupervised else "no assistant turn")
    texts = [rendering.text for _, found in planned for rendering in found]
    encoded = iter(chat.encode_with_offsets(texts))
    for row, found in planned:
        samples = [samples_of(chat, rendering, *next(encoded)) for rendering in found]
        part.add(row, [sample for group in samples for sample in group])
    return part


def _write_part(dataset: Dataset, unit: str, part: _Part) -> dict:
    """Writes samples and rejects. Returns the commit record; `part` is None without samples."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    record = {
        "part": None,
        "rejects": "",
        "counts": {name: int(count) for name, count in part.counts.items()},
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


def _gather(values: np.ndarray, lengths: np.ndarray, order: np.ndarray) -> np.ndarray:
    """The samples of `values` [total_tokens], one behind the other in another order."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    return np.concatenate([values[starts[i] : ends[i]] for i in order])


def _write_zarr(storage: Storage, arrays: dict[str, np.ndarray], facts: dict) -> None:
    import zarr

    # Mode "a" leaves everything else below the prefix alone; overwriting a group would delete it.
    group = zarr.open_group(storage.zarr_store(), mode="a", zarr_format=3)
    group.update_attributes({**facts["contract"], "pack_tokens": facts["pack_tokens"]})
    for name, values in arrays.items():
        array = group.require_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            chunks=(min(_CHUNK, len(values)),),
            shards=(_SHARD,) if len(values) > _CHUNK else None,
        )
        array[:] = values


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
        self._input_ids, self._loss_mask = group["input_ids"], group["loss_mask"]
        if facts["total_tokens"] * 5 < _WHOLE_BYTES:
            self._input_ids, self._loss_mask = self._input_ids[:], self._loss_mask[:]

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
        return Pack(
            index=index,
            input_ids=ids,
            loss_mask=mask,
            start=self.row[first:stop],
            length=np.diff(self.offset[first : stop + 1]).astype(np.int32),
            samples=np.arange(first, stop, dtype=np.int32),
        )
