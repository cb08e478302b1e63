"""A sealed export copied to where it is served from: a folder, a bucket, or the Hugging Face hub.

The export under the root stays the original. A copy is checked against the hashes of its commit record
before it goes out, and read back after, so what arrives is what was reloaded and compared.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from dflash_core.errors import CorruptError, InputError, StorageError
from dflash_core.manifest import Dataset, sha256
from dflash_core.storage import Storage

log = logging.getLogger(__name__)

HUB = "hf://"


def check_destination(destination: str) -> None:
    """Raises InputError for a destination that cannot be meant; sends nothing."""
    if destination.startswith(HUB):
        owner, slash, name = destination.removeprefix(HUB).partition("/")
        if not (owner and slash and name) or "/" in name:
            raise InputError(f"{destination!r} is no hub repository; expected hf://owner/name")
    else:
        Storage.from_url(destination)


def publish(export: Dataset, destination: str, *, private: bool = True) -> list[str]:
    """Copies every layout of a complete export.

    Args:
        destination: folder, file:// or s3:// URL, or hf://owner/name. With several layouts each gets a
            folder `<destination>/<layout>`, on the hub a repository `<name>-<layout>`.
        private: whether a hub repository that does not exist yet is made private.

    Returns:
        Where each layout went, in order.

    Raises:
        InputError: no such kind of destination, or the hub refuses. CorruptError: the export was altered.
    """
    check_destination(destination)
    facts = export.require_stage("exports").facts
    several, places = len(facts["layouts"]) > 1, []
    for layout in facts["layouts"]:
        files = dict(_checked_files(export, layout, facts["files"][layout]))
        if destination.startswith(HUB):
            suffix = f"-{layout}" if several else ""
            place = _to_hub(destination.removeprefix(HUB) + suffix, files, private)
        else:
            place = _to_storage(destination.rstrip("/") + (f"/{layout}" if several else ""), files)
        log.info("%s/%s copied to %s", export.url, layout, place)
        places.append(place)
    return places


def _checked_files(export: Dataset, layout: str, expected: dict) -> Iterator[tuple[str, bytes]]:
    for name, file in expected.items():
        data = export.storage.get(f"{layout}/{name}")
        if sha256(data) != file["sha256"]:
            raise CorruptError(
                f"{export.url}/{layout}/{name} is not what was written; delete {export.path} and export again"
            )
        yield name, data


def _to_storage(url: str, files: dict[str, bytes]) -> str:
    storage = Storage.from_url(url)
    # config.json last: a loader that looks in between finds no drafter rather than half of one.
    for name in sorted(files, key=lambda name: name == "config.json"):
        storage.put(name, files[name])
        if storage.get(name) != files[name]:
            raise StorageError(f"{storage.url}/{name} reads back other bytes than were written")
    return storage.url


def _to_hub(repository: str, files: dict[str, bytes], private: bool) -> str:
    """One commit with all files; the token comes from HF_TOKEN or the hub's own login."""
    from huggingface_hub import CommitOperationAdd, HfApi, errors

    api = HfApi()
    operations = [CommitOperationAdd(name, data) for name, data in files.items()]
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.create_commit(repository, operations, commit_message="Export a drafter")
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        raise InputError(
            f"hf://{repository} is refused by the hub: {_one_line(error)}; check the name and HF_TOKEN"
        ) from error
    except Exception as error:  # the HTTP client's own errors share no base with OSError
        raise StorageError(f"hf://{repository} cannot be reached: {_one_line(error)}") from error
    return f"{HUB}{repository}@{commit.oid}"


def _one_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
