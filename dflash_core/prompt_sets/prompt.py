"""One question of a prompt set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Prompt:
    """What is asked."""

    messages: list[dict]
    """The conversation up to where the target answers; OpenAI chat form."""
    tools: Any = None
    """Functions it may call."""
    group: str = ""
    """What it is about, for reports; empty for nothing in particular."""
    follow_ups: list[str] = field(default_factory=list)
    """What the user says next, each after the target's own answer to what was asked before."""


def asked(text: str, **more: Any) -> Prompt:
    """A single user message."""
    return Prompt([{"role": "user", "content": text}], **more)
