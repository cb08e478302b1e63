"""provision.sh and what it calls, as far as a machine without a GPU can tell."""

from __future__ import annotations

import getpass
import os
import subprocess
from pathlib import Path

import pytest

from dflash_core.storage import Storage

HOME = Path(__file__).parents[2]
SCRIPT = HOME / "deployments" / "provision.sh"


def test_check_reports_what_is_missing_and_changes_nothing(tmp_path):
    copy = tmp_path / "deployments" / "provision.sh"
    copy.parent.mkdir()
    copy.write_text(SCRIPT.read_text())
    done = subprocess.run(
        ["bash", copy, "--check", "--target", "some/target"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "MISSING  environment .venv" in done.stdout
    assert "MISSING  weights of some/target" in done.stdout
    assert done.stdout.strip().endswith("not ready: see the lines marked MISSING")
    assert done.stderr == ""
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["provision.sh"]


FAKES = {
    # Knows what uv has installed; everything else that it is asked works.
    ".venv/bin/python": """case "$*" in
  *"import sys, torch"*) grep -q "torch-backend" "$LOG" ;;
  *flash-linear*) grep -q "\\[gpu" "$LOG" ;;
  *"import dflash_core"*) grep -q "curate" "$LOG" ;;
esac""",
    ".venv/bin/uv": '[ "$1" = --version ] || echo "$@" >>"$LOG"',
    "bin/sudo": 'shift; exec "$@"',
    "bin/nvidia-smi": "exit 1",
}


@pytest.fixture
def machine(tmp_path):
    """Runs a copy of the script, for which /etc is a folder of the test and uv installs nothing."""
    script = tmp_path / "deployments" / "provision.sh"
    script.parent.mkdir()
    etc = tmp_path / "etc" / "systemd" / "system"
    etc.mkdir(parents=True)
    text = SCRIPT.read_text().replace("=/etc/", f"={tmp_path}/etc/")
    # As on a machine without systemd, so that no unit is started where there is one.
    script.write_text(text.replace("/run/systemd/system", f"{tmp_path}/none"))
    for name, body in FAKES.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)
    log = tmp_path / "installed.txt"
    log.touch()

    def run(*options):
        return subprocess.run(
            ["bash", script, *options],
            env=os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "LOG": str(log)},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    run.folder, run.log = tmp_path, log
    return run


def test_a_cpu_worker_needs_no_gpu_and_gets_no_triton(machine):
    me = getpass.getuser()
    done = machine("--queue", "cpu", "--server", "http://server/api", "--user", me)
    assert done.stderr == ""
    lines = [line for line in done.stdout.splitlines() if line.startswith("MISSING")]
    assert len(lines) == 1, done.stdout
    assert "systemd does not run here" in lines[0], "all but that was set up"
    torch, project = machine.log.read_text().splitlines()
    assert "--torch-backend=cpu torch" in torch
    assert "-e .[curate] " in project
    assert "flash-linear-attention" not in done.stdout
    unit = (machine.folder / "etc/systemd/system/dflash-worker.service").read_text()
    assert f"\nUser={me}\n" in unit
    assert unit.count("worker --queue cpu") == 1
    again = machine("--queue", "cpu", "--user", me)
    assert "did" not in again.stdout, "running it again changes nothing"


def test_a_gpu_worker_needs_a_gpu(machine):
    done = machine("--server", "http://server/api")
    assert done.returncode == 1
    assert "MISSING  NVIDIA driver" in done.stdout
    assert machine.log.read_text() == ""


def test_a_missing_server_is_said_before_anything_is_installed(machine):
    done = machine("--queue", "cpu")
    assert done.returncode == 1
    assert done.stderr.startswith("--server is needed")
    assert machine.log.read_text() == ""
    assert machine("--queue", "tpu").stderr == "--queue tpu: expected gpu or cpu\n"


def test_workers_do_not_run_as_root_unless_told(machine):
    owner = machine.folder.owner()
    found = machine("--check", "--queue", "cpu").stdout
    assert f" account {'dflash' if owner == 'root' else owner} of the worker" in found
    assert "account root of the worker" in machine("--check", "--user", "root").stdout


def test_an_unknown_option_prints_the_usage():
    done = subprocess.run(
        ["bash", SCRIPT, "--chek"], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 2
    assert "unknown option --chek" in done.stderr
    assert "--check            only report" in done.stderr


@pytest.mark.server
def test_weights_come_from_a_bucket_once_and_without_pickles(s3_url, tmp_path, monkeypatch):
    from deployments import weights

    monkeypatch.setattr(weights, "TARGETS", tmp_path)
    bucket = Storage.from_url(f"{s3_url}/tiny")
    for name in ("config.json", "model.safetensors", "pytorch_model.bin"):
        bucket.put(name, name.encode())
    url = f"{s3_url}/tiny"
    with pytest.raises(FileNotFoundError, match="holds no target"):
        weights.locate(url, download=False)
    folder = weights.locate(url, download=True)
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert weights.locate(url, download=True) == folder == weights.locate(url, download=False)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


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
