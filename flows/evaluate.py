"""Acceptance of a trained drafter on held-out prompts."""

from __future__ import annotations

from dflash_core import evaluation
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from flows._common import Stage, StageResult, progress_on_page, stage_flow, stage_task
from flows.params import EvaluateParams


@stage_task
def evaluate_prompts(params: EvaluateParams, path: str, units: list[str]) -> None:
    """Decodes some prompts with the target alone and with the drafter."""
    root = Storage.from_url(params.root)
    dataset, run = Dataset.open(root, path), Dataset.open(root, params.run)
    left = set(evaluation.missing(dataset))
    with progress_on_page("evaluate", f"{units[0]} to {units[-1]}") as progress:
        evaluation.run(
            dataset,
            run,
            params.target,
            params.runtime,
            [unit for unit in units if unit in left],
            progress,
        )


@stage_flow
def evaluate(params: EvaluateParams) -> StageResult:
    """Decodes held-out prompts with the real target: acceptance length, losslessness, speed."""
    stage = Stage(params)
    run = Dataset.open(stage.root, params.run)
    corpus = Dataset.open(stage.root, params.corpus)
    dataset = evaluation.plan(stage.root, params.name, run, corpus, params.target, params.evaluate)
    if stage.has_work(dataset):
        units = evaluation.units(dataset)
        stage.run(evaluate_prompts, params, units, evaluation.missing(dataset), span=16)
        evaluation.seal(dataset)
    return stage.publish()


if __name__ == "__main__":
    from flows.cli import run_module

    run_module("evaluate")
