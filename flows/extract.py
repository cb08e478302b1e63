"""Packs to the target's hidden states."""

from __future__ import annotations

from functools import lru_cache

from dflash_core import extraction
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from flows._common import Stage, StageResult, progress_on_page, stage_flow, stage_task
from flows.params import ExtractParams


@lru_cache(maxsize=1)
def extractor_of(path: str, params_json: str) -> extraction.Extractor:
    """The process's one extractor: the target is loaded once, for all spans of a run."""
    params = ExtractParams.model_validate_json(params_json)
    root = Storage.from_url(params.root)
    tokens = Dataset.open(root, params.tokens)
    return extraction.Extractor(Dataset.open(root, path), tokens, params.target, params.runtime)


@stage_task
def extract_span(params: ExtractParams, path: str, units: list[int]) -> None:
    """Extracts a span of packs; those with a commit record are passed over."""
    root = Storage.from_url(params.root)
    dataset = Dataset.open(root, path)
    left = set(extraction.missing(dataset))
    with progress_on_page("extract", f"packs {units[0]} to {units[-1]}") as progress:
        extractor = extractor_of(path, params.model_dump_json())
        extractor.extract([unit for unit in units if unit in left], progress)


@stage_flow
def extract(params: ExtractParams) -> StageResult:
    """Runs the target over the packs and stores the tapped layers in a Zarr array, one commit record a pack."""
    stage = Stage(params.root)
    tokens = Dataset.open(stage.root, params.tokens)
    dataset = extraction.plan(stage.root, params.name, tokens, params.target, params.extract)
    if stage.has_work(dataset):
        units = extraction.units(dataset)
        missing = extraction.missing(dataset)
        stage.run(extract_span, params, units, missing, span=params.runtime.span_packs)
        extraction.seal(dataset)
        extractor_of.cache_clear()  # the next stage needs the memory
    return stage.publish()


if __name__ == "__main__":
    from flows.cli import run_module

    run_module("extract")
