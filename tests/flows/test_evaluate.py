"""Evaluate, served and export as flows: what is on their pages, and where the export goes."""

from __future__ import annotations

import json

import pytest

from dflash_core.config import EvaluateConfig, ExportConfig, Runtime, ServedConfig
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from dflash_core.target import load_tokenizer
from flows.params import EvaluateParams, ExportParams, ServedParams
from tests import targets
from tests.runs import make_row, question, sealed_corpus, sealed_run
from tests.serving import Engine


@pytest.mark.server
@pytest.mark.timeout(400)
def test_an_evaluation_is_shown_held_against_a_server_and_exported(prefect_server, tmp_path):
    from prefect.artifacts import Artifact

    from flows.evaluate import evaluate
    from flows.export import export
    from flows.served import served

    root, target = Storage.from_url(str(tmp_path / "root")), targets.qwen3(tmp_path / "target")
    run, corpus = sealed_run(root, target), sealed_corpus(root, [make_row(question(1))])
    common = {"root": root.url, "name": "demo", "target": target}
    measured = evaluate(
        EvaluateParams(
            **common,
            run=run.path,
            corpus=corpus.path,
            runtime=Runtime(device="cpu"),
            evaluate=EvaluateConfig(num_prompts=1, max_new_tokens=8, temperatures=[0.0, 1.0]),
        )
    )
    rows = json.loads(Artifact.get("evaluate-summary").data)
    assert {(row["drafter"], row["mode"]) for row in rows} == {
        ("at the start", "greedy, thinking off"),
        ("trained", "greedy, thinking off"),
        ("trained", "temperature 1, thinking off"),
    }
    assert "# Evaluation of demo" in str(Artifact.get("evaluate-report").data)
    assert str(Artifact.get("evaluate-acceptance").data).startswith("data:image/png;base64,")

    engine = Engine("vllm", Dataset.open(root, measured.path), load_tokenizer(target))
    try:
        config = ServedConfig(endpoint=engine.url, concurrency=[1])
        checked = served(ServedParams(**common, evaluation=measured.path, served=config))
    finally:
        engine.close()
    assert checked.facts["levels"][0]["warning"] == ""
    assert "as served by vllm" in str(Artifact.get("served-report").data)

    exported = export(
        ExportParams(
            **common,
            run=run.path,
            evaluation=measured.path,
            export=ExportConfig(layouts=["z-lab", "speculators"]),
            publish_to=str(tmp_path / "copy"),
        )
    )
    assert exported.facts["layouts"] == ["z-lab", "speculators"]
    card = (tmp_path / "copy/speculators/README.md").read_text()
    assert "| held-out | temperature 1, thinking off | 1 |" in card
