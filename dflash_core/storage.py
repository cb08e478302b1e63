"""The one module that knows URLs, credentials and retries.

A `Storage` is a prefix in an object store. Every stage reads and writes through it, so a local folder
and a bucket behave the same: an object is absent or whole, never half-written.

Credentials come from the environment only: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL, or, when no key is set, whatever boto3 finds
(profile, instance role). They never appear in a message.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, MemoryStore, S3Store

from dflash_core.errors import InputError, StorageError

# The clients' own defaults give up within 2 to 11 seconds of an outage; a restart of a storage
# server takes longer. Ten minutes is what a person needs to notice and act.
PATIENT = {
    "max_retries": 1000,
    "retry_timeout": timedelta(minutes=10),
    "backoff": {
        "init_backoff": timedelta(milliseconds=200),
        "max_backoff": timedelta(seconds=10),
        "base": 2,
    },
}
# The preflight asks whether the store works now, so it gives up early.
IMPATIENT = {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}


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

    def __init__(self, url: str, store: obstore.store.ObjectStore, prefix: str = "") -> None:
        self.url = url.rstrip("/")
        self._store = store
        self._prefix = prefix.strip("/")
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
            return cls(url, store, prefix=parts.path)
        if parts.scheme == "memory":
            return cls(url, MemoryStore())
        if parts.scheme not in ("", "file"):
            raise InputError(f"{url!r}: scheme {parts.scheme!r} is not known; use file:// or s3://")
        folder = Path(unquote(parts.path) if parts.scheme else url).expanduser().resolve()
        return cls(folder.as_uri(), LocalStore(_existing(folder)))

    def child(self, prefix: str) -> Storage:
        """The storage below `prefix`, sharing this one's connections."""
        return Storage(f"{self.url}/{prefix}", self._store, self._full(prefix))

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

    def get_ranges(
        self, key: str, starts: Sequence[int], lengths: Sequence[int]
    ) -> Sequence[memoryview]:
        """Several ranges of one object; neighbours are fetched in one request."""
        answer = self._call(obstore.get_ranges, key, starts=starts, lengths=lengths)
        return [memoryview(part) for part in answer]

    def put(self, key: str, data: bytes | bytearray | memoryview) -> None:
        """Writes the object in one request, replacing what was there."""
        self._call(obstore.put, key, data, use_multipart=False)

    def put_new(self, key: str, data: bytes | bytearray | memoryview) -> bool:
        """Writes the object unless it exists; one request, atomic among any number of writers.

        Returns:
            True when the object now holds exactly `data`: written here, or by an earlier try of ours
            whose answer was lost. False when somebody else's bytes are there; they stay.
        """
        try:
            self._call(obstore.put, key, data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return self.size(key) == len(data) and self.get(key) == bytes(data)
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
        self._guard()
        cut = len(self._prefix) + 1 if self._prefix else 0
        try:
            for page in obstore.list(self._store, prefix=self._full(prefix) or None):
                for entry in page:
                    yield ObjectInfo(entry["path"][cut:], entry["size"], entry["last_modified"])
        except FileNotFoundError:
            return
        except BaseError as error:
            raise self._explain(error, prefix) from error

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes the objects; those that do not exist are passed over."""
        self._guard()
        obstore.delete(self._store, [self._full(key) for key in keys])

    def preflight(self) -> None:
        """Proves with one probe object that we may write, read, list and delete here.

        Raises:
            StorageError: one sentence that tells a wrong secret, a missing bucket, a missing
                permission and an unreachable endpoint apart. The secret is never in it.
        """
        probe = Storage.from_url(self.url, patient=False) if self.url.startswith("s3:") else self
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

    def _call(self, operation, key: str, *args, **options):
        self._guard()
        try:
            return operation(self._store, self._full(key), *args, **options)
        except (FileNotFoundError, AlreadyExistsError) as error:
            if isinstance(error, AlreadyExistsError):
                raise
            if "NoSuchBucket" in str(error):
                raise self._explain(error, key) from error
            raise FileNotFoundError(f"{self.url}/{key} does not exist") from error
        except BaseError as error:
            raise self._explain(error, key) from error

    def _explain(self, error: Exception, key: str) -> StorageError:
        text, where = str(error), f"{self.url}/{key}".rstrip("/")
        key_id = os.environ.get("AWS_ACCESS_KEY_ID", "")
        causes = {
            "NoSuchBucket": "the bucket does not exist; create it or correct the URL",
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
