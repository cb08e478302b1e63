"""Events of a stage. The stall automation watches them; the UI shows them in its feed.

Resource `dflash.stage.<flow run>` started, committed a unit (told at most once a minute), ended.
"""

from __future__ import annotations

from typing import Any

from prefect.events import emit_event

STARTED = "dflash.stage.started"
COMMITTED = "dflash.unit.committed"
ENDED = "dflash.stage.ended"
EVERY_S = 60.0  # a stage commits many times a minute; the server need not know each time


def emit(event: str, flow_run_id: str | None, **payload: Any) -> None:
    """Tells the server what happened to the stage of this flow run."""
    emit_event(
        event,
        resource={
            "prefect.resource.id": f"dflash.stage.{flow_run_id}",
        },
        related=[
            {
                "prefect.resource.id": f"prefect.flow-run.{flow_run_id}",
                "prefect.resource.role": "flow-run",
            }
        ],
        payload=payload,
    )
