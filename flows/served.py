"""Acceptance and speed of a running server against the offline evaluation."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact

from dflash_core import served_evaluation as serving
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from flows._common import Stage, StageResult, progress_on_page, stage_flow, stage_task
from flows.params import ServedParams
from flows.server import patiently


@stage_task
def ask_server(params: ServedParams, path: str, units: list[str]) -> None:
    """Asks the server at every level of concurrency that is missing."""
    root = Storage.from_url(params.root)
    dataset, measured = Dataset.open(root, path), Dataset.open(root, params.evaluation)
    with progress_on_page("served", ", ".join(units)) as progress:
        serving.run(dataset, measured, params.target, progress)


@stage_flow
def served(params: ServedParams) -> StageResult:
    """Drives a vLLM or SGLang server and reads its counters; warns where they part from the evaluation."""
    stage = Stage(params)
    measured = Dataset.open(stage.root, params.evaluation)
    dataset = stage.plan(
        serving.plan, stage.root, params.name, measured, params.target, params.served
    )
    if stage.has_work:
        units = serving.units(params.served)
        stage.run(ask_server, params, units, serving.missing(dataset), span=len(units))
        serving.seal(dataset)
    report = dataset.storage.get("report.md").decode()
    patiently(create_markdown_artifact, report, key="served-report")
    return stage.publish()


if __name__ == "__main__":
    from flows.cli import run_module

    run_module("served")
