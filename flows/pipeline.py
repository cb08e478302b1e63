"""All stages as one flow: conversations in, an exported drafter out.

Every stage lands where its fingerprint says, so a run that was killed is simply started again: finished
stages are reused, the interrupted one continues from its commit records.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run
from rich.console import Console

from dflash_core import extraction
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from flows import fan_out, preflight, summary
from flows._common import StageResult, forced_by, stage_flow
from flows.curate import curate
from flows.evaluate import evaluate
from flows.export import export
from flows.extract import extract
from flows.params import (
    CurateParams,
    EvaluateParams,
    ExportParams,
    ExtractParams,
    PipelineParams,
    RegenerateParams,
    StageParams,
    TokenizeParams,
    TrainParams,
)
from flows.plan import check_budget
from flows.regenerate import regenerate
from flows.server import patiently
from flows.tokenize import tokenize
from flows.train import train


@stage_flow
def pipeline(params: PipelineParams) -> list[StageResult]:
    """Curate, regenerate, tokenize, extract, train, evaluate, export; prints one table at the end."""
    start = time.monotonic()
    if (flow_run.run_count or 0) <= 1:
        preflight.check(params, patient=True)
    stages = list(_stages(params))
    patiently(create_markdown_artifact, summary.markdown(stages), key="pipeline-summary")
    summary.print_table(stages, time.monotonic() - start, Console())
    return stages


def _stages(params: PipelineParams) -> Iterator[StageResult]:
    """Runs the stages in order, each with the paths that the earlier ones handed on."""
    common: dict[str, Any] = {
        "root": params.root,
        "name": params.name,
        "runtime": params.runtime,
        "force": params.force,
    }
    target: dict[str, Any] = {"target": params.target}
    run = _as_deployment if params.stages_run == "as-deployments" else _here
    corpus = run(curate, CurateParams(**common, curate=params.curate))
    yield corpus
    if params.on_policy:
        corpus = run(
            regenerate,
            RegenerateParams(
                **common,
                **target,
                corpus=corpus.path,
                regenerate=params.regenerate,
                endpoints=params.endpoints,
            ),
        )
        yield corpus
    tokens = run(
        tokenize, TokenizeParams(**common, **target, corpus=corpus.path, tokenize=params.tokenize)
    )
    yield tokens
    if params.budget.approve_above_dollars:
        _ask_for_approval(params, tokens.path)
    hidden = run(
        extract, ExtractParams(**common, **target, tokens=tokens.path, extract=params.extract)
    )
    yield hidden
    trained = run(
        train,
        TrainParams(**common, **target, hidden=hidden.path, corpus=corpus.path, train=params.train),
    )
    yield trained
    evaluation = run(
        evaluate,
        EvaluateParams(
            **common,
            **target,
            run=trained.path,
            corpus=corpus.path,
            evaluate=params.evaluate,
            compare=params.compare,
        ),
    )
    yield evaluation
    yield run(
        export,
        ExportParams(
            **common,
            **target,
            run=trained.path,
            evaluation=evaluation.path,
            export=params.export,
            publish_to=params.publish_to,
        ),
    )


def _ask_for_approval(params: PipelineParams, tokens_path: str) -> None:
    """Asks for what extraction still has to do."""
    root = Storage.from_url(params.root)
    tokens = Dataset.open(root, tokens_path)
    store = extraction.requested(root, params.name, tokens, params.target, params.extract)
    again = store.must_be_emptied(forced_by(params))
    check_budget(
        tokens,
        params.target,
        params.extract,
        params.budget,
        packs_there=0 if again else len(store.committed()),
    )


def _here(stage: Any, params: StageParams) -> StageResult:
    return stage(params)


def _as_deployment(stage: Any, params: StageParams) -> StageResult:
    spread = stage.name in ("extract", "regenerate") and params.runtime.child_runs
    return fan_out.run_stage(
        stage.name, f"{stage.name}/{'fan-out' if spread else 'default'}", params
    )


if __name__ == "__main__":
    from flows.cli import run_module

    run_module("pipeline")
