"""What the server tells people by itself: a stage that stalls, a run that fails."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
import uuid
from contextlib import closing
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from dflash_core.errors import InputError
from flows import automations
from flows.params import StageParams
from tests.prefect_server import PrefectServer


@pytest.fixture
def inbox():
    """A web hook on loopback: its address, and the texts that it was sent."""
    texts: list[str] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            texts.append(json.loads(body)["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = HTTPServer(("127.0.0.1", 0), Hook)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/", texts
    server.shutdown()


class Automations:
    """A server's automations, by name."""

    def __init__(self):
        self.standing = {}

    def read_automations_by_name(self, name):
        return [self.standing[name]] if name in self.standing else []

    def create_automation(self, core):
        from prefect.events.schemas.automations import Automation

        self.standing[core.name] = Automation(id=uuid.uuid4(), **core.model_dump())

    def update_automation(self, _, core):
        self.create_automation(core)


def test_what_is_not_given_stays_as_it_is_on_the_server():
    server, block = Automations(), uuid.uuid4()
    automations.ensure(server, stall_minutes=7, start_minutes=8, notify=block, given=())
    dead = next(iter(server.standing.values()))
    dead.enabled = False
    automations.ensure(server, stall_minutes=30, start_minutes=15, notify=None, given=())
    stalled, never = (
        server.standing[name] for name in (automations.STALLED, automations.NEVER_START)
    )
    assert stalled.actions[0].block_document_id == block
    assert [one.trigger.within.total_seconds() for one in (stalled, never)] == [420, 480]
    assert "7 minutes" in stalled.description
    assert not server.standing[dead.name].enabled
    automations.ensure(
        server, stall_minutes=30, start_minutes=15, notify=None, given=["notify", "stall_minutes"]
    )
    stalled, never = (
        server.standing[name] for name in (automations.STALLED, automations.NEVER_START)
    )
    assert stalled.actions[0].type == "do-nothing"
    assert [one.trigger.within.total_seconds() for one in (stalled, never)] == [1800, 480]


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_stalls_and_failures_are_told(prefect_server, inbox, tmp_path, monkeypatch):
    from prefect import tags
    from prefect.blocks.notifications import CustomWebhookNotificationBlock
    from prefect.client.orchestration import get_client

    from flows import events
    from flows._common import progress_on_page, stage_flow

    monkeypatch.setattr(events, "EVERY_S", 0.0)
    url, texts = inbox
    hook = CustomWebhookNotificationBlock(
        name="inbox", url=url, method="POST", json_data={"text": "{{subject}} {{body}}"}
    )
    block_id = hook.save("inbox", overwrite=True)

    @stage_flow
    def fails(params: StageParams) -> None:
        raise InputError("rows.jsonl has no column 'messages'")

    @stage_flow
    def ends(params: StageParams) -> None:
        with progress_on_page("ends", "units") as progress:
            progress(1, 1, {})

    working, stalled = str(uuid.uuid4()), str(uuid.uuid4())
    with get_client(sync_client=True) as client:
        try:
            automations.ensure(client, stall_minutes=0.25, start_minutes=15, notify=block_id)
            time.sleep(5)  # the server reads its automations anew
            with tags("dflash"), pytest.raises(InputError):
                fails(StageParams(root=str(tmp_path)))
            ends(StageParams(root=str(tmp_path)))
            events.emit(events.STARTED, stalled)
            events.emit(events.STARTED, working)
            deadline = time.monotonic() + 120
            while len(texts) < 2 and time.monotonic() < deadline:
                time.sleep(4)
                events.emit(events.COMMITTED, working, done=1, total=2)
            events.emit(events.ENDED, working)
        finally:
            automations.ensure(client, stall_minutes=30, start_minutes=15, notify=None)
    failed = [text for text in texts if "run failed" in text]
    assert len(failed) == 1
    assert "rows.jsonl has no column 'messages'" in failed[0]
    (told,) = [text for text in texts if "no progress" in text]
    assert "committed nothing for 0.25 minutes" in told
    assert not [text for text in texts if "ends-demo" in text], "it has told that it ended"
    assert len(texts) == 2, "the stage that commits is left alone"


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_crash_is_seen_though_the_server_was_started_anew_meanwhile(tmp_path):
    server = PrefectServer(tmp_path)
    server.start()
    try:
        run_id = _client_script(server, START_A_RUN).strip()
        server.kill()
        server.start()
        assert "AwaitingRetry" in _client_script(server, CRASH_IT_AND_WAIT, run_id)
    finally:
        server.stop()


START_A_RUN = """
import time
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.states import Pending, Running
from flows import automations

with get_client(sync_client=True) as client:
    automations.ensure(client, stall_minutes=30, start_minutes=15, notify=None)
    time.sleep(5)  # the server reads its automations anew
    flow_id = client.create_flow(flow(lambda: None, name="stage"))
    deployment = client.create_deployment(flow_id=flow_id, name="default")
    run = client.create_flow_run_from_deployment(deployment, tags=["resumable", "dflash"])
    client.set_flow_run_state(run.id, Pending())
    client.set_flow_run_state(run.id, Running())
    time.sleep(5)  # its events are handled
    print(run.id)
"""

CRASH_IT_AND_WAIT = """
import sys, time
from uuid import UUID
from prefect.client.orchestration import get_client
from prefect.states import Crashed

run_id, deadline = UUID(sys.argv[1]), time.monotonic() + 120
with get_client(sync_client=True) as client:
    client.set_flow_run_state(run_id, Crashed())
    while (state := client.read_flow_run(run_id).state.name) == "Crashed":
        if time.monotonic() > deadline:
            break
        time.sleep(1)
    print(state)
"""


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_who_lives_through_an_outage_of_the_server_is_not_taken_for_dead(tmp_path):
    server = PrefectServer(tmp_path)
    server.start()
    try:
        alive, dead = _client_script(server, TWO_RUNS).split()
        server.kill()
        _age_waits(tmp_path / "prefect.db", timedelta(minutes=10))
        server.start()
        states = _client_script(server, ONE_OF_THEM_IS_HEARD, alive, dead).split()
        assert states == ["Running", "Crashed"]
    finally:
        server.stop()


def _age_waits(database: Path, by: timedelta) -> None:
    """As if the server had been away for as long."""
    with closing(sqlite3.connect(database)) as connection, connection:
        waits = connection.execute("select rowid, start, end from automation_bucket").fetchall()
        assert len(waits) == 2
        for row, *times in waits:
            older = [str(datetime.fromisoformat(each) - by) for each in times]
            connection.execute(
                "update automation_bucket set start = ?, end = ? where rowid = ?", (*older, row)
            )


HEARD = """
import sys, time
from datetime import timedelta
from uuid import UUID
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.events.worker import EventsWorker

def is_heard(run):
    emit_event("prefect.flow-run.heartbeat", {"prefect.resource.id": f"prefect.flow-run.{run}"},
               related=[{"prefect.resource.id": "prefect.tag.dflash", "prefect.resource.role": "tag"}])
"""

TWO_RUNS = (
    HEARD
    + """
from prefect import flow
from prefect.states import Running
from flows import automations

silence = automations._silence("silence", "", after={"prefect.flow-run.heartbeat"},
    within=timedelta(seconds=20), action=automations._crashed("silent"))
with get_client(sync_client=True) as client:
    client.create_automation(silence)
    time.sleep(5)  # the server reads its automations anew
    runs = [client.create_flow_run(flow(lambda: None, name="stage"), tags=["dflash"], state=Running())
            for _ in range(2)]
    time.sleep(3)
    for run in runs:
        is_heard(run.id)
    EventsWorker.instance().drain()
    time.sleep(3)
    print(*(run.id for run in runs))
"""
)

ONE_OF_THEM_IS_HEARD = (
    HEARD
    + """
alive, dead = map(UUID, sys.argv[1:])
deadline = time.monotonic() + 90
with get_client(sync_client=True) as client:
    while client.read_flow_run(dead).state.name == "Running" and time.monotonic() < deadline:
        is_heard(alive)
        time.sleep(3)
    print(*(client.read_flow_run(run).state.name for run in (alive, dead)))
"""
)


def _client_script(server: PrefectServer, code: str, *arguments: str) -> str:
    """What a process that talks to this server prints; this one talks to another."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | server.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
