"""`dflash tokens`: look at what a drafter will be trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash_core.config import TargetConfig
from dflash_core.errors import InputError, MismatchError

if TYPE_CHECKING:
    from dflash_core.tokenization import Tokens

app = typer.Typer(help="Look into a tokens dataset.", no_args_is_help=True)
console = Console()

Root = Annotated[str, typer.Option(help="Folder or s3://bucket/prefix.")]
Path_ = Annotated[
    str,
    typer.Argument(
        metavar="[TOKENS]",
        help="Such as tokens/demo-0123456789ab; may be left out when there is one.",
    ),
]
SUPERVISED, CONTEXT = "bold green", "dim"


@app.command()
def show(
    tokens: Path_ = "",
    index: Annotated[int, typer.Option(min=0, help="Sample index.")] = 0,
    root: Root = "data",
    target: Annotated[
        str, typer.Option(help="Where the tokenizer is; the one that made the tokens if left out.")
    ] = "",
) -> None:
    """Prints a sample as the target read it; what it is trained on is green, or in ⟦brackets⟧ where colours are lost."""
    import numpy as np

    from dflash_core.target import identify, load_tokenizer

    opened = _open(root, tokens)
    if index >= opened.num_samples:
        raise InputError(f"index {index} is out of range; there are {opened.num_samples:,} samples")
    made_by = TargetConfig(**opened.dataset.facts.get("target", {}))
    config = made_by.model_copy(update={"id": target}) if target else made_by
    expected, found = opened.contract["tokenizer_hash"], identify(config).tokenizer_hash
    if found != expected:
        raise MismatchError(
            f"{opened.dataset.path} was made with tokenizer {expected[:12]}, {config.id} has {found[:12]}; "
            "name the right one with --target"
        )
    tokenizer = load_tokenizer(config)
    ids, mask = opened.sample(index)
    console.print(
        f"sample {index:,} of {opened.num_samples:,}: {len(ids):,} tokens, {int(mask.sum()):,} supervised; "
        f"pack {opened.pack[index]}, row {opened.row[index]}",
        highlight=False,
    )
    text = Text()
    borders = np.flatnonzero(np.diff(mask)) + 1
    for part, supervised in zip(np.split(ids, borders), np.split(mask, borders), strict=True):
        said = str(tokenizer.decode(part.tolist(), clean_up_tokenization_spaces=False))
        if supervised[0] and not console.is_terminal:
            said = f"⟦{said}⟧"
        text.append(said, style=SUPERVISED if supervised[0] else CONTEXT)
    console.print(text, soft_wrap=True)


@app.command()
def stats(tokens: Path_ = "", root: Root = "data") -> None:
    """Lengths, supervised shares and fill of the packs."""
    import numpy as np

    opened = _open(root, tokens)
    lengths = np.diff(opened.offset)
    filled = np.bincount(opened.pack, weights=lengths, minlength=opened.num_packs)
    shares = np.array([opened.sample(i)[1].mean() for i in range(opened.num_samples)])
    table = Table("", *(f"{q} %" for q in _QUANTILES), box=None, pad_edge=False)
    for name, values, form in (
        ("tokens of a sample", lengths, "{:,.0f}"),
        ("supervised share of a sample", shares, "{:.2f}"),
        ("fill of a pack", filled / opened.pack_tokens, "{:.3f}"),
    ):
        table.add_row(name, *(form.format(v) for v in np.percentile(values, _QUANTILES)))
    console.print(table)
    facts = Table("fact", "value", box=None, pad_edge=False)
    for name, value in opened.dataset.facts.items():
        if isinstance(value, (int, float, str)):
            facts.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value}")
    for reason, times in opened.dataset.facts["rejected"].items():
        facts.add_row(f"rejected: {reason}", f"{times:,}")
    console.print(facts)


_QUANTILES = (0, 10, 50, 90, 99, 100)


def _open(root: str, path: str) -> Tokens:
    from dflash_core.manifest import Dataset
    from dflash_core.storage import Storage
    from dflash_core.tokenization import Tokens

    storage = Storage.from_url(root)
    return Tokens.open(Dataset.open(storage, path or _only(storage)))


def _only(storage) -> str:
    keys = (info.key for info in storage.child("tokens").list())
    names = sorted(key.split("/")[0] for key in keys if key.endswith("/manifest.json"))
    if len(names) == 1:
        return f"tokens/{names[0]}"
    shown = ", ".join(f"tokens/{name}" for name in names) or "none"
    raise InputError(
        f"expected one complete tokens dataset under {storage.url}, found {shown}; name one"
    )
