"""A small HTTP server that speaks OpenAI's chat protocol, and misbehaves where it is told to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from aiohttp import web

Handler = Callable[[dict], Any]
"""Takes a request's body; returns a reply's body, a `web.Response`, an exception to drop the connection, or a
number of seconds to say nothing for."""


def reply(
    content: str | None, *, finish: str = "stop", tokens: int = 0, prompt: int = 0, **message: Any
):
    """A reply's body with one choice; `tokens` and `prompt` are its usage."""
    choice = {
        "message": {"role": "assistant", "content": content, **message},
        "finish_reason": finish,
    }
    return {"choices": [choice], "usage": {"completion_tokens": tokens, "prompt_tokens": prompt}}


def status(code: int, text: str = "", **headers: str) -> web.Response:
    return web.json_response({"error": {"message": text}}, status=code, headers=headers)


@dataclass
class ChatServer:
    """A server in a thread of its own.

    Attributes:
        url: its address, port chosen by the system.
        requests: bodies of the requests, in the order in which they came.
        most_at_once: the most requests that were open at a time.
    """

    handler: Handler
    model: str = "target"
    engine: str = "test"
    port: int = 0
    requests: list[dict] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    most_at_once: int = 0
    _open: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> Self:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(20)

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port)
        await site.start()
        self.port = runner.addresses[0][1]
        ready.set()
        await self._ended.wait()
        await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("Authorization"))
        models = [{"id": name, "owned_by": self.engine} for name in self.model.split(",")]
        return web.json_response({"data": models})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self._open += 1
        self.most_at_once = max(self.most_at_once, self._open)
        try:
            await asyncio.sleep(0.01)
            answer = self.handler(body)
            if isinstance(answer, (int, float)):
                await asyncio.sleep(answer)
                answer = reply("late")
            if isinstance(answer, Exception):
                assert request.transport is not None
                request.transport.abort()
                raise answer
        finally:
            self._open -= 1
        return answer if isinstance(answer, web.Response) else web.json_response(answer)
