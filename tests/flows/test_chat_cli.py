"""`dflash generate` and `dflash chat` on a tiny random target."""

import contextlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from dflash_core.chat import Chat
from dflash_core.decode import Step, greedy
from dflash_core.storage import Storage
from dflash_core.target import load_causal_lm, load_tokenizer
from flows import chat_cli
from flows.cli import main
from tests import targets
from tests.runs import sealed_run


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.qwen3_5_text(tmp_path_factory.mktemp("target"))


@pytest.fixture
def root(tmp_path):
    return str(tmp_path)


def run_command(capsys, *arguments):
    with contextlib.suppress(SystemExit):
        main(list(arguments))
    return capsys.readouterr().out


def own_answer(target, *messages, count=12):
    """What the target writes after these messages."""
    chat = Chat(load_tokenizer(target), thinking=False)
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    prompt = chat.encode(chat.render(turns, None, prompt=True))
    model = load_causal_lm(target, torch.device("cpu"))
    return chat.decode(greedy(model, prompt, count, []))


def options(root, target):
    return ["--root", root, "--target", target.id, "--device", "cpu", "--max-new-tokens", "12"]


def test_generate_prints_the_targets_own_answer_and_how_it_went(root, target, capsys, monkeypatch):
    run = sealed_run(Storage.from_url(root), target)
    genuine, shown = chat_cli.show, []
    monkeypatch.setattr(chat_cli, "show", lambda *args: shown.append(genuine(*args)))
    for more in ([], ["--tree", "6"]):
        out = run_command(capsys, "generate", run.path, "Hello", *options(root, target), *more)
        text = r"12 tokens · prompt [\d.]+ s · acceptance length [\d.]+ · [\d.]+\s+tokens/s"
        assert re.search(text, out)
    assert shown == [own_answer(target, "Hello")] * 2


def test_chat_carries_the_conversation_on(root, target, capsys, monkeypatch):
    run = sealed_run(Storage.from_url(root), target)
    lines = iter(["Hello", "And then?", ""])
    asked = []
    genuine = chat_cli.Session.steps
    monkeypatch.setattr(Console, "input", lambda *args: next(lines))
    monkeypatch.setattr(
        chat_cli.Session,
        "steps",
        lambda self, messages, *rest: asked.append([*messages]) or genuine(self, messages, *rest),
    )
    run_command(capsys, "chat", run.path, *options(root, target))
    first = own_answer(target, "Hello")
    assert [message["content"] for message in asked[1]] == ["Hello", first, "And then?"]


def test_samples_follow_the_seed(root, target, capsys):
    run = sealed_run(Storage.from_url(root), target)
    texts = []
    for seed in ("1", "1", "2"):
        sampled = ["--temperature", "1.5", "--top-p", "0.95", "--seed", seed]
        out = run_command(capsys, "generate", run.path, "Hello", *options(root, target), *sampled)
        texts.append(out.rpartition(" tokens · ")[0])
    assert texts[0] == texts[1] != texts[2]


def test_template_options_are_those_of_the_run(root, capsys, tmp_path_factory):
    made = targets.qwen3_5_text(tmp_path_factory.mktemp("optional"))
    template = load_tokenizer(made).chat_template
    (Path(made.id) / "chat_template.jinja").write_text("{{ effort or 1 }}" + template)
    target = made.model_copy(update={"template_options": {"effort": 3}})
    run = sealed_run(Storage.from_url(root), target)
    command = ["generate", run.path, "Hello", *options(root, target)]
    with pytest.raises(SystemExit):
        main(command)
    assert 'with {"effort":3}' in capsys.readouterr().err
    assert "12 tokens" in run_command(capsys, *command, "--template-option", "effort=3")


def test_a_run_of_another_target_and_a_missing_drafter_are_refused(
    root, target, capsys, tmp_path_factory
):
    other = targets.llama(tmp_path_factory.mktemp("other"))
    run = sealed_run(Storage.from_url(root), other)
    for drafter, text in ((run.path, "target_config_hash"), ("nowhere", "does not exist")):
        with pytest.raises(SystemExit):
            main(["generate", drafter, "Hello", *options(root, target)])
        assert text in capsys.readouterr().err


def test_a_drafter_with_an_embedding_of_its_own_is_refused(root, target, capsys, monkeypatch):
    run = sealed_run(Storage.from_url(root), target)
    genuine, own = chat_cli.load_drafter, torch.zeros(targets.VOCAB, 32)
    monkeypatch.setattr(
        chat_cli, "load_drafter", lambda *args: replace(genuine(*args), embedding_VH=own)
    )
    with pytest.raises(SystemExit):
        main(["generate", run.path, "Hello", *options(root, target)])
    assert "embed_tokens.weight of its own" in capsys.readouterr().err


def test_accepted_drafts_are_coloured_and_characters_are_never_torn(target):
    chat = Chat(load_tokenizer(target), thinking=False)
    tokens = chat.encode("añ\nb€c")
    assert len(tokens) == 9  # one a byte
    steps = [
        Step(0, tokens[:1], 0, 0, verified=False, ended=False),
        Step(0, tokens[1:7], 5, 5, verified=True, ended=False),
        Step(0, [*tokens[7:], 257], 2, 3, verified=True, ended=True),
    ]
    console = Console(force_terminal=True, color_system="standard", width=60)
    with console.capture() as capture, pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat_cli, "console", console)
        assert chat_cli.show(chat, steps, {257}) == "añ\nb€c"
    shown = capture.get().replace("\x1b[0m\x1b[32m", "")
    assert "a\x1b[32mñ\x1b[0m" in shown
    assert "\x1b[32mb€c\x1b[0m" in shown
    assert "\ufffd" not in shown
    assert "acceptance length 4.50" in shown
