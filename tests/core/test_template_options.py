"""Options of the chat template reach every text that is printed, and everything that is made with them says so."""

import pytest

from dflash_core import extraction, generation, tokenization
from dflash_core.answers import Prompt
from dflash_core.config import (
    EndpointsConfig,
    EvaluateConfig,
    ExtractConfig,
    RegenerateConfig,
    Runtime,
    TargetConfig,
    TokenizeConfig,
)
from dflash_core.corpus import regeneration
from dflash_core.corpus.rows import CORPORA, Row, content_id, write_part
from dflash_core.errors import InputError, MismatchError
from dflash_core.evaluation_prompts import choose_prompts
from dflash_core.generation import LocalAnswerer
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from dflash_core.target import identify, load_tokenizer
from tests import chats, targets
from tests.chat_server import ChatServer, reply
from tests.chats import assistant, user

TEMPLATE = (
    "{{- '<|im_start|>system effort ' + (reasoning_effort or 'medium') + '<|im_end|>' }}"
    + chats.REWRITING
)
HIGH = {"reasoning_effort": "high"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A tiny target without options, which a test may add."""
    folder = tmp_path_factory.mktemp("target")
    made = targets.qwen3_5_text(folder, vocab_size=448, eos_token_id=None, pad_token_id=None)
    chats.tokenizer(TEMPLATE).save_pretrained(folder)
    return made


@pytest.fixture
def high(plain):
    return plain.model_copy(update={"template_options": HIGH})


@pytest.fixture
def root(tmp_path):
    return Storage.from_url(str(tmp_path / "root"))


@pytest.fixture
def corpus(root):
    dataset = Dataset.create(root, CORPORA, "test", version=1, config={}, inputs={})
    parts = {}
    for split in ("train", "held_out"):
        messages = [user(split), assistant("answer")]
        row = Row(content_id(messages, None), "test", messages, None, {})
        parts[split] = [write_part(dataset.storage, "p", [row])]
    dataset.seal([], {"parts": parts})
    return dataset


def prompt_ids(target, text, **options):
    """Token ids of a question as transformers alone prints it."""
    tokenizer = load_tokenizer(target)
    shown = tokenizer.apply_chat_template(
        [user(text)],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
        **options,
    )
    return tokenizer(shown, add_special_tokens=False)["input_ids"]


def tokenized(root, corpus, target):
    dataset = tokenization.plan(root, "t", corpus, target, TokenizeConfig(pack_tokens=128))
    tokenization.run_units(dataset, corpus, target, tokenization.missing(dataset, corpus))
    tokenization.seal(dataset, corpus)
    return dataset


def test_tokens_hold_what_the_options_print(root, corpus, plain, high):
    for target, options in ((plain, {}), (high, HIGH)):
        tokens = tokenization.Tokens.open(tokenized(root, corpus, target))
        ids, mask = tokens.sample(0)
        assert ids[: mask.argmax()].tolist() == prompt_ids(target, "train", **options)


def test_a_local_target_is_asked_with_the_options(high, monkeypatch):
    asked = []

    def watched(model, prompts, *rest):
        asked.extend(prompts)
        return [[0] for _ in prompts]

    monkeypatch.setattr(generation, "generate", watched)
    answerer = LocalAnswerer(high, RegenerateConfig(max_new_tokens=4), Runtime(device="cpu"))
    answerer.answer([Prompt("k", [user("train")], None)])
    assert asked == [prompt_ids(high, "train", **HIGH)]


def test_servers_are_asked_with_the_options_and_checked_against_them(root, corpus, plain, high):
    def server_of_the_target(body):
        options = body.get("chat_template_kwargs", {})
        options = {key: value for key, value in options.items() if key != "enable_thinking"}
        count = len(prompt_ids(plain, body["messages"][-1]["content"], **options))
        return reply("yes", prompt=count, tokens=2)

    def deaf(body):
        return server_of_the_target({**body, "chat_template_kwargs": {}})

    effort = 40 * "very "  # a difference of more than one token
    target = high.model_copy(update={"template_options": {"reasoning_effort": effort}})
    for server, differ in ((server_of_the_target, 0), (deaf, 1)):
        with ChatServer(server) as running:
            where = EndpointsConfig(urls=[running.url])
            at = root.child(f"differ-{differ}")
            dataset = regeneration.plan(at, "r", corpus, target, RegenerateConfig())
            todo = regeneration.missing(dataset)
            regeneration.run_served(dataset, corpus, target, where, todo)
            assert regeneration.seal(dataset)["facts"]["prompts_differ"] == differ
        [body] = running.requests
        kwargs = {"reasoning_effort": effort, "enable_thinking": False}
        assert body["chat_template_kwargs"] == kwargs
        assert body["reasoning_effort"] == effort


def test_evaluation_asks_with_the_options(corpus, high):
    config = EvaluateConfig(max_new_tokens=8)
    [prompt] = choose_prompts(corpus, high, config)["prompts"]
    assert prompt["input_ids"] == prompt_ids(high, "held_out", **HIGH)


def test_what_was_made_with_other_options_is_another_thing_and_refused(root, corpus, plain, high):
    assert identify(plain).contract().items() ^ identify(high).contract().items() == {
        ("template_hash", identify(plain).template_hash),
        ("template_hash", identify(high).template_hash),
    }
    planned = [regeneration.plan(root, "r", corpus, it, RegenerateConfig()) for it in (plain, high)]
    assert planned[0].path != planned[1].path
    tokens = [tokenized(root, corpus, it) for it in (plain, high)]
    assert tokens[0].path != tokens[1].path
    extraction.plan(root, "h", tokens[1], high, ExtractConfig(target_layer_ids=[1]))
    with pytest.raises(MismatchError, match=r'template_hash: .*with {"reasoning_effort":"high"}'):
        extraction.plan(root, "h", tokens[1], plain, ExtractConfig(target_layer_ids=[1]))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("reasoning_efort", r"does not read; variables that it reads: reasoning_effort$"),
        ("enable_thinking", "leave it out"),
        ("messages", "leave it out"),
        ("tools", "leave it out"),
        ("add_generation_prompt", "leave it out"),
        ("eos_token", "leave it out"),
        ("raise_exception", "does not read"),
    ],
)
def test_an_option_without_effect_or_that_is_not_free_is_refused_by_name(plain, name, sentence):
    target = plain.model_copy(update={"template_options": {name: "high"}})
    with pytest.raises(InputError, match=f"template_options sets '{name}'.*{sentence}"):
        identify(target)


def test_options_may_be_any_json(plain):
    options = {"reasoning_effort": {"a": [1, None, True]}}
    target = TargetConfig(id=plain.id, template_options=options)
    assert TargetConfig.model_validate_json(target.model_dump_json()) == target
    assert hash(target) != hash(plain)
    with pytest.raises(ValueError, match="valid JSON"):
        TargetConfig(template_options={"reasoning_effort": object()})
