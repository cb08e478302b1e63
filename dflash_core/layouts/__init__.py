"""On-disk layouts of drafters: one module for each, registered by name below.

A new layout is a new module with the functions of `Layout` and one line in LAYOUTS.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

from dflash_core.errors import InputError
from dflash_core.layouts import speculators, zlab
from dflash_core.model import DrafterShape


class Layout(Protocol):
    """What a module of this folder offers."""

    def config_json(
        self,
        shape: DrafterShape,
        target_text_config: Any,
        target_name: str,
        draft_vocab_size: int | None = None,
    ) -> dict:
        """The config.json of a drafter.

        Args:
            target_text_config: the target's text configuration (Hugging Face names).
            target_name: hub id or folder of the target, for engines that load it by themselves.
            draft_vocab_size: rows of a head of its own over a reduced vocabulary; None for the target's.

        Raises:
            InputError: the layout cannot say what the drafter computes.
        """
        ...

    def shape_from_config(self, body: dict, num_target_layers: int | None) -> DrafterShape:
        """The shape that a config.json describes; the inverse of `config_json`.

        The window of a drafter without sliding layers is not in the file; it comes back as the default.

        Args:
            num_target_layers: layers of the target, for files that do not name it.

        Raises:
            InputError: another algorithm, or something that would change the computation unseen.
        """
        ...

    def recognises(self, body: dict) -> bool:
        """Whether a config.json is of this layout."""
        ...


LAYOUTS = cast("dict[str, Layout]", {"z-lab": zlab, "speculators": speculators})


def layout_of(body: dict) -> str:
    """Name of the layout that a config.json is written in. Raises InputError for none that is known."""
    for name, layout in LAYOUTS.items():
        if layout.recognises(body):
            return name
    raise InputError(
        f"config.json is of no known drafter (architectures {body.get('architectures')!r}); expected one of "
        f"the layouts {', '.join(LAYOUTS)}"
    )
