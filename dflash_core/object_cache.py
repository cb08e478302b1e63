"""Objects of a bucket kept on a local disk, within a budget of bytes.

Training visits every pack once an epoch in a new order. There the cache that forgets nothing is the best one: what is
in it when the budget is spent stays, and each later epoch reads that share from the disk. What nobody has used since
this process began makes room first: other stores, earlier runs.

Threads and processes may share a folder. A file is named after the object's place and checksums and is renamed into
place when its bytes were checked, so a store that was repaired never meets its old bytes.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dflash_core.config import Runtime
from dflash_core.manifest import sha256

log = logging.getLogger(__name__)

Pieces = Iterator[memoryview]
_RECOUNT_EVERY = 32  # objects kept between two looks at what other processes keep
# Names of files; others are somebody else's.
_OURS = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]{8}\.part)?")


class ObjectCache:
    """A folder of whole objects. What is read from it must be checked like what comes from the bucket."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self._folder = folder
        self._budget = budget_bytes
        self._began = time.time()
        self._lock = threading.Lock()
        self._kept = 0
        self._used = 0
        self._coming = 0  # bytes of objects that are being written by this process
        self._full = self._broken = False
        folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def of(cls, runtime: Runtime) -> ObjectCache | None:
        """The cache that the settings ask for."""
        if not runtime.cache_folder:
            return None
        return cls(Path(runtime.cache_folder).expanduser(), runtime.cache_bytes)

    def find(self, url: str, item: dict) -> Path | None:
        """The file of an object, marked as in use, or None."""
        path = self._path(url, item)
        try:
            os.utime(path)
        except OSError:  # not there, or of another user
            return None
        return path

    @contextmanager
    def keeping(self, url: str, item: dict) -> Generator[Callable[[Pieces], Pieces]]:
        """A function that copies the pieces passing through it into the cache.

        They are kept when the context is left without an error, and when the budget allows. A cache disk that is
        full or broken costs a warning, never the read.
        """
        path = self._path(url, item)
        part = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.part")
        if not self._reserve(item["size"]):
            yield lambda pieces: pieces
            return
        whole = False

        def copy(pieces: Pieces) -> Pieces:
            nonlocal whole
            with self._writing(part) as write:
                for piece in pieces:
                    write(piece)
                    yield piece
            whole = part.exists() and part.stat().st_size == item["size"]

        kept = False
        try:
            yield copy
            kept = whole
        finally:
            with self._lock, suppress(OSError):
                self._coming -= item["size"]
                if kept:
                    os.replace(part, path)
                else:
                    part.unlink(missing_ok=True)

    @contextmanager
    def _writing(self, path: Path) -> Generator[Callable[[memoryview], None]]:
        """A function that appends to the file until the disk refuses."""
        file = None

        def write(piece: memoryview) -> None:
            nonlocal file
            if self._broken:
                return
            try:
                file = file or open(path, "wb", buffering=0)  # noqa: SIM115 - closed below
                file.write(piece)
            except OSError as error:
                log.warning("nothing more is kept in %s: %s", self._folder, error.strerror)
                self._broken = True

        try:
            yield write
        finally:
            if file:
                file.close()

    def _path(self, url: str, item: dict) -> Path:
        return self._folder / sha256(f"{url}/{item['key']} {item['size']} {item['crc32c']}")[:32]

    def _reserve(self, size: int) -> bool:
        """Whether an object of this size may be kept; makes room where it can."""
        with self._lock:
            if self._full or self._broken:
                return False
            if self._kept % _RECOUNT_EVERY == 0 or self._used + size > self._budget:
                self._used = self._make_room(size)
            self._full = self._used + size > self._budget
            if not self._full:
                self._used, self._kept = self._used + size, self._kept + 1
                self._coming += size
            return not self._full

    def _make_room(self, size: int) -> int:
        """Deletes what was last used before this process began until the object fits; returns bytes in use."""
        files = []
        for entry in self._entries():
            with suppress(FileNotFoundError):
                stat = entry.stat()
                if not entry.name.endswith(".part") or stat.st_mtime < self._began:
                    files.append((stat.st_mtime, stat.st_size, entry.path))
        used = self._coming + sum(bytes_ for _, bytes_, _ in files)
        for modified, bytes_, path in sorted(files):
            if used + size <= self._budget or modified >= self._began:
                break
            with suppress(OSError):
                Path(path).unlink(missing_ok=True)
                used -= bytes_
        return used

    def _entries(self) -> list[os.DirEntry]:
        """The files that a cache put there."""
        try:
            return [entry for entry in os.scandir(self._folder) if _OURS.fullmatch(entry.name)]
        except OSError:
            return []
