"""Tool calling: single-turn questions of the Berkeley leaderboard, from the package bfcl-eval."""

from __future__ import annotations

from dflash_core.config import SourceConfig

SOURCE = SourceConfig(name="tool-calling", reader="bfcl")
