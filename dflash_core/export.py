"""A trained drafter as the directory that serving engines load, checked by loading it again.

The z-lab layout: one config.json in Qwen3's terms with a `dflash_config` section, and one
model.safetensors in bfloat16 with flat names, without embedding and head. SGLang, vLLM and the z-lab
package read it. Files have fixed names, so an interrupted export is written over; it counts once the
manifest is there.

Reference: z-lab/dflash dflash/model.py, and the loaders of vLLM (models/qwen3_dflash.py) and SGLang.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from dflash_core.checkpoint import load_drafter, shape_as_json
from dflash_core.config import DrafterConfig, ExportConfig, TargetConfig
from dflash_core.decode import block_masks
from dflash_core.errors import CorruptError, InputError, MismatchError
from dflash_core.manifest import Dataset, require_same, sha256
from dflash_core.model import FULL, SLIDING, Drafter, DrafterShape
from dflash_core.progress import Progress, silent
from dflash_core.storage import Storage

log = logging.getLogger(__name__)

STAGE, VERSION = "exports", 1
MAX_LOGIT_DIFFERENCE = 1e-5
_ARCHITECTURE = "DFlashDraftModel"
_CONTEXT_ROWS = 64  # of the random block that is compared
_HEAD_ROWS = 16_384  # of the head turned to float32 at a time
_INPUT_STAGES = ("runs", "hidden", "tokens", "corpora", "evaluations")


def plan(
    root: Storage,
    name: str,
    run: Dataset,
    target: TargetConfig,
    config: ExportConfig,
    evaluation: Dataset | None = None,
) -> Dataset:
    """The export of this request, new or continued.

    Args:
        run: a complete training run.
        target: the target it was trained for.
        evaluation: measured acceptance to quote in the model card.

    Raises:
        MismatchError: the run is of another target, or the evaluation of another run.
        IncompleteError: the run or the evaluation is not complete.
    """
    from dflash_core.target import identify

    contract = run.require_stage("runs").facts["contract"]
    ours = identify(target).contract()
    theirs = {key: contract.get(key) for key in ours}
    require_same(
        f"target {target.id!r} and {run.path}", ours, theirs, "give the target of the training run"
    )
    inputs = {"run": run.fingerprint}
    if evaluation is not None:
        evaluated = evaluation.require_stage("evaluations").request["inputs"]["run"]
        if evaluated != run.fingerprint:
            raise MismatchError(
                f"{evaluation.path} measured the run {evaluated}, expected {run.fingerprint} of {run.path}; "
                "give the evaluation of this run, or none"
            )
        inputs["evaluation"] = evaluation.fingerprint
    return Dataset.create(root, STAGE, name, version=VERSION, config=config, inputs=inputs)


def units(dataset: Dataset) -> list[str]:
    """Every layout, in the order asked for."""
    return dataset.config["layouts"]


def missing(dataset: Dataset) -> list[str]:
    """Layouts without a commit record, in order."""
    committed = dataset.committed()
    return [layout for layout in units(dataset) if layout not in committed]


def run(
    dataset: Dataset,
    run: Dataset,
    target: TargetConfig,
    evaluation: Dataset | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes, reloads and compares each missing layout, then commits it.

    Raises:
        CorruptError: what was written does not compute what was trained; nothing is committed.
    """
    from dflash_core.target import text_config

    report, layouts = progress or silent, missing(dataset)
    for done, layout in enumerate(layouts, 1):
        drafter, shape, step = load_drafter(run)
        tensors = {name: tensor.bfloat16() for name, tensor in drafter.state_dict().items()}
        body = config_json(shape, text_config(target))
        provenance = _provenance(run, evaluation, step)
        files = {
            "model.safetensors": save(tensors, metadata={"format": "pt"}),
            "config.json": _json_text(body),
            "provenance.json": _json_text(provenance),
            "README.md": _model_card(dataset.name, shape, target, provenance).encode(),
        }
        folder = dataset.storage.child(layout)
        for name, data in files.items():
            folder.put(name, data)
        drafter.load_state_dict(tensors)  # rounded to bfloat16, computing in float32
        difference = _reload_difference(folder, drafter, target)
        record = {
            "files": {
                name: {"size": len(data), "sha256": sha256(data)} for name, data in files.items()
            },
            "max_logit_difference": difference,
            "step": step,
            "shape": shape_as_json(shape),
            "num_parameters": sum(tensor.numel() for tensor in tensors.values()),
        }
        dataset.commit(layout, record)
        log.info(
            "%s/%s reloads to within %.1g of the trained logits", dataset.url, layout, difference
        )
        report(done, len(layouts), {"max_logit_difference": difference})


def seal(dataset: Dataset) -> dict:
    """The manifest, after every file was read once more and found as it was committed.

    Raises:
        CorruptError: a file was lost or altered since.
    """
    layouts = units(dataset)
    if missing(dataset):
        return dataset.seal(layouts, {})  # raises, naming what is missing
    records = dataset.records(layouts)
    for layout, record in records.items():
        for name, file in record["files"].items():
            _check_file(dataset, f"{layout}/{name}", file)
    last = records[layouts[-1]]
    facts = {
        "layouts": layouts,
        "step": last["step"],
        "num_parameters": last["num_parameters"],
        "shape": last["shape"],
        "max_logit_difference": max(r["max_logit_difference"] for r in records.values()),
        "files": {layout: record["files"] for layout, record in records.items()},
    }
    return dataset.seal(layouts, facts)


def _check_file(dataset: Dataset, key: str, file: dict) -> None:
    try:
        intact = sha256(dataset.storage.get(key)) == file["sha256"]
    except FileNotFoundError:
        intact = False
    if not intact:
        raise CorruptError(
            f"{dataset.url}/{key} is missing or not what was written; "
            f"delete {dataset.path} and export again"
        )


# --- the z-lab layout --------------------------------------------------------------------------


def config_json(shape: DrafterShape, target_text_config: Any) -> dict:
    """The config.json of the z-lab layout.

    Not among the keys: `auto_map`, which would name a Python file that is not shipped.
    """
    slides = SLIDING in shape.layer_types
    body = {
        "architectures": [_ARCHITECTURE],
        # vLLM takes any type it knows; with the target's own (qwen3_5_text) it does not load.
        "model_type": "qwen3",
        "dtype": "bfloat16",
        # Read in dflash_config first and here second, by older engines only here.
        "block_size": shape.block_size,
        "dflash_config": {
            "block_size": shape.block_size,
            "mask_token_id": shape.mask_token_id,
            "target_layer_ids": list(shape.target_layer_ids),
        },
        "num_target_layers": shape.num_target_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "layer_types": list(shape.layer_types),
        "sliding_window": shape.sliding_window if slides else None,
        "use_sliding_window": slides,
        "max_window_layers": shape.num_hidden_layers,
        # Transformers 4 and the engines read the first, Transformers 5 the second.
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_scaling": None,
        "max_position_embeddings": target_text_config.max_position_embeddings,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
    }
    # Without is_causal all three engines make sliding layers causal in the block and full ones not: right
    # for every contract but this one. True would turn the full layer of a mixed drafter causal, too.
    if shape.attention == "swa-bidir":
        body["is_causal"] = False
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        body[key] = getattr(target_text_config, key, None)
    return body


def shape_from_config(body: dict) -> DrafterShape:
    """The shape that a config.json of the z-lab layout describes; the inverse of `config_json`.

    The window of a drafter without sliding layers is not in the file; it comes back as the default.

    Raises:
        InputError: another algorithm, or something that would change the computation unseen.
    """
    section = body.get("dflash_config") or {}
    _refuse_unknown(body, section)
    rope = body.get("rope_parameters") or {}
    try:
        return DrafterShape(
            hidden_size=body["hidden_size"],
            num_hidden_layers=body["num_hidden_layers"],
            intermediate_size=body["intermediate_size"],
            num_attention_heads=body["num_attention_heads"],
            num_key_value_heads=body["num_key_value_heads"],
            head_dim=body["head_dim"],
            block_size=section.get("block_size") or body["block_size"],
            attention=_attention_from_config(body),
            sliding_window=body.get("sliding_window")
            or DrafterConfig.model_fields["sliding_window"].default,
            rope_theta=float(rope.get("rope_theta") or body["rope_theta"]),
            rms_norm_eps=body["rms_norm_eps"],
            mask_token_id=section.get("mask_token_id", body.get("mask_token_id", -1)),
            vocab_size=body["vocab_size"],
            target_layer_ids=tuple(section.get("target_layer_ids") or body["target_layer_ids"]),
            num_target_layers=body["num_target_layers"],
        )
    except KeyError as error:
        raise InputError(
            f"config.json has no {error.args[0]}; expected a drafter in the z-lab layout"
        ) from error


def _refuse_unknown(body: dict, section: dict) -> None:
    """Raises InputError for what this drafter does not compute: DFlash 2 parts, scales, biases, YaRN."""
    rope = body.get("rope_parameters") or {}
    surprises = {
        "architectures": body.get("architectures") != [_ARCHITECTURE],
        "model_type": body.get("model_type") != "qwen3",
        "attention_bias": bool(body.get("attention_bias")),
        "hidden_act": body.get("hidden_act", "silu") != "silu",
        "rope_scaling": bool(body.get("rope_scaling")),
        "rope_parameters": rope.get("rope_type", "default") != "default",
    }
    known = {"block_size", "mask_token_id", "target_layer_ids"}
    found = [f"{key} {body.get(key)!r}" for key, odd in surprises.items() if odd]
    found += [f"dflash_config.{key} {section[key]!r}" for key in sorted(section.keys() - known)]
    if found:
        raise InputError(
            f"config.json asks for {'; '.join(found)}, which this version does not compute; expected "
            f"architecture {_ARCHITECTURE}, model_type qwen3, plain rotary embedding, no bias"
        )


def _attention_from_config(body: dict) -> str:
    """The attention contract behind `layer_types` and `is_causal`."""
    kinds, causal = tuple(body["layer_types"]), body.get("is_causal")
    if len(kinds) == body["num_hidden_layers"]:
        if set(kinds) == {FULL} and not causal:
            return "full-bidir"
        if set(kinds) == {SLIDING}:
            return "swa-bidir" if causal is False else "swa-causal"
        if set(kinds[:-1]) == {SLIDING} and kinds[-1] == FULL and causal is None:
            return "mixed"
    raise InputError(
        f"config.json has layer_types {list(kinds)} with is_causal {causal!r} for "
        f"{body['num_hidden_layers']} layers; expected all full, all sliding, or sliding with a full last"
    )


def load_exported(source: Storage | str | Path) -> tuple[Drafter, DrafterShape]:
    """The drafter in a directory of the z-lab layout, in float32 on the CPU, and its shape.

    What engines insist on is checked: names, shapes and type of every tensor (so the width of `fc` is
    taps times hidden size, and heads are alike in all layers), and no tensor too many.

    Raises:
        InputError: no such directory, or not a drafter that this version computes.
        CorruptError: config.json and model.safetensors do not fit each other.
    """
    storage = source if isinstance(source, Storage) else _open_folder(source)
    try:
        body = json.loads(storage.get("config.json"))
        tensors = load(storage.get("model.safetensors"))
    except FileNotFoundError as error:
        raise InputError(f"{error}; expected config.json and model.safetensors there") from error
    except Exception as error:
        raise CorruptError(
            f"{storage.url} holds no readable drafter: {error}; export it again"
        ) from error
    shape = shape_from_config(body)
    with torch.device("meta"):
        drafter = Drafter(shape)
    _check_tensors(storage.url, tensors, drafter.state_dict())
    # Copied into memory of torch's own: on the CPU the last bits of a product depend on alignment.
    drafter = drafter.to_empty(device="cpu")
    drafter.load_state_dict(tensors)
    return drafter, shape


def _open_folder(source: str | Path) -> Storage:
    if "://" not in str(source) and not Path(source).expanduser().is_dir():
        raise InputError(f"drafter folder {str(source)!r} does not exist; give an existing folder")
    return Storage.from_url(str(source))


def _check_tensors(url: str, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"{name} is not known" for name in sorted(found.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & found.keys()):
        if found[name].shape != wanted[name].shape:
            shapes = f"{list(found[name].shape)}, expected {list(wanted[name].shape)}"
            problems.append(f"{name} has shape {shapes}")
        elif found[name].dtype != torch.bfloat16:
            problems.append(f"{name} is {found[name].dtype}, expected torch.bfloat16")
    if problems:
        raise CorruptError(
            f"{url}: model.safetensors does not fit config.json ({len(problems)} tensors): "
            f"{'; '.join(problems[:3])}"
        )


# --- comparison --------------------------------------------------------------------------------


def _reload_difference(folder: Storage, trained: Drafter, target: TargetConfig) -> float:
    """Largest difference of logits between the trained drafter and the directory, over a random block."""
    from dflash_core.target import load_embedding_and_head

    reloaded, shape = load_exported(folder)
    slides = SLIDING in shape.layer_types
    ours, theirs = shape_as_json(trained.shape), shape_as_json(shape)
    if not slides:
        theirs["sliding_window"] = ours["sliding_window"]
    require_same(f"{folder.url}/config.json", ours, theirs, "this is a bug, please report it")
    ends = load_embedding_and_head(target)
    want, got = (random_block_logits(drafter, *ends) for drafter in (trained, reloaded))
    difference = float((want - got).abs().max())
    if not difference <= MAX_LOGIT_DIFFERENCE:  # NaN is refused, too
        raise CorruptError(
            f"{folder.url} reloads to other logits: largest difference {difference:.3g}, "
            f"at most {MAX_LOGIT_DIFFERENCE:g} is allowed; check the storage and export again"
        )
    return difference


@torch.no_grad()
def random_block_logits(drafter: Drafter, embedding: Tensor, head: Tensor) -> Tensor:
    """Logits [K, V], float32, of a block with random tokens behind random context rows; fixed seed."""
    shape, generator = drafter.shape, torch.Generator().manual_seed(0)
    width = len(shape.target_layer_ids) * shape.hidden_size
    taps_BTC = torch.randn(1, _CONTEXT_ROWS, width, generator=generator)
    token_ids_K = torch.randint(0, len(embedding), (shape.block_size,), generator=generator)
    positions_BS = torch.arange(_CONTEXT_ROWS + shape.block_size)[None]
    context = drafter.project_context(taps_BTC, positions_BS[:, :_CONTEXT_ROWS])
    masks = block_masks(shape, _CONTEXT_ROWS, taps_BTC.device)
    embeds_BKH = embedding[token_ids_K].float()[None]
    hidden_BKH = drafter(embeds_BKH, positions_BS[:, _CONTEXT_ROWS:], context, masks)
    return torch.cat([hidden_BKH[0] @ rows.float().T for rows in head.split(_HEAD_ROWS)], dim=-1)


# --- provenance --------------------------------------------------------------------------------


def _provenance(run: Dataset, evaluation: Dataset | None, step: int) -> dict:
    """Every request that led here, by path, with the fingerprints it read."""
    requests = {dataset.path: _described(dataset) for dataset in _lineage(run)}
    body = {"step": step, "target": run.facts["contract"], "datasets": requests}
    if evaluation is not None:
        body["evaluation"] = _described(evaluation) | {"path": evaluation.path}
    return body


def _described(dataset: Dataset) -> dict:
    request = {key: dataset.request[key] for key in ("fingerprint", "version", "config", "inputs")}
    facts = {key: value for key, value in dataset.facts.items() if key != "parts"}
    return {**request, "facts": facts}


def _lineage(dataset: Dataset) -> Iterator[Dataset]:
    """The dataset and, as far as they lie under their usual names, those it was made from."""
    yield dataset
    for digest in dataset.request["inputs"].values():
        for stage in _INPUT_STAGES:
            try:
                parent = Dataset.open(dataset.root, f"{stage}/{dataset.name}-{digest}")
            except FileNotFoundError:
                continue
            if parent.complete:
                yield from _lineage(parent)


def _json_text(body: dict) -> bytes:
    return (json.dumps(body, indent=2, allow_nan=False) + "\n").encode()


_CARD = """\
---
base_model: {target}
tags: [speculative-decoding, dflash]
library_name: transformers
---

# {name}: a DFlash drafter for {target}

Proposes blocks of {block_size} tokens that the target verifies in one forward; the output stays the
target's own. It holds neither embedding nor head, so it works with this target only
(`{target}`, revision `{revision}`).

{acceptance}

## Use

    vllm serve {target} --speculative-config '{{"method": "dflash", "model": "<this directory>", "num_speculative_tokens": {num_drafts}}}'
    python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\
        --speculative-draft-model-path <this directory> --speculative-num-draft-tokens {block_size}

## Shape

{shape}

Layer id k is the output of decoder layer k, 0-based; Hugging Face keeps it at `hidden_states[k + 1]`.

## Training

Step {step} of the run below; weights rounded to bfloat16. Settings of every stage, and what each reported,
are in `provenance.json`.

{lineage}
"""


def _model_card(name: str, shape: DrafterShape, target: TargetConfig, provenance: dict) -> str:
    """README.md: what it is, how it is served, what was measured, what it was made from."""
    contract, evaluation = provenance["target"], provenance.get("evaluation")
    rows = [f"| {key} | {value} |" for key, value in shape_as_json(shape).items()]
    datasets = [
        f"| `{path}` | {_headline(body['facts'])} |"
        for path, body in provenance["datasets"].items()
    ]
    return _CARD.format(
        name=name,
        # A local folder means nothing elsewhere, only its last part does.
        target=Path(target.id).name
        if contract["target_revision"].startswith("content:")
        else target.id,
        revision=contract["target_revision"],
        block_size=shape.block_size,
        num_drafts=shape.block_size - 1,
        acceptance=_measured(evaluation) if evaluation else "Its acceptance was not measured.",
        shape="\n".join(["| field | value |", "| --- | --- |", *rows]),
        step=provenance["step"],
        lineage="\n".join(["| dataset | facts |", "| --- | --- |", *datasets]),
    )


def _measured(evaluation: dict) -> str:
    facts, config = evaluation["facts"], evaluation["config"]
    after = facts["after"]
    low, high = after["interval"]
    return (
        f"Measured on {after['num_prompts']} held-out prompts, greedy, {config['max_new_tokens']} tokens at "
        f"most, thinking {'on' if config['thinking'] else 'off'} (`{evaluation['path']}`): acceptance length "
        f"**{after['acceptance_length']:.2f}** of {facts['block_size']}, bonus token counted, 95 % interval "
        f"{low:.2f} to {high:.2f} over prompts; {after['num_lossless']} of {after['num_prompts']} answers equal "
        f"plain decoding token for token; {after['speed_up']:.2f} times as fast as {facts['baseline']}."
    )


def _headline(facts: dict) -> str:
    """The plain numbers of a dataset's facts."""
    return ", ".join(
        f"{key} {value:,.6g}" if isinstance(value, float) else f"{key} {value:,}"
        for key, value in facts.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    )
