import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import zarr

import dflash_core.zarr_bfloat16  # noqa: F401 - zarr 3.1 needs it to create, not to open

VALUES = np.random.default_rng(0).normal(0, 7, (20, 3, 8)).astype(ml_dtypes.bfloat16)


def bits(array):
    return np.asarray(array).view(np.uint16)


@pytest.mark.parametrize("shards", [None, (10, 3, 8)])
def test_zarr_writes_and_reads_bfloat16_to_the_bit(tmp_path, shards):
    array = zarr.create_array(
        tmp_path / "a", shape=VALUES.shape, chunks=(5, 3, 8), shards=shards, dtype="bfloat16"
    )
    array[:] = VALUES
    again = zarr.open_array(tmp_path / "a", mode="r")
    assert again.dtype == ml_dtypes.bfloat16
    assert np.array_equal(bits(again[:]), bits(VALUES))
    metadata = json.loads((tmp_path / "a" / "zarr.json").read_text())
    assert metadata["data_type"] == "bfloat16"
    assert '"endian": "little"' in json.dumps(metadata["codecs"])


def test_installing_is_enough_to_open_a_group_nobody_imports_us(tmp_path):
    group = zarr.create_group(tmp_path / "g")
    array = group.create_array("b", shape=(4,), chunks=(2,), dtype="bfloat16", fill_value=1.5)
    array[:2] = 2.5
    script = "import sys, zarr; a = zarr.open_group(sys.argv[1], mode='r')['b']; print(a[:].tolist(), a.dtype)"
    command = [sys.executable, "-c", script, str(tmp_path / "g")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.strip() == "[2.5, 2.5, 1.5, 1.5] bfloat16", done.stderr


@pytest.mark.parametrize("fill", [0.0, -1.5, float("inf"), float("-inf"), float("nan")])
def test_fill_values_survive_the_metadata(tmp_path, fill):
    zarr.create_array(tmp_path / "c", shape=(2,), chunks=(2,), dtype="bfloat16", fill_value=fill)
    text = (tmp_path / "c" / "zarr.json").read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    values = zarr.open_array(tmp_path / "c", mode="r")[:].astype(np.float32)
    np.testing.assert_array_equal(values, np.full(2, fill, np.float32))


def test_fill_value_as_bits(tmp_path):
    zarr.create_array(tmp_path / "d", shape=(1,), chunks=(1,), dtype="bfloat16")
    path = tmp_path / "d" / "zarr.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "fill_value": "0x3fc0"}))
    assert float(zarr.open_array(tmp_path / "d", mode="r")[0]) == 1.5


def test_zarr_v2_is_refused(tmp_path):
    with pytest.raises(ValueError, match="v3"):
        zarr.create_array(
            tmp_path / "e", shape=(1,), chunks=(1,), dtype=VALUES.dtype, zarr_format=2
        )


def test_float8_is_a_data_type_too(tmp_path):
    values = VALUES.astype(ml_dtypes.float8_e4m3fn)
    array = zarr.create_array(
        tmp_path / "f", shape=values.shape, chunks=(5, 3, 8), dtype="float8_e4m3fn", fill_value=0.5
    )
    array[:10] = values[:10]
    again = zarr.open_array(tmp_path / "f", mode="r")
    assert again.dtype == ml_dtypes.float8_e4m3fn
    assert np.array_equal(again[:10].view(np.uint8), values[:10].view(np.uint8))
    assert (again[10:].astype(np.float32) == 0.5).all()
