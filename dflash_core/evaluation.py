"""Acceptance, losslessness and speed of a drafter, measured by decoding held-out prompts.

A unit is one prompt: decoded once by the target alone, once with the trained drafter and, for the first
few prompts, once with the untrained one, which shows that the wiring rather than luck is measured.
Greedy. Everything that is reported is computed from the units' records.
"""

from __future__ import annotations

import heapq
import io
import json
import logging
import time
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash_core.chat import Chat, Unrenderable
from dflash_core.checkpoint import load_drafter
from dflash_core.config import EvaluateConfig, Runtime, TargetConfig
from dflash_core.corpus.rows import CORPORA, Row, group_of, read_rows
from dflash_core.decode import Generation, greedy, speculate, stepwise_logits
from dflash_core.errors import InputError
from dflash_core.manifest import Dataset, canonical_json, require_same
from dflash_core.model import Drafter
from dflash_core.progress import Progress, silent
from dflash_core.storage import Storage

log = logging.getLogger(__name__)

STAGE, VERSION = "evaluations", 1
BASELINE = "plain decoding by the same Transformers model on this machine"
DRAFTERS = ("before", "after")  # untrained, trained
_PROMPTS = "prompts.json"
_RESAMPLES = 10_000
_WARM_UP_TOKENS = 4


# --- the stage ---------------------------------------------------------------------------------


def plan(
    root: Storage,
    name: str,
    run: Dataset,
    corpus: Dataset,
    target: TargetConfig,
    config: EvaluateConfig,
) -> Dataset:
    """The evaluation of this request, new or continued; writes the prompts when new.

    Args:
        run: a complete training run.
        corpus: the corpus whose held-out rows are asked.

    Raises:
        MismatchError: the run is of another target.
        InputError: the corpus holds no conversation to ask.
        IncompleteError: run or corpus are not complete.
    """
    from dflash_core.target import identify

    contract = run.require_stage("runs").facts["contract"]
    ours = identify(target, require_template=True).contract()
    theirs = {key: contract.get(key) for key in ours}
    advice = "evaluate with the target of the training run"
    require_same(f"target {target.id!r} and {run.path}", ours, theirs, advice)
    inputs = {
        "run": run.fingerprint,
        "corpus": corpus.require_stage(CORPORA).fingerprint,
        # Another type rounds differently, so the answers may differ.
        "target_dtype": target.dtype,
    }
    dataset = Dataset.create(root, STAGE, name, version=VERSION, config=config, inputs=inputs)
    if not dataset.storage.exists(_PROMPTS):
        body = canonical_json(_choose_prompts(corpus, target, config))
        dataset.storage.put_new(_PROMPTS, body.encode())
    return dataset


def units(dataset: Dataset) -> list[str]:
    """Every prompt of the evaluation, in order."""
    return list(_prompts(dataset))


def missing(dataset: Dataset) -> list[str]:
    """Prompts without a commit record, in order."""
    done = dataset.committed()
    return [unit for unit in units(dataset) if unit not in done]


def run(
    dataset: Dataset,
    run: Dataset,
    target: TargetConfig,
    runtime: Runtime,
    units: list[str] | None = None,
    progress: Progress | None = None,
) -> None:
    """Decodes the prompts and commits each.

    Args:
        units: prompts to decode; None for all that are missing.
        progress: called after every prompt with the acceptance length so far and tokens_per_s of
            speculative decoding.
    """
    units = missing(dataset) if units is None else units
    if not units:
        return
    prompts = _prompts(dataset)
    config, report = EvaluateConfig.model_validate(dataset.config), progress or silent
    untrained = list(prompts)[: config.num_untrained_prompts]
    stop_ids = _read(dataset)["stop_ids"]
    decoder = _Decoder.load(run, target, runtime, config.max_new_tokens, stop_ids)
    decoder.warm_up(prompts[units[0]]["input_ids"])
    tokens, steps, seconds = 0, 0, 0.0
    for done, unit in enumerate(units, 1):
        drafters = DRAFTERS if unit in untrained else DRAFTERS[1:]
        record = dataset.commit(unit, decoder.measure(prompts[unit], drafters))
        after = record["after"]
        tokens, steps = tokens + after["num_verified"], steps + len(after["accepted"])
        seconds += after["seconds"]
        numbers = {
            "acceptance_length": tokens / max(steps, 1),
            "tokens_per_s": tokens / max(seconds, 1e-9),
        }
        report(done, len(units), numbers)


def seal(dataset: Dataset) -> dict:
    """Writes report.json, report.md and acceptance.png from the records, then the manifest.

    Raises:
        InputError: every answer was a single token, so there is nothing to report.
    """
    wanted = units(dataset)
    if missing(dataset) or dataset.complete:
        return dataset.seal(wanted, {})  # says what is missing, or returns the manifest that stands
    facts = summarise(list(dataset.records(wanted).values()))
    if not facts["after"]["num_steps"]:
        raise InputError(
            f"{dataset.path}: every answer of the target is a single token, so no draft was verified; raise "
            "max_new_tokens, or look at its answers"
        )
    dataset.storage.put("report.json", (json.dumps(facts, indent=2) + "\n").encode())
    dataset.storage.put("report.md", _markdown(dataset, facts).encode())
    picture = _picture(facts)
    if picture:
        dataset.storage.put("acceptance.png", picture)
    return dataset.seal(wanted, facts)


# --- prompts -----------------------------------------------------------------------------------


def _choose_prompts(corpus: Dataset, target: TargetConfig, config: EvaluateConfig) -> dict:
    """The held-out conversations with the lowest ids, each up to its last answer, as token ids.

    Passed over are conversations that the template cannot print and those whose prompt and answer would
    exceed the target's positions.
    """
    from dflash_core.target import load_tokenizer, text_config

    chat = Chat(load_tokenizer(target), config.thinking)
    limit = text_config(target).max_position_embeddings - config.max_new_tokens
    candidates = heapq.nsmallest(
        4 * config.num_prompts + 64, read_rows(corpus, "held_out"), key=lambda row: row.id
    )
    chosen = []
    for row in candidates:
        input_ids = _prompt_ids(chat, row)
        if 0 < len(input_ids) <= limit:
            where = {"id": row.id, "source": row.source, "group": group_of(row)}
            chosen.append({**where, "input_ids": input_ids})
        if len(chosen) == config.num_prompts:
            break
    if not chosen:
        raise InputError(
            f"{corpus.path} has no held-out conversation to ask with at most {limit} prompt tokens; raise "
            "held_out_fraction of the curate stage, or lower max_new_tokens"
        )
    stop_ids = sorted({chat.end_of_turn, chat.tokenizer.eos_token_id} - {None})
    return {"prompts": chosen, "stop_ids": stop_ids}


def _prompt_ids(chat: Chat, row: Row) -> list[int]:
    """Token ids of a conversation up to where its last answer begins; empty when it cannot be asked."""
    answers = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    asked = row.messages[: answers[-1]] if answers else row.messages
    if not asked:
        return []
    try:
        return chat.encode(chat.render(asked, row.tools, prompt=True))
    except Unrenderable as error:
        log.warning("held-out row %s is passed over: %s", row.id, error)
        return []


def _prompts(dataset: Dataset) -> dict[str, dict]:
    """The prompts by unit, in order."""
    return {f"prompt-{index:05d}": prompt for index, prompt in enumerate(_read(dataset)["prompts"])}


def _read(dataset: Dataset) -> dict:
    return json.loads(dataset.storage.get(_PROMPTS))


# --- decoding ----------------------------------------------------------------------------------


class _Decoder:
    """Target and drafters on a device, ready to decode prompts."""

    def __init__(
        self, model: Any, drafters: dict[str, Drafter], max_new_tokens: int, stop_ids: set[int]
    ) -> None:
        self._model, self._drafters = model, drafters
        self._max_new_tokens, self._stop_ids = max_new_tokens, stop_ids
        self._embedding: Tensor = model.get_input_embeddings().weight
        self._head: Tensor = model.get_output_embeddings().weight

    @classmethod
    def load(
        cls,
        run: Dataset,
        target: TargetConfig,
        runtime: Runtime,
        max_new_tokens: int,
        stop_ids: list[int],
    ) -> _Decoder:
        """Drafters compute in the target's type, as an engine runs them."""
        from dflash_core.target import load_causal_lm, require_fast_kernels, resolve_device

        device = resolve_device(runtime.device)
        model = load_causal_lm(target, device)
        require_fast_kernels(model, device, runtime.slow_kernels)
        own = getattr(model.generation_config, "eos_token_id", None)
        own = own if isinstance(own, list) else [own]
        ends = {index for index in (*stop_ids, *own) if index is not None}
        drafters = {
            name: load_drafter(run, step)[0].to(device, model.dtype).requires_grad_(False)
            for name, step in zip(DRAFTERS, (0, None), strict=True)
        }
        return cls(model, drafters, max_new_tokens, ends)

    def measure(self, prompt: dict, drafters: tuple[str, ...]) -> dict:
        """The record of a prompt: the target's own answer, and how each drafter fared."""
        input_ids = prompt["input_ids"]
        plain, seconds = _timed(lambda: self._greedy(input_ids, self._max_new_tokens))
        record = {key: prompt[key] for key in ("id", "source", "group")}
        record |= {
            "num_prompt_tokens": len(input_ids),
            "block_size": self._drafters["after"].shape.block_size,
            "plain": {"tokens": plain, "num_tokens": len(plain), "seconds": seconds},
        }
        for name in drafters:
            out, seconds = _timed(lambda name=name: self._speculate(name, input_ids))
            record[name] = {
                "accepted": out.accepted,
                "judged": out.judged,
                "num_tokens": len(out.tokens),
                "num_verified": out.num_verified,
                "lossless": out.tokens == plain,
                "difference": self._difference(input_ids, plain, out.tokens),
                "seconds": seconds,
            }
        return record

    def warm_up(self, input_ids: list[int]) -> None:
        """Compiles kernels and fills caches before a clock runs."""
        self._greedy(input_ids, _WARM_UP_TOKENS)
        for name in self._drafters:
            self._speculate(name, input_ids, _WARM_UP_TOKENS)

    def _greedy(self, input_ids: list[int], max_new_tokens: int) -> list[int]:
        return greedy(self._model, input_ids, max_new_tokens, self._stop_ids)

    def _speculate(
        self, name: str, input_ids: list[int], max_new_tokens: int | None = None
    ) -> Generation:
        return speculate(
            self._model,
            self._drafters[name],
            self._embedding,
            self._head,
            input_ids,
            max_new_tokens or self._max_new_tokens,
            self._stop_ids,
        )

    @torch.no_grad()
    def _difference(self, input_ids: list[int], plain: list[int], other: list[int]) -> dict | None:
        """Where two answers part, the gap of the two tokens' logits there, and the rounding to expect.

        `rounding` is the largest difference of a logit there between one forward over everything and
        the row by row forwards of plain decoding. A gap of up to twice that may be rounding alone.
        """
        if plain == other:
            return None
        pairs = zip(plain, other, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        assert same < min(len(plain), len(other)), "one answer goes on where the other ends"
        rows = torch.tensor([[*input_ids, *plain[:same]]], device=self._model.device)
        out = self._model(input_ids=rows, use_cache=False, logits_to_keep=1)
        whole_V = out.logits[0, -1].float()
        stepwise_V = stepwise_logits(self._model, input_ids, plain[:same]).float()
        return {
            "at": same,
            "logit_gap": float((whole_V[plain[same]] - whole_V[other[same]]).abs()),
            "rounding": float((whole_V - stepwise_V).abs().max()),
        }


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Result and seconds; results are Python numbers, so a GPU has finished by then."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


# --- facts -------------------------------------------------------------------------------------


def summarise(records: list[dict]) -> dict:
    """The facts of an evaluation from its prompts' records.

    For each drafter, `acceptance_length` is pooled: tokens emitted by verify steps over their number,
    bonus tokens counted, so long answers weigh more; `acceptance_length_per_prompt` is the mean over
    prompts. `interval` holds 95 % of the pooled value when prompts are drawn anew with replacement.
    """
    facts: dict[str, Any] = {
        "baseline": BASELINE,
        "block_size": records[0]["block_size"],
        "num_prompts": len(records),
        "num_tokens": sum(record["plain"]["num_tokens"] for record in records),
        "tokens_per_s": _rate(records, "plain"),
    }
    for name in DRAFTERS:
        facts[name] = _drafter_facts([record for record in records if name in record], name)
    facts["after"]["by_source"] = {
        source: _drafter_facts([r for r in records if r["source"] == source], "after")
        for source in sorted({record["source"] for record in records})
    }
    return facts


def _drafter_facts(records: list[dict], name: str) -> dict:
    outcomes = [record[name] for record in records]
    accepted = [number for outcome in outcomes for number in outcome["accepted"]]
    judged = [number for outcome in outcomes for number in outcome["judged"]]
    lengths = [
        outcome["num_verified"] / len(outcome["accepted"])
        for outcome in outcomes
        if outcome["accepted"]
    ]
    verified = sum(outcome["num_verified"] for outcome in outcomes)
    differences = [
        {"prompt": record["id"], **record[name]["difference"]}
        for record in records
        if record[name]["difference"]
    ]
    slots = range(1, records[0]["block_size"])
    plain, own = _rate(records, "plain"), _rate(records, name)
    return {
        "num_prompts": len(records),
        "num_steps": len(accepted),
        "acceptance_length": verified / max(len(accepted), 1),
        "acceptance_length_per_prompt": sum(lengths) / max(len(lengths), 1),
        "interval": bootstrap_interval(outcomes),
        "histogram": [accepted.count(number) for number in (0, *slots)],
        "accepted_by_slot": [_share(accepted, judged, slot) for slot in slots],
        "num_lossless": sum(outcome["lossless"] for outcome in outcomes),
        "num_explained": sum(d["logit_gap"] <= 2 * d["rounding"] for d in differences),
        "differences": differences,
        "plain_tokens_per_s": plain,
        "tokens_per_s": own,
        "speed_up": own / plain,
    }


def _rate(records: list[dict], name: str) -> float:
    """Tokens per second over the records, prompts' forwards included."""
    seconds = sum(record[name]["seconds"] for record in records)
    return sum(record[name]["num_tokens"] for record in records) / max(seconds, 1e-9)


def _share(accepted: list[int], judged: list[int], slot: int) -> float | None:
    """Share of steps in which the draft of this slot was accepted, of those in which it was judged."""
    pairs = [a for a, j in zip(accepted, judged, strict=True) if j >= slot]
    return sum(a >= slot for a in pairs) / len(pairs) if pairs else None


def bootstrap_interval(outcomes: list[dict]) -> list[float]:
    """2.5 % and 97.5 % points of the pooled acceptance length over resampled prompts; fixed seed."""
    tokens_P = np.array([outcome["num_verified"] for outcome in outcomes])
    steps_P = np.array([len(outcome["accepted"]) for outcome in outcomes])
    size = len(outcomes)
    times_RP = np.random.default_rng(0).multinomial(size, np.full(size, 1 / size), _RESAMPLES)
    steps_R = times_RP @ steps_P
    drawn_R = (times_RP @ tokens_P)[steps_R > 0] / steps_R[steps_R > 0]
    if not len(drawn_R):
        return [0.0, 0.0]
    return [float(point) for point in np.quantile(drawn_R, (0.025, 0.975))]


# --- report ------------------------------------------------------------------------------------


def _markdown(dataset: Dataset, facts: dict) -> str:
    """report.md: one table over both drafters, one over sources, and what to read into them."""
    before, after = facts["before"], facts["after"]
    inputs, config = dataset.request["inputs"], dataset.config
    request = (
        f"Run `{inputs['run']}`, corpus `{inputs['corpus']}`; greedy, thinking "
        f"{'on' if config['thinking'] else 'off'}, at most {config['max_new_tokens']} tokens an answer, "
        f"blocks of {facts['block_size']}."
    )
    legend = (
        "Acceptance length: tokens emitted by verify steps over their number, bonus token counted, pooled "
        "over prompts; in brackets the 95 % interval over resampled prompts. Histogram: steps by accepted "
        f"drafts, 0 to {facts['block_size'] - 1}. Slot: share of steps that accepted the slot's draft and "
        "all before it, of those that judged it. Speed-up: tokens per second against "
        f"{facts['baseline']}."
    )
    drafters = [f"| {label} | {cell(before)} | {cell(after)} |" for label, cell in _CELLS.items()]
    sources = [
        f"| {source} | {part['num_prompts']} | {_length(part)} |"
        for source, part in after["by_source"].items()
    ]
    lines = [f"# Evaluation of {dataset.name}", "", request, ""]
    lines += ["| | untrained | trained |", "| --- | --- | --- |", *drafters, ""]
    lines += ["| source | prompts | acceptance length |", "| --- | --- | --- |", *sources, ""]
    return "\n".join([*lines, legend]) + "\n"


def _length(facts: dict) -> str:
    low, high = facts["interval"]
    return f"{facts['acceptance_length']:.2f} [{low:.2f}, {high:.2f}]"


def _lossless(facts: dict) -> str:
    """The lossless count and, where answers differ, what the logits say about it."""
    text = f"{facts['num_lossless']} of {facts['num_prompts']}"
    differences = facts["differences"]
    if not differences:
        return text
    largest = max(difference["logit_gap"] for difference in differences)
    return (
        f"{text}; {facts['num_explained']} of {len(differences)} differences within rounding, "
        f"largest logit gap {largest:.3g}"
    )


_CELLS: dict[str, Callable[[dict], str]] = {
    "prompts": lambda f: f"{f['num_prompts']}",
    "acceptance length": _length,
    "mean over prompts": lambda f: f"{f['acceptance_length_per_prompt']:.2f}",
    "equal to plain decoding": _lossless,
    "tokens per second": lambda f: f"{f['tokens_per_s']:.1f}",
    "plain tokens per second": lambda f: f"{f['plain_tokens_per_s']:.1f}",
    "speed-up": lambda f: f"{f['speed_up']:.2f}",
    "histogram": lambda f: " ".join(map(str, f["histogram"])),
    "accepted by slot": lambda f: " ".join(
        "-" if share is None else f"{share:.2f}" for share in f["accepted_by_slot"]
    ),
}


def _picture(facts: dict) -> bytes | None:
    """acceptance.png: steps by accepted drafts, and acceptance by slot; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.info("matplotlib is not installed, so there is no acceptance.png")
        return None
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    numbers = np.arange(facts["block_size"])
    for name, label, shift in (("before", "untrained", -0.2), ("after", "trained", 0.2)):
        part = facts[name]
        share = np.array(part["histogram"]) / max(part["num_steps"], 1)
        left.bar(numbers + shift, share, width=0.4, label=label)
        by_slot = [np.nan if value is None else value for value in part["accepted_by_slot"]]
        right.plot(numbers[1:], by_slot, marker="o", label=label)
    left.set(xlabel="accepted drafts", ylabel="share of verify steps")
    right.set(xlabel="slot", ylabel="share accepted", ylim=(0, 1.02))
    left.legend()
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=120)
    return data.getvalue()
