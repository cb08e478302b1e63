"""`dflash deploy`: everything that a Prefect server needs to know of this project, set up idempotently.

Blocks, global limits of GPUs, the work pool and its queues, automations, and the deployments of
`prefect.yaml`. Run it again after any change: nothing is made twice, and what people set on the server stays unless
the call names it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import Field

from dflash_core.config import Config
from dflash_core.errors import InputError
from flows.params import PipelineParams

HOME = Path(__file__).parents[1]  # the checkout: prefect.yaml, flows/, deployments/
POOL = "dflash"
CREDENTIALS = "dflash"  # name of the AwsCredentials block
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
PLACES = ("AWS_REGION", "AWS_ENDPOINT_URL")

Profile = Literal["laptop", "node", "cluster"]


class Setup(Config):
    """What to set up on the server of PREFECT_API_URL."""

    profile: Profile = "laptop"
    """laptop: one process, this folder. node: also a limit for each GPU. cluster: code and credentials
    come from the server, several machines work at once."""
    root: str = ""
    """Bucket or folder of all data: goes into the parameters of all deployments, and its results block is made
    now. Left out, deployments keep theirs, and the first run makes the block."""
    gpus: int = Field(default=-1, ge=-1)
    """GPUs of this machine, or of a Kubernetes or ECS job; -1 counts what nvidia-smi lists."""
    gpu_runs: int = Field(default=1, ge=1)
    """Runs of the gpu queue at a time: one for each machine with GPUs. Left out, the queue's limit stays."""
    pool_type: Literal["process", "kubernetes", "ecs"] = "process"
    """Where the pool starts runs; deployments/<type>.yaml is laid over Prefect's own job template."""
    git: str = ""
    """Repository that workers clone; needs `commit`. Without a token in it: see `git_token`."""
    commit: str = ""
    """Commit to clone, 40 hex digits: a branch would change under a running pipeline."""
    git_token: str = ""
    """Name of a block of type Secret on the server that holds a token for the repository. Workers look it up when
    they clone."""
    code: str = ""
    """s3://bucket/folder to which this folder is copied and from which workers take it."""
    store_credentials: bool = False
    """Keep the AWS keys of the environment in the server's AwsCredentials block and hand them to workers.
    Off, each worker has its own: an instance role is best. Left out, what stands stays."""
    notify: str = ""
    """Slug of a notification block, such as slack-webhook/ops, for stalls and failures. Left out, who is told stays
    as it is; '""' tells nobody."""
    stall_minutes: float = Field(default=30, gt=0)
    """Minutes without a committed unit after which a stage counts as stalled. Left out, they stay."""
    start_minutes: float = Field(default=15, gt=0)
    """Minutes from a worker's taking a run to its running, pull of an image included; after that it counts as
    crashed, because the worker died in between. Left out, they stay."""


def deploy(setup: Setup, pipeline: dict[str, Any] | None = None) -> Iterator[str]:
    """Does it; yields a line for each thing that now stands.

    Args:
        pipeline: parameters of the pipeline's deployments, over those of `prefect.yaml`; None leaves those that stand.

    Raises:
        InputError: no server is named, or the options do not fit each other.
    """
    from prefect.settings import PREFECT_API_URL

    if not (os.environ.get("PREFECT_API_URL") or PREFECT_API_URL.value()):
        raise InputError(
            "PREFECT_API_URL is not set; start a server (`make ui`, or `dflash server`) and set it, "
            "such as http://127.0.0.1:4200/api"
        )
    _check(setup)
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        if setup.profile == "cluster":
            _check_root(setup.root or _root_of(client, pipeline))
        notify = _block_id(client, setup.notify) if setup.notify else None
        if setup.git_token:
            _block_id(client, f"secret/{setup.git_token}")
        yield from _blocks(setup)
        yield from _pool(client, setup)
        yield from _limits(client, setup)
        from flows import automations

        names = automations.ensure(
            client,
            stall_minutes=setup.stall_minutes,
            start_minutes=setup.start_minutes,
            notify=notify,
            given=setup.model_fields_set,
        )
        yield from (f"automation {name!r}" for name in names)
        yield from _deployments(client, setup, pipeline)


def prefect_file(setup: Setup, pipeline: dict[str, Any] | None = None) -> dict[str, Any]:
    """`prefect.yaml` with what the call changes: where code comes from, job variables, parameters."""
    body = yaml.safe_load((HOME / "prefect.yaml").read_text())
    body["pull"] = [{"prefect.deployments.steps.set_working_directory": {"directory": str(HOME)}}]
    if setup.git:
        step = {"repository": setup.git, "commit_sha": setup.commit}
        if setup.git_token:
            step["access_token"] = f"{{{{ prefect.blocks.secret.{setup.git_token} }}}}"
        body["pull"] = [{"prefect.deployments.steps.git_clone": step}]
    elif setup.code:
        parts = urlsplit(setup.code)
        step = {"bucket": parts.netloc, "folder": parts.path.strip("/")}
        if endpoint := os.environ.get("AWS_ENDPOINT_URL"):
            step["client_parameters"] = {"endpoint_url": endpoint}
        requires = {"requires": "prefect-aws>=0.7"}
        body["push"] = [{"prefect_aws.deployments.steps.push_to_s3": requires | step}]
        body["pull"] = [{"prefect_aws.deployments.steps.pull_from_s3": requires | step}]
    for deployment in body["deployments"]:
        pool = deployment["work_pool"] = dict(deployment["work_pool"])
        variables: dict[str, Any] = {"env": _env(setup)} if _env(setup) else {}
        if pool["work_queue_name"] == "gpu":
            variables |= _gpu_variables(setup)
        if variables:
            pool["job_variables"] = {**pool.get("job_variables", {}), **variables}
        if "parameters" in deployment:  # others are started by a run, which gives them
            given = (pipeline or {}) if deployment["entrypoint"].endswith(":pipeline") else {}
            given = given | ({"root": setup.root} if setup.root else {})
            deployment["parameters"] = merged(deployment["parameters"], {"params": given})
    return body


def _gpu_variables(setup: Setup) -> dict[str, Any]:
    """How a job asks for GPUs; the names are those of deployments/<type>.yaml."""
    if setup.pool_type == "kubernetes":
        return {"gpus": setup.gpus}
    if setup.pool_type == "ecs":
        return {"resource_requirements": [{"type": "GPU", "value": str(setup.gpus)}]}
    return {}


def _check(setup: Setup) -> None:
    if not (HOME / "prefect.yaml").exists():
        raise InputError(f"{HOME} has no prefect.yaml; run `dflash deploy` from a checkout")
    if setup.git and setup.code:
        raise InputError("git and code are two places for the same code; give one")
    if bool(setup.git) != bool(setup.commit):
        raise InputError("git and commit belong together; give both or none")
    if setup.git_token and not setup.git:
        raise InputError("git_token is for a repository; give git and commit, too")
    if urlsplit(setup.git).scheme in ("http", "https") and "@" in urlsplit(setup.git).netloc:
        raise InputError(
            "git has a name or token before the '@', which everybody who sees the deployments could read; expected "
            "https://host/repository: put the token into a block of type Secret and give -s git_token=<its name>"
        )
    if setup.code and urlsplit(setup.code).scheme != "s3":
        raise InputError(f"code {setup.code!r} is not an s3:// URL")
    if setup.profile == "cluster" and not (setup.git or setup.code):
        raise InputError(
            "workers of a cluster need the code: give -s git=... -s commit=..., or -s code=s3://..."
        )
    if setup.pool_type != "process" and setup.profile != "cluster":
        raise InputError(f"a {setup.pool_type} pool needs --profile cluster")
    if setup.pool_type != "process" and setup.gpus < 1:
        raise InputError(f"-s gpus=N is needed: how many GPUs a {setup.pool_type} job asks for")
    if setup.store_credentials and not os.environ.get("AWS_ACCESS_KEY_ID"):
        raise InputError("AWS_ACCESS_KEY_ID is not set; there are no credentials to store")


def _root_of(client: Any, pipeline: dict[str, Any] | None) -> str:
    """The root that the pipeline's deployments will have, when the call names none for all."""
    from prefect.exceptions import ObjectNotFound

    if pipeline is None:
        with suppress(ObjectNotFound):
            pipeline = client.read_deployment_by_name("pipeline/cluster").parameters.get("params")
    return (pipeline or {}).get("root", PipelineParams().root)


def _check_root(root: str) -> None:
    if not urlsplit(root).scheme and not Path(root).is_absolute():
        raise InputError(
            f"root {root!r} is relative, so each machine of a cluster would have data of its own; expected "
            "s3://bucket/prefix, or the path of a folder that all machines share: give -s root=..."
        )


def _env(setup: Setup) -> dict[str, str]:
    """Environment of runs: references into the credentials block, which the worker resolves."""
    if not setup.store_credentials:
        return {}
    block = f"prefect.blocks.aws-credentials.{CREDENTIALS}"
    keys = {key: key.lower() for key in KEYS if os.environ.get(key)}
    env = {key: f"{{{{ {block}.{field} }}}}" for key, field in keys.items()}
    return env | {key: os.environ[key] for key in PLACES if os.environ.get(key)}


def _blocks(setup: Setup) -> Iterator[str]:
    if setup.store_credentials:
        from prefect_aws import AwsClientParameters, AwsCredentials
        from pydantic import SecretStr

        secret, token = (os.environ.get(key) for key in KEYS[1:])
        AwsCredentials(
            aws_access_key_id=os.environ[KEYS[0]],
            aws_secret_access_key=SecretStr(secret) if secret else None,
            aws_session_token=token,
            region_name=os.environ.get("AWS_REGION"),
            aws_client_parameters=AwsClientParameters(
                endpoint_url=os.environ.get("AWS_ENDPOINT_URL")
            ),
        ).save(CREDENTIALS, overwrite=True)
        yield f"block aws-credentials/{CREDENTIALS}"
    if setup.root:
        from dflash_core.storage import Storage
        from flows._common import results_block

        root = Storage.from_url(setup.root, patient=False)
        root.preflight()
        yield f"block {results_block(root.url)} for results under {root.url}"


def _pool(client: Any, setup: Setup) -> Iterator[str]:
    from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
    from prefect.exceptions import ObjectNotFound

    fields: dict[str, Any] = {"description": "Stages of the DFlash pipeline."}
    if setup.pool_type != "process":
        fields["base_job_template"] = _job_template(client, setup.pool_type)
    try:
        pool = client.read_work_pool(POOL)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=POOL, type=setup.pool_type, **fields))
    else:
        if pool.type != setup.pool_type:
            raise InputError(
                f"work pool {POOL!r} exists and is of type {pool.type}, asked for {setup.pool_type}; "
                f"delete it first: prefect work-pool delete {POOL}"
            )
        client.update_work_pool(POOL, WorkPoolUpdate(**fields))
    yield f"work pool {POOL!r} ({setup.pool_type})"
    for name, limit, text in (
        ("gpu", setup.gpu_runs, "Stages that compute with the target or the drafter."),
        ("cpu", None, "Stages that need no GPU, and runs that wait for others."),
    ):
        try:
            queue = client.read_work_queue_by_name(name, work_pool_name=POOL)
        except ObjectNotFound:
            client.create_work_queue(
                name, description=text, concurrency_limit=limit, work_pool_name=POOL
            )
        else:
            given = name == "gpu" and "gpu_runs" in setup.model_fields_set
            limit = limit if given else queue.concurrency_limit
            client.update_work_queue(queue.id, description=text, concurrency_limit=limit)
        yield f"work queue {POOL}/{name}, limit {limit or 'none'}"


def _job_template(client: Any, pool_type: str) -> dict[str, Any]:
    """Prefect's own template of the pool type with deployments/<type>.yaml laid over it."""
    known = client.read_worker_metadata()
    package = next(name for name, workers in known.items() if pool_type in workers)
    overlay = yaml.safe_load((HOME / "deployments" / f"{pool_type}.yaml").read_text())
    return merged(known[package][pool_type]["default_base_job_configuration"], overlay)


def merged(base: Any, overlay: Any) -> Any:
    """`base` with the overlay's values; dictionaries key by key, lists place by place."""
    if isinstance(base, dict) and isinstance(overlay, dict):
        both = {key: merged(base[key], overlay[key]) for key in base.keys() & overlay.keys()}
        return base | overlay | both
    if isinstance(base, list) and isinstance(overlay, list):
        common = [merged(*pair) for pair in zip(base, overlay, strict=False)]
        return common + base[len(common) :] + overlay[len(common) :]
    return overlay


def _limits(client: Any, setup: Setup) -> Iterator[str]:
    if setup.profile == "laptop" or setup.pool_type != "process":
        return  # one run at a time anyway; or each job has its own GPUs
    from flows.gpu_limits import limit_name

    count = setup.gpus if setup.gpus >= 0 else _count_gpus()
    for index in range(count):
        name = limit_name(socket.gethostname(), index)
        client.upsert_global_concurrency_limit_by_name(name, 1)
        yield f"global concurrency limit {name!r}"


def _count_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def _block_id(client: Any, slug: str) -> Any:
    from prefect.exceptions import ObjectNotFound

    kind, _, name = slug.partition("/")
    try:
        return client.read_block_document_by_name(name, kind).id
    except ObjectNotFound:
        raise InputError(
            f"block {slug!r} does not exist; make it under Blocks in the UI, or leave it away"
        ) from None


def _deployments(client: Any, setup: Setup, pipeline: dict[str, Any] | None) -> Iterator[str]:
    from flows import server_deployments

    body = prefect_file(setup, pipeline)
    _push(body.get("push", []), setup)
    off = "store_credentials" in setup.model_fields_set and not setup.store_credentials
    names = server_deployments.ensure(
        client,
        body,
        root=setup.root,
        anew=() if pipeline is None else ("pipeline",),
        forget=KEYS + PLACES if off else (),
    )
    yield from (f"deployment {name}" for name in names)


def _push(steps: list[dict[str, Any]], setup: Setup) -> None:
    """Copies the code to where workers take it from."""
    from prefect.deployments.steps.core import StepExecutionError, run_steps

    try:
        with chdir(HOME):
            asyncio.run(run_steps(steps, print_function=lambda *_, **__: None))
    except StepExecutionError as error:
        raise InputError(
            f"the code cannot be copied to {setup.code}: {error.__cause__ or error}"
        ) from error
