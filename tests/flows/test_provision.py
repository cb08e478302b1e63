"""provision.sh and what it calls, as far as a machine without a GPU can tell."""

from __future__ import annotations

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
