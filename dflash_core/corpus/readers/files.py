"""Rows of files and Hugging Face datasets, shared by the readers of published layouts.

Files are .jsonl, .jsonl.gz, .json (an array, or an object with one array in it) and .parquet, given
as a local path or an s3:// URL; a folder or prefix stands for all such files below it, by name.
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
from pathlib import Path
from typing import Any

from dflash_core.config import SourceConfig
from dflash_core.corpus.rows import Conversation, Malformed, Reject
from dflash_core.errors import DFlashError, InputError
from dflash_core.manifest import canonical_json, sha256
from dflash_core.storage import Storage

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_WINDOW = 8 * 2**20  # bytes of one request; hides the latency of a store

Layout = Callable[[dict], tuple[Any, Any, dict]]
"""Takes messages, tools and metadata out of one row, or raises Malformed."""


def read(source: SourceConfig, layout: Layout) -> Iterator[Conversation | Reject]:
    """Every row of the source, as a conversation or as a reject with its line.

    Raises:
        InputError: the source cannot be read.
    """
    for file, line, record in _records(source):
        if isinstance(record, Malformed):
            yield Reject(line, record.reason, record.detail, file)
            continue
        try:
            if not isinstance(record, dict):
                raise Malformed("row is not an object", type(record).__name__)
            messages, tools, metadata = layout(record)
        except Malformed as error:
            yield Reject(line, error.reason, error.detail, file)
        else:
            yield Conversation(line, messages, tools, metadata, file)


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


def exchange(prompt: str, response: str | None, system: str | None) -> list[dict]:
    """The messages of a single question; without an answer it is a prompt to be answered later."""
    messages = [{"role": "system", "content": system}] if system else []
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


def _records(source: SourceConfig) -> Iterator[tuple[str, int, Any]]:
    """(file, line, row) of the whole source; a row that is no JSON is a Malformed."""
    if not _is_files(source):
        yield from (("", line, record) for line, record in enumerate(_hub_rows(source), 1))
        return
    for name, open_file in _files(source):
        with _readable(source, name), open_file() as file:
            yield from ((name, line, record) for line, record in _rows_of(source, name, file))


def _rows_of(source: SourceConfig, name: str, file: io.BufferedReader) -> Iterator[tuple[int, Any]]:
    if name.endswith(".parquet"):
        import pyarrow.parquet as pq

        batches = pq.ParquetFile(file).iter_batches(batch_size=1024)
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
    elif name.endswith(".json"):
        yield from enumerate(_array(source, name, file.read()), 1)
    else:
        lines = gzip.GzipFile(fileobj=file) if name.endswith(".gz") else file
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, _parsed(line)


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
            source.path, split=source.split, revision=source.revision, streaming=True
        )
    except Exception as error:  # see _hub_commit; datasets adds its own
        raise InputError(
            f"source {source.name!r}: split {source.split!r} of Hugging Face dataset {source.path!r} "
            f"cannot be read: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
