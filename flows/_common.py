"""What every flow shares: the task policy, how a stage runs, and what it hands on.

Two ledgers. The commit records in the store are the truth; Prefect's cached results are what the UI
shows. A task whose units are all committed may be answered from the cache; one with work left is run
whatever the cache says, because a result may outlive the data it speaks of.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from threading import Event, Lock, Semaphore
from types import FunctionType
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import CacheKeyFnPolicy
from prefect.filesystems import LocalFileSystem
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.tasks import exponential_backoff
from pydantic import BaseModel

from dflash_core.device_work import InProcess, Job, Workers, devices_of, open_workers
from dflash_core.errors import DeviceError, DFlashError, StorageError
from dflash_core.manifest import Dataset, canonical_json, sha256
from dflash_core.progress import Progress
from dflash_core.storage import Storage
from flows.compute_thread import on_compute_thread
from flows.gpu_limits import holding
from flows.gpu_page import gpus_on_page
from flows.params import StageParams
from flows.progress import progress_on_page, stopping
from flows.server import patiently

MAX_TASKS = 1000  # task runs of one flow run; beyond a few thousand the UI loses some
MAX_STARTS = (
    6  # of one flow run: an automation starts crashed runs again, and has no limit of its own
)

_workers: dict[str, Workers] = {}  # of the datasets that are being filled, by path

Unit = TypeVar("Unit")


class StageResult(BaseModel):
    """What a stage hands to the next one and to the pipeline's table."""

    stage: str
    path: str
    url: str
    fingerprint: str
    run_id: str
    reused: bool
    seconds: float
    facts: dict[str, Any]


def worth_retrying(_task: Any, _run: Any, state: Any) -> bool:
    """True for errors that may pass by themselves: storage, network, a lost or full device."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, DFlashError):
        return isinstance(error, (StorageError, DeviceError)) and not stopping.is_set()
    return isinstance(error, (ConnectionError, TimeoutError)) or "CUDA" in str(error)


def _cache_key(context: Any, parameters: dict[str, Any]) -> str:
    """`<stage>/<hash>` of the dataset's fingerprint and the units: everything the result depends on."""
    path, units = parameters["path"], list(parameters.get("units", []))
    stage, _, name = path.partition("/")
    body = {"fingerprint": name.rpartition("-")[2], "units": units, "task": context.task.name}
    return f"{stage}/{sha256(canonical_json(body))[:32]}"


def stage_flow(function: FunctionType) -> Any:
    """A flow of this project. Its first parameter is `params`.

    `Stage.run` bounds the tasks that run at a time; threads are there for as many devices as a machine has.
    """
    name = function.__name__
    runner: Any = ThreadPoolTaskRunner(max_workers=64)
    return flow(name=name, flow_run_name=f"{name}-{{params.name}}", task_runner=runner)(function)


def stage_task(function: FunctionType) -> Any:
    """A task of this project. Its parameters are `params`, `path` (the dataset) and `units`."""
    return task(
        retries=3,
        retry_delay_seconds=exponential_backoff(2),
        retry_jitter_factor=0.5,
        retry_condition_fn=worth_retrying,
        cache_policy=CacheKeyFnPolicy(cache_key_fn=_cache_key),
        persist_result=True,
        result_serializer="json",
    )(function)


@cache
def results_block(root_url: str) -> str:
    """Slug of the block that keeps task results under the root; saved once by each process.

    No secret is stored: on S3 the block finds credentials where the core does, in the environment.
    """
    name = f"dflash-results-{hashlib.sha256(root_url.encode()).hexdigest()[:10]}"
    parts = urlsplit(root_url)
    if parts.scheme == "s3":
        from prefect_aws import AwsClientParameters, AwsCredentials, S3Bucket

        # boto3's own retries give up after 9 s without a server; these last for minutes.
        retries = {"mode": "standard", "total_max_attempts": 20}
        parameters = AwsClientParameters(
            endpoint_url=os.environ.get("AWS_ENDPOINT_URL"), config={"retries": retries}
        )
        block = S3Bucket(
            bucket_name=parts.netloc,
            bucket_folder=f"{parts.path.strip('/')}/_prefect",
            credentials=AwsCredentials(
                region_name=os.environ.get("AWS_REGION"), aws_client_parameters=parameters
            ),
        )
        block.save(name, overwrite=True)
        return f"s3-bucket/{name}"
    folder = unquote(parts.path)
    LocalFileSystem(basepath=f"{folder}/_prefect").save(name, overwrite=True)
    return f"local-file-system/{name}"


def spans(units: Sequence[Unit], size: int) -> list[list[Unit]]:
    """`units` cut into runs of at least `size`, at most `MAX_TASKS` of them."""
    size = max(size, -(-len(units) // MAX_TASKS))
    return [list(units[i : i + size]) for i in range(0, len(units), size)]


class Stage:
    """One run of a stage inside its flow: `plan`, `run` if it `has_work`, `publish`."""

    def __init__(self, params: StageParams) -> None:
        """Raises DFlashError when this flow run was started too often."""
        starts = flow_run.run_count or 0
        if starts > MAX_STARTS:
            raise DFlashError(
                f"this run was started {starts - 1} times and always crashed; look at its log, then start a "
                "new run, which continues from the commit records"
            )
        self.params = params
        self.root = Storage.from_url(params.root)
        self._start = time.monotonic()
        self._dataset: Dataset | None = None
        self._reused = False

    def plan(self, make: Callable[..., Dataset], *args: Any) -> Dataset:
        """The stage's dataset, which `make(*args)` plans.

        With `force` a run empties what is there, once: when it is started again, it continues.
        """
        dataset, run = make(*args), forced_by(self.params)
        if dataset.must_be_emptied(run):
            dataset.empty(run)
            dataset = make(*args)
        self._dataset, self._reused = dataset, dataset.complete
        return dataset

    @property
    def has_work(self) -> bool:
        """False when the dataset is sealed already, so that nothing is submitted."""
        return not self._reused

    def run(
        self,
        span_task: Any,
        params: BaseModel,
        units: Sequence,
        missing: Sequence,
        *,
        span: int,
        job: Job | None = None,
        devices: Sequence[str] = (),
    ) -> None:
        """Submits a task for each span of units and waits for all; raises what a task raised.

        A span that is committed already is answered by the cache and shows as Cached; one with work left
        refreshes the cache, because a result may outlive the data it speaks of. After a failure no further
        spans are begun.

        Args:
            job: work that needs the target on a device; the task has it done with `run_units`.
            devices: GPUs that the tasks use otherwise; other runs of this machine leave them alone meanwhile.
        """
        dataset, left = self._dataset, set(missing) & set(units)
        assert dataset is not None, "plan comes first"
        get_run_logger().info(
            "%d of %d units are missing in %s", len(left), len(units), dataset.url
        )
        storage = patiently(results_block, self.root.url)
        with (
            # First: loading a target, too, can stall.
            _stage_progress(len(units), len(units) - len(left)) as advance,
            gpus_on_page(),
            _devices(job, devices) as width,
        ):
            slots, failed, futures = Semaphore(width), Event(), []

            def ended(future: Any, news: int) -> None:
                try:
                    future.wait()
                    if future.state.is_completed():
                        advance(news)
                    else:
                        failed.set()
                finally:
                    slots.release()

            for part in spans(units, span):
                slots.acquire()
                if failed.is_set():
                    break
                name = f"{span_task.name} {part[0]}" + (f" to {part[-1]}" if len(part) > 1 else "")
                news = sum(unit in left for unit in part)
                options = {"result_storage": storage, "refresh_cache": news > 0}
                submit = span_task.with_options(task_run_name=name, **options).submit
                futures.append(submit(params=params, path=dataset.path, units=part))
                futures[-1].add_done_callback(partial(ended, news=news))
            for future in futures:
                future.result()
            for _ in range(width):
                slots.acquire()  # what is shown at the end is told by callbacks, which may still run

    def publish(self, table: list[dict] | None = None) -> StageResult:
        """The stage's table on the run's page, a line in its log, and what the next stage needs."""
        dataset, seconds = self._dataset, time.monotonic() - self._start
        assert dataset is not None, "plan comes first"
        facts = dataset.facts
        patiently(
            create_table_artifact,
            table=table or facts_table(facts),
            key=f"{flow_run.flow_name}-summary".replace("_", "-"),
            description=dataset.url,
        )
        verb = "reused" if self._reused else "wrote"
        get_run_logger().info("%s %s in %.1f s", verb, dataset.url, seconds)
        result = StageResult(
            stage=str(flow_run.flow_name),
            path=dataset.path,
            url=dataset.url,
            fingerprint=dataset.fingerprint,
            run_id=str(flow_run.id),
            reused=self._reused,
            seconds=seconds,
            facts=facts,
        )
        if flow_run.id:  # a run that started this one on another machine reads it there
            self.root.put(result_key(flow_run.id), result.model_dump_json().encode())
        return result


def forced_by(params: StageParams) -> str:
    """The run, of a pipeline if there is one, for which what is there is made anew; "" when it is not."""
    return str(patiently(lambda: flow_run.root_flow_run_id)) if params.force else ""


def result_key(flow_run_id: str) -> str:
    """Where under the root the result of a flow run is."""
    return f"_prefect/runs/{flow_run_id}.json"


def run_units(path: str, units: Sequence, progress: Progress) -> None:
    """Has the open workers of a dataset do some of its units; for tasks of `Stage.run(..., job=...)`."""
    workers = _workers[path]
    if isinstance(workers, InProcess):
        on_compute_thread(workers.run, units, progress)
    else:
        workers.run(units, progress)


@contextmanager
def _devices(job: Job | None, others: Sequence[str]) -> Generator[int]:
    """Opens the job's workers and yields how many spans are done at a time."""
    if job is None:
        with holding(others), _stop_when_interrupted():
            yield 1
        return
    devices = devices_of(job.runtime, job.stage)
    with holding([device for each in devices for device in each]):
        _workers[job.path] = workers = open_workers(job)
        try:
            with _stop_when_interrupted():
                yield workers.width
        finally:
            del _workers[job.path]
            workers.close()


@contextmanager
def _stop_when_interrupted() -> Generator[None]:
    """Has the threads of tasks end soon when the flow is cancelled, instead of waiting for them."""
    stopping.clear()
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception):
            stopping.set()
            for workers in _workers.values():
                workers.close()
        raise


@contextmanager
def _stage_progress(total: int, done: int) -> Generator[Callable[[int], None]]:
    """The bar of the whole stage; what it yields is told how many units a span added."""
    lock, stage = Lock(), str(flow_run.flow_name)
    with progress_on_page(stage, f"{stage}, all units", start=done, key="stage") as progress:

        def advance(news: int) -> None:
            nonlocal done
            with lock:
                done += news
                if not stopping.is_set():
                    progress(done, total, {})

        yield advance


def facts_table(facts: dict[str, Any]) -> list[dict]:
    """The plain values of a manifest's facts as rows of an artifact."""
    return [
        {"fact": key, "value": value}
        for key, value in facts.items()
        if isinstance(value, (str, int, float, bool)) and value is not None
    ]


logging.getLogger("dflash_core").setLevel(logging.INFO)
