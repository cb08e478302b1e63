"""What a verify step costs on a hybrid target: rows taken back by `RowCache`, or run a second time.

    python benchmarks/verify_step.py                                    # a small target on this machine
    python benchmarks/verify_step.py --hidden 5120 --layers 64 --device cuda --dtype bfloat16

The target is Qwen3.5-shaped with random weights (three of four layers Gated DeltaNet); speed does not
depend on them. A step is a verify forward of which about a third of the rows are accepted, and whatever
it takes until the next one can run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dflash_core.row_cache import RowCache, Rows, teach_rows
from dflash_core.target import gdn_backend, gdn_modules
from dflash_core.target_cache import Snapshot, cache_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    model = hybrid(options)
    name = cache_name(type(model))
    backends = {gdn_backend(m)["torch_chunk_gated_delta_rule"] for m in gdn_modules(model)}
    print(f"{options.layers} layers of {options.hidden}, {options.dtype}, {', '.join(backends)}")
    print("| step | ms |\n| --- | --- |")
    for module in gdn_modules(model):
        teach_rows(module)
    prompt = torch.randint(0, options.vocab, (1, options.context), device=model.device)
    for batch in (1, 8):
        for label, rows, again in [
            ("one row", 1, False),
            ("chain of 16, rows run again", 16, True),
            ("chain of 16", 16, False),
            ("tree of 64", 64, False),
        ]:
            if again and batch > 1:
                continue  # sequences accept different numbers of rows
            prefilled = [
                getattr(model(prompt, use_cache=True, logits_to_keep=1), name) for _ in range(batch)
            ]
            if again:
                seconds = timed(lambda c=prefilled[0]: replayed(model, c, prompt[:, :16]), options)
            else:
                cache = RowCache()
                for one in prefilled:
                    cache.admit(one)
                seconds = timed(
                    lambda c=cache, r=rows: taken_back(model, c, tree(model, c, r)), options
                )
            print(f"| batch {batch}, {label} | {1000 * seconds:.1f} |", flush=True)


def hybrid(options: argparse.Namespace) -> Any:
    """A Qwen3.5-shaped target."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    heads = max(options.hidden // 128, 2)
    config = Qwen3_5TextConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 8, 1),
        head_dim=128,
        linear_num_key_heads=max(heads // 2, 1),
        linear_num_value_heads=heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, options.dtype))
    with torch.device(options.device):
        model = Qwen3_5ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


def tree(model: Any, cache: RowCache, num_rows: int) -> Rows:
    """Up to 16 rows a chain, more as a tree of four branches."""
    chain = list(range(-1, num_rows - 1))
    parents = chain if num_rows <= 16 else [-1, *([0] * 4), *range(1, num_rows - 4)]
    batch = len(cache.lengths)
    if num_rows <= 16:
        return Rows.chains([[1] * num_rows] * batch, model.device)
    return Rows.trees([[1] * num_rows] * batch, [parents] * batch, model.device)


@torch.no_grad()
def taken_back(model: Any, cache: RowCache, rows: Rows) -> None:
    cache.begin(rows)
    model(
        input_ids=rows.tokens_BR,
        position_ids=cache.positions_BR,
        attention_mask=cache.masks(model.dtype),
        use_cache=True,
        **{cache_name(type(model)): cache},
    )
    paths = [[0, 1, 5, 9, 13] if rows.tokens_BR.shape[1] > 16 else list(range(5))]
    cache.commit([path[: rows.tokens_BR.shape[1]] for path in paths * len(cache.lengths)])


@torch.no_grad()
def replayed(model: Any, cache: Any, ids: torch.Tensor) -> None:
    name = {cache_name(type(model)): cache}
    before = Snapshot(cache)
    model(input_ids=ids, use_cache=True, **name)
    if not before.rollback(5):
        model(input_ids=ids[:, :5], use_cache=True, logits_to_keep=1, **name)


def timed(step: Callable[[], None], options: argparse.Namespace) -> float:
    """Median seconds of a step."""
    found = []
    for _ in range(options.steps + 3):
        begin = time.perf_counter()
        step()
        if options.device != "cpu":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[3:])


if __name__ == "__main__":
    main()
