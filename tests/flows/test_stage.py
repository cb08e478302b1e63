"""The two ledgers: what is committed is answered from Prefect's cache, what is missing runs."""

from __future__ import annotations

import logging
import time
from itertools import chain

import pytest

from dflash_core.errors import DFlashError
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from flows.params import StageParams
from tests.s3 import KEY, SECRET

UNITS = ["a", "b", "c"]


def planned(root: Storage, name: str) -> Dataset:
    return Dataset.create(root, "tokens", name, version=1, config={}, inputs={})


class SmallParams(StageParams):
    """Nothing but what every stage has."""


def small_stage(ran: list[str]):
    """A stage of three units, one a task, in the form that the real ones have."""
    from flows._common import Stage, progress_on_page, stage_flow, stage_task

    @stage_task
    def write_unit(params: SmallParams, path: str, units: list[str]) -> None:
        """Commits units."""
        dataset = Dataset.open(Storage.from_url(params.root), path)
        with progress_on_page("small", units[0]) as progress:
            for number, unit in enumerate(units, 1):
                ran.append(unit)
                dataset.commit(unit, {})
                progress(number, len(units), {})

    @stage_flow
    def small(params: SmallParams) -> str:
        stage = Stage(params)
        dataset = stage.plan(planned, stage.root, params.name)
        if stage.has_work:
            missing = [unit for unit in UNITS if unit not in dataset.committed()]
            stage.run(write_unit, params, UNITS, missing, span=1)
        return dataset.path

    return small


def states_of(run_id) -> dict[str, str]:
    """Name of the end state of each task run; they are recorded a moment after the flow has ended."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    only = FlowRunFilter(id=FlowRunFilterId(any_=[run_id]))
    deadline = time.monotonic() + 60
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            runs = client.read_task_runs(flow_run_filter=only)
            states = {run.name: run.state for run in runs if run.state}
            if len(states) == len(UNITS) and all(state.is_final() for state in states.values()):
                return {name.split()[-1]: state.name for name, state in states.items()}
            time.sleep(0.5)
    raise AssertionError(f"task runs did not end: {states}")


@pytest.mark.server
@pytest.mark.timeout(400)
def test_committed_spans_end_as_cached_and_missing_ones_run_whatever_the_cache_says(
    prefect_server, tmp_path
):
    ran: list[str] = []
    small, params = small_stage(ran), SmallParams(root=str(tmp_path / "root"))

    first = small(params, return_state=True)
    assert states_of(first.state_details.flow_run_id) == dict.fromkeys(UNITS, "Completed")
    assert ran == UNITS

    second = small(params, return_state=True)
    assert states_of(second.state_details.flow_run_id) == dict.fromkeys(UNITS, "Cached")
    assert ran == UNITS

    dataset = Dataset.open(Storage.from_url(params.root), first.result())
    dataset.storage.delete(["_commits/b.json"])
    third = small(params, return_state=True)
    states = states_of(third.state_details.flow_run_id)
    assert states == {"a": "Cached", "b": "Completed", "c": "Cached"}
    assert ran == [*UNITS, "b"]
    assert dataset.committed() == set(UNITS)


@pytest.mark.server
@pytest.mark.timeout(400)
def test_force_does_finished_work_again_in_the_same_place(prefect_server, tmp_path):
    ran: list[str] = []
    small = small_stage(ran)
    params = SmallParams(root=str(tmp_path / "root"))
    path = small(params)
    assert small(params.model_copy(update={"force": True})) == path
    assert ran == UNITS * 2
    small(params)
    assert ran == UNITS * 2


def test_what_a_killed_run_left_half_emptied_is_emptied_by_the_next(tmp_path, monkeypatch):
    from flows._common import Stage

    params = SmallParams(root=str(tmp_path))
    dataset = planned(Storage.from_url(params.root), params.name)
    dataset.commit("a", {})
    dataset.storage.put("data/a", b"old")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            dataset.empty("another run")
    stage = Stage(params)
    stage.plan(planned, stage.root, params.name)
    assert stage.has_work
    assert dataset.committed() == set()
    assert not dataset.storage.exists("data/a")


def test_a_forced_run_that_is_started_again_keeps_what_it_made_and_makes_the_rest_anew(
    tmp_path, monkeypatch
):
    from flows._common import Stage

    params = SmallParams(root=str(tmp_path), force=True)
    root = Storage.from_url(params.root)

    def start(run: str, name: str) -> Stage:
        monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ROOT_FLOW_RUN_ID", run)
        stage = Stage(params)
        stage.plan(planned, root, name)
        return stage

    early, late = planned(root, "early"), planned(root, "late")
    for old in (early, late):
        old.commit("a", {})
    start("one", "early")
    assert early.committed() == set()
    early.commit("a", {})
    start("one", "early")
    assert early.committed() == {"a"}, "the run made this itself, before it was killed"
    start("one", "late")
    assert late.committed() == set(), "it had not come to this"
    start("another", "early")
    assert early.committed() == set()


def test_a_run_that_crashes_again_and_again_gives_up(monkeypatch, tmp_path):
    from flows import _common

    params = SmallParams(root=str(tmp_path))
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", str(_common.MAX_STARTS))
    _common.Stage(params)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__RUN_COUNT", str(_common.MAX_STARTS + 1))
    with pytest.raises(DFlashError, match="always crashed"):
        _common.Stage(params)


@pytest.mark.server
@pytest.mark.timeout(400)
def test_no_secret_is_in_logs_parameters_artifacts_results_or_exceptions(
    prefect_server, s3_url, monkeypatch, caplog
):
    """The server's database holds all that it was ever told; the bucket holds the results."""
    from dflash_core.errors import StorageError

    ran: list[str] = []
    params = SmallParams(root=s3_url)
    small_stage(ran)(params)
    assert ran == UNITS
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET}-but-wrong")
    with pytest.raises(StorageError) as refused:
        small_stage(ran)(params.model_copy(update={"name": "other"}))
    assert SECRET not in str(refused.value) + caplog.text
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    time.sleep(3)  # logs and events are sent in batches
    files = list(prefect_server.folder.glob("prefect.db*"))
    assert any(s3_url.encode() in file.read_bytes() for file in files), (
        "the scan sees what is there"
    )
    root = Storage.from_url(s3_url)
    texts = [root.get(info.key) for info in root.list()] + [file.read_bytes() for file in files]
    assert not any(SECRET.encode() in text for text in texts)


@pytest.mark.server
@pytest.mark.timeout(400)
def test_the_block_for_results_in_a_bucket_stores_no_credentials(prefect_server, s3_url):
    from prefect_aws import S3Bucket

    from flows._common import results_block

    slug = results_block(s3_url)
    block = S3Bucket.load(slug.removeprefix("s3-bucket/"))
    assert f"s3://{block.bucket_name}/{block.bucket_folder}" == f"{s3_url}/_prefect"
    stored = block.model_dump_json(context={"include_secrets": True})
    assert SECRET not in stored
    assert KEY not in stored
    block.write_path("probe", b"written with the credentials of the environment")
    assert Storage.from_url(s3_url).exists("_prefect/probe")


def test_spans_hold_every_unit_once_in_order_and_are_never_too_many():
    from flows._common import MAX_TASKS, spans

    assert spans(UNITS, 2) == [["a", "b"], ["c"]]
    many = list(range(5 * MAX_TASKS + 3))
    cut = spans(many, 2)
    assert len(cut) <= MAX_TASKS
    assert list(chain.from_iterable(cut)) == many


@pytest.mark.parametrize(
    ("error", "again"),
    [
        ("StorageError", True),
        ("DeviceError", True),
        ("InputError", False),
        ("MismatchError", False),
        (ConnectionError("reset"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (ValueError("a bug"), False),
    ],
    ids=str,
)
def test_only_what_may_pass_by_itself_is_tried_again(error, again):
    from prefect.states import Failed

    from dflash_core import errors
    from flows._common import worth_retrying

    if isinstance(error, str):
        error = getattr(errors, error)("text")
    assert worth_retrying(None, None, Failed(data=error)) is again


def test_what_the_core_logs_at_info_reaches_the_page():
    import flows._common  # noqa: F401

    assert logging.getLogger("dflash_core").isEnabledFor(logging.INFO)
