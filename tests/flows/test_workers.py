"""Runs on real workers: several machines share a stage, runs crash, are cancelled, retried and continue."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from dflash_core import extraction
from dflash_core.hidden_states import HiddenStates
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from dflash_core.store import verify
from tests import targets
from tests.flows import pipeline_case as case
from tests.prefect_server import RUNS, end, processes_of

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return targets.qwen3(tmp_path_factory.mktemp("target"))


@pytest.fixture
def client(prefect_server):
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        yield client


def wait_until(happened, what: str, timeout_s: float = 180):
    """Polls until `happened()` is true and returns what it returned."""
    deadline = time.monotonic() + timeout_s
    while not (answer := happened()):
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.4)
    return answer


def same_bytes(ours: Dataset, theirs: Dataset) -> bool:
    ours, theirs = HiddenStates.open(ours), HiddenStates.open(theirs)
    assert ours.num_packs == theirs.num_packs
    return all(ours.read_pack(i)[1].equal(theirs.read_pack(i)[1]) for i in range(ours.num_packs))


def test_a_run_crashes_is_cancelled_is_retried_and_keeps_what_it_committed(
    prefect_server, client, target, tmp_path
):
    from prefect.deployments import run_deployment
    from prefect.states import AwaitingRetry, Cancelling

    root = Storage.from_url(str(tmp_path / "root"))
    tokens = case.tokens(tmp_path, root, target, count=800)
    asked = case.extract_params(root, tokens, target, device_processes=1, span_packs=64)
    store = extraction.plan(root, "case", tokens, target, asked.extract)
    home = prefect_server.folder
    worker = prefect_server.worker("one", "gpu")

    def state() -> str:
        return client.read_flow_run(run.id).state.name

    def more_than(count: int):
        return lambda: len(store.committed()) > count

    try:
        run = run_deployment(
            "extract/default", parameters={"params": asked.model_dump(mode="json")}, timeout=0
        )
        wait_until(more_than(5), "packs are committed")
        (flow,) = processes_of(home, *RUNS)
        os.kill(flow, signal.SIGKILL)
        wait_until(lambda: not processes_of(home, "device_work"), "the device process is gone", 30)
        crashed = case.write_ids(store)
        assert len(crashed) < len(extraction.units(store)), "it was killed in the middle"

        wait_until(more_than(len(crashed)), "the automation has started the run again")
        began = time.monotonic()
        client.set_flow_run_state(run.id, Cancelling())
        wait_until(lambda: not processes_of(home, "device_work"), "the device process is gone", 30)
        seconds = time.monotonic() - began
        wait_until(lambda: state() == "Cancelled", "the run is cancelled", 60)
        cancelled = case.write_ids(store)
        assert cancelled.items() >= crashed.items()
        assert len(cancelled) < len(extraction.units(store)), "it was cancelled in the middle"
        assert [f for f in verify(store, "full") if "no commit record" not in f.problem] == []
        assert seconds < 20

        client.set_flow_run_state(run.id, AwaitingRetry(), force=True)
        wait_until(lambda: store.complete, "the retried run has ended")
        wait_until(lambda: state() == "Completed", "the retried run is completed", 60)
        assert case.write_ids(store).items() >= cancelled.items()
        assert case.done_twice(store) == []
    finally:
        end(worker, signal.SIGTERM)


def test_workers_share_a_stage_and_one_dies_and_comes_back(
    prefect_server, client, s3_url, target, tmp_path
):
    from prefect.client.schemas.objects import StateType

    from flows.extract import extract

    root = Storage.from_url(s3_url)
    tokens = case.tokens(tmp_path, root, target, count=24)
    asked = case.extract_params(root, tokens, target, child_runs=4, span_packs=1)
    children = {}

    def states() -> list:
        runs = client.read_flow_runs()
        children.update(
            {r.id: r for r in runs if r.deployment_id and tokens.path in str(r.parameters)}
        )
        return [run.state.type for run in children.values() if run.state]

    def disturb() -> None:
        wait_until(lambda: states().count(StateType.RUNNING) == 2, "two workers work")
        untaken = [run for run in children.values() if run.state.type == StateType.SCHEDULED]
        client.delete_flow_run(untaken[-1].id)  # as somebody may do in the UI
        end(workers.pop(0), signal.SIGKILL)
        workers.append(prefect_server.worker("one-again", "gpu"))

    prefect_server.deploy("-s", "gpu_runs=2")
    workers = [prefect_server.worker(name, "gpu") for name in ("one", "two")]
    disturber = threading.Thread(target=disturb)
    try:
        disturber.start()
        result = extract(asked)
        disturber.join()
    finally:
        for worker in workers:
            end(worker, signal.SIGTERM)
    store = Dataset.open(root, result.path)
    assert len(states()) > 1
    assert states().count(StateType.CRASHED) >= 1, "the killed worker's run counts as crashed"
    assert verify(store, "full") == []
    assert case.done_twice(store) == []
    assert same_bytes(store, case.extract_alone(root, tokens, target))
