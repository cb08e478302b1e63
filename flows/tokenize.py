"""A corpus to token ids, loss masks and packs."""

from __future__ import annotations

from prefect.artifacts import create_table_artifact

from dflash_core import tokenization
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from flows._common import Stage, StageResult, progress_on_page, stage_flow, stage_task
from flows.params import TokenizeParams
from flows.server import patiently

PARTS_PER_TASK = 32  # new processes take seconds to start


@stage_task
def tokenize_parts(params: TokenizeParams, path: str, units: list[str]) -> None:
    """Tokenizes some parts of the corpus."""
    root = Storage.from_url(params.root)
    corpus = Dataset.open(root, params.corpus)
    with progress_on_page("tokenize", ", ".join(units)) as progress:
        dataset = Dataset.open(root, path)
        processes = params.runtime.processes
        tokenization.run_units(dataset, corpus, params.target, units, progress, processes)


@stage_flow
def tokenize(params: TokenizeParams) -> StageResult:
    """Renders conversations with the target's chat template, marks what the target would generate, and plans the packs."""
    stage = Stage(params)
    corpus = Dataset.open(stage.root, params.corpus)
    dataset = stage.plan(
        tokenization.plan, stage.root, params.name, corpus, params.target, params.tokenize
    )
    if stage.has_work:
        units = tokenization.units(dataset, corpus)
        missing = tokenization.missing(dataset, corpus)
        stage.run(tokenize_parts, params, units, missing, span=PARTS_PER_TASK)
        tokenization.seal(dataset, corpus)
        sources = tokenization.source_table(dataset)
        patiently(create_table_artifact, sources, key="tokenize-sources", description=dataset.url)
    return stage.publish()


if __name__ == "__main__":
    from flows.cli import run_module

    run_module("tokenize")
