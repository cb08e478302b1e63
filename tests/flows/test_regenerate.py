import json

import pytest

from dflash_core.config import EndpointsConfig, RegenerateConfig
from dflash_core.storage import Storage
from flows.params import RegenerateParams
from tests import chats
from tests.chat_server import ChatServer, reply
from tests.chats import assistant, user
from tests.core.test_regeneration import corpus_of, row_of


@pytest.mark.server
@pytest.mark.timeout(400)
def test_servers_answer_for_the_flow(prefect_server, tmp_path):
    from prefect.artifacts import Artifact

    from flows.regenerate import regenerate

    root = Storage.from_url(str(tmp_path / "root"))
    rows = [row_of(user(f"question {i}"), assistant("old")) for i in range(9)]
    corpus = corpus_of(root, rows, [row_of(user("held"), assistant("out"))])
    with ChatServer(lambda body: reply("new", tokens=2)) as server:
        params = RegenerateParams(
            root=root.url,
            name="served",
            corpus=corpus.path,
            target=chats.target(tmp_path / "target"),
            regenerate=RegenerateConfig(rows_per_part=2),
            endpoints=EndpointsConfig(urls=[server.url]),
        )
        result = regenerate(params)
        again = regenerate(params)
    assert result.facts["answers"] == len(server.requests) == 9
    assert result.facts["answered_by"] == [{"model": "target", "engine": "test"}]
    assert again.reused
    shown = {
        line["fact"]: line["value"] for line in json.loads(Artifact.get("regenerate-summary").data)
    }
    assert shown["answer_tokens"] == 18
