"""Acceptance of a trained drafter, and of others beside it."""

from __future__ import annotations

import base64

from prefect.artifacts import create_image_artifact, create_markdown_artifact

from dflash_core import evaluation, evaluation_report
from dflash_core.device_work import Job, devices_of
from dflash_core.manifest import Dataset
from flows._common import (
    Stage,
    StageResult,
    progress_on_page,
    run_units,
    stage_flow,
    stage_task,
)
from flows.params import EvaluateParams
from flows.server import patiently

MOST_PROMPTS = 256  # of a task, where one process decodes all


@stage_task
def evaluate_prompts(params: EvaluateParams, path: str, units: list[str]) -> None:
    """Decodes some prompts with the target alone and with the drafter."""
    with progress_on_page("evaluate", f"{units[0]} to {units[-1]}") as progress:
        run_units(path, units, progress)


def show_report(dataset: Dataset) -> None:
    """The report on the run's page, its picture in it."""
    report = dataset.storage.get("report.md").decode()
    patiently(create_markdown_artifact, report, key="evaluate-report")
    if dataset.storage.exists("acceptance.png"):
        data = base64.b64encode(dataset.storage.get("acceptance.png")).decode()
        url = f"data:image/png;base64,{data}"
        patiently(create_image_artifact, url, key="evaluate-acceptance")


@stage_flow
def evaluate(params: EvaluateParams) -> StageResult:
    """Decodes prompts with the real target: acceptance length, losslessness, speed; beside other drafters."""
    stage = Stage(params)
    run = Dataset.open(stage.root, params.run)
    corpus = Dataset.open(stage.root, params.corpus)
    dataset = stage.plan(
        evaluation.plan,
        stage.root,
        params.name,
        run,
        corpus,
        params.target,
        params.evaluate,
        params.compare,
    )
    if stage.has_work:
        units = evaluation.units(dataset)
        missing = evaluation.missing(dataset)
        job = Job.filling(
            dataset,
            params.run,
            params.target,
            params.runtime,
            stage="evaluate",
            compare=params.compare,
        )
        # Every task loads the target; what is done is kept by prompt, so long ones lose nothing.
        share = -(-len(units) // max(1, len(devices_of(params.runtime, "evaluate"))))
        stage.run(evaluate_prompts, params, units, missing, span=min(share, MOST_PROMPTS), job=job)
        evaluation.seal(dataset)
    show_report(dataset)
    return stage.publish(evaluation_report.table(dataset.facts))


if __name__ == "__main__":
    from flows.cli import run_module

    run_module("evaluate")
