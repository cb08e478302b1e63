"""Work handed to other machines: runs of deployments that this run starts, watches and answers for.

A stage is cut into spans of units, and each missing one becomes a child run on the gpu queue. Workers may
join, die and come back: a child run that crashed or was deleted is started again for what it left, and a
parent that was itself started again finds its children by key and goes on waiting for them. Commit records
settle what is done, whatever the states of runs say.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import httpx
from prefect import get_run_logger
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.runtime import flow_run
from prefect.states import Cancelling, Crashed, Scheduled

from dflash_core.errors import DFlashError, InputError
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from flows._common import StageResult, result_key
from flows.params import StageParams
from flows.progress import progress_on_page
from flows.server import patiently

POLL_S = 5.0
MAX_CRASHES = 5  # of one child, before the run that waits for it gives up
# An automation starts crashed runs with the tag `resumable` again; until this has passed, it may still do so.
CRASH_GRACE_S = 120.0
# Runs of which no worker takes any for so long are worth a line in the log.
TAKEN_WITHIN_S = 60.0
# A run that somebody deleted is done again like one that crashed; no automation sees to it.
DELETED = Crashed(name="Deleted", message="it is not on the server any more")


def run(
    deployment: str,
    params: StageParams,
    dataset: Dataset,
    units: Sequence,
    missing: Callable[[Dataset], list],
    *,
    span: int,
) -> None:
    """Fills `dataset` by child runs over disjoint spans; returns when no unit is missing.

    Args:
        span: units of a task; no child run gets less.

    Raises:
        DFlashError: a child failed or was cancelled, or one span crashed too often.
    """
    alone = params.runtime.model_copy(update={"child_runs": 0})
    child_params = params.model_copy(update={"runtime": alone, "force": False})
    left = set(missing(dataset))
    start = len(units) - len(left)

    def child(part: list) -> _Child:
        return _Child(
            deployment,
            {"params": child_params.model_dump(mode="json"), "path": dataset.path, "units": part},
            name=f"{dataset.path.rpartition('/')[2]} {part[0]} to {part[-1]}",
            key=f"{dataset.path}:{part[0]}:{part[-1]}",
            is_done=lambda _: left.isdisjoint(part),
        )

    parts = min(params.runtime.child_runs, max(1, len(units) // span))
    children = [child(part) for part in _shares(units, parts) if not left.isdisjoint(part)]
    get_run_logger().info("%d units are missing, in %d child runs", len(left), len(children))
    stage = str(flow_run.flow_name)
    with progress_on_page(stage, f"{stage}, all workers", start=start, key="stage") as progress:

        def look(child_runs: int) -> None:
            nonlocal left
            left = set(missing(dataset))
            progress(len(units) - len(left), len(units), {"child_runs": child_runs})

        _see_through(children, look)


def run_stage(flow_name: str, deployment: str, params: StageParams) -> StageResult:
    """A stage of the pipeline as a run of its own deployment, wherever a worker takes it.

    Raises:
        DFlashError: it did not complete.
    """
    child = _Child(
        deployment,
        {"params": params.model_dump(mode="json")},
        name=f"{flow_name}-{params.name}",
        key=f"{flow_run.id}:{flow_name}",
        is_done=lambda state: state.is_completed(),
    )
    _see_through([child])
    body = Storage.from_url(params.root).get(result_key(str(child.run.id)))
    return StageResult.model_validate_json(body)


def _shares(units: Sequence, parts: int) -> list[list]:
    """`units` cut into so many parts, in order, as even as can be."""
    ends = [len(units) * part // parts for part in range(parts + 1)]
    return [list(units[start:end]) for start, end in pairwise(ends)]


class _Child:
    """Work for another machine, and the runs that are made for it one after the other."""

    run: FlowRun  # that `start` found or made, as it was when last seen

    def __init__(
        self,
        deployment: str,
        parameters: dict[str, Any],
        *,
        name: str,
        key: str,
        is_done: Callable[[State], bool],
    ) -> None:
        self.is_done = is_done
        self._deployment = deployment
        self._parameters = parameters
        self._name = name
        self._key = key
        self._attempt = 1
        self._crashes = 0

    @property
    def state(self) -> State:
        return self.run.state or Scheduled()  # as every run is made

    def start(self) -> None:
        """Finds or makes a run that is not over: one of an earlier start of the parent, or a new one."""
        self._crashed_at: float | None = None
        while True:
            key = f"{self._key}:{self._attempt}"
            self.run = _start(self._deployment, self._parameters, self._name, key)
            # A parent that was told to stop has cancelled its children.
            over = self.state.is_final() or self.state.is_cancelling()
            if not over or self.is_done(self.state):
                return
            self._attempt += 1

    def has_ended(self) -> bool:
        """True when nothing more comes of the run; a crashed one has some time to be started again."""
        if not self.state.is_crashed():
            self._crashed_at = None
            return self.state.is_final()
        self._crashed_at = self._crashed_at or time.monotonic()
        grace_s = CRASH_GRACE_S if "resumable" in self.run.tags else 0.0
        return time.monotonic() - self._crashed_at >= grace_s

    def start_again(self) -> None:
        """Raises DFlashError unless the run crashed or was deleted, and not too often."""
        self._crashes += 1
        if not self.state.is_crashed() or self._crashes >= MAX_CRASHES:
            raise DFlashError(
                f"run {self.run.name!r} ended as {self.state.name} with work left: "
                f"{self.state.message or 'see its log'}"
            )
        get_run_logger().warning(
            "run %r ended as %s; its work is handed out again", self.run.name, self.state.name
        )
        self.start()


def _see_through(children: Sequence[_Child], look: Callable[[int], None] = lambda _: None) -> None:
    """Starts the children and returns when all are done; cancels them when it raises.

    Args:
        look: called with the number of open runs each time their states were read, before anything is made of them.
    """
    waiting: list[_Child] = []
    untaken_since = time.monotonic()
    with get_client(sync_client=True) as client:
        try:
            for child in children:
                child.start()
                waiting.append(child)
            while True:
                _refresh(client, waiting)
                untaken_since = _untaken_since(waiting, untaken_since)
                look(len(waiting))
                for child in [child for child in waiting if child.has_ended()]:
                    waiting.remove(child)
                    if not child.is_done(child.state):
                        child.start_again()
                        waiting.append(child)
                if not waiting:
                    return
                time.sleep(POLL_S)
        except BaseException:
            _cancel(client, waiting)
            raise


def _untaken_since(waiting: Sequence[_Child], since: float) -> float:
    """Since when no worker has any of the runs; says so when that is long, once."""
    now = time.monotonic()
    if not all(child.state.is_scheduled() for child in waiting):
        return now
    if now - since <= TAKEN_WITHIN_S:
        return since
    get_run_logger().warning(
        "no worker has taken run %r yet: queue %r needs one with a free slot, besides those that runs like "
        "this one hold while they wait (dflash worker --limit)",
        waiting[0].run.name,
        waiting[0].run.work_queue_name,
    )
    return math.inf


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


def _refresh(client: SyncPrefectClient, children: Sequence[_Child]) -> None:
    """Reads their runs anew."""
    ids, found = [child.run.id for child in children], {}
    for first in range(0, len(ids), 200):  # the server's own limit of an answer
        some = FlowRunFilter(id=FlowRunFilterId(any_=ids[first : first + 200]))
        runs = patiently(client.read_flow_runs, flow_run_filter=some, limit=200)
        found |= {run.id: run for run in runs}
    for child in children:
        gone = child.run.model_copy(update={"state": DELETED, "tags": []})
        child.run = found.get(child.run.id, gone)


def _cancel(client: SyncPrefectClient, children: Sequence[_Child]) -> None:
    """Children have no work without their parent; a server that is away keeps them, and that is harmless."""
    for child in children:
        try:
            client.set_flow_run_state(child.run.id, Cancelling())
        except (httpx.HTTPError, PrefectException) as error:
            get_run_logger().warning("run %r could not be cancelled: %s", child.run.name, error)
