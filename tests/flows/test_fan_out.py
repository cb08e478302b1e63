"""How a parent deals with the runs that carry its work: which it waits for, replaces, gives up on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import (
    AwaitingRetry,
    Cancelled,
    Cancelling,
    Completed,
    Crashed,
    Failed,
    Running,
    Scheduled,
    State,
)

from dflash_core.config import Runtime
from dflash_core.errors import DFlashError
from dflash_core.storage import Storage
from flows import _common, events, fan_out
from flows._common import StageResult, result_key
from flows.params import ExtractParams

UNITS = range(6)


class Server:
    """A Prefect server, its clock, and what happens there each time the parent sleeps."""

    def __init__(self) -> None:
        self.runs: dict[str, FlowRun] = {}  # by key
        self.given: dict[UUID, dict] = {}  # parameters by run, also of those that were deleted
        self.tags: list[str] = []  # of the deployment
        self.happens: Callable[[], None] = lambda: None
        self._now = 0.0

    def set(self, run: FlowRun, state: State) -> None:
        """Puts a new state in place; what the parent has read before stays as it was."""
        (key,) = [key for key, known in self.runs.items() if known.id == run.id]
        self.runs[key] = run.model_copy(update={"state": state})

    def delete(self, run: FlowRun) -> None:
        (key,) = [key for key, known in self.runs.items() if known.id == run.id]
        del self.runs[key]

    def open(self) -> list[FlowRun]:
        return [run for run in self.runs.values() if run.state and not run.state.is_final()]

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        assert self._now < 1000, "the parent waits for ever"
        self.happens()

    def run_deployment(
        self, _: str, *, parameters: dict, timeout: int, flow_run_name: str, idempotency_key: str
    ) -> FlowRun:
        assert timeout == 0
        if idempotency_key not in self.runs:
            run = FlowRun(
                id=uuid4(), flow_id=uuid4(), name=flow_run_name, state=Scheduled(), tags=self.tags
            )
            self.runs[idempotency_key], self.given[run.id] = run, parameters
        return self.runs[idempotency_key]

    def read_flow_runs(self, *, flow_run_filter, limit: int) -> list[FlowRun]:
        assert len(flow_run_filter.id.any_) <= limit
        return [run for run in self.runs.values() if run.id in flow_run_filter.id.any_]

    def set_flow_run_state(self, run_id: UUID, state: State) -> None:
        (run,) = [run for run in self.runs.values() if run.id == run_id]
        self.set(run, state)


@pytest.fixture
def server(monkeypatch, told):
    server = Server()
    monkeypatch.setattr(fan_out, "time", server)
    monkeypatch.setattr(fan_out, "get_client", lambda **_: nullcontext(server))
    monkeypatch.setattr(fan_out, "run_deployment", server.run_deployment)
    monkeypatch.setattr(fan_out, "get_run_logger", lambda: logging.getLogger("flows"))
    return server


@pytest.fixture
def stage(server, tmp_path):
    """`run_stage` on a server whose workers do what the test says; a run that completes has its result there."""

    def run(**params: object) -> StageResult:
        asked = ExtractParams.model_validate({"root": str(tmp_path), **params})
        return fan_out.run_stage("extract", "extract/default", asked)

    server.tags = ["dflash", "resumable"]
    server.root = Storage.from_url(str(tmp_path))
    return run


def complete(server: Server, run: FlowRun) -> None:
    result = StageResult(
        stage="extract",
        path="hidden/demo-1",
        url="",
        fingerprint="1",
        run_id=str(run.id),
        reused=False,
        seconds=1.0,
        facts={},
    )
    server.root.put(result_key(str(run.id)), result.model_dump_json().encode())
    server.set(run, Completed())


def fan(left: set[int], num_units: int = 6, child_runs: int = 3, span: int = 1) -> None:
    """A stage over child runs; `left` holds the units that are missing."""
    params = ExtractParams(runtime=Runtime(child_runs=child_runs))
    dataset, units = SimpleNamespace(path="hidden/demo-1"), list(range(num_units))
    fan_out.run("extract_units/default", params, dataset, units, lambda _: sorted(left), span=span)


def work(server: Server, left: set[int], run: FlowRun) -> None:
    """Has a child run do its units."""
    left.difference_update(server.given[run.id]["units"])
    server.set(run, Completed())


@pytest.mark.parametrize("over", [Crashed(), Cancelled(), Cancelling()])
def test_a_child_that_the_parents_end_has_stopped_is_replaced(server, over):
    child = fan_out._Child(
        "extract_units/default", {}, name="child", key="key", is_done=lambda _: False
    )
    child.start()
    stopped = child.run
    server.set(stopped, over)
    child.start()
    assert child.run.id != stopped.id
    replacement = child.run.id
    child.start()
    assert child.run.id == replacement, "a second look finds it by its key"
    assert len(server.runs) == 2


def test_spans_that_crash_are_handed_out_again_and_the_stage_is_told_from_start_to_end(
    server, told
):
    left, crashed = set(UNITS), []

    def happens() -> None:
        run = server.open()[0]
        if not crashed:
            crashed.append(run)
            server.set(run, Crashed())
        else:
            work(server, left, run)

    server.happens = happens
    fan(left)
    assert left == set()
    assert len(server.runs) == 4
    assert [runs["units"] for runs in server.given.values()] == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert all(runs["params"]["runtime"]["child_runs"] == 0 for runs in server.given.values())
    assert (told[0], told[-1]) == (events.STARTED, events.ENDED)
    assert set(told[1:-1]) == {events.COMMITTED}


@pytest.mark.parametrize(
    ("num_units", "span", "sizes"),
    [(7134, 1, {222, 223}), (257, 1, {8, 9}), (257, 64, {64, 65}), (5, 1, {1}), (5, 64, {5})],
)
def test_all_workers_get_some_of_a_small_corpus_and_none_less_than_a_task(
    server, num_units, span, sizes
):
    left = set(range(num_units))
    server.happens = lambda: [work(server, left, run) for run in server.open()]
    fan(left, num_units, 32, span)
    given = [run["units"] for run in server.given.values()]
    assert sorted(chain.from_iterable(given)) == list(range(num_units))
    assert {len(units) for units in given} == sizes
    assert len(given) == min(32, max(1, num_units // span))


def test_a_parent_that_was_started_again_finds_its_children(server, monkeypatch):
    left = set(UNITS)

    def parent_dies() -> None:
        raise SystemExit

    server.happens = parent_dies
    with monkeypatch.context() as patch:
        patch.setattr(fan_out, "_cancel", lambda *_: None)  # it was killed
        with pytest.raises(SystemExit):
            fan(left)
    before = set(server.given)
    server.happens = lambda: work(server, left, server.open()[0])
    fan(left)
    assert set(server.given) == before


def test_a_child_that_fails_ends_the_parent_and_stops_the_others(server):
    server.happens = lambda: server.set(server.open()[0], Failed(message="a bad pack"))
    with pytest.raises(DFlashError, match="ended as Failed with work left: a bad pack"):
        fan(set(UNITS))
    assert [run.state.name for run in server.runs.values()] == [
        "Failed",
        "Cancelling",
        "Cancelling",
    ]


def test_that_no_worker_takes_any_child_is_said_once(server, caplog):
    left, slept = set(UNITS), []

    def happens() -> None:
        slept.append(1)
        if len(slept) > 40:
            work(server, left, server.open()[0])

    server.happens = happens
    fan(left)
    assert caplog.text.count("no worker has taken run 'demo-1 0 to 1' yet") == 1


def test_children_that_wait_behind_one_that_runs_are_no_news(server, caplog):
    left, slept = set(UNITS), []

    def happens() -> None:
        slept.append(1)
        run = server.open()[0]
        if len(slept) % 20:
            server.set(run, Running())
        else:
            work(server, left, run)

    server.happens = happens
    fan(left)
    assert "no worker" not in caplog.text


def test_a_stage_that_crashes_is_left_to_the_automation_for_a_while(server, stage):
    states = iter([Running(), Crashed(), *[None] * 10, AwaitingRetry(), *[None] * 30])

    def happens() -> None:
        (run,) = server.runs.values()
        state = next(states, None)
        if state is not None:
            server.set(run, state)
        elif run.state.is_scheduled():
            complete(server, run)

    server.happens = happens
    assert stage().path == "hidden/demo-1"
    assert len(server.runs) == 1


def test_a_stage_that_was_completed_before_its_parent_was_started_again_is_not_waited_for(
    server, stage
):
    server.happens = lambda: complete(server, server.open()[0])
    first = stage()
    server.happens = lambda: pytest.fail("it waits")
    assert stage() == first


def test_a_child_that_somebody_deleted_is_made_again(server, caplog):
    left = set(UNITS)
    deleted = []

    def happens() -> None:
        run = server.open()[0]
        if not deleted:
            deleted.append(run)
            server.delete(run)
        else:
            work(server, left, run)

    server.happens = happens
    fan(left)
    assert left == set()
    assert [run["units"] for run in server.given.values()] == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert "run 'demo-1 0 to 1' ended as Deleted; its work is handed out again" in caplog.text


def test_a_stage_that_somebody_deletes_is_made_again_but_not_for_ever(server, stage):
    def deletes_two() -> None:
        run = server.open()[0]
        if len(server.given) <= 2:
            server.delete(run)
        else:
            complete(server, run)

    server.happens = deletes_two
    assert stage().run_id == str(list(server.given)[2])
    server.runs.clear()
    server.happens = lambda: server.delete(server.open()[0])
    with pytest.raises(DFlashError, match="ended as Deleted with work left"):
        stage()


@pytest.mark.server
@pytest.mark.timeout(400)
def test_each_run_of_a_forced_stage_is_forced_by_the_same_pipeline(
    prefect_server, tmp_path, monkeypatch
):
    """A dataset is emptied once for a pipeline's run, so the second keeps what the first has committed."""
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.runtime import flow_run

    params, runs = ExtractParams(root=str(tmp_path), force=True), []

    @flow
    def pipeline() -> str:
        child = fan_out._Child(
            "extract/default",
            {"params": params.model_dump(mode="json")},
            name="extract-demo",
            key=str(flow_run.id),
            is_done=lambda state: state.is_completed(),
        )
        for _ in range(2):
            child.start()
            runs.append(child.run.id)
            client.set_flow_run_state(child.run.id, Cancelled(), force=True)
        return str(flow_run.id)

    with get_client(sync_client=True) as client:
        run_id = pipeline()
        forced_by = []
        for run in runs:
            monkeypatch.setenv("PREFECT__FLOW_RUN_ID", str(run))
            forced_by.append(_common.forced_by(params))
            client.delete_flow_run(run)
    assert runs[0] != runs[1]
    assert forced_by == [run_id, run_id]
