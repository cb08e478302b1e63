"""`dflash store`: plan, status, verify, repair, gc, export-sample of a hidden-state store; unite several."""

from __future__ import annotations

import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dflash_core.config import DEFAULT_CARD
from dflash_core.errors import InputError
from flows.store_params import PlanParams

if TYPE_CHECKING:
    from dflash_core.manifest import Dataset

app = typer.Typer(help="Keep a hidden-state store.", no_args_is_help=True)
console = Console()

Root = Annotated[str, typer.Option(help="Folder or s3://bucket/prefix.")]
Path_ = Annotated[str, typer.Argument(metavar="STORE", help="Such as hidden/demo-0123456789ab.")]
LEVELS = ("index", "list", "full")


def _open(root: str, path: str) -> Dataset:
    from dflash_core.storage import Storage
    from dflash_core.store import open_store

    return open_store(Storage.from_url(root), path)


@app.command()
def plan(
    tokens: Annotated[str, typer.Argument(help="Such as tokens/demo-0123456789ab.")] = "",
    target: Annotated[str, typer.Option(help="Hugging Face id or folder.")] = "",
    tokens_per_s: Annotated[
        float, typer.Option(help="Measured rate of one GPU; 0 estimates it for --card.")
    ] = 0,
    card: Annotated[str, typer.Option(help="Such as h100 or rtx-pro-6000.")] = DEFAULT_CARD,
    root: Root = "data",
    overrides: Annotated[
        list[str],
        typer.Option(
            "--set", "-s", metavar="KEY=VALUE", help="Such as extract.codec=zstd; see --parameters."
        ),
    ] = [],  # noqa: B006 - typer copies it
    parameters: Annotated[
        bool, typer.Option("--parameters", help="List every parameter and stop.")
    ] = False,
) -> None:
    """Tokens, packs, objects, bytes, device hours and dollars, before anything is spent."""
    from flows.cli import given, load_params, named, parameter_table

    if parameters:
        console.print(parameter_table(PlanParams))
        return
    overrides = [*overrides, *named(root, target), given("tokens", tokens), given("card", card)]
    if tokens_per_s:
        overrides.append(given("tokens_per_s", tokens_per_s))
    params = load_params(PlanParams, None, overrides)

    from dflash_core import store
    from dflash_core.manifest import Dataset
    from dflash_core.storage import Storage

    estimate = store.estimate(
        Dataset.open(Storage.from_url(params.root), params.tokens),
        params.target,
        params.extract,
        tokens_per_s=params.tokens_per_s,
        card=params.card,
        dollars_per_gb_month=params.dollars_per_gb_month,
    )
    for name, value in asdict(estimate).items():
        text = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
        console.print(f"{name.replace('_', ' '):18} {text}")


@app.command()
def status(store: Path_, root: Root = "data") -> None:
    """Packs committed and missing, and what the store was computed from."""
    from dflash_core.store import status as look

    found = look(_open(root, store))
    console.print(f"{found.num_committed:,} of {found.num_packs:,} packs committed")
    console.print(f"{found.num_samples:,} samples")
    size = "" if found.size_bytes is None else f", {found.size_bytes / 1e9:,.3f} GB"
    console.print(f"sealed{size}" if found.sealed else "not sealed")
    table = Table("contract and layout", "value", box=None, pad_edge=False)
    for name, value in {**found.contract, **found.layout}.items():
        table.add_row(name, str(value))
    console.print(table)


@app.command()
def verify(
    store: Path_,
    root: Root = "data",
    level: Annotated[str, typer.Option(help="index, list or full; see the docs.")] = "list",
    sample: Annotated[float, typer.Option(min=0, max=1, help="Share that full reads.")] = 1.0,
) -> None:
    """Exit status 0 when nothing is wrong, else 1 and one line for each bad pack."""
    findings = _findings(_open(root, store), level, sample)
    _print(findings)
    sys.exit(1 if findings else 0)


@app.command()
def repair(
    store: Path_,
    root: Root = "data",
    level: Annotated[
        str, typer.Option(help="How thoroughly to look: index, list or full.")
    ] = "full",
    yes: Annotated[bool, typer.Option(help="Do it; without, only say what would be done.")] = False,
) -> None:
    """Turns bad packs into work for the extract stage; a dry run unless --yes."""
    from dflash_core.store import repair as mend

    dataset = _open(root, store)
    findings = _findings(dataset, level, 1.0)
    _print(findings)
    if findings and yes:
        mend(dataset, findings)
        console.print("these packs are missing now; run the extract stage again to fill them")
    elif findings:
        console.print("nothing changed; --yes turns these packs into work")


@app.command()
def gc(
    store: Path_,
    root: Root = "data",
    hours: Annotated[float, typer.Option(help="Leave what is younger: its writer may live.")] = 24,
    yes: Annotated[bool, typer.Option(help="Delete; without, only say what would be.")] = False,
) -> None:
    """Objects that no commit record names; a dry run unless --yes."""
    from dflash_core.store import clear, garbage

    dataset = _open(root, store)
    found = garbage(dataset, older_than=timedelta(hours=hours))
    size = sum(info.size for info in found)
    verb = "deleted" if yes else "would delete"
    if yes:
        clear(dataset, found)
    console.print(f"{verb} {len(found):,} objects, {size / 1e6:,.1f} MB")


@app.command()
def export_sample(
    store: Path_,
    index: Annotated[int, typer.Argument(help="Sample index.")],
    out: Annotated[Path, typer.Argument(help="safetensors file to write.")],
    root: Root = "data",
) -> None:
    """Hidden states, token ids and loss mask of one sample as a safetensors file."""
    from dflash_core.store import export_sample as export

    data = export(_open(root, store), index)
    out.write_bytes(data)
    console.print(f"wrote {out}, {len(data):,} bytes")


@app.command()
def unite(
    stores: Annotated[list[str], typer.Argument(metavar="STORE STORE ...")],
    name: Annotated[str, typer.Option(help="It becomes hidden/NAME-<fingerprint>.")] = "all",
    root: Root = "data",
) -> None:
    """One path for several complete stores of a target: training reads them as one; nothing is copied."""
    from dflash_core import union
    from dflash_core.storage import Storage

    dataset = union.unite(Storage.from_url(root), name, stores)
    facts = dataset.facts
    console.print(f"{dataset.path}: {facts['num_packs']:,} packs, {facts['num_samples']:,} samples")


def _findings(dataset: Dataset, level: str, sample: float) -> list[Any]:
    from dflash_core.store import verify as check

    if level not in LEVELS:
        raise InputError(f"level {level!r} is not known; use one of {', '.join(LEVELS)}")
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("packs read", total=None, visible=level == "full")

        def progress(done: int, total: int, _numbers: dict[str, float]) -> None:
            bar.update(task, completed=done, total=total)

        return check(dataset, level, sample=sample, progress=progress)


def _print(findings: list[Any]) -> None:
    for finding in findings:
        console.print(f"pack {finding.pack}: {finding.problem}", soft_wrap=True, highlight=False)
    console.print("nothing is wrong" if not findings else f"{len(findings)} bad packs")
