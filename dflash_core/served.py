"""Answers from servers of the target that speak OpenAI's chat protocol.

Several servers share the work. A server that fails rests while the others go on; a request that fails is
asked again, of another server where there is one. The run stops only when none has answered for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from dflash_core.answers import Answer, Prompt, read_text
from dflash_core.chat import Chat, Unrenderable
from dflash_core.config import EndpointsConfig, RegenerateConfig, TargetConfig
from dflash_core.corpus.normalization import tool_call
from dflash_core.corpus.rows import Malformed, Message
from dflash_core.errors import InputError, UnreachableError
from dflash_core.manifest import sha256
from dflash_core.target import load_tokenizer

log = logging.getLogger(__name__)

T = TypeVar("T")

_PASSING = {408, 409, 425, 429, 500, 502, 503, 504, 529}  # what may pass by itself
_OVERLOADED = {429, 503, 529}
# Servers whose defaults are not neutral (generation_config.json of the model, llama.cpp its own): what a
# request leaves out, they fill in. All of them know the names below, as `owned_by` says who they are.
_FILL_IN = {"vllm", "sglang", "llamacpp"}
# Of an answer that is whole or reached its longest length; some servers name no reason. Others, such as abort
# and content_filter, end it somewhere.
_FINISHED = {"stop", "length", "tool_calls", "function_call", None}
_ATTEMPTS = 5  # of one request, when servers fail on it alone
_REFUSALS = 16  # after so many, and no answer, every request will be refused
_ASIDE = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "temperature": 0}
_LONGEST_PAUSE_S = 30.0
_CONNECT_S = 10.0
_LIST_S = 30.0  # of the list of models; a server that hangs must not hold up the others


class _Failed(Exception):
    """A request that may succeed when it is sent again; `to_blame` when it may itself be the cause."""

    def __init__(self, reason: str, *, to_blame: bool = True, retry_after_s: float = 0) -> None:
        super().__init__(reason)
        self.to_blame, self.retry_after_s = to_blame, retry_after_s


class _Refused(Exception):
    """A request that this server will never answer, such as one longer than its context."""


@dataclass
class _Server:
    """One server and how it is doing."""

    url: str
    slots: asyncio.Semaphore
    model: str = ""
    engine: str = ""
    asked: int = 0  # requests that it answers or that wait for it
    failures: int = 0  # since its last answer
    rests_until: float = 0.0


class ServedAnswerer:
    """Answers prompts with servers; see `regeneration.AsyncAnswerer`. Use as an asynchronous context.

    Attributes:
        concurrency: conversations that may be going on at a time.
    """

    def __init__(
        self, target: TargetConfig, config: RegenerateConfig, endpoints: EndpointsConfig
    ) -> None:
        """Loads the target's tokenizer, which says whether the servers print prompts as it does.

        Raises:
            InputError: an address is no http address, or the variable of the API key is not set.
        """
        tokenizer = load_tokenizer(target)
        self._options = target.template_options
        self._chats = {mode: Chat(tokenizer, mode, self._options) for mode in (False, True)}
        self._config, self._endpoints = config, endpoints
        slots = endpoints.requests_per_url
        self._servers = [_Server(base_url(url), asyncio.Semaphore(slots)) for url in endpoints.urls]
        self._client = httpx.AsyncClient(
            headers=_headers(endpoints.api_key_variable),
            limits=httpx.Limits(max_connections=None),
        )
        self._last_answer = time.monotonic()
        self._answered = self._refused = 0
        self.concurrency = slots * len(self._servers)

    async def __aenter__(self) -> Self:
        """Asks the servers what they serve; those that do not say are asked again when it is their turn.

        Raises:
            InputError: a server refuses the key, or does not serve the model.
            UnreachableError: none has answered within the patience of the configuration.
        """
        self._last_answer = time.monotonic()
        try:
            await self._send(self._meet_any)
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    def describe(self) -> list[dict[str, str]]:
        """The models that answer and the engines that serve them, each once; no addresses."""
        found = {(server.model, server.engine) for server in self._servers if server.model}
        return [{"model": model, "engine": engine} for model, engine in sorted(found)]

    async def answer(self, prompt: Prompt) -> Answer:
        """The target's answer, or the reason why there is none.

        Raises:
            InputError: the servers refuse the key or the model.
            UnreachableError: no server has answered anything for the patience of the configuration.
        """
        chat = self._chats[prompt.thinking]
        try:
            text = chat.render(prompt.messages, prompt.tools, prompt=True)
        except Unrenderable as error:
            return Answer(None, reason="template cannot print it", detail=str(error))
        body = self._body(chat, prompt)
        try:
            reply = await self._send(functools.partial(self._complete, prompt.conversation, body))
        except _Refused as error:
            self._refused += 1
            if self._refused >= _REFUSALS and not self._answered:
                raise InputError(
                    f"servers refuse all of the first {self._refused} requests: {error}; correct what they "
                    "do not take, or serve the target with room for it"
                ) from error
            return Answer(None, reason="servers refuse it", detail=str(error))
        except _Failed as error:
            return Answer(None, reason="servers fail on it", detail=str(error))
        self._answered += 1
        return read_reply(chat, prompt, text, reply)

    def _body(self, chat: Chat, prompt: Prompt) -> dict[str, Any]:
        """The request, but for what depends on the server that gets it: see `_sampling`."""
        config = self._config
        body: dict[str, Any] = {
            "messages": [_for_server(message) for message in prompt.messages],
            "max_tokens": config.max_new_tokens,
            "temperature": config.temperature,
        }
        if prompt.tools:
            body["tools"] = prompt.tools
        if config.temperature:
            body |= {
                "top_p": config.top_p,
                "seed": int(sha256(f"{config.seed}:{prompt.key}")[:7], 16),
            }
        options = dict(self._options)
        if "reasoning_effort" in options:  # servers of gpt-oss print its template without kwargs
            body["reasoning_effort"] = options["reasoning_effort"]
        if chat.switchable:
            options["enable_thinking"] = prompt.thinking
        if options:
            body["chat_template_kwargs"] = options
        return body

    def _sampling(self, server: _Server) -> dict[str, Any]:
        """Sampling beside the protocol's own: all of it where a server fills in what is left out, else only
        what was asked for, since a server that knows no such name may refuse the request."""
        config = self._config
        if server.engine not in _FILL_IN:
            names = ("top_k", "min_p", "presence_penalty")
            return {name: value for name in names if (value := getattr(config, name))}
        return {
            "top_k": config.top_k or -1,
            "min_p": config.min_p,
            "presence_penalty": config.presence_penalty,
            "repetition_penalty": 1.0,
        }

    # --- sending -------------------------------------------------------------------------------

    async def _send(self, request: Callable[[], Awaitable[T]]) -> T:
        """What `request` returns, asked again while it fails and there is hope."""
        failed_first, looked, to_blame, failures = math.inf, time.monotonic(), 0, 0

        def silent_s() -> float:
            """How long this request has failed while no server answered any other."""
            return time.monotonic() - max(failed_first, self._last_answer)

        async def tried() -> T:
            nonlocal failed_first, looked, to_blame, failures
            try:
                return await request()
            except _Failed as error:
                failed_first = min(failed_first, time.monotonic())
                if error.to_blame:
                    failures += 1
                    if failures >= _ATTEMPTS and self._last_answer <= looked:
                        await self._ask_aside()
                    # In an outage everything fails: without an answer to others since, it proves nothing.
                    to_blame += self._last_answer > looked
                    looked = time.monotonic()
                raise

        def gives_up(_: RetryCallState) -> bool:
            return to_blame >= _ATTEMPTS or silent_s() >= patience_s

        patience_s = self._endpoints.patience_s
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Failed), wait=_pause, stop=gives_up, reraise=True
        )
        try:
            return await retrying(tried)
        except _Failed as error:
            if silent_s() < patience_s:
                raise
            urls = ", ".join(server.url for server in self._servers)
            raise UnreachableError(
                f"no server of {urls} has answered for {silent_s():.0f} s ({error}); start one and run "
                "this again, it continues"
            ) from error

    async def _ask_aside(self) -> None:
        """Asks for one token of something else; an answer is noted as any other is.

        It tells a row that servers fail on from an outage where no other request is left to tell.
        """
        with contextlib.suppress(_Failed, _Refused):
            await self._complete("", _ASIDE)

    async def _meet_any(self) -> None:
        """Meets every server; one that answers is enough. Raises _Failed when none does, or InputError."""
        met = await asyncio.gather(*map(self._meet, self._servers), return_exceptions=True)
        errors = [error for error in met if error is not None]
        for error in errors:
            if not isinstance(error, _Failed):
                raise error
        if len(errors) == len(met):
            raise errors[0]

    async def _meet(self, server: _Server) -> None:
        """Learns which model and engine a server has. Failing to say is no request's fault."""
        try:
            reply = await self._request(server, "GET", "/models", timeout_s=_LIST_S)
        except _Failed as error:
            raise _Failed(str(error), to_blame=False, retry_after_s=error.retry_after_s) from error
        self._has_answered(server)
        listed = [model for model in reply.get("data") or [] if isinstance(model, dict)]
        server.model, server.engine = _served_model(server, listed, self._endpoints.model)

    async def _complete(self, conversation: str, body: dict[str, Any]) -> dict:
        server = self._choose(conversation)
        if not server.model:
            await self._meet(server)
        asked = {"model": server.model, **body, **self._sampling(server)}
        if server.engine == "vllm":
            asked["return_token_ids"] = True  # says exactly what was read and written
        server.asked += 1
        try:
            async with server.slots:
                reply = await self._request(server, "POST", "/chat/completions", asked)
        finally:
            server.asked -= 1
        if not isinstance(reply.get("choices"), list) or not reply["choices"]:
            raise self._failure(server, "sent no choices", to_blame=True)
        if (finish := reply["choices"][0].get("finish_reason")) not in _FINISHED:
            raise self._failure(server, f"ended an answer with {finish}", to_blame=True)
        self._has_answered(server)
        return reply

    def _has_answered(self, server: _Server) -> None:
        self._last_answer = time.monotonic()
        server.failures, server.rests_until = 0, 0.0

    def _choose(self, conversation: str) -> _Server:
        """The server that has the conversation's beginning in its cache, unless it rests or is full."""
        now, usual = time.monotonic(), int(sha256(conversation)[:8], 16) % len(self._servers)
        limit = self._endpoints.requests_per_url
        return min(
            self._servers,
            key=lambda server: (
                server.rests_until > now,
                server.asked >= limit,
                server is not self._servers[usual],
                server.asked,
            ),
        )

    async def _request(
        self,
        server: _Server,
        method: str,
        path: str,
        body: dict | None = None,
        timeout_s: float = math.inf,
    ) -> dict:
        """One exchange. Raises _Failed, _Refused or InputError."""
        timeout_s = min(timeout_s, self._endpoints.timeout_s)
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S, pool=None)
        try:
            response = await self._client.request(
                method, server.url + path, json=body, timeout=timeout
            )
            reply = response.json() if response.status_code == 200 else {}
        except (httpx.TransportError, ValueError) as error:
            reached = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            reason = f"{type(error).__name__}: {error}"
            raise self._failure(server, reason, to_blame=reached) from error
        status = response.status_code
        if status == 429:  # it works, on other answers
            self._last_answer = time.monotonic()
        if status in _PASSING:
            raise self._failure(
                server,
                f"{status} {_error_text(response)}",
                to_blame=status not in _OVERLOADED,
                retry_after_s=_retry_after_s(response),
            )
        if status in (401, 403):
            raise InputError(
                f"{server.url} refuses the API key ({status}); set endpoints.api_key_variable to the "
                "name of an environment variable that holds the right one"
            )
        if status == 404 or (path == "/models" and status != 200):
            raise InputError(
                f"{server.url}{path} answers {status}: {_error_text(response)}; check endpoints.urls and "
                "endpoints.model"
            )
        if status != 200 or not isinstance(reply, dict):
            self._has_answered(server)
            raise _Refused(f"{status}: {_error_text(response)}")
        return reply

    def _failure(
        self, server: _Server, reason: str, *, to_blame: bool, retry_after_s: float = 0
    ) -> _Failed:
        """Lets the server rest a while, longer after each failure in a row."""
        server.failures += 1
        pause_s = max(retry_after_s, min(2.0 ** min(server.failures - 3, 9), _LONGEST_PAUSE_S))
        server.rests_until = time.monotonic() + pause_s
        if server.failures in (1, 10, 100):
            log.warning("%s fails, %d in a row: %s", server.url, server.failures, reason)
        return _Failed(reason, to_blame=to_blame, retry_after_s=retry_after_s)


_backoff = wait_random_exponential(multiplier=0.5, max=_LONGEST_PAUSE_S)


def _pause(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    least_s = error.retry_after_s if isinstance(error, _Failed) else 0
    return max(least_s, _backoff(state))


# --- what is sent and received -----------------------------------------------------------------


def base_url(url: str) -> str:
    """The address before `/chat/completions`, without trailing slash; `/v1` where no path is given.

    Raises:
        InputError: it is no http address, or holds a password.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InputError(
            f"endpoint {url!r} is no http address; expected such as http://gpu1:8000/v1"
        )
    if "@" in parts.netloc:
        raise InputError(
            f"endpoint of {parts.hostname} holds a password; name an environment variable in "
            "endpoints.api_key_variable instead"
        )
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/v1", "", ""))


def _headers(variable: str) -> dict[str, str]:
    if not variable:
        return {}
    key = os.environ.get(variable)
    if not key:
        raise InputError(
            f"environment variable {variable!r} is not set; it is to hold the API key of the endpoints"
        )
    return {"Authorization": f"Bearer {key}"}


def _served_model(server: _Server, listed: list[dict], wanted: str) -> tuple[str, str]:
    """Name and engine of the model to ask for."""
    names = [str(model.get("id")) for model in listed]
    engines = {str(model.get("id")): str(model.get("owned_by") or "") for model in listed}
    if wanted and (wanted in names or not names):
        return wanted, engines.get(wanted, "")
    if not wanted and len(names) == 1:
        return names[0], engines[names[0]]
    shown = ", ".join(names[:5]) or "no model"
    raise InputError(
        f"{server.url} serves {shown}, expected {wanted or 'one model'}; set endpoints.model to the "
        "name under which it serves the target"
    )


def _for_server(message: Message) -> Message:
    """A message as servers check it: calls and results carry ids, reasoning both of its names."""
    message = dict(message)
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [
            {"id": f"call_{index}", "type": "function", **call} for index, call in enumerate(calls)
        ]
    if message["role"] == "tool":
        message.setdefault("tool_call_id", "call_0")
    if reasoning := message.get("reasoning_content"):
        message["reasoning"] = reasoning
    return message


def read_reply(chat: Chat, prompt: Prompt, prompt_text: str, reply: dict) -> Answer:
    """The first choice of a reply as an answer.

    Where the reply has token ids, or nothing but text, what was written is known and the message is checked
    to print it. Parts that the server has told apart (reasoning, calls) must at least be printed with the
    number of tokens that it counted. An answer that fails this is kept and counted as inexact.
    """
    choice, usage = reply["choices"][0], reply.get("usage") or {}
    cut = choice.get("finish_reason") == "length"
    num_tokens = usage.get("completion_tokens") or 0
    differs = _prompt_differs(chat.encode(prompt_text), reply)
    written = _written(chat, choice.get("token_ids") or [], cut)
    try:
        message = _message(choice.get("message") or {}, cut)
    except Malformed as error:
        return Answer(None, reason="call cannot be read", detail=str(error))
    plain = set(message) == {"role", "content"}
    if written is None and plain:
        written = message["content"]
    if written is not None:
        read, exact = read_text(chat, prompt, prompt_text, written, cut=cut)
        if exact or plain:
            return Answer(read, num_tokens, cut, exact, len(written) if exact else 0, differs)
    printed = _printed(chat, prompt, prompt_text, message, cut)
    if written is None and printed is not None:
        exact = (
            abs(len(chat.encode(printed)) - num_tokens) <= 1
        )  # an end token is not always counted
    else:
        exact = printed == written
    return Answer(message, num_tokens, cut, exact, len(printed or "") if exact else 0, differs)


def _prompt_differs(prompt_ids: list[int], reply: dict) -> bool:
    if ids := reply.get("prompt_token_ids"):
        return ids != prompt_ids
    counted = (reply.get("usage") or {}).get("prompt_tokens")
    return counted is not None and abs(counted - len(prompt_ids)) > 1


def _written(chat: Chat, tokens: list[int], cut: bool) -> str | None:
    """The text of an answer's tokens without its end token; None without tokens."""
    if not tokens:
        return None
    ended = not cut and tokens[-1] in {*chat.ends_of_turn, chat.tokenizer.eos_token_id}
    return chat.decode(tokens[:-1] if ended else tokens)


def _message(said: dict, cut: bool) -> Message:
    """A reply's message in the corpus' form. A call that was cut is no call."""
    message: Message = {"role": "assistant", "content": said.get("content") or ""}
    if reasoning := said.get("reasoning_content") or said.get("reasoning"):
        message["reasoning_content"] = reasoning.strip("\n")
        message["content"] = message["content"].lstrip("\n")
    calls = said.get("tool_calls") or []
    if cut and calls:
        raise Malformed("cut inside a call")
    if calls:
        # Without the server's ids: recorded results answer to ids of their own.
        message["tool_calls"] = [_without_id(tool_call(call)) for call in calls]
        message["content"] = message["content"].rstrip("\n") or None
    return message


def _without_id(call: dict) -> dict:
    return {key: value for key, value in call.items() if key != "id"}


def _printed(
    chat: Chat, prompt: Prompt, prompt_text: str, message: Message, cut: bool
) -> str | None:
    """What the template prints for the message, up to where the target stopped; None if it cannot."""
    try:
        shown = chat.render([*prompt.messages, message], prompt.tools, prompt=False)
    except Unrenderable:
        return None
    if not shown.startswith(prompt_text):
        return None
    printed = shown[len(prompt_text) :]
    if cut:
        last = (message["content"] or message["reasoning_content"]).strip()
        return printed[: printed.rindex(last) + len(last)] if last in printed else None
    tails = [tail for tail in chat.after_turn if printed.endswith(tail)]
    return printed.removesuffix(tails[0]) if tails else None


def _error_text(response: httpx.Response) -> str:
    """The server's own words, short."""
    try:
        error = response.json()
        error = error.get("error", error.get("detail", error.get("message", error)))
        error = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        error = response.text
    return " ".join(str(error).split())[:200]


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return min(float(response.headers.get("retry-after", 0)), 2 * _LONGEST_PAUSE_S)
    except ValueError:  # a date
        return 0.0
