"""A run without a server: its page, its log and its events are lists."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def told(monkeypatch):
    """The events that a run has told, in order; its bars are shown nowhere."""
    from flows import events, progress

    names: list[str] = []
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "the-run")
    monkeypatch.setattr(progress, "get_run_logger", lambda: logging.getLogger("flows"))
    monkeypatch.setattr(progress, "create_progress_artifact", lambda *_, **__: "artifact")
    monkeypatch.setattr(progress, "update_progress_artifact", lambda *_, **__: None)
    monkeypatch.setattr(events, "EVERY_S", 0.0)

    def emit(event: str, flow_run_id: str | None, **_: object) -> None:
        assert flow_run_id == "the-run"
        names.append(event)

    monkeypatch.setattr(events, "emit", emit)
    return names
