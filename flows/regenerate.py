"""A corpus answered again by the target."""

from __future__ import annotations

from dflash_core.corpus import regeneration
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from flows._common import Stage, StageResult, progress_on_page, stage_flow, stage_task
from flows.params import RegenerateParams


@stage_task
def regenerate_part(params: RegenerateParams, path: str, units: list[str]) -> None:
    """Answers some parts of the corpus."""
    root = Storage.from_url(params.root)
    corpus = Dataset.open(root, params.corpus)
    with progress_on_page("regenerate", ", ".join(units)) as progress:
        regeneration.run_units(
            Dataset.open(root, path), corpus, params.target, units, params.runtime, progress
        )


@stage_flow
def regenerate(params: RegenerateParams) -> StageResult:
    """Replaces every answer by the target's own, so that the drafter learns what it will have to predict."""
    stage = Stage(params.root)
    corpus = Dataset.open(stage.root, params.corpus)
    dataset = regeneration.plan(stage.root, params.name, corpus, params.target, params.regenerate)
    if stage.has_work(dataset):
        units = regeneration.units(dataset)
        stage.run(regenerate_part, params, units, regeneration.missing(dataset), span=1)
        regeneration.seal(dataset)
    return stage.publish()


if __name__ == "__main__":
    from flows.cli import run_module

    run_module("regenerate")
