"""The pipeline for several training seeds, as one table: acceptance before and after, losslessness, seconds.

    python benchmarks/demo_seeds.py demo/demo.yaml --root data --seeds 0 1 2

Everything up to the hidden states is computed by the first seed and reused by the others.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from flows.cli import load_params, run_flow
from flows.params import PipelineParams
from flows.summary import StageResult

COLUMNS = "seed", "before", "after", "95 % interval", "lossless", "train s", "evaluate s", "total s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--root", required=True, help="folder or s3://bucket/prefix")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    lines = [_line(COLUMNS), _line(["---"] * len(COLUMNS))]
    for seed in options.seeds:
        overrides = [f"root={options.root}", f"train.seed={seed}"]
        params = load_params(PipelineParams, options.config, overrides)
        start = time.perf_counter()
        stages = run_flow("pipeline", params)
        lines.append(_line(_cells(seed, stages, time.perf_counter() - start)))
    print("\n".join(lines))


def _cells(seed: int, stages: Sequence[StageResult], seconds: float) -> list[str]:
    """One row; stages that an earlier seed computed cost nothing and are named beside the total."""
    by_name = {stage.stage: stage for stage in stages}
    before, after = by_name["evaluate"].facts["before"], by_name["evaluate"].facts["after"]
    low, high = after["interval"]
    reused = [stage.stage for stage in stages if stage.reused]
    return [
        f"{seed}",
        f"{before['acceptance_length']:.2f}",
        f"{after['acceptance_length']:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{after['num_lossless']} of {after['num_prompts']}",
        *(_seconds(by_name[name]) for name in ("train", "evaluate")),
        f"{seconds:.0f}" + (f", reused: {', '.join(reused)}" if reused else ""),
    ]


def _seconds(stage: StageResult) -> str:
    return "reused" if stage.reused else f"{stage.seconds:.0f}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
