"""Which of the runs that carry its work a parent goes on waiting for."""

from __future__ import annotations

from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelled, Cancelling, Crashed, Running, State

from flows import fan_out
from flows.params import ExtractParams


def child(state: State) -> FlowRun:
    return FlowRun(id=uuid4(), flow_id=uuid4(), name="child", state=state)


@pytest.mark.parametrize("over", [Crashed(), Cancelled(), Cancelling()])
def test_a_child_that_the_parents_end_has_stopped_is_replaced(monkeypatch, over):
    runs, keys = [child(over), child(Running())], []

    def start(deployment: str, parameters: dict, name: str, key: str) -> FlowRun:
        keys.append(key)
        return runs[sorted(set(keys)).index(key)]

    monkeypatch.setattr(fan_out, "_start", start)
    span = fan_out._Span("extract_units/default", ExtractParams(), "hidden/demo-1", [3, 4])
    assert span.start() == runs[1].id
    assert len(set(keys)) == 2
    assert span.start() == runs[1].id, "a second look finds it by its key"
