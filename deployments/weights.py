"""Downloads a target once, from the hub or a bucket, and says where it lies.

python -m deployments.weights [--check] Qwen/Qwen3-8B
python -m deployments.weights [--check] s3://bucket/targets/qwen3-8b
"""

from __future__ import annotations

import sys
from pathlib import Path
from urllib.parse import urlsplit

PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # no pickles
TARGETS = Path(__file__).parents[1] / "data" / "targets"


def locate(target: str, *, download: bool) -> Path:
    """Folder of the target. Raises FileNotFoundError when it is not here and not to be downloaded."""
    if target.startswith("s3://"):
        folder = TARGETS / urlsplit(target).path.rstrip("/").rpartition("/")[2]
        if download:
            _from_bucket(target, folder)
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"{folder} holds no target")
        return folder
    if Path(target).is_dir():
        return Path(target)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(target, allow_patterns=PATTERNS, local_files_only=not download))


def _from_bucket(url: str, folder: Path) -> None:
    """Copies each object to a file of its own name; a file appears when it is whole."""
    from dflash_core.storage import Storage

    source = Storage.from_url(url)
    folder.mkdir(parents=True, exist_ok=True)
    # config.json last: its presence says that the target is here.
    for info in sorted(source.list(), key=lambda info: info.key == "config.json"):
        file = folder / info.key
        if not any(Path(info.key).match(pattern) for pattern in PATTERNS):
            continue
        if file.exists() and file.stat().st_size == info.size:
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(file.name + ".part")
        with part.open("wb") as out:
            for start in range(0, info.size, 2**28):
                out.write(source.get_range(info.key, start, min(2**28, info.size - start)))
        part.rename(file)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    check = "--check" in arguments
    try:
        print(locate(next(a for a in arguments if a != "--check"), download=not check))
    except OSError as error:
        sys.exit(str(error).splitlines()[0])
