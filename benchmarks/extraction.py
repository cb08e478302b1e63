"""Extraction on a GPU against the speed of its matrix units: a random target of a real one's shape.

    python benchmarks/extraction.py --store /dev/shm/extraction --seconds 120

Prints one table (how, tokens/s, share of the speed of a large matrix product), the rate of every minute, where
the time went, host CPU and memory. Packs are deleted as soon as they are committed, so a run of any length
fits; everything else is as in the extract stage: checks, taps, copy, encoding, checksums, commit records.
With --device cpu --shape tiny it runs anywhere, which says nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from dflash_core import extraction, tokenization
from dflash_core.config import ExtractConfig, Runtime, TargetConfig
from dflash_core.extractor import (
    Extractor,
    flops_per_token,
    matmul_flops_per_s,
    padded_batches,
)
from dflash_core.hidden_states import pack_unit, read_layout
from dflash_core.manifest import Dataset
from dflash_core.packed_forward import can_pack, compile_parts, enable_packing, packed_forward
from dflash_core.packing import Pack, plan_packs
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

    folder.mkdir(parents=True, exist_ok=True)
    for path in TOKENIZER.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "config.json":
            shutil.copy(path, folder)
    Qwen3_5TextConfig(**SHAPES[shape], architectures=["Qwen3_5ForCausalLM"]).save_pretrained(folder)
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors")
    return TargetConfig(id=str(folder))


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


def make_tokens(
    root: Storage, target: TargetConfig, num_packs: int, pack_tokens: int, median: float
) -> Dataset:
    """Random tokens in samples of realistic lengths: log-normal, 16 to 4,096."""
    rng = np.random.default_rng(0)
    count = int(num_packs * pack_tokens / median)
    lengths = np.clip(rng.lognormal(np.log(median), 0.8, count), 16, min(4096, pack_tokens))
    lengths = lengths.astype(np.int64)[
        : np.searchsorted(np.cumsum(lengths), num_packs * pack_tokens)
    ]
    pack, row, num_packs = plan_packs(lengths, pack_tokens)
    order = np.lexsort((row, pack))
    total = int(lengths.sum())
    identity = identify(target).contract()
    names = ("tokenizer_hash", "template_hash")
    facts = {
        "num_samples": len(lengths),
        "num_packs": num_packs,
        "pack_tokens": pack_tokens,
        "total_tokens": total,
        "contract": {**{name: identity[name] for name in names}, "thinking": False},
    }
    arrays = {
        "input_ids": rng.integers(0, 5000, total).astype(np.uint32),
        "loss_mask": np.ones(total, np.uint8),
        "offset": np.concatenate([[0], np.cumsum(lengths[order])]).astype(np.int64),
        "pack": pack[order],
        "row": row[order],
    }
    config = {"synthetic": total, "pack_tokens": pack_tokens}
    dataset = Dataset.create(
        root, "tokens", "synthetic", version=tokenization.VERSION, config=config, inputs={}
    )
    if not dataset.complete:
        tokenization._write_zarr(dataset.storage, arrays, facts)
        dataset.seal([], facts)
    print(
        f"{len(lengths):,} samples of {total / len(lengths):.0f} tokens on average, {num_packs} packs of "
        f"{pack_tokens:,}, {total / num_packs / pack_tokens:.1%} full"
    )
    return dataset


def rate(forward: Callable[[Pack], None], packs: list[Pack], device: torch.device) -> float:
    """Tokens per second of forwards alone, after one that is not counted."""
    with torch.inference_mode():
        forward(packs[0])
        _synchronize(device)
        began = time.perf_counter()
        for pack in packs:
            forward(pack)
        _synchronize(device)
    return sum(pack.num_tokens for pack in packs) / (time.perf_counter() - began)


def padded(body: Any, pack: Pack, device: torch.device, batch_tokens: int = 16_384) -> None:
    """Right-padded batches of similar length, as Transformers runs them."""
    for ids_BS, _, _ in padded_batches(pack, batch_tokens):
        body(input_ids=ids_BS.to(device), use_cache=False)


class Janitor:
    """Deletes packs that are committed, and notes when how many tokens were."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self._layout = dataset, read_layout(dataset)
        self._began = time.perf_counter()
        self._commits: list[tuple[float, int]] = []  # seconds since the start, tokens

    def __call__(self, done: int, total: int, numbers: dict[str, float]) -> None:
        storage = self._dataset.storage
        for unit in self._dataset.committed():
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="27b")
    parser.add_argument("--store", required=True, help="root URL: a folder on a fast disk or tmpfs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=60, help="of the run that is timed")
    parser.add_argument("--packs", type=int, default=24)
    parser.add_argument("--pack-tokens", type=int, default=16_384)
    parser.add_argument("--median-tokens", type=float, default=256, help="of a sample")
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--skip-baselines", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    root = Storage.from_url(options.store)
    target = make_target(Path(options.store) / "target", options.shape)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    target = target.model_copy(update={"dtype": dtype})
    tokens = make_tokens(root, target, options.packs, options.pack_tokens, options.median_tokens)
    dataset = extraction.plan(root, "benchmark", tokens, target, ExtractConfig(chunk_rows=256))
    layer_ids = extraction.read_contract(dataset)["target_layer_ids"]
    body = make_body(target, max(layer_ids) + 1, device)
    flops = flops_per_token(body)
    peak = matmul_flops_per_s(device, torch.bfloat16) if device.type == "cuda" else 0.0
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("dflash_core").setLevel(logging.INFO)
    print(
        f"taps {layer_ids}, {flops / 2e9:.2f} B weights a token, matmul {peak / 1e12:.0f} TFLOP/s"
    )

    table = Table("how", "tokens/s", "of matmul", box=None, pad_edge=False)

    def add(how: str, tokens_per_s: float) -> None:
        share = f"{tokens_per_s * flops / peak:.1%}" if peak else "-"
        table.add_row(how, f"{tokens_per_s:,.0f}", share)
        print(f"{how}: {tokens_per_s:,.0f} tokens/s", flush=True)

    source = Tokens.open(tokens)
    # Packs are filled longest sample first: take them from all over the plan.
    chosen = np.linspace(0, source.num_packs - 1, min(6, source.num_packs)).astype(int).tolist()
    packs = [source.read_pack(index) for index in chosen]
    if not options.skip_baselines:
        add(
            "right-padded batches, nothing stored",
            rate(lambda p: padded(body, p, device), packs[:3], device),
        )
        if can_pack(body, device, torch.bfloat16):
            enable_packing(body)
            add(
                "packed, nothing stored",
                rate(lambda p: packed_forward(body, p, device), packs, device),
            )
            compile_parts(body)
            rate(lambda p: packed_forward(body, p, device), packs, device)
            add(
                "packed and compiled, nothing stored",
                rate(lambda p: packed_forward(body, p, device), packs * 2, device),
            )

    runtime = Runtime(device=options.device, writer_threads=options.writers, slow_kernels=True)
    extractor = Extractor(dataset, tokens, target, runtime, body)
    everything = list(range(source.num_packs))
    extractor.extract(everything[:2], Janitor(dataset))  # checks, compiles, allots the slots
    warm = extractor.extract(everything, Janitor(dataset))
    rounds = round(options.seconds * warm["tokens_per_s"] / tokens.facts["total_tokens"])
    janitor, cpu = Janitor(dataset), time.process_time()
    numbers = extractor.extract(everything * max(1, rounds), janitor)
    cores = (time.process_time() - cpu) / janitor.seconds
    add("extraction: taps, copy, encode, write, commit", janitor.num_tokens / janitor.seconds)
    Console(width=100).print(table)
    print("tokens/s of every minute:", ", ".join(f"{value:,.0f}" for value in janitor.minutes()))
    written = janitor.num_tokens * read_layout(dataset).row_bytes / janitor.seconds / 1e9
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{janitor.seconds:.0f} s, {written:.2f} GB/s written, {cores:.2f} host cores, "
        f"peak memory {peak_gib:.1f} GiB"
    )
    print(json.dumps(numbers))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
