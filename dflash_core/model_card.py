"""What an exported drafter says of itself: a model card for people, and the requests it was made from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

from dflash_core.checkpoint import shape_as_json
from dflash_core.config import ExportConfig, TargetConfig
from dflash_core.engines import serving_notes
from dflash_core.evaluation_report import mode_lines, mode_text
from dflash_core.manifest import Dataset
from dflash_core.model import DrafterShape

_REGENERATED = "-regenerated"  # what such a corpus has behind its name
_INPUT_STAGES = ("runs", "hidden", "tokens", "corpora", "evaluations")


def provenance_of(run: Dataset, evaluation: Dataset | None, step: int) -> dict:
    """Every request that led here, by path, with the fingerprints it read; and what was measured."""
    requests = {dataset.path: _described(dataset) for dataset in lineage(run)}
    body = {"step": step, "target": run.facts["contract"], "datasets": requests}
    if evaluation is not None:
        body["evaluation"] = _described(evaluation) | {"path": evaluation.path}
    return body


def lineage(dataset: Dataset) -> Iterator[Dataset]:
    """The dataset and, as far as they lie under their usual names, those it was made from."""
    yield dataset
    plain = dataset.name.removesuffix(_REGENERATED)
    names = (plain, plain + _REGENERATED)
    # A run says where its states are, whatever they are called; a union names its stores by path.
    known = dataset.facts.get("hidden") if dataset.complete else None
    for key, digest in dataset.request["inputs"].items():
        named = [key] if "/" in key else [known] if key == "hidden" and known else None
        guesses = [
            f"{stage}/{name}-{digest}" for stage, name in itertools.product(_INPUT_STAGES, names)
        ]
        for path in named or guesses:
            try:
                parent = Dataset.open(dataset.root, path)
            except FileNotFoundError:
                continue
            if parent.complete:
                yield from lineage(parent)


def public_name(target: TargetConfig) -> str:
    """How the target is called elsewhere: its hub id, or the last part of a local folder."""
    path = Path(target.id).expanduser()
    return path.name if path.is_dir() else target.id


def model_card(
    name: str,
    layout: str,
    shape: DrafterShape,
    target: TargetConfig,
    config: ExportConfig,
    provenance: dict,
) -> str:
    """README.md: what it is, how it is served, what was measured, on what it was trained and how."""
    evaluation = provenance.get("evaluation")
    notes = [f"- {note}" for note in serving_notes(shape)]
    return _CARD.format(
        name=name,
        target=config.target_name or public_name(target),
        revision=provenance["target"]["target_revision"],
        block_size=shape.block_size,
        acceptance=_measured(evaluation) if evaluation else "Its acceptance was not measured.",
        use=_USE[layout].format(
            target=config.target_name or public_name(target),
            block_size=shape.block_size,
            num_drafts=shape.block_size - 1,
        ),
        notes="\n".join(["", *notes, ""]) if notes else "",
        shape=_table(("field", "value"), shape_as_json(shape).items()),
        weights=_weights(config),
        step=provenance["step"],
        data=_data(provenance),
        recipe=_recipe(provenance),
        lineage=_table(
            ("dataset", "facts"),
            (
                (f"`{path}`", _headline(body["facts"]))
                for path, body in provenance["datasets"].items()
            ),
        ),
    )


_CARD = """\
---
base_model: {target}
tags: [speculative-decoding, dflash]
library_name: transformers
---

# {name}: a DFlash drafter for {target}

Proposes blocks of {block_size} tokens that the target verifies in one forward; the output stays the
target's own. It holds neither embedding nor full head, so it works with this target only
(`{target}`, revision `{revision}`).

{acceptance}

## Use

{use}
{notes}
## Shape

{shape}

Layer id k is the output of decoder layer k, 0-based; Hugging Face keeps it at `hidden_states[k + 1]`.
{weights}

## Data

{data}

## Recipe

{recipe}

## Made from

Step {step} of the run below. Settings of every stage, and what each reported, are in `provenance.json`.

{lineage}
"""

_USE = {
    "z-lab": """\
    vllm serve {target} --speculative-config '{{"method": "dflash", "model": "<this directory>", "num_speculative_tokens": {num_drafts}}}'
    python -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH \\
        --speculative-draft-model-path <this directory> --speculative-num-draft-tokens {block_size}
""",
    "speculators": """\
    vllm serve {target} --speculative-config '{{"model": "<this directory>", "num_speculative_tokens": {num_drafts}}}'

SGLang does not read this layout.
""",
}


def _measured(evaluation: dict) -> str:
    """What was accepted on which prompts in which mode: the headline, and each set where there are several."""
    facts, config = evaluation["facts"], evaluation["config"]
    after, modes = facts["after"], facts["modes"]
    low, high = after["interval"]
    text = (
        f"Measured on {after['num_prompts']} prompts, {mode_text(modes[0])}, {config['max_new_tokens']} tokens at "
        f"most (`{evaluation['path']}`): acceptance length **{after['acceptance_length']:.2f}** of "
        f"{facts['block_size']}, bonus token counted, 95 % interval {low:.2f} to {high:.2f} over prompts; "
        f"{after['speed_up']:.2f} times as fast as {facts['baseline']}."
    )
    if after["num_lossless"] is not None:
        text += f" {after['num_lossless']} of {after['num_prompts']} answers equal plain decoding token for token."
    if len(modes) == 1:
        return text
    return "\n".join([text, "", *mode_lines(modes)]).strip()


def _weights(config: ExportConfig) -> str:
    text = {
        "bfloat16": "Weights are rounded to bfloat16.",
        "int8": "Weights of MLPs and output projections are INT8 with a scale a channel, the others bfloat16.",
        "fp8": "Weights of MLPs and output projections are FP8 with a scale a channel, the others bfloat16.",
    }[config.weights]
    if config.draft_vocab_size:
        text += (
            f" It proposes from {config.draft_vocab_size:,} tokens, those that the target wrote most often in the "
            "training text, with head rows of its own."
        )
    return text


def _data(provenance: dict) -> str:
    """Where the conversations came from, and whose answers were learned."""
    corpora = _of_stage(provenance, "corpora")
    if not corpora:
        return "Not known here; see the fingerprints below."
    sources = [source for body in corpora for source in body["config"].get("sources", [])]
    lines = [
        f"- {source['name']}: `{source.get('path') or source.get('reader')}`"
        + (f" at {source['revision']}" if source.get("path") and source.get("revision") else "")
        for source in sources
    ]
    # A corpus that was answered anew is there beside its answers; tokens name the one that was learned.
    learned = {body["inputs"].get("corpus") for body in _of_stage(provenance, "tokens")}
    answered = {
        "max_new_tokens" in body["config"] for body in corpora if body["fingerprint"] in learned
    }
    text = {
        (): "Whose answers were learned is not known here.",
        (False,): "Answers are those of the sources.",
        (True,): "Answers are the target's own.",
        (False, True): "Of some corpora the answers are the target's own.",
    }[tuple(sorted(answered))]
    return "\n".join([*lines, "", text]).strip()


def _recipe(provenance: dict) -> str:
    """The training configuration, the drafter's shape apart."""
    runs = _of_stage(provenance, "runs")
    values = {key: value for key, value in runs[0]["config"].items() if not isinstance(value, dict)}
    return _table(("setting", "value"), values.items())


def _of_stage(provenance: dict, stage: str) -> list[dict]:
    return [body for path, body in provenance["datasets"].items() if path.startswith(f"{stage}/")]


def _described(dataset: Dataset) -> dict:
    request = {key: dataset.request[key] for key in ("fingerprint", "version", "config", "inputs")}
    facts = {key: value for key, value in dataset.facts.items() if key != "parts"}
    return {**request, "facts": facts}


def _table(head: tuple[str, str], rows) -> str:
    lines = [f"| {name} | {value} |" for name, value in rows]
    return "\n".join([f"| {head[0]} | {head[1]} |", "| --- | --- |", *lines])


def _headline(facts: dict) -> str:
    """The plain numbers of a dataset's facts."""
    return ", ".join(
        f"{key} {value:,.6g}" if isinstance(value, float) else f"{key} {value:,}"
        for key, value in facts.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    )
