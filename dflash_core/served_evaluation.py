"""A drafter as it is served: a running vLLM or SGLang is asked the prompts of an evaluation.

The server gets the evaluation's token ids, so template and thinking mode are the same, and its own
counters say what was accepted. Served and offline acceptance are of the same prompts and should agree
within a few percent; where they part, the server does not compute what was trained.

A unit is one level of concurrency. References: vLLM's Prometheus metrics `vllm:spec_decode_*`, SGLang's
/server_info, and the OpenAI completions protocol as both speak it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from dflash_core import evaluation
from dflash_core.config import ServedConfig, TargetConfig
from dflash_core.errors import InputError, StorageError
from dflash_core.evaluation_report import AFTER, drafter_facts
from dflash_core.manifest import Dataset
from dflash_core.progress import Progress, silent
from dflash_core.storage import Storage

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

STAGE, VERSION = "served", 1
_TIMEOUT_S = 600.0  # of one answer; a loaded server queues
# Not `..._created`, the time at which a counter began.
_METRIC = re.compile(
    r"^vllm:spec_decode_num_(\w+?)(?<!_created)(?:_total)?(?:\{([^}]*)\})?\s+(\S+)$"
)
_POSITION = re.compile(r'position="(\d+)"')
_SUSPECTS = (
    "a sliding window or causality that the engine does not honour, taps counted one off, another chat "
    "template or thinking mode in training, another block size, or a quantised target"
)


def plan(
    root: Storage, name: str, measured: Dataset, target: TargetConfig, config: ServedConfig
) -> Dataset:
    """The measurement of this request, new or continued.

    Args:
        measured: a complete evaluation of the same drafter; its prompts are asked.
        target: whose tokenizer reads the expected answers.

    Raises:
        MismatchError: the evaluation is of another target.
    """
    inputs = {"evaluation": measured.require_stage(evaluation.STAGE).fingerprint}
    run = measured.request["inputs"]["run"]
    for folder in measured.root.child("runs").folders():
        # Runs of one request may have several names, and not all of them be finished.
        finished = f"runs/{folder}/manifest.json"
        if folder.endswith(f"-{run}") and measured.root.exists(finished):
            trained = Dataset.open(measured.root, f"runs/{folder}")
            evaluation.require_target(trained, target, "give the target of the evaluation")
    return Dataset.create(root, STAGE, name, version=VERSION, config=config, inputs=inputs)


def units(config: ServedConfig) -> list[str]:
    """One for each level of concurrency, in the order asked for."""
    return [f"concurrency-{level:04d}" for level in config.concurrency]


def missing(dataset: Dataset) -> list[str]:
    """Levels without a commit record, in order."""
    done = dataset.committed()
    return [u for u in units(ServedConfig.model_validate(dataset.config)) if u not in done]


def run(
    dataset: Dataset, measured: Dataset, target: TargetConfig, progress: Progress | None = None
) -> None:
    """Asks every missing level and commits it.

    Raises:
        InputError: no server there, not one of the two engines, or it does not speculate.
        StorageError: the server went away.
    """
    from dflash_core.target import load_tokenizer

    config, report = ServedConfig.model_validate(dataset.config), progress or silent
    asked = _questions(measured, config)
    sampled = any(question.temperature for question in asked)
    tokenizer = load_tokenizer(target)
    expected = {q.unit: tokenizer.decode(q.plain, skip_special_tokens=True) for q in asked}
    offline = drafter_facts([q.record for q in asked], AFTER)
    levels = missing(dataset)
    with _Server(config.endpoint, config.model, config.engine) as server:
        server.ask(asked[0])  # compiles kernels and fills caches before a clock runs
        for done, unit in enumerate(levels, 1):
            level = int(unit.removeprefix("concurrency-"))
            record, texts = _measure(server, asked, level)
            record["concurrency"] = level
            equal = sum(text == expected[name] for name, text in texts.items())
            record["num_equal"] = None if sampled else equal  # sampled answers differ by design
            record["offline"] = {key: offline[key] for key in ("acceptance_length", "interval")}
            if config.baseline:
                with _Server(config.baseline, config.model, config.engine) as plain:
                    plain.ask(asked[0])
                    record["plain_tokens_per_s"] = _drive(plain, asked, level)[0]["tokens_per_s"]
            record["warning"] = _warning(record, config.tolerance, offline)
            if record["warning"]:
                log.warning("%s", record["warning"])
            dataset.commit(unit, record)
            report(done, len(levels), {"tokens_per_s": record["tokens_per_s"]})


def seal(dataset: Dataset) -> dict:
    """Writes report.md, then the manifest with a fact for each level."""
    wanted = units(ServedConfig.model_validate(dataset.config))
    if missing(dataset) or dataset.complete:
        return dataset.seal(wanted, {})
    records = dataset.records(wanted)
    keep = ("unit", "fingerprint", "write_id", "written_at", "host")
    levels = [{k: v for k, v in records[unit].items() if k not in keep} for unit in wanted]
    dataset.storage.put("report.md", markdown(dataset, levels).encode())
    return dataset.seal(wanted, {"levels": levels})


def markdown(dataset: Dataset, levels: list[dict]) -> str:
    """report.md: served against offline, level by level."""
    low, high = levels[0]["offline"]["interval"]
    first = levels[0]
    asked = (
        f"{first['num_prompts']} prompts of the evaluation {dataset.request['inputs']['evaluation']} at "
        f"{dataset.config['endpoint']}. Offline acceptance length on the same prompts "
        f"{first['offline']['acceptance_length']:.2f} [{low:.2f}, {high:.2f}], bonus token counted."
    )
    lines = [
        f"# {dataset.name} as served by {first['engine']}",
        "",
        asked,
        "",
        "| concurrency | acceptance length | drafts a step | tokens/s | first token, median s | speed-up | equal answers |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for level in levels:
        plain = level.get("plain_tokens_per_s")
        cells = [
            f"{level['concurrency']}",
            _number(level["acceptance_length"])
            + (" (since the server started)" if level["since_start"] else ""),
            _number(level["drafts_per_step"]),
            f"{level['tokens_per_s']:.1f}",
            f"{level['first_token_s']:.3f}",
            f"{level['tokens_per_s'] / plain:.2f}" if plain else "-",
            "sampled"
            if level["num_equal"] is None
            else f"{level['num_equal']} of {level['num_prompts']}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    warnings = dict.fromkeys(level["warning"] for level in levels if level["warning"])
    return "\n".join([*lines, "", *(f"**{warning}**" for warning in warnings)]) + "\n"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _warning(record: dict, tolerance: float, offline: dict) -> str:
    """What to say when served and offline acceptance part by more than `tolerance` of the latter."""
    served, expected = record["acceptance_length"], offline["acceptance_length"]
    if served is None or abs(served - expected) <= tolerance * expected:
        return ""
    text = (
        f"served acceptance length {served:.2f} at concurrency {record['concurrency']}, offline {expected:.2f} on the "
        f"same prompts; suspect {_SUSPECTS}"
    )
    if record["since_start"]:
        text += "; the server's figure is an average since its start, so other traffic counts, too"
    return text


# --- asking ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Question:
    unit: str
    input_ids: list[int]
    max_tokens: int
    temperature: float
    top_p: float
    stop_ids: list[int]
    plain: list[int]
    record: dict


@dataclass(frozen=True)
class _Answer:
    text: str
    num_tokens: int
    first_token_s: float


def _questions(measured: Dataset, config: ServedConfig) -> list[_Question]:
    """The first prompts of the evaluation's headline mode, single questions only."""
    body = json.loads(measured.storage.get("prompts.json"))
    first, found = body["prompts"][0], []
    for unit, prompt in zip(evaluation.units(measured), body["prompts"], strict=True):
        same = all(prompt[key] == first[key] for key in ("thinking", "temperature"))
        if not same or prompt.get("follow_ups"):
            continue
        record = measured.record(unit)
        found.append(
            _Question(
                unit=unit,
                input_ids=prompt["input_ids"],
                max_tokens=measured.config["max_new_tokens"],
                temperature=prompt["temperature"],
                top_p=measured.config["top_p"],
                stop_ids=body["stop_ids"],
                plain=record["plain"]["tokens"],
                record=record,
            )
        )
    if not found:
        raise InputError(
            f"{measured.path} has no single-turn prompts to ask; evaluate others first"
        )
    return found[: config.num_prompts]


def _measure(
    server: _Server, asked: list[_Question], level: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Speed at this concurrency and what the server counted meanwhile; and the answers by unit."""
    before = server.counters()
    record, texts = _drive(server, asked, level)
    record |= server.accepted(before, server.counters())
    return {**record, "engine": server.engine}, texts


def _drive(
    server: _Server, asked: list[_Question], level: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Asks everything with so many requests in flight: speed, and the answers by unit."""
    start = time.perf_counter()
    with ThreadPoolExecutor(level) as pool:
        answers = list(pool.map(server.ask, asked))
    seconds = time.perf_counter() - start
    tokens = sum(answer.num_tokens for answer in answers)
    record = {
        "num_prompts": len(asked),
        "num_tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / max(seconds, 1e-9),
        "first_token_s": statistics.median(answer.first_token_s for answer in answers),
    }
    return record, {q.unit: answer.text for q, answer in zip(asked, answers, strict=True)}


class _Server:
    """A running server: its engine, its model, its counters."""

    def __init__(self, url: str, model: str, engine: str) -> None:
        import httpx

        key = os.environ.get("OPENAI_API_KEY", "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None)
        self.url = url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=_TIMEOUT_S, limits=limits
        )
        self.model = model or self._first_model()
        self.engine = engine if engine != "auto" else self._recognise()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, question: _Question) -> _Answer:
        """One answer, streamed."""
        body = {
            "model": self.model,
            "prompt": question.input_ids,
            "max_tokens": question.max_tokens,
            "temperature": question.temperature,
            "top_p": question.top_p,
            # As the evaluation samples; left out, engines take the model's generation_config.json.
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": question.stop_ids,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        start, first, text, tokens = time.perf_counter(), 0.0, "", 0
        for event in self._stream("/v1/completions", body):
            for choice in event.get("choices", []):
                if choice.get("text") and not first:
                    first = time.perf_counter() - start
                text += choice.get("text") or ""
            tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        if not tokens:
            raise InputError(
                f"{self.url} streamed an answer without usage; it has to support stream_options.include_usage"
            )
        return _Answer(text, tokens, first or time.perf_counter() - start)

    def counters(self) -> dict[str, float]:
        """What the engine says of its speculation, since it started."""
        if self.engine == "sglang":
            return self._sglang_counters()
        found: dict[str, float] = {}
        for line in self._get("/metrics").text.splitlines():
            if not (match := _METRIC.match(line)):
                continue
            name, labels, value = match.groups()
            position = _POSITION.search(labels or "")
            key = f"{name} {position[1]}" if position else name
            found[key] = found.get(key, 0.0) + float(value)
        if "drafts" not in found:
            raise InputError(
                f"{self.url}/metrics has no vllm:spec_decode_num_drafts: the server does not speculate; start it with "
                "--speculative-config"
            )
        return found

    def accepted(self, before: dict[str, float], after: dict[str, float]) -> dict:
        """Acceptance between two readings; where the engine gives averages only, since its start."""
        if self.engine == "sglang":
            return {
                "acceptance_length": after["acceptance_length"],
                "accepted_by_slot": [],
                "drafts_per_step": None,
                "since_start": True,
            }
        gained = {key: value - before.get(key, 0.0) for key, value in after.items()}
        steps = gained["drafts"]
        slots = sorted(int(key.split()[1]) for key in gained if " " in key)
        return {
            "acceptance_length": 1 + gained["accepted_tokens"] / steps if steps else None,
            "accepted_by_slot": [
                gained[f"accepted_tokens_per_pos {slot}"] / steps for slot in slots if steps
            ],
            "drafts_per_step": gained["draft_tokens"] / steps if steps else None,
            "since_start": False,
        }

    def _sglang_counters(self) -> dict[str, float]:
        states = self._server_info().get("internal_states") or []
        lengths = [state.get("avg_spec_accept_length") for state in states]
        lengths = [length for length in lengths if length is not None]
        if not lengths:
            raise InputError(
                f"{self.url}: the server reports no avg_spec_accept_length: it does not speculate; start it with "
                "--speculative-algorithm DFLASH"
            )
        return {"acceptance_length": statistics.fmean(lengths)}

    def _server_info(self) -> dict:
        """SGLang's own description; the path has changed."""
        for path in ("/server_info", "/get_server_info"):
            answer = self._get(path, may_miss=True)
            if answer.status_code == 200:
                return answer.json()
        return {}

    def _first_model(self) -> str:
        models = self._get("/v1/models").json().get("data") or []
        if not models:
            raise InputError(f"{self.url}/v1/models lists no model; set served.model")
        return models[0]["id"]

    def _recognise(self) -> str:
        if self._server_info():
            return "sglang"
        if "vllm:" in self._get("/metrics", may_miss=True).text:
            return "vllm"
        raise InputError(
            f"{self.url} is neither vLLM (no vllm: in /metrics) nor SGLang (no /server_info); set served.engine"
        )

    def _get(self, path: str, *, may_miss: bool = False) -> httpx.Response:
        import httpx

        try:
            answer = self._http.get(path)
        except httpx.TransportError as error:
            raise StorageError(f"{self.url} cannot be reached: {error}; is it running?") from error
        if answer.status_code != 200 and not may_miss:
            raise InputError(f"{self.url}{path} answers {answer.status_code}: {answer.text[:200]}")
        return answer

    def _stream(self, path: str, body: dict) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer."""
        import httpx

        try:
            with self._http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise InputError(
                        f"{self.url}{path} answers {answer.status_code}: {answer.text[:200]}"
                    )
                for line in answer.iter_lines():
                    data = line.removeprefix("data:").strip()
                    if line.startswith("data:") and data != "[DONE]":
                        yield json.loads(data)
        except httpx.TransportError as error:
            raise StorageError(f"{self.url} went away: {error}") from error
