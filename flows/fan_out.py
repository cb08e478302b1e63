"""Work handed to other machines: runs of deployments that this run starts, watches and answers for.

A stage is cut into spans of units, and each missing one becomes a child run on the gpu queue. Workers may
join, die and come back: a child run that crashed is started again for what it left, and a parent that was
itself started again finds its children by key and goes on waiting for them. Commit records settle what is
done, whatever the states of runs say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from uuid import UUID

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.runtime import flow_run
from prefect.states import Cancelling

from dflash_core.errors import DFlashError, InputError
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from flows._common import StageResult, result_key, spans
from flows.params import StageParams
from flows.progress import progress_on_page
from flows.server import patiently

POLL_S = 5.0
MAX_CRASHES = 5  # of one span or stage, before the run that waits for it gives up
# An automation starts crashed runs of whole stages again; until this has passed, it may still do so.
CRASH_GRACE_S = 120.0
# A run that no worker takes for so long is worth a line in the log.
TAKEN_WITHIN_S = 60.0


def run(
    deployment: str,
    params: StageParams,
    dataset: Dataset,
    units: Sequence,
    missing: Callable[[Dataset], list],
) -> None:
    """Fills `dataset` by child runs over disjoint spans; returns when no unit is missing.

    Raises:
        DFlashError: a child failed or was cancelled, or one span crashed too often.
    """
    parts = spans(units, params.runtime.units_per_run)
    alone = params.runtime.model_copy(update={"units_per_run": 0})
    child = params.model_copy(update={"runtime": alone, "force": False})
    open_spans: dict[UUID, _Span] = {}
    stage = str(flow_run.flow_name)
    left = set(missing(dataset))
    start = len(units) - len(left)
    with (
        get_client(sync_client=True) as client,
        progress_on_page(stage, f"{stage}, all workers", start=start, key="stage") as progress,
    ):
        try:
            for part in parts:
                if left & set(part):
                    span = _Span(deployment, child, dataset.path, part)
                    open_spans[span.start()] = span
            get_run_logger().info(
                "%d units are missing, in %d child runs", len(left), len(open_spans)
            )
            while open_spans:
                time.sleep(POLL_S)
                ended = [child for child in _read(client, list(open_spans)) if _is_final(child)]
                left = set(missing(dataset))
                progress(len(units) - len(left), len(units), {"child_runs": len(open_spans)})
                for child_run in ended:
                    span = open_spans.pop(child_run.id)
                    if left & set(span.units):
                        span.has_crashed(child_run)
                        open_spans[span.start()] = span
        except BaseException:
            _cancel(client, list(open_spans))
            raise


class _Span:
    """Units of one child run, and the runs that were made for them."""

    def __init__(self, deployment: str, params: StageParams, path: str, units: list) -> None:
        self.units = units
        self._deployment = deployment
        self._parameters = {"params": params.model_dump(mode="json"), "path": path, "units": units}
        self._name = f"{path.rpartition('/')[2]} {units[0]} to {units[-1]}"
        self._key = f"{path}:{units[0]}:{units[-1]}"
        self._attempt = 0
        self._crashes = 0

    def start(self) -> UUID:
        """A run that is not over: one of an earlier start of the parent, or a new one."""
        while True:
            key = f"{self._key}:{self._attempt}"
            child = _start(self._deployment, self._parameters, self._name, key)
            if not _is_over(child):
                return child.id
            self._attempt += 1

    def has_crashed(self, child: FlowRun) -> None:
        """Raises DFlashError unless another run may help."""
        self._crashes += 1
        _must_have_crashed(child, self._crashes)


def run_stage(flow_name: str, deployment: str, params: StageParams) -> StageResult:
    """A stage of the pipeline as a run of its own deployment, wherever a worker takes it.

    Raises:
        DFlashError: it did not complete.
    """
    parameters, name = {"params": params.model_dump(mode="json")}, f"{flow_name}-{params.name}"
    crashes = 0
    with get_client(sync_client=True) as client:
        for attempt in count(1):
            child = _start(deployment, parameters, name, f"{flow_run.id}:{flow_name}:{attempt}")
            if _is_over(child) and not _is_completed(child):
                continue  # it ended before this pipeline run was started again
            try:
                child = _wait(client, child.id)
            except BaseException:
                _cancel(client, [child.id])
                raise
            if _is_completed(child):
                break
            crashes += 1
            _must_have_crashed(child, crashes)
    body = Storage.from_url(params.root).get(result_key(str(child.id)))
    return StageResult.model_validate_json(body)


def _must_have_crashed(child: FlowRun, crashes: int) -> None:
    """Raises DFlashError unless the run crashed, and not too often."""
    state = child.state
    if state is None or state.type != StateType.CRASHED or crashes >= MAX_CRASHES:
        raise DFlashError(
            f"run {child.name!r} ended as {state.name if state else 'unknown'} with work left: "
            f"{(state.message if state else '') or 'see its log'}"
        )
    get_run_logger().warning("run %r crashed; its work is handed out again", child.name)


def _wait(client: SyncPrefectClient, run_id: UUID) -> FlowRun:
    """The run once it is over; a crashed one has some time to be started again."""
    crashed_at, told, began = 0.0, False, time.monotonic()
    while True:
        child = patiently(client.read_flow_run, run_id)
        if not _is_final(child):
            crashed_at = 0.0
            if not told and _is_untaken(child) and time.monotonic() - began > TAKEN_WITHIN_S:
                get_run_logger().warning(
                    "no worker has taken run %r yet: queue %r needs one with a free slot, besides those that runs like "
                    "this one hold while they wait (dflash worker --limit)",
                    child.name,
                    child.work_queue_name,
                )
                told = True
        elif child.state is None or child.state.type != StateType.CRASHED:
            return child
        elif not crashed_at:
            crashed_at = time.monotonic()
        elif time.monotonic() - crashed_at > CRASH_GRACE_S:
            return child
        time.sleep(POLL_S)


def _start(deployment: str, parameters: dict[str, Any], name: str, key: str) -> FlowRun:
    """The run of this key, made now if there is none."""
    try:
        return patiently(
            run_deployment,
            deployment,
            parameters=parameters,
            timeout=0,
            flow_run_name=name,
            idempotency_key=key,
        )
    except ObjectNotFound:
        raise InputError(
            f"deployment {deployment!r} does not exist on this server; run `dflash deploy` first"
        ) from None


def _read(client: SyncPrefectClient, ids: list[UUID]) -> list[FlowRun]:
    runs: list[FlowRun] = []
    for first in range(0, len(ids), 200):  # the server's own limit of an answer
        some = FlowRunFilter(id=FlowRunFilterId(any_=ids[first : first + 200]))
        runs += patiently(client.read_flow_runs, flow_run_filter=some, limit=200)
    return runs


def _cancel(client: SyncPrefectClient, ids: list[UUID]) -> None:
    """Children have no work without their parent; a server that is away keeps them, and that is harmless."""
    for run_id in ids:
        try:
            client.set_flow_run_state(run_id, Cancelling())
        except (httpx.HTTPError, PrefectException) as error:
            get_run_logger().warning("child run %s could not be cancelled: %s", run_id, error)


def _is_final(child: FlowRun) -> bool:
    return child.state is not None and child.state.is_final()


def _is_over(child: FlowRun) -> bool:
    """Final, or about to be: a parent that was told to stop has cancelled its children."""
    return _is_final(child) or (child.state is not None and child.state.is_cancelling())


def _is_untaken(child: FlowRun) -> bool:
    return child.state is not None and child.state.is_scheduled()


def _is_completed(child: FlowRun) -> bool:
    return child.state is not None and child.state.is_completed()
