"""Reads existing drafters, exported here or published by others, in any known layout.

What is read computes exactly what its file says or is refused: names, shapes and types of every tensor
are checked, quantised weights are multiplied out, and config.json may ask for nothing that this project
does not compute. Embedding and head are the target's; a head over a reduced vocabulary comes along, and an
embedding, which some exporters add, for comparison with the target's.

Shape letters: D tokens of a reduced vocabulary, V vocabulary, H hidden size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load
from torch import Tensor

from dflash_core.errors import CorruptError, DFlashError, InputError
from dflash_core.layouts import LAYOUTS, layout_of
from dflash_core.manifest import canonical_json, sha256
from dflash_core.model import Drafter, DrafterShape
from dflash_core.storage import Storage

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_QUANTISED = (torch.int8, torch.float8_e4m3fn)
_SCALE = "_scale"  # of a quantised tensor, as compressed-tensors names it
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
# The target's own, which some exporters add: never read, the target at hand has them.
_BORROWED = {"verifier_lm_head.weight", "verifier_norm.weight", "t2d"}
_EMBEDDING = "embed_tokens.weight"
_ROWS = 16_384  # of embeddings compared at a time


@dataclass(frozen=True)
class ImportedDrafter:
    """A drafter read from a directory of one of the layouts."""

    layout: str
    """Layout that it was written in."""
    shape: DrafterShape
    """Everything that fixes its computation."""
    state_dict: dict[str, Tensor]
    """Parameters of `Drafter`, float32, on the CPU."""
    head_DH: Tensor | None
    """Head of its own, float32; None when it proposes with the target's."""
    token_ids_D: Tensor | None
    """Target token of each row of a reduced head, int64; None when rows are the target's tokens."""
    content: str
    """Hash of config.json and all weights: the same drafter has the same, wherever it lies."""
    embedding_VH: Tensor | None = None
    """Embedding in the file, in its type; None without one. It is used by nobody: see `require_embedding`."""

    def require_embedding(self, target_VH: Tensor, name: str) -> None:
        """Checks that an embedding in the file is the target's, whose rows the drafter is given.

        Args:
            name: what to call the drafter in an error.

        Raises:
            InputError: it differs, as it does where the row of the mask token was trained.
        """
        own = self.embedding_VH
        if own is None:
            return
        if own.shape != target_VH.shape:
            raise InputError(
                f"{name} has an {_EMBEDDING} of its own of shape {list(own.shape)}, the target's {list(target_VH.shape)}; "
                "give the target that it was trained for"
            )
        differ = torch.cat(
            [
                # Both may have been rounded, to different types.
                ~torch.isclose(ours.float(), theirs.float().cpu(), rtol=1e-2, atol=1e-5).all(dim=-1)
                for ours, theirs in zip(own.split(_ROWS), target_VH.split(_ROWS), strict=True)
            ]
        )
        if differ.any():
            rows = differ.nonzero().flatten().tolist()
            mask = " (the mask token's among them)" if self.shape.mask_token_id in rows else ""
            raise InputError(
                f"{name} has an {_EMBEDDING} of its own that differs from the target's in {len(rows)} rows{mask}, expected none, "
                "since the drafter is given the target's; give the target that it was trained for, or another drafter"
            )

    def build(self) -> Drafter:
        """The drafter, float32, on the CPU."""
        with torch.device("meta"):
            drafter = Drafter(self.shape)
        # Copied into memory of torch's own: on the CPU the last bits of a product depend on alignment.
        drafter = drafter.to_empty(device="cpu")
        drafter.load_state_dict(self.state_dict)
        return drafter


def read_drafter(
    source: Storage | str | Path, *, revision: str = "main", num_target_layers: int | None = None
) -> ImportedDrafter:
    """The drafter in a folder, under a URL (file, s3) or of a Hugging Face id.

    Args:
        revision: branch, tag or commit of a Hugging Face id.
        num_target_layers: layers of the target, which published speculators files do not name.

    Raises:
        InputError: nothing there, or not a drafter that this version computes.
        CorruptError: config.json and the tensors do not fit each other.
    """
    storage = source if isinstance(source, Storage) else _open(source, revision)
    body, tensors, content = _read_files(storage)
    layout = layout_of(body)
    shape = LAYOUTS[layout].shape_from_config(body, num_target_layers)
    tensors = dict(_multiplied_out(storage.url, tensors))
    embedding_VH = tensors.pop(_EMBEDDING, None)
    token_ids_D, head_DH = _own_head(storage.url, body, shape, tensors)
    with torch.device("meta"):
        wanted = Drafter(shape).state_dict()
    _check_tensors(storage.url, tensors, wanted)
    return ImportedDrafter(
        layout=layout,
        shape=shape,
        state_dict={name: tensors[name].float() for name in wanted},
        head_DH=head_DH,
        token_ids_D=token_ids_D,
        content=content,
        embedding_VH=embedding_VH,
    )


# --- files -------------------------------------------------------------------------------------


def _open(source: str | Path, revision: str) -> Storage:
    text = str(source)
    if "://" in text:
        return Storage.from_url(text)
    if Path(text).expanduser().is_dir():
        return Storage.from_url(text)
    if _HUB_ID.match(text) and not text.startswith("."):
        return Storage.from_url(str(_download(text, revision)))
    raise InputError(
        f"drafter folder {text!r} does not exist; give an existing folder, a URL or a hub id"
    )


def _download(hub_id: str, revision: str) -> Path:
    """The drafter's files of a hub repository, in the local cache."""
    from huggingface_hub import snapshot_download

    try:
        patterns = ["config.json", "*.safetensors", "*.safetensors.index.json"]
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the HTTP client's own errors share no base with OSError
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise InputError(
            f"drafter {hub_id!r} at revision {revision!r} is no folder here and cannot be fetched from the "
            f"hub: {reason}; check the name, the network, and HF_TOKEN if it is private"
        ) from error


def _read_files(storage: Storage) -> tuple[dict, dict[str, Tensor], str]:
    """config.json, every tensor by name, and the hash of all of it."""
    try:
        config = storage.get("config.json")
        names = ["model.safetensors"]
        if storage.exists("model.safetensors.index.json"):
            index = json.loads(storage.get("model.safetensors.index.json"))
            names = sorted(set(index["weight_map"].values()))
        digests, tensors = {"config.json": sha256(config)}, {}
        for name in names:
            data = storage.get(name)
            digests[name] = sha256(data)
            tensors |= load(data)
        return json.loads(config), tensors, "content:" + sha256(canonical_json(digests))[:40]
    except FileNotFoundError as error:
        raise InputError(f"{error}; expected config.json and model.safetensors there") from error
    except DFlashError:
        raise
    except Exception as error:
        raise CorruptError(
            f"{storage.url} holds no readable drafter: {error}; export it again"
        ) from error


# --- tensors -----------------------------------------------------------------------------------


def _multiplied_out(url: str, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, quantised ones times their scales; scales are left out."""
    for name, tensor in tensors.items():
        if name.endswith(f".weight{_SCALE}"):
            continue
        if tensor.dtype in _QUANTISED:
            scale = tensors.get(name + _SCALE)
            if scale is None:
                raise CorruptError(
                    f"{url}: {name} is {tensor.dtype} and has no scale {name}{_SCALE}; export it again"
                )
            tensor = tensor.float() * scale.float()
        yield name, tensor


def _own_head(
    url: str, body: dict, shape: DrafterShape, tensors: dict[str, Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Takes token ids and head out of `tensors`, and drops what is the target's."""
    for name in _BORROWED & tensors.keys():
        del tensors[name]
    head, offsets = tensors.pop("lm_head.weight", None), tensors.pop("d2t", None)
    size = body.get("draft_vocab_size") or shape.vocab_size
    if size >= shape.vocab_size:
        if head is not None and head.shape != (shape.vocab_size, shape.hidden_size):
            raise CorruptError(
                f"{url}: lm_head.weight has shape {list(head.shape)}, expected "
                f"{[shape.vocab_size, shape.hidden_size]} of the whole vocabulary; export it again"
            )
        return None, None if head is None else head.float()
    if head is None or offsets is None or not len(head) == len(offsets) == size:
        raise CorruptError(
            f"{url}: draft_vocab_size {size} of {shape.vocab_size} needs lm_head.weight and d2t of that many "
            "rows; export it again"
        )
    token_ids_D = torch.arange(size) + offsets.long()
    if token_ids_D.min() < 0 or token_ids_D.max() >= shape.vocab_size:
        raise CorruptError(
            f"{url}: d2t leads to token {int(token_ids_D.max())}, the target has {shape.vocab_size}; it must "
            "hold offsets, target id minus draft id"
        )
    return token_ids_D, head.float()


def _check_tensors(url: str, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    problems = [f"{name} is missing" for name in sorted(wanted.keys() - found.keys())]
    problems += [f"{name} is not known" for name in sorted(found.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & found.keys()):
        if found[name].shape != wanted[name].shape:
            shapes = f"{list(found[name].shape)}, expected {list(wanted[name].shape)}"
            problems.append(f"{name} has shape {shapes}")
        elif found[name].dtype not in _FLOATS:
            problems.append(f"{name} is {found[name].dtype}, expected a float type")
    if problems:
        raise CorruptError(
            f"{url}: the tensors do not fit config.json ({len(problems)} of them): {'; '.join(problems[:3])}"
        )
