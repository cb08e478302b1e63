"""A trained drafter as the directories that serving engines load, checked by loading them again.

Each layout is one config.json and one model.safetensors (several and an index above MAX_FILE_BYTES) with
flat names, without embedding and head, which are the target's. Files have fixed names, so an interrupted
export is written over; it counts once the manifest is there. Before that every directory is reloaded, its
logits are compared, and each engine's own reading of config.json must come to what was trained.

Shape letters: N blocks, K block slots, D tokens of a reduced vocabulary, V vocabulary, H hidden size.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from dflash_core.attention import dense_mask
from dflash_core.blocks import ranges_by_kind
from dflash_core.checkpoint import load_drafter, shape_as_json
from dflash_core.config import ExportConfig, TargetConfig
from dflash_core.engines import require_servable
from dflash_core.errors import CorruptError, InputError, MismatchError
from dflash_core.import_drafter import read_drafter
from dflash_core.layouts import LAYOUTS
from dflash_core.manifest import Dataset, require_same, sha256
from dflash_core.model import SLIDING, Drafter, DrafterShape
from dflash_core.model_card import lineage, model_card, provenance_of, public_name
from dflash_core.progress import Progress, silent
from dflash_core.quantization import config_section, quantise
from dflash_core.storage import Storage

log = logging.getLogger(__name__)

STAGE, VERSION = "exports", 2
MAX_LOGIT_DIFFERENCE = 1e-5
MAX_FILE_BYTES = 4 * 10**9  # S3 takes no more than 5 GB in one request
# The pack that is compared: documents of these lengths, and anchors inside and at the start of them.
_DOCUMENTS, _ANCHORS = (40, 9, 47), (20, 40, 45, 95)
_HEAD_ROWS = 16_384  # of the head turned to float32 at a time


# --- the stage ---------------------------------------------------------------------------------


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
        InputError: a layout cannot hold this drafter, or an engine that loads it would serve it wrongly.
        MismatchError: the run is of another target, or the evaluation of another run.
        IncompleteError: the run or the evaluation is not complete.
    """
    from dflash_core.evaluation import require_target

    require_target(run, target, "give the target of the training run")
    facts = run.facts
    check_layouts(_shape_of(facts["shape"]), target, config)
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


def check_layouts(shape: DrafterShape, target: TargetConfig, config: ExportConfig) -> None:
    """Refuses what cannot be exported as asked; needs no weights, so it can come before training.

    Raises:
        InputError: names layout, engine and reason.
    """
    if config.draft_vocab_size >= shape.vocab_size:
        raise InputError(
            f"draft_vocab_size {config.draft_vocab_size} is no reduction of {shape.vocab_size} tokens; set it lower, "
            "or 0 for the whole vocabulary"
        )
    for layout in config.layouts:
        if config.weights != "bfloat16" and layout != "z-lab":
            raise InputError(
                f"weights {config.weights!r} can be exported in the z-lab layout only: vLLM builds the drafter of "
                f"the {layout} layout from transformer_layer_config, where it looks for no quantisation"
            )
        try:
            require_servable(_config_json(layout, shape, target, config), shape)
        except InputError as error:
            raise InputError(f"layout {layout}: {error}") from error


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
    report, layouts = progress or silent, missing(dataset)
    if not layouts:
        return
    config = ExportConfig.model_validate(dataset.config)
    made = _Made.load(run, target, config)
    provenance = provenance_of(run, evaluation, made.step)
    for done, layout in enumerate(layouts, 1):
        body = _config_json(layout, made.shape, target, config)
        card = model_card(dataset.name, layout, made.shape, target, config, provenance)
        files = {
            **weight_files(made.tensors),
            "config.json": _json_text(body),
            "provenance.json": _json_text(provenance),
            "README.md": card.encode(),
        }
        folder = dataset.storage.child(layout)
        for name, data in files.items():
            folder.put(name, data)
        difference = made.difference(folder)
        record = {
            "files": {
                name: {"size": len(data), "sha256": sha256(data)} for name, data in files.items()
            },
            "max_logit_difference": difference,
            "rounding": made.rounding,
            "step": made.step,
            "shape": shape_as_json(made.shape),
            "num_parameters": made.num_parameters,
        }
        dataset.commit(layout, record)
        log.info(
            "%s/%s reloads to within %.1g of the exported logits", dataset.url, layout, difference
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
        "rounding": last["rounding"],
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


def _shape_of(json_values: dict[str, Any]) -> DrafterShape:
    values = dict(json_values)
    values["target_layer_ids"] = tuple(values["target_layer_ids"])
    return DrafterShape(**values)


def _config_json(
    layout: str, shape: DrafterShape, target: TargetConfig, config: ExportConfig
) -> dict:
    from dflash_core.target import text_config

    if shape.layout != "in-place":
        raise InputError(
            f"drafter.layout is {shape.layout!r}, and no engine serves such a drafter as DFlash; train one "
            "with layout in-place"
        )
    name = config.target_name or public_name(target)
    reduced = config.draft_vocab_size or None
    body = LAYOUTS[layout].config_json(shape, text_config(target), name, reduced)
    if config.weights != "bfloat16":
        body["quantization_config"] = config_section(config.weights)
    return body


def _json_text(body: dict) -> bytes:
    return (json.dumps(body, indent=2, allow_nan=False) + "\n").encode()


# --- what is written ---------------------------------------------------------------------------


@dataclass
class _Made:
    """The tensors of every layout, and the logits that each directory has to give."""

    tensors: dict[str, Tensor]
    shape: DrafterShape
    step: int
    num_parameters: int
    ends: tuple[Tensor, Tensor]
    """Embedding and head of the target."""
    logits_NKD: Tensor
    """Of the rounded drafter over a random pack."""
    rounding: float
    """Largest difference of those from the trained drafter's, float32."""

    @classmethod
    def load(cls, run: Dataset, target: TargetConfig, config: ExportConfig) -> _Made:
        from dflash_core.target import load_embedding_and_head

        drafter, shape, step = load_drafter(run)
        embedding, head = load_embedding_and_head(target)
        tensors, rounded = quantise(drafter.state_dict(), config.weights)
        if config.draft_vocab_size:
            token_ids_D = frequent_tokens(run, shape, config.draft_vocab_size)
            tensors |= reduced_head(token_ids_D, head, shape.vocab_size)
            head = tensors["lm_head.weight"]
        exact = random_pack_logits(drafter, embedding, head)
        drafter.load_state_dict(rounded)
        logits = random_pack_logits(drafter, embedding, head)
        return cls(
            tensors=tensors,
            shape=shape,
            step=step,
            num_parameters=sum(tensor.numel() for tensor in rounded.values()),
            ends=(embedding, head),
            logits_NKD=logits,
            rounding=float((logits - exact).abs().max()),
        )

    def difference(self, folder: Storage) -> float:
        """Largest difference of logits between what was meant and the directory, over a random pack.

        Raises:
            MismatchError: config.json describes another drafter. CorruptError: other logits.
        """
        imported = read_drafter(folder, num_target_layers=self.shape.num_target_layers)
        ours, theirs = shape_as_json(self.shape), shape_as_json(imported.shape)
        if SLIDING not in self.shape.layer_types:
            theirs["sliding_window"] = ours["sliding_window"]
        require_same(f"{folder.url}/config.json", ours, theirs, "this is a bug, please report it")
        embedding, head = self.ends
        head = head if imported.head_DH is None else imported.head_DH
        got = random_pack_logits(imported.build(), embedding, head)
        difference = float((self.logits_NKD - got).abs().max())
        if not difference <= MAX_LOGIT_DIFFERENCE:  # NaN is refused, too
            raise CorruptError(
                f"{folder.url} reloads to other logits: largest difference {difference:.3g}, "
                f"at most {MAX_LOGIT_DIFFERENCE:g} is allowed; check the storage and export again"
            )
        return difference


def weight_files(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    """The safetensors files by name, as Transformers splits and names them; with an index where they are several."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > MAX_FILE_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    if len(parts) == 1:
        return {"model.safetensors": save(tensors, metadata={"format": "pt"})}
    named = {
        f"model-{number:05d}-of-{len(parts):05d}.safetensors": part
        for number, part in enumerate(parts, 1)
    }
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, part in named.items() for name in part},
    }
    files = {file: save(part, metadata={"format": "pt"}) for file, part in named.items()}
    return {**files, "model.safetensors.index.json": _json_text(index)}


class RandomPack(NamedTuple):
    """Context rows of several documents and the blocks whose logits are compared; the same every time."""

    taps_TC: Tensor
    """Joined taps of each row, float32."""
    positions_T: Tensor
    """Position of each row in its document, int64."""
    anchors_N: Tensor
    """Row of each block's anchor, int64."""
    token_ids_NK: Tensor
    """Drafter input: random tokens in every slot, so that each slot shows in the logits."""


def random_pack(shape: DrafterShape) -> RandomPack:
    """The pack for drafters of this shape."""
    generator = torch.Generator().manual_seed(0)
    width = len(shape.target_layer_ids) * shape.hidden_size
    size = (len(_ANCHORS), shape.block_size)
    return RandomPack(
        taps_TC=torch.randn(sum(_DOCUMENTS), width, generator=generator),
        positions_T=torch.cat([torch.arange(length) for length in _DOCUMENTS]),
        anchors_N=torch.tensor(_ANCHORS),
        token_ids_NK=torch.randint(0, shape.vocab_size, size, generator=generator),
    )


@torch.no_grad()
def random_pack_logits(drafter: Drafter, embedding: Tensor, head: Tensor) -> Tensor:
    """Logits [N, K, D], float32, of the blocks of `random_pack`."""
    shape, pack = drafter.shape, random_pack(drafter.shape)
    positions_N = pack.positions_T[pack.anchors_N]
    positions_NK = positions_N[:, None] + torch.arange(shape.block_size)
    context = drafter.project_context(pack.taps_TC[None], pack.positions_T[None])
    ranges = ranges_by_kind(shape, pack.anchors_N, pack.anchors_N - positions_N)
    masks = {kind: dense_mask(seen, len(pack.taps_TC)) for kind, seen in ranges.items()}
    embeds_BQH = embedding[pack.token_ids_NK.flatten()].float()[None]
    hidden_BQH = drafter(embeds_BQH, positions_NK.flatten()[None], context, masks)
    logits = [hidden_BQH[0] @ rows.float().T for rows in head.split(_HEAD_ROWS)]
    return torch.cat(logits, dim=-1).unflatten(0, pack.token_ids_NK.shape)


# --- reduced vocabulary ------------------------------------------------------------------------


def frequent_tokens(run: Dataset, shape: DrafterShape, size: int) -> Tensor:
    """The tokens that the target wrote most often in the run's training text, rising; int64 [D].

    Where the text holds fewer, the lowest other ids fill up.

    Raises:
        InputError: the tokens that the run was made from are not under this root.
    """
    from dflash_core.tokenization import Tokens

    datasets = {parent.path: parent for parent in lineage(run) if parent.stage == "tokens"}.values()
    if not datasets:
        raise InputError(
            f"the tokens that {run.path} was trained on are not under {run.root.url}, so the frequent ones are not "
            "known; leave draft_vocab_size 0"
        )
    counts_V = np.zeros(shape.vocab_size, dtype=np.int64)
    packs = (t.read_pack(i) for t in map(Tokens.open, datasets) for i in range(t.num_packs))
    for pack in packs:
        written = pack.input_ids[pack.loss_mask.astype(bool)]
        counts_V += np.bincount(written, minlength=shape.vocab_size)
    chosen = np.argsort(-counts_V, kind="stable")[:size]
    return torch.from_numpy(np.sort(chosen))


def reduced_head(token_ids_D: Tensor, head_VH: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Head rows of these tokens, and both mappings: offsets `d2t` (target id minus row) and the set `t2d`."""
    t2d_V = torch.zeros(vocab_size, dtype=torch.bool)
    t2d_V[token_ids_D] = True
    return {
        "lm_head.weight": head_VH[token_ids_D].bfloat16().contiguous(),
        "d2t": token_ids_D - torch.arange(len(token_ids_D)),
        "t2d": t2d_V,
    }
