"""What the server does by itself: notices dead and stalled runs, starts crashed ones again, tells people.

Automations are found by name, so setting them up again changes them in place. What people set on the server stays:
whether one is on, and what the caller does not name.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any
from uuid import UUID

from prefect.automations import (
    AutomationCore,
    ChangeFlowRunState,
    DoNothing,
    EventTrigger,
    Posture,
    SendNotification,
)
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType

from flows.events import COMMITTED, ENDED, STARTED

NEVER_START = "dflash: runs that never start count as crashed"
STALLED = "dflash: stalled stages"
FAILED = "dflash: failed runs"
CRASHED = "dflash: crashed runs"
UNTAKEN = "dflash: crashed runs that nobody takes"
ASKING = "dflash: runs that wait for approval"
TELLING = (STALLED, FAILED, CRASHED, UNTAKEN, ASKING)  # they tell people; the others act
HEARTBEATS_MISSED_S = 90  # three of the 30 s that `flows.SETTINGS` asks for
RUN = (
    "{{ flow_run.name }} of {{ flow.name }}: {{ flow_run.state.name }} {{ flow_run.state.message }}"
)


def ensure(
    client: SyncPrefectClient,
    *,
    stall_minutes: float,
    start_minutes: float,
    notify: UUID | None,
    given: Collection[str] = ("stall_minutes", "start_minutes", "notify"),
) -> list[str]:
    """Creates the automations or brings them up to date. Returns their names.

    Args:
        stall_minutes: time without a committed unit after which a running stage counts as stalled.
        start_minutes: time a worker has from taking a run until it runs.
        notify: id of a notification block; without one, stalls and failures show in the UI only.
        given: which of these three also hold for automations that stand; for the others they are defaults.
    """
    names = [automation.name for automation in _automations(stall_minutes, start_minutes, notify)]
    known = {name: found[0] for name in names if (found := client.read_automations_by_name(name))}
    if "stall_minutes" not in given:
        stall_minutes = _minutes(known.get(STALLED), stall_minutes)
    if "start_minutes" not in given:
        start_minutes = _minutes(known.get(NEVER_START), start_minutes)
    told = {name: block for name, found in known.items() if (block := _whom(found))}
    if "notify" not in given and told:
        notify = next(iter(told.values()))  # also of alarms that are new
    for automation in _automations(stall_minutes, start_minutes, notify):
        stands = known.get(automation.name)
        if stands is None:
            client.create_automation(automation)
            continue
        kept: dict[str, Any] = {"enabled": stands.enabled}
        if automation.name in TELLING and "notify" not in given:
            block = told.get(automation.name)
            kept["actions"] = stands.actions
            if block and len(stands.actions) == 1:  # whom it tells stays, what it says is ours
                ours = automation.actions[0].model_copy(update={"block_document_id": block})
                kept["actions"] = [ours]
        client.update_automation(stands.id, automation.model_copy(update=kept))
    return names


def _whom(stands: AutomationCore) -> UUID | None:
    """The notification block of an automation that tells people."""
    action = stands.actions[0] if stands.actions else None
    return action.block_document_id if isinstance(action, SendNotification) else None


def _minutes(stands: AutomationCore | None, default: float) -> float:
    """How long the automation waits on the server."""
    if stands is None or not isinstance(stands.trigger, EventTrigger):
        return default
    return stands.trigger.within / timedelta(minutes=1)


def _automations(
    stall_minutes: float, start_minutes: float, notify: UUID | None
) -> list[AutomationCore]:
    return [
        _silence(
            "dflash: dead runs count as crashed",
            "A machine that goes away takes worker and run along; only heartbeats tell.",
            after={"prefect.flow-run.heartbeat"},
            within=timedelta(seconds=HEARTBEATS_MISSED_S),
            action=_crashed("no heartbeat: process or machine is gone"),
        ),
        _silence(
            NEVER_START,
            f"A worker took the run and died before it ran; {start_minutes:g} minutes tell.",
            after={"prefect.flow-run.Pending", "prefect.flow-run.Submitting"},
            within=timedelta(minutes=start_minutes),
            action=_crashed("a worker took it, but it never started"),
        ),
        _silence(
            UNTAKEN,
            f"No worker took the run again for {start_minutes:g} minutes: its machine may have been the only one.",
            after={"prefect.flow-run.AwaitingRetry"},
            within=timedelta(minutes=start_minutes),
            action=_tell(notify, "DFlash: no worker for a crashed run", RUN),
        ),
        _news(
            "dflash: crashed runs start again",
            "The same run continues from its commit records; it gives up after a few times.",
            {"prefect.flow-run.Crashed"},
            ChangeFlowRunState(
                state=StateType.SCHEDULED,
                name="AwaitingRetry",
                message="continues from its commit records",
            ),
            tag="resumable",
        ),
        AutomationCore(
            name=STALLED,
            description=f"A stage that runs committed nothing for {stall_minutes:g} minutes.",
            trigger=EventTrigger(
                after={STARTED, COMMITTED},
                expect={COMMITTED, ENDED},
                match={"prefect.resource.id": "dflash.stage.*"},
                for_each={"prefect.resource.id"},
                posture=Posture.Proactive,
                threshold=1,
                within=timedelta(minutes=stall_minutes),
            ),
            actions=[
                _tell(
                    notify,
                    "DFlash: no progress",
                    # Not the minutes themselves: this text may stay when they change.
                    "{{ flow_run.name }}: {{ automation.description }}",
                )
            ],
        ),
        _news(
            FAILED,
            "A run failed for good: its input is bad, or retries did not help.",
            {"prefect.flow-run.Failed", "prefect.flow-run.TimedOut"},
            _tell(notify, "DFlash: run failed", RUN),
        ),
        _news(
            CRASHED,
            "The process or the machine of a run is gone; it starts again by itself.",
            {"prefect.flow-run.Crashed"},
            _tell(notify, "DFlash: run crashed", RUN),
        ),
        _news(
            ASKING,
            "A run costs more than its budget allows without asking.",
            {"prefect.flow-run.Paused"},
            _tell(notify, "DFlash: run waits for approval", RUN),
        ),
    ]


def _news(
    name: str, description: str, events: set[str], action: Any, tag: str = "dflash"
) -> AutomationCore:
    """Acts on each of these events of a run with this tag."""
    return AutomationCore(
        name=name,
        description=description,
        trigger=EventTrigger(
            expect=events,
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related=_tagged(tag),
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(seconds=0),
        ),
        actions=[action],
    )


def _crashed(message: str) -> ChangeFlowRunState:
    return ChangeFlowRunState(state=StateType.CRASHED, message=message)


def _silence(
    name: str, description: str, *, after: set[str], within: timedelta, action: Any
) -> AutomationCore:
    """Acts when nothing is heard of a run for that long after one of these events."""
    return AutomationCore(
        name=name,
        description=description,
        trigger=EventTrigger(
            after=after,
            expect={"prefect.flow-run.*"},
            match={"prefect.resource.id": "prefect.flow-run.*"},
            match_related=_tagged("dflash"),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=within,
        ),
        actions=[action],
    )


def _tagged(tag: str) -> dict[str, str]:
    return {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"}


def _tell(notify: UUID | None, subject: str, body: str) -> DoNothing | SendNotification:
    if notify is None:
        return DoNothing()
    return SendNotification(block_document_id=notify, subject=subject, body=body)
