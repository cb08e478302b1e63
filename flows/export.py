"""A checkpoint to the directories that serving engines load."""

from __future__ import annotations

from dflash_core import export as exporting
from dflash_core import publish as publishing
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from flows._common import Stage, StageResult, progress_on_page, stage_flow, stage_task
from flows.params import ExportParams


@stage_task
def export_layout(params: ExportParams, path: str, units: list[str]) -> None:
    """Writes the missing layouts, loads them again and compares logits."""
    root = Storage.from_url(params.root)
    dataset, run = Dataset.open(root, path), Dataset.open(root, params.run)
    with progress_on_page("export", ", ".join(units)) as progress:
        exporting.run(dataset, run, params.target, _evaluation(root, params), progress)


@stage_task
def publish_export(params: ExportParams, path: str, units: list[str]) -> list[str]:
    """Copies the sealed export to `publish_to`."""
    return publishing.publish(Dataset.open(Storage.from_url(params.root), path), params.publish_to)


@stage_flow
def export(params: ExportParams) -> StageResult:
    """Writes the drafter in the layouts of serving engines; each is reloaded and compared before it counts."""
    stage = Stage(params)
    run = Dataset.open(stage.root, params.run)
    dataset = stage.plan(
        exporting.plan,
        stage.root,
        params.name,
        run,
        params.target,
        params.export,
        _evaluation(stage.root, params),
    )
    if stage.has_work:
        units = exporting.units(dataset)
        stage.run(export_layout, params, units, exporting.missing(dataset), span=len(units))
        exporting.seal(dataset)
    if params.publish_to:
        stage.run(publish_export, params, [params.publish_to], [params.publish_to], span=1)
    return stage.publish()


def _evaluation(root: Storage, params: ExportParams) -> Dataset | None:
    return Dataset.open(root, params.evaluation) if params.evaluation else None


if __name__ == "__main__":
    from flows.cli import run_module

    run_module("export")
