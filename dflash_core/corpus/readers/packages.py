"""Sources that bring their own text: data files of installed Python packages, found without importing them."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from dflash_core.config import SourceConfig
from dflash_core.corpus.readers.files import everything
from dflash_core.corpus.rows import Conversation, Reject
from dflash_core.errors import InputError
from dflash_core.manifest import canonical_json, sha256


class Reader:
    """Reads a module with a docstring that says what it is, `read(source)` and `identity(source)`."""

    def __init__(self, module: ModuleType) -> None:
        self.__doc__ = module.__doc__
        self._module = module

    def read(
        self, source: SourceConfig, wanted: Callable[[int], bool] = everything
    ) -> Iterator[Conversation | Reject | None]:
        """See `readers.Reader`."""
        for position, item in enumerate(self._module.read(source)):
            yield item if wanted(position) else None

    def identity(self, source: SourceConfig) -> str:
        """See `readers.Reader`."""
        return self._module.identity(source)


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
