import itertools
import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.corpus.normalization import is_prompt_only, normalize, split_reasoning
from dflash_core.corpus.rows import Malformed
from dflash_core.manifest import canonical_json
from tests.chats import assistant, user

CALL = {"type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}


def messages_of(*messages):
    return normalize(list(messages), None)[0]


@pytest.mark.parametrize(
    ("role", "normal"),
    [("developer", "system"), ("human", "user"), ("user", "user")],
)
def test_roles_of_other_layouts_are_translated(role, normal):
    turns = messages_of({"role": role, "content": "x"}, user("y"), {"role": "gpt", "content": "z"})
    assert turns[0]["role"] == normal
    assert turns[-1] == assistant("z")


def test_parallel_calls_are_kept_and_arguments_keep_their_order():
    bare = {"name": "g", "arguments": {"z": 1, "a": "é"}}
    answer = assistant(None, tool_calls=[{"id": "1", **CALL}, bare])
    turn = messages_of(user("x"), answer, {"role": "function", "content": "r", "name": "f"})[1]
    assert turn["content"] is None
    assert turn["tool_calls"] == [
        {"id": "1", **CALL},
        {"type": "function", "function": {"name": "g", "arguments": '{"z": 1, "a": "é"}'}},
    ]


def test_a_legacy_function_call_becomes_a_tool_call():
    turn = messages_of(user("x"), assistant(None, function_call={"name": "f", "arguments": ""}))[1]
    assert turn["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    ]


def test_reasoning_is_kept_in_its_own_field():
    inline = messages_of(user("x"), assistant("<think>\nhm\n</think>\n\nyes"))[1]
    assert inline == assistant("yes", reasoning_content="hm")
    assert messages_of(user("x"), assistant("yes", reasoning="hm"))[1] == inline
    assert messages_of(user("x"), assistant("<think>\n\n</think>\n\nyes"))[1] == assistant("yes")
    assert split_reasoning("yes <think>no</think>") == (None, "yes <think>no</think>")
    assert split_reasoning("hm\n</think>\n\nyes", opened=True) == ("hm", "yes")


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages_of(user(parts), assistant("c"))[0] == user("ab")


def test_repeated_system_and_user_messages_are_joined():
    system = {"role": "system", "content": "s"}
    more = {"role": "developer", "content": "t"}
    turns = messages_of(system, system, more, user("a"), user("b"), assistant("c"))
    assert turns == [{"role": "system", "content": "s\n\nt"}, user("a\n\nb"), assistant("c")]


def test_what_follows_the_last_answer_is_dropped_unless_nothing_was_answered():
    turns = messages_of(user("a"), assistant("b"), user("c"))
    assert turns == [user("a"), assistant("b")]
    assert not is_prompt_only(turns)
    assert is_prompt_only(messages_of(user("a")))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "messages are not a list"),
        ("[{", "messages are not JSON"),
        ({"role": "user"}, "messages are not a list"),
        ([], "no user message"),
        (["hi"], "message is not an object"),
        ([{"content": "x"}], "unknown role"),
        ([{"role": ["user"], "content": "x"}], "unknown role"),
        ([{"role": "narrator", "content": "x"}], "unknown role"),
        ([{"role": "system", "content": "x"}], "no user message"),
        ([user("  ")], "empty user message"),
        ([user(None)], "empty user message"),
        ([user(3)], "content is not text"),
        ([user([{"type": "image_url", "image_url": "x"}])], "content part is not text"),
        ([assistant("x"), user("y")], "assistant first"),
        ([user("x"), assistant("")], "empty assistant message"),
        ([user("x"), assistant("", reasoning_content="only")], "empty assistant message"),
        (
            [user("x"), {"role": "tool", "content": "r"}],
            "tool message without an assistant turn before it",
        ),
        ([user("x"), {"role": "system", "content": "s"}], "system message after the first turn"),
        ([assistant("x"), assistant("y")], "assistant first"),
        ([user("x"), assistant(None, tool_calls=3)], "tool_calls are not a list"),
        ([user("x"), assistant(None, tool_calls=[3])], "tool call is not an object"),
        ([user("x"), assistant(None, tool_calls=[{"function": {}}])], "tool call has no name"),
        (
            [user("x"), assistant(None, tool_calls=[{"name": "f", "arguments": "{"}])],
            "arguments are not JSON",
        ),
        (
            [user("x"), assistant(None, tool_calls=[{"name": "f", "arguments": "[]"}])],
            "arguments are not an object",
        ),
        (
            [
                user("x"),
                assistant(None, tool_calls=[{"name": "f", "arguments": {"a": float("nan")}}]),
            ],
            "value has no JSON form",
        ),
        ([user("half \ud800")], "text is not Unicode"),
    ],
)
def test_malformed_conversations_are_rejected_with_a_reason(messages, reason):
    with pytest.raises(Malformed) as caught:
        normalize(messages, None)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        (3, "tools are not a list"),
        ("{", "tools are not JSON"),
        ([3], "tool is not an object"),
        ([{"function": {}}], "tool has no name"),
    ],
)
def test_malformed_tools_are_rejected_with_a_reason(tools, reason):
    with pytest.raises(Malformed) as caught:
        normalize([user("x")], tools)
    assert caught.value.reason == reason


GOOD = [user("a"), assistant("b"), user("c"), assistant("d")]


@pytest.mark.parametrize(
    ("messages", "kept", "repair"),
    [
        ([*GOOD, assistant("again")], GOOD, "cut: two assistant messages in a row"),
        ([*GOOD, user("e"), assistant("")], GOOD, "cut: empty assistant message"),
        ([*GOOD, user(""), assistant("f")], GOOD, "cut: empty user message"),
        (
            [*GOOD, {"role": "system", "content": "s"}],
            GOOD,
            "cut: system message after the first turn",
        ),
        ([*GOOD, {"role": "narrator", "content": "n"}], GOOD, "cut: unknown role"),
        ([*GOOD, 3], GOOD, "cut: message is not an object"),
        ([*GOOD, user("e"), assistant(None, tool_calls=[{}])], GOOD, "cut: tool call has no name"),
        ([*GOOD, user("e")], GOOD, "turns after the last answer dropped"),
        (
            [user("a"), user("b"), *GOOD[1:]],
            [user("a\n\nb"), *GOOD[1:]],
            "two user messages in a row joined",
        ),
        (
            [user("a"), assistant("<think>hm</think>b")],
            [user("a"), assistant("b", reasoning_content="hm")],
            "reasoning moved out of the content",
        ),
        (GOOD, GOOD, None),
    ],
)
def test_what_is_repaired_is_counted(messages, kept, repair):
    repairs = Counter()
    assert normalize(messages, None, repairs)[0] == kept
    assert repairs == ({repair: 1} if repair else {})


def test_repairs_of_a_row_that_is_rejected_are_not_counted():
    repairs = Counter()
    with pytest.raises(Malformed):
        normalize([user("a"), user("b"), assistant("")], None, repairs)
    with pytest.raises(Malformed):
        normalize([user("a"), user("b"), assistant("c")], 3, repairs)
    assert not repairs


SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    SCALAR | st.sampled_from(["user", "assistant", "tool", "system", "<think>a</think>b", "{}"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "name", "arguments", "function", "tool_calls", "text"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "tool", "system", "gpt", "nobody"]),
        "content": JSON,
    },
    optional={"tool_calls": JSON, "reasoning_content": JSON, "tool_call_id": JSON},
)


@settings(max_examples=200, deadline=None)
@given(JSON | st.lists(MESSAGE | JSON, max_size=5), JSON)
def test_any_value_is_normalized_or_malformed_and_normal_form_is_stable(messages, tools):
    try:
        turns, declared = normalize(messages, tools)
    except Malformed:
        return
    canonical_json([turns, declared]).encode()
    assert turns[-1]["role"] == "assistant" or not any(t["role"] == "assistant" for t in turns)
    roles = [turn["role"] for turn in turns]
    assert "system" not in roles[1:]
    assert roles[0] in ("system", "user")
    for before, after in itertools.pairwise(roles):
        assert (before, after) not in [
            ("user", "user"),
            ("assistant", "assistant"),
            ("user", "tool"),
        ]
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert normalize(turns, declared) == (turns, declared)
