"""Seconds per training step on a CPU, random data; prints a table.

Run: OMP_NUM_THREADS=2 python benchmarks/training_cpu.py
"""

from __future__ import annotations

import itertools
import statistics
import time

import numpy as np
import torch

from dflash_core.config import TrainConfig
from dflash_core.model import Drafter, DrafterShape
from dflash_core.packing import Pack
from dflash_core.train import Trainer

PACK_TOKENS, SAMPLE_TOKENS, ANCHORS, BLOCK, TAPS = 2048, 256, 64, 8, 5
STEPS = 7  # the first is a warm-up

# Name: hidden size, heads, key-value heads, MLP width, vocabulary.
TARGETS = {
    "SmolLM2-135M": (576, 9, 3, 1536, 49_152),
    "tiny hybrid": (256, 4, 2, 768, 6_144),
}


def make_trainer(target: str, attention: str) -> Trainer:
    hidden, heads, kv_heads, mlp, vocab = TARGETS[target]
    shape = DrafterShape(
        hidden_size=hidden,
        num_hidden_layers=2,
        intermediate_size=mlp,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        block_size=BLOCK,
        attention=attention,
        sliding_window=512,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        mask_token_id=vocab - 1,
        vocab_size=vocab,
        target_layer_ids=tuple(range(TAPS)),
        num_target_layers=30,
    )
    head = torch.randn(vocab, hidden) * 0.02
    return Trainer(Drafter(shape), head, head, TrainConfig(anchors_per_pack=ANCHORS))


def random_pack(trainer: Trainer) -> tuple[Pack, torch.Tensor]:
    shape = trainer.drafter.shape
    samples = PACK_TOKENS // SAMPLE_TOKENS
    pack = Pack(
        index=0,
        input_ids=np.random.default_rng(0)
        .integers(0, shape.vocab_size - 1, PACK_TOKENS)
        .astype(np.uint32),
        loss_mask=(np.arange(PACK_TOKENS) % SAMPLE_TOKENS >= SAMPLE_TOKENS // 4).astype(np.uint8),
        start=np.arange(samples, dtype=np.int32) * SAMPLE_TOKENS,
        length=np.full(samples, SAMPLE_TOKENS, dtype=np.int32),
        samples=np.arange(samples, dtype=np.int32),
    )
    return pack, torch.randn(PACK_TOKENS, TAPS, shape.hidden_size).bfloat16()


def main() -> None:
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    print(
        "| target | attention | parameters | s per step | s per step, slowest | rows + slots per s |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for target, attention in itertools.product(TARGETS, ("full-bidir", "mixed")):
        trainer = make_trainer(target, attention)
        packs = itertools.repeat(random_pack(trainer))
        seconds = []
        for _ in range(STEPS):
            start = time.perf_counter()
            trainer.train_step(packs)
            seconds.append(time.perf_counter() - start)
        median, slowest = statistics.median(seconds[1:]), max(seconds[1:])
        rate = (PACK_TOKENS + ANCHORS * BLOCK) / median
        parameters = sum(p.numel() for p in trainer.drafter.parameters()) / 1e6
        row = (f"{parameters:.1f} M", f"{median:.2f}", f"{slowest:.2f}", f"{rate:,.0f}")
        print(f"| {target} | {attention} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
