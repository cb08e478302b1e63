"""The store against stock zarr and against damage. Shape letters: T rows of a pack, L taps, H hidden size."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch
import zarr

from dflash_core import float8, hidden_states
from dflash_core.config import ExtractConfig
from dflash_core.errors import CorruptError, IncompleteError, InputError, MismatchError
from dflash_core.hidden_states import (
    HiddenStates,
    Layout,
    check_rows,
    choose_layout,
    create_store,
    read_layout,
    write_pack,
)
from dflash_core.manifest import Dataset
from dflash_core.packing import Pack
from dflash_core.shards import encode
from dflash_core.storage import Storage
from tests.stores import PlannedTokens, made_up_states

T, L, H = 64, 3, 8
CONFIG = ExtractConfig(target_layer_ids=[0, 2, 3], chunk_rows=8, shard_bytes=2**16)
SMALL_SHARDS = 8 * L * H * 2 * 2  # bytes of two chunks
CONTRACT = {"target": "acme/tiny", "target_revision": "abc", "target_layer_ids": [0, 2, 3]}
LENGTHS = [40, 20, 64, 7, 9, 30]


def states_of(pack: Pack, seed: int = 0) -> torch.Tensor:
    return made_up_states(pack, L, H, seed)


def bits(values) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        return values.view(torch.int16).numpy().view(np.uint16)
    return np.asarray(values).view(np.uint16)


@pytest.fixture
def root(tmp_path):
    return Storage.from_url(str(tmp_path))


@pytest.fixture
def tokens():
    return PlannedTokens(np.array(LENGTHS), T)


def plan(root, tokens, config=CONFIG, **contract):
    dataset = Dataset.create(root, "hidden", "demo", version=1, config=config, inputs={})
    create_store(dataset, tokens, L, H, {**CONTRACT, **contract}, config)
    return dataset


def write(dataset, tokens, packs=None, seed=0):
    layout = read_layout(dataset)
    for index in range(tokens.num_packs) if packs is None else packs:
        pack = tokens.read_pack(index)
        hidden = states_of(pack, seed)
        write_pack(dataset, layout, pack, hidden, check_rows(pack, hidden), {})
    return dataset


def expected(tokens) -> np.ndarray:
    return np.concatenate([bits(states_of(tokens.read_pack(i))) for i in range(tokens.num_packs)])


@pytest.fixture
def stored(root, tokens):
    config = CONFIG.model_copy(update={"shard_bytes": SMALL_SHARDS})
    return write(plan(root, tokens, config), tokens)


def shard_path(dataset, number=0):
    return dataset.storage.local_path / f"hidden/c/{number}/0/0"


# --- layout


@pytest.mark.parametrize(
    ("pack_tokens", "chunk_rows", "shard_bytes", "chunk", "shard"),
    [
        (64, 8, 2**20, 8, 64),  # all in one shard
        (64, 8, 16 * 48, 8, 16),  # exactly two chunks
        (64, 8, 16 * 48 - 1, 8, 8),  # not quite two
        (64, 8, 1, 8, 8),  # one chunk at least
        (100, 32, 2**20, 25, 100),  # the largest divisor up to 32
        (96, 32, 70 * 48, 32, 32),  # 64 rows would fit but do not divide 96
        (97, 32, 2**20, 1, 97),  # a prime
    ],
)
def test_chunks_and_shards_divide_a_pack(pack_tokens, chunk_rows, shard_bytes, chunk, shard):
    config = ExtractConfig.model_construct(chunk_rows=chunk_rows, shard_bytes=shard_bytes)
    layout = choose_layout(2, pack_tokens, L, H, config)
    assert (layout.chunk_rows, layout.shard_rows) == (chunk, shard)
    assert layout.shards_per_pack * layout.shard_rows == pack_tokens


def test_the_default_layout_of_a_27b_target_is_near_128_mib():
    layout = choose_layout(1, 16_384, 5, 5120, ExtractConfig())
    assert (layout.chunk_rows, layout.shard_rows) == (256, 2048)
    assert layout.shard_rows * layout.row_bytes == 100 * 2**20


# --- what stock readers see


@pytest.mark.parametrize("shard_bytes", [2**16, SMALL_SHARDS, 1])
def test_stock_zarr_reads_what_was_written_to_the_bit(root, tokens, shard_bytes):
    config = CONFIG.model_copy(update={"shard_bytes": shard_bytes})
    dataset = write(plan(root, tokens, config), tokens)
    group = zarr.open_group(dataset.storage.local_path, mode="r")
    assert group["hidden"].dtype.name == "bfloat16"
    assert np.array_equal(bits(group["hidden"][:]), expected(tokens))
    packs = [tokens.read_pack(i) for i in range(tokens.num_packs)]
    assert np.array_equal(group["input_ids"][:], np.concatenate([p.input_ids for p in packs]))
    assert np.array_equal(group["loss_mask"][:], np.concatenate([p.loss_mask for p in packs]))
    for sample, length in enumerate(LENGTHS):
        start = int(group["start"][sample])
        assert group["length"][sample] == length
        assert group["input_ids"][start] == sample * 1000
    assert group.attrs["contract"] == CONTRACT


def test_zarr_reads_it_through_fsspec(stored, tokens):
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
    from fsspec.implementations.local import LocalFileSystem
    from zarr.storage import FsspecStore

    files = AsyncFileSystemWrapper(LocalFileSystem(), asynchronous=True)
    store = FsspecStore(files, read_only=True, path=str(stored.storage.local_path))
    assert np.array_equal(bits(zarr.open_group(store, mode="r")["hidden"][:]), expected(tokens))


def test_our_shards_are_the_bytes_that_zarr_writes(root, tokens, tmp_path):
    """For full chunks; zarr drops chunks that are all zeros, as we drop those past the last sample."""
    layout = read_layout(plan(root, tokens))
    rows = np.random.default_rng(0).integers(1, 2**14, (T, L * H), dtype=np.int16)
    store = zarr.open_group(plan(root, tokens).storage.zarr_store(), mode="r+")
    store["hidden"][:T] = rows.view(store["hidden"].dtype).reshape(T, L, H)
    theirs = plan(root, tokens).storage.get("hidden/c/0/0/0")
    step = layout.chunk_bytes + 4
    payloads = rows.reshape(layout.chunks_per_shard, -1)
    ours = b"".join(encode(payloads, "none", layout.chunks_per_shard)[1])
    assert len(ours) == len(theirs)
    # zarr may place chunks in any order, so compare through its own index.
    index = np.frombuffer(theirs[layout.chunks_per_shard * step : -4], "<u8").reshape(-1, 2)
    for chunk, (offset, size) in enumerate(index.tolist()):
        assert ours[chunk * step : (chunk + 1) * step] == theirs[offset : offset + size]


def test_zarr_over_our_own_storage_reads_it_too(tokens):
    memory = Storage.from_url("memory://")
    dataset = write(plan(memory, tokens), tokens)
    group = zarr.open_group(dataset.storage.zarr_store(read_only=True), mode="r")
    assert np.array_equal(bits(group["hidden"][:]), expected(tokens))


@pytest.mark.server
@pytest.mark.timeout(180)
def test_a_bucket_works_like_a_folder_and_s3fs_reads_it(s3_server, s3_url, tokens):
    from zarr.storage import FsspecStore

    root = Storage.from_url(s3_url)
    config = CONFIG.model_copy(update={"shard_bytes": SMALL_SHARDS})
    dataset = write(plan(root, tokens, config), tokens)
    options = {"client_kwargs": {"endpoint_url": s3_server.endpoint}}
    store = FsspecStore.from_url(dataset.url, storage_options=options, read_only=True)
    assert np.array_equal(bits(zarr.open_group(store, mode="r")["hidden"][:]), expected(tokens))
    reader = HiddenStates.open(dataset)
    assert np.array_equal(bits(reader.read_pack(0)[1]), bits(states_of(tokens.read_pack(0))))
    key = dataset.record("00000000")["shards"][1]["key"]
    dataset.storage.put(key, dataset.storage.get(key)[:-100])
    with pytest.raises(CorruptError, match=key):
        reader.read_pack(0)
    sample = int(np.flatnonzero(tokens.pack == 0)[0])
    with pytest.raises(CorruptError, match=key):
        reader.read_sample(sample)


# --- our reader


def test_packs_come_back_whole(stored, tokens):
    reader = HiddenStates.open(stored)
    for index in range(tokens.num_packs):
        want = tokens.read_pack(index)
        pack, hidden = reader.read_pack(index)
        assert hidden.dtype == torch.bfloat16
        assert np.array_equal(bits(hidden), bits(states_of(want)))
        for field in ("input_ids", "loss_mask", "start", "length", "samples"):
            assert np.array_equal(getattr(pack, field), getattr(want, field)), field
            assert getattr(pack, field).dtype == getattr(want, field).dtype
        assert pack.num_tokens == want.num_tokens


def test_samples_come_back_by_ranges(stored, tokens, monkeypatch):
    reader = HiddenStates.open(stored)
    fetched = []
    real = Storage.stream
    monkeypatch.setattr(Storage, "stream", lambda *a: fetched.append(a[3]) or real(*a))
    for sample, length in enumerate(LENGTHS):
        pack = tokens.read_pack(int(tokens.pack[sample]))
        row = int(tokens.row[sample])
        fetched.clear()
        got = reader.read_sample(sample)
        assert np.array_equal(bits(got), bits(states_of(pack))[row : row + length])
        layout, chunks = reader.layout, range(row // 8, (row + length - 1) // 8 + 1)
        shards = {chunk // layout.chunks_per_shard for chunk in chunks}
        assert len(fetched) == len(shards)
        # A shard that is fetched whole comes with its index.
        indices = sum(size % (layout.chunk_bytes + 4) for size in fetched)
        assert sum(fetched) - indices == len(chunks) * (layout.chunk_bytes + 4)
        assert indices <= len(shards) * (16 * layout.chunks_per_shard + 4)


def test_the_reader_needs_no_zarr(stored, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "zarr", None)
    assert HiddenStates.open(stored).read_pack(0)[1].shape == (T, L, H)


def test_an_uncommitted_pack_is_an_error_not_zeros(root, tokens):
    reader = HiddenStates.open(write(plan(root, tokens), tokens, packs=[0]))
    reader.read_pack(0)
    with pytest.raises(IncompleteError, match=r"pack 1 of 3 has no commit record"):
        reader.read_pack(1)
    with pytest.raises(IncompleteError, match="pack"):
        reader.read_sample(int(np.flatnonzero(tokens.pack == 1)[0]))


def test_a_folder_that_was_never_planned_says_so(root):
    dataset = Dataset.create(root, "hidden", "x", version=1, config={}, inputs={})
    with pytest.raises(IncompleteError, match="never planned"):
        HiddenStates.open(dataset)


# --- damage


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "payload bit": lambda path: flip(path, 100),
    "chunk checksum bit": lambda path: flip(path, 8 * L * H * 2),
    "index bit": lambda path: flip(path, -20),
    "index checksum bit": lambda path: flip(path, -1),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-50]),
    "cut to nothing": lambda path: path.write_bytes(b""),
    "a chunk cut out": lambda path: path.write_bytes(path.read_bytes()[8 * L * H * 2 + 4 :]),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"x" * 50),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name != "grown"])
def test_damage_to_a_shard_is_an_error_that_names_pack_and_key(stored, tokens, damage):
    DAMAGE[damage](shard_path(stored))
    reader = HiddenStates.open(stored)
    with pytest.raises(CorruptError, match=r"hidden/c/0/0/0 of pack 0"):
        reader.read_pack(0)
    assert reader.read_pack(1)[1].any()


@pytest.mark.parametrize(
    "damage", ["payload bit", "chunk checksum bit", "cut to nothing", "deleted"]
)
def test_damage_to_the_chunks_of_a_sample_is_seen_by_its_reader(stored, tokens, damage):
    DAMAGE[damage](shard_path(stored))
    with pytest.raises(CorruptError, match=r"hidden/c/0/0/0 of pack 0"):
        HiddenStates.open(stored).read_sample(int(tokens.read_pack(0).samples[0]))


def test_a_shard_replaced_by_another_whole_one_is_seen(stored):
    shard_path(stored, 0).write_bytes(shard_path(stored, 1).read_bytes())
    with pytest.raises(CorruptError, match="not those of the commit record"):
        HiddenStates.open(stored).read_pack(0)


@pytest.mark.parametrize("name", ["input_ids", "loss_mask"])
def test_damaged_tokens_of_a_pack_are_seen(stored, name):
    flip(stored.storage.local_path / name / "c/1", 3)
    with pytest.raises(CorruptError, match=f"{name}/c/1 of pack 1"):
        HiddenStates.open(stored).read_pack(1)


@pytest.mark.parametrize("name", ["start", "length"])
def test_damaged_sample_lists_are_seen(stored, name):
    flip(stored.storage.local_path / name / "c/0", 3)
    with pytest.raises(CorruptError, match=f"{name}/c/0"):
        HiddenStates.open(stored)


def test_an_altered_record_is_seen(stored):
    path = stored.storage.local_path / "_commits/00000000.json"
    body = json.loads(path.read_text())
    body["shards"][0]["crc32c"] = "00000000"
    path.write_text(json.dumps(body))
    with pytest.raises(CorruptError, match="altered"):
        HiddenStates.open(stored).read_pack(0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_name_the_sample(tokens, value):
    pack = tokens.read_pack(1)
    hidden = states_of(pack)
    hidden[pack.start[1] + 2, 1, 3] = value
    words = rf"sample {pack.samples[1]} \(pack 1, token 2 of {pack.length[1]}\), 1 rows"
    with pytest.raises(InputError, match=words):
        check_rows(pack, hidden)


def test_the_largest_magnitude_is_recorded(root, tokens):
    pack = tokens.read_pack(0)
    hidden = states_of(pack)
    hidden[1, 1, 1] = -77
    assert check_rows(pack, hidden) == 77
    dataset = plan(root, tokens)
    record = write_pack(dataset, read_layout(dataset), pack, hidden, 77.0, {"by": "test"}).record
    assert (record["absmax"], record["num_nan"], record["by"]) == (77, 0, "test")
    assert record["num_tokens"] == pack.num_tokens
    assert (record["first_row"], record["last_row"]) == (0, pack.num_tokens - 1)


# --- several writers, leftovers


def test_a_second_writer_adopts_what_the_first_one_wrote(stored, tokens):
    before = {p: p.read_bytes() for p in stored.storage.local_path.rglob("*") if p.is_file()}
    write(stored, tokens, seed=1)
    after = {p: p.read_bytes() for p in stored.storage.local_path.rglob("*") if p.is_file()}
    assert after == before


def test_a_whole_leftover_of_an_uncommitted_pack_is_adopted(root, tokens):
    """A crash came after the upload and before the commit; the next attempt computes other bits."""
    dataset = plan(root, tokens)
    write(dataset, tokens, packs=[0], seed=1)
    (dataset.storage.local_path / "_commits/00000000.json").unlink()
    write(dataset, tokens, packs=[0])
    _, hidden = HiddenStates.open(dataset).read_pack(0)
    assert np.array_equal(bits(hidden), bits(states_of(tokens.read_pack(0), seed=1)))


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name != "deleted"])
def test_a_damaged_leftover_of_an_uncommitted_pack_is_replaced(root, tokens, damage):
    dataset = write(plan(root, tokens), tokens, packs=[0])
    (dataset.storage.local_path / "_commits/00000000.json").unlink()
    DAMAGE[damage](shard_path(dataset))
    write(dataset, tokens, packs=[0])
    _, hidden = HiddenStates.open(dataset).read_pack(0)
    assert np.array_equal(bits(hidden), bits(states_of(tokens.read_pack(0))))


def test_a_damaged_object_of_a_committed_pack_is_not_touched(stored, tokens):
    flip(shard_path(stored), 5)
    with pytest.raises(CorruptError, match=r"committed pack 0 is damaged; `dflash store repair"):
        write(stored, tokens, packs=[0])


def test_following_the_advice_repairs_a_damaged_pack(stored, tokens):
    shard_path(stored).unlink()
    (stored.storage.local_path / "_commits/00000000.json").unlink()
    write(stored, tokens, packs=[0])
    assert np.array_equal(
        bits(HiddenStates.open(stored).read_pack(0)[1]), bits(states_of(tokens.read_pack(0)))
    )


def test_racing_writers_leave_one_consistent_store(root, tokens):
    config = CONFIG.model_copy(update={"shard_bytes": SMALL_SHARDS})
    datasets = [plan(root, tokens, config) for _ in range(4)]
    barrier = threading.Barrier(4)

    def run(seed):
        barrier.wait()
        write(datasets[seed], tokens, seed=seed)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    reader = HiddenStates.open(datasets[0])
    for index in range(tokens.num_packs):
        reader.read_pack(index)


# --- planning


def test_planning_twice_changes_nothing(root, tokens):
    dataset = plan(root, tokens)
    before = {p: p.read_bytes() for p in dataset.storage.local_path.rglob("*") if p.is_file()}
    again = plan(root, tokens)
    assert again.path == dataset.path
    assert {
        p: p.read_bytes() for p in dataset.storage.local_path.rglob("*") if p.is_file()
    } == before


def test_a_plan_that_crashed_midway_is_finished(root, tokens):
    dataset = plan(root, tokens)
    for key in ("zarr.json", "start/c/0", "input_ids/zarr.json"):
        dataset.storage.delete([key])
    plan(root, tokens)
    write(dataset, tokens)
    group = zarr.open_group(dataset.storage.local_path, mode="r")
    assert np.array_equal(bits(group["hidden"][:]), expected(tokens))


def test_another_contract_at_the_same_place_is_refused_field_by_field(root, tokens):
    plan(root, tokens)
    with pytest.raises(MismatchError) as caught:
        plan(root, tokens, target_revision="def", target_layer_ids=[1])
    message = str(caught.value)
    assert "target_revision: have 'abc', want 'def'" in message
    assert "target_layer_ids: have [0, 2, 3], want [1]" in message
    assert "target: " not in message


def test_a_store_of_another_format_is_refused(root, tokens, monkeypatch):
    dataset = plan(root, tokens)
    monkeypatch.setattr(hidden_states, "FORMAT_VERSION", 2)
    with pytest.raises(InputError, match="version 1, expected 'dflash-hidden-states' version 2"):
        HiddenStates.open(dataset)


def test_a_single_sample_at_row_zero_is_stored(root):
    tokens = PlannedTokens(np.array([5]), T)
    dataset = write(plan(root, tokens), tokens)
    assert HiddenStates.open(dataset).read_sample(0).shape == (5, L, H)


def test_chunks_past_the_last_sample_take_no_space():
    layout = Layout(1, 64, L, H, chunk_rows=8, shard_rows=32)
    assert layout.chunks_in_shards(64) == [4, 4]
    assert layout.chunks_in_shards(33) == [4, 1]
    assert layout.chunks_in_shards(32) == [4]
    assert layout.chunks_in_shards(1) == [1]


def test_a_reader_made_for_something_else_is_refused_field_by_field(stored):
    reader = HiddenStates.open(stored)
    reader.require("extract again", **CONTRACT)
    for name, value in {**CONTRACT, "thinking": None}.items():
        with pytest.raises(MismatchError, match=f"extract again\n  {name}: have .*, want 'x'"):
            reader.require("extract again", **{**CONTRACT, name: "x"})
        assert reader.contract.get(name) == value


# --- slices


def test_any_slice_of_a_sample_is_that_of_the_whole(stored, tokens, monkeypatch):
    reader = HiddenStates.open(stored)
    requests = []
    real = Storage.stream
    monkeypatch.setattr(Storage, "stream", lambda *a: requests.append(a[1]) or real(*a))
    sample, shard_rows = 2, reader.layout.shard_rows
    whole = reader.read_sample(sample)
    for first in range(0, LENGTHS[sample], 3):
        for stop in range(first + 1, min(first + shard_rows, LENGTHS[sample]) + 1, 5):
            requests.clear()
            assert torch.equal(reader.read_sample(sample, first, stop), whole[first:stop])
            assert len(requests) <= 2, "up to shard_rows tokens lie in one or two shards"


@pytest.mark.parametrize(("sample", "first", "stop"), [(6, 0, 1), (-1, 0, 1), (3, 0, 8), (3, 4, 4)])
def test_a_slice_that_is_not_there_is_refused(stored, sample, first, stop):
    with pytest.raises(InputError, match=r"is not in|are not in"):
        HiddenStates.open(stored).read_sample(sample, first, stop)


# --- codecs, float8, more arrays


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_stock_zarr_reads_every_codec_and_type(root, tokens, codec, dtype):
    config = CONFIG.model_copy(update={"codec": codec, "dtype": dtype, "shard_bytes": SMALL_SHARDS})
    dataset = write(plan(root, tokens, config), tokens)
    group = zarr.open_group(dataset.storage.local_path, mode="r")
    values = torch.from_numpy(group["hidden"][:].astype(np.float32))
    if dtype == "float8_e4m3":
        values *= torch.from_numpy(group["scale"][:])[..., None]
    states = values.to(torch.bfloat16)
    reader = HiddenStates.open(dataset)
    for index in range(tokens.num_packs):
        pack, hidden = reader.read_pack(index)
        assert torch.equal(hidden, states[index * T : (index + 1) * T])
        for sample, start, length in zip(pack.samples, pack.start, pack.length, strict=True):
            assert torch.equal(reader.read_sample(int(sample)), hidden[start : start + length])
        want = states_of(tokens.read_pack(index)).float()
        if dtype == "bfloat16":
            assert torch.equal(hidden.float(), want)
        else:
            assert ((hidden.float() - want).abs() <= want.abs() / 16 + 1e-3).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_tensorstore_reads_every_codec_and_type(root, tokens, codec, dtype):
    tensorstore = pytest.importorskip("tensorstore")
    config = CONFIG.model_copy(update={"codec": codec, "dtype": dtype})
    dataset = write(plan(root, tokens, config), tokens)
    place = f"file://{dataset.storage.local_path}/hidden/"
    array = tensorstore.open({"driver": "zarr3", "kvstore": place}).result()
    theirs = array[...].read().result()
    ours = zarr.open_group(dataset.storage.local_path, mode="r")["hidden"][:]
    assert theirs.dtype == ours.dtype
    assert np.array_equal(theirs.view(np.uint8), ours.view(np.uint8))


@pytest.mark.parametrize("damage", [name for name in DAMAGE if name != "grown"])
def test_damage_to_a_compressed_shard_is_seen(root, tokens, damage):
    dataset = write(plan(root, tokens, CONFIG.model_copy(update={"codec": "zstd"})), tokens)
    DAMAGE[damage](shard_path(dataset))
    with pytest.raises(CorruptError, match=r"hidden/c/0/0/0 of pack 0"):
        HiddenStates.open(dataset).read_pack(0)


@pytest.mark.parametrize("damage", ["none", *(name for name in DAMAGE if name != "deleted")])
def test_a_compressed_leftover_is_adopted_when_whole_and_replaced_when_not(root, tokens, damage):
    dataset = plan(root, tokens, CONFIG.model_copy(update={"codec": "lz4"}))
    write(dataset, tokens, packs=[0], seed=1)
    (dataset.storage.local_path / "_commits/00000000.json").unlink()
    if damage != "none":
        DAMAGE[damage](shard_path(dataset))
    write(dataset, tokens, packs=[0])
    _, hidden = HiddenStates.open(dataset).read_pack(0)
    assert torch.equal(hidden, states_of(tokens.read_pack(0), seed=int(damage == "none")))


def test_a_float8_store_takes_states_that_were_quantized_on_the_device(root, tokens):
    dataset = plan(root, tokens, CONFIG.model_copy(update={"dtype": "float8_e4m3"}))
    layout, pack = read_layout(dataset), tokens.read_pack(0)
    states = states_of(pack)
    scale = float8.scales(states)
    values = float8.quantize(states, scale)
    write_pack(dataset, layout, pack, values, 1.0, {}, {"scale": scale})
    hidden = HiddenStates.open(dataset).read_pack(0)[1]
    assert torch.equal(hidden, float8.dequantize(values, scale))


def test_of_two_float8_writers_the_second_takes_the_scales_of_the_first(root, tokens):
    dataset = plan(root, tokens, CONFIG.model_copy(update={"dtype": "float8_e4m3"}))
    layout, pack = read_layout(dataset), tokens.read_pack(0)
    states = states_of(pack)
    write_pack(dataset, layout, pack, states * 2, 1.0, {})
    dataset.storage.delete(["_commits/00000000.json", layout.shard_key(0, 0)])
    write_pack(dataset, layout, pack, states, 1.0, {})
    hidden = HiddenStates.open(dataset).read_pack(0)[1].float()
    assert ((hidden - states.float()).abs() <= states.float().abs() / 16 + 1e-2).all()


def test_the_tap_last_is_left_out_unless_it_is_asked_for(root, tokens):
    dataset = write(plan(root, tokens, CONFIG.model_copy(update={"last": True})), tokens)
    states = states_of(tokens.read_pack(0))
    plain, whole = HiddenStates.open(dataset), HiddenStates.open(dataset, last=True)
    assert (plain.num_taps, whole.num_taps) == (L - 1, L)
    assert torch.equal(plain.read_pack(0)[1], states[:, :-1])
    assert torch.equal(whole.read_pack(0)[1], states)
    assert plain.read_sample(0).shape == (LENGTHS[0], L - 1, H)


def test_a_tap_last_that_was_not_stored_is_refused(stored):
    with pytest.raises(InputError, match=r"extract with extract\.last=true"):
        HiddenStates.open(stored, last=True)


def test_most_likely_tokens_that_were_not_stored_are_refused(stored):
    with pytest.raises(InputError, match=r"teacher_top_k is 0, .* extract\.teacher_top_k=64"):
        HiddenStates.open(stored, top_k=True)


def test_teacher_arrays_lie_beside_the_states(root, tokens):
    dataset = plan(root, tokens, CONFIG.model_copy(update={"teacher_top_k": 4}))
    layout, pack = read_layout(dataset), tokens.read_pack(1)
    hidden = states_of(pack)
    extras = {
        "teacher_ids": torch.arange(T * 4, dtype=torch.int32).reshape(T, 4),
        "teacher_logprobs": -torch.rand(T, 4).half(),
    }
    write_pack(dataset, layout, pack, hidden, 1.0, {}, extras)
    reader = HiddenStates.open(dataset)
    group = zarr.open_group(dataset.storage.local_path, mode="r")
    for name, values in extras.items():
        np.testing.assert_array_equal(reader.read_side(1, name), values.numpy())
        np.testing.assert_array_equal(group[name][T : 2 * T], values.numpy())
    assert reader.read_pack(1)[0].teacher_ids is None
    with_top_k = HiddenStates.open(dataset, top_k=True)
    found, states = with_top_k.read_pack(1)
    assert torch.equal(states, hidden)
    np.testing.assert_array_equal(found.input_ids, pack.input_ids)
    for name, values in extras.items():
        np.testing.assert_array_equal(getattr(found, name), values.numpy())
    flip(dataset.storage.local_path / "teacher_ids/c/1/0", 9)
    for read in (lambda: reader.read_side(1, "teacher_ids"), lambda: with_top_k.read_pack(1)):
        with pytest.raises(CorruptError, match="teacher_ids/c/1/0 of pack 1"):
            read()
    with pytest.raises(InputError, match="no array 'logits'"):
        reader.read_side(1, "logits")
