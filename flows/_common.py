"""What every flow shares: the task policy, progress on the run's page, and what a stage hands on.

Two ledgers. The commit records in the store are the truth; Prefect's cached results are what the UI
shows. A task whose units are all committed may be answered from the cache; one with work left is run
whatever the cache says, because a result may outlive the data it speaks of.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from threading import Lock
from types import FunctionType
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from prefect import flow, get_run_logger, task
from prefect.artifacts import (
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import CacheKeyFnPolicy
from prefect.filesystems import LocalFileSystem
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.tasks import exponential_backoff
from pydantic import BaseModel

from dflash_core.errors import DFlashError, StorageError
from dflash_core.manifest import Dataset, canonical_json, sha256
from dflash_core.progress import Progress
from dflash_core.storage import Storage

MAX_TASKS = 1000  # task runs of one flow run; beyond a few thousand the UI loses some
PROGRESS_EVERY_S = 5.0  # an update costs the server about 90 ms
LOG_EVERY_S = 60.0

Unit = TypeVar("Unit")


class StageResult(BaseModel):
    """What a stage hands to the next one and to the pipeline's table."""

    stage: str
    path: str
    url: str
    fingerprint: str
    reused: bool
    seconds: float
    facts: dict[str, Any]


def worth_retrying(_task: Any, _run: Any, state: Any) -> bool:
    """True for errors that may pass by themselves: storage, network, a full or lost device."""
    error = state.result(raise_on_failure=False)
    if isinstance(error, DFlashError):
        return isinstance(error, StorageError)
    return isinstance(error, (ConnectionError, TimeoutError)) or "CUDA" in str(error)


def _cache_key(context: Any, parameters: dict[str, Any]) -> str:
    """`<stage>/<hash>` of the dataset's fingerprint and the units: everything the result depends on."""
    path, units = parameters["path"], list(parameters.get("units", []))
    stage, _, name = path.partition("/")
    body = {"fingerprint": name.rpartition("-")[2], "units": units, "task": context.task.name}
    return f"{stage}/{sha256(canonical_json(body))[:32]}"


def stage_flow(function: FunctionType) -> Any:
    """A flow of this project. Its one parameter is `params`.

    One task at a time: a stage's work fills the device, and the next task starts where the last left it.
    """
    name = function.__name__
    runner: Any = ThreadPoolTaskRunner(max_workers=1)
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


def results_block(root: Storage) -> str:
    """Slug of the block that keeps task results under the root, saved if it is new.

    No secret is stored: on S3 the block finds credentials where the core does, in the environment.
    """
    name = f"dflash-results-{hashlib.sha256(root.url.encode()).hexdigest()[:10]}"
    parts = urlsplit(root.url)
    if parts.scheme == "s3":
        from prefect_aws import AwsClientParameters, AwsCredentials, S3Bucket

        parameters = AwsClientParameters(endpoint_url=os.environ.get("AWS_ENDPOINT_URL"))
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
    """One run of a stage inside its flow; ask `has_work` first, then `run`, then `publish`."""

    def __init__(self, root_url: str) -> None:
        self.root = Storage.from_url(root_url)
        self._start = time.monotonic()
        self._dataset: Dataset | None = None
        self._reused = False

    def has_work(self, dataset: Dataset) -> bool:
        """False when the dataset is sealed already, so that nothing is submitted."""
        self._dataset, self._reused = dataset, dataset.complete
        return not self._reused

    def run(
        self, span_task: Any, params: BaseModel, units: Sequence, missing: Sequence, *, span: int
    ) -> None:
        """Submits a task for each span of units and waits for all; raises what a task raised.

        A span that is committed already is answered by the cache and shows as Cached; one with work left
        refreshes the cache, because a result may outlive the data it speaks of.
        """
        assert self._dataset is not None, "has_work comes first"
        logger, left = get_run_logger(), set(missing)
        logger.info("%d of %d units are missing in %s", len(left), len(units), self._dataset.url)
        storage = results_block(self.root)
        futures = []
        for part in spans(units, span):
            name = f"{span_task.name} {part[0]}" + (f" to {part[-1]}" if len(part) > 1 else "")
            options = {"result_storage": storage, "refresh_cache": any(u in left for u in part)}
            submit = span_task.with_options(task_run_name=name, **options).submit
            futures.append(submit(params=params, path=self._dataset.path, units=part))
        for future in futures:
            future.result()

    def publish(self, table: list[dict] | None = None) -> StageResult:
        """The stage's table on the run's page, a line in its log, and what the next stage needs."""
        dataset, seconds = self._dataset, time.monotonic() - self._start
        assert dataset is not None, "has_work comes first"
        facts = dataset.facts
        create_table_artifact(
            table=table or facts_table(facts),
            key=f"{flow_run.flow_name}-summary",
            description=dataset.url,
        )
        verb = "reused" if self._reused else "wrote"
        get_run_logger().info("%s %s in %.1f s", verb, dataset.url, seconds)
        return StageResult(
            stage=str(flow_run.flow_name),
            path=dataset.path,
            url=dataset.url,
            fingerprint=dataset.fingerprint,
            reused=self._reused,
            seconds=seconds,
            facts=facts,
        )


@contextmanager
def progress_on_page(stage: str, what: str) -> Generator[Progress]:
    """A progress bar on the run's page and a line a minute in its log."""
    logger, lock = get_run_logger(), Lock()
    artifact: Any = create_progress_artifact(
        progress=0.0, key=f"{stage}-progress", description=what
    )
    shown = logged = time.monotonic()

    def progress(done: int, total: int, numbers: dict[str, float]) -> None:
        nonlocal shown, logged
        now = time.monotonic()
        with lock:
            last = done >= total
            if now - shown < PROGRESS_EVERY_S and not last:
                return
            shown = now
            text = ", ".join(f"{key} {value:,.4g}" for key, value in numbers.items())
            update_progress_artifact(
                artifact,
                progress=100.0 * done / max(total, 1),
                description=f"{what}: {done}/{total} {text}",
            )
            if now - logged >= LOG_EVERY_S or last:
                logged = now
                logger.info("%s: %d of %d %s", what, done, total, text)

    yield progress


def facts_table(facts: dict[str, Any]) -> list[dict]:
    """The plain values of a manifest's facts as rows of an artifact."""
    return [
        {"fact": key, "value": value}
        for key, value in facts.items()
        if isinstance(value, (str, int, float, bool)) and value is not None
    ]


logging.getLogger("dflash_core").setLevel(logging.INFO)
