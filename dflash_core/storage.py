"""The one module that knows URLs, credentials and retries.

A `Storage` is a prefix in an object store. Every stage reads and writes through it, so a local folder
and a bucket behave the same: an object is absent or whole, never half-written.

Credentials come from the environment only: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL, or, when no key is set, whatever boto3 finds
(profile, instance role). They never appear in a message.
"""

from __future__ import annotations

import builtins
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import accumulate, chain
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import LocalStore, MemoryStore, S3Store

from dflash_core.errors import InputError, StorageError

# The clients' own defaults give up within 2 to 11 seconds of an outage; a restart of a storage
# server takes longer. Ten minutes is what a person needs to notice and act.
PATIENCE = timedelta(minutes=10)
PATIENT = {
    "max_retries": 1000,
    "retry_timeout": PATIENCE,
    "backoff": {
        "init_backoff": timedelta(milliseconds=200),
        "max_backoff": timedelta(seconds=10),
        "base": 2,
    },
}
# The preflight asks whether the store works now, so it gives up early.
IMPATIENT = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}
# The client does not repeat a create-only write whose connection broke, nor a body that broke off. We do:
# the one recognises its own object, the other goes on where it stopped. So we do while a server says that it is
# in trouble.
_PAUSE_S = 1.0
# A server that comes back may deny for seconds that its buckets exist (SeaweedFS does, while it starts).
_BUCKET_PATIENCE = timedelta(minutes=1)
_PASSING = (
    "error sending request",
    "error decoding response body",
    "response body error",
    "status code: 5",
)
# Bytes handed on at once while an object streams in: small enough to be still in the CPU's cache when they
# are checked and copied (measured: 256 KiB costs 0.7 CPU s/GB, 8 MiB 1.1, the whole object 1.5).
_PIECE_BYTES = 256 * 1024

Buffer = bytes | bytearray | memoryview
Parts = list[Buffer]  # sent one behind the other without joining them


class ObjectInfo(NamedTuple):
    """Key relative to the listing `Storage`, size in bytes, and when it was last written."""

    key: str
    size: int
    modified: datetime


class Storage:
    """Objects under one URL: `file:///folder`, a plain folder path, `s3://bucket/prefix`, `memory://`.

    Safe to use from threads. Not from a forked child: the client's threads do not survive a fork, so
    every call there raises RuntimeError instead of hanging; use spawn or forkserver.
    """

    def __init__(
        self,
        url: str,
        store: obstore.store.ObjectStore,
        prefix: str = "",
        patience: timedelta = timedelta(0),
        answered: Event | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._store = store
        self._prefix = prefix.strip("/")
        self._patience = patience
        self._answered = answered or Event()  # the bucket was seen to exist
        self._pid = os.getpid()

    @classmethod
    def from_url(cls, url: str, *, patient: bool = True) -> Storage:
        """Opens `url`. Nothing is sent yet; `preflight` says whether it works.

        Raises:
            InputError: the scheme is unknown or the bucket is missing from the URL.
        """
        parts = urlsplit(url)
        if parts.scheme == "s3":
            if not parts.netloc:
                raise InputError(f"{url!r} names no bucket; expected s3://bucket/prefix")
            store = _s3_store(parts.netloc, PATIENT if patient else IMPATIENT)
            return cls(url, store, parts.path, PATIENCE if patient else timedelta(0))
        if parts.scheme == "memory":
            return cls(url, MemoryStore())
        if parts.scheme not in ("", "file"):
            raise InputError(f"{url!r}: scheme {parts.scheme!r} is not known; use file:// or s3://")
        folder = Path(unquote(parts.path) if parts.scheme else url).expanduser().resolve()
        return cls(folder.as_uri(), LocalStore(_existing(folder)))

    def child(self, prefix: str) -> Storage:
        """The storage below `prefix`, sharing this one's connections."""
        url, prefix = f"{self.url}/{prefix}", self._full(prefix)
        return Storage(url, self._store, prefix, self._patience, self._answered)

    @property
    def local_path(self) -> Path | None:
        """The folder behind a file URL, else None."""
        parts = urlsplit(self.url)
        return Path(unquote(parts.path)) if parts.scheme == "file" else None

    def get(self, key: str) -> bytes:
        """The object's bytes. Raises FileNotFoundError when it does not exist."""
        return bytes(self._call(obstore.get, key).bytes())

    def get_range(self, key: str, start: int, length: int) -> memoryview:
        """`length` bytes from byte `start`, without a copy."""
        return memoryview(self._call(obstore.get_range, key, start=start, length=length))

    def stream(self, key: str, start: int, length: int) -> Iterator[memoryview]:
        """The bytes start .. start + length as they arrive, fewer where the object ends before.

        One request, and one more each time a connection breaks, from the byte where it broke. A piece is
        valid until the next one is asked for.

        Raises:
            FileNotFoundError: the object does not exist.
        """
        folder = self.local_path
        if folder is None:
            return self._stream_object(key, start, start + length)
        self._guard()
        return stream_file(folder / key, start, length)

    def put(self, key: str, data: Buffer | Parts) -> None:
        """Writes the object in one request, replacing what was there."""
        self._call(lambda *place: obstore.put(*place, _body(data), use_multipart=False), key)

    def put_new(self, key: str, data: Buffer | Parts) -> bool:
        """Writes the object unless it exists; one request, atomic among any number of writers.

        Returns:
            True when the object now holds exactly `data`: written here, or by an earlier try of ours
            whose answer was lost. False when somebody else's bytes are there; they stay.
        """
        try:
            self._call(
                lambda *place: obstore.put(*place, _body(data), mode="create", use_multipart=False),
                key,
            )
        except AlreadyExistsError:
            return self._holds(key, data if isinstance(data, list) else [data])
        return True

    def get_version(self, key: str) -> tuple[bytes, str | None]:
        """The object's bytes, and what names this version of it."""
        answer = self._call(obstore.get, key)
        return bytes(answer.bytes()), answer.meta["e_tag"]

    def replace(self, key: str, data: Buffer | Parts, version: str | None) -> bool:
        """Writes the object if it still is this version; False when somebody else wrote it meanwhile.

        A local folder cannot compare versions and replaces whatever is there.
        """
        if self.local_path is not None or version is None:
            self.put(key, data)
            return True
        mode: Any = {"e_tag": version}
        try:
            self._call(
                lambda *place: obstore.put(*place, _body(data), mode=mode, use_multipart=False), key
            )
        except PreconditionError:
            return False
        return True

    def put_fresh(self, folder: str, suffix: str, data: bytes) -> str:
        """Writes `data` under a key nobody else has, `folder-<random>suffix`, and returns the key.

        What a crash leaves behind this way is named by no commit record and so is never read.
        """
        key = f"{folder}-{uuid.uuid4().hex[:12]}{suffix}"
        self.put(key, data)
        return key

    def size(self, key: str) -> int:
        """Bytes of the object. Raises FileNotFoundError when it does not exist."""
        return self._call(obstore.head, key)["size"]

    def exists(self, key: str) -> bool:
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Every object below the folder `prefix`, in no particular order."""
        cut = len(self._prefix) + 1 if self._prefix else 0
        pages = self._call(self._pages, prefix)
        try:
            for page in pages:
                for entry in page:
                    yield ObjectInfo(entry["path"][cut:], entry["size"], entry["last_modified"])
        except (FileNotFoundError, BaseError) as error:
            raise self._explain(error, prefix) from error

    def folders(self) -> builtins.list[str]:
        """Names of what lies directly below and holds objects, in order; one request for each thousand."""
        found = self._call(obstore.list_with_delimiter, "")["common_prefixes"]
        return sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in found)

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes the objects; those that do not exist are passed over."""
        keys = list(keys)
        paths = [self._full(key) for key in keys]
        try:
            self._call(lambda store, _: obstore.delete(store, paths), "")
        except FileNotFoundError:
            # A local disk stops at the first one that is missing; a bucket passes over it.
            for key in keys if len(keys) > 1 else ():
                self.delete([key])

    def leftovers(self) -> builtins.list[ObjectInfo]:
        """What killed writers left half-written on a local disk, where no listing shows it; nothing in a bucket.

        The client writes `name#1` and renames it. In a bucket a broken upload leaves nothing, because every
        object here is one request.
        """
        found, folder = [], self.local_path
        if folder is None:
            return found
        for path in folder.rglob("*#*"):
            stat = path.stat()
            modified = datetime.fromtimestamp(stat.st_mtime, UTC)
            found.append(ObjectInfo(path.relative_to(folder).as_posix(), stat.st_size, modified))
        return found

    def preflight(self, *, patient: bool = False) -> None:
        """Proves with one probe object that we may write, read, list and delete here.

        Args:
            patient: wait for a server that cannot be reached; else that is an error at once, like all others.

        Raises:
            StorageError: one sentence that tells a wrong secret, a missing bucket, a missing
                permission and an unreachable endpoint apart. The secret is never in it.
        """
        s3 = self.url.startswith("s3:")
        probe = Storage.from_url(self.url, patient=patient) if s3 else self
        folder, data = f"_preflight/{uuid.uuid4().hex}", b"dflash preflight"
        for action, step in (
            ("write", lambda: probe.put(f"{folder}/probe", data)),
            ("read", lambda: probe.get(f"{folder}/probe")),
            ("list", lambda: list(probe.list(folder))),
            ("delete", lambda: probe.delete([f"{folder}/probe"])),
        ):
            try:
                step()
            except (OSError, BaseError) as error:
                reason = error.args[0] if isinstance(error, StorageError) else _one_line(error)
                raise StorageError(f"cannot {action} under {self.url}: {reason}") from error

    def zarr_store(self, *, read_only: bool = False):
        """This prefix as a store for zarr-python."""
        from zarr.storage import ObjectStore, StorePath

        self._guard()
        return StorePath(ObjectStore(self._store, read_only=read_only), self._prefix)

    def _full(self, key: str) -> str:
        return f"{self._prefix}/{key}".strip("/") if self._prefix else key.strip("/")

    def _guard(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"{self.url} was opened in process {self._pid} and used in its fork {os.getpid()}; "
                "open it in the child, or start children with spawn or forkserver"
            )

    @staticmethod
    def _pages(store: obstore.store.ObjectStore, prefix: str) -> Iterator:
        """Pages of a listing, the first of them here already."""
        pages = iter(obstore.list(store, prefix=prefix or None, chunk_size=1000))
        try:
            first = next(pages, [])
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise
            first = []
        return chain([first], pages)

    def _call(self, operation: Callable, key: str, *args, **options):
        self._guard()
        began = time.monotonic()
        while True:
            try:
                answer = operation(self._store, self._full(key), *args, **options)
            except (AlreadyExistsError, PreconditionError):
                raise
            except (FileNotFoundError, BaseError) as error:
                if isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error):
                    self._answered.set()
                    raise FileNotFoundError(f"{self.url}/{key} does not exist") from error
                if time.monotonic() - began >= self._patience_with(error).total_seconds():
                    raise self._explain(error, key) from error
                time.sleep(_PAUSE_S)
            else:
                self._answered.set()
                return answer

    def _patience_with(self, error: Exception) -> timedelta:
        """How long to try again what failed with this error; zero for one that does not pass."""
        text = str(error)
        if "NoSuchBucket" in text and self._answered.is_set():
            return min(self._patience, _BUCKET_PATIENCE)
        return self._patience if any(sign in text for sign in _PASSING) else timedelta(0)

    def _holds(self, key: str, parts: Parts) -> bool:
        """Whether the object's bytes are those of the parts."""
        wanted = [memoryview(part) for part in parts]
        size = sum(part.nbytes for part in wanted)
        if self.size(key) != size:
            return False
        found = memoryview(self.get(key))
        ends = accumulate(part.nbytes for part in wanted)
        return all(
            found[end - part.nbytes : end] == part for part, end in zip(wanted, ends, strict=True)
        )

    def _stream_object(self, key: str, start: int, end: int) -> Iterator[memoryview]:
        deadline = time.monotonic() + self._patience.total_seconds()
        while start < end:
            answer = self._call(obstore.get, key, options={"range": (start, end)})
            try:
                for piece in answer.stream(min_chunk_size=_PIECE_BYTES):
                    yield memoryview(piece)
                    start += len(piece)
                    deadline = time.monotonic() + self._patience.total_seconds()
                return
            except BaseError as error:
                if time.monotonic() > deadline:
                    raise self._explain(error, key) from error
                time.sleep(_PAUSE_S)

    def _explain(self, error: Exception, key: str) -> StorageError:
        text, where = str(error), f"{self.url}/{key}".rstrip("/")
        key_id = os.environ.get("AWS_ACCESS_KEY_ID", "")
        causes = {
            "NoSuchBucket": "the bucket does not exist; create it or correct the URL",
            "ExpiredToken": "the session token has expired; renew AWS_SESSION_TOKEN",
            "InvalidToken": "the session token is not valid; check AWS_SESSION_TOKEN",
            "SignatureDoesNotMatch": f"the secret does not fit access key {key_id!r}; check AWS_SECRET_ACCESS_KEY",
            "InvalidAccessKeyId": f"the endpoint does not know access key {key_id!r}; check AWS_ACCESS_KEY_ID",
            "RequestTimeTooSkewed": "this machine's clock is too far from the server's; set the clock",
            "AccessDenied": f"access key {key_id!r} lacks the permission; extend its policy",
            "No space left": "no space is left on the device; free some or choose another root",
        }
        for code, cause in causes.items():
            if code in text:
                return StorageError(f"{cause} ({code}, {where})")
        if "onnect" in text or "dns" in text.lower():
            endpoint = os.environ.get("AWS_ENDPOINT_URL", "the default AWS endpoint")
            return StorageError(
                f"{endpoint} cannot be reached; check AWS_ENDPOINT_URL and the network ({where})"
            )
        return StorageError(f"{_one_line(error)} ({where})")


def stream_file(path: Path, start: int, length: int) -> Iterator[memoryview]:
    """As `Storage.stream`, of a file. Read by hand: the client hands local files on in pieces of 8 KiB."""
    buffer, end = memoryview(bytearray(min(_PIECE_BYTES, length))), start + length
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while start < end:
            count = file.readinto(buffer[: end - start])
            if not count:
                return
            yield buffer[:count]
            start += count


def _body(data: Buffer | Parts):
    """What the client sends without copying: one buffer, or an iterator of buffers."""
    return iter(data) if isinstance(data, list) else data


def _existing(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"folder {folder} cannot be made: {error.strerror}") from error
    return folder


def _s3_store(bucket: str, retries: dict) -> S3Store:
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    options = {
        "retry_config": retries,
        "client_options": {"timeout": "300s", "allow_http": endpoint.startswith("http://")},
        # Over https the payload hash costs 0.8 CPU s/GB and protects what TLS already protects.
        "unsigned_payload": True,
        "virtual_hosted_style_request": not endpoint,
        "region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION", "us-east-1"),
    }
    if endpoint:
        options["endpoint"] = endpoint
    if not os.environ.get("AWS_ACCESS_KEY_ID"):
        options["credential_provider"] = _boto3_credentials()
    return S3Store(bucket, **options)


def _boto3_credentials():
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider

        return Boto3CredentialProvider()
    except Exception as error:
        raise InputError(
            "no S3 credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give boto3 a profile or role"
        ) from error


def _one_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
