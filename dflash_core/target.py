"""The target model: which one exactly, and how to load no more of it than a stage needs.

Shape letters: B sequences, T tokens of a sequence, L taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import importlib
import importlib.util
import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from dflash_core.chat import require_options
from dflash_core.config import TargetConfig
from dflash_core.errors import InputError
from dflash_core.layer_split import device_map
from dflash_core.manifest import canonical_json, sha256

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

# Weights up to this size are hashed whole (about 4 s); above it headers and evenly spaced windows are.
_WHOLE_BYTES = 2 * 2**30
_WINDOW_BYTES, _WINDOWS = 2**20, 64
# What transformers reads when tokenizer.json is there, and what it falls back to when it is not.
_FAST_TOKENIZER = ("tokenizer.json",)
_SLOW_TOKENIZER = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_GDN_FUNCTIONS = (
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "causal_conv1d_fn",
    "causal_conv1d_update",
)


# --- identity ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetIdentity:
    """Which target it is, down to the bytes; two targets are the same when their contracts are.

    `revision` is a commit of the hub, or `content:<hash>` of a local folder. The hash covers
    config.json, tokenizer, template and safetensors: whole up to 2 GiB of weights, above that every
    header (names, shapes, sizes) and 64 evenly spaced windows of 1 MiB from each file.
    """

    id: str
    revision: str
    config_hash: str
    tokenizer_hash: str
    template_hash: str
    """Of the template; the options that it is printed with, if any, stand behind it as they are."""
    trust_remote_code: bool

    def contract(self) -> dict[str, str]:
        """What readers compare. A local folder counts by content: it may lie elsewhere tomorrow."""
        local = self.revision.startswith("content:")
        return {
            "target": "a local folder" if local else self.id,
            "target_revision": self.revision,
            "target_config_hash": self.config_hash,
            "tokenizer_hash": self.tokenizer_hash,
            "template_hash": self.template_hash,
            "trust_remote_code": str(self.trust_remote_code).lower(),
        }


def identify(target: TargetConfig, *, require_template: bool = False) -> TargetIdentity:
    """Resolves the target to exact bytes. Cached in the process while the files stay as they are.

    Raises:
        InputError: unknown id or folder, unreachable hub, no config.json or tokenizer, token ids without
            an embedding row, no chat template when `require_template` is set, or options that it does not read.
    """
    identity = _identify(target, _state_of_files(target))
    if require_template and not identity.template_hash:
        raise InputError(
            f"target {target.id!r} has no chat template; use an instruction-tuned target, "
            "or put a chat_template.jinja beside its tokenizer"
        )
    return identity


@functools.lru_cache(maxsize=16)
def _identify(target: TargetConfig, state: tuple) -> TargetIdentity:
    config = _file(target, "config.json")
    if config is None:
        raise InputError(
            f"target {target.id!r} has no config.json; expected a Transformers checkpoint"
        )
    tokenizer = load_tokenizer(target)
    _check_vocabulary(target, tokenizer)
    template = tokenizer.chat_template or ""
    template = template if isinstance(template, str) else canonical_json(template)
    config_hash = sha256(canonical_json(json.loads(config.read_text())))[:16]
    tokenizer_hash = _tokenizer_hash(target)
    template_hash = sha256(template)[:16] if template else ""
    options = target.template_options
    require_options(tokenizer, options)
    revision = _commit(target)
    if revision is None:
        weights = _weights_hash(sorted(Path(target.id).expanduser().glob("*.safetensors")))
        parts = [config_hash, tokenizer_hash, template_hash, weights]
        revision = "content:" + sha256(canonical_json(parts))[:40]
    return TargetIdentity(
        id=target.id,
        revision=revision,
        config_hash=config_hash,
        tokenizer_hash=tokenizer_hash,
        template_hash=template_hash + (f" with {canonical_json(options)}" if options else ""),
        trust_remote_code=target.trust_remote_code,
    )


def _state_of_files(target: TargetConfig) -> tuple:
    """Changes when a file of a local folder does; constant for the hub, where commits never change."""
    folder = _local_folder(target)
    if folder is None:
        return ()
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _tokenizer_hash(target: TargetConfig) -> str:
    """Hash of the files that decide token ids; the template is hashed by itself."""
    digest = hashlib.sha256()
    vocabulary = _FAST_TOKENIZER if _file(target, "tokenizer.json") else _SLOW_TOKENIZER
    for name in (*vocabulary, *_TOKENIZER_SETTINGS):
        path = _file(target, name)
        if path is None:
            continue
        data = path.read_bytes()
        if name == "tokenizer_config.json":
            settings = {k: v for k, v in json.loads(data).items() if k != "chat_template"}
            data = canonical_json(settings).encode()
        digest.update(f"{name}:{len(data)}:".encode() + data)
    return digest.hexdigest()[:16]


def _weights_hash(files: list[Path], whole_bytes: int = _WHOLE_BYTES) -> str:
    """SHA-256 over the files, or over their headers and sampled windows when they are large."""
    whole = sum(path.stat().st_size for path in files) < whole_bytes
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            for start, length in [(0, size)] if whole else _windows(file.read(8), size):
                file.seek(start)
                while length > 0 and (block := file.read(min(length, 2**24))):
                    digest.update(block)
                    length -= len(block)
    return digest.hexdigest()


def _windows(head: bytes, size: int) -> list[tuple[int, int]]:
    """The header of a safetensors file (its length is the first 8 bytes) and windows over the rest."""
    data = 8 + int.from_bytes(head, "little")
    step = max((size - data - _WINDOW_BYTES) // (_WINDOWS - 1), 1)
    starts = range(data, max(size - _WINDOW_BYTES, data) + 1, step)
    return [(0, data), *((start, _WINDOW_BYTES) for start in starts)]


# --- files: a folder or the hub ----------------------------------------------------------------


def _local_folder(target: TargetConfig) -> Path | None:
    path = Path(target.id).expanduser()
    if path.is_dir():
        return path
    if target.id.startswith(("/", ".", "~")) or target.id.count("/") > 1:
        raise InputError(
            f"target folder {target.id!r} does not exist; give an existing folder or a hub id"
        )
    return None


@functools.lru_cache(maxsize=64)
def _resolve(hub_id: str, revision: str) -> str:
    """The commit behind a branch, tag or commit; from the local cache when the hub cannot be reached."""
    from huggingface_hub import errors, hf_hub_download

    where = f"target {hub_id!r} at revision {revision!r}"
    try:
        # .../snapshots/<commit>/config.json
        return Path(hf_hub_download(hub_id, "config.json", revision=revision)).parent.name
    except errors.GatedRepoError as error:
        raise InputError(
            f"{where} is gated; accept its terms on the hub and set HF_TOKEN"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise InputError(
            f"{where} is neither a folder here nor a model on the hub; check the name, or set HF_TOKEN "
            "if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{where} does not exist; check the branch, tag or commit") from error
    except errors.LocalEntryNotFoundError as error:
        raise InputError(
            f"{where} is neither a folder here nor in the local cache, and the hub cannot be reached; "
            "check the name and the network, or download the model first"
        ) from error
    except errors.EntryNotFoundError as error:
        raise InputError(
            f"{where} has no config.json; expected a Transformers checkpoint"
        ) from error
    except OSError as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{where} cannot be fetched from the hub: {reason}") from error


def _commit(target: TargetConfig) -> str | None:
    """The hub commit, or None for a local folder."""
    return None if _local_folder(target) else _resolve(target.id, target.revision)


def _file(target: TargetConfig, name: str) -> Path | None:
    """Path of one file of the checkpoint, fetched if need be, or None when it has no such file."""
    folder = _local_folder(target)
    if folder is not None:
        path = folder / name
        return path if path.is_file() else None
    from huggingface_hub import errors, hf_hub_download

    try:
        return Path(hf_hub_download(target.id, name, revision=_commit(target)))
    except errors.EntryNotFoundError:
        return None


def _pretrained(load: Callable, target: TargetConfig, what: str, **options: Any) -> Any:
    """Calls a `from_pretrained` and turns what a user can mend into one sentence."""
    folder = _local_folder(target)
    source = {"revision": _commit(target)} if folder is None else {}
    name = target.id if folder is None else str(folder)
    try:
        return load(name, trust_remote_code=target.trust_remote_code, **source, **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if isinstance(error, InputError):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"the {what} of target {target.id!r} cannot be loaded: {reason}"
        ) from error


# --- tokenizer and configuration ---------------------------------------------------------------


def load_tokenizer(target: TargetConfig) -> PreTrainedTokenizerBase:
    """The target's tokenizer. Raises InputError when there is none."""
    from transformers import AutoTokenizer

    return _pretrained(AutoTokenizer.from_pretrained, target, "tokenizer")


def text_config(target: TargetConfig) -> PreTrainedConfig:
    """The configuration of the text decoder, taken out of a vision-language wrapper where there is one."""
    from transformers import AutoConfig

    config = _pretrained(AutoConfig.from_pretrained, target, "config.json")
    return config.get_text_config(decoder=True)


def default_target_layer_ids(num_layers: int, num_taps: int = 5) -> list[int]:
    """Evenly spaced taps from layer 1 to the third last, 0-based; fewer when the target is shallow.

    Reference: z-lab/dflash, `round(1 + i * (N - 4) / (L - 1))`.
    """
    if num_taps == 1:
        return [num_layers // 2]
    first = min(1, num_layers - 1)
    last = max(first, num_layers - 3)
    return sorted({round(first + i * (last - first) / (num_taps - 1)) for i in range(num_taps)})


def _check_vocabulary(target: TargetConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer whose ids have no embedding row.

    Added tokens that text never holds may lie past the end (Gemma 3 1B has one for images); those that
    the template or the end of an answer needs may not.
    """
    rows = text_config(target).vocab_size
    template = str(tokenizer.chat_template or "")
    added = tokenizer.get_added_vocab()
    special = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
    for token, index in tokenizer.get_vocab().items():
        if index >= rows and (token not in added or token in special or token in template):
            raise InputError(
                f"target {target.id!r}: its tokenizer gives {token!r} id {index}, but the embedding has "
                f"{rows} rows; the tokenizer does not belong to these weights"
            )


def mask_token_id(target: TargetConfig) -> int:
    """The id for unknown slots: it has an embedding row and ordinary text never produces it.

    Taken in this order: a token named like `<|mask|>`; a reserved or unused added token; a row past the
    tokenizer's last id (Qwen3: 151669, as z-lab takes it); the last special token that the template does
    not print (SmolLM2: `<empty_output>`). Padding, end, begin and template tokens never.

    Raises:
        InputError: the target has none of these.
    """
    tokenizer = load_tokenizer(target)
    rows = text_config(target).vocab_size
    taken = _ids_in_use(target, tokenizer)
    template = str(tokenizer.chat_template or "")
    free = {
        token: index
        for token, index in sorted(tokenizer.get_added_vocab().items(), key=lambda item: item[1])
        if index < rows and index not in taken and token not in template
    }
    for pattern in (r"^[<\[]\|?mask\|?[>\]]$", r"reserved|unused|placeholder|extra_id"):
        for token, index in free.items():
            if re.search(pattern, token, re.IGNORECASE):
                return index
    beyond = max(tokenizer.get_vocab().values()) + 1
    for index in range(beyond, rows):
        if index not in taken:
            return index
    special = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]
    for index in sorted(set(special) & set(free.values()), reverse=True):
        return index
    raise InputError(
        f"target {target.id!r} has no token that text never produces: no mask, reserved or other special token, and all "
        f"{rows} embedding rows are in use; set mask_token_id to one you know to be unused"
    )


def _ids_in_use(target: TargetConfig, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Begin, end, padding and unknown ids, from the tokenizer and from both configurations."""
    ids = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    ids.add(tokenizer.unk_token_id)
    settings = [text_config(target).to_dict()]
    if path := _file(target, "generation_config.json"):
        settings.append(json.loads(path.read_text()))
    for values in settings:
        for key in ("pad_token_id", "eos_token_id", "bos_token_id"):
            value = values.get(key)
            ids.update(value if isinstance(value, list) else [value])
    return {index for index in ids if index is not None}


# --- weights -----------------------------------------------------------------------------------


def load_causal_lm(target: TargetConfig, device: torch.device) -> PreTrainedModel:
    """The text model with its head, in eval mode, without gradients; vision towers are not loaded."""
    from transformers import AutoModelForCausalLM

    return _load(AutoModelForCausalLM, target, text_config(target), {"": device})


def load_body(target: TargetConfig, layer_ids: list[int], *devices: torch.device) -> nn.Module:
    """The decoder up to the last tap: layers 0 to max(layer_ids), no head, no vision.

    Its output is that of the last tap; the norm that would follow is aside, as `final_norm`. Several
    devices get a run of layers each, which `layer_split.LayerSplit` has to connect.
    """
    from transformers import AutoModel

    config = _body_config(target, layer_ids)
    places = {"": devices[0]}
    if len(devices) > 1:
        places = device_map(empty_body(target, layer_ids), devices)
    body = _load(AutoModel, target, config, places)
    body.final_norm = body.norm
    body.norm = nn.Identity()
    return body


def empty_body(target: TargetConfig, layer_ids: list[int]) -> nn.Module:
    """What `load_body` gives, without weights and their memory: for counting."""
    from transformers import AutoModel

    with torch.device("meta"):
        return AutoModel.from_config(_body_config(target, layer_ids))


def _body_config(target: TargetConfig, layer_ids: list[int]) -> PreTrainedConfig:
    config = copy.deepcopy(text_config(target))
    check_layer_ids(layer_ids, config.num_hidden_layers)
    depth = max(layer_ids) + 1
    config.num_hidden_layers = depth
    for per_layer in ("layer_types", "mlp_layer_types"):
        if getattr(config, per_layer, None):
            setattr(config, per_layer, getattr(config, per_layer)[:depth])
    return config


def check_layer_ids(layer_ids: list[int], num_layers: int) -> None:
    """Raises InputError unless the ids are ascending, distinct and in 0 .. num_layers - 1."""
    outside = [k for k in layer_ids if not 0 <= k < num_layers]
    if outside:
        raise InputError(
            f"target_layer_ids {layer_ids} names layer {outside[0]}, but the target has {num_layers} "
            f"layers; expected ids from 0 to {num_layers - 1}"
        )
    if not layer_ids or list(layer_ids) != sorted(set(layer_ids)):
        raise InputError(
            f"target_layer_ids {layer_ids} must be distinct and ascending, at least one"
        )


def _load(
    loader: Any, target: TargetConfig, config: PreTrainedConfig, places: dict[str, torch.device]
) -> Any:
    """The model with each part named in `places` on its device; the name "" is the whole."""
    # With accelerate each tensor goes straight to the GPU; without it the model passes through memory.
    on_gpu = all(device.type == "cuda" for device in places.values())
    direct = on_gpu and importlib.util.find_spec("accelerate") is not None
    with _without_load_report():
        model, info = _pretrained(
            loader.from_pretrained,
            target,
            "weights",
            config=config,
            dtype=getattr(torch, target.dtype),
            use_safetensors=True,
            output_loading_info=True,
            **({"device_map": places} if direct else {}),
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise InputError(
            f"the weights of target {target.id!r} lack {len(missing)} tensors (first: {missing[0]}); "
            "the checkpoint is incomplete or of another family"
        )
    if direct and len(places) > 1:
        # Its hooks would copy what layers share to each of them; ours do it once a device.
        importlib.import_module("accelerate.hooks").remove_hook_from_module(model, recurse=True)
    _spare_cpu_tensors_the_gpu_kernels(model)
    for name, device in places.items():
        model.get_submodule(name).to(device)
    return model.eval().requires_grad_(False)


@contextlib.contextmanager
def _without_load_report() -> Generator[None, None, None]:
    """Hides the table of tensors left out on purpose; the caller checks for missing ones."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def load_embedding_and_head(target: TargetConfig) -> tuple[Tensor, Tensor]:
    """Embedding [V, H] and output head [V, H], read tensor by tensor; one object when they are tied.

    Rows are as stored, in `target.dtype`: a factor that a family applies to its embeddings (Gemma: the
    square root of H) is not applied.
    """
    files = _tensor_files(target)
    config = text_config(target)
    embedding = _only_tensor(target, files, r"(^|\.)embed_tokens\.weight$", config)
    if embedding is None:
        raise InputError(
            f"the weights of target {target.id!r} hold no embed_tokens.weight of shape "
            f"{[config.vocab_size, config.hidden_size]}; this family is not supported"
        )
    if config.tie_word_embeddings:
        return embedding, embedding
    head = _only_tensor(target, files, r"(^|\.)lm_head\.weight$", config)
    if head is None:
        raise InputError(
            f"the weights of target {target.id!r} hold no lm_head.weight, and its config.json does not say "
            "that the head is the embedding (tie_word_embeddings); the checkpoint is incomplete"
        )
    return embedding, head


def _tensor_files(target: TargetConfig) -> dict[str, str]:
    """Names of all tensors and the file that holds each."""
    index = _file(target, "model.safetensors.index.json")
    if index is not None:
        return json.loads(index.read_text())["weight_map"]
    single = _file(target, "model.safetensors")
    if single is None:
        raise InputError(
            f"target {target.id!r} has no model.safetensors; convert its weights to safetensors first"
        )
    from safetensors import safe_open

    with safe_open(single, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), single.name)


def _only_tensor(
    target: TargetConfig, files: dict[str, str], pattern: str, config: PreTrainedConfig
) -> Tensor | None:
    """The text decoder's [V, H] tensor of that name; vision and multi-token-prediction parts pass by."""
    from safetensors import safe_open

    for name in sorted(files, key=len):
        if not re.search(pattern, name) or re.search(r"(^|\.)(mtp|vision|visual|audio)", name):
            continue
        path = _file(target, files[name])
        if path is None:
            raise InputError(
                f"target {target.id!r} lacks {files[name]}, which its index names for {name}"
            )
        with safe_open(path, framework="pt") as tensors:
            if tensors.get_slice(name).get_shape() == [config.vocab_size, config.hidden_size]:
                return tensors.get_tensor(name).to(getattr(torch, target.dtype))
    return None


# --- taps --------------------------------------------------------------------------------------


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers, wherever the family keeps it."""
    part: Any = model
    while not isinstance(getattr(part, "layers", None), nn.ModuleList):
        inner = [getattr(part, name, None) for name in ("language_model", "model", "decoder")]
        part = next((module for module in inner if isinstance(module, nn.Module)), None)
        if part is None:
            raise InputError(f"{type(model).__name__} keeps no list of decoder layers we know of")
    return part.layers


class tap_layers:
    """Collects the outputs of `layer_ids` of the last forward while the context is open.

    Tap l is the output of decoder layer layer_ids[l], 0-based: Hugging Face's hidden_states[k + 1], except
    that the last layer is taken before the final norm. With `sink`, each output goes to
    `sink(l, output_BTH)` as soon as it is computed and nothing is kept.
    """

    def __init__(
        self,
        model: nn.Module,
        layer_ids: list[int],
        sink: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        layers = decoder_layers(model)
        check_layer_ids(layer_ids, len(layers))
        self._layers = [layers[k] for k in layer_ids]
        self._outputs: list[Tensor | None] = [None] * len(layer_ids)
        self._sink = sink or self._outputs.__setitem__
        self._hooks: list = []

    def __enter__(self) -> Self:
        for tap, layer in enumerate(self._layers):
            self._hooks.append(layer.register_forward_hook(functools.partial(self._take, tap)))
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def stack(self) -> Tensor:
        """The taps of the last forward, [B, T, L, H]."""
        outputs = [output for output in self._outputs if output is not None]
        assert len(outputs) == len(self._outputs), "no forward ran inside the context"
        # Layers may lie on several devices.
        return torch.stack([output.to(outputs[-1].device) for output in outputs], dim=2)

    def _take(self, tap: int, layer: nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
        # Returns None on purpose: anything else would replace the layer's output.
        self._sink(tap, (output[0] if isinstance(output, tuple) else output).detach())


# --- fast kernels ------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """A fast kernel of Gated DeltaNet layers, and what it means to be without."""

    name: str
    package: str
    cost: str
    required: bool


KERNELS = {
    "torch_chunk_gated_delta_rule": Kernel(
        "chunk_gated_delta_rule",
        "flash-linear-attention>=0.6,<0.7",
        "plain PyTorch takes 5 to 10 times as long",
        required=True,
    ),
    # The packed forward brings its own; this one is for padded batches and decoding.
    "causal_conv1d_fn": Kernel(
        "causal_conv1d_fn",
        "causal-conv1d>=1.7,<2",
        "plain PyTorch makes a padded forward take about 1.1 times as long",
        required=False,
    ),
}


def missing_kernels(model: nn.Module) -> list[Kernel]:
    """Kernels that the model's Gated DeltaNet layers would do without; empty for other families."""
    found = [gdn_backend(module) for module in gdn_modules(model)]
    return [
        kernel
        for function, kernel in KERNELS.items()
        if any(backend[function].startswith(("transformers", "unknown")) for backend in found)
    ]


def require_fast_kernels(model: nn.Module, device: torch.device, allow_slow: bool) -> None:
    """Refuses to run Gated DeltaNet layers on a GPU without the kernels they need, unless `allow_slow`.

    Transformers goes on without them and says so in one log line. Those that cost little are named in a
    warning.

    Raises:
        InputError: names each missing kernel, the package and version that bring it, and the cost.
    """
    if device.type != "cuda":
        return
    missing = missing_kernels(model)
    lines = [f"{kernel.name} ({kernel.cost}): pip install '{kernel.package}'" for kernel in missing]
    if any(kernel.required for kernel in missing) and not allow_slow:
        raise InputError(
            "the target has Gated DeltaNet layers and kernels for them are missing: "
            + "; ".join(lines)
            + "; or set runtime.slow_kernels to go on without"
        )
    for line in lines:
        log.warning("going on without %s", line)


def gdn_modules(model: nn.Module) -> list[Any]:
    """The Python modules that define the model's Gated DeltaNet layers; empty for other families."""
    names = {type(part).__module__ for part in model.modules()}
    modules = [sys.modules[name] for name in sorted(names)]
    return [module for module in modules if hasattr(module, _GDN_FUNCTIONS[0])]


def gdn_backend(module: Any) -> dict[str, str]:
    """For each Gated DeltaNet function, the Python module of its implementation, or `unknown`.

    Reads a private closure of Transformers (5.15 and later), hence in this one place.
    """
    found = {}
    for name in _GDN_FUNCTIONS:
        function: Any = unwrapped(getattr(module, name, None))
        closure = inspect.getclosurevars(function).nonlocals if callable(function) else {}
        found[name] = getattr(closure.get("implementation"), "__module__", None) or "unknown"
    return found


def unwrapped(function: Any) -> Any:
    """The implementation below our wrappers, each of which keeps it as `by_device`."""
    return getattr(function, "by_device", function)


def _spare_cpu_tensors_the_gpu_kernels(model: nn.Module) -> None:
    """Sends CPU tensors to the plain PyTorch functions even where GPU kernels are installed.

    Transformers chooses at import, by installed packages alone, so fla on a machine without a GPU (or with
    device="cpu") would crash.
    """
    for module in gdn_modules(model):
        for name in _GDN_FUNCTIONS:
            function = getattr(module, name, None)
            if function is not None and not hasattr(function, "by_device"):
                setattr(module, name, _by_device(function))


def _by_device(fast: Callable) -> Callable:
    plain = inspect.unwrap(fast)

    @functools.wraps(fast)
    def call(first: Tensor, *args: Any, **options: Any) -> Any:
        return (fast if first.is_cuda else plain)(first, *args, **options)

    call.by_device = fast  # ty: ignore[missing-attribute]
    return call
