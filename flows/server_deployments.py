"""The deployments of `prefect.yaml` on the server.

`prefect deploy` is not asked. It writes every field anew, which undoes what people set on the server, and it puts the
values of blocks where their names stood, so stored credentials would lie in every deployment as plain text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from importlib import import_module
from typing import Any, get_type_hints

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.objects import ConcurrencyOptions
from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
from pydantic import BaseModel

from dflash_core.errors import InputError
from flows.deploy import merged


def ensure(
    client: SyncPrefectClient,
    body: dict[str, Any],
    *,
    root: str = "",
    anew: Collection[str] = (),
    forget: Collection[str] = (),
) -> Iterator[str]:
    """Makes the deployments, or brings their code up to date; yields the name of each.

    Code is the entry point, the form, the texts and tags, the queue and the way to get the files. Parameters,
    schedules and limits are given once; after that they belong to whoever runs the server.

    Args:
        body: `prefect.yaml`, rendered.
        root: the parameter of that name, for deployments that stand too; empty leaves theirs.
        anew: flows whose deployments get all parameters of `body`, although they stand.
        forget: names in the environment of runs that an earlier call gave and this one takes away.

    Raises:
        InputError: the server refuses a deployment; says why.
    """
    for deployment in body["deployments"]:
        flow = _flow(deployment["entrypoint"])
        name = f"{flow.name}/{deployment['name']}"
        try:
            _ensure(client, flow, name, deployment, body["pull"], root, anew, forget)
        except PrefectHTTPStatusError as error:
            raise InputError(
                f"the server refuses deployment {name}: {_detail(error)}; when its parameters "
                "do not fit any more, change them in the UI and deploy again"
            ) from error
        yield name


def _ensure(
    client: SyncPrefectClient,
    flow: Any,
    name: str,
    deployment: dict[str, Any],
    pull: list[dict[str, Any]],
    root: str,
    anew: Collection[str],
    forget: Collection[str],
) -> None:
    pool = deployment["work_pool"]
    variables = pool.get("job_variables", {})
    code: dict[str, Any] = {
        "entrypoint": deployment["entrypoint"],
        "version": flow.version,
        "description": deployment["description"],
        "tags": deployment["tags"],
        "parameter_openapi_schema": flow.parameters.model_dump_for_openapi(),
        "pull_steps": pull,
        "work_pool_name": pool["name"],
        "work_queue_name": pool["work_queue_name"],
    }
    try:
        known = client.read_deployment_by_name(name)
    except ObjectNotFound:
        limit = dict(deployment.get("concurrency_limit", {}))
        client.create_deployment(
            client.create_flow_from_name(flow.name),
            deployment["name"],
            parameters=deployment.get("parameters", {}),
            schedules=[_schedule(dict(one)) for one in deployment.get("schedules", [])],
            concurrency_limit=limit.pop("limit", None),
            concurrency_options=ConcurrencyOptions(**limit) if limit else None,
            job_variables=variables,
            **code,
        )
        return
    standing = _that_are_known(flow, known.parameters)
    if (
        standing != known.parameters
    ):  # those of an older version: what has another name now is as shipped
        standing = merged(deployment.get("parameters", {}), standing)
    if flow.name in anew:
        standing = deployment["parameters"]
    elif root and "params" in standing:
        standing = standing | {"params": standing["params"] | {"root": root}}
    if standing != known.parameters:
        code["parameters"] = standing
    variables = _over(known.job_variables or {}, variables, forget)
    client.update_deployment(known.id, DeploymentUpdate(job_variables=variables, **code))


def _that_are_known(flow: Any, parameters: dict[str, Any]) -> dict[str, Any]:
    """The parameters without those that a flow has no more; the server would refuse all of them."""

    def pruned(values: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
        known = {}
        for name, value in values.items():
            if field := model.model_fields.get(name):
                inner = field.annotation
                nested = isinstance(inner, type) and issubclass(inner, BaseModel)
                known[name] = pruned(value, inner) if nested and isinstance(value, dict) else value
        return known

    params = get_type_hints(flow.fn).get("params")
    if params is None or not isinstance(parameters.get("params"), dict):
        return parameters
    return parameters | {"params": pruned(parameters["params"], params)}


def _flow(entrypoint: str) -> Any:
    file, _, name = entrypoint.partition(":")
    return getattr(import_module(file.removesuffix(".py").replace("/", ".")), name)


def _schedule(fields: dict[str, Any]) -> DeploymentScheduleCreate:
    """A schedule as it stands in the file: `cron` and `timezone` beside the others."""
    when = {"cron": fields.pop("cron"), "timezone": fields.pop("timezone")}
    return DeploymentScheduleCreate.model_validate({"schedule": when, **fields})


def _over(known: dict[str, Any], given: dict[str, Any], forget: Collection[str]) -> dict[str, Any]:
    """Job variables of this call over those that stand, environment name by name."""
    env = {key: value for key, value in known.get("env", {}).items() if key not in forget}
    env |= given.get("env", {})
    others = {key: value for key, value in (known | given).items() if key != "env"}
    return others | ({"env": env} if env else {})


def _detail(error: PrefectHTTPStatusError) -> str:
    try:
        return str(error.response.json()["detail"])
    except (ValueError, KeyError):
        return str(error).splitlines()[0]
