"""What the tokenize flow shows on its run's page."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dflash_core.config import TokenizeConfig
from dflash_core.storage import Storage
from flows.params import TokenizeParams
from tests import chats
from tests.chats import assistant, user
from tests.core.test_tokenization import corpus_of, row_of


@pytest.mark.server
@pytest.mark.timeout(400)
def test_tokens_of_each_source_are_a_table(prefect_server, tmp_path):
    from prefect.artifacts import Artifact

    from flows.tokenize import tokenize

    rows = [row_of(user(f"q{i}"), assistant("a" * i)) for i in range(1, 5)]
    rows[0] = replace(rows[0], source="other")
    root = str(tmp_path / "root")
    corpus = corpus_of(Storage.from_url(root), rows)
    result = tokenize(
        TokenizeParams(
            root=root,
            name="shown",
            corpus=corpus.path,
            target=chats.target(tmp_path / "target"),
            tokenize=TokenizeConfig(pack_tokens=64),
        )
    )
    lines = json.loads(Artifact.get("tokenize-sources").data)
    assert [(line["source"], line["rows"], line["samples"]) for line in lines] == [
        ("other", 1, 1),
        ("test", 3, 3),
    ]
    assert sum(line["tokens"] for line in lines) == result.facts["total_tokens"]
