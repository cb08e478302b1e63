import re

import pytest

from dflash_core import tokenization
from dflash_core.config import TokenizeConfig
from dflash_core.errors import InputError, MismatchError
from dflash_core.storage import Storage
from flows import tokens_cli
from flows.cli import main
from tests import chats
from tests.chats import assistant, user
from tests.core.test_tokenization import corpus_of, row_of


@pytest.fixture
def root(tmp_path):
    """A root with one tokens dataset of three conversations."""
    root = Storage.from_url(str(tmp_path / "root"))
    target = chats.target(tmp_path / "target")
    rows = [row_of(user(f"what is {i}?"), assistant(f"[red]it is {i}" + "!" * i)) for i in range(3)]
    corpus = corpus_of(root, rows)
    config = TokenizeConfig(pack_tokens=256)
    dataset = tokenization.plan(root, "test", corpus, target, config)
    todo = tokenization.missing(dataset, corpus)
    tokenization.run_units(dataset, corpus, target, todo)
    tokenization.seal(dataset, corpus)
    return root


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["tokens", *arguments])
    assert ended.value.code == 0


def test_a_sample_is_shown_with_what_is_supervised_in_brackets(root, capsys):
    run("show", "--index", "1", "--root", root.url)
    shown = capsys.readouterr().out
    assert "sample 1 of 3" in shown
    found = re.search(
        r"<\|im_start\|>user\nwhat is (\d)\?<\|im_end\|>\n<\|im_start\|>assistant\n"
        r"⟦\[red\]it is (\d)!*<\|im_end\|>⟧",
        shown,
    )
    assert found
    assert found[1] == found[2]


def test_on_a_terminal_it_is_coloured(root, capsys, monkeypatch):
    from rich.console import Console

    monkeypatch.setattr(
        tokens_cli, "console", Console(force_terminal=True, color_system="standard")
    )
    run("show", "--root", root.url)
    shown = capsys.readouterr().out
    assert "⟦" not in shown
    assert re.search(r"\x1b\[1;32m\[red\]it is \d!*<\|im_end\|>\x1b\[0m", shown)


def test_stats_name_lengths_shares_and_fill(root, capsys):
    run("stats", "--root", root.url)
    shown = capsys.readouterr().out
    for name in ("tokens of a sample", "supervised share", "fill of a pack", "encoded_per_printed"):
        assert name in shown


def test_what_cannot_be_shown_is_said_in_one_sentence(root, tmp_path):
    other = chats.target(tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_bytes(
        (tmp_path / "other" / "tokenizer.json").read_bytes().replace(b"im_end", b"im_fin")
    )
    empty = Storage.from_url(str(tmp_path / "empty"))
    with pytest.raises(InputError, match="index 9 is out of range; there are 3 samples"):
        tokens_cli.show(index=9, root=root.url)
    with pytest.raises(MismatchError, match="was made with tokenizer"):
        tokens_cli.show(index=0, root=root.url, target=other.id)
    with pytest.raises(InputError, match=r"expected one complete tokens dataset .* found none"):
        tokens_cli.show(index=0, root=empty.url)
