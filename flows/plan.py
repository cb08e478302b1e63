"""What extraction will make and cost, before anything is spent, and a pause for approval."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from prefect import get_run_logger, pause_flow_run
from prefect.artifacts import create_table_artifact
from prefect.input import RunInput
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL
from pydantic import Field

from dflash_core import store
from dflash_core.config import ExtractConfig, TargetConfig
from dflash_core.errors import InputError
from dflash_core.manifest import Dataset
from flows._common import Stage, stage_flow
from flows.params import Budget, PlanParams
from flows.server import patiently

PATIENCE_S = 7 * 24 * 3600  # how long a run waits for somebody to look


class Approval(RunInput):
    """Spend this? The table is among the run's artifacts."""

    approve: bool = Field(default=False, description="On: the run goes on. Off: it ends here.")


@stage_flow
def plan(params: PlanParams) -> dict[str, Any]:
    """Tokens, packs, bytes, GPU hours and dollars of an extraction; waits for approval above a threshold."""
    stage = Stage(params)
    tokens = Dataset.open(stage.root, params.tokens)
    return check_budget(tokens, params.target, params.extract, params.budget)


def estimated(
    tokens: Dataset, target: TargetConfig, config: ExtractConfig, budget: Budget
) -> dict[str, Any]:
    """`store.estimate` and what the budget makes of it: hours on the wall, dollars once and each month."""
    estimate = asdict(
        store.estimate(
            tokens,
            target,
            config,
            tokens_per_s=budget.tokens_per_s,
            card=budget.card,
            dollars_per_gb_month=budget.dollars_per_gb_month,
        )
    )
    dollars = estimate["device_hours"] * budget.dollars_per_gpu_hour
    return estimate | {
        "wall_hours": estimate["device_hours"] / budget.gpus,
        "dollars_for_gpus": dollars,
        "dollars_in_first_month": dollars + estimate["dollars_per_month"],
    }


def rows(numbers: dict[str, Any]) -> list[dict[str, str]]:
    """The estimate as a table for people."""
    return [
        {
            "what": name.replace("_", " "),
            "value": f"{value:,}" if isinstance(value, int) else f"{value:,.4g}",
        }
        for name, value in numbers.items()
    ]


def check_budget(
    tokens: Dataset,
    target: TargetConfig,
    config: ExtractConfig,
    budget: Budget,
    packs_there: int = 0,
) -> dict[str, Any]:
    """Shows the estimate on the run's page and waits for approval if what is left of it costs more than the threshold.

    A run that was approved and is started again is not held up a second time.

    Args:
        packs_there: packs whose hidden states are in the store.

    Raises:
        InputError: nobody can be asked, since the run has no server; or the answer was no.
    """
    numbers = estimated(tokens, target, config, budget)
    patiently(
        create_table_artifact,
        table=rows(numbers),
        key="plan",
        description=f"Extraction of {tokens.url}",
    )
    left = 1 - packs_there / numbers["num_packs"]
    dollars, limit = left * numbers["dollars_in_first_month"], budget.approve_above_dollars
    approved = f"_prefect/runs/{flow_run.id}-approved.json"
    if not limit or dollars <= limit or tokens.root.exists(approved):
        return numbers
    text = f"extraction of {tokens.path} costs about {dollars:,.2f} dollars, more than {limit:,.2f}"
    if not PREFECT_API_URL.value():
        raise InputError(f"{text}; raise budget.approve_above_dollars to accept that")
    get_run_logger().warning("%s; waiting for approval: Resume on this run's page", text)
    answer: Any = pause_flow_run(wait_for_input=Approval, timeout=PATIENCE_S)
    if not answer.approve:
        raise InputError(f"{text}, and it was not approved")
    tokens.root.put(approved, b"{}")
    return numbers


if __name__ == "__main__":
    from flows.cli import run_module

    run_module("plan")
