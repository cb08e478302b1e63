"""Cuts the `-gencode` pairs of a CUDA extension's setup.py down to one architecture.

    python deployments/one_architecture.py setup.py 90

The setup.py of causal-conv1d appends a pair for every card there is and ignores TORCH_CUDA_ARCH_LIST.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAIR = re.compile(
    r'^(\s*)cc_flag\.append\("-gencode"\)\n\s*cc_flag\.append\("arch=compute_(\d+),code=sm_\d+"\)$',
    re.MULTILINE,
)


def only(text: str, architecture: str) -> str:
    """The setup.py with the pairs of other architectures replaced by nothing.

    Raises:
        ValueError: it has no pair for this architecture.
    """
    known = [pair[2] for pair in PAIR.finditer(text)]
    if architecture not in known:
        raise ValueError(
            f"setup.py knows the architectures {', '.join(known) or 'none'}, not {architecture}; "
            "this release does not fit the card, or builds in another way"
        )
    return PAIR.sub(
        lambda pair: pair[0] if pair[2] == architecture else f"{pair[1]}pass  # not this card", text
    )


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(only(file.read_text(), sys.argv[2]))
