"""One training step of three trainers on the same work and machine: seconds and memory, as a table.

    python -m benchmarks.training                      # a GPU: the drafter for Qwen3.6-27B
    python -m benchmarks.training --tiny               # a CPU: shapes that only show that it runs
    python -m benchmarks.training --runs ours:512 ours:2048 --trace /tmp/traces
    python -m benchmarks.training --runs ours:512 ours-replicated:512 ours-sharded:512    # all GPUs

speculators and SpecForge need what tests/core/test_peers_speculators.py says. Each run is a process of
its own, on random data that is already on the device: 8 documents in one pack, every token supervised,
cross-entropy, AdamW with float32 weights and bfloat16 products. SpecForge knows no packs and gets the
documents as a batch. With --store ours reads packs from a store there (420 MB each), as training does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

WARM_UP, ROUNDS, STEPS = 4, 3, 5  # steps of a round follow each other without a wait
TAPS = 5


@dataclass(frozen=True)
class Case:
    """Shape of the drafter and of its batch."""

    anchors: int
    device: str = "cuda"
    rows: int = 8192
    documents: int = 8
    block: int = 16
    layers: int = 5
    hidden: int = 5120
    mlp: int = 17408
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 248_320
    window: int = 2048
    store: str = ""
    """Root URL of the packs that are read; none reads nothing and has one pack on the device."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    def randn(self, *size: int) -> torch.Tensor:
        return torch.randn(size, device=self.device, dtype=self.dtype)

    def token_ids(self) -> torch.Tensor:
        return torch.randint(0, self.vocab - 1, (self.rows,), device=self.device)


@contextmanager
def packs_on_device(case: Case) -> Iterator[Iterator]:
    """The same pack, again and again."""
    from dflash_core.packing import Pack

    length = case.rows // case.documents
    pack = Pack(
        index=0,
        input_ids=case.token_ids().cpu().numpy().astype(np.uint32),
        loss_mask=np.ones(case.rows, dtype=np.uint8),
        start=np.arange(case.documents, dtype=np.int32) * length,
        length=np.full(case.documents, length, dtype=np.int32),
        samples=np.arange(case.documents, dtype=np.int32),
    )
    yield itertools.repeat((pack, case.randn(case.rows, TAPS, case.hidden)))


@contextmanager
def packs_from_store(case: Case, ranks: Any) -> Iterator[Iterator]:
    """Packs of `make_store`, as a training run reads them."""
    from dflash_core.config import Runtime
    from dflash_core.data import packs_ahead, read_ahead, reads
    from dflash_core.hidden_states import HiddenStates

    store = HiddenStates.open(make_store(case))
    share, device = slice(ranks.rank, None, ranks.size), torch.device(case.device)
    order = reads(0, range(10_000), ranks.size, store.num_packs, 1, share)
    with read_ahead(store, order, packs_ahead(store, Runtime()), device) as packs:
        yield packs


def make_store(case: Case, num_packs: int = 8) -> Any:
    """A sealed store of random states, written when it is not there."""
    from benchmarks.extraction import make_target, make_tokens
    from dflash_core import extraction
    from dflash_core.config import ExtractConfig
    from dflash_core.hidden_states import check_rows, read_layout, write_pack
    from dflash_core.storage import Storage
    from dflash_core.tokenization import Tokens

    root = Storage.from_url(case.store)
    shape = "27b" if case.hidden == 5120 else "tiny"
    target = make_target(Path(case.store) / "target", shape)
    lengths = np.full(case.documents * num_packs, case.rows // case.documents)
    tokens = make_tokens(root, target, lengths, case.rows)
    dataset = extraction.plan(root, "benchmark", tokens, target, ExtractConfig())
    layout, source = read_layout(dataset), Tokens.open(tokens)
    for index in extraction.missing(dataset):
        pack = source.read_pack(index)
        generator = torch.Generator().manual_seed(index)
        states = torch.randn(case.rows, TAPS, case.hidden, generator=generator).bfloat16()
        write_pack(dataset, layout, pack, states, check_rows(pack, states), {})
    if not dataset.complete:
        extraction.seal(dataset)
    return dataset


def ours(
    case: Case, packs: Iterator, ranks: Any = None, *, sharded: bool = False
) -> Callable[[], object]:
    """One step of `dflash_core.train.Trainer`, with clipping, checks and metrics; a pack for each rank."""
    from dflash_core.config import TrainConfig
    from dflash_core.model import Drafter, DrafterShape
    from dflash_core.ranks import ALONE
    from dflash_core.train import Trainer

    ranks = ranks or ALONE
    shape = DrafterShape(
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        intermediate_size=case.mlp,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        head_dim=case.head_dim,
        block_size=case.block,
        attention="mixed",
        sliding_window=case.window,
        rope_theta=1e7,
        rms_norm_eps=1e-6,
        mask_token_id=case.vocab - 1,
        vocab_size=case.vocab,
        target_layer_ids=(1, 16, 31, 46, 61),
        num_target_layers=64,
    )
    with torch.device(case.device):
        drafter = Drafter(shape)
    config = TrainConfig(
        anchors_per_pack=case.anchors, learning_rate=1e-4, packs_per_step=ranks.size
    )
    embedding, head = (case.randn(case.vocab, case.hidden) * 0.02 for _ in range(2))
    compiled = case.device == "cuda"
    trainer = Trainer(
        drafter, embedding, head, config, ranks=ranks, sharded=sharded, compiled=compiled
    )
    return lambda: trainer.train_step(packs)


def speculators(case: Case) -> Callable[[], object]:
    """Its model, its loss and its reduction; labels are the target's likeliest tokens, as it has it."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = qwen3_config(case)
    layer._attn_implementation = "simple_flex_attention" if case.device == "cuda" else "eager"
    verifier = VerifierConfig(name_or_path=None, architectures=["Qwen3_5ForCausalLM"])
    proposal = GreedyTokenProposalConfig(speculative_tokens=case.block - 1)
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=case.vocab,
        block_size=case.block,
        aux_hidden_state_layer_ids=[2, 17, 32, 47, 62],
        mask_token_id=case.vocab - 1,
        sample_from_anchor=False,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=verifier,
        ),
    )
    with torch.device(case.device):
        model = DFlashDraftModel(config)
    drawn(model)
    options, _ = DFlashDraftModel.get_trainer_kwargs(
        loss_fn="ce",
        loss_implementation="eager",
        max_anchors=case.anchors,
        dflash_decay_gamma=7.0,
        per_position_loss_weight="dpace",  # torch 2.11 compiles the fixed decay for over five minutes
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    length = case.rows // case.documents
    rows = torch.arange(case.rows, device=case.device)[None]
    batch = {
        "hidden_states": case.randn(1, case.rows, TAPS * case.hidden),
        "input_ids": case.token_ids()[None],
        "loss_mask": torch.ones_like(rows, dtype=torch.bool),
        "verifier_last_hidden_states": case.randn(1, case.rows, case.hidden),
        "document_ids": rows // length,
        "position_ids": rows % length,
    }

    def step() -> None:
        with torch.autocast(case.device, torch.bfloat16, enabled=case.device == "cuda"):
            loss = model(**batch, **options)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def specforge(case: Case) -> Callable[[], object]:
    """Its model in bfloat16 with its optimiser over float32 copies."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.optimizer import BF16Optimizer

    config = qwen3_config(case)
    flex = case.device == "cuda"
    config._attn_implementation = "flex_attention" if flex else "sdpa"
    config.block_size, config.num_target_layers = case.block, 64
    config.dflash_config = {
        "target_layer_ids": [1, 16, 31, 46, 61],
        "mask_token_id": case.vocab - 1,
    }
    with torch.device(case.device):
        drafter = DFlashDraftModel(config).to(case.dtype)
        head = torch.nn.Linear(case.hidden, case.vocab, bias=False, dtype=case.dtype)
        embedding = torch.nn.Embedding(case.vocab, case.hidden, dtype=case.dtype)
    for part in (head, embedding):
        part.requires_grad_(False)
    drawn(drafter)
    model = OnlineDFlashModel(
        drafter,
        head,
        embedding,
        mask_token_id=case.vocab - 1,
        block_size=case.block,
        attention_backend=config._attn_implementation,
        num_anchors=case.anchors // case.documents,
        loss_decay_gamma=7.0,
    )
    optimizer = BF16Optimizer(drafter, 1e-4, max_grad_norm=1.0, total_steps=1000)
    length = case.rows // case.documents
    ids = case.token_ids().view(case.documents, length)
    taps = case.randn(case.documents, length, TAPS * case.hidden)

    def step() -> None:
        loss = model(ids, taps, torch.ones_like(ids, dtype=torch.float32))[0]
        loss.backward()
        optimizer.step()

    return step


def qwen3_config(case: Case) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=case.vocab,
        hidden_size=case.hidden,
        intermediate_size=case.mlp,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        head_dim=case.head_dim,
        rms_norm_eps=1e-6,
        max_position_embeddings=262_144,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        layer_types=["sliding_attention"] * (case.layers - 1) + ["full_attention"],
        sliding_window=case.window,
        use_sliding_window=True,
        tie_word_embeddings=False,
    )


def drawn(model: torch.nn.Module) -> None:
    """Fresh weights for all parameters: matrices of 0.02, norms of 1."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02) if parameter.ndim > 1 else parameter.fill_(1.0)


PEERS = {"speculators": speculators, "specforge": specforge}
RANKS = {"ours-replicated": False, "ours-sharded": True}  # name: whether it is sharded


def measure_ranks(name: str, case: Case, trace: str) -> dict | None:
    """What `measure` gives, of the first of several ranks."""
    from dflash_core.ranks import joined

    with joined(torch.device(case.device)) as (ranks, _), packs_of(case, ranks) as packs:
        step = ours(case, packs, ranks, sharded=RANKS[name])
        found = timed(step, case)
        if trace:
            write_trace(step, f"{trace}/{name}-{case.anchors}-{ranks.rank}.json.gz")
        return found | {"ranks": ranks.size} if ranks.is_first else None


def measure(trainer: str, case: Case, trace: str) -> dict:
    """Seconds of a step, the median and the slowest round, and the peak of allocated GPU memory."""
    from dflash_core.ranks import ALONE

    torch.manual_seed(0)
    if trainer in PEERS:
        return timed(PEERS[trainer](case), case)
    with packs_of(case, ALONE) as packs:
        step = ours(case, packs)
        found = timed(step, case)
        if trace:
            write_trace(step, f"{trace}/{trainer}-{case.anchors}.json.gz")
        return found


def packs_of(case: Case, ranks: Any) -> Any:
    return packs_from_store(case, ranks) if case.store else packs_on_device(case)


def timed(step: Callable[[], object], case: Case) -> dict:
    cuda = case.device == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    start = time.perf_counter()
    step()
    wait()
    first = time.perf_counter() - start
    for _ in range(WARM_UP):
        step()
    seconds, waited = [], 0.0
    for _ in range(ROUNDS):
        wait()
        start = time.perf_counter()
        for _ in range(STEPS):
            numbers = step()
            waited += numbers["wait_s"] if isinstance(numbers, dict) else 0.0
        wait()
        seconds.append((time.perf_counter() - start) / STEPS)
    return {
        "waited": waited / sum(seconds) / STEPS,
        "first": first,
        "median": statistics.median(seconds),
        "slowest": max(seconds),
        "gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
    }


def write_trace(step: Callable[[], object], path: str) -> None:
    """A Chrome trace of three more steps, and their kernels as a table."""
    from torch.profiler import profile

    with profile() as profiled:
        for _ in range(3):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    profiled.export_chrome_trace(path)
    sort = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    averages = profiled.key_averages()
    print(averages.table(sort_by=sort, row_limit=30, max_name_column_width=90), file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    runs = [f"{name}:{anchors}" for anchors in (512, 2048) for name in ("ours", *PEERS)]
    parser.add_argument("--runs", nargs="+", default=runs, help="trainer:anchors")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, tiny shapes")
    parser.add_argument("--store", default="", help="root URL: a folder to read packs from")
    parser.add_argument("--trace", default="", help="folder for Chrome traces of ours")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for each run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    tiny = {"device": "cpu", "rows": 256, "hidden": 64, "mlp": 96, "vocab": 512, "heads": 4}
    tiny |= {"kv_heads": 2, "head_dim": 16, "layers": 2, "window": 64}
    shape: dict[str, Any] = {"store": options.store, **(tiny if options.tiny else {})}
    if options.one:
        name, _, anchors = options.one.partition(":")
        case = Case(int(anchors), **shape)
        several = name in RANKS
        found = (measure_ranks if several else measure)(name, case, options.trace)
        if found:
            print(json.dumps(found))
        return
    if options.store:
        make_store(Case(0, **shape))
    device = "CPU" if options.tiny else torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}\n")
    print(
        "| trainer | anchors | s per step | slowest round | of speculators | peak GiB | first step s "
        "| waits for input |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    results = {}
    for run in options.runs:
        results[run] = run_apart(run, options)
        print(run, results[run], file=sys.stderr, flush=True)
    for run, found in results.items():
        name, _, anchors = run.partition(":")
        base = results.get(f"speculators:{anchors}", {})
        print(f"| {name} | {anchors} | {cells(found, base)} |")
    for run, found in results.items():
        alone = results.get(f"ours:{run.partition(':')[2]}", {})
        if "ranks" in found and "median" in alone:
            faster = found["ranks"] * alone["median"] / found["median"]
            print(f"\n{run} on {found['ranks']} GPUs does {faster:.2f} times the work of one GPU")


def run_apart(run: str, options: argparse.Namespace) -> dict:
    command = [sys.executable]
    if run.partition(":")[0] in RANKS:
        processes = 2 if options.tiny else torch.cuda.device_count()
        command += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            f"{processes}",
        ]
    command += ["-m", "benchmarks.training", "--one", run]
    command += ["--tiny"] * options.tiny + ["--store", options.store, "--trace", options.trace]
    try:
        done = subprocess.run(
            command, check=False, stdout=subprocess.PIPE, text=True, timeout=options.timeout
        )
    except subprocess.TimeoutExpired:
        return {"error": f"longer than {options.timeout:.0f} s"}
    if done.returncode:
        return {"error": "failed, see above"}
    return json.loads(done.stdout.splitlines()[-1])


def cells(found: dict, base: dict) -> str:
    if "error" in found:
        return f"{found['error']} | | | | | "
    share = f"{found['median'] / base['median']:.2f}" if "median" in base else ""
    numbers = f"{found['median']:.3f} | {found['slowest']:.3f}"
    memory = f"{found['gib']:.1f} | {found['first']:.0f}"
    return f"{numbers} | {share} | {memory} | {found['waited']:.1%}"


if __name__ == "__main__":
    main()
