"""Decoding held-out prompts in every way there is: what a tree of drafts gains and what each way costs.

    python benchmarks/tree_budget.py RUN CORPUS --root data --target demo/target

RUN and CORPUS are paths under the root, such as runs/demo-0123456789ab. One line for each way: plain
decoding by Transformers' own cache; the same in our loop; chains of drafts, with accepted rows run a
second time (what a cache without per-row states needs) and without; batches; trees by number of nodes.
"""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

from dflash_core import decode
from dflash_core.chat import Chat
from dflash_core.checkpoint import load_drafter
from dflash_core.config import TargetConfig
from dflash_core.corpus.rows import read_rows
from dflash_core.decode import (
    Decoding,
    Generation,
    answers,
    greedy,
    plain_steps,
    speculate_steps,
)
from dflash_core.devices import resolve_device
from dflash_core.evaluation_report import bootstrap_interval
from dflash_core.generation import stop_ids
from dflash_core.manifest import Dataset
from dflash_core.sampling import Sampling
from dflash_core.storage import Storage
from dflash_core.target import load_causal_lm, load_tokenizer

Way = Callable[[list[list[int]]], dict[int, Generation]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run")
    parser.add_argument("corpus")
    parser.add_argument("--root", default="data")
    parser.add_argument("--target", default="demo/target")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--nodes", type=int, nargs="*", default=[7, 15, 30, 60, 120])
    options = parser.parse_args()
    root = Storage.from_url(options.root)
    target = TargetConfig(id=options.target, dtype=options.dtype)
    device = resolve_device(options.device)
    model: Any = load_causal_lm(target, device)
    drafter = load_drafter(Dataset.open(root, options.run))[0].to(device, model.dtype)
    drafter.requires_grad_(False)
    chat = Chat(load_tokenizer(target), thinking=False)
    prompts = choose(chat, Dataset.open(root, options.corpus), options.num_prompts)
    weights = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    base = Decoding(options.max_new_tokens, stop_ids(model, chat), Sampling(options.temperature))
    batch = replace(base, batch=options.batch)

    def plain(decoding: Decoding) -> Way:
        return lambda prompts: dict(answers(plain_steps(model, prompts, decoding)))

    def speculate(decoding: Decoding) -> Way:
        return lambda prompts: dict(
            answers(speculate_steps(model, drafter, *weights, prompts, decoding))
        )

    def transformers(prompts: list[list[int]]) -> dict[int, Generation]:
        length, stop = base.max_new_tokens, base.stop_ids
        return {i: Generation(greedy(model, p, length, stop)) for i, p in enumerate(prompts)}

    ways = {} if options.temperature else {"plain, Transformers' cache": transformers}
    ways |= {
        "plain": plain(base),
        f"plain, batch {options.batch}": plain(batch),
        "chain, accepted rows run again": rows_again(speculate(base)),
        "chain": speculate(base),
        f"chain, batch {options.batch}": speculate(batch),
    }
    for nodes in options.nodes:
        ways[f"tree of {nodes}"] = speculate(replace(base, tree_nodes=nodes))
    report(ways, prompts)


def rows_again(way: Way) -> Way:
    """Decodes as targets do whose layers cannot take rows back."""

    def decoded(prompts: list[list[int]]) -> dict[int, Generation]:
        with mock.patch.object(decode, "takes_rows_back", return_value=False):
            return way(prompts)

    return decoded


def report(ways: dict[str, Way], prompts: list[list[int]]) -> None:
    """The table. Speed-up and equality are against the first line."""
    print("| way | acceptance length | 95 % interval | steps | tokens/s | speed-up | same |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    first: dict[int, Generation] = {}
    rate = 0.0
    for name, way in ways.items():
        way(prompts[:2])  # compiles kernels, fills caches
        begin = time.perf_counter()
        found = way(prompts)
        seconds = time.perf_counter() - begin
        tokens = sum(len(one.tokens) for one in found.values())
        first, rate = first or found, rate or tokens / seconds
        cells = [
            name,
            *acceptance(list(found.values())),
            f"{tokens / seconds:.1f}",
            f"{tokens / seconds / rate:.2f}",
            f"{sum(found[i].tokens == first[i].tokens for i in found)} of {len(found)}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


def acceptance(found: list[Generation]) -> list[str]:
    """Acceptance length, its interval, and verify steps; nothing where none was a draft's."""
    steps = sum(len(one.accepted) for one in found)
    if not any(any(one.accepted) for one in found):
        return ["", "", ""]
    low, high = bootstrap_interval(
        [{"num_verified": o.num_verified, "accepted": o.accepted} for o in found]
    )
    length = sum(one.num_verified for one in found) / steps
    return [f"{length:.2f}", f"{low:.2f} to {high:.2f}", f"{steps}"]


def choose(chat: Chat, corpus: Dataset, count: int) -> list[list[int]]:
    """Held-out conversations with the lowest ids, each up to its last answer."""
    prompts = []
    for row in heapq.nsmallest(count, read_rows(corpus, "held_out"), key=lambda row: row.id):
        last = max(i for i, message in enumerate(row.messages) if message["role"] == "assistant")
        prompts.append(chat.encode(chat.render(row.messages[:last], row.tools, prompt=True)))
    return prompts


if __name__ == "__main__":
    main()
