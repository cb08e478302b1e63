import itertools
import json

import pytest
import torch

from dflash_core import masking, tokenization
from dflash_core.answers import Answer, Prompt, read_answer
from dflash_core.chat import Chat
from dflash_core.config import RegenerateConfig, Runtime, TokenizeConfig
from dflash_core.corpus import regeneration
from dflash_core.corpus.rows import CORPORA, Row, content_id, read_rows, write_part
from dflash_core.errors import IncompleteError, MismatchError
from dflash_core.generation import LocalAnswerer, generate, sample
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from dflash_core.target import load_causal_lm
from tests import chats, targets
from tests.chats import REWRITING, STABLE, assistant, user

CPU = torch.device("cpu")
LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


def call(**arguments):
    function = {"name": "look_up", "arguments": json.dumps(arguments)}
    return {"type": "function", "function": function}


def tool(content, call_id):
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def row_of(*messages, tools=None, **metadata):
    return Row(content_id(list(messages), tools), "test", list(messages), tools, metadata)


def corpus_of(root, train, held_out=()):
    inputs = {row.id: "" for row in [*train, *held_out]}
    dataset = Dataset.create(root, CORPORA, "test", version=1, config={}, inputs=inputs)
    half = (len(train) + 1) // 2
    parts = {
        "train": [write_part(dataset.storage, "p", some) for some in (train[:half], train[half:])],
        "held_out": [write_part(dataset.storage, "p", list(held_out))],
    }
    dataset.seal([], {"parts": parts})
    return dataset


@pytest.fixture
def root(tmp_path):
    return Storage.from_url(str(tmp_path / "root"))


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory):
    """A random target with Gated DeltaNet layers and the small BPE tokenizer."""
    folder = tmp_path_factory.mktemp("hybrid")
    made = targets.qwen3_5_text(folder, vocab_size=448, eos_token_id=None, pad_token_id=None)
    chats.tokenizer(STABLE).save_pretrained(folder)
    return made


class Scripted:
    """An answerer that gives each prompt the next answer of a list, and remembers the prompts."""

    def __init__(self, *answers):
        self.answers = iter(answers)
        self.prompts = []

    def answer(self, prompts):
        self.prompts += prompts
        return [next(self.answers) for _ in prompts]


def says(content, *calls, cut=False):
    message = assistant(content, tool_calls=list(calls)) if calls else assistant(content)
    return Answer(message, num_tokens=3, cut=cut, num_characters=len(content or ""))


def answered(root, row, *answers):
    """The row after the answers, the prompts that were asked, and the facts."""
    corpus = corpus_of(root, [row])
    config = RegenerateConfig()
    inputs = {"corpus": corpus.fingerprint, "rows": "1"}
    dataset = Dataset.create(root, CORPORA, "r", version=1, config=config, inputs=inputs)
    answerer = Scripted(*answers)
    regeneration.answer_units(dataset, corpus, answerer, regeneration.missing(dataset))
    facts = regeneration.seal(dataset)["facts"]
    [new] = read_rows(dataset, "train")
    return new, answerer.prompts, facts


# --- turn by turn ------------------------------------------------------------------------------


def test_later_turns_see_the_answers_of_the_target(root):
    row = row_of(user("a"), assistant("old"), user("b"), assistant("older"), group="g")
    new, prompts, facts = answered(root, row, says("new"), says("newer"))
    assert prompts[1].messages == [user("a"), assistant("new"), user("b")]
    assert new.messages == [user("a"), assistant("new"), user("b"), assistant("newer")]
    assert new.metadata == {"group": "g"}
    assert new.id == content_id(new.messages, None)
    assert (facts["answers"], facts["answer_tokens"]) == (2, 6)


def test_recorded_tool_results_stay_behind_the_targets_own_call(root):
    row = row_of(
        user("a"),
        assistant(None, tool_calls=[{"id": "x", **call(q=1)}]),
        tool("found", "x"),
        assistant("old"),
        tools=[LOOK_UP],
    )
    new, prompts, _ = answered(root, row, says(None, call(q=2)), says("new"))
    assert prompts[1].messages[1]["tool_calls"] == [{"id": "x", **call(q=2)}]
    assert prompts[1].messages[2] == tool("found", "x")
    assert new.messages[-1] == assistant("new")


@pytest.mark.parametrize(
    "first",
    [says("no call"), says(None, call(q=1), call(q=2)), says("cut", cut=True)],
    ids=["no call where results follow", "more calls than results", "cut by length"],
)
def test_a_conversation_ends_where_what_was_recorded_no_longer_fits(root, first):
    row = row_of(
        user("a"),
        assistant(None, tool_calls=[call(q=1)]),
        tool("found", "x"),
        assistant("old"),
        tools=[LOOK_UP],
    )
    new, prompts, facts = answered(root, row, first)
    assert len(prompts) == 1
    assert len(new.messages) == 2
    assert facts["ended_early"] == 1
    assert bool(new.metadata.get("cut_by_length")) == first.cut


def test_a_prompt_without_answer_gets_one_and_is_no_prompt_any_more(root):
    row = row_of(user("a"), prompt_only=True)
    new, _, _ = answered(root, row, says("new"))
    assert new.messages == [user("a"), assistant("new")]
    assert new.metadata == {"group": row.id}


def test_a_row_that_cannot_be_answered_is_counted_with_its_reason(root):
    rows = [row_of(user("a"), assistant("b")), row_of(user("c"), assistant("d"))]
    corpus = corpus_of(root, rows)
    inputs = {"corpus": corpus.fingerprint, "rows": "2"}
    dataset = Dataset.create(
        root, CORPORA, "r", version=1, config=RegenerateConfig(), inputs=inputs
    )
    answers = Scripted(says("new"), Answer(None, reason="too long"))
    regeneration.answer_units(dataset, corpus, answers, regeneration.missing(dataset))
    facts = regeneration.seal(dataset)["facts"]
    assert facts["num_train"] + sum(facts["rejected"].values()) == 2
    assert facts["rejected"] == {"too long": 1}


def test_a_row_that_came_tokenized_is_kept_as_it_is(root):
    given = Row("g", "test", [], None, {"tokens": {"input_ids": [1, 2], "loss_mask": [0, 1]}})
    corpus = corpus_of(root, [row_of(user("a"), assistant("b")), given])
    inputs = {"corpus": corpus.fingerprint, "rows": "2"}
    dataset = Dataset.create(
        root, CORPORA, "r", version=1, config=RegenerateConfig(), inputs=inputs
    )
    todo = regeneration.missing(dataset)
    regeneration.answer_units(dataset, corpus, Scripted(says("new")), todo)
    facts = regeneration.seal(dataset)["facts"]
    assert given in list(read_rows(dataset, "train"))
    assert (facts["num_train"], facts["answers"], facts["rejected"]) == (2, 1, {})


# --- reading what the target wrote -------------------------------------------------------------

WRITTEN = [
    "plain",
    " spaces around \n\n",
    "<think>hm</think>so",
    "<think>never closed",
    '<tool_call>\n{"name": "look_up", "arguments": {"z": 1, "a": [2]}}\n</tool_call>',
    'first <tool_call>\n{"name": "look_up", "arguments": {}}\n</tool_call>',
    "<tool_call>\n{not json}\n</tool_call>",
    '<tool_call>{"name":"look_up","arguments":{}}</tool_call> and more',
    '<tool_call>{"name":"look_up","arguments":{"a":1}}</tool_call>',
    "quotes <|im_start|> a marker",
    "",
]


@pytest.mark.parametrize("text", WRITTEN)
@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("template", [STABLE, REWRITING])
def test_a_regenerated_row_trains_on_exactly_what_the_target_wrote(template, text, cut):
    chat = Chat(chats.tokenizer(template), thinking=False)
    prompt = Prompt("k", [user("a")], [LOOK_UP])
    prompt_text = chat.render(prompt.messages, prompt.tools, prompt=True)
    tokens = chat.encode(text) + ([] if cut else [chat.end_of_turn])
    answer = read_answer(chat, prompt, prompt_text, tokens, {chat.end_of_turn})
    assert answer.exact
    assert answer.cut == (cut or not tokens)
    row = row_of(user("a"), answer.message, tools=[LOOK_UP])
    if answer.cut:
        row.metadata.update(cut_by_length=True, written_characters=answer.num_characters)
    [rendering], _ = masking.renderings(chat, row)
    [(ids, offsets)] = chat.encode_with_offsets([rendering.text])
    [found] = masking.samples_of(chat, rendering, ids, offsets)
    [(first, stop)] = found.spans
    assert found.input_ids[first:stop] == tokens


def test_reasoning_and_calls_are_told_apart_where_the_template_prints_them_so():
    chat = Chat(chats.tokenizer(STABLE), thinking=False)
    text = (
        '<think>hm</think>ok<tool_call>\n{"name": "look_up", "arguments": {"q": 1}}\n</tool_call>'
    )
    tokens = [*chat.encode(text), chat.end_of_turn]
    prompt = Prompt("k", [user("a")], [LOOK_UP])
    prompt_text = chat.render(prompt.messages, prompt.tools, prompt=True)
    answer = read_answer(chat, prompt, prompt_text, tokens, {chat.end_of_turn})
    assert answer.message == assistant("ok", reasoning_content="hm", tool_calls=[call(q=1)])


def test_a_block_that_the_prompt_opened_is_read_as_reasoning_even_when_it_is_cut():
    opening = REWRITING.replace(
        "{% if enable_thinking is defined and not enable_thinking %}",
        "{% if enable_thinking %}<think>\n{% else %}",
    )
    chat = Chat(chats.tokenizer(opening), thinking=True)
    prompt = Prompt("k", [user("a")], None)
    prompt_text = chat.render(prompt.messages, None, prompt=True)
    for text, ended in (("let me see\n</think>\n\nyes", True), ("let me s", False)):
        tokens = chat.encode(text) + [chat.end_of_turn] * ended
        answer = read_answer(chat, prompt, prompt_text, tokens, {chat.end_of_turn})
        assert answer.exact
        assert answer.message["reasoning_content"] == text.split("\n</think>")[0]


# --- generation --------------------------------------------------------------------------------


def greedy(logits_BV, alive, step):
    return logits_BV.argmax(-1)


def continue_alone(model, ids, max_new_tokens, stop_ids):
    """Greedy continuation by whole forwards of one sequence, without a cache."""
    written = []
    while len(written) < max_new_tokens and (not written or written[-1] not in stop_ids):
        logits = model(torch.tensor([ids + written]), use_cache=False).logits[0, -1]
        written.append(int(logits.argmax()))
    return written


def test_batched_answers_of_a_hybrid_target_equal_those_of_single_prompts(hybrid):
    model = load_causal_lm(hybrid, CPU)
    draws = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 400, (n,), generator=draws).tolist() for n in (3, 70, 9, 31, 1, 12)]
    free = [continue_alone(model, ids, 24, ()) for ids in prompts]
    # Stop ids that end some answers early, at different steps, so that the batch is narrowed twice.
    stop_ids = {free[0][3], free[2][7], free[3][7], free[4][12]}
    alone = [continue_alone(model, ids, 24, stop_ids) for ids in prompts]
    assert len({len(tokens) for tokens in alone}) > 2
    assert generate(model, prompts, 24, stop_ids, 0, greedy) == alone


def test_nucleus_sampling_matches_a_plain_loop():
    logits = torch.randn(5, 12, generator=torch.Generator().manual_seed(0)) * 3
    for top_p, u in itertools.product((0.2, 0.7, 1.0), (0.0, 0.31, 0.8, 0.9999999)):
        config = RegenerateConfig(temperature=0.8, top_p=top_p)
        picked = sample(logits, torch.full((5,), u), config)
        for row in range(5):
            probability = (logits[row] / 0.8).softmax(-1).tolist()
            nucleus, total = [], 0.0
            for token in sorted(range(12), key=lambda i: -probability[i]):
                if total >= top_p:
                    break
                nucleus.append(token)
                total += probability[token]
            reached, expected = 0.0, nucleus[-1]
            for token in nucleus:
                reached += probability[token]
                if reached > u * total:
                    expected = token
                    break
            assert picked[row] == expected


def test_sampled_answers_do_not_depend_on_the_batch(hybrid):
    config = RegenerateConfig(temperature=1.0, top_p=0.9, max_new_tokens=8, seed=3)
    prompts = [Prompt(f"k{i}", [user(f"question {i} " * (1 + 3 * i))], None) for i in range(5)]
    by_batch = [
        LocalAnswerer(hybrid, config, Runtime(device="cpu", generate_batch=size)).answer(prompts)
        for size in (1, 5)
    ]
    assert by_batch[0] == by_batch[1]
    other = RegenerateConfig(temperature=1.0, top_p=0.9, max_new_tokens=8, seed=4)
    assert LocalAnswerer(hybrid, other, Runtime(device="cpu")).answer(prompts) != by_batch[0]


# --- the stage ---------------------------------------------------------------------------------


def test_a_killed_run_continues_with_the_missing_parts(root, hybrid, monkeypatch):
    rows = [row_of(user(f"question {i}"), assistant("x")) for i in range(10)]
    held = [row_of(user(f"held {i}"), assistant("y")) for i in range(4)]
    corpus = corpus_of(root, rows, held)
    config = RegenerateConfig(num_rows=8, num_held_out=3, max_new_tokens=6, rows_per_part=3)
    dataset = regeneration.plan(root, "test", corpus, hybrid, config)
    assert regeneration.units(dataset) == ["part-000000", "part-000001", "part-000002", "held-out"]
    runtime, real, parts = Runtime(device="cpu"), regeneration._Work.dialogues, []

    def dies_in_the_second_part(work, unit):
        parts.append(unit)
        if len(parts) == 2:
            raise KeyboardInterrupt
        return real(work, unit)

    monkeypatch.setattr(regeneration._Work, "dialogues", dies_in_the_second_part)
    todo = regeneration.missing(dataset)
    with pytest.raises(KeyboardInterrupt):
        regeneration.run_units(dataset, corpus, hybrid, todo, runtime)
    with pytest.raises(IncompleteError, match="3 of 4 units"):
        regeneration.seal(dataset)
    again = regeneration.plan(root, "test", corpus, hybrid, config)
    todo = regeneration.missing(again)
    assert todo == ["part-000001", "part-000002", "held-out"]
    numbers = []
    regeneration.run_units(
        again, corpus, hybrid, todo, runtime, lambda *report: numbers.append(report)
    )
    facts = regeneration.seal(again)["facts"]
    assert regeneration.missing(again) == []
    assert any("tokens_per_s" in report[2] for report in numbers)
    assert (facts["num_train"], facts["num_held_out"]) == (8, 3)
    lowest = {row.messages[0]["content"] for row in sorted(rows, key=lambda row: row.id)[:8]}
    new = list(read_rows(again, "train"))
    assert {row.messages[0]["content"] for row in new} == lowest
    lowest_held = sorted(held, key=lambda row: row.id)[:3]
    assert sorted(read_rows(again, "held_out"), key=lambda row: row.id) == lowest_held

    answerer = LocalAnswerer(hybrid, config, runtime)
    for row in new:
        [answer] = answerer.answer([Prompt("k", row.messages[:1], None)])
        assert row.messages[1] == answer.message


def test_tokens_in_another_thinking_mode_than_the_answers_are_refused(root, tmp_path):
    target = chats.target(tmp_path / "target", REWRITING)
    row = row_of(user("a"), assistant("b"))
    corpus = corpus_of(root, [row])
    config = RegenerateConfig(thinking=True)
    inputs = {"corpus": corpus.fingerprint, "rows": "1"}
    dataset = Dataset.create(root, CORPORA, "r", version=1, config=config, inputs=inputs)
    regeneration.answer_units(dataset, corpus, Scripted(says("new")), regeneration.missing(dataset))
    regeneration.seal(dataset)
    with pytest.raises(MismatchError, match="answered with thinking=True"):
        tokenization.plan(root, "t", dataset, target, TokenizeConfig(thinking=False))
