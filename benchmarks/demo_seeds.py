"""The pipeline for several training seeds, as one table: acceptance before and after, losslessness, seconds.

    python benchmarks/demo_seeds.py demo/demo.yaml data 0 1 2

All stages up to the hidden states are computed once and reused.
"""

from __future__ import annotations

import sys
from pathlib import Path

from flows.cli import load_params, run_flow
from flows.params import PipelineParams

COLUMNS = "seed", "before", "after", "95 % interval", "lossless", "train s", "evaluate s"


def main(config: str, root: str, *seeds: str) -> None:
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
    for seed in seeds:
        overrides = [f"root={root}", f"train.seed={seed}"]
        stages = run_flow("pipeline", load_params(PipelineParams, Path(config), overrides))
        by_name = {stage.stage: stage for stage in stages}
        evaluate, train = by_name["evaluate"], by_name["train"]
        before, after = evaluate.facts["before"], evaluate.facts["after"]
        low, high = after["interval"]
        cells = (
            seed,
            f"{before['acceptance_length']:.2f}",
            f"{after['acceptance_length']:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{after['num_lossless']} of {after['num_prompts']}",
            "reused" if train.reused else f"{train.seconds:.0f}",
            "reused" if evaluate.reused else f"{evaluate.seconds:.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
