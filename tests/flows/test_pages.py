"""What the pages of runs show: progress, charts, GPUs, the budget; no server needed."""

from __future__ import annotations

import time
from contextvars import copy_context
from threading import Thread

import pytest

from flows.charts import chart
from flows.gpu_page import read


def test_a_chart_falls_with_its_values():
    text = chart("loss", [8.0, 4.0, 2.0, 1.0])
    head, *rows, floor = text.splitlines()
    assert head == "loss: first 8, last 1"
    heights = [sum(row.split("│")[1][column] != " " for row in rows) for column in range(4)]
    assert heights == [6, 3, 2, 1]
    assert floor.strip().startswith("0 └")


def test_a_chart_of_many_values_keeps_its_width_and_one_of_zeros_is_flat():
    assert {len(line) for line in chart("x", range(10_000)).splitlines()[1:]} == {75}
    assert "█" not in chart("x", [0.0, 0.0])


def test_progress_says_how_far_and_how_long():
    from flows.progress import progress_text

    text = progress_text(30, 120, 180.0, {"tokens_per_s": 1234.5})
    assert text == "30/120, 3 min left, tokens_per_s 1,234"
    assert progress_text(120, 120, 0.0, {}) == "120/120"


def fake_nvidia_smi(folder, monkeypatch, text: str, status: int = 0) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_gpus_are_read_from_nvidia_smi(tmp_path, monkeypatch):
    fake_nvidia_smi(
        tmp_path,
        monkeypatch,
        "0, NVIDIA H200, 87, 62669, 143771, 412.50, 54\n1, NVIDIA H200, [N/A], [N/A], [N/A], [N/A], 30",
    )
    first, second = read()
    assert (first.index, first.busy) == (0, 87.0)
    assert first.text == "NVIDIA H200: 87 % busy, 61.2 of 140.4 GiB, 412.50 W, 54 °C"
    assert (second.index, second.busy) == (1, 0.0)


def test_a_driver_that_does_not_answer_shows_no_gpus(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch, "NVIDIA-SMI has failed", status=9)
    assert read() == []


def test_the_estimate_adds_hours_and_dollars(tmp_path):
    from dflash_core.config import ExtractConfig
    from dflash_core.storage import Storage
    from flows.params import Budget
    from flows.plan import estimated, rows
    from tests import targets
    from tests.flows import pipeline_case as case

    target = targets.qwen3(tmp_path / "target")
    root = Storage.from_url(str(tmp_path / "root"))
    tokens = case.tokens(tmp_path, root, target)
    budget = Budget(tokens_per_s=2.0, gpus=4, dollars_per_gpu_hour=3.0, dollars_per_gb_month=1e6)
    numbers = estimated(tokens, target, ExtractConfig(), budget)
    hours = tokens.facts["total_tokens"] / 2.0 / 3600
    assert numbers["device_hours"] == pytest.approx(hours)
    assert numbers["wall_hours"] == pytest.approx(hours / 4)
    assert numbers["dollars_in_first_month"] == pytest.approx(
        3.0 * hours + numbers["size_bytes"] / 1e9 * 1e6
    )
    assert {row["what"] for row in rows(numbers)} >= {"num packs", "size bytes", "wall hours"}


def test_nobody_is_asked_for_what_is_there_nor_twice_by_one_run(tmp_path, monkeypatch):
    from dflash_core.config import ExtractConfig
    from dflash_core.errors import InputError
    from dflash_core.storage import Storage
    from flows import plan
    from flows.params import Budget
    from tests import targets
    from tests.flows import pipeline_case as case

    target = targets.qwen3(tmp_path / "target")
    root = Storage.from_url(str(tmp_path / "root"))
    tokens = case.tokens(tmp_path, root, target)
    num_packs = tokens.facts["num_packs"]
    whole = plan.estimated(tokens, target, ExtractConfig(), Budget(tokens_per_s=1.0))
    limit = whole["dollars_in_first_month"] / 2
    budget = Budget(tokens_per_s=1.0, approve_above_dollars=limit)
    monkeypatch.setattr(plan, "patiently", lambda *_, **__: None)
    monkeypatch.setattr(plan.PREFECT_API_URL, "value", lambda: None)  # so that asking fails

    def check(packs_there: int) -> None:
        plan.check_budget(tokens, target, ExtractConfig(), budget, packs_there)

    check(num_packs)
    check(num_packs - num_packs // 3)
    with pytest.raises(InputError, match="costs about"):
        check(0)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "run")
    root.put("_prefect/runs/run-approved.json", b"{}")
    check(0)


@pytest.mark.server
@pytest.mark.timeout(400)
@pytest.mark.parametrize("approve", [True, False])
def test_an_extraction_above_the_threshold_waits_for_approval(prefect_server, tmp_path, approve):
    from prefect.client.orchestration import get_client

    from dflash_core.storage import Storage
    from flows.params import Budget, PlanParams
    from flows.plan import plan
    from tests import targets
    from tests.flows import pipeline_case as case

    target = targets.qwen3(tmp_path / "target")
    tokens = case.tokens(tmp_path, Storage.from_url(str(tmp_path / "root")), target)
    params = PlanParams(
        root=str(tmp_path / "root"),
        name=f"asks-{approve}",
        tokens=tokens.path,
        target=target,
        budget=Budget(tokens_per_s=1000.0, dollars_per_gpu_hour=1e6, approve_above_dollars=1.0),
    )
    ended: list = []
    run = Thread(
        target=copy_context().run, args=(lambda: ended.append(plan(params, return_state=True)),)
    )
    run.start()
    deadline = time.monotonic() + 120
    with get_client(sync_client=True) as client:
        paused = []
        while not paused and time.monotonic() < deadline:
            time.sleep(0.5)
            runs = [r for r in client.read_flow_runs() if r.name == f"plan-asks-{approve}"]
            paused = [r.id for r in runs if r.state and r.state.is_paused()]
        client.resume_flow_run(paused[0], run_input={"approve": approve})
        run.join(90)
    (state,) = ended
    assert state.is_completed() == approve
    assert (
        Storage.from_url(params.root).exists(f"_prefect/runs/{paused[0]}-approved.json") == approve
    )
    if not approve:
        assert "not approved" in state.message
