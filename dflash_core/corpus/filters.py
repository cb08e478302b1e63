"""Readable conversations that are not fit to learn from, each with its reason, and secrets.

Filters look at answers, because answers are what a drafter learns; secrets are looked for everywhere.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

from dflash_core.config import FilterConfig
from dflash_core.corpus.rows import (
    Malformed,
    Message,
    Row,
    num_answer_characters,
    num_characters,
)
from dflash_core.errors import InputError

WINDOW = 2000  # characters that are compressed together
_SHORTEST = 1000  # zlib's own few bytes would count below that
_LANGUAGE_SAMPLE = 2000  # characters from which the language is told

_CONTROL = "\\x00-\\x08\\x0b\\x0e-\\x1f\\x7f"  # a form feed is at home in source code
_BROKEN_ASCII = re.compile(f"[{_CONTROL}]")
_BROKEN = re.compile(
    f"[{_CONTROL}\\x80-\\x9f\\ufffd-\\uffff]|\u00c3[\u0080-\u00bf]|\u00e2\u20ac[\u2122\u0153\u009d\u201c\u201d\u00a6]"
)
_REFUSAL = re.compile(
    r"(?:i(?:'|\u2019)?m (?:very |really )?sorry|i apologi[sz]e|sorry|unfortunately|as an ai)\b[^.\n]{0,80}"
    r"\b(?:can(?:'|\u2019)?t|cannot|can not|unable|won(?:'|\u2019)?t|not able|do not|don(?:'|\u2019)?t)\b"
    r"|i (?:can(?:'|\u2019)?t|cannot|won(?:'|\u2019)?t|am unable to|am not able to|will not) "
    r"(?:help|assist|comply|fulfil|provide|create|do|answer|engage|continue)",
    re.IGNORECASE,
)
# A word begins here, or behind an escape in the JSON text of arguments, as in "\\nAKIA...".
_START = r"(?:\b|(?<=\\[nrt]))"
_KEY = r"[A-Za-z0-9_-]"
SECRETS = {
    "private-key": (
        ("PRIVATE KEY-----",),
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----",
    ),
    "aws-access-key": (("AKIA", "ASIA"), rf"{_START}(?:AKIA|ASIA)[A-Z0-9]{{16}}\b"),
    "github-token": (
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        rf"{_START}(?:gh[pousr]_[A-Za-z0-9]{{36,}}|github_pat_[A-Za-z0-9_]{{50,}})",
    ),
    "gitlab-token": (("glpat-",), rf"{_START}glpat-{_KEY}{{20,}}"),
    "slack-token": (("xox",), rf"{_START}xox[abprs]-[A-Za-z0-9-]{{20,}}"),
    "google-api-key": (("AIza",), rf"{_START}AIza{_KEY}{{35}}"),
    "anthropic-key": (("sk-ant-",), rf"{_START}sk-ant-{_KEY}{{32,}}"),
    "openai-key": (
        ("sk-",),
        rf"{_START}sk-(?:(?:proj|svcacct|admin)-{_KEY}{{40,}}|[A-Za-z0-9]{{40,}})",
    ),
    "stripe-key": (("k_live_",), rf"{_START}[rs]k_live_[A-Za-z0-9]{{20,}}"),
    "hugging-face-token": (("hf_",), rf"{_START}hf_[A-Za-z0-9]{{34,}}"),
    "npm-token": (("npm_",), rf"{_START}npm_[A-Za-z0-9]{{36}}"),
    "json-web-token": (
        ("eyJ",),
        rf"{_START}eyJ{_KEY}{{10,}}\.eyJ{_KEY}{{10,}}\.{_KEY}{{10,}}",
    ),
}
"""Secrets by kind: texts of which one is in each, since looking for those is a hundred times faster, and
a regular expression."""

_MARKS = [mark for marks, _ in SECRETS.values() for mark in marks]
_PATTERNS = {kind: re.compile(pattern, re.DOTALL) for kind, (_, pattern) in SECRETS.items()}


def require_fit(row: Row, config: FilterConfig) -> None:
    """Raises Malformed with the first reason for which the row is unfit."""
    characters, answered = num_characters(row), num_answer_characters(row)
    if characters > config.max_characters:
        raise Malformed("too many characters", characters)
    answers = [message for message in row.messages if message["role"] == "assistant"]
    if not answers:
        return
    if answered < config.min_answer_characters:
        raise Malformed("answers are too short", answered)
    if answered < config.min_supervised_share * characters:
        raise Malformed("too small a share is answers", f"{answered / characters:.3f}")
    if config.broken_unicode == "reject":
        _require_whole_unicode(answers)
    if config.max_compression:
        _require_no_loop(answers, config.max_compression)
    if config.refusals == "reject":
        _require_no_refusal(answers)
    if config.languages:
        _require_language(row.messages, config.languages)


def cleared_of_secrets(value: Any, config: FilterConfig, redacted: Counter[str]) -> Any:
    """A JSON value, such as messages and tools, with its secrets redacted and counted by kind.

    Raises:
        Malformed: there is one, and such rows are to be rejected.
    """
    if config.secrets == "keep":
        return value
    text = json.dumps(value, ensure_ascii=False)
    if not any(map(text.__contains__, _MARKS)):
        return value
    kinds = [kind for kind, pattern in _PATTERNS.items() if _has(text, kind, pattern)]
    if kinds and config.secrets == "reject":
        raise Malformed("secret", kinds[0])  # never the secret itself
    return _cleared(value, kinds, redacted) if kinds else value


def redacted_text(text: str) -> str:
    """A text for a report, without the secrets that it may quote."""
    for kind, pattern in _PATTERNS.items():
        text = pattern.sub(f"<redacted:{kind}>", text)
    return text


def _has(text: str, kind: str, pattern: re.Pattern[str]) -> bool:
    marks, _ = SECRETS[kind]
    return any(mark in text for mark in marks) and pattern.search(text) is not None


def _cleared(value: Any, kinds: list[str], redacted: Counter[str]) -> Any:
    if isinstance(value, dict):
        return {key: _cleared(item, kinds, redacted) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleared(item, kinds, redacted) for item in value]
    if isinstance(value, str):
        for kind in kinds:
            value, times = _PATTERNS[kind].subn(f"<redacted:{kind}>", value)
            redacted[kind] += times
    return value


def _texts(messages: list[Message]) -> list[str]:
    texts = [message.get(key) for message in messages for key in ("reasoning_content", "content")]
    return [text for text in texts if text]


def _require_whole_unicode(answers: list[Message]) -> None:
    for text in _texts(answers):
        if match := (_BROKEN_ASCII if text.isascii() else _BROKEN).search(text):
            around = text[max(0, match.start() - 20) : match.end() + 20]
            raise Malformed("broken Unicode", ascii(around))


def _require_no_loop(answers: list[Message], max_compression: float) -> None:
    for text in _texts(answers):
        if len(text) < _SHORTEST:
            continue
        for start in range(0, max(len(text) - _SHORTEST, 1), WINDOW):
            window = text[start : start + WINDOW].encode()
            if len(window) > max_compression * len(zlib.compress(window, 1)):
                raise Malformed("repetitive answer", ascii(text[start : start + 60]))


def _require_no_refusal(answers: list[Message]) -> None:
    for answer in answers:
        if match := _REFUSAL.match((answer.get("content") or "").lstrip()):
            raise Malformed("refusal", match.group()[:80])


def _require_language(messages: list[Message], languages: list[str]) -> None:
    texts = [message["content"] for message in messages if message["role"] in ("user", "assistant")]
    sample = "\n".join(text for text in texts if text)[:_LANGUAGE_SAMPLE]
    language = _language_of()(sample)
    if language not in languages:
        raise Malformed("another language", language)


@cache
def _language_of() -> Callable[[str], str]:
    try:
        from py3langid import classify
    except ImportError as error:
        raise InputError(
            "filters.languages needs the package py3langid; install it with: uv pip install -e '.[curate]'"
        ) from error
    return lambda text: str(classify(text)[0])
