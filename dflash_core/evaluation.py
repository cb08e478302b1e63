"""Acceptance, losslessness and speed of drafters, measured by decoding prompts with the real target.

A unit is one prompt in one mode: decoded by the target alone and with every drafter. Drafters are the
trained one (`after`), with chains and, where asked for, with trees; the one that training started from
(`before`, untrained unless there was a warm start) on the first few prompts, which shows that the wiring
rather than luck is measured; and others to compare with.
Everything that is reported is computed from the units' records.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from dflash_core import prompt_sets
from dflash_core.chat import Chat, Unrenderable
from dflash_core.checkpoint import load_drafter
from dflash_core.config import DrafterSource, EvaluateConfig, Runtime, TargetConfig
from dflash_core.corpus.rows import CORPORA
from dflash_core.decode import (
    Decoding,
    Generation,
    answers,
    greedy,
    plain_steps,
    speculate_steps,
    stepwise_logits,
)
from dflash_core.devices import resolve_device
from dflash_core.errors import InputError
from dflash_core.evaluation_prompts import answer_message, choose_prompts, encode_prompt
from dflash_core.evaluation_report import AFTER, BEFORE, markdown, picture, summarise
from dflash_core.generation import stop_ids
from dflash_core.import_drafter import read_drafter
from dflash_core.manifest import Dataset, canonical_json, require_same, sha256
from dflash_core.model import Drafter
from dflash_core.progress import Progress, silent
from dflash_core.sampling import Sampling
from dflash_core.storage import Storage

log = logging.getLogger(__name__)

STAGE, VERSION = "evaluations", 2
_PROMPTS = "prompts.json"
_WARM_UP_TOKENS = 4


# --- the stage ---------------------------------------------------------------------------------


def plan(
    root: Storage,
    name: str,
    run: Dataset,
    corpus: Dataset,
    target: TargetConfig,
    config: EvaluateConfig,
    compare: Iterable[DrafterSource] = (),
) -> Dataset:
    """The evaluation of this request, new or continued; writes the prompts when new.

    Args:
        run: a complete training run.
        corpus: the corpus whose held-out rows are asked.
        compare: other drafters for the same target, decoded on the same prompts.

    Raises:
        MismatchError: the run is of another target.
        InputError: a prompt set or a drafter cannot be read, or nothing is left to ask.
        IncompleteError: run or corpus are not complete.
    """
    from dflash_core.target import identify

    require_target(run, target, "evaluate with the target of the training run")
    inputs = {
        "run": run.fingerprint,
        "corpus": corpus.require_stage(CORPORA).fingerprint,
        # Another type rounds differently, so the answers may differ.
        "target_dtype": target.dtype,
    }
    identify(target, require_template=True)
    prompt_sets.require_names(config.prompt_sets)
    for prompt_set in config.prompt_sets:
        if prompt_set.set != prompt_sets.HELD_OUT:
            inputs[f"prompts {prompt_set.label}"] = prompt_sets.identity(prompt_set)
    for other in compare:
        if other.name in (BEFORE, AFTER) or f"drafter {other.name}" in inputs:
            raise InputError(
                f"drafter name {other.name!r} is taken; give each drafter in compare its own"
            )
        inputs[f"drafter {other.name}"] = _identity_of(root, other, target)
    dataset = Dataset.create(root, STAGE, name, version=VERSION, config=config, inputs=inputs)
    if not dataset.storage.exists(_PROMPTS):
        body = canonical_json(choose_prompts(corpus, target, config))
        dataset.storage.put_new(_PROMPTS, body.encode())
    return dataset


def units(dataset: Dataset) -> list[str]:
    """Every prompt of the evaluation in every mode, in order."""
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
    compare: Iterable[DrafterSource] = (),
) -> None:
    """Decodes the prompts and commits each.

    Args:
        units: prompts to decode; None for all that are missing.
        progress: called after every prompt with the acceptance length so far and tokens_per_s of
            speculative decoding.
        compare: as given to `plan`.
    """
    units = missing(dataset) if units is None else units
    if not units:
        return
    prompts = _prompts(dataset)
    config, report = EvaluateConfig.model_validate(dataset.config), progress or silent
    untrained = _untrained(prompts, config)
    decoder = _Decoder.load(dataset, run, target, runtime, compare)
    decoder.warm_up(prompts[units[0]]["input_ids"])
    tokens, steps, seconds = 0, 0, 0.0
    for done, unit in enumerate(units, 1):
        names = [name for name in decoder.names if name != BEFORE or unit in untrained]
        seed = int(sha256(f"{config.seed} {unit}")[:8], 16)
        record = dataset.commit(unit, decoder.measure(prompts[unit], names, seed))
        after = record["outcomes"][AFTER]
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
    if not facts[AFTER]["num_steps"]:
        raise InputError(
            f"{dataset.path}: every answer of the target is a single token, so no draft was verified; raise "
            "max_new_tokens, or look at its answers"
        )
    dataset.storage.put("report.json", (json.dumps(facts, indent=2) + "\n").encode())
    dataset.storage.put("report.md", markdown(dataset, facts).encode())
    image = picture(facts)
    if image:
        dataset.storage.put("acceptance.png", image)
    return dataset.seal(wanted, facts)


def require_target(run: Dataset, target: TargetConfig, advice: str) -> None:
    """Raises MismatchError unless this training run is of this target."""
    from dflash_core.target import identify

    contract = run.require_stage("runs").facts["contract"]
    ours = identify(target).contract()
    theirs = {key: contract.get(key) for key in ours}
    require_same(f"target {target.id!r} and {run.path}", ours, theirs, advice)


def _untrained(prompts: dict[str, dict], config: EvaluateConfig) -> set[str]:
    """The first prompts of each set in the headline's mode."""
    mode = (config.thinking[0], config.temperatures[0])
    found: dict[str, list[str]] = {}
    for unit, prompt in prompts.items():
        if (prompt["thinking"], prompt["temperature"]) == mode:
            found.setdefault(prompt["set"], []).append(unit)
    return {unit for of_set in found.values() for unit in of_set[: config.num_untrained_prompts]}


def _prompts(dataset: Dataset) -> dict[str, dict]:
    """The prompts by unit, in order."""
    return {f"prompt-{index:05d}": prompt for index, prompt in enumerate(_read(dataset)["prompts"])}


def _read(dataset: Dataset) -> dict:
    return json.loads(dataset.storage.get(_PROMPTS))


# --- drafters ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entrant:
    """A drafter and how it is decoded with."""

    drafter: Drafter
    head_DH: Tensor | None = None
    """Head of its own, in the target's type; None for the target's."""
    token_ids_D: Tensor | None = None
    """Target tokens of that head's rows; None when rows are tokens."""
    tree_nodes: int = 0


def _run_of(root: Storage, source: str) -> Dataset | None:
    """The training run under the root that `source` names, if it names one."""
    return Dataset.open(root, source) if source.startswith("runs/") else None


def _identity_of(root: Storage, other: DrafterSource, target: TargetConfig) -> str:
    """What names another drafter in the fingerprint: its run, or the hash of its files."""
    run = _run_of(root, other.source)
    if run is not None:
        require_target(run, target, "compare drafters of one target")
        return run.fingerprint
    return _import(other, target).content


def _import(other: DrafterSource, target: TargetConfig) -> Any:
    from dflash_core.target import text_config

    layers = text_config(target).num_hidden_layers
    return read_drafter(other.source, revision=other.revision, num_target_layers=layers)


# --- decoding ----------------------------------------------------------------------------------


class _Decoder:
    """Target and drafters on a device, ready to decode prompts."""

    def __init__(
        self,
        model: Any,
        entrants: dict[str, _Entrant],
        chats: dict[bool, Chat],
        config: EvaluateConfig,
        stop_ids: set[int],
    ) -> None:
        self.names = list(entrants)
        self._model, self._entrants, self._chats = model, entrants, chats
        self._config, self._stop_ids = config, stop_ids
        self._embedding: Tensor = model.get_input_embeddings().weight
        self._head: Tensor = model.get_output_embeddings().weight

    @classmethod
    def load(
        cls,
        dataset: Dataset,
        run: Dataset,
        target: TargetConfig,
        runtime: Runtime,
        compare: Iterable[DrafterSource],
    ) -> _Decoder:
        """Drafters compute in the target's type, as an engine runs them."""
        from dflash_core.target import load_causal_lm, load_tokenizer, require_fast_kernels

        config = EvaluateConfig.model_validate(dataset.config)
        device = resolve_device(runtime.device)
        model = load_causal_lm(target, device)
        require_fast_kernels(model, device, runtime.slow_kernels)
        tokenizer = load_tokenizer(target)
        options = target.template_options
        chats = {mode: Chat(tokenizer, mode, options) for mode in set(config.thinking)}
        ends = stop_ids(model, chats[config.thinking[0]])

        def ready(drafter: Drafter) -> Drafter:
            return drafter.to(device, model.dtype).requires_grad_(False)

        entrants = {BEFORE: _Entrant(ready(load_drafter(run, 0)[0]))}
        trained = ready(load_drafter(run)[0])
        entrants[AFTER] = _Entrant(trained)
        for nodes in config.tree_nodes:
            entrants[f"trained, tree of {nodes}"] = _Entrant(trained, tree_nodes=nodes)
        for other in compare:
            if (theirs := _run_of(run.root, other.source)) is not None:
                entrants[other.name] = _Entrant(ready(load_drafter(theirs)[0]))
                continue
            found = _import(other, target)
            planned = {"content": dataset.request["inputs"][f"drafter {other.name}"]}
            advice = "its files have changed since this evaluation was planned; evaluate anew"
            require_same(f"drafter {other.name}", planned, {"content": found.content}, advice)
            found.require_embedding(model.get_input_embeddings().weight, f"drafter {other.name!r}")
            head, ids = found.head_DH, found.token_ids_D
            entrants[other.name] = _Entrant(
                ready(found.build()),
                None if head is None else head.to(device, model.dtype),
                None if ids is None else ids.to(device),
            )
        return cls(model, entrants, chats, config, ends)

    def warm_up(self, input_ids: list[int]) -> None:
        """Compiles kernels and fills caches before a clock runs."""
        decoding = Decoding(_WARM_UP_TOKENS, self._stop_ids)
        self._plain(input_ids, decoding, 0)
        for name in self.names:
            self._speculate(name, input_ids, decoding, 0)

    def measure(self, prompt: dict, names: list[str], seed: int) -> dict:
        """The record of a prompt: the target's own answer, and how each drafter fared.

        Where the user goes on, each further question is one more answer of the same record.
        """
        sampling = Sampling(prompt["temperature"], self._config.top_p)
        decoding = Decoding(self._config.max_new_tokens, self._stop_ids, sampling)
        keys = ("id", "source", "group", "set", "thinking", "temperature")
        record: dict[str, Any] = {key: prompt[key] for key in keys}
        plain = {"tokens": [], "num_tokens": 0, "seconds": 0.0}
        record |= {"num_prompt_tokens": 0, "plain": plain, "outcomes": {}}
        for input_ids, hear in self._questions(prompt):
            record["num_prompt_tokens"] += len(input_ids)
            tokens, seconds = _timed(lambda ids=input_ids: self._plain(ids, decoding, seed))
            _add(plain, {"tokens": tokens, "num_tokens": len(tokens), "seconds": seconds})
            for name in names:
                outcome = self._outcome(name, input_ids, decoding, seed, tokens)
                _add(record["outcomes"].setdefault(name, {}), outcome)
            hear(tokens)
        return record

    def _questions(self, prompt: dict) -> Iterable[tuple[list[int], Callable[[list[int]], None]]]:
        """Token ids of each question, and what to call with the target's answer before the next one.

        The conversation ends early where the template cannot print what the target has said.
        """
        heard: list[list[int]] = []
        input_ids = prompt["input_ids"]
        yield input_ids, heard.append
        chat, messages = self._chats[prompt["thinking"]], list(prompt.get("messages", []))
        for text in prompt.get("follow_ups", []):
            answer = answer_message(chat, input_ids, heard[-1])
            messages += [answer, {"role": "user", "content": text}]
            try:
                input_ids = encode_prompt(chat, messages, prompt["tools"])
            except Unrenderable as error:
                log.warning("%s %s ends early: %s", prompt["source"], prompt["id"], error)
                return
            yield input_ids, heard.append

    def _outcome(
        self, name: str, input_ids: list[int], decoding: Decoding, seed: int, plain: list[int]
    ) -> dict:
        out, seconds = _timed(lambda: self._speculate(name, input_ids, decoding, seed))
        shape = self._entrants[name].drafter.shape
        outcome = {
            "block_size": shape.block_size,
            "num_drafts": shape.num_drafts,
            "accepted": out.accepted,
            "judged": out.judged,
            "num_tokens": len(out.tokens),
            "num_verified": out.num_verified,
            "seconds": seconds,
        }
        if decoding.sampling.greedy:
            difference = self._difference(input_ids, plain, out.tokens)
            outcome |= {"lossless": difference is None, "difference": difference}
        return outcome

    def _plain(self, input_ids: list[int], decoding: Decoding, seed: int) -> list[int]:
        if decoding.sampling.greedy:
            return greedy(self._model, input_ids, decoding.max_new_tokens, self._stop_ids)
        steps = plain_steps(self._model, [input_ids], decoding, [seed])
        return next(answers(steps))[1].tokens

    def _speculate(
        self, name: str, input_ids: list[int], decoding: Decoding, seed: int
    ) -> Generation:
        entrant = self._entrants[name]
        steps = speculate_steps(
            self._model,
            entrant.drafter,
            self._embedding,
            self._head if entrant.head_DH is None else entrant.head_DH,
            [input_ids],
            replace(decoding, tree_nodes=entrant.tree_nodes),
            [seed],
            entrant.token_ids_D,
        )
        return next(answers(steps))[1]

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


def _add(total: dict, more: dict) -> None:
    """Adds another answer's numbers: lists and sums grow, equal answers stay equal only if all are."""
    for key, value in more.items():
        if key not in total or key in ("block_size", "num_drafts"):
            total[key] = value
        elif key == "lossless":
            total[key] = total[key] and value
        elif key == "difference":
            total[key] = total[key] or value
        else:
            total[key] += value


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Result and seconds; results are Python numbers, so a GPU has finished by then."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start
