"""What the pages of runs show: progress, charts, GPUs, the budget; no server needed."""

from __future__ import annotations

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
    assert {len(line) for line in chart("x", range(10_000)).splitlines()[1:]} == {73}
    assert "█" not in chart("x", [0.0, 0.0])


def test_progress_says_how_far_and_how_long():
    from flows._common import progress_text

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
        "0, NVIDIA H200, 87, 62669, 143771, 412.50, 54\n1, NVIDIA H200, [N/A], 0, 143771, [N/A], 30",
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


def test_one_architecture_of_an_extension_is_kept():
    from deployments.one_architecture import only

    pair = 'cc_flag.append("-gencode")\n{0}cc_flag.append("arch=compute_{1},code=sm_{1}")\n'
    text = "".join(f"{'    '}{pair.format('    ', arch)}" for arch in (80, 90))
    cut = only(f"if True:\n{text}", "90")
    assert "sm_90" in cut
    assert "sm_80" not in cut
    compile(cut, "setup.py", "exec")
    with pytest.raises(ValueError, match="not 101"):
        only(text, "101")
