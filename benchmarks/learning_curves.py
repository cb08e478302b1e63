r"""Acceptance length on held-out prompts against training steps, for decay and D-PACE, as table and picture.

    python benchmarks/learning_curves.py demo/demo.yaml --root data --hidden hidden/demo-... \
        --corpus corpora/demo-regenerated-... --picture docs/learning-curves.png

Everything before training is the pipeline's, reused where it exists. The target answers the prompts once;
every checkpoint of every run is then replayed on these answers (`dflash_core/replay.py`).
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from dflash_core import replay
from dflash_core import train as training
from dflash_core.checkpoint import load_drafter, read_shape, readable_steps
from dflash_core.config import EvaluateConfig, TrainConfig
from dflash_core.manifest import Dataset
from dflash_core.storage import Storage
from dflash_core.target import load_embedding_and_head
from flows.cli import load_params
from flows.params import PipelineParams

WEIGHTS = ("decay", "dpace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--root", required=True, help="folder or s3://bucket/prefix")
    parser.add_argument("--hidden", required=True, help="path of the hidden states under the root")
    parser.add_argument("--corpus", required=True, help="path of the corpus with the prompts")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", nargs="+", default=[], help="changes, such as train.num_steps=300")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    params = load_params(PipelineParams, options.config, [f"root={options.root}", *options.set])
    root = Storage.from_url(params.root)
    hidden, corpus = Dataset.open(root, options.hidden), Dataset.open(root, options.corpus)
    made: list[replay.Answer] = []
    embedding, head = (tensor.float() for tensor in load_embedding_and_head(params.target))
    curves: dict[str, list[dict[int, float]]] = {name: [] for name in WEIGHTS}
    seconds = []
    for seed in options.seeds:
        for name in WEIGHTS:
            changes = {"slot_weights": name, "seed": seed, "checkpoint_every": options.every}
            config = params.train.model_copy(update={**changes, "keep_checkpoints": 1000})
            start = time.perf_counter()
            run = trained(root, hidden, params, config)
            seconds.append(time.perf_counter() - start)
            if not made:
                asked = EvaluateConfig(
                    num_prompts=options.prompts, max_new_tokens=params.evaluate.max_new_tokens
                )
                taps = read_shape(run, 0).target_layer_ids
                made = replay.answers(corpus, params.target, taps, asked, params.runtime)
            curve = {}
            for step in readable_steps(run):
                drafter = load_drafter(run, step)[0].requires_grad_(False)
                curve[step] = replay.acceptance(drafter, embedding, head, made).decoded
            print(
                name, seed, {step: round(length, 3) for step, length in curve.items()}, flush=True
            )
            curves[name].append(curve)
    print(f"{torch.get_num_threads()} threads; {statistics.median(seconds):.0f} s for each run\n")
    print(table(curves))
    if options.picture:
        draw(curves, options.picture)


def trained(root: Storage, hidden: Dataset, params: PipelineParams, config: TrainConfig) -> Dataset:
    run = training.plan(root, "curves", hidden, params.target, config)
    training.run(run, hidden, params.target, params.runtime)
    return run


def table(curves: dict[str, list[dict[int, float]]]) -> str:
    """Mean and range over the seeds at each step."""
    lines = [f"| steps | {' | '.join(curves)} |", f"| --- |{' --- |' * len(curves)}"]
    for step in next(iter(curves.values()))[0]:
        cells = []
        for runs in curves.values():
            values = [run[step] for run in runs]
            mean, low, high = statistics.mean(values), min(values), max(values)
            cells.append(f"{mean:.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(curves: dict[str, list[dict[int, float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for colour, (name, runs) in zip(("tab:blue", "tab:orange"), curves.items(), strict=True):
        steps = list(runs[0])
        for run in runs:
            axes.plot(steps, list(run.values()), color=colour, alpha=0.3, linewidth=1)
        mean = [statistics.mean(run[step] for run in runs) for step in steps]
        axes.plot(steps, mean, color=colour, linewidth=2, marker="o", markersize=3, label=name)
    axes.set(xlabel="training steps", ylabel="acceptance length on held-out prompts")
    axes.grid(alpha=0.3)
    axes.legend(title="weights of the slots")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
