"""Raw conversations to a clean corpus."""

from __future__ import annotations

from dflash_core.corpus import curation
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from flows._common import Stage, StageResult, progress_on_page, stage_flow, stage_task
from flows.params import CurateParams


@stage_task
def curate_units(params: CurateParams, path: str, units: list[str]) -> None:
    """Reads and cleans sources, or publishes the corpus out of all of them."""
    root = Storage.from_url(params.root)
    with progress_on_page("curate", ", ".join(units)) as progress:
        curation.run_units(Dataset.open(root, path), params.curate, units, progress)


@stage_flow
def curate(params: CurateParams) -> StageResult:
    """Reads, normalizes, filters and deduplicates conversations; every row is kept or rejected with a reason."""
    stage = Stage(params)
    dataset = curation.plan(stage.root, params.name, params.curate)
    if stage.has_work(dataset):
        units = curation.units(dataset)
        stage.run(curate_units, params, units, curation.missing(dataset), span=1)
        curation.seal(dataset)
    return stage.publish(_table(dataset.facts["sources"]))


def _table(sources: dict[str, dict]) -> list[dict]:
    """One row of the run's table for each source, its rejects by reason in one cell."""
    return [{"source": name, **counts} for name, counts in sources.items()]


if __name__ == "__main__":
    from flows.cli import run_module

    run_module("curate")
