"""How the Prefect server's automations take events, after it was away.

The server keeps an event back until it has seen the one before it, such as *Running* before *Crashed*, and knows only
those it has seen since its own start. So after a restart of the server a crash of a run that was running already
would be acted upon a quarter of an hour late. Events of one run are a second apart, not minutes.

What waits for silence, such as that of a dead machine, counts the time for which the server itself was away: after two
minutes of it the server would take every run for dead that lived through it, and after three it would have forgotten
to wait. Here such a wait begins anew when the server does.

`dflash server` imports this before it becomes a server of one process.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from prefect.server.events import triggers
from prefect.server.events.ordering import memory
from prefect.server.events.schemas.automations import EventTrigger, Posture

assert memory.PRECEDING_EVENT_LOOKBACK  # Prefect may rename what is set here
memory.PRECEDING_EVENT_LOOKBACK = timedelta(seconds=30)

_STARTED = datetime.now(UTC)
_evaluate, _sweep = triggers.evaluate, triggers.sweep_closed_buckets


async def _evaluate_since_start(
    session: Any, trigger: EventTrigger, bucket: Any, *args: Any, **kwargs: Any
) -> Any:
    """Prefect's own, with waits for silence that end at the earliest their whole length after our start."""
    if trigger.posture == Posture.Proactive:
        bucket.end = max(bucket.end, _STARTED + trigger.within)
    return await _evaluate(session, trigger, bucket, *args, **kwargs)


triggers.evaluate = _evaluate_since_start  # ty: ignore[invalid-assignment]


async def _sweep_later(session: Any, older_than: Any) -> None:
    """Prefect's own, which forgets waits that are over, once all of them were looked at since our start."""
    if datetime.now(UTC) > _STARTED + timedelta(minutes=1):
        await _sweep(session, older_than)


triggers.sweep_closed_buckets = _sweep_later
