"""What the curate flow shows on its run's page."""

from __future__ import annotations

import json

import pytest

from dflash_core.config import CurateConfig, SourceConfig
from flows.params import CurateParams
from tests.chats import assistant, user


@pytest.mark.server
@pytest.mark.timeout(400)
def test_the_report_is_two_tables_and_a_chart(prefect_server, tmp_path):
    from prefect.artifacts import Artifact

    from flows.curate import curate

    rows = [{"messages": [user(f"q{i}"), assistant("a" * i)]} for i in range(4)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in [*rows, rows[1]]))
    source = SourceConfig(name="mine", reader="openai", path=str(path))
    config = CurateConfig(sources=[source], held_out_fraction=0)
    result = curate(CurateParams(root=str(tmp_path / "root"), name="shown", curate=config))
    assert result.facts["num_train"] == 3
    [line] = json.loads(Artifact.get("curate-summary").data)
    shown = {key: line[key] for key in ("source", "rows in", "kept", "rejected", "duplicates")}
    assert shown == {"source": "mine", "rows in": 5, "kept": 3, "rejected": 1, "duplicates": 1}
    [reason] = json.loads(Artifact.get("curate-reasons").data)
    assert (reason["kind"], reason["name"]) == ("rejected", "empty assistant message")
    chart = str(Artifact.get("curate-lengths").data)
    assert "mine: rows by characters\n        < 4 │" in chart
