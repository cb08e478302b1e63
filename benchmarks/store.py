"""Throughput, CPU and requests of the hidden-state store beside other ways to write and read the same array.

Several rounds; in each every client, one after the other, in a process of its own and on a fresh SeaweedFS server on this
machine (one that has taken in some GB is slower), writes the same packs as the same objects of about 100 MB with four
threads, then reads all of them several times. Prints the medians of the rounds, as in docs/store.md, and whether its
bars are met: the median over rounds of what two clients reached in the same round.

Run: PYTHONPATH=. python benchmarks/store.py [--packs 4] [--rounds 5] [--folder /dev/shm]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.s3 import BUCKET, S3Server

PACK_TOKENS = int(os.environ.get("BENCH_ROWS", "4096"))  # fewer only to try the script
TAPS, HIDDEN, THREADS = 5, 5120, 4
READS = 4  # of every pack: training visits each once an epoch
CHUNK = min(256, PACK_TOKENS // 4)
PACK_BYTES = PACK_TOKENS * TAPS * HIDDEN * 2
CLIENTS = {
    "raw": "obstore PUT and GET of the same bytes",
    "ours": "this project",
    "ours-zstd": "this project, codec zstd",
    "safetensors": "safetensors per half pack, boto3",
    "zarr-s3fs": "zarr-python, s3fs",
    "zarr-obstore": "zarr-python, obstore",
    "tensorstore": "tensorstore",
}


class Figures(NamedTuple):
    """One direction of one client."""

    mb_per_s: float
    cpu_s_per_gb: float
    requests_per_object: float
    peak_mb: float


def states() -> torch.Tensor:
    """bfloat16 [T, L, H] with a few channels 50 times as large as the others, as real states have."""
    generator = torch.Generator().manual_seed(0)
    hidden_TLH = torch.randn(PACK_TOKENS, TAPS, HIDDEN, generator=generator).to(torch.bfloat16)
    hidden_TLH[..., ::1000] *= 50
    return hidden_TLH


# --- clients: each returns a writer and a reader of pack i, and how many objects a pack has ------------

Client = tuple[Callable[[int], Any], Callable[[int], Any], int]


def raw(hidden_TLH: torch.Tensor, _packs: int) -> Client:
    from dflash_core.storage import Storage

    storage = Storage.from_url(f"s3://{BUCKET}/raw")
    whole = hidden_TLH.view(torch.int16).numpy().reshape(-1).view(np.uint8)
    halves = [memoryview(half) for half in np.split(whole, 2)]

    def write(pack: int) -> None:
        for half, data in enumerate(halves):
            storage.put(f"{pack}-{half}", data)

    def read(pack: int) -> Any:
        return [storage.get_range(f"{pack}-{half}", 0, len(halves[0])) for half in range(2)]

    return write, read, 2


def ours(hidden_TLH: torch.Tensor, packs: int, codec: str = "none") -> Client:
    from dflash_core.config import ExtractConfig
    from dflash_core.hidden_states import HiddenStates, check_rows, create_store, write_pack
    from dflash_core.manifest import Dataset
    from dflash_core.storage import Storage
    from tests.stores import PlannedTokens

    tokens = PlannedTokens(np.full(packs * 8, PACK_TOKENS // 8), PACK_TOKENS)
    config = ExtractConfig(codec=codec, chunk_rows=CHUNK, shard_bytes=PACK_BYTES // 2)  # ty: ignore[invalid-argument-type]
    root = Storage.from_url(f"s3://{BUCKET}/ours")
    dataset = Dataset.create(root, "hidden", "bench", version=1, config=config, inputs={})
    layout = create_store(dataset, tokens, TAPS, HIDDEN, {}, config)  # ty: ignore[invalid-argument-type]
    absmax = check_rows(tokens.read_pack(0), hidden_TLH)
    reader = HiddenStates.open(dataset)

    def write(pack: int) -> None:
        write_pack(dataset, layout, tokens.read_pack(pack), hidden_TLH, absmax, {})

    # Shards, token ids, loss mask, commit record.
    return write, reader.read_pack, layout.shards_per_pack + 3


def ours_zstd(hidden_TLH: torch.Tensor, packs: int) -> Client:
    return ours(hidden_TLH, packs, "zstd")


def safetensors(hidden_TLH: torch.Tensor, _packs: int) -> Client:
    import boto3
    from safetensors.torch import load, save_file

    client = boto3.client("s3")
    folder = Path(tempfile.mkdtemp(dir=os.environ["BENCH_FOLDER"]))

    def write(pack: int) -> None:
        for half, part in enumerate(hidden_TLH.chunk(2)):
            path = folder / f"{pack}-{half}"
            save_file({"hidden": part}, path)
            client.upload_file(str(path), BUCKET, f"safetensors/{pack}-{half}")
            path.unlink()

    def read(pack: int) -> Any:
        bodies = [
            client.get_object(Bucket=BUCKET, Key=f"safetensors/{pack}-{half}") for half in range(2)
        ]
        return [load(body["Body"].read()) for body in bodies]

    return write, read, 2


def _zarr(hidden_TLH: torch.Tensor, packs: int, store: Any) -> Client:
    """Whole shards at once, and no search for chunks that are all zeros, which is zarr's fastest way."""
    import zarr
    from zarr.codecs import Crc32cCodec

    from dflash_core.zarr_bfloat16 import BFloat16

    zarr.config.set({"array.write_empty_chunks": True})
    array: Any = zarr.create_array(
        store,
        shape=(packs * PACK_TOKENS, TAPS, HIDDEN),
        shards=(PACK_TOKENS // 2, TAPS, HIDDEN),
        chunks=(CHUNK, TAPS, HIDDEN),
        dtype=BFloat16(),
        compressors=[Crc32cCodec()],
        fill_value=0,
    )
    values = hidden_TLH.view(torch.int16).numpy().view(array.dtype)

    def write(pack: int) -> None:
        array[pack * PACK_TOKENS : (pack + 1) * PACK_TOKENS] = values

    def read(pack: int) -> Any:
        return array[pack * PACK_TOKENS : (pack + 1) * PACK_TOKENS]

    return write, read, 2


def zarr_s3fs(hidden_TLH: torch.Tensor, packs: int) -> Client:
    from zarr.storage import FsspecStore

    options = {"client_kwargs": {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}}
    store = FsspecStore.from_url(f"s3://{BUCKET}/zarr-s3fs", storage_options=options)
    return _zarr(hidden_TLH, packs, store)


def zarr_obstore(hidden_TLH: torch.Tensor, packs: int) -> Client:
    from dflash_core.storage import Storage

    return _zarr(hidden_TLH, packs, Storage.from_url(f"s3://{BUCKET}/zarr-obstore").zarr_store())


def tensorstore(hidden_TLH: torch.Tensor, packs: int) -> Client:
    import tensorstore as ts

    from dflash_core.zarr_bfloat16 import BFloat16

    inner = {
        "chunk_shape": [CHUNK, TAPS, HIDDEN],
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
        "index_codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
        "index_location": "end",
    }
    array = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {
                "driver": "s3",
                "bucket": BUCKET,
                "path": "tensorstore/",
                "endpoint": os.environ["AWS_ENDPOINT_URL"],
                "aws_region": "us-east-1",
                "aws_credentials": {"type": "environment"},
            },
            "metadata": {
                "shape": [packs * PACK_TOKENS, TAPS, HIDDEN],
                "data_type": "bfloat16",
                "chunk_grid": {
                    "name": "regular",
                    "configuration": {"chunk_shape": [PACK_TOKENS // 2, TAPS, HIDDEN]},
                },
                "codecs": [{"name": "sharding_indexed", "configuration": inner}],
            },
            "create": True,
        }
    ).result()
    values = hidden_TLH.view(torch.int16).numpy().view(BFloat16().to_native_dtype())

    def rows(pack: int) -> Any:
        return array[pack * PACK_TOKENS : (pack + 1) * PACK_TOKENS]

    return lambda pack: rows(pack).write(values).result(), lambda p: rows(p).read().result(), 2


# --- measuring ---------------------------------------------------------------------------------


def measure(name: str, packs: int) -> None:
    """Runs one client in this process, and says when it is ready and what it took, a line of JSON each."""
    write, read, objects = globals()[name.replace("-", "_")](states(), packs + 1)
    with ThreadPoolExecutor(THREADS) as pool:
        for call, times in ((write, 1), (read, READS)):

            def once(pack: int, call: Callable = call) -> None:
                call(pack)

            # Connections, imports, and memory that is touched for the first time.
            once(packs)
            if call is read:
                list(pool.map(once, [packs] * THREADS))
            print(json.dumps({"packs": times * packs, "objects": objects}), flush=True)
            sys.stdin.readline()
            before, cpu, began = _reset_peak(), _cpu(), time.perf_counter()
            list(pool.map(once, [*range(packs)] * times))
            seconds, cpu_s = time.perf_counter() - began, _cpu() - cpu
            taken = {"seconds": seconds, "cpu_s": cpu_s, "peak_mb": _peak() - before}
            print(json.dumps(taken), flush=True)


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _reset_peak() -> float:
    """Starts the peak anew; returns MB resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1e3


def run(name: str, packs: int, folder: str) -> list[Figures]:
    """Writing and reading by one client, in a process of its own, on a server of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as data:
        server = S3Server(Path(data))
        server.start()
        try:
            return _run(server, name, packs, data)
        finally:
            server.stop()


def _run(server: S3Server, name: str, packs: int, folder: str) -> list[Figures]:
    command = [sys.executable, __file__, "--client", name, "--packs", str(packs)]
    environment = {**os.environ, **server.environment, "BENCH_FOLDER": folder}
    found = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        for _ in ("write", "read"):
            work = json.loads(child.stdout.readline())
            before = server.requests()
            child.stdin.write("\n")
            child.stdin.flush()
            taken = json.loads(child.stdout.readline())
            requests = (server.requests() - before).total()
            gb = work["packs"] * PACK_BYTES / 1e9
            found.append(
                Figures(
                    mb_per_s=gb * 1e3 / taken["seconds"],
                    cpu_s_per_gb=taken["cpu_s"] / gb,
                    requests_per_object=requests / (work["packs"] * work["objects"]),
                    peak_mb=taken["peak_mb"],
                )
            )
    return found


Round = dict[str, list[Figures]]


def bars(rounds: list[Round]) -> list[tuple[str, list[float], str, bool]]:
    """What the store must hold: what, measured in each round, bar, whether the median does."""
    writes = [{name: figures[0] for name, figures in found.items()} for found in rounds]
    reads = [{name: figures[1] for name, figures in found.items()} for found in rounds]

    def times(found: list[dict[str, Figures]], other: str) -> list[float]:
        return [each["ours"].mb_per_s / each[other].mb_per_s for each in found]

    checks = [
        ("write, share of raw PUT", times(writes, "raw"), ">=", 0.85),
        ("write, CPU s/GB", [each["ours"].cpu_s_per_gb for each in writes], "<=", 1.0),
        ("read, share of raw GET", times(reads, "raw"), ">=", 0.9),
        (
            "read, requests per object",
            [each["ours"].requests_per_object for each in reads],
            "<=",
            1.1,
        ),
        ("write, times zarr-python + s3fs", times(writes, "zarr-s3fs"), ">=", 4.0),
    ]
    return [
        (what, values, f"{sign} {bar}", _holds(median(values), sign, bar))
        for what, values, sign, bar in checks
    ]


def _holds(value: float, sign: str, bar: float) -> bool:
    return value >= bar if sign == ">=" else value <= bar


def installed() -> list[str]:
    """The clients whose library is there."""
    modules = {"tensorstore": "tensorstore", "safetensors": "boto3"}
    there = []
    for name in CLIENTS:
        if name in modules and importlib.util.find_spec(modules[name]) is None:
            print(f"{modules[name]} is not installed, so it is left out")
        else:
            there.append(name)
    return there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packs", type=int, default=4, help="packs of 210 MB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default="/dev/shm", help="where the server keeps its data")
    parser.add_argument("--client", choices=CLIENTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        measure(options.client, options.packs)
        return
    names, rounds = installed(), []
    print(
        f"{options.rounds} rounds, {options.packs} packs of {PACK_BYTES / 1e6:.0f} MB, "
        f"server's data in {options.folder}",
        flush=True,
    )
    for number in range(options.rounds):
        rounds.append({name: run(name, options.packs, options.folder) for name in names})
        speeds = [
            f"{name} {rounds[-1][name][0].mb_per_s:.0f}/{rounds[-1][name][1].mb_per_s:.0f}"
            for name in names
        ]
        print(f"round {number + 1}, MB/s written/read: {', '.join(speeds)}", flush=True)
    columns = "MB/s | CPU s/GB | requests per object | peak MB"
    print(f"| client | write {columns} | read {columns} |")
    print("| --- " * 9 + "|")
    for name in names:
        cells = []
        for direction in range(2):
            medians = Figures(
                *(
                    median(values)
                    for values in zip(*(found[name][direction] for found in rounds), strict=True)
                )
            )
            cells.append(
                f"{medians.mb_per_s:.0f} | {medians.cpu_s_per_gb:.2f} | "
                f"{medians.requests_per_object:.2f} | {medians.peak_mb:.0f}"
            )
        print(f"| {CLIENTS[name]} | {' | '.join(cells)} |")
    for what, values, bar, holds in bars(rounds):
        spread = f"{min(values):.2f} to {max(values):.2f}"
        print(
            f"{'holds' if holds else 'MISSED'}: {what} {median(values):.2f}, {spread} (bar {bar})"
        )


if __name__ == "__main__":
    main()
