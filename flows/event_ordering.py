"""The order in which the Prefect server's automations see events, with a shorter wait for lost ones.

The server keeps an event back until it has seen the one before it, such as *Running* before *Crashed*, and knows only
those it has seen since its own start. So after a restart of the server a crash of a run that was running already
would be acted upon a quarter of an hour late. Events of one run are a second apart, not minutes.

`PREFECT_SERVER_EVENTS_CAUSAL_ORDERING` names this module; `dflash server` sets it.
"""

from datetime import timedelta

from prefect.server.events.ordering import memory
from prefect.server.events.ordering.memory import CausalOrdering

__all__ = ["CausalOrdering"]

assert memory.PRECEDING_EVENT_LOOKBACK  # Prefect may rename what is set here
memory.PRECEDING_EVENT_LOOKBACK = timedelta(seconds=30)
