"""The standard-library reader: determinism, hold-out, valid chats."""

import ast
import json
import re

import pytest

from dflash_core.corpus.readers import python_stdlib
from dflash_core.corpus.readers.python_stdlib import KIND_SHARES, Chat, is_held_out, read

MODULES = ("bisect", "calendar", "json.decoder", "queue", "textwrap")
FENCE = re.compile(r"```python\n(.*?)\n```", re.DOTALL)


@pytest.fixture(scope="module")
def chats() -> list[Chat]:
    return list(read(MODULES, phrasings=8))


def test_reads_the_named_modules_in_order(chats: list[Chat]) -> None:
    groups = [chat["metadata"]["group"] for chat in chats]
    assert set(groups) == set(MODULES)
    assert groups == sorted(groups)


def test_reading_twice_gives_the_same(chats: list[Chat]) -> None:
    assert list(read(MODULES, phrasings=8)) == chats


def test_file_system_order_has_no_influence(
    chats: list[Chat], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = python_stdlib._module_files
    monkeypatch.setattr(
        python_stdlib, "_module_files", lambda root: dict(reversed(list(files(root).items())))
    )
    assert list(read(MODULES, phrasings=8)) == chats


def test_a_phrasing_does_not_depend_on_their_number(chats: list[Chat]) -> None:
    assert list(read(MODULES, phrasings=1)) == chats[::8]


@pytest.mark.parametrize(
    ("group", "fraction", "expected"),
    [
        ("json", 0.05, True),  # sha256("json") begins with 02bd175f: 0.0107
        ("json", 0.01, False),
        ("textwrap", 0.05, False),
        ("textwrap", 1.0, True),
        ("textwrap", 0.0, False),
    ],
)
def test_hold_out_follows_the_hash_of_the_group(
    group: str, fraction: float, expected: bool
) -> None:
    assert is_held_out(group, fraction) is expected


def test_about_the_fraction_is_held_out() -> None:
    held_out = sum(is_held_out(f"module_{i}", 0.05) for i in range(4000))
    assert 150 < held_out < 250


def test_chats_have_the_openai_form(chats: list[Chat]) -> None:
    for chat in chats:
        roles = [message["role"] for message in chat["messages"]]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles[0] == "user"
        assert roles[-1] == "assistant"
        assert chat["messages"][-1]["content"]
        assert ("tool" in roles) == bool(chat["tools"]) == (chat["metadata"]["kind"] == "tool")
        json.dumps(chat)


def test_every_kind_occurs(chats: list[Chat]) -> None:
    assert {chat["metadata"]["kind"] for chat in chats} == set(KIND_SHARES)
    assert sum(KIND_SHARES.values()) == pytest.approx(1)


def test_tool_calls_match_an_offered_tool(chats: list[Chat]) -> None:
    for chat in chats:
        offered = {tool["function"]["name"]: tool["function"] for tool in chat["tools"] or []}
        calls = [c for message in chat["messages"] for c in message.get("tool_calls", [])]
        results = [m["tool_call_id"] for m in chat["messages"] if m["role"] == "tool"]
        assert [call["id"] for call in calls] == results
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            schema = offered[call["function"]["name"]]["parameters"]
            assert list(arguments) == schema["required"]


def test_code_runs_printed_what_the_tool_says(chats: list[Chat], capsys) -> None:
    checked = 0
    for chat in chats:
        if "run_code" in json.dumps(chat["messages"]):
            call = next(m for m in chat["messages"] if m.get("tool_calls"))["tool_calls"][0]
            exec(json.loads(call["function"]["arguments"])["code"], {})  # noqa: S102
            printed = next(m for m in chat["messages"] if m["role"] == "tool")["content"]
            assert capsys.readouterr().out == f"{printed}\n"
            checked += 1
    assert checked


def test_answers_hold_code_that_parses_and_is_bounded() -> None:
    for chat in read(MODULES, phrasings=4, max_code_characters=300):
        if chat["metadata"]["kind"] in ("code", "complete"):
            code = FENCE.search(chat["messages"][-1]["content"])
            assert code is not None
            ast.parse(code[1])
            assert len(code[1]) <= 300


def test_no_definition_is_read_twice() -> None:
    source = "def f(x):\n    total = x + 1\n    print('a long enough line of code', total)\n    return x\n"
    module = list(python_stdlib.definitions("m", source, 800))
    assert [definition.qualname for definition in module] == ["f"]
    names = [c["metadata"]["name"] for c in read(["calendar"])]
    assert len(names) == len(set(names))


def test_docstring_becomes_the_summary_and_leaves_the_code() -> None:
    source = '''
class Box:
    def put(self, item, *, twice=False):
        """Stores an item.

        More about it.
        """
        # keeps this comment
        self.items.append(item)
        if not item:
            raise ValueError("nothing to store")
'''
    (box, put) = python_stdlib.definitions("m", source, 800)
    assert (box.noun, put.noun, put.qualname) == ("class", "method", "Box.put")
    assert put.header == "def put(self, item, *, twice=False):"
    assert put.summary == "Stores an item."
    assert "# keeps this comment" in put.code
    assert '"""' not in put.code
    assert put.facts == (
        "It takes `item` and `twice`.",
        "It calls `self.items.append` and `ValueError`.",
        "It may raise `ValueError`.",
    )


def test_tests_and_bundled_packages_are_left_out() -> None:
    names = {name for name, _ in python_stdlib.module_sources(["json", "test.test_json", "pip"])}
    assert names == {"json"}
