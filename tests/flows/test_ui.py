"""`make ui`: server, work pool, deployments and a worker, up and down again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dflash_core.config import Runtime, TargetConfig
from dflash_core.storage import Storage
from flows.params import ExtractParams
from tests import targets
from tests.flows import pipeline_case as case
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def ui(tmp_path_factory):
    """The running command, and an environment in which `prefect` talks to its server."""
    tmp_path = tmp_path_factory.mktemp("ui")
    (port,) = free_ports(1)
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
        deadline = time.monotonic() + 400
        while "UI: " not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield process, env | {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api"}
    finally:
        for member in session(process.pid):
            member.kill()
        process.wait()


def session(leader: int) -> list[psutil.Process]:
    """Processes of a command that leads a session, in whatever process group."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


@pytest.fixture
def page():
    """A page of a headless Chromium; screenshots go where DFLASH_SCREENSHOTS says."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    flags = ["no-sandbox", "disable-gpu", "disable-quic", "no-first-run"]
    flags += ["disable-background-networking", "disable-component-update", "disable-sync"]
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(
            executable_path=browser, args=[f"--{flag}" for flag in flags]
        )
        page = chromium.new_page(viewport={"width": 1280, "height": 800})
        page.set_default_timeout(60_000)
        yield page
        chromium.close()


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(800)
def test_a_person_finds_the_form_starts_a_run_and_sees_it_work(ui, page, tmp_path):
    _, env = ui
    target = targets.qwen3(tmp_path / "target")
    root = Storage.from_url(str(tmp_path / "root"))
    tokens = case.tokens(tmp_path, root, target, count=800)
    shots = Path(os.environ.get("DFLASH_SCREENSHOTS", tmp_path))
    shots.mkdir(parents=True, exist_ok=True)
    address = env["PREFECT_API_URL"].removesuffix("/api") + "/v2"

    page.goto(f"{address}/deployments")
    page.get_by_placeholder("Search deployments").fill("extract")
    row = page.locator("main table tr").filter(has_text=re.compile(r"default\s*extract(?!_)"))
    row.get_by_role("link", name="default").wait_for()
    page.wait_for_timeout(1000)  # the list is still being narrowed
    page.screenshot(path=shots / "deployments.png")
    row.get_by_role("link", name="default").click()
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_text("Custom run").click()

    for model, name in ((ExtractParams, "tokens"), (Runtime, "span_packs"), (TargetConfig, "id")):
        text = " ".join((model.model_fields[name].description or "").split())
        page.get_by_text(text).wait_for()
    form = {"Root": str(tmp_path / "root"), "Tokens": tokens.path, "Id": target.id}
    for name, value in form.items():
        page.get_by_role("textbox", name=f"{name} (Optional)", exact=True).fill(value)
    page.screenshot(path=shots / "form.png")
    page.get_by_role("button", name="Submit").click()

    page.get_by_role("link", name="View run").click()
    page.get_by_text("units are missing in").wait_for(timeout=120_000)
    bar = page.get_by_text("extract, all units:")
    deadline = time.monotonic() + 60
    while not bar.count() and time.monotonic() < deadline:
        page.reload()  # the tab shows what was there when it was opened
        page.get_by_role("tab", name="Artifacts").click()
        page.wait_for_timeout(2000)
    assert bar.count()
    page.screenshot(path=shots / "run.png")

    page.get_by_text("Completed", exact=True).first.wait_for(timeout=200_000)
    page.reload()
    page.get_by_role("tab", name="Artifacts").click()
    page.get_by_text("extract-summary").scroll_into_view_if_needed()
    page.screenshot(path=shots / "artifacts.png")
    assert case.only(root, "hidden", name="demo").complete


@pytest.mark.server
@pytest.mark.timeout(700)
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

    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: all of the foreground's group
    process.wait(60)
    # What started a run ends when it sees that its worker has.
    _, alive = psutil.wait_procs(session(process.pid), timeout=10)
    assert not alive, f"outlived the command: {[p.cmdline() for p in alive]}"
