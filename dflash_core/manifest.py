"""What a dataset is: a fingerprint that fixes its place, commit records, and a manifest written last.

The commit rule. A unit (one pack, one part, one checkpoint) exists when its commit record exists; a
dataset is complete when its manifest exists. Both are created once and never changed. Readers believe
records, never the mere presence of an object, so deleting everything uncommitted is always safe.
"""

from __future__ import annotations

import hashlib
import json
import math
import socket
import time
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import BaseModel

from dflash_core.errors import CorruptError, IncompleteError, MismatchError
from dflash_core.storage import Storage

FORMAT_VERSION = 1
_RECORDS = "_commits"
_EMPTIED = "_emptied.json"
_READERS = 16  # threads that fetch records; latency-bound


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: sorted keys, no spaces, finite numbers only.

    Raises:
        ValueError: a float that is not finite. TypeError: a set or another type without a JSON form.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256(data: bytes | str) -> str:
    """Hex digest of bytes, or of a text in UTF-8."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()


def fingerprint(stage: str, version: int, config: BaseModel | dict, inputs: dict[str, str]) -> str:
    """12 hex digits that name a stage's output: same request, same place.

    Args:
        stage: name of the stage.
        version: the stage's own format version, raised by hand when its output changes meaning.
        config: what the output depends on; never worker counts, batch sizes, devices or clocks.
        inputs: fingerprints of everything read.
    """
    body = config.model_dump(mode="json") if isinstance(config, BaseModel) else config
    request = {
        "format": FORMAT_VERSION,
        "stage": stage,
        "version": version,
        "config": body,
        "inputs": inputs,
    }
    return sha256(canonical_json(request))[:12]


class Dataset:
    """One stage's output: a folder under the root that is resumed, sealed and reused by fingerprint.

    `path` is relative to the root (`tokens/demo-3fa91c0b77de`) and is what the stages hand to each other.
    """

    def __init__(self, root: Storage, path: str, request: dict) -> None:
        self.root = root
        self.path = path
        self.request = request
        self.storage = root.child(path)

    @classmethod
    def create(
        cls,
        root: Storage,
        stage: str,
        name: str,
        *,
        version: int,
        config: BaseModel | dict,
        inputs: dict[str, str],
    ) -> Dataset:
        """The dataset of this request, new or continued; writes `request.json` when new."""
        return cls.requested(
            root, stage, name, version=version, config=config, inputs=inputs
        ).begin()

    @classmethod
    def requested(
        cls,
        root: Storage,
        stage: str,
        name: str,
        *,
        version: int,
        config: BaseModel | dict,
        inputs: dict[str, str],
    ) -> Dataset:
        """The dataset of this request, whether there is anything of it or not; writes nothing."""
        digest = fingerprint(stage, version, config, inputs)
        body = config.model_dump(mode="json") if isinstance(config, BaseModel) else config
        request = {
            "format": FORMAT_VERSION,
            "stage": stage,
            "version": version,
            "name": name,
            "fingerprint": digest,
            "config": body,
            "inputs": inputs,
        }
        return cls(root, f"{stage}/{name}-{digest}", request)

    def begin(self) -> Dataset:
        """Itself, with `request.json` written, so that it can be opened."""
        self.storage.put_new("request.json", _signed(self.request))
        return self

    @classmethod
    def open(cls, root: Storage, path: str) -> Dataset:
        """The dataset at `path`, complete or not.

        Raises:
            FileNotFoundError: nothing was ever started there.
        """
        path = path.strip("/")
        try:
            request = _verified(root.child(path).get("request.json"), f"{path}/request.json")
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{root.url}/{path} is not a dataset of this project; "
                f"expected a path like tokens/demo-0123456789ab, as printed by the stage that made it"
            ) from None
        return cls(root, path, request)

    @property
    def url(self) -> str:
        return self.storage.url

    @property
    def stage(self) -> str:
        return self.request["stage"]

    @property
    def name(self) -> str:
        return self.request["name"]

    @property
    def fingerprint(self) -> str:
        return self.request["fingerprint"]

    @property
    def config(self) -> dict:
        """The configuration it was asked for, as JSON values."""
        return self.request["config"]

    def commit(self, unit: str, record: dict) -> dict:
        """Writes the unit's commit record; call it after all its data is acknowledged.

        Returns:
            The record that stands: ours, or that of another writer who was first.
        """
        record = {**record, "unit": unit, "fingerprint": self.fingerprint, **_origin()}
        key = f"{_RECORDS}/{unit}.json"
        return record if self.storage.put_new(key, _signed(record)) else self.record(unit)

    def committed(self) -> set[str]:
        """Names of the units that exist; one LIST request for each thousand."""
        cut, end = len(_RECORDS) + 1, len(".json")
        return {info.key[cut:-end] for info in self.storage.list(_RECORDS)}

    def record(self, unit: str) -> dict:
        """The unit's commit record. Raises FileNotFoundError, or CorruptError if it was altered."""
        key = f"{_RECORDS}/{unit}.json"
        record = _verified(self.storage.get(key), f"{self.path}/{key}")
        if record["unit"] != unit or record["fingerprint"] != self.fingerprint:
            raise CorruptError(
                f"{self.url}/{key} is the record of {record['unit']!r} of {record['fingerprint']}, "
                f"expected {unit!r} of {self.fingerprint}; it was copied or renamed by hand"
            )
        return record

    def records(self, units: Iterable[str] | None = None) -> dict[str, dict]:
        """Commit records by unit, in the order of the units' names."""
        names = sorted(self.committed() if units is None else units)
        with ThreadPoolExecutor(_READERS) as pool:
            return dict(zip(names, pool.map(self.record, names), strict=True))

    def seal(self, units: Iterable[str], facts: dict) -> dict:
        """Writes the manifest after checking that every unit of the plan is committed.

        Args:
            units: all units of the plan.
            facts: what the next stages and people need to know; JSON values.

        Raises:
            IncompleteError: a unit has no commit record.
        """
        units = sorted(units)
        missing = sorted(set(units) - self.committed())
        if missing:
            raise IncompleteError(
                f"{self.url}: {len(missing)} of {len(units)} units have no commit record "
                f"(first: {missing[0]!r}); run the stage again, it continues where it stopped"
            )
        manifest = {**self.request, "num_units": len(units), "facts": facts, **_origin()}
        if self.storage.put_new("manifest.json", _signed(manifest)):
            return manifest
        return self.manifest()

    def manifest(self) -> dict:
        """The manifest.

        Raises:
            IncompleteError: there is none yet.
        """
        try:
            return _verified(self.storage.get("manifest.json"), f"{self.path}/manifest.json")
        except FileNotFoundError:
            raise IncompleteError(
                f"{self.url} is not complete: {len(self.committed())} units are committed and the manifest "
                f"is missing; run the {self.stage} stage again, it continues where it stopped"
            ) from None

    @property
    def complete(self) -> bool:
        return self.storage.exists("manifest.json")

    @property
    def facts(self) -> dict:
        return self.manifest()["facts"]

    def empty(self, for_run: str) -> None:
        """Deletes everything but the request: manifest, commit records and the rest, in this order.

        A reader in between sees an incomplete dataset, never a wrong one. A mark says meanwhile that it is half
        emptied, which must not be filled, because writers adopt objects that they find; and afterwards for
        which run it was emptied, so that this is done once when that run is started again.
        """
        mark = {"for_run": for_run, "done": False}
        self.storage.put(_EMPTIED, canonical_json(mark).encode())
        self.storage.delete(["manifest.json"])
        self.storage.delete([info.key for info in self.storage.list(_RECORDS)])
        kept = ("request.json", _EMPTIED)
        self.storage.delete([i.key for i in self.storage.list() if i.key not in kept])
        self.storage.put(_EMPTIED, canonical_json(mark | {"done": True}).encode())

    def must_be_emptied(self, for_run: str) -> bool:
        """Whether `empty` was cut short here, or was not yet called for this run; no run is named by ""."""
        try:
            mark = json.loads(self.storage.get(_EMPTIED))
        except FileNotFoundError:
            return bool(for_run) or self.storage.exists(
                "_emptying"
            )  # the mark's name in older versions
        return not mark["done"] or (bool(for_run) and mark["for_run"] != for_run)

    def require_stage(self, stage: str) -> Dataset:
        """Itself, when it is a complete output of `stage`; what a reading stage calls first."""
        if self.stage != stage:
            raise MismatchError(
                f"{self.path} is an output of the {self.stage} stage, expected one of {stage}"
            )
        self.manifest()
        return self


def require_same(what: str, ours: dict, theirs: dict, advice: str) -> None:
    """Raises MismatchError listing each field in which two contracts differ."""
    fields = [
        key for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)
    ]
    if fields:
        lines = [f"  {key}: have {theirs.get(key)!r}, want {ours.get(key)!r}" for key in fields]
        raise MismatchError("\n".join([f"{what} does not fit; {advice}", *lines]))


def _origin() -> dict:
    """Who wrote a record, when: for people, and to recognise one's own write after a lost answer."""
    return {
        "write_id": uuid.uuid4().hex,
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "host": socket.gethostname(),
    }


def _signed(body: dict) -> bytes:
    return canonical_json({**body, "sha256": sha256(canonical_json(body))}).encode()


def _verified(data: bytes, where: str) -> dict:
    try:
        body = json.loads(data)
        digest = body.pop("sha256")
    except (ValueError, KeyError, AttributeError) as error:
        raise CorruptError(
            f"{where} is not a record of this project; it was cut or altered"
        ) from error
    if sha256(canonical_json(body)) != digest:
        raise CorruptError(
            f"{where} does not match its own checksum; it was altered after it was written"
        )
    return body


def finite(value: float) -> float | None:
    """A float for a record; JSON has no NaN or infinity, so those become None."""
    return value if math.isfinite(value) else None
