"""The extract stage: its plan, what is missing of it, its manifest. The work is done by `extractor`.

Every pack is one unit. Shape letters: T rows of a pack, L taps, H hidden size.
"""

from __future__ import annotations

import json
import shutil

from dflash_core.config import ExtractConfig, TargetConfig
from dflash_core.errors import InputError
from dflash_core.hidden_states import (
    Layout,
    create_store,
    pack_unit,
    read_contract,
    read_layout,
)
from dflash_core.manifest import Dataset, require_same
from dflash_core.record_index import write_record_index
from dflash_core.storage import Storage
from dflash_core.target import (
    check_layer_ids,
    default_target_layer_ids,
    identify,
    text_config,
)
from dflash_core.tokenization import STAGE as TOKENS
from dflash_core.tokenization import Tokens

STAGE = "hidden"
VERSION = 1

KERNELS = "kernels.json"  # of a hybrid target, written by the first extractor
CONVENTION = (
    "output of decoder layer k, 0-based, before any final norm: Hugging Face hidden_states[k + 1]"
)


def plan(
    root: Storage, name: str, tokens: Dataset, target: TargetConfig, config: ExtractConfig
) -> Dataset:
    """The store of this request, new or continued, with its metadata written.

    Raises:
        InputError: layers that the target does not have, or a disk too small for the store.
        MismatchError: the tokens were made with another tokenizer or template.
        IncompleteError: the tokens are not complete.
    """
    dataset = requested(root, name, tokens, target, config).begin()
    if not dataset.complete:
        resolved, contract = ExtractConfig(**dataset.config["extract"]), dataset.config["contract"]
        hidden_size = text_config(target).hidden_size
        num_taps = len(contract["target_layer_ids"]) + resolved.last
        layout = create_store(
            dataset, Tokens.open(tokens), num_taps, hidden_size, contract, resolved
        )
        _require_space(dataset, layout, tokens.facts["total_tokens"])
    return dataset


def requested(
    root: Storage, name: str, tokens: Dataset, target: TargetConfig, config: ExtractConfig
) -> Dataset:
    """The store of this request, whether there is anything of it or not; writes nothing."""
    contract = contract_of(tokens.require_stage(TOKENS), target, config)
    resolved = config.model_copy(update={"target_layer_ids": contract["target_layer_ids"]})
    return Dataset.requested(
        root,
        STAGE,
        name,
        version=VERSION,
        config={"extract": resolved.model_dump(mode="json"), "contract": contract},
        inputs={"tokens": tokens.fingerprint},
    )


def units(dataset: Dataset) -> list[int]:
    """All packs of the store."""
    return list(range(read_layout(dataset).num_packs))


def missing(dataset: Dataset) -> list[int]:
    """Packs without a commit record, in order."""
    done = dataset.committed()
    return [pack for pack in units(dataset) if pack_unit(pack) not in done]


def seal(dataset: Dataset) -> dict:
    """Writes the manifest once every pack is committed. Raises IncompleteError when one is not."""
    names = [pack_unit(pack) for pack in units(dataset)]
    if dataset.complete or missing(dataset):
        return dataset.seal(names, {})  # the manifest that stands, or which pack is missing
    layout, contract = read_layout(dataset), read_contract(dataset)
    records = dataset.records(names).values()
    facts = {
        "num_packs": layout.num_packs,
        "pack_tokens": layout.pack_tokens,
        "num_taps": layout.num_taps,
        "hidden_size": layout.hidden_size,
        "target_layer_ids": contract["target_layer_ids"],
        "num_tokens": sum(record["num_tokens"] for record in records),
        "num_samples": sum(record["num_samples"] for record in records),
        "size_bytes": sum(shard["size"] for record in records for shard in record["shards"]),
        "absmax": max(record["absmax"] for record in records),
        "kernels": read_kernels(dataset),
        "records": write_record_index(dataset, layout, records),
        "contract": contract,
    }
    return dataset.seal(names, facts)


def read_kernels(dataset: Dataset) -> dict[str, str]:
    """Implementations that the store's Gated DeltaNet layers ran with; empty for other targets."""
    try:
        return json.loads(dataset.storage.get(KERNELS))
    except FileNotFoundError:
        return {}


def contract_of(tokens: Dataset, target: TargetConfig, config: ExtractConfig) -> dict:
    """What the states depend on, after checking that tokens, layers and target fit each other."""
    identity = identify(target).contract()
    made_with: dict = tokens.facts["contract"]
    shared = ("tokenizer_hash", "template_hash")
    require_same(
        f"target {target.id!r} and the tokens {tokens.path}",
        {key: identity[key] for key in shared},
        {key: made_with[key] for key in shared},
        "tokenize for this target, or extract with a target that has their tokenizer and template",
    )
    num_layers = text_config(target).num_hidden_layers
    layer_ids = config.target_layer_ids or default_target_layer_ids(num_layers)
    check_layer_ids(layer_ids, num_layers)
    if config.taps_last_layer and num_layers - 1 in layer_ids:
        raise InputError(
            f"extract.target_layer_ids {layer_ids} holds the last layer, {num_layers - 1}, which extract.last and "
            "extract.teacher_top_k tap themselves; leave it out of the list"
        )
    return {
        **identity,
        "target_dtype": target.dtype,
        "target_layer_ids": layer_ids,
        "layer_convention": CONVENTION,
        "dtype": config.dtype,
        "last_layer_id": num_layers - 1 if config.taps_last_layer else None,
        "thinking": made_with["thinking"],
        "tokens": tokens.fingerprint,
    }


def tapped_layer_ids(contract: dict) -> list[int]:
    """Layers that extraction taps: the drafter's context, then the last one where its states are wanted."""
    last = contract["last_layer_id"]
    return [*contract["target_layer_ids"], *([] if last is None else [last])]


def _require_space(dataset: Dataset, layout: Layout, total_tokens: int) -> None:
    """Raises InputError when a local root has less free space than the missing packs will take."""
    folder = dataset.root.local_path
    if folder is None:
        return
    share = len(missing(dataset)) / layout.num_packs
    needed = total_tokens * layout.row_bytes * share
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"the hidden states need {needed / 2**30:.2f} GiB ({total_tokens} tokens of {layout.row_bytes} "
            f"bytes) and {folder} has {free / 2**30:.2f} GiB free; use fewer tokens or layers, or another root"
        )
