"""Extraction on a GPU against the speed of its matrix units: a random target of a real one's shape.

    python benchmarks/extraction.py --store /dev/shm/extraction --seconds 120

Prints one table (how, tokens/s, share of the speed of a large matrix product), the rate of every minute, where
the time went, host CPU and memory. Packs are deleted as soon as they are committed, so a run of any length
fits; everything else is as in the extract stage: checks, taps, copy, encoding, checksums, commit records.
With --processes 1 2 4 8 the same on that many GPUs of one host, one process each, on one store.
With --gpus-per-target 2 a target that lies on two GPUs, which wants --skip-baselines.
With --device cpu --shape tiny it runs anywhere, which says nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dflash_core import extraction, tokenization
from dflash_core.config import ExtractConfig, Runtime, TargetConfig
from dflash_core.devices import resolve_devices
from dflash_core.extractor import Extractor, padded_batches, split_pack
from dflash_core.flops import flops_per_token, matmul_flops_per_s
from dflash_core.hidden_states import pack_unit, read_layout
from dflash_core.layer_split import device_map
from dflash_core.manifest import Dataset
from dflash_core.packed_forward import can_pack, compile_parts, enable_packing, packed_forward
from dflash_core.packing import Pack
from dflash_core.storage import Storage
from dflash_core.target import identify
from dflash_core.tokenization import Tokens

ROPE = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_interleaved": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    # Qwen3.6-27B: three of four layers Gated DeltaNet.
    "27b": {
        "vocab_size": 248_320,
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_value_heads": 48,
        "linear_num_key_heads": 16,
        "max_position_embeddings": 262_144,
        "rope_parameters": {**ROPE, "mrope_section": [11, 11, 10]},
    },
    "tiny": {
        "vocab_size": 6000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]},
    },
}
TOKENIZER = Path(__file__).parent.parent / "demo" / "target"


def make_target(folder: Path, shape: str) -> TargetConfig:
    """A folder that names a target of this shape; its weights are drawn in memory, not stored."""
    from safetensors.torch import save_file
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    target = TargetConfig(id=str(folder))
    if folder.exists():
        return target
    folder.mkdir(parents=True)
    for path in TOKENIZER.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "config.json":
            shutil.copy(path, folder)
    Qwen3_5TextConfig(**SHAPES[shape], architectures=["Qwen3_5ForCausalLM"]).save_pretrained(folder)
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
    return target


def make_body(target: TargetConfig, depth: int, device: torch.device) -> Any:
    """The first `depth` layers with random weights, norms at 1."""
    from transformers import AutoConfig
    from transformers.models.qwen3_5 import modeling_qwen3_5 as family

    config = AutoConfig.from_pretrained(target.id)
    config.num_hidden_layers, config.layer_types = depth, config.layer_types[:depth]
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        body = family.Qwen3_5TextModel(config)
    body = (
        body.to(getattr(torch, target.dtype)).to_empty(device=device).eval().requires_grad_(False)
    )
    body.rotary_emb = family.Qwen3_5TextRotaryEmbedding(config).to(device)
    body.norm = torch.nn.Identity()
    torch.manual_seed(0)
    for name, weight in body.named_parameters():
        if weight.ndim >= 2:
            weight.normal_(0, 0.02)
        elif name.endswith("A_log"):
            weight.uniform_(0, 2)
        elif name.endswith("linear_attn.norm.weight"):
            weight.fill_(1)
        else:
            weight.zero_()  # these norms multiply by 1 + weight
    return body


def realistic_lengths(num_packs: int, pack_tokens: int, median: float) -> np.ndarray:
    """Log-normal, 16 to 4,096."""
    count = int(num_packs * pack_tokens / median)
    lengths = np.random.default_rng(0).lognormal(np.log(median), 0.8, count)
    lengths = np.clip(lengths, 16, min(4096, pack_tokens)).astype(np.int64)
    return lengths[: np.searchsorted(np.cumsum(lengths), num_packs * pack_tokens)]


def make_tokens(
    root: Storage, target: TargetConfig, lengths: np.ndarray, pack_tokens: int
) -> Dataset:
    """Random tokens in samples of these lengths, all of them supervised."""
    total = int(lengths.sum())
    config = {"synthetic": total, "pack_tokens": pack_tokens}
    dataset = Dataset.create(
        root, "tokens", "synthetic", version=tokenization.VERSION, config=config, inputs={}
    )
    if not dataset.complete:
        identity = identify(target).contract()
        names = ("tokenizer_hash", "template_hash")
        contract = {**{name: identity[name] for name in names}, "thinking": False}
        input_ids = np.random.default_rng(0).integers(0, 500, total).astype(np.uint32)
        part = (lengths.astype(np.int64), input_ids, np.ones(total, np.uint8))
        sizes = tokenization.write_packed(dataset.storage, [part], pack_tokens, contract)
        dataset.seal([], {**sizes, "contract": contract})
    num_packs = dataset.facts["num_packs"]
    print(
        f"{len(lengths):,} samples of {total / len(lengths):.0f} tokens on average, {num_packs} packs of "
        f"{pack_tokens:,}, {total / num_packs / pack_tokens:.1%} full"
    )
    return dataset


def rate(forward: Callable[[Pack], None], packs: list[Pack], device: torch.device) -> float:
    """Tokens per second of forwards alone, after one that is not counted."""
    num_tokens = sum(pack.num_tokens for pack in packs)
    return pace(lambda some: [forward(pack) for pack in some], packs, 1, num_tokens, device)


def pace(
    work: Callable[[list], object],
    items: list,
    num_warm: int,
    num_tokens: int,
    device: torch.device,
) -> float:
    """Tokens per second of `work` on packs or samples, after it on the first ones, which is not counted."""
    with torch.inference_mode():
        work(items[:num_warm])
        _synchronize(device)
        began = time.perf_counter()
        work(items)
        _synchronize(device)
    return num_tokens / (time.perf_counter() - began)


def padded(body: Any, pack: Pack, device: torch.device, batch_tokens: int = 16_384) -> None:
    """Right-padded batches of similar length, as Transformers runs them."""
    for ids_BS, _, _ in padded_batches(pack, batch_tokens):
        body(input_ids=ids_BS.to(device), use_cache=False)


def sample_by_sample(
    body: Any, layer_ids: list[int], batch: int, device: torch.device, samples: list[Tensor]
) -> None:
    """What ad-hoc scripts do: batches as they come, right-padded to the longest, `output_hidden_states`, and
    every sample and tap copied to the host by itself."""
    for first in range(0, len(samples), batch):
        part = samples[first : first + batch]
        ids_BS = torch.nn.utils.rnn.pad_sequence(part, batch_first=True).to(device)
        states = body(input_ids=ids_BS, use_cache=False, output_hidden_states=True).hidden_states
        for row, ids in enumerate(part):
            for layer in layer_ids:
                states[layer + 1][row, : len(ids)].cpu()


def draw_samples(packs: list[Pack], count: int) -> list[Tensor]:
    """Token ids of samples drawn from these packs, which are sorted by length."""
    rng = np.random.default_rng(0)
    singles = [[part.input_ids for _, part in split_pack(pack, 1)] for pack in packs]
    drawn = []
    for _ in range(count):
        samples = singles[rng.integers(len(singles))]
        drawn.append(samples[rng.integers(len(samples))])
    return [torch.from_numpy(ids.astype(np.int64)) for ids in drawn]


class Janitor:
    """Deletes those of `packs` that are committed, and notes when how many tokens were."""

    def __init__(self, dataset: Dataset, packs: list[int]) -> None:
        self._dataset, self._layout = dataset, read_layout(dataset)
        self._units = {pack_unit(pack) for pack in packs}
        self._began = time.perf_counter()
        self._commits: list[tuple[float, int]] = []  # seconds since the start, tokens

    def __call__(self, done: int, total: int, numbers: dict[str, float]) -> None:
        storage = self._dataset.storage
        for unit in self._dataset.committed() & self._units:
            pack, tokens = int(unit), self._dataset.record(unit)["num_tokens"]
            self._commits.append((time.perf_counter() - self._began, tokens))
            shards = [self._layout.shard_key(pack, n) for n in range(self._layout.shards_per_pack)]
            storage.delete([f"_commits/{pack_unit(pack)}.json"])
            storage.delete([*shards, f"input_ids/c/{pack}", f"loss_mask/c/{pack}"])

    @property
    def num_tokens(self) -> int:
        return sum(tokens for _, tokens in self._commits)

    @property
    def seconds(self) -> float:
        """Until the last commit."""
        return self._commits[-1][0]

    def minutes(self) -> list[float]:
        """Tokens per second of every minute; of the last, up to the last commit."""
        count = int(self.seconds // 60) + 1
        tokens = np.zeros(count)
        for second, number in self._commits:
            tokens[int(second // 60)] += number
        lengths = np.full(count, 60.0)
        lengths[-1] = self.seconds % 60
        return (tokens / lengths).tolist()


@dataclass
class Setting:
    """What one process works with."""

    devices: list[torch.device]
    target: TargetConfig
    tokens: Dataset
    dataset: Dataset

    @classmethod
    def make(cls, options: argparse.Namespace) -> Setting:
        devices = resolve_devices(options.device, options.gpus_per_target)
        root = Storage.from_url(options.store)
        target = make_target(Path(options.store) / "target", options.shape)
        dtype = "bfloat16" if devices[0].type == "cuda" else "float32"
        target = target.model_copy(update={"dtype": dtype})
        lengths = realistic_lengths(options.packs, options.pack_tokens, options.median_tokens)
        tokens = make_tokens(root, target, lengths, options.pack_tokens)
        dataset = extraction.plan(root, "benchmark", tokens, target, ExtractConfig(chunk_rows=256))
        return cls(devices, target, tokens, dataset)

    @cached_property
    def body(self) -> Any:
        layer_ids = extraction.read_contract(self.dataset)["target_layer_ids"]
        body = make_body(self.target, max(layer_ids) + 1, self.device)
        for name, device in device_map(body, self.devices).items():
            body.get_submodule(name).to(device)
        return body

    @property
    def device(self) -> torch.device:
        return self.devices[0]


def baselines(setting: Setting) -> Iterator[tuple[str, float]]:
    """Forwards alone: how, tokens per second."""
    body, device, source = setting.body, setting.device, Tokens.open(setting.tokens)
    # Packs are filled longest sample first: take them from all over the plan.
    chosen = np.linspace(0, source.num_packs - 1, min(6, source.num_packs)).astype(int).tolist()
    packs = [source.read_pack(index) for index in chosen]
    layer_ids = extraction.read_contract(setting.dataset)["target_layer_ids"]
    samples = draw_samples(packs, 96)
    num_tokens = sum(map(len, samples))
    for how, batch in (("one sample a forward", 1), ("batches of 16 as they come", 16)):
        work = partial(sample_by_sample, body, layer_ids, batch, device)
        yield f"{how}, output_hidden_states", pace(work, samples, 16, num_tokens, device)
    how = "batches of similar length, nothing stored"
    yield how, rate(lambda p: padded(body, p, device), packs[:1], device)
    if can_pack(body, device, torch.bfloat16):
        enable_packing(body)
        yield (
            "packed, nothing stored",
            rate(lambda p: packed_forward(body, p, device), packs, device),
        )
        compile_parts(body)
        rate(lambda p: packed_forward(body, p, device), packs, device)  # compiles
        how = "packed and compiled, nothing stored"
        yield how, rate(lambda p: packed_forward(body, p, device), packs * 2, device)


def print_profile(how: str, setting: Setting) -> None:
    """Device time of one packed forward by kernel."""
    from torch.profiler import ProfilerActivity, profile

    source = Tokens.open(setting.tokens)
    pack = source.read_pack(source.num_packs // 2)
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CUDA]) as profiled:
        packed_forward(setting.body, pack, setting.device)
        _synchronize(setting.device)
    averages = profiled.key_averages()
    print(f"{how}, kernels of a forward over {pack.num_tokens:,} tokens:")
    print(averages.table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=80))


def warmed_up(setting: Setting, options: argparse.Namespace) -> Callable[[], dict]:
    """The timed run over this process's share of the packs, after checks, compilation and a first round."""
    share, of = map(int, options.share.split("/"))
    packs = list(range(Tokens.open(setting.tokens).num_packs))[share::of]
    runtime = Runtime(
        device=options.device,
        gpus_per_target=options.gpus_per_target,
        writer_threads=options.writers,
        slow_kernels=True,
    )
    dataset = setting.dataset
    extractor = Extractor(dataset, setting.tokens, setting.target, runtime, setting.body)
    extractor.extract(packs[:2], Janitor(dataset, packs))  # checks, compiles, allots the slots
    warm = Janitor(dataset, packs)
    rate = extractor.extract(packs, warm)["tokens_per_s"]
    rounds = max(1, round(options.seconds * rate / warm.num_tokens))

    def run() -> dict:
        janitor, cpu = Janitor(dataset, packs), time.process_time()
        numbers = extractor.extract(packs * rounds, janitor)
        return {
            "tokens_per_s": janitor.num_tokens / janitor.seconds,
            "minutes": [round(value) for value in janitor.minutes()],
            "seconds": janitor.seconds,
            "cores": (time.process_time() - cpu) / janitor.seconds,
            "gb_per_s": janitor.num_tokens * read_layout(dataset).row_bytes / janitor.seconds / 1e9,
            "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "numbers": numbers,
        }

    return run


def run_one(options: argparse.Namespace) -> None:
    setting = Setting.make(options)
    flops, peak = flops_per_token(setting.body), 0.0
    if setting.device.type == "cuda":
        peak = matmul_flops_per_s(setting.device, torch.bfloat16)
    print(f"{flops / 2e9:.2f} B weights a token, matmul {peak / 1e12:.0f} TFLOP/s")
    table = Table("how", "tokens/s", "of matmul", box=None, pad_edge=False)

    def add(how: str, tokens_per_s: float) -> None:
        share = f"{tokens_per_s * flops / peak / len(setting.devices):.1%}" if peak else "-"
        table.add_row(how, f"{tokens_per_s:,.0f}", share)
        print(f"{how}: {tokens_per_s:,.0f} tokens/s", flush=True)

    for how, tokens_per_s in () if options.skip_baselines else baselines(setting):
        add(how, tokens_per_s)
        if options.profile and how.startswith("packed"):
            print_profile(how, setting)
    result = warmed_up(setting, options)()
    add("extraction: taps, copy, encode, write, commit", result["tokens_per_s"])
    Console(width=100).print(table)
    print("tokens/s of every minute:", *(f"{value:,}" for value in result["minutes"]))
    print(
        f"{result['seconds']:.0f} s, {result['gb_per_s']:.2f} GB/s written, {result['cores']:.2f} host "
        f"cores, peak memory {result['peak_gib']:.1f} GiB"
    )
    print(json.dumps(result["numbers"]))


def run_many(options: argparse.Namespace) -> None:
    """One process for each GPU on one store; as many of them work at once as each number asked for."""
    Setting.make(options)
    children = [
        start_share(index, max(options.processes)) for index in range(max(options.processes))
    ]
    for child in children:
        assert any(line.startswith("ready") for line in child.stdout), "a process ended early"
    found: dict[int, list[dict]] = {}
    for count in options.processes:
        for child in children[:count]:
            child.stdin.write("go\n")
            child.stdin.flush()
        found[count] = [json.loads(child.stdout.readline()) for child in children[:count]]
        print(count, json.dumps(found[count]), flush=True)
    for child in children:
        child.communicate()
    table = Table("processes", "tokens/s each", "in all", "scaling", "host cores", "GB/s", box=None)
    fewest = min(found)
    first = sum(result["tokens_per_s"] for result in found[fewest]) / fewest
    for count, results in sorted(found.items()):
        total = sum(result["tokens_per_s"] for result in results)
        table.add_row(
            f"{count}",
            " ".join(f"{result['tokens_per_s']:,.0f}" for result in results),
            f"{total:,.0f}",
            f"{total / count / first:.3f}",
            f"{sum(result['cores'] for result in results):.2f}",
            f"{sum(result['gb_per_s'] for result in results):.2f}",
        )
    Console(width=120).print(table)


def start_share(index: int, of: int) -> subprocess.Popen:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(index)}
    command = [sys.executable, *sys.argv, "--share", f"{index}/{of}"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **pipes)


def run_share(options: argparse.Namespace) -> None:
    """A child of `run_many`: warms up, then works once for every line."""
    run = warmed_up(Setting.make(options), options)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps(run()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="27b")
    parser.add_argument("--store", required=True, help="root URL: a folder on a fast disk or tmpfs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gpus-per-target", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60, help="of the run that is timed")
    parser.add_argument("--packs", type=int, default=24)
    parser.add_argument("--pack-tokens", type=int, default=16_384)
    parser.add_argument("--median-tokens", type=float, default=256, help="of a sample")
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--skip-baselines", action="store_true")
    parser.add_argument("--profile", action="store_true", help="kernels of the packed forwards")
    parser.add_argument(
        "--processes", type=int, nargs="+", help="one for each GPU: 1 2 4 8 compares these"
    )
    parser.add_argument("--share", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share:
        run_share(options)
    elif options.processes:
        run_many(options)
    else:
        options.share = "0/1"
        run_one(options)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
