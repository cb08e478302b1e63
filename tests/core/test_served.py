"""Regeneration over real HTTP servers that speak OpenAI's chat protocol, some of them badly."""

import contextlib
import subprocess
import sys

import pytest

from dflash_core import masking, served
from dflash_core.answers import Prompt
from dflash_core.chat import Chat
from dflash_core.config import EndpointsConfig, RegenerateConfig, Runtime, TargetConfig
from dflash_core.corpus import regeneration
from dflash_core.corpus.rows import CORPORA, Row, content_id, read_rows, write_part
from dflash_core.errors import InputError, UnreachableError
from dflash_core.manifest import Dataset
from dflash_core.served import ServedAnswerer, base_url, read_reply
from dflash_core.storage import Storage
from tests import chats
from tests.chat_server import ChatServer, reply, status
from tests.chats import REWRITING, STABLE, assistant, user
from tests.ports import free_ports
from tests.templates import FAMILIES

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture
def root(tmp_path):
    return Storage.from_url(str(tmp_path / "root"))


@pytest.fixture
def target(tmp_path):
    return chats.target(tmp_path / "target", STABLE)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(served, "_LONGEST_PAUSE_S", 0.05)
    monkeypatch.setattr(served, "_backoff", lambda state: 0.01)


def row_of(*messages, tools=None, **metadata):
    return Row(content_id(list(messages), tools), "test", list(messages), tools, metadata)


def questions(count):
    return [row_of(user(f"question {i}"), assistant("old")) for i in range(count)]


def corpus_of(root, rows):
    dataset = Dataset.create(
        root, CORPORA, "test", version=1, config={}, inputs={row.id: "" for row in rows}
    )
    parts = {
        "train": [write_part(dataset.storage, "p", rows)],
        "held_out": [write_part(dataset.storage, "p", [row_of(user("held"), assistant("out"))])],
    }
    dataset.seal([], {"parts": parts})
    return dataset


def ask(root, target, rows, servers, *, config=None, progress=None, **endpoints):
    """The rows as the servers answer them, and the facts."""
    corpus = corpus_of(root, rows)
    config = config or RegenerateConfig(rows_per_part=4, max_new_tokens=8)
    dataset = regeneration.plan(root, "r", corpus, target, config)
    where = EndpointsConfig(urls=[server.url for server in servers], **endpoints)
    todo = regeneration.missing(dataset)
    regeneration.run_served(dataset, corpus, target, where, todo, progress or (lambda *_: None))
    facts = regeneration.seal(dataset)["facts"]
    return list(read_rows(dataset, "train")), facts


def echo(body):
    """Answers with the question, upper case."""
    return reply(body["messages"][-1]["content"].upper())


def answers_of(rows):
    return sorted(row.messages[-1]["content"] for row in rows)


# --- conversations -----------------------------------------------------------------------------


def test_every_row_is_answered_whatever_its_neighbours_do(root, target):
    reports = []
    with ChatServer(echo) as server:
        rows, facts = ask(
            root,
            target,
            questions(30),
            [server],
            requests_per_url=7,
            progress=lambda *report: reports.append(report),
        )
    assert answers_of(rows) == sorted(f"QUESTION {i}" for i in range(30))
    assert facts["num_train"] == facts["answers"] == 30
    assert facts["num_held_out"] == 1
    assert 1 < server.most_at_once <= 7
    assert facts["answered_by"] == [{"model": "target", "engine": "test"}]
    assert max(reports, key=lambda report: report[0])[:2] == (30, 30)
    assert {"tokens_per_s", "answers"} <= set(reports[-1][2])


def test_later_turns_see_what_the_target_wrote_and_calls_keep_their_results(root, target):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"n": 1}'}}
    row = row_of(
        user("a"),
        assistant(None, tool_calls=[{"id": "x", **call}, {"id": "y", **call}]),
        {"role": "tool", "content": "1", "tool_call_id": "x"},
        {"role": "tool", "content": "2", "tool_call_id": "y"},
        assistant("old"),
        user("more"),
        assistant("old"),
        tools=TOOLS,
    )
    new_calls = [
        {
            "id": f"z{n}",
            "type": "function",
            "function": {"name": "add", "arguments": f'{{"n":{n}}}'},
        }
        for n in (2, 3)
    ]

    def handler(body):
        if len(body["messages"]) == 1:
            assert body["tools"] == TOOLS
            return reply(
                None, finish="tool_calls", tool_calls=new_calls, reasoning_content="\nhm\n"
            )
        return reply("done")

    with ChatServer(handler) as server:
        [new], facts = ask(root, target, [row], [server])
    sent = server.requests[1]["messages"]
    assert [c["function"]["arguments"] for c in sent[1]["tool_calls"]] == ['{"n": 2}', '{"n": 3}']
    assert [c["id"] for c in sent[1]["tool_calls"]] == ["x", "y"]
    assert [m["tool_call_id"] for m in sent[2:4]] == ["x", "y"]
    assert sent[1]["reasoning"] == sent[1]["reasoning_content"] == "hm"
    assert [m["role"] for m in new.messages] == [m["role"] for m in row.messages]
    assert new.messages[-1] == assistant("done")
    assert facts["answers"] == 3
    assert facts["ended_early"] == 0


def test_sampling_is_sent_as_served_and_nothing_else(root, target):
    with ChatServer(echo) as server:
        ask(root, target, questions(1), [server])
        greedy = server.requests[0]
        config = RegenerateConfig(
            temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, presence_penalty=1.5, seed=3
        )
        ask(root.child("b"), target, questions(2), [server], config=config)
    assert set(greedy) == {"model", "messages", "max_tokens", "temperature"}
    assert (greedy["model"], greedy["max_tokens"], greedy["temperature"]) == ("target", 8, 0)
    one, other = server.requests[1:]
    assert (one["top_p"], one["top_k"], one["min_p"]) == (0.9, 20, 0.1)
    assert one["presence_penalty"] == 1.5
    assert one["seed"] != other["seed"]


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
def test_servers_with_defaults_of_their_own_get_neutral_values_too(root, target, engine):
    with ChatServer(echo, engine=engine) as server:
        ask(root, target, questions(1), [server])
        config = RegenerateConfig(temperature=0.7, top_k=20, min_p=0.1, presence_penalty=1.5)
        ask(root.child("b"), target, questions(1), [server], config=config)
    names = ("top_k", "min_p", "presence_penalty", "repetition_penalty")
    sent = [tuple(body[name] for name in names) for body in server.requests]
    assert sent == [(-1, 0.0, 0.0, 1.0), (20, 0.1, 1.5, 1.0)]
    assert server.requests[1]["top_p"] == 1.0


def test_a_share_of_the_rows_is_answered_with_thinking_and_every_row_names_its_mode(root, tmp_path):
    target = chats.target(tmp_path / "switch", REWRITING)
    config = RegenerateConfig(thinking=True, thinking_share=0.4, rows_per_part=16)
    with ChatServer(echo) as server:
        rows, facts = ask(root, target, questions(60), [server], config=config)
    modes = {
        body["messages"][0]["content"].upper(): body["chat_template_kwargs"]["enable_thinking"]
        for body in server.requests
    }
    assert {row.messages[-1]["content"]: row.metadata["asked_to_think"] for row in rows} == modes
    assert facts["thinking_rows"] == sum(modes.values())
    assert 12 <= facts["thinking_rows"] <= 36


def test_a_template_without_switch_cannot_think_for_a_share(root, target):
    config = RegenerateConfig(thinking=True, thinking_share=0.5)
    with pytest.raises(InputError, match="has no thinking switch"):
        regeneration.plan(root, "r", corpus_of(root, questions(1)), target, config)


def test_rows_that_hit_the_length_limit_are_marked_with_what_was_written(root, target):
    with ChatServer(lambda body: reply("one two", finish="length", tokens=2)) as server:
        [row], facts = ask(root, target, questions(1), [server])
    assert row.metadata["cut_by_length"] is True
    assert row.metadata["written_characters"] == len("one two")
    assert facts["cut_by_length"] == 1


# --- servers that fail -------------------------------------------------------------------------


class Flaky:
    """Fails the first `times` requests for each question, then echoes."""

    def __init__(self, failure, times=2):
        self.failure, self.times, self.asked = failure, times, {}

    def __call__(self, body):
        question = body["messages"][-1]["content"]
        self.asked[question] = self.asked.get(question, 0) + 1
        return self.failure() if self.asked[question] <= self.times else echo(body)


@pytest.mark.parametrize(
    "failure",
    [
        lambda: status(429, "slow down"),
        lambda: status(500, "out of memory"),
        lambda: status(503, "loading"),
        lambda: ConnectionResetError(),
        lambda: {"choices": []},
        lambda: 3.0,
        lambda: reply("half an ans", finish="abort"),
        lambda: reply("", finish="content_filter"),
    ],
    ids=["429", "500", "503", "dropped", "no choices", "timeout", "aborted", "filtered"],
)
def test_a_request_that_fails_is_asked_again(root, target, failure):
    flaky = Flaky(failure)
    with ChatServer(flaky) as server:
        rows, facts = ask(root, target, questions(6), [server], requests_per_url=3, timeout_s=0.5)
    assert answers_of(rows) == sorted(f"QUESTION {i}" for i in range(6))
    assert set(flaky.asked.values()) == {3}
    assert facts["rejected"] == {}


def test_a_server_that_is_busy_with_other_answers_is_waited_for_beyond_the_patience(root, target):
    flaky = Flaky(lambda: status(429), times=40)
    with ChatServer(flaky) as server:
        rows, _ = ask(root, target, questions(1), [server], patience_s=0.2)
    assert len(rows) == 1


def test_a_server_that_refuses_everything_stops_the_run_with_its_words(root, target):
    with (
        ChatServer(lambda body: status(422, "Unexpected fields: {'top_k'}")) as server,
        pytest.raises(InputError, match=r"refuse all of the first 16 .*422: Unexpected fields"),
    ):
        ask(root, target, questions(40), [server])


def test_a_server_says_when_to_ask_again(root, target, monkeypatch):
    monkeypatch.setattr(served, "_LONGEST_PAUSE_S", 5)
    flaky, pauses = Flaky(lambda: status(429, **{"Retry-After": "1"}), times=1), []
    monkeypatch.setattr(
        served, "_pause", lambda state, real=served._pause: pauses.append(real(state)) or 0
    )
    with ChatServer(flaky) as server:
        ask(root, target, questions(1), [server])
    assert pauses == [1]


def test_work_goes_on_with_the_servers_that_are_left(root, target):
    dead = ChatServer(echo)
    with ChatServer(echo) as server, dead:
        rows, _ = ask(
            root,
            target,
            questions(40),
            [server, dead],
            requests_per_url=4,
            progress=lambda done, *_: dead.__exit__() if done == 5 else None,
        )
    assert answers_of(rows) == sorted(f"QUESTION {i}" for i in range(40))
    assert dead.requests
    assert server.most_at_once <= 4


def test_a_server_that_is_dead_at_the_start_joins_when_it_is_up(root, target):
    (port,) = free_ports(1)
    late = ChatServer(echo, port=port)
    with ChatServer(echo) as server, contextlib.ExitStack() as stack:
        rows, facts = ask(
            root,
            target,
            questions(120),
            [late, server],
            requests_per_url=4,
            progress=lambda done, *_: stack.enter_context(late) if done == 5 else None,
        )
    assert len(rows) == 120
    assert late.requests
    assert facts["answered_by"] == [{"model": "target", "engine": "test"}]


def test_a_start_with_no_server_that_answers_names_all_of_them(root, target):
    dead = [ChatServer(echo, port=port) for port in free_ports(2)]
    with pytest.raises(UnreachableError, match=rf"no server of {dead[0].url}, {dead[1].url} has"):
        ask(root, target, questions(1), dead, patience_s=0.2)


def test_several_servers_share_the_work_and_a_conversation_stays_with_its_own(root, target):
    turns = [m for _ in range(3) for m in (user("again"), assistant("old"))]
    rows = [row_of(user(f"first {i}"), assistant("old"), *turns) for i in range(40)]
    with ChatServer(echo) as one, ChatServer(echo) as other:
        ask(root, target, rows, [one, other], requests_per_url=64)
    asked = [{body["messages"][0]["content"] for body in it.requests} for it in (one, other)]
    assert min(map(len, asked)) >= 10
    assert not asked[0] & asked[1]


def test_a_row_that_a_server_refuses_or_always_fails_on_is_rejected_with_its_words(root, target):
    def handler(body):
        question = body["messages"][-1]["content"]
        if question.endswith("3"):
            return status(400, "longer than 4096 tokens")
        return status(500, "kernel died") if question.endswith("5") else echo(body)

    with ChatServer(handler) as server:
        corpus = corpus_of(root, questions(30))
        config = RegenerateConfig(rows_per_part=30, max_new_tokens=8)
        dataset = regeneration.plan(root, "r", corpus, target, config)
        where = EndpointsConfig(urls=[server.url], requests_per_url=2)
        regeneration.run_served(dataset, corpus, target, where, regeneration.missing(dataset))
    facts = regeneration.seal(dataset)["facts"]
    assert facts["rejected"] == {"servers refuse it": 3, "servers fail on it": 3}
    details = {it["detail"] for it in dataset.records()["part-000000"]["rejects"]}
    assert details == {"400: longer than 4096 tokens", "500 kernel died"}


def test_an_outage_behind_a_proxy_costs_no_row(root, target):
    """The proxy answers 502 for its servers; rows in flight fail many times, and are answered after it."""
    asked = []

    def handler(body):
        asked.append(body)
        return status(502, "bad gateway") if 6 <= len(asked) < 80 else echo(body)

    with ChatServer(handler) as server:
        rows, facts = ask(root, target, questions(20), [server], requests_per_url=4)
    assert len(rows) == 20
    assert facts["rejected"] == {}


def test_a_row_that_servers_fail_on_is_found_when_no_other_is_left(root, target):
    def handler(body):
        failing = body["messages"][-1]["content"] == "question 1"
        return status(500, "kernel died") if failing else echo(body)

    with ChatServer(handler) as server:
        rows, facts = ask(root, target, questions(2), [server], requests_per_url=1, patience_s=20)
    assert answers_of(rows) == ["QUESTION 0"]
    assert facts["rejected"] == {"servers fail on it": 1}


def test_a_run_stops_when_no_server_answers_and_continues_where_it_was(root, target):
    rows = questions(12)
    corpus = corpus_of(root, rows)
    config = RegenerateConfig(rows_per_part=3, max_new_tokens=8)
    dataset = regeneration.plan(root, "r", corpus, target, config)
    with ChatServer(echo) as server:
        where = EndpointsConfig(urls=[server.url], requests_per_url=1, patience_s=0.3)
        with pytest.raises(UnreachableError, match=r"no server of http://127.* has answered for"):
            regeneration.run_served(
                dataset,
                corpus,
                target,
                where,
                regeneration.missing(dataset),
                lambda done, *_: server.__exit__() if done == 4 else None,
            )
    left = regeneration.missing(dataset)
    assert 1 <= len([unit for unit in left if unit != "held-out"]) <= 3
    with ChatServer(echo) as server:
        where = EndpointsConfig(urls=[server.url])
        regeneration.run_served(dataset, corpus, target, where, left)
    regeneration.seal(dataset)
    assert answers_of(read_rows(dataset, "train")) == sorted(f"QUESTION {i}" for i in range(12))
    assert len(server.requests) <= 9


# --- what a user can get wrong -----------------------------------------------------------------


def test_a_wrong_key_stops_the_run_with_one_sentence(root, target, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sesame")
    with (
        ChatServer(lambda body: status(401, "no")) as server,
        pytest.raises(InputError, match="refuses the API key"),
    ):
        ask(root, target, questions(20), [server], api_key_variable="MY_KEY")
    assert server.keys == {"Bearer sesame"}


def test_a_key_that_is_not_set_is_named(root, target, monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(InputError, match="'MY_KEY' is not set"):
        ServedAnswerer(
            target,
            RegenerateConfig(),
            EndpointsConfig(urls=["http://h"], api_key_variable="MY_KEY"),
        )


def test_a_server_of_another_model_is_refused(root, target):
    with ChatServer(echo, model="llama,qwen") as server:
        with pytest.raises(InputError, match="serves llama, qwen, expected one model"):
            ask(root, target, questions(1), [server])
        with pytest.raises(InputError, match="serves llama, qwen, expected gemma"):
            ask(root, target, questions(1), [server], model="gemma")
        ask(root, target, questions(1), [server], model="qwen")
    assert server.requests[0]["model"] == "qwen"


def test_addresses():
    assert base_url("http://gpu1:8000") == "http://gpu1:8000/v1"
    assert base_url("https://host/some/v1/") == "https://host/some/v1"
    with pytest.raises(InputError, match="no http address"):
        base_url("gpu1:8000")
    with pytest.raises(InputError, match="holds a password") as error:
        base_url("http://me:secret@gpu1/v1")
    assert "secret" not in str(error.value)


# --- reading replies ---------------------------------------------------------------------------


def chat_of(name, thinking):
    family = FAMILIES[name]
    return Chat(chats.tokenizer(family.template, family.markers, family.eos), thinking)


def read(chat, body, tools=TOOLS):
    prompt = Prompt("k:0", [user("a")], tools)
    prompt_text = chat.render(prompt.messages, prompt.tools, prompt=True)
    return prompt_text, read_reply(chat, prompt, prompt_text, body)


XML = "<tool_call>\n<function=add>\n<parameter=n>\n1\n</parameter>\n<parameter=s>\ntwo words\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("how", ["token ids", "text", "parts"])
def test_a_reply_trains_on_exactly_what_was_written(thinking, how):
    chat = chat_of("qwen3.5", thinking)
    written = ("hm\n</think>\n\n" if thinking else "") + f"first\n\n{XML}"
    tokens = [*chat.encode(written), chat.end_of_turn]
    call = {"function": {"name": "add", "arguments": '{"n": 1, "s": "two words"}'}}
    body = reply(written, tokens=len(tokens))
    if how == "token ids":
        body = reply("whatever the server's parser made of it", tokens=len(tokens))
        body["choices"][0]["token_ids"] = tokens
    if how == "parts":
        thought = {"reasoning_content": "\nhm\n"} if thinking else {}
        body = reply("first\n\n", tokens=len(tokens), tool_calls=[call], **thought)
    _, answer = read(chat, body)
    assert answer.exact
    assert answer.message["tool_calls"][0]["function"] == call["function"]
    assert answer.message.get("reasoning_content") == ("hm" if thinking else None)
    row = row_of(user("a"), answer.message, tools=TOOLS)
    [rendering], _ = masking.renderings(chat, row)
    [turn] = rendering.turns
    assert rendering.text[turn.begin : turn.end] == written + chat.after_answer


@pytest.mark.parametrize("how", ["token ids", "parts"])
@pytest.mark.parametrize("thought", ["hm", None])
def test_channels_are_read_as_reasoning_and_answer(how, thought):
    chat = chat_of("gpt-oss", True)
    analysis = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant"
    written = f"{analysis if thought else ''}<|channel|>final<|message|>so"
    tokens = [*chat.encode(written), chat.end_of_turn]
    parts = {"reasoning_content": thought} if thought else {}
    body = reply("so", tokens=len(tokens), **parts)
    if how == "token ids":
        body["choices"][0]["token_ids"] = tokens
    _, answer = read(chat, body)
    if how == "parts" and not thought:
        assert answer.message == assistant("so")  # text alone does not say in which channel
        return
    assert answer.exact
    assert answer.message == assistant("so", **parts)
    row = row_of(user("a"), answer.message, tools=TOOLS)
    [rendering], _ = masking.renderings(chat, row)
    [turn] = rendering.turns
    assert rendering.text[turn.begin : turn.end] == written + chat.after_answer


def test_channels_that_were_cut_keep_what_was_written():
    chat = chat_of("gpt-oss", True)
    for written in ("<|channel|>analysis<|message|>let me s", "<|channel|>final<|message|>so"):
        body = reply(written, finish="length", tokens=len(chat.encode(written)))
        _, answer = read(chat, body)
        assert answer.exact
        row = row_of(user("a"), answer.message, tools=TOOLS)
        row.metadata.update(cut_by_length=True, written_characters=answer.num_characters)
        [rendering], _ = masking.renderings(chat, row)
        [turn] = rendering.turns
        assert rendering.text[turn.begin : turn.end] == written


def test_an_answer_that_was_cut_inside_its_reasoning_keeps_what_was_written():
    chat = chat_of("qwen3.5", True)
    body = reply(None, finish="length", tokens=len(chat.encode("let me s")), reasoning="let me s")
    _, answer = read(chat, body)
    assert answer.cut
    assert answer.exact
    row = row_of(user("a"), answer.message, tools=TOOLS)
    row.metadata.update(cut_by_length=True, written_characters=answer.num_characters)
    [rendering], _ = masking.renderings(chat, row)
    [turn] = rendering.turns
    assert rendering.text[turn.begin : turn.end] == "let me s"
    assert not turn.ended


def test_what_the_template_prints_otherwise_than_the_server_counted_is_inexact():
    chat = chat_of("qwen3", True)
    _, answer = read(chat, reply("so", tokens=40, reasoning_content="hm"))
    assert not answer.exact
    assert answer.num_characters == 0


def test_a_server_whose_prompts_differ_is_noticed():
    chat = chat_of("qwen3", False)
    length = len(chat.encode(chat.render([user("a")], TOOLS, prompt=True)))
    assert not read(chat, reply("b", prompt=length))[1].prompt_differs
    assert read(chat, reply("b", prompt=length + 9))[1].prompt_differs
    body = reply("b")
    body["prompt_token_ids"] = [1, 2, 3]
    assert read(chat, body)[1].prompt_differs


def test_a_call_that_is_no_json_or_was_cut_is_no_answer():
    chat = chat_of("qwen3", False)
    broken = {"function": {"name": "add", "arguments": '{"n": '}}
    for finish in ("tool_calls", "length"):
        _, answer = read(chat, reply(None, finish=finish, tool_calls=[broken]))
        assert answer.message is None
        assert answer.reason == "call cannot be read"


# --- a real server -----------------------------------------------------------------------------


@pytest.fixture
def transformers_serve():
    """The demo target behind `transformers serve`."""
    pytest.importorskip("openai", reason="transformers serve needs openai")
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", "demo/target"]
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    server = subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(20)


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.timeout(300)
def test_a_real_server_writes_what_the_target_writes_in_this_process(root, transformers_serve):
    target = TargetConfig(id="demo/target", dtype="float32")
    asked = [f"What does json.{name} do?" for name in ("dumps", "loads", "load")]
    corpus = corpus_of(root, [row_of(user(text), assistant("old")) for text in asked])
    config = RegenerateConfig(max_new_tokens=12)
    made = []
    for name, endpoints in (("here", []), ("served", [transformers_serve])):
        dataset = regeneration.plan(root, name, corpus, target, config)
        todo = regeneration.missing(dataset)
        if endpoints:
            where = EndpointsConfig(urls=endpoints, requests_per_url=2)
            regeneration.run_served(dataset, corpus, target, where, todo)
        else:
            regeneration.run_units(dataset, corpus, target, todo, Runtime(device="cpu"))
        facts = regeneration.seal(dataset)["facts"]
        rows = sorted(read_rows(dataset, "train"), key=lambda row: row.messages[0]["content"])
        # The server strips an answer that was cut within white space.
        made.append([(row.messages[0], row.messages[1]["content"].rstrip()) for row in rows])
        assert (facts["answers"], facts["prompts_differ"]) == (3, 0)
    assert made[0] == made[1]
