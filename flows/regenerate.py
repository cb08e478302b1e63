"""A corpus answered again by the target."""

from __future__ import annotations

from dflash_core.corpus import regeneration
from dflash_core.device_work import Job
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from flows import fan_out
from flows._common import (
    Stage,
    StageResult,
    progress_on_page,
    run_units,
    stage_flow,
    stage_task,
)
from flows.params import RegenerateParams

PARTS_PER_TASK = 32  # servers run idle at the end of each task, when its last answers are written


@stage_task
def regenerate_part(params: RegenerateParams, path: str, units: list[str]) -> None:
    """Answers some parts of the corpus."""
    with progress_on_page("regenerate", ", ".join(units)) as progress:
        if params.endpoints.urls:
            root = Storage.from_url(params.root)
            dataset, corpus = Dataset.open(root, path), Dataset.open(root, params.corpus)
            regeneration.run_served(
                dataset, corpus, params.target, params.endpoints, units, progress
            )
        else:
            run_units(path, units, progress)


@stage_flow
def regenerate_units(params: RegenerateParams, path: str, units: list[str]) -> None:
    """Answers some parts of the corpus with the GPUs of this machine; a child run of `regenerate`."""
    stage = Stage(params)
    dataset = stage.plan(Dataset.open, stage.root, path)
    if stage.has_work:
        _fill(stage, params, dataset, units)


@stage_flow
def regenerate(params: RegenerateParams) -> StageResult:
    """Replaces every answer by the target's own, so that the drafter learns what it will have to predict."""
    stage = Stage(params)
    corpus = Dataset.open(stage.root, params.corpus)
    dataset = stage.plan(
        regeneration.plan, stage.root, params.name, corpus, params.target, params.regenerate
    )
    if stage.has_work:
        _fill(stage, params, dataset, regeneration.units(dataset))
        regeneration.seal(dataset)
    return stage.publish()


def _fill(stage: Stage, params: RegenerateParams, dataset: Dataset, units: list[str]) -> None:
    """Has units done: by child runs if they are asked for, which a child itself never is."""
    missing, servers = regeneration.missing, params.endpoints.urls
    span = PARTS_PER_TASK if servers else 1
    if params.runtime.child_runs:
        fan_out.run("regenerate_units/default", params, dataset, units, missing, span=span)
        return
    job = None
    if not servers:
        job = Job.filling(dataset, params.corpus, params.target, params.runtime, stage="regenerate")
    stage.run(regenerate_part, params, units, missing(dataset), span=span, job=job)


if __name__ == "__main__":
    from flows.cli import run_module

    run_module("regenerate")
