"""The flows that keep a store, and their commands, on a store that is damaged and mended."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load

from dflash_core.errors import CorruptError
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from dflash_core.union import open_states
from tests.stores import PACKS, missing_packs, plan_store, states_of, write_packs


@pytest.fixture
def stored(tmp_path):
    dataset = plan_store(Storage.from_url(str(tmp_path)))
    write_packs(dataset, list(range(PACKS)))
    return dataset


def damage(dataset, pack: int) -> None:
    key = dataset.record(f"{pack:08d}")["shards"][0]["key"]
    data = bytearray(dataset.storage.get(key))
    data[5] ^= 1
    dataset.storage.put(key, data)


def run(capsys, *arguments: str) -> tuple[int, str]:
    """Exit status and output of `dflash store ...`."""
    from flows.cli import main

    with pytest.raises(SystemExit) as status:
        main(["store", *arguments])
    return int(status.value.code or 0), capsys.readouterr().out


def test_commands_find_repair_and_export(stored, tmp_path, capsys):
    common = (stored.path, "--root", str(tmp_path))
    assert run(capsys, "verify", *common)[0] == 0
    damage(stored, 3)
    status, text = run(capsys, "verify", *common, "--level", "full")
    assert (status, "pack 3:" in text, "1 bad packs" in text) == (1, True, True)
    assert "nothing changed" in run(capsys, "repair", *common)[1]
    assert missing_packs(stored) == []
    assert "missing now" in run(capsys, "repair", *common, "--yes")[1]
    assert missing_packs(stored) == [3]
    assert f"{PACKS - 1} of {PACKS} packs" in run(capsys, "status", *common)[1]
    stray = stored.storage.local_path / "hidden/c/12/0/0#1"
    stray.write_bytes(bytes(100))
    assert "would delete 1 objects" in run(capsys, "gc", *common, "--hours", "0")[1]
    assert stray.exists()
    assert "deleted 1 objects" in run(capsys, "gc", *common, "--hours", "0", "--yes")[1]
    assert not stray.exists()
    write_packs(stored, [3])
    out = tmp_path / "sample.safetensors"
    assert run(capsys, "export-sample", stored.path, "0", str(out), "--root", str(tmp_path))[0] == 0
    hidden = load(out.read_bytes())["hidden"]
    assert (states_of(0)[: len(hidden)] == hidden).all()


def test_a_command_unites_stores(tmp_path, capsys):
    root = Storage.from_url(str(tmp_path))
    paths = []
    for name in ("first", "second"):
        dataset = plan_store(root, name)
        write_packs(dataset, list(range(PACKS)))
        dataset.seal(dataset.committed(), {})
        paths.append(dataset.path)
    status, text = run(capsys, "unite", *paths, "--name", "both", "--root", str(tmp_path))
    assert (status, f"{2 * PACKS} packs" in text) == (0, True)
    union = text.split(":")[0]
    assert open_states(Dataset.open(root, union)).num_packs == 2 * PACKS


@pytest.mark.server
@pytest.mark.timeout(400)
def test_flows_verify_repair_and_clear(prefect_server, stored, tmp_path):
    from flows import store
    from flows.store_params import ExportSampleParams, GcParams, RepairParams, VerifyParams

    common = {"root": str(tmp_path), "store": stored.path}
    store.store_verify(VerifyParams(**common, level="full"))
    damage(stored, 5)
    with pytest.raises(CorruptError, match=r"1 bad packs, the first is 5"):
        store.store_verify(VerifyParams(**common, level="full"))
    assert store.store_repair(RepairParams(**common)) == [5]
    assert missing_packs(stored) == []
    assert store.store_repair(RepairParams(**common, dry_run=False)) == [5]
    assert missing_packs(stored) == [5]
    write_packs(stored, [5])
    stored.storage.delete(["_commits/00000005.json"])
    size = store.store_gc(GcParams(**common, hours=0))
    assert size > 0
    assert stored.storage.exists("input_ids/c/5")
    assert store.store_gc(GcParams(**common, hours=0, dry_run=False)) == size
    assert not stored.storage.exists("input_ids/c/5")
    write_packs(stored, [5])
    assert store.store_status.fn.__doc__
    url = store.store_export_sample(ExportSampleParams(**common, index=1, key="a.safetensors"))
    assert url.endswith("/a.safetensors")
    assert json.loads(stored.storage.get("_commits/00000005.json"))["unit"] == "00000005"
