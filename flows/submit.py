"""A run of a deployment with parameters from a file: `dflash submit`."""

from __future__ import annotations

from typing import Any, NamedTuple

from prefect.client.orchestration import get_client
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL

from dflash_core.errors import InputError


class Submitted(NamedTuple):
    """A run that waits for a worker."""

    name: str
    url: str


def defaults_of(deployment: str) -> dict[str, Any]:
    """The parameters that the deployment gives by itself.

    Raises:
        InputError: no server is named, or it has no such deployment.
    """
    if not PREFECT_API_URL.value():
        raise InputError(
            "PREFECT_API_URL is not set; set it to the server's, such as http://127.0.0.1:4200/api"
        )
    with get_client(sync_client=True) as client:
        try:
            return client.read_deployment_by_name(deployment).parameters.get("params", {})
        except (ObjectNotFound, ValueError):
            raise InputError(
                f"deployment {deployment!r} does not exist on this server; `prefect deployment ls` lists them, "
                "`dflash deploy` makes them"
            ) from None


def submit(deployment: str, params: dict[str, Any], name: str) -> Submitted:
    """Hands the run to the server and returns at once."""
    run: Any = run_deployment(
        deployment, parameters={"params": params}, timeout=0, flow_run_name=name
    )
    return Submitted(run.name, f"{PREFECT_UI_URL.value()}/runs/flow-run/{run.id}")
