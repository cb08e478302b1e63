"""Hidden states to a trained drafter."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact

from dflash_core import launch
from dflash_core import train as training
from dflash_core.checkpoint import read_metrics
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from flows._common import Stage, StageResult, progress_on_page, stage_flow, stage_task
from flows.charts import chart, fenced
from flows.compute_thread import on_compute_thread
from flows.params import TrainParams
from flows.server import patiently


@stage_task
def train_run(params: TrainParams, path: str, units: list[str]) -> None:
    """Trains from the newest checkpoint to the last step."""
    root = Storage.from_url(params.root)
    dataset, hidden = Dataset.open(root, path), Dataset.open(root, params.hidden)
    corpus = Dataset.open(root, params.corpus) if params.corpus else None
    with progress_on_page("train", "steps") as progress:
        on_compute_thread(
            launch.run, dataset, hidden, params.target, params.runtime, progress, corpus
        )


@stage_flow
def train(params: TrainParams) -> StageResult:
    """Trains a drafter on stored hidden states; a run that was interrupted goes on from its newest checkpoint."""
    stage = Stage(params)
    hidden = Dataset.open(stage.root, params.hidden)
    dataset = stage.plan(
        training.plan, stage.root, params.name, hidden, params.target, params.train
    )
    if stage.has_work:
        units = training.units(params.train)
        missing, devices = training.missing(dataset), launch.devices_of(params.runtime)
        stage.run(train_run, params, units, missing, span=len(units), devices=devices)
        training.seal(dataset, hidden)
    _show_curves(dataset)
    return stage.publish()


def _show_curves(dataset: Dataset) -> None:
    """Loss and simulated acceptance length over the steps, on the run's page."""
    metrics = read_metrics(dataset)
    curves = [
        chart(name.replace("_", " "), [entry[name] for entry in metrics])
        for name in ("loss", "acceptance_length")
    ]
    patiently(
        create_markdown_artifact, fenced(*curves), key="train-curves", description=dataset.url
    )


if __name__ == "__main__":
    from flows.cli import run_module

    run_module("train")
