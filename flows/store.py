"""Keeping hidden-state stores, from the Prefect UI: plan, status, verify, repair, gc, export-sample, unite.

Each is one task over `dflash_core.store`; `dflash store` does the same without Prefect.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from types import FunctionType
from typing import Any

from prefect import flow, task
from prefect.artifacts import create_table_artifact
from prefect.runtime import flow_run
from prefect.tasks import exponential_backoff

from dflash_core import store as keeping
from dflash_core.errors import CorruptError
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from dflash_core.union import unite
from flows._common import progress_on_page, worth_retrying
from flows.store_params import (
    ExportSampleParams,
    GcParams,
    PlanParams,
    RepairParams,
    StatusParams,
    StoreParams,
    UniteParams,
    VerifyParams,
)


def _open(params: StoreParams) -> Dataset:
    """The store, after a probe of its root has told a wrong secret, bucket or permission apart."""
    root = Storage.from_url(params.root)
    root.preflight(patient=True)
    return keeping.open_store(root, params.store)


def _flow(name: str) -> Any:
    def decorate(function: FunctionType) -> Any:
        return flow(name=f"store-{name}", flow_run_name=f"store-{name} {{params.root}}")(function)

    return decorate


def _task(function: FunctionType) -> Any:
    retrying: dict[str, Any] = {
        "retries": 3,
        "retry_delay_seconds": exponential_backoff(2),
        "retry_condition_fn": worth_retrying,
    }
    return task(**retrying)(function)


def _show(rows: list[dict], text: str) -> None:
    create_table_artifact(table=rows, key=f"{flow_run.flow_name}-summary", description=text)


@_task
def look_through(params: VerifyParams | RepairParams, sample: float) -> list[keeping.Finding]:
    with progress_on_page("store", "packs checked") as progress:
        return keeping.verify(_open(params), params.level, sample=sample, progress=progress)


@_flow("plan")
def store_plan(params: PlanParams) -> dict[str, Any]:
    """Tokens, packs, bytes, device hours and dollars of an extraction, before anything is spent."""
    root = Storage.from_url(params.root)
    root.preflight(patient=True)
    found = keeping.estimate(
        Dataset.open(root, params.tokens),
        params.target,
        params.extract,
        tokens_per_s=params.tokens_per_s,
        card=params.card,
        dollars_per_gb_month=params.dollars_per_gb_month,
    )
    _show([{"what": key, "value": value} for key, value in asdict(found).items()], params.tokens)
    return asdict(found)


@_flow("status")
def store_status(params: StatusParams) -> dict[str, Any]:
    """Packs committed and missing, and what the store was computed from."""
    found = asdict(keeping.status(_open(params)))
    rows = [{"what": key, "value": str(value)} for key, value in found.items()]
    _show(rows, params.store)
    return found


@_flow("verify")
def store_verify(params: VerifyParams) -> None:
    """Compares the store with its commit records; fails when a pack is missing or damaged."""
    findings = look_through(params, params.sample)
    _show([asdict(finding) for finding in findings], f"{params.store}: {len(findings)} bad packs")
    if findings:
        first = findings[0]
        raise CorruptError(
            f"{params.store} has {len(findings)} bad packs, the first is {first.pack} ({first.problem}); "
            "run the store-repair flow with dry_run off, then the extract flow"
        )


@_flow("repair")
def store_repair(params: RepairParams) -> list[int]:
    """Takes the records of bad packs away, so that the extract flow fills them again; a dry run by default."""
    findings = look_through(params, 1.0)
    verb = "would become" if params.dry_run else "became"
    _show([asdict(finding) for finding in findings], f"{len(findings)} packs {verb} work again")
    if not params.dry_run:
        keeping.repair(_open(params), findings)
    return [finding.pack for finding in findings]


@_flow("gc")
def store_gc(params: GcParams) -> int:
    """Deletes what killed writers left and no record names; a dry run by default. Returns bytes."""
    dataset = _open(params)
    found = keeping.garbage(dataset, older_than=timedelta(hours=params.hours))
    rows = [{"key": info.key, "bytes": info.size} for info in found[:1000]]
    size, verb = sum(info.size for info in found), "would be" if params.dry_run else "were"
    _show(rows, f"{len(found)} objects of {size / 1e6:,.1f} MB {verb} deleted")
    if not params.dry_run:
        keeping.clear(dataset, found)
    return size


@_flow("export-sample")
def store_export_sample(params: ExportSampleParams) -> str:
    """Writes hidden states, token ids and loss mask of one sample under the root; returns its URL."""
    dataset = _open(params)
    dataset.root.put(params.key, keeping.export_sample(dataset, params.index))
    return f"{dataset.root.url}/{params.key}"


@_flow("unite")
def store_unite(params: UniteParams) -> str:
    """Makes one of several stores, by naming them; returns the path that the train flow takes as `hidden`."""
    root = Storage.from_url(params.root)
    root.preflight(patient=True)
    return unite(root, params.name, params.stores).path
