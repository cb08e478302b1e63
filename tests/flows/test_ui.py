"""`make ui`: server, work pool, deployments and a worker, up and down again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dflash_core.storage import Storage
from tests.flows import pipeline_case as case

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture
def ui(tmp_path):
    """The running command, and an environment in which `prefect` talks to its server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PREFECT_HOME": str(tmp_path / "home"), "PATH": path}
    log = tmp_path / "up.log"
    # A shell's background job, as a CI step may be, ignores Ctrl-C, and its children inherit that;
    # a handler here is reset to the default in them.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("wb") as out:
        process = subprocess.Popen(
            [ROOT / "deployments" / "up"],
            stdout=out,
            stderr=out,
            env=env | {"DFLASH_PORT": str(port)},
            start_new_session=True,
        )
    signal.signal(signal.SIGINT, before)
    try:
        deadline = time.monotonic() + 240
        while "UI: " not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield process, env | {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    finally:
        if group_is_alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def group_is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.server
@pytest.mark.timeout(500)
def test_a_deployment_runs_on_the_worker_and_ctrl_c_stops_everything(ui, tmp_path):
    process, env = ui
    chats = tmp_path / "chats.jsonl"
    case.write_chats(chats)
    source = {"name": "chats", "reader": "openai", "path": str(chats)}
    root = str(tmp_path / "root")
    params = {"root": root, "name": "case", "curate": {"sources": [source]}}
    command = ["deployment", "run", "curate/default", "--param", f"params={json.dumps(params)}"]
    subprocess.run([BIN / "prefect", *command, "--watch"], env=env, check=True, timeout=200)
    assert case.only(Storage.from_url(root), "corpora").facts["num_train"] > 0

    os.killpg(process.pid, signal.SIGINT)
    process.wait(60)
    assert not group_is_alive(process.pid), "the server or the worker outlived the command"
