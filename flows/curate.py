"""Raw conversations to a clean corpus."""

from __future__ import annotations

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from dflash_core.corpus import curation, report
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from flows._common import Stage, StageResult, progress_on_page, stage_flow, stage_task
from flows.charts import fenced
from flows.params import CurateParams
from flows.server import patiently


@stage_task
def curate_units(params: CurateParams, path: str, units: list[str]) -> None:
    """Reads and cleans sources, or publishes the corpus out of all of them."""
    root, processes = Storage.from_url(params.root), params.runtime.processes
    with progress_on_page("curate", ", ".join(units)) as progress:
        curation.run_units(
            Dataset.open(root, path), params.curate, units, progress, processes=processes
        )


@stage_flow
def curate(params: CurateParams) -> StageResult:
    """Reads, normalizes, filters and deduplicates conversations; every row is kept or rejected with a reason."""
    stage = Stage(params)
    dataset = stage.plan(curation.plan, stage.root, params.name, params.curate)
    if stage.has_work:
        units = curation.units(dataset)
        stage.run(curate_units, params, units, curation.missing(dataset), span=1)
        curation.seal(dataset)
    sources = dataset.facts["sources"]
    _show_reasons(sources, dataset.url)
    return stage.publish(report.summary(sources))


def _show_reasons(sources: dict[str, dict], url: str) -> None:
    """Rows by reason and by length on the run's page, beside its summary."""
    reasons = [line for line in report.lines(sources) if line["kind"] not in ("rows", "length")]
    if reasons:
        patiently(create_table_artifact, reasons, key="curate-reasons", description=url)
    chart = fenced(report.length_chart(sources))
    patiently(create_markdown_artifact, chart, key="curate-lengths", description=url)


if __name__ == "__main__":
    from flows.cli import run_module

    run_module("curate")
