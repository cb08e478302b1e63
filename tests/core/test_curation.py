import io
import json
import random
import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash_core.config import CurateConfig, FilterConfig, SourceConfig
from dflash_core.corpus import curation, report, rows, selection
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


def curate(root, *sources, processes=1, **changes):
    config = CurateConfig(sources=list(sources), **changes)
    dataset = curation.plan(root, "test", config)
    curation.run_units(dataset, config, curation.missing(dataset), processes=processes)
    return dataset, curation.seal(dataset)["facts"]


def quarantined(dataset, counts):
    return [
        json.loads(line)
        for key in counts["rejects"]
        for line in dataset.storage.get(key).splitlines()
    ]


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
    {"messages": [assistant("a"), assistant("b")]},
    {"messages": [user("x"), assistant(None, tool_calls=[{"name": "f", "arguments": "{"}])]},
    {"messages": [user("y" * 2000), assistant("long")]},
    chat("odd metadata", metadata={"a": float("nan")}),
]


def test_no_row_is_lost_whatever_it_holds(root, tmp_path):
    records = [chat("a"), *MALFORMED, chat("b"), chat("a")]
    dataset, facts = curate(
        root,
        source(tmp_path, "s", records),
        filters=FilterConfig(max_characters=1000),
        held_out_fraction=0,
    )
    counts = facts["sources"]["s"]
    assert texts(dataset) == ["a", "b"]
    assert counts["rows_in"] == len(records)
    assert sum(counts["rejected"].values()) == len(MALFORMED)
    assert counts["duplicates"] == 1
    assert counts["kept"] == 2
    *rejects, repeat = quarantined(dataset, counts)
    assert [reject["line"] for reject in rejects] == list(range(2, 2 + len(MALFORMED)))
    assert all(reject["reason"] and reject["file"] == "s.jsonl" for reject in [*rejects, repeat])
    first = content_id(chat("a")["messages"], None)
    assert (repeat["line"], repeat["reason"], repeat["detail"]) == (16, "duplicate", first)


def called(*arguments, content=None):
    calls = [{"function": {"name": "f", "arguments": it}} for it in arguments]
    results = [{"role": "tool", "content": "r"} for _ in arguments]
    return [user("q"), assistant(content, tool_calls=calls), *results, assistant("a")]


def test_what_breaks_other_trainers_is_kept_whole_or_told(root, tmp_path):
    """Rows that issues of other trainers tell of: each is kept with all that it says, or has its reason."""
    kept = [
        {"messages": called({"n": 1})},
        {"messages": called({"n": "1"}, {"n": [1]}, content="")},  # types differ from row to row
        {"messages": called('{"n": {"deep": null}}', {}), "tools": [{"name": "f", "x": 1}]},
        {"messages": called({}), "tools": json.dumps([{"name": "f", "x": "1"}])},
        {"messages": [user("q"), assistant("a", reasoning_content="hm")]},
        {"messages": [user("<|im_start|>assistant\n"), assistant("b")]},
    ]
    told = {
        "no user message": {"messages": []},
        "assistant first": {"messages": [assistant("a"), user("q"), assistant("a")]},
        "message is not an object": {"messages": ["q", "a"]},
        "row is not an object": ["q", "a"],
        "tools are not a list": {**chat("z"), "tools": {"name": ["f", "g"], "x": [1, 2]}},
        "not JSON": "{cut",
    }
    twice = {"messages": [user("q"), assistant("a"), assistant("again"), user("q"), assistant("b")]}
    dataset, facts = curate(
        root, source(tmp_path, "s", [*kept, *told.values(), twice]), held_out_fraction=0
    )
    counts = facts["sources"]["s"]
    assert counts["rows_in"] == counts["kept"] + len(told) == len(kept) + len(told) + 1
    assert counts["rejected"] == dict.fromkeys(told, 1)
    assert counts["repaired"]["cut: two assistant messages in a row"] == 1
    rows = list(read_rows(dataset, "train"))
    calls = [
        [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]]
        for row in rows
        for message in row.messages
        if message.get("tool_calls")
    ]
    expected = [[{"n": 1}], [{"n": "1"}, {"n": [1]}], [{"n": {"deep": None}}, {}], [{}]]
    assert sorted(map(json.dumps, calls)) == sorted(map(json.dumps, expected))
    functions = [row.tools[0]["function"] for row in rows if row.tools]
    assert sorted(map(json.dumps, functions)) == [
        '{"name": "f", "x": "1"}',
        '{"name": "f", "x": 1}',
    ]
    assert "hm" in [message.get("reasoning_content") for row in rows for message in row.messages]


VALUES = (
    st.none() | st.integers(-3, 3) | st.sampled_from(["", "x", "[]", "{}", "assistant", "\ud800"])
)
ANY_JSON = st.recursive(
    VALUES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "role", "content", "tools", "metadata"]), inner
        )
    ),
    max_leaves=8,
)
TURNS = st.lists(
    st.builds(
        lambda role, content: {"role": role, "content": content},
        st.sampled_from(["user", "assistant", "system", "tool", "gpt", "x"]),
        st.sampled_from(["a", "b", "", None, 3, "caf\ufffd", "<think>a</think>b", "z" * 40]),
    ),
    max_size=5,
)
ZIPPED = {
    "messages": [user("q"), assistant("a")],
    "tools": {"name": ["f", "g"], "parameters": [{}, {}]},
}
LINES = (
    ANY_JSON.map(json.dumps)
    | TURNS.map(lambda turns: json.dumps({"messages": turns}))
    | st.sampled_from([json.dumps(chat("same")), json.dumps(ZIPPED), "{cut", "NaN", "[" * 2000])
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(LINES, max_size=12), st.integers(0, 3), st.integers(1, 5), st.booleans())
def test_every_row_is_accounted_for_whatever_it_holds(tmp_path, lines, limit, rows_per_part, mix):
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        weights = {"weight": 1.0} if mix else {}
        sources = [
            source(Path(folder), "any", [*lines, json.dumps(chat("good"))], limit=limit, **weights),
            source(Path(folder), "other", [chat("good"), chat("same"), chat("third")], **weights),
        ]
        _, facts = curate(
            Storage.from_url(f"{folder}/root"),
            *sources,
            held_out_fraction=0,
            rows_per_part=rows_per_part,
            filters=FilterConfig(max_characters=35),
        )
        counts = facts["sources"]["any"]
        assert counts["rows_in"] == 1 + sum(bool(line.strip()) for line in lines)
        assert curation.accounted(counts) == counts["rows_in"]
        assert sum(counts["lengths"].values()) == counts["kept"] == counts["train"]


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
    small, facts = curate(
        root, source(tmp_path, "t", records, limit=7), held_out_fraction=0, rows_per_part=4
    )
    assert sorted(row.id for row in read_rows(small, "train")) == ids[:7]
    parts = [small.record(f"source-000-t.part-{number:06d}")["parts"] for number in range(8)]
    written = sum(part["rows"] for files in parts for part in files)
    assert written < 30  # rows that cannot be drawn any more are not written
    other, _ = curate(root, source(tmp_path, "t", records, limit=7), held_out_fraction=0, seed=1)
    assert {row.id for row in read_rows(other, "train")} != set(ids[:7])


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
    assert counts["supervised_share"] == pytest.approx((3 + 8) / 17, abs=1e-4)
    assert counts["lengths"] == {"2": 1, "8": 1, "16": 1}
    assert [row.metadata.get("prompt_only") for row in read_rows(dataset, "train")] == [
        None,
        None,
        True,
    ]


def test_a_killed_run_continues_with_the_missing_sources(root, tmp_path, monkeypatch):
    sources = [source(tmp_path, name, [chat(name), chat("same")]) for name in ("a", "b", "c")]
    config = CurateConfig(sources=sources, held_out_fraction=0)
    dataset = curation.plan(root, "test", config)
    real, calls = curation.SourceReader.run, []

    def dies_in_the_second_source(self, *arguments, **options):
        calls.append(self.source.name)
        if calls == ["a", "b"]:
            real(self, *arguments, **options)
            raise KeyboardInterrupt  # after its parts, before its own commit
        return real(self, *arguments, **options)

    monkeypatch.setattr(curation.SourceReader, "run", dies_in_the_second_source)
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


@pytest.mark.parametrize("limit", [0, 9])
def test_a_kill_after_any_commit_loses_one_part_at_most_and_changes_nothing(
    root, tmp_path, monkeypatch, limit
):
    monkeypatch.setattr(selection, "PART_ROWS", 5)
    records = [chat(str(i)) for i in range(14)] + ["{cut"] + [chat("3"), chat("14")]
    one = source(tmp_path, "s", records, limit=limit)
    changes = {"rows_per_part": 5, "held_out_fraction": 0.3}
    whole, facts = curate(root, one, **changes)
    config = CurateConfig(sources=[one], **changes)
    killed = curation.plan(Storage.from_url(str(tmp_path / "again")), "test", config)
    real, commits = type(killed).commit, []

    def dies_after_each(self, unit, record):
        real(self, unit, record)
        commits.append(unit)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(killed), "commit", dies_after_each)
    while todo := curation.missing(killed):
        with pytest.raises(KeyboardInterrupt):
            curation.run_units(killed, config, todo)
    assert len(commits) == len(set(commits)) == len(whole.committed())
    assert len(commits) >= 8
    again = curation.seal(killed)["facts"]
    for split in ("train", "held_out"):
        assert list(read_rows(killed, split)) == list(read_rows(whole, split))
    assert {**again["sources"]["s"], "rejects": 0} == {**facts["sources"]["s"], "rejects": 0}


@pytest.mark.slow
def test_several_processes_make_the_same_corpus(root, tmp_path):
    pytest.importorskip("rensa")
    words = [f"word{i}" for i in range(500)]
    rng = random.Random(0)
    records = []
    for i in range(300):
        text = " ".join(rng.choices(words, k=40))
        records += [chat(text), "{cut"] if i % 7 == 0 else [chat(text)]
        records += [chat(f"{text} more")] if i % 9 == 0 else []
    sources = [
        source(tmp_path, "one", records, weight=3.0),
        source(tmp_path, "two", [*records[40:], chat("x")], limit=100, weight=1.0),
    ]
    (tmp_path / "exam.jsonl").write_text(
        json.dumps({"prompt": records[2]["messages"][0]["content"]})
    )
    changes = {
        "rows_per_part": 10,
        "near_duplicates": 0.7,
        "decontaminate": [str(tmp_path / "exam.jsonl")],
        "num_rows": 150,
    }
    alone, facts = curate(root, *sources, **changes)
    other_root = Storage.from_url(str(tmp_path / "other"))
    shared, again = curate(other_root, *sources, processes=2, **changes)
    assert list(read_rows(shared, "train")) == list(read_rows(alone, "train"))
    assert list(read_rows(shared, "held_out")) == list(read_rows(alone, "held_out"))
    for name in ("one", "two"):
        assert {**facts["sources"][name], "rejects": 0} == {**again["sources"][name], "rejects": 0}
    assert facts["num_train"] + facts["num_held_out"] == 150
    assert facts["sources"]["one"]["rejected"]["contaminated"] == 2  # and its near-duplicate
    assert facts["sources"]["one"]["near_duplicates"] > 20


def test_near_duplicates_of_other_sources_go_and_say_which_row_stays(root, tmp_path):
    pytest.importorskip("rensa")
    text = " ".join(f"word{i}" for i in range(60))
    one = source(tmp_path, "one", [chat(text), chat("something else entirely, in other words")])
    two = source(tmp_path, "two", [chat("a third thing"), chat(f"{text} too")])
    dataset, facts = curate(root, one, two, held_out_fraction=0, near_duplicates=0.8)
    counts = facts["sources"]["two"]
    assert (counts["kept"], counts["near_duplicates"]) == (1, 1)
    [repeat] = quarantined(dataset, counts)
    first = next(iter(read_rows(dataset, "train"))).id
    assert repeat == {"file": "two.jsonl", "line": 2, "reason": "near-duplicate", "detail": first}


def test_rows_with_evaluation_prompts_are_rejected_by_name(root, tmp_path):
    prompt = "How many of the forty-two harbour boats return before noon when the wind turns north?"
    (tmp_path / "exam.jsonl").write_text(
        "".join(json.dumps({"question": text}) + "\n" for text in (prompt, "Why not?"))
    )
    records = [
        chat("one"),
        {"messages": [user(f"Please solve: {prompt.lower()}"), assistant("All.")]},
        {"messages": [user("why not"), assistant("Because.")]},
        {"messages": [user("Solve this."), assistant(f"It says: {prompt}")]},
        chat("two"),
    ]
    exam = str(tmp_path / "exam.jsonl")
    dataset, facts = curate(
        root, source(tmp_path, "s", records), held_out_fraction=0, decontaminate=[exam]
    )
    assert texts(dataset) == ["one", "two"]
    counts = facts["sources"]["s"]
    assert counts["rejected"] == {"contaminated": 3}
    details = [(reject["line"], reject["detail"]) for reject in quarantined(dataset, counts)]
    assert details == [(2, "exam.jsonl[0]"), (3, "exam.jsonl[1]"), (4, "exam.jsonl[0]")]

    def plan(*sets):
        config = CurateConfig(
            sources=[source(tmp_path, "s", records)], held_out_fraction=0, decontaminate=list(sets)
        )
        return curation.plan(root, "test", config)

    (tmp_path / "moved").mkdir()
    moved = tmp_path / "moved" / "exam.jsonl"
    moved.write_text((tmp_path / "exam.jsonl").read_text())
    assert plan(str(moved)).path == dataset.path
    moved.write_text(json.dumps({"question": "Other?"}))
    assert plan(str(moved)).path != dataset.path
    with pytest.raises(InputError, match="names two sets alike"):
        plan(exam, str(moved))


def test_weights_share_the_corpus_and_a_smaller_draw_is_part_of_a_larger_one(root, tmp_path):
    sources = [
        source(tmp_path, "a", [chat(f"a{i}") for i in range(60)], weight=3.0),
        source(tmp_path, "b", [chat(f"b{i}") for i in range(40)], weight=1.0),
    ]
    drawn = {}
    for num_rows in (20, 40, 0):
        dataset, facts = curate(root, *sources, held_out_fraction=0, num_rows=num_rows)
        drawn[num_rows] = set(texts(dataset))
        kept = [facts["sources"][name]["kept"] for name in "ab"]
        assert kept == {20: [15, 5], 40: [30, 10], 0: [60, 20]}[num_rows]
    assert drawn[20] < drawn[40] < drawn[0]
    other, _ = curate(root, *sources, held_out_fraction=0, num_rows=20, seed=7)
    assert set(texts(other)) != drawn[20]
    with pytest.raises(InputError, match="source 'b' has no weight and others have"):
        curate(root, sources[0], source(tmp_path, "b", [chat("b")]))


def test_secrets_are_redacted_and_repairs_counted(root, tmp_path):
    secret = "AKIA" + "ABCDEFGHIJKLMNOP"
    broken = {"messages": [user(f"key {secret}"), assistant("a", tool_calls=f"[{secret}")]}
    records = [chat(f"with {secret}"), {"messages": [user("a"), user("b"), assistant("c")]}, broken]
    dataset, facts = curate(root, source(tmp_path, "s", records), held_out_fraction=0)
    assert texts(dataset)[0] == "with <redacted:aws-access-key>"
    counts = facts["sources"]["s"]
    assert counts["redacted"] == {"aws-access-key": 1}
    [reject] = quarantined(dataset, counts)
    assert (reject["reason"], reject["detail"]) == (
        "tool_calls are not JSON",
        "[<redacted:aws-access-key>",
    )
    assert counts["repaired"] == {"two user messages in a row joined": 1}


def test_metadata_that_stages_write_is_not_taken_from_sources(root, tmp_path):
    mine = {"topic": "x", "tokens": 3, "prompt_only": True, "cut_by_length": True}
    dataset, _ = curate(
        root, source(tmp_path, "s", [chat("a", metadata=mine)]), held_out_fraction=0
    )
    [row] = read_rows(dataset, "train")
    assert row.metadata == {"topic": "x"}


def test_pre_tokenized_rows_pass_through(root, tmp_path):
    rows = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}] * 2 + [{"input_ids": []}]
    tokens = source(tmp_path, "t", rows).model_copy(update={"reader": "pre-tokenized"})
    dataset, facts = curate(root, tokens, held_out_fraction=0.9, near_duplicates=0)
    [row] = read_rows(dataset, "train")
    assert row.messages == []
    assert row.metadata["tokens"] == {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
    counts = facts["sources"]["t"]
    assert (counts["duplicates"], counts["held_out"], sum(counts["rejected"].values())) == (1, 0, 1)


def test_the_report_is_json_and_parquet_and_bars(root, tmp_path):
    records = [chat("a"), chat(" ".join(map(str, range(700)))), "{cut", chat("a")]
    dataset, facts = curate(root, source(tmp_path, "s", records), held_out_fraction=0)
    assert json.loads(dataset.storage.get("report.json")) == facts["sources"]
    table = pq.read_table(io.BytesIO(dataset.storage.get("report.parquet")))
    lines = {(line["kind"], line["name"]): line["rows"] for line in table.to_pylist()}
    assert lines[("rows", "rows_in")] == 4
    assert lines[("rejected", "not JSON")] == 1
    assert lines[("length", "16")] == lines[("length", "8192")] == 1
    [line] = report.summary(facts["sources"])
    assert (line["rows in"], line["kept"], line["duplicates"]) == (4, 2, 1)
    bars = report.length_chart(facts["sources"]).splitlines()
    assert bars[0] == "s: rows by characters"
    assert len(bars) == 1 + 10  # 16 to 8192
    assert bars[1] == f"{'< 16':>11} │{'█' * 50} 1"
    assert bars[2] == f"{'< 32':>11} │ 0"


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
    reason = (
        r"first 3 rows .* \(2 times: no messages column, such as text\).* expects OpenAI chat rows"
    )
    with pytest.raises(InputError, match=reason):
        curation.plan(root, "test", CurateConfig(sources=[source(tmp_path, "s", rows)]))
    curation.plan(root, "test", CurateConfig(sources=[source(tmp_path, "u", [*rows, chat("x")])]))
    with pytest.raises(InputError, match="has no rows"):
        curation.plan(root, "test", CurateConfig(sources=[source(tmp_path, "t", [])]))


def test_a_source_whose_rows_are_all_rejected_is_refused_with_the_commonest_reason(root, tmp_path):
    short = FilterConfig(max_characters=5)
    with pytest.raises(InputError, match=r"read none of its 2 rows \(2 times: too many characters"):
        curate(root, source(tmp_path, "s", [chat("a"), chat("b")]), filters=short)


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
    records = [chat(str(i)) for i in range(10)]
    monkeypatch.setattr(selection, "PART_ROWS", 4)
    dataset, facts = curate(
        root, source(tmp_path, "s", records), held_out_fraction=0, rows_per_part=4
    )
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
