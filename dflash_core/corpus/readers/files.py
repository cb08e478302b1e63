"""Rows of files and Hugging Face datasets, shared by the readers of published layouts.

Files are .jsonl, .json (an array, or an object with one array in it), both also as .gz or .zst, and
.parquet, given as a local path or an s3:// URL; a folder or prefix stands for all such files below it,
by name.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from dflash_core.config import SourceConfig
from dflash_core.corpus.rows import Conversation, Malformed, Reject
from dflash_core.errors import DFlashError, InputError
from dflash_core.manifest import canonical_json, sha256
from dflash_core.storage import Storage

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst", ".parquet")
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_WINDOW = 8 * 2**20  # bytes of one request; hides the latency of a store
_BATCH = 1024  # rows of a Parquet file that are decoded together

Load = Callable[[], Any]
"""Parses one row: its value, or a Malformed."""


def everything(position: int) -> bool:
    """Wants the row at every position."""
    return True


class Reader:
    """Reads one layout from files and from Hugging Face.

    The layout is a module with a docstring that says what it is, `layout(record)`, which takes messages,
    tools and metadata out of one row or raises Malformed, and `HUB_ID` where it is the layout of one set.
    """

    def __init__(self, module: ModuleType) -> None:
        self.__doc__ = module.__doc__
        self._layout = module.layout
        self.hub_id = getattr(module, "HUB_ID", "")

    def read(
        self, source: SourceConfig, wanted: Callable[[int], bool] = everything
    ) -> Iterator[Conversation | Reject | None]:
        """See `readers.Reader`."""
        for position, (file, line, load) in enumerate(rows(self._placed(source))):
            yield self._item(file, line, load()) if wanted(position) else None

    def identity(self, source: SourceConfig) -> str:
        """See `readers.Reader`."""
        return identity(self._placed(source))

    def _placed(self, source: SourceConfig) -> SourceConfig:
        return source if source.path else source.model_copy(update={"path": self.hub_id})

    def _item(self, file: str, line: int, record: Any) -> Conversation | Reject:
        try:
            if isinstance(record, Malformed):
                raise record
            if not isinstance(record, dict):
                raise Malformed("row is not an object", type(record).__name__)
            messages, tools, metadata = self._layout(record)
        except Malformed as error:
            return Reject(line, error.reason, error.detail, file)
        return Conversation(line, messages, tools, metadata, file)


def rows(source: SourceConfig) -> Iterator[tuple[str, int, Load]]:
    """File, 1-based line and parser of every row of the source, in order.

    Raises:
        InputError: the source cannot be read.
    """
    if not _is_files(source):
        for line, record in enumerate(_hub_rows(source), 1):
            yield "", line, partial(_itself, record)
        return
    for name, open_file in _files(source):
        with _readable(source, name), open_file() as file:
            for line, load in _rows_of(source, name, file):
                yield name, line, load


def identity(source: SourceConfig) -> str:
    """What the source holds: `sha256:...` of its files, or the commit of a Hugging Face id.

    Raises:
        InputError: there is no such file, folder or dataset, or nothing in it can be read.
    """
    if not _is_files(source):
        return _hub_commit(source)
    hashes = {}
    for name, open_file in _files(source):
        with _readable(source, name), open_file() as file:
            hashes[name] = hashlib.file_digest(file, "sha256").hexdigest()
    if len(hashes) == 1:  # one file is the same under any name
        return f"sha256:{next(iter(hashes.values()))}"
    return f"sha256:{sha256(canonical_json(hashes))}"


# --- for layouts ---------------------------------------------------------------------------------


def require_columns(record: dict, *names: str) -> None:
    """Raises Malformed unless the row has all of the columns."""
    if missing := [name for name in names if name not in record]:
        raise Malformed(f"no {missing[0]} column", f"found {', '.join(map(str, record))}")


def metadata_of(record: dict) -> dict:
    """The row's own `metadata` and `group`, where it has them."""
    metadata = record.get("metadata")
    metadata = dict(metadata) if isinstance(metadata, dict) else {}
    if isinstance(record.get("group"), str):
        metadata.setdefault("group", record["group"])
    return metadata


def text_of(record: dict, *names: str) -> str | None:
    """The first of the named columns that holds text, or None. Raises Malformed for another type."""
    for name in names:
        value = record.get(name)
        if value is None or value == "":
            continue
        if not isinstance(value, str):
            raise Malformed("column is not text", f"{name} is {type(value).__name__}")
        return value
    return None


def exchange(prompt: str | None, response: str | None, system: str | None = None) -> list[dict]:
    """The messages of a single question; without an answer it is a prompt to be answered later."""
    messages: list[dict] = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    return messages + ([{"role": "assistant", "content": response}] if response else [])


# --- where the rows are ------------------------------------------------------------------------


def _is_files(source: SourceConfig) -> bool:
    """True for files and s3 URLs, False for a Hugging Face id."""
    path = source.path
    if not path:
        raise InputError(
            f"source {source.name!r}: reader {source.reader!r} needs a path; "
            "give a file, a folder, an s3:// URL or a Hugging Face id"
        )
    if path.startswith("s3://") or Path(path).expanduser().exists():
        return True
    if _HUB_ID.match(path) and not path.endswith(SUFFIXES):
        return False
    raise InputError(
        f"source {source.name!r}: {path!r} does not exist; "
        "give a file, a folder, an s3:// URL or a Hugging Face id"
    )


def _files(source: SourceConfig) -> Iterator[tuple[str, Callable[[], io.BufferedReader]]]:
    """Names below the path and functions that open them, sorted by name."""
    listed = _stored(source) if source.path.startswith("s3://") else _local(source)
    found = {name: opener for name, opener in listed.items() if name.endswith(SUFFIXES)}
    if not found:
        raise InputError(
            f"source {source.name!r}: nothing at {source.path!r} can be read; "
            f"expected files that end in {', '.join(SUFFIXES)}"
        )
    yield from sorted(found.items())


def _local(source: SourceConfig) -> dict[str, Callable[[], io.BufferedReader]]:
    path = Path(source.path).expanduser()
    if path.is_file():
        return {path.name: lambda: path.open("rb")}
    files = [file for file in path.rglob("*") if file.is_file()]
    return {str(file.relative_to(path)): lambda file=file: file.open("rb") for file in files}


def _stored(source: SourceConfig) -> dict[str, Callable[[], io.BufferedReader]]:
    parent, _, name = source.path.rstrip("/").rpartition("/")
    if name.endswith(SUFFIXES):
        storage, keys = Storage.from_url(parent), [name]
    else:
        storage = Storage.from_url(source.path)
        keys = [info.key for info in storage.list()]
    return {
        key: lambda key=key: io.BufferedReader(_StoredFile(storage, key), _WINDOW) for key in keys
    }


class _StoredFile(io.RawIOBase):
    """An object as a seekable file, read by range."""

    def __init__(self, storage: Storage, key: str) -> None:
        self._storage, self._key = storage, key
        self._size, self._at = storage.size(key), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._at)
        if length <= 0:
            return 0
        buffer[:length] = self._storage.get_range(self._key, self._at, length)
        self._at += length
        return length


# --- the rows ----------------------------------------------------------------------------------


def _rows_of(
    source: SourceConfig, name: str, file: io.BufferedReader
) -> Iterator[tuple[int, Load]]:
    if name.endswith(".parquet"):
        yield from enumerate(_parquet(file), 1)
        return
    plain = _decompressed(name, file)
    if name.removesuffix(".gz").removesuffix(".zst").endswith(".json"):
        for number, value in enumerate(_array(source, name, plain.read()), 1):
            yield number, partial(_itself, value)
        return
    for number, line in enumerate(plain, 1):
        if line.strip():
            yield number, partial(_parsed, line)


def _decompressed(name: str, file: io.BufferedReader) -> io.BufferedIOBase:
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=file)
    if name.endswith(".zst"):
        import pyarrow as pa

        return io.BufferedReader(cast("Any", pa.CompressedInputStream(file, "zstd")))
    return file


def _parquet(file: io.BufferedReader) -> Iterator[Load]:
    """Parsers of the rows; a batch is turned into objects only when one of its rows is."""
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(file).iter_batches(batch_size=_BATCH):
        found: list[dict] = []

        def load(index: int, batch=batch, found=found) -> dict:
            if not found:
                found.extend(batch.to_pylist())
            return found[index]

        for index in range(batch.num_rows):
            yield partial(load, index)


def _itself(value: Any) -> Any:
    return value


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except RecursionError:
        return Malformed("not JSON", "nested too deeply")
    except ValueError as error:  # UnicodeDecodeError is one too
        return Malformed("not JSON", error)


def _array(source: SourceConfig, name: str, data: bytes) -> list:
    """The array of a .json file: the value itself, or the only array of an object."""
    value = json.loads(data)
    arrays = [value] if isinstance(value, list) else []
    if isinstance(value, dict):
        arrays = [item for item in value.values() if isinstance(item, list)]
    if len(arrays) != 1:
        raise InputError(
            f"source {source.name!r}: {name} holds {len(arrays)} arrays of rows, expected one; "
            "write one row a line (.jsonl) instead"
        )
    return arrays[0]


@contextlib.contextmanager
def _readable(source: SourceConfig, name: str) -> Generator[None]:
    """Turns what a broken or forbidden file raises into one sentence."""
    from pyarrow import ArrowException

    try:
        yield
    except DFlashError:
        raise
    except (OSError, EOFError, ValueError, RecursionError, zlib.error, ArrowException) as error:
        raise InputError(
            f"source {source.name!r}: {name} of {source.path!r} cannot be read: {_first_line(error)}"
        ) from error


# --- Hugging Face ------------------------------------------------------------------------------


def _hub_commit(source: SourceConfig) -> str:
    from huggingface_hub import HfApi

    try:
        return str(HfApi().dataset_info(source.path, revision=source.revision).sha)
    except Exception as error:  # the HTTP client's own errors share no base with OSError
        raise InputError(
            f"source {source.name!r}: Hugging Face dataset {source.path!r} at {source.revision!r} cannot "
            f"be read: {_first_line(error)}; check the id, the revision, the network and HF_TOKEN"
        ) from error


def _hub_rows(source: SourceConfig) -> Iterator[dict]:
    from datasets import load_dataset

    try:
        yield from load_dataset(
            source.path,
            source.subset or None,
            split=source.split,
            revision=source.revision,
            streaming=True,
        )
    except Exception as error:  # see _hub_commit; datasets adds its own
        raise InputError(
            f"source {source.name!r}: split {source.split!r} of Hugging Face dataset {source.path!r} "
            f"cannot be read: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
