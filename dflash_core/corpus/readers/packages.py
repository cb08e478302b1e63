"""Data files of installed Python packages, found without importing the package."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from dflash_core.errors import InputError
from dflash_core.manifest import canonical_json, sha256


def data_folder(package: str, install: str) -> Path:
    """`data` of an installed package. Raises InputError that says `install` when it is not there."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / "data").is_dir():
            return Path(folder) / "data"
    raise InputError(f"the package {package} is not installed; pip install {install}")


def lines(file: Path) -> Iterator[tuple[int, dict]]:
    """Line number and object of each line of a .jsonl or .jsonl.gz file."""
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            yield number, json.loads(line)


def identity_of(files: list[Path]) -> str:
    """Hash of the files' names and bytes."""
    return (
        f"sha256:{sha256(canonical_json({file.name: sha256(file.read_bytes()) for file in files}))}"
    )
