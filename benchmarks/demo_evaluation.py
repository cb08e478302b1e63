"""The demo drafter's evaluation report: chains and trees, greedy and sampled, bfloat16, INT8 and FP8.

    dflash run demo/demo.yaml
    python benchmarks/demo_evaluation.py demo/demo.yaml --root data --picture docs/evaluation-demo.png

Takes the finished run under the root, exports it in 8 bits too, and decodes the same held-out prompts with
everything. Prints report.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dflash_core import evaluation, export
from dflash_core.config import DrafterSource, EvaluateConfig, ExportConfig
from dflash_core.manifest import Dataset
from dflash_core.model_card import lineage
from dflash_core.storage import Storage
from flows.cli import load_params
from flows.params import PipelineParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--root", required=True, help="folder or s3://bucket/prefix")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--trees", type=int, nargs="*", default=[16])
    parser.add_argument("--weights", nargs="*", default=["int8", "fp8"], help="exports to compare")
    parser.add_argument("--picture", type=Path, help="where to copy acceptance.png")
    options = parser.parse_args()
    params = load_params(PipelineParams, options.config, [f"root={options.root}"])
    root = Storage.from_url(params.root)
    run = _finished_run(root, params.name)
    corpus = next(parent for parent in lineage(run) if parent.stage == "corpora")
    compare = [_exported(root, run, params, weights) for weights in options.weights]
    config = EvaluateConfig(
        num_prompts=options.prompts,
        num_untrained_prompts=params.evaluate.num_untrained_prompts,
        max_new_tokens=params.evaluate.max_new_tokens,
        temperatures=options.temperatures,
        tree_nodes=options.trees,
    )
    dataset = evaluation.plan(root, "report", run, corpus, params.target, config, compare)
    evaluation.run(dataset, run, params.target, params.runtime, compare=compare)
    evaluation.seal(dataset)
    print(dataset.storage.get("report.md").decode())
    if options.picture and dataset.storage.exists("acceptance.png"):
        options.picture.write_bytes(dataset.storage.get("acceptance.png"))


def _finished_run(root: Storage, name: str) -> Dataset:
    """The complete training run of this name; the newest when there are several."""
    found = sorted(
        (info.modified, info.key.split("/")[0])
        for info in root.child("runs").list()
        if info.key.endswith("/manifest.json") and info.key.startswith(f"{name}-")
    )
    return Dataset.open(root, f"runs/{found[-1][1]}")


def _exported(root: Storage, run: Dataset, params: PipelineParams, weights: str) -> DrafterSource:
    config = ExportConfig.model_validate({"weights": weights})
    dataset = export.plan(root, f"report-{weights}", run, params.target, config)
    export.run(dataset, run, params.target)
    export.seal(dataset)
    return DrafterSource(name=weights, source=f"{dataset.url}/z-lab")


if __name__ == "__main__":
    main()
