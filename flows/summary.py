"""The pipeline's one table: what each stage made, how long it took, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefect.utilities.urls import url_for
from rich import box
from rich.console import Console
from rich.table import Column, Table

from flows._common import StageResult


def print_table(stages: Sequence[StageResult], seconds: float, console: Console) -> None:
    """The table and, below it, where the drafter is."""
    table = Table("stage", "result", Column("seconds", justify="right"), box=box.SIMPLE_HEAD)
    for stage in stages:
        table.add_row(stage.stage, "\n".join(describe(stage)), _seconds(stage))
    table.add_section()
    table.add_row("all", "", f"{seconds:.1f}")
    console.print(table)
    export = stages[-1]
    for layout in export.facts["layouts"]:
        console.print(f"drafter for {layout}: {export.url}/{layout}", soft_wrap=True)


def markdown(stages: Sequence[StageResult]) -> str:
    """The table for the run's page: what came of each stage, where it lies, the page of its own run."""
    lines = ["| stage | result | seconds | data |", "| --- | --- | --- | --- |"]
    for stage in stages:
        page = url_for("flow-run", obj_id=stage.run_id)
        name = f"[{stage.stage}]({page})" if page else stage.stage
        cells = (name, "; ".join(describe(stage)), _seconds(stage), f"`{stage.url}`")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def describe(stage: StageResult) -> list[str]:
    """What a stage made, in a few short phrases."""
    return list(_DESCRIBE[stage.stage](stage.facts))


def _seconds(stage: StageResult) -> str:
    return "reused" if stage.reused else f"{stage.seconds:.1f}"


def _corpus(facts: dict) -> Iterable[str]:
    yield f"{facts['num_train']:,} train and {facts['num_held_out']:,} held-out rows"
    if "answers" in facts:
        yield f"{facts['answers']:,} answers by the target"
    if facts.get("rejected"):
        yield f"{sum(facts['rejected'].values()):,} rejected"


def _tokens(facts: dict) -> Iterable[str]:
    yield f"{facts['total_tokens']:,} tokens ({facts['supervised_tokens']:,} supervised)"
    yield f"{facts['num_packs']:,} packs of {facts['pack_tokens']:,}, {facts['fill']:.1%} full"


def _hidden(facts: dict) -> Iterable[str]:
    yield f"{facts['num_packs']:,} packs, {facts['size_bytes'] / 1e6:,.1f} MB"
    yield f"taps {facts['target_layer_ids']}"


def _runs(facts: dict) -> Iterable[str]:
    yield f"{facts['num_steps']:,} steps of a {facts['num_parameters'] / 1e6:,.1f} M drafter"
    yield f"loss {facts['loss']:.2f}, simulated acceptance {facts['acceptance_length']:.2f}"


def _evaluations(facts: dict) -> Iterable[str]:
    before, after = facts["before"], facts["after"]
    low, high = after["interval"]
    yield (
        f"acceptance length {before['acceptance_length']:.2f} -> {after['acceptance_length']:.2f} "
        f"[{low:.2f}, {high:.2f}] of {facts['num_drafts'] + 1}"
    )
    if after["num_lossless"] is not None:
        yield f"lossless on {after['num_lossless']} of {after['num_prompts']} prompts"
    yield f"speed-up {after['speed_up']:.2f}x over plain decoding here"


def _served(facts: dict) -> Iterable[str]:
    for level in facts["levels"]:
        length = level["acceptance_length"]
        yield (
            f"{level['concurrency']} at a time: acceptance length "
            f"{'-' if length is None else f'{length:.2f}'}, {level['tokens_per_s']:.1f} tokens/s"
        )


def _exports(facts: dict) -> Iterable[str]:
    yield f"layouts {', '.join(facts['layouts'])}, reloaded logits equal"


_DESCRIBE = {
    "curate": _corpus,
    "regenerate": _corpus,
    "tokenize": _tokens,
    "extract": _hidden,
    "train": _runs,
    "evaluate": _evaluations,
    "served": _served,
    "export": _exports,
}
