"""Conversations a second, tokens encoded for each token printed, and how full packs get; the tables of
docs/tokenization.md. With speculators 0.9.0 its preprocessing is timed on the same conversations.

Run: make .venv/peers
     PYTHONPATH=.venv/peers python -m benchmarks.tokenization [FOLDER OF A TOKENIZER]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from dflash_core import tokenization
from dflash_core.chat import Chat
from dflash_core.config import TargetConfig, TokenizeConfig
from dflash_core.corpus.rows import CORPORA, Row, content_id, write_part
from dflash_core.manifest import Dataset
from dflash_core.masking import renderings, samples_of
from dflash_core.packing import plan_packs
from dflash_core.storage import Storage
from dflash_core.target import load_tokenizer

CONVERSATIONS = 400
MAX_TOKENS = 16_384
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a name up in the library.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}


# --- conversations -----------------------------------------------------------------------------


class Writer:
    """Random prose: words of a fixed list, frequent ones first, with a seed of its own."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)
        syllables = ["an", "ter", "con", "de", "ing", "lo", "mi", "ra", "so", "tu", "ver", "el"]
        self._words = ["".join(self._draw.choice(syllables, 2)) for _ in range(3000)]
        self._odds = 1 / np.arange(1, 3001)
        self._odds /= self._odds.sum()

    def text(self, words: int) -> str:
        chosen = self._draw.choice(3000, words, p=self._odds)
        return " ".join(self._words[i] for i in chosen) + "."

    def chat(self, turns: int, *, question: int = 40, answer: int = 120) -> list[dict]:
        return [
            message
            for _ in range(turns)
            for message in (
                {"role": "user", "content": self.text(question)},
                {"role": "assistant", "content": self.text(answer)},
            )
        ]

    def agent(self, steps: int) -> list[dict]:
        """A question, `steps` calls with their results, and an answer."""
        messages = self.chat(1)
        for step in range(steps):
            function = {"name": "look_up", "arguments": json.dumps({"name": self.text(3)})}
            call = {"id": f"call_{step}", "type": "function", "function": function}
            result = {"role": "tool", "content": self.text(60), "tool_call_id": call["id"]}
            messages[-1:-1] = [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
        return messages


def mixed(count: int) -> list[Row]:
    """Chats of 1 turn (half of them), of 2 to 6, of 10 to 20, and runs of 5 to 15 calls (a tenth each)."""
    writer, draw, rows = Writer(0), np.random.default_rng(1), []
    for index in range(count):
        kind = index % 10
        if kind < 5:
            messages, tools = writer.chat(1), None
        elif kind < 8:
            messages, tools = writer.chat(int(draw.integers(2, 7))), None
        elif kind == 8:
            messages, tools = writer.chat(int(draw.integers(10, 21))), None
        else:
            messages, tools = writer.agent(int(draw.integers(5, 16))), [TOOL]
        rows.append(Row(content_id(messages, tools), "benchmark", messages, tools, {}))
    return rows


class Spent(NamedTuple):
    """Seconds by the clock, and of processor time, which other work on the machine stretches less."""

    clock: float
    processor: float

    @classmethod
    def now(cls) -> Spent:
        """So far, with processes that have ended."""
        return cls(time.perf_counter(), sum(os.times()[:4]))

    def since(self, began: Spent) -> Spent:
        return Spent(self.clock - began.clock, self.processor - began.processor)


# --- ours --------------------------------------------------------------------------------------


def ours(target: TargetConfig, rows: list[Row], processes: int) -> tuple[Spent, dict]:
    """What it took from a corpus in Parquet to committed parts, and the facts of the tokens."""
    with tempfile.TemporaryDirectory() as folder:
        root = Storage.from_url(folder)
        corpus = Dataset.create(root, CORPORA, "benchmark", version=1, config={}, inputs={})
        parts = [write_part(corpus.storage, "parts", rows)]
        corpus.seal([], {"parts": {"train": parts, "held_out": []}})
        config = TokenizeConfig(
            pack_tokens=MAX_TOKENS, rows_per_part=-(-len(rows) // max(processes, 1))
        )
        dataset = tokenization.plan(root, "benchmark", corpus, target, config)
        todo = tokenization.missing(dataset, corpus)
        began = Spent.now()
        tokenization.run_units(dataset, corpus, target, todo, processes=processes)
        spent = Spent.now().since(began)
        return spent, tokenization.seal(dataset, corpus)["facts"]


def work_by_turns(target: TargetConfig) -> None:
    print("\n| turns | tokens encoded per token printed | renderings |\n| --- | --- | --- |")
    chat, writer = Chat(load_tokenizer(target), thinking=False), Writer(2)
    for turns in (1, 2, 5, 20, 50):
        messages = writer.chat(turns)
        row = Row(content_id(messages, None), "benchmark", messages, None, {})
        chat.counts.clear()
        printed = 0
        for rendering in renderings(chat, row)[0]:
            [(ids, offsets)] = chat.encode_with_offsets([rendering.text])
            printed += sum(len(it.input_ids) for it in samples_of(chat, rendering, ids, offsets))
        ratio = chat.counts["encoded_tokens"] / printed
        print(f"| {turns} | {ratio:.3f} | {chat.counts['renders']} |")


# --- speculators -------------------------------------------------------------------------------


def theirs(
    target: TargetConfig, rows: list[Row], endpoint: str, processes: int
) -> tuple[Spent, dict]:
    """What their preprocessing took beside its server, and what it made."""
    from datasets import Dataset as Table
    from speculators.data_generation.preprocessing import build_speculator_training_dataset

    table = Table.from_list(
        [
            {
                "conversations": [
                    {"tool_calls": None, "tool_call_id": None, **message}
                    for message in row.messages
                ],
                "tools": json.dumps(row.tools) if row.tools else None,
            }
            for row in rows
        ]
    )
    began = Spent.now()
    made = build_speculator_training_dataset(
        table, load_tokenizer(target), MAX_TOKENS, processes, render_endpoint=endpoint
    )
    spent = Spent.now().since(began)
    made = made.with_format("numpy")
    return spent, {
        "num_samples": len(made),
        "total_tokens": int(sum(made["seq_len"])),
        "supervised_tokens": int(sum(int(mask.sum()) for mask in made["loss_mask"])),
    }


def render_server(target_id: str, port: Any) -> None:
    """vLLM's render endpoint: a chat request in, its token ids out. One process, as vLLM's front end is."""
    import asyncio

    from aiohttp import web

    tokenizer: Any = load_tokenizer(TargetConfig(id=target_id))
    counts = {"tokens": 0}

    async def render(request: web.Request) -> web.Response:
        body = await request.json()
        text = tokenizer.apply_chat_template(
            body["messages"],
            tools=body.get("tools"),
            add_generation_prompt=body["add_generation_prompt"],
            tokenize=False,
            enable_thinking=False,
        )
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        counts["tokens"] += len(ids)
        return web.json_response({"token_ids": ids[: body["truncate_prompt_tokens"]]})

    async def count(_: web.Request) -> web.Response:
        return web.json_response({**counts, "processor": time.process_time()})

    async def serve() -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_post("/v1/chat/completions/render", render)
        app.router.add_get("/count", count)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port.put(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())


def with_server(target: TargetConfig, use: Callable[[str], None]) -> None:
    context = multiprocessing.get_context("spawn")
    port: Any = context.Queue()
    server = context.Process(target=render_server, args=(target.id, port), daemon=True)
    server.start()
    try:
        use(f"http://127.0.0.1:{port.get(timeout=120)}")
    finally:
        server.terminate()
        server.join()


def count_of(endpoint: str) -> dict:
    """What the server has done so far: `tokens` encoded, seconds of `processor` time."""
    import httpx

    return httpx.get(f"{endpoint}/count").json()


# --- packs -------------------------------------------------------------------------------------


def packs() -> None:
    lengths = (
        np.random.default_rng(0).lognormal(6.3, 1.1, 1_000_000).astype(int).clip(8, MAX_TOKENS)
    )
    began = time.perf_counter()
    _, _, num_packs = plan_packs(lengths, MAX_TOKENS)
    fill = lengths.sum() / (num_packs * MAX_TOKENS)
    print(
        f"\n1,000,000 samples: {time.perf_counter() - began:.1f} s, {num_packs:,} packs, {fill:.2%} full"
    )


def main() -> None:
    target = TargetConfig(id=sys.argv[1] if len(sys.argv) > 1 else "demo/target")
    rows = mixed(CONVERSATIONS)
    ours(target, rows[:20], 1)  # imports, first compilation of the template
    print(
        f"{len(rows)} conversations, {sum(len(r.messages) for r in rows):,} messages, {target.id}\n"
    )
    print(
        "| | conversations/s | processor seconds | samples | tokens kept | supervised | tokens encoded |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    here, facts = ours(target, rows, 1)
    encoded_here = facts["encoded_per_printed_token"] * facts["total_tokens"]  # nothing is cut
    line("here, 1 process", here, facts, encoded_here)

    def compare(endpoint: str) -> None:
        for processes in (1, 2):
            before = count_of(endpoint)
            spent, made = theirs(target, rows, endpoint, processes)
            after = count_of(endpoint)
            spent = Spent(spent.clock, spent.processor + after["processor"] - before["processor"])
            name = f"speculators 0.9.0, {processes} process{'es' * (processes > 1)} and its server"
            line(name, spent, made, after["tokens"] - before["tokens"])
            times = (there / own for there, own in zip(spent, here, strict=True))
            print("<!-- here / there: {:.1f}, processor time {:.1f} -->".format(*times))

    try:
        import speculators  # noqa: F401
    except ImportError:
        print("<!-- speculators is not installed -->")
    else:
        with_server(target, compare)
    work_by_turns(target)
    packs()


def line(name: str, spent: Spent, facts: dict, encoded: float) -> None:
    numbers = (facts["num_samples"], facts["total_tokens"], facts["supervised_tokens"])
    rate = f"{CONVERSATIONS / spent.clock:,.0f}"
    cells = [rate, f"{spent.processor:.1f}", *(f"{n:,}" for n in numbers), f"{encoded:,.0f}"]
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
