"""Where a run's numbers go besides its own records: a picture, TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib
import io
import logging
from pathlib import Path
from typing import Any

from dflash_core.config import Runtime
from dflash_core.errors import InputError

log = logging.getLogger(__name__)

_POINTS = 400  # of a curve in the picture; a longer run is averaged


class TrainingLog:
    """Sends the numbers of each step to TensorBoard and Weights & Biases, where the runtime names them.

    Raises:
        InputError: a package that is asked for is not installed.
    """

    def __init__(self, runtime: Runtime, run_path: str) -> None:
        self._board: Any = None
        self._wandb: Any = None
        if runtime.tensorboard_folder:
            board = _needed("torch.utils.tensorboard", "tensorboard_folder", "tensorboard")
            self._board = board.SummaryWriter(str(Path(runtime.tensorboard_folder) / run_path))
        if runtime.wandb_project:
            wandb = _needed("wandb", "wandb_project", "wandb")
            # The id makes a resumed run go on in its own curve.
            name = run_path.rpartition("/")[2]
            self._wandb = wandb.init(
                project=runtime.wandb_project, id=name, name=name, resume="allow"
            )

    def write(self, entry: dict[str, Any]) -> None:
        numbers = flat_numbers(entry)
        if self._board:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, entry["step"])
        if self._wandb:
            self._wandb.log(numbers, step=entry["step"])

    def close(self) -> None:
        if self._board:
            self._board.close()
        if self._wandb:
            self._wandb.finish()


def _needed(module: str, field: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(
            f"runtime.{field} is set and the package {package} is not installed; pip install {package}, or "
            "leave it empty"
        ) from error


def flat_numbers(entry: dict[str, Any]) -> dict[str, float]:
    """The numbers of an entry by name; the accuracy of each slot is one of its own."""
    numbers = {
        name: float(value) for name, value in entry.items() if isinstance(value, (int, float))
    }
    del numbers["step"]
    for slot, value in enumerate(entry["accuracy"], 1):
        numbers[f"accuracy/{slot}"] = value
    return numbers


def picture(entries: list[dict[str, Any]]) -> bytes | None:
    """A PNG: loss, acceptance length and accuracy by slot against steps; None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.info("matplotlib is not installed, so there is no picture of the training")
        return None
    figure = Figure(figsize=(12, 3.5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    width = -(-len(entries) // _POINTS)
    parts = [entries[start : start + width] for start in range(0, len(entries), width)]
    steps = [part[-1]["step"] for part in parts]
    left.plot(steps, [_mean(part, "loss") for part in parts])
    left.set(xlabel="steps", ylabel="loss")
    middle.plot(steps, [_mean(part, "acceptance_length") for part in parts], label="training text")
    checked = [entry for entry in entries if "held_out_acceptance_length" in entry]
    if checked:
        values = [entry["held_out_acceptance_length"] for entry in checked]
        middle.plot([entry["step"] for entry in checked], values, "o-", label="held-out prompts")
    middle.set(xlabel="steps", ylabel="acceptance length")
    middle.legend()
    for slot in range(len(entries[0]["accuracy"])):
        values = [sum(e["accuracy"][slot] for e in part) / len(part) for part in parts]
        right.plot(steps, values, label=f"{slot + 1}")
    right.set(xlabel="steps", ylabel="accuracy by predicting slot", ylim=(0, 1.02))
    right.legend(ncols=2, fontsize="small")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=100)
    return data.getvalue()


def _mean(entries: list[dict[str, Any]], name: str) -> float:
    return sum(entry[name] for entry in entries) / len(entries)
