"""Rows per second and peak memory of curation on synthetic rows.

    python benchmarks/curation.py --rows 1000000
    python benchmarks/curation.py --selection
    python benchmarks/curation.py --signatures

Three sources of conversations made of random words: 5 % of the rows repeat an earlier one, 5 % nearly do, 1 %
are malformed, 1 % hold an evaluation prompt. With --selection, time and memory of the only step that holds
something of every row, on random signatures of which a tenth repeat an earlier one. With --signatures, the time of MinHash signatures by
rensa and, where it is installed, by datasketch, on the same texts.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from dflash_core.config import CurateConfig, SourceConfig
from dflash_core.corpus import curation
from dflash_core.storage import Storage

SHARES = {"chats": 0.6, "tasks": 0.3, "tools": 0.1}
READERS = {"chats": "openai", "tasks": "alpaca", "tools": "glaive-function-calling-v2"}
PROMPT = " ".join(f"exam{i}" for i in range(30))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=0, help="0: one for each core")
    parser.add_argument(
        "--plain", action="store_true", help="no near-duplicates, no decontamination"
    )
    parser.add_argument("--selection", action="store_true", help="time the selection only")
    parser.add_argument("--signatures", action="store_true", help="time signatures only")
    arguments = parser.parse_args()
    if arguments.selection:
        time_selection(arguments.rows)
        return
    if arguments.signatures:
        compare_signatures()
        return
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        sources = write_sources(data, arguments.rows)
        curate(Path(folder), data, sources, arguments.processes, arguments.plain)


def write_sources(folder: Path, num_rows: int) -> list[SourceConfig]:
    """The three sources, written into a new folder."""
    folder.mkdir()
    (folder / "exam.jsonl").write_text(json.dumps({"prompt": PROMPT}))
    sources = []
    for name, share in SHARES.items():
        path = folder / f"{name}.jsonl"
        with path.open("w") as file:
            file.writelines(f"{line}\n" for line in rows(name, int(num_rows * share)))
        sources.append(SourceConfig(name=name, reader=READERS[name], path=str(path)))
        print(f"{name}: {path.stat().st_size / 1e6:,.0f} MB of JSON lines")
    return sources


def curate(
    folder: Path, data: Path, sources: list[SourceConfig], processes: int, plain: bool
) -> None:
    """Curates the sources unit by unit, and prints what each took."""
    deep = {"near_duplicates": 0.8, "decontaminate": [str(data / "exam.jsonl")]}
    config = CurateConfig(sources=sources, **({} if plain else deep))
    began, written_s = time.monotonic(), _processor_s()
    dataset = curation.plan(Storage.from_url(str(folder / "root")), "benchmark", config)
    print(f"plan: {time.monotonic() - began:.1f} s")
    for unit in curation.units(dataset):
        start = time.monotonic()
        curation.run_units(dataset, config, [unit], processes=processes)
        print(f"{unit}: {time.monotonic() - start:.1f} s")
    facts = curation.seal(dataset)["facts"]
    seconds = time.monotonic() - began
    for name, counts in facts["sources"].items():
        shown = {key: counts[key] for key in ("rows_in", "kept", "duplicates", "near_duplicates")}
        print(name, {**shown, "rejected": counts["rejected"]})
    num_rows = sum(counts["rows_in"] for counts in facts["sources"].values())
    print(f"{num_rows:,} rows in {seconds:.1f} s: {num_rows / seconds:,.0f} rows/s")
    print(f"processors: {_processor_s() - written_s:.0f} s in all processes together")
    print(
        f"peak memory: {_peak(resource.RUSAGE_SELF):.2f} GB, {_peak(resource.RUSAGE_CHILDREN):.2f} GB in the largest child"
    )


def _processor_s() -> float:
    """What this process and its ended children have used; tells more than the clock on a shared machine."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _peak(who: int) -> float:
    return resource.getrusage(who).ru_maxrss / 1e6


def rows(name: str, count: int) -> Iterator[str]:
    """JSON lines of one source."""
    rng = random.Random(name)
    vocabulary = [f"{rng.choice('bdfgklmnprst')}{rng.choice('aeiou')}{i:x}" for i in range(20_000)]
    recent: list[tuple[str, str]] = []
    for _ in range(count):
        question = " ".join(rng.choices(vocabulary, k=rng.randint(15, 60)))
        answer = " ".join(rng.choices(vocabulary, k=rng.randint(60, 300)))
        kind = rng.random()
        if kind < 0.1 and recent:
            question, answer = rng.choice(recent)
            answer += " indeed" * (kind < 0.05)  # equal, or nearly so
        elif kind < 0.11:
            question = f"{question} {PROMPT}"
        recent.append((question, answer))
        del recent[:-1000]
        line = json.dumps(_record(name, question, answer, rng))
        yield line[: len(line) // 2] if kind > 0.99 else line


def _record(name: str, question: str, answer: str, rng: random.Random) -> dict:
    if name == "tasks":
        return {"instruction": question, "input": "", "output": answer}
    if name == "chats":
        turns = [
            ("user", question),
            ("assistant", answer),
            ("user", "go on"),
            ("assistant", answer[::-1]),
        ]
        return {
            "messages": [
                {"role": role, "content": text}
                for role, text in turns[: 2 + 2 * (rng.random() < 0.3)]
            ]
        }
    tool = json.dumps({"name": "look_up", "description": question[:40], "parameters": {}}, indent=4)
    call = f'<functioncall> {{"name": "look_up", "arguments": \'{{"text": "{question[:30]}"}}\'}}'
    return {
        "system": f"SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n{tool}\n",
        "chat": f"USER: {question}\n\n\nASSISTANT: {call} <|endoftext|>\n\n\nFUNCTION RESPONSE: {{}}\n\n\nASSISTANT: {answer} <|endoftext|>\n\n\n",
    }


def time_selection(num_rows: int) -> None:
    """Prints seconds and peak memory of judging so many rows."""
    import numpy as np

    from dflash_core.corpus.deduplication import SLOTS
    from dflash_core.corpus.selection import KEPT, NEAR_DUPLICATE, Candidates, judge

    rng = np.random.default_rng(0)
    signatures = rng.integers(1, 2**32, (num_rows, SLOTS), np.uint32)
    copies = np.arange(9, num_rows, 10)
    signatures[copies] = signatures[rng.integers(0, copies)]
    signatures[copies, :10] += 1  # alike in 118 of 128 slots
    source = SourceConfig(name="rows", reader="openai")
    candidates = Candidates(
        sources=["rows"],
        files=[],
        table=None,
        source_N=np.zeros(num_rows, np.int16),
        row_N=np.arange(num_rows),
        id_N4=rng.integers(0, 2**64, (num_rows, 4), np.uint64),
        signature_NP=signatures,
    )
    start = time.monotonic()
    verdicts, _ = judge(candidates, CurateConfig(sources=[source], near_duplicates=0.8))
    seconds = time.monotonic() - start
    kept, alike = (int((verdicts == verdict).sum()) for verdict in (KEPT, NEAR_DUPLICATE))
    print(f"{num_rows:,} rows judged in {seconds:.1f} s: {kept:,} stay, {alike:,} near-duplicates")
    print(f"peak memory: {_peak(resource.RUSAGE_SELF):.2f} GB")


def compare_signatures(num_texts: int = 5000) -> None:
    """Prints microseconds a text for signatures of 128 slots over runs of five words."""
    from dflash_core.corpus.deduplication import SLOTS, signatures
    from dflash_core.corpus.grams import batches

    texts = [
        json.loads(line)["output"]
        for line in rows("tasks", num_texts + num_texts // 20)
        if line.endswith("}")
    ]
    texts = texts[:num_texts]
    start = time.monotonic()
    hashed_words = [words for _, words in batches(texts)]
    hashed = time.monotonic()
    for words in hashed_words:
        signatures(words)
    print(
        f"words: {(hashed - start) / len(texts) * 1e6:.0f} us, rensa: {(time.monotonic() - hashed) / len(texts) * 1e6:.0f} us"
    )
    try:
        import datasketch
    except ImportError:
        return
    start = time.monotonic()
    for text in texts:
        words = text.split()
        runs = [" ".join(words[i : i + 5]).encode() for i in range(len(words) - 4)]
        datasketch.MinHash(SLOTS).update_batch(runs)
    print(f"datasketch: {(time.monotonic() - start) / len(texts) * 1e6:.0f} us")


if __name__ == "__main__":
    main()
