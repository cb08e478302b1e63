import json

import pytest

from dflash_core.config import CurateConfig, SourceConfig
from dflash_core.corpus import curation, rows
from dflash_core.corpus.rows import (
    PartWriter,
    Row,
    content_id,
    from_parquet,
    is_held_out,
    read_rows,
    to_parquet,
)
from dflash_core.errors import CorruptError, IncompleteError, InputError
from dflash_core.storage import Storage
from tests.chats import assistant, user


@pytest.fixture
def root(tmp_path):
    return Storage.from_url(str(tmp_path / "root"))


def chat(text, **more):
    return {"messages": [user(f"ask {text}"), assistant(f"answer {text}")], **more}


def source(tmp_path, name, records, **changes):
    path = tmp_path / f"{name}.jsonl"
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("".join(f"{line}\n" for line in lines))
    return SourceConfig(name=name, reader="openai", path=str(path), **changes)


def curate(root, *sources, **changes):
    config = CurateConfig(sources=list(sources), **changes)
    dataset = curation.plan(root, "test", config)
    curation.run_units(dataset, config, curation.missing(dataset))
    return dataset, curation.seal(dataset)["facts"]


def texts(dataset, split="train"):
    return [row.messages[0]["content"].removeprefix("ask ") for row in read_rows(dataset, split)]


MALFORMED = [
    "{cut",
    "3",
    "null",
    '"text"',
    {},
    {"messages": []},
    {"messages": [3]},
    {"messages": [assistant("first")]},
    {"messages": [user("x"), assistant("")]},
    {"messages": [user("x"), assistant("a"), assistant("b")]},
    {"messages": [user("x"), assistant(None, tool_calls=[{"name": "f", "arguments": "{"}])]},
    {"messages": [user("y" * 2000), assistant("long")]},
    chat("odd metadata", metadata={"a": float("nan")}),
]


def test_no_row_is_lost_whatever_it_holds(root, tmp_path):
    records = [chat("a"), *MALFORMED, chat("b"), chat("a")]
    dataset, facts = curate(
        root, source(tmp_path, "s", records), max_characters=1000, held_out_fraction=0
    )
    counts = facts["sources"]["s"]
    assert texts(dataset) == ["a", "b"]
    assert counts["rows_in"] == len(records)
    assert sum(counts["rejected"].values()) == len(MALFORMED)
    assert counts["duplicates"] == 1
    assert counts["kept"] == 2
    rejects = [
        json.loads(line)
        for key in counts["rejects"]
        for line in dataset.storage.get(key).splitlines()
    ]
    assert [reject["line"] for reject in rejects] == list(range(2, 2 + len(MALFORMED)))
    assert all(reject["reason"] and reject["file"] == "s.jsonl" for reject in rejects)


def test_a_duplicate_belongs_to_the_first_source_that_has_it(root, tmp_path):
    one = source(tmp_path, "one", [chat("a"), chat("b")])
    again = [
        {"messages": [{"role": "human", "content": "ask b"}, assistant("answer b")]},
        chat("c"),
    ]
    dataset, facts = curate(root, one, source(tmp_path, "two", again), held_out_fraction=0)
    assert [(row.source, *row.messages[:1]) for row in read_rows(dataset, "train")] == [
        ("one", user("ask a")),
        ("one", user("ask b")),
        ("two", user("ask c")),
    ]
    assert facts["sources"]["two"]["duplicates"] == 1
    assert facts["sources"]["two"]["kept"] == 1


def test_rows_are_held_out_by_their_group_or_by_themselves(root, tmp_path):
    grouped = [chat(f"{group} {i}", group=group) for group in "abcdefgh" for i in range(3)]
    alone = [chat(f"alone {i}") for i in range(60)]
    dataset, facts = curate(root, source(tmp_path, "s", grouped + alone), held_out_fraction=0.4)
    held = texts(dataset, "held_out")
    for group in "abcdefgh":
        inside = sum(text.startswith(f"{group} ") for text in held)
        assert inside == (3 if is_held_out(group, 0.4) else 0)
    for row in read_rows(dataset, "held_out"):
        assert "group" in row.metadata or is_held_out(row.id, 0.4)
    assert facts["num_held_out"] + facts["num_train"] == 84
    assert facts["num_held_out"] == len(held) > 0
    # Other rows beside them, and another fraction: what was held out stays held out.
    fewer, _ = curate(root, source(tmp_path, "t", grouped), held_out_fraction=0.6)
    kept_out = set(texts(fewer, "held_out"))
    assert {text for text in held if not text.startswith("alone")} <= kept_out


def test_a_limit_takes_the_rows_with_the_lowest_hashes_in_any_order(root, tmp_path):
    records = [chat(str(i)) for i in range(30)]
    dataset, facts = curate(
        root, source(tmp_path, "s", records + records[:5], limit=7), held_out_fraction=0
    )
    ids = sorted(content_id(record["messages"], None) for record in records)
    assert [row.id for row in read_rows(dataset, "train")] == ids[:7]
    counts = facts["sources"]["s"]
    assert (counts["kept"], counts["over_limit"], counts["duplicates"]) == (7, 23, 5)


def test_the_report_counts_turns_characters_calls_and_prompts(root, tmp_path):
    call = {"name": "f", "arguments": {"x": 1}}
    records = [
        {"messages": [user("abc"), assistant("de"), user("f"), assistant("g")]},
        {"messages": [user("h"), assistant(None, tool_calls=[call])]},
        {"messages": [user("i")]},
    ]
    dataset, facts = curate(root, source(tmp_path, "s", records), held_out_fraction=0)
    counts = facts["sources"]["s"]
    assert (counts["turns"], counts["characters"], counts["prompt_only"]) == (3, 7 + 9 + 1, 1)
    assert counts["tool_call_share"] == pytest.approx(1 / 3, abs=1e-4)
    assert [row.metadata.get("prompt_only") for row in read_rows(dataset, "train")] == [
        None,
        None,
        True,
    ]


def test_a_killed_run_continues_with_the_missing_sources(root, tmp_path, monkeypatch):
    sources = [source(tmp_path, name, [chat(name), chat("same")]) for name in ("a", "b", "c")]
    config = CurateConfig(sources=sources, held_out_fraction=0)
    dataset = curation.plan(root, "test", config)
    real, calls = curation._Source.run, []

    def dies_in_the_second_source(self, report):
        calls.append(self.source.name)
        if calls == ["a", "b"]:
            real(self, report)
            raise KeyboardInterrupt  # after its data is written, before its commit
        return real(self, report)

    monkeypatch.setattr(curation._Source, "run", dies_in_the_second_source)
    with pytest.raises(KeyboardInterrupt):
        curation.run_units(dataset, config, curation.missing(dataset))
    with pytest.raises(IncompleteError, match="3 of 4 units"):
        curation.seal(dataset)
    with pytest.raises(IncompleteError, match="source-001-b is not committed"):
        curation.run_units(dataset, config, ["publish"])
    again = curation.plan(root, "test", config)
    assert curation.missing(again) == ["source-001-b", "source-002-c", "publish"]
    curation.run_units(again, config, curation.missing(again))
    curation.seal(again)
    assert calls == ["a", "b", "b", "c"]
    assert texts(again) == ["a", "same", "b", "c"]
    assert curation.missing(again) == []


def test_the_same_content_elsewhere_is_the_same_corpus_and_other_content_another(root, tmp_path):
    config = CurateConfig(sources=[source(tmp_path, "s", [chat("a")])])
    first = curation.plan(root, "test", config).path
    (tmp_path / "moved").mkdir()
    moved = CurateConfig(sources=[source(tmp_path / "moved", "s", [chat("a")])])
    assert curation.plan(root, "test", moved).path == first
    source(tmp_path, "s", [chat("a"), chat("b")])
    assert curation.plan(root, "test", config).path != first


@pytest.mark.parametrize(
    ("names", "message"),
    [(["a", "a"], "must be unique"), (["a/b"], "made of letters"), ([], "sources is empty")],
)
def test_bad_source_names_are_refused(root, names, message):
    config = CurateConfig(sources=[SourceConfig(name=n, reader="openai") for n in names])
    with pytest.raises(InputError, match=message):
        curation.plan(root, "test", config)


def test_a_source_of_another_layout_is_refused_before_any_work(root, tmp_path):
    rows = ["{cut", {"text": "a"}, {"text": "b"}]
    reason = r"first 3 rows .* \(2 times: no messages column\).* expects OpenAI chat rows"
    with pytest.raises(InputError, match=reason):
        curation.plan(root, "test", CurateConfig(sources=[source(tmp_path, "s", rows)]))
    curation.plan(root, "test", CurateConfig(sources=[source(tmp_path, "u", [*rows, chat("x")])]))
    with pytest.raises(InputError, match="has no rows"):
        curation.plan(root, "test", CurateConfig(sources=[source(tmp_path, "t", [])]))


def test_a_source_whose_rows_are_all_rejected_is_refused_with_the_commonest_reason(root, tmp_path):
    with pytest.raises(InputError, match=r"read none of its 2 rows \(2 times: too many characters"):
        curate(root, source(tmp_path, "s", [chat("a"), chat("b")]), max_characters=5)


def test_rows_survive_parquet_and_a_changed_part_is_noticed(root, tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": "é"}'}}
    row = Row("id", "s", [user("a\u2028b"), assistant(None, tool_calls=[call])], [call], {"x": [1]})
    plain = Row("id2", "s", [user("a")], None, {})
    assert list(from_parquet(to_parquet([row, plain]))) == [row, plain]
    dataset, facts = curate(root, source(tmp_path, "s", [chat("a")]), held_out_fraction=0)
    dataset.storage.put(facts["parts"]["train"][0]["key"], to_parquet([row]))
    with pytest.raises(CorruptError, match="does not match its commit record"):
        list(read_rows(dataset, "train"))


def test_a_range_of_rows_fetches_only_its_own_parts(root, tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "PART_ROWS", 4)
    records = [chat(str(i)) for i in range(10)]
    dataset, facts = curate(root, source(tmp_path, "s", records), held_out_fraction=0)
    assert [part["rows"] for part in facts["parts"]["train"]] == [4, 4, 2]
    fetched = []
    real = rows.read_part
    monkeypatch.setattr(
        rows, "read_part", lambda storage, part: fetched.append(part) or real(storage, part)
    )
    assert [row.messages[0]["content"] for row in read_rows(dataset, "train", 5, 8)] == [
        "ask 5",
        "ask 6",
        "ask 7",
    ]
    assert fetched == facts["parts"]["train"][1:2]


def test_parts_are_closed_by_characters_too(root, monkeypatch):
    monkeypatch.setattr(rows, "PART_CHARACTERS", 10)
    writer = PartWriter(root, "p")
    for text in ("x" * 12, "y" * 6, "z" * 6):
        writer.write(Row(text, "s", [user(text)], None, {}))
    assert [part["rows"] for part in writer.close()] == [1, 2]
