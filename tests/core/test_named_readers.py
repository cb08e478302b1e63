"""The layouts of named sets, on rows of our own in each set's published columns."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_core.config import CurateConfig, SourceConfig
from dflash_core.corpus import curation
from dflash_core.corpus.normalization import normalize
from dflash_core.corpus.readers import READERS, reader_of
from dflash_core.corpus.rows import Reject
from dflash_core.errors import InputError
from dflash_core.storage import Storage
from tests.chats import assistant, user

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "find_weather", "description": "Weather of a city", "parameters": SCHEMA}
CLOCK = {"name": "clock", "description": "The time", "parameters": {}}
DECLARED = [{"type": "function", "function": TOOL}, {"type": "function", "function": CLOCK}]

GLAIVE = {
    "system": "SYSTEM: You are a helpful assistant with access to the following functions. "
    f"Use them if required -\n{json.dumps(TOOL, indent=4)}\n\n{json.dumps(CLOCK, indent=4)}\n\n",
    "chat": "USER: Is it raining in L'Aquila?\n\n\n"
    'ASSISTANT: <functioncall> {"name": "find_weather", "arguments": '
    '\'{"city": "L\\\'Aquila"}\'} <|endoftext|>\n\n\n'
    'FUNCTION RESPONSE: {"rain": true}\n\n\n'
    "ASSISTANT: It is.\n\nUSER: is not what you are. <|endoftext|>\n\n\n".replace(
        "\n\nUSER", " USER"
    )
    + 'USER: And the time?\n\n\nASSISTANT: Let me look. <functioncall> {"name": "clock"} <|endoftext|>\n\n\n',
}
QWEN_SYSTEM = (
    "Answer briefly.\n\n# Tools\n\nFunctions may be called.\n\nTheir signatures stand in <tools></tools> tags:\n"
    f"<tools>\n{json.dumps(DECLARED[0])}\n{json.dumps(DECLARED[1])}\n</tools>\n\nCall them like this: ..."
)


def call(name, **arguments):
    text = json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", "function": {"name": name, "arguments": text}}


CASES = {
    "open-orca": (
        {"id": "t0.1", "system_prompt": "Be kind.", "question": "Why?", "response": "So."},
        [{"role": "system", "content": "Be kind."}, user("Why?"), assistant("So.")],
        None,
    ),
    "evol-codealpaca": (
        {"instruction": "Add two numbers in C.", "output": "int add(int a, int b)"},
        [user("Add two numbers in C."), assistant("int add(int a, int b)")],
        None,
    ),
    "magicoder-oss-instruct": (
        {
            "lang": "python",
            "raw_index": 7,
            "index": 9,
            "seed": "x = 1",
            "openai_fingerprint": "fp",
            "problem": "Double it.",
            "solution": "x = 2",
        },
        [user("Double it."), assistant("x = 2")],
        None,
    ),
    "agentic-coding-trajectories": (
        {
            "session_id": "swe::task-7",
            "source_dataset": "swe",
            "source_id": "task-7.try1",
            "agent_framework": "openhands",
            "recorded_model": "unknown",
            "messages_json": json.dumps(
                [
                    {
                        "role": "system",
                        "content": "Fix.",
                        "tool_calls_json": None,
                        "tool_call_id": None,
                    },
                    {
                        "role": "user",
                        "content": "Bug.",
                        "tool_calls_json": None,
                        "tool_call_id": None,
                    },
                    {
                        "role": "assistant",
                        "content": "",
                        "tool_calls_json": json.dumps(
                            [
                                {"id": "c1", **call("bash", command="ls")},
                                {"id": "c2", **call("pwd")},
                            ]
                        ),
                        "tool_call_id": None,
                    },
                    {
                        "role": "tool",
                        "content": "a.py",
                        "tool_calls_json": None,
                        "tool_call_id": "c1",
                    },
                    {"role": "tool", "content": "/", "tool_calls_json": None, "tool_call_id": "c2"},
                    {"role": "assistant", "content": "Done.", "tool_calls_json": None},
                ]
            ),
            "n_turns": 2,
            "max_isl": 10,
            "total_tokens": 12,
            "ground_truth_meta_json": json.dumps({"instance_id": "task-7", "resolved": True}),
        },
        [
            {"role": "system", "content": "Fix."},
            user("Bug."),
            assistant(
                None,
                tool_calls=[
                    {"id": "c1", **call("bash", command="ls")},
                    {"id": "c2", **call("pwd")},
                ],
            ),
            {"role": "tool", "content": "a.py", "tool_call_id": "c1"},
            {"role": "tool", "content": "/", "tool_call_id": "c2"},
            assistant("Done."),
        ],
        None,
    ),
    "glaive-function-calling-v2": (
        GLAIVE,
        [
            user("Is it raining in L'Aquila?"),
            assistant(None, tool_calls=[call("find_weather", city="L'Aquila")]),
            {"role": "tool", "content": '{"rain": true}'},
            assistant("It is. USER: is not what you are."),
            user("And the time?"),
            assistant("Let me look.", tool_calls=[call("clock")]),
        ],
        DECLARED,
    ),
    "qwen3.5-tool-calling-v2": (
        {
            "messages": [
                {"role": "system", "content": QWEN_SYSTEM},
                {"role": "user", "content": "Rain in Rome and in Oslo?"},
                {
                    "role": "assistant",
                    "content": "<think>\nTwo cities.\n</think>\n\nI look.\n<tool_call>\n"
                    '{"name": "find_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n<tool_call>\n'
                    "<function=find_weather>\n<parameter=city>\nOslo\n</parameter>\n"
                    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
                },
                {
                    "role": "user",
                    "content": "<tool_response>\nno\n</tool_response>\n<tool_response>\nyes\n</tool_response>",
                },
                {"role": "assistant", "content": "Only in Oslo."},
            ]
        },
        [
            {"role": "system", "content": "Answer briefly."},
            user("Rain in Rome and in Oslo?"),
            assistant(
                "I look.",
                reasoning_content="Two cities.",
                tool_calls=[
                    call("find_weather", city="Rome"),
                    call("find_weather", city="Oslo", days=3),
                ],
            ),
            {"role": "tool", "content": "no"},
            {"role": "tool", "content": "yes"},
            assistant("Only in Oslo."),
        ],
        DECLARED,
    ),
}


def read(tmp_path, name, *rows):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    source = SourceConfig(name="set", reader=name, path=str(path))
    return list(reader_of(source).read(source))


@pytest.mark.parametrize("name", CASES)
def test_a_row_in_the_published_columns_comes_out_in_the_openai_form(tmp_path, name):
    row, messages, tools = CASES[name]
    [found] = read(tmp_path, name, row)
    normal, declared = normalize(found.messages, found.tools)
    assert normal == messages
    assert declared == tools


@pytest.mark.parametrize("name", CASES)
def test_rows_of_another_set_are_told_which_layout_is_expected(tmp_path, name):
    other, _, _ = CASES["open-orca" if name != "open-orca" else "magicoder-oss-instruct"]
    [reject] = read(tmp_path, name, other)
    assert isinstance(reject, Reject)
    assert reject.reason.startswith("no ")
    assert "found " in reject.detail
    source = SourceConfig(name="set", reader=name, path=str(tmp_path / "rows.parquet"))
    layout = (READERS[name].__doc__ or "").split("\n")[0].rstrip(".")
    with pytest.raises(InputError) as caught:
        curation.plan(Storage.from_url(str(tmp_path / "root")), "x", CurateConfig(sources=[source]))
    assert f"reader {name!r} expects {layout}" in str(caught.value)


def test_attempts_at_one_task_are_held_out_together(tmp_path):
    row, _, _ = CASES["agentic-coding-trajectories"]
    [found] = read(tmp_path, "agentic-coding-trajectories", row)
    assert found.metadata == {"session": "swe::task-7", "framework": "openhands", "group": "task-7"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"chat": "ASSISTANT: <functioncall> {oops} <|endoftext|>"},
            "function call is not readable",
        ),
        ({"chat": "Once upon a time"}, "chat does not begin with USER:"),
        ({"chat": None}, "chat does not begin with USER:"),
        ({"system": "SYSTEM: functions -\n{cut"}, "JSON cannot be read"),
        ({"system": 3}, "column is not text"),
    ],
)
def test_glaive_text_that_cannot_be_parsed_is_a_reject(tmp_path, change, reason):
    [reject] = read(tmp_path, "glaive-function-calling-v2", {**GLAIVE, **change})
    assert (type(reject), reject.reason) == (Reject, reason)


def test_glaive_without_functions_keeps_its_system_message(tmp_path):
    row = {
        "system": "SYSTEM: No functions here.\n\n",
        "chat": "USER: Hi\n\n\nASSISTANT: Hello <|endoftext|>",
    }
    [found] = read(tmp_path, "glaive-function-calling-v2", row)
    assert found.messages == [
        {"role": "system", "content": "No functions here."},
        user("Hi"),
        assistant("Hello"),
    ]
    assert found.tools is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("<tool_call>{cut</tool_call>", "tool call is not JSON"),
        ('<tool_call>{"name": "f"}</tool_call> and more', "text behind a tool call"),
    ],
)
def test_calls_in_text_that_cannot_be_parsed_are_rejects(tmp_path, content, reason):
    row = {"messages": [user("x"), assistant(content)]}
    [reject] = read(tmp_path, "qwen3.5-tool-calling-v2", row)
    assert (type(reject), reject.reason) == (Reject, reason)


def test_text_that_only_speaks_of_tags_stays_text(tmp_path):
    row = {
        "messages": [
            user("What is <tool_response>?"),
            assistant("Next to <tool_call> and <tools></tools>."),
        ]
    }
    [found] = read(tmp_path, "qwen3.5-tool-calling-v2", row)
    assert normalize(found.messages, found.tools) == (row["messages"], None)


@pytest.mark.parametrize(
    ("row", "outcome"),
    [
        ({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, [0, 1, 1]),
        ({"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, [0, 0, 1]),
        ({"input_ids": [5, 6], "loss_mask": [True]}, "loss_mask has another length"),
        ({"input_ids": [], "loss_mask": []}, "input_ids are empty or negative"),
        ({"input_ids": [5, -1], "loss_mask": [0, 1]}, "input_ids are empty or negative"),
        ({"input_ids": ["a"], "loss_mask": [1]}, "input_ids are not integers"),
        ({"input_ids": [1]}, "no loss_mask column"),
    ],
)
def test_pre_tokenized_rows_keep_their_tokens_or_are_rejected(tmp_path, row, outcome):
    [found] = read(tmp_path, "pre-tokenized", row)
    if isinstance(outcome, str):
        assert found.reason == outcome
    else:
        assert found.metadata["tokens"] == {"input_ids": row["input_ids"], "loss_mask": outcome}
