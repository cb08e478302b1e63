"""Packs to the target's hidden states."""

from __future__ import annotations

from dflash_core import extraction
from dflash_core.device_work import Job
from dflash_core.manifest import Dataset
from flows import fan_out
from flows._common import (
    Stage,
    StageResult,
    progress_on_page,
    run_units,
    stage_flow,
    stage_task,
)
from flows.params import ExtractParams


@stage_task
def extract_span(params: ExtractParams, path: str, units: list[int]) -> None:
    """Extracts a span of packs; those with a commit record are passed over."""
    with progress_on_page("extract", f"packs {units[0]} to {units[-1]}") as progress:
        run_units(path, units, progress)


@stage_flow
def extract_units(params: ExtractParams, path: str, units: list[int]) -> None:
    """Extracts some packs with the GPUs of this machine; a child run of `extract`."""
    stage = Stage(params)
    dataset = stage.plan(Dataset.open, stage.root, path)
    if stage.has_work:
        _fill(stage, params, dataset, units)


@stage_flow
def extract(params: ExtractParams) -> StageResult:
    """Runs the target over the packs and stores the tapped layers in a Zarr array, one commit record a pack."""
    stage = Stage(params)
    tokens = Dataset.open(stage.root, params.tokens)
    dataset = stage.plan(
        extraction.plan, stage.root, params.name, tokens, params.target, params.extract
    )
    if stage.has_work:
        _fill(stage, params, dataset, extraction.units(dataset))
        extraction.seal(dataset)
    return stage.publish()


def _fill(stage: Stage, params: ExtractParams, dataset: Dataset, units: list[int]) -> None:
    """Has units done: by child runs if they are asked for, which a child itself never is."""
    missing, span = extraction.missing, params.runtime.span_packs
    if params.runtime.child_runs:
        fan_out.run("extract_units/default", params, dataset, units, missing, span=span)
    else:
        job = Job.filling(dataset, params.tokens, params.target, params.runtime, stage="extract")
        stage.run(extract_span, params, units, missing(dataset), span=span, job=job)


if __name__ == "__main__":
    from flows.cli import run_module

    run_module("extract")
