"""Complete corpora and training runs, made without curating or training."""

from __future__ import annotations

import torch

from dflash_core import tokenization
from dflash_core.checkpoint import save_checkpoint, shape_as_json, unit_of
from dflash_core.config import (
    CurateConfig,
    DrafterConfig,
    TargetConfig,
    TokenizeConfig,
    TrainConfig,
)
from dflash_core.corpus.rows import CORPORA, PartWriter, Row, content_id
from dflash_core.manifest import Dataset
from dflash_core.model import Drafter, DrafterShape, resolve_shape
from dflash_core.optim import Optimizer
from dflash_core.storage import Storage
from dflash_core.target import identify, mask_token_id, text_config


def make_row(messages: list[dict], source: str = "one", **metadata) -> Row:
    return Row(content_id(messages, None), source, messages, None, metadata)


def question(index: int) -> list[dict]:
    return [
        {"role": "user", "content": f"What is {index} and {index + 1}?"},
        {"role": "assistant", "content": f"It is {2 * index + 1}."},
    ]


def sealed_corpus(
    root: Storage, held_out: list[Row], name: str = "demo", index: int = 999
) -> Dataset:
    """A corpus with these held-out rows and one row to train on, `question(index)`."""
    dataset = Dataset.create(
        root,
        CORPORA,
        name,
        version=1,
        config=CurateConfig(),
        inputs={"rows": ",".join([str(index), *(row.id for row in held_out)])},
    )
    parts = {}
    for split, rows in (("train", [make_row(question(index))]), ("held_out", held_out)):
        writer = PartWriter(dataset.storage, split)
        for row in rows:
            writer.write(row)
        parts[split] = writer.close()
    facts = {"parts": parts, "num_train": 1, "num_held_out": len(held_out)}
    dataset.seal([], facts)
    return dataset


def wide_drafter(shape: DrafterShape, seed: int, factor: float = 5.1234567) -> Drafter:
    """Weights wide enough that an altered one shows, and none of them exact in bfloat16."""
    drafter = Drafter(shape, torch.Generator().manual_seed(seed))
    for parameter in drafter.parameters():
        parameter.data *= factor
    return drafter


def sealed_run(
    root: Storage,
    target: TargetConfig,
    *,
    name: str = "demo",
    hidden: str = "0" * 12,
    factor: float = 5.1234567,
    states: str = "",
    averages: bool = False,
    **drafter: object,
) -> Dataset:
    """A run of 20 steps that changed the weights from one random draw to another.

    Args:
        hidden, states: fingerprint and path of what it was trained on.
        averages: of the weights are there, too, a third draw.
        factor: width of the weights; near 1 rounding stays below 1e-5 whoever computes.
    """
    values = {"num_hidden_layers": 2, "block_size": 5, "sliding_window": 6, **drafter}
    config = TrainConfig(drafter=DrafterConfig(**values), num_steps=20, checkpoint_every=20)  # ty: ignore[invalid-argument-type]
    shape = resolve_shape(config.drafter, text_config(target), [0, 1, 3], mask_token_id(target))
    run = Dataset.create(root, "runs", name, version=1, config=config, inputs={"hidden": hidden})
    for step in (0, 20):
        made = wide_drafter(shape, step, factor)
        optimizer = Optimizer(made, config)
        if averages and step:
            others = wide_drafter(shape, step + 1, factor)
            for parameter, other in zip(made.parameters(), others.parameters(), strict=True):
                optimizer.state[parameter]["average"] = other.detach()
        save_checkpoint(run, step, made, optimizer, [])
    contract = {**identify(target).contract(), "target_layer_ids": list(shape.target_layer_ids)}
    facts = {"num_steps": 20, "shape": shape_as_json(shape), "contract": contract, "hidden": states}
    run.seal([unit_of(0), unit_of(20)], facts)
    return run


def sealed_tokens_run(root: Storage, target: TargetConfig, **drafter: object) -> Dataset:
    """The same, made from a corpus and tokens that lie under the root."""
    hidden = empty_store(root, target, "demo")
    return sealed_run(root, target, hidden=hidden.fingerprint, **drafter)


def empty_store(root: Storage, target: TargetConfig, name: str, index: int = 999) -> Dataset:
    """A store of no states, of tokens and a corpus that are there: `question(index)` and its answer."""
    corpus = sealed_corpus(root, [make_row(question(1))], name, index)
    tokens = tokenization.plan(root, name, corpus, target, TokenizeConfig(pack_tokens=128))
    tokenization.run_units(tokens, corpus, target, tokenization.missing(tokens, corpus))
    tokenization.seal(tokens, corpus)
    inputs = {"tokens": tokens.fingerprint}
    hidden = Dataset.create(root, "hidden", name, version=1, config={}, inputs=inputs)
    hidden.seal([], {})
    return hidden
