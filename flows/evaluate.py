"""Acceptance of a trained drafter, and of others beside it."""

from __future__ import annotations

import base64

from prefect.artifacts import create_image_artifact, create_markdown_artifact

from dflash_core import evaluation, evaluation_report
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from flows._common import Stage, StageResult, progress_on_page, stage_flow, stage_task
from flows.compute_thread import on_compute_thread
from flows.params import EvaluateParams


@stage_task
def evaluate_prompts(params: EvaluateParams, path: str, units: list[str]) -> None:
    """Decodes some prompts with the target alone and with the drafter."""
    root = Storage.from_url(params.root)
    dataset, run = Dataset.open(root, path), Dataset.open(root, params.run)
    left = set(evaluation.missing(dataset))
    with progress_on_page("evaluate", f"{units[0]} to {units[-1]}") as progress:
        on_compute_thread(
            evaluation.run,
            dataset,
            run,
            params.target,
            params.runtime,
            [unit for unit in units if unit in left],
            progress,
            params.compare,
        )


def show_report(dataset: Dataset) -> None:
    """The report on the run's page, its picture in it."""
    create_markdown_artifact(dataset.storage.get("report.md").decode(), key="evaluate-report")
    if dataset.storage.exists("acceptance.png"):
        data = base64.b64encode(dataset.storage.get("acceptance.png")).decode()
        create_image_artifact(f"data:image/png;base64,{data}", key="evaluate-acceptance")


@stage_flow
def evaluate(params: EvaluateParams) -> StageResult:
    """Decodes prompts with the real target: acceptance length, losslessness, speed; beside other drafters."""
    stage = Stage(params)
    run = Dataset.open(stage.root, params.run)
    corpus = Dataset.open(stage.root, params.corpus)
    dataset = evaluation.plan(
        stage.root, params.name, run, corpus, params.target, params.evaluate, params.compare
    )
    if stage.has_work(dataset):
        units = evaluation.units(dataset)
        # Every task loads the target; what is done is kept by prompt, so long ones lose nothing.
        stage.run(evaluate_prompts, params, units, evaluation.missing(dataset), span=256)
        evaluation.seal(dataset)
    show_report(dataset)
    return stage.publish(evaluation_report.table(dataset.facts))


if __name__ == "__main__":
    from flows.cli import run_module

    run_module("evaluate")
