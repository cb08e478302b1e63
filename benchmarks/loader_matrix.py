"""Layout x loader: are the logits of an exported drafter equal, or is it refused, and why. A Markdown table.

    PYTHONPATH=.:.venv/peers python benchmarks/loader_matrix.py

`make .venv/peers` installs the packages that are compared with. The target is a tiny random Qwen3, the
drafters are random. vLLM and SGLang are not run: for those the table says what their own rules make of
config.json (dflash_core/engines.py).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dflash_core import export
from dflash_core.config import ExportConfig, TargetConfig
from dflash_core.engines import ENGINES, Unreadable, require_servable, verdict
from dflash_core.errors import InputError
from dflash_core.import_drafter import read_drafter
from dflash_core.storage import Storage
from dflash_core.target import load_embedding_and_head
from tests import targets
from tests.loaders import LOADERS, Refused
from tests.runs import sealed_run, sealed_tokens_run

WINDOW = 64  # longer than any document of the random pack
CASES = [
    *(("z-lab", attention, {}) for attention in ("full-bidir", "swa-causal", "swa-bidir", "mixed")),
    ("z-lab", "full-bidir", {"weights": "int8"}),
    ("z-lab", "full-bidir", {"weights": "fp8"}),
    ("z-lab", "full-bidir", {"draft_vocab_size": 64}),
    *(
        ("speculators", attention, {})
        for attention in ("full-bidir", "swa-causal", "swa-bidir", "mixed")
    ),
    ("speculators", "full-bidir", {"draft_vocab_size": 64}),
    ("speculators", "full-bidir", {"weights": "int8"}),
]
SERVING = [engine for engine in ENGINES if not engine.startswith("z-lab")]


def main() -> None:
    torch.set_num_threads(1)
    columns = ["layout", "drafter", *LOADERS, *(f"{engine} (its rules)" for engine in SERVING)]
    lines, notes = [_line(columns), _line(["---"] * len(columns))], []
    with tempfile.TemporaryDirectory() as folder:
        target = targets.qwen3(Path(folder) / "target")
        for number, (layout, attention, options) in enumerate(CASES):
            label = ", ".join([attention, *(f"{key} {value}" for key, value in options.items())])
            cells = list(_cells(Path(folder) / str(number), target, layout, attention, options))
            for index, cell in enumerate(cells):
                if cell.startswith("refused: "):
                    reason = cell.removeprefix("refused: ")
                    if reason not in notes:
                        notes.append(reason)
                    cells[index] = f"refused ({notes.index(reason) + 1})"
            lines.append(_line([layout, label, *cells]))
    print("\n".join(lines), end="\n\n")
    for number, reason in enumerate(notes, 1):
        print(f"{number}. {reason}")


def _cells(
    folder: Path, target: TargetConfig, layout: str, attention: str, options: dict[str, Any]
) -> Iterator[str]:
    root = Storage.from_url(str(folder))
    make = sealed_tokens_run if "draft_vocab_size" in options else sealed_run
    run = make(root, target, attention=attention, sliding_window=WINDOW, factor=1.1234567)
    config = ExportConfig(layouts=[layout], target_name=target.id, **options)
    try:
        dataset = export.plan(root, "demo", run, target, config)
    except InputError as error:
        yield from [f"refused: {error}"] * (len(LOADERS) + len(SERVING))
        return
    export.run(dataset, run, target)
    path = dataset.storage.local_path
    assert path is not None
    ends, place = load_embedding_and_head(target), path / layout
    want = LOADERS["this project"](place, *ends)
    for name, loader in LOADERS.items():
        try:
            difference = (want - loader(place, *ends)).abs().max().item()
        except Refused as error:
            yield f"refused: {name} {error}"
        except ImportError as error:
            yield f"not installed ({error.name})"
        else:
            yield (
                f"equal ({difference:.1e})"
                if difference <= 1e-5
                else f"DIFFERENT ({difference:.1e})"
            )
    body, shape = json.loads((place / "config.json").read_text()), read_drafter(place).shape
    for engine in SERVING:
        try:
            problems = verdict(engine, body, shape)
        except Unreadable as error:
            yield f"refused: {engine}: {error}"
        else:
            yield "as trained" if not problems else f"DIFFERENT: {problems[0]}"
    require_servable(body, shape)


def _line(cells) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
