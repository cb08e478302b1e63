"""Extraction: the target over every pack, its tapped layers into the hidden-state store.

The target is loaded once, up to the last tap. While one pack is encoded and uploaded by a small pool of
threads, the next one is computed; a fixed number of buffers bounds the memory, so nothing piles up when
the network is slow. A pack counts when its commit record exists.

Shape letters: B sequences of a batch, S tokens of its longest, T rows of a pack, N tokens of a batch, L taps,
H hidden size.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from dflash_core.config import ExtractConfig, Runtime, TargetConfig
from dflash_core.errors import DFlashError, InputError
from dflash_core.hidden_states import (
    Layout,
    Written,
    check_rows,
    create_store,
    pack_unit,
    read_contract,
    read_layout,
    write_pack,
)
from dflash_core.manifest import Dataset, require_same
from dflash_core.packed_forward import can_pack, enable_packing, packed_forward
from dflash_core.packing import Pack
from dflash_core.progress import Progress, silent
from dflash_core.storage import Storage
from dflash_core.target import (
    check_layer_ids,
    default_target_layer_ids,
    identify,
    load_body,
    require_fast_kernels,
    resolve_device,
    tap_layers,
    text_config,
)
from dflash_core.tokenization import STAGE as TOKENS
from dflash_core.tokenization import Tokens

log = logging.getLogger(__name__)

STAGE = "hidden"
VERSION = 1

CONVENTION = (
    "output of decoder layer k, 0-based, before any final norm: Hugging Face hidden_states[k + 1]"
)
# The parity check: samples of a pack, tokens of each, rows compared at each end of it, and the least mean
# cosine. A sample that sees its neighbour, or a shifted layer, falls far below; rounding does not.
_CHECK_SAMPLES, _CHECK_TOKENS, _CHECK_ROWS = 4, 2048, 32
_LEAST_COSINE = {torch.float32: 0.999, torch.bfloat16: 0.99, torch.float16: 0.99}


# --- the stage ---------------------------------------------------------------------------------


def plan(
    root: Storage, name: str, tokens: Dataset, target: TargetConfig, config: ExtractConfig
) -> Dataset:
    """The store of this request, new or continued, with its metadata written.

    Raises:
        InputError: layers that the target does not have, or a disk too small for the store.
        MismatchError: the tokens were made with another tokenizer or template.
        IncompleteError: the tokens are not complete.
    """
    contract = _contract(tokens.require_stage(TOKENS), target, config)
    resolved = config.model_copy(update={"target_layer_ids": contract["target_layer_ids"]})
    dataset = Dataset.create(
        root,
        STAGE,
        name,
        version=VERSION,
        config={"extract": resolved.model_dump(mode="json"), "contract": contract},
        inputs={"tokens": tokens.fingerprint},
    )
    if not dataset.complete:
        hidden_size = text_config(target).hidden_size
        num_taps = len(contract["target_layer_ids"])
        layout = create_store(
            dataset, Tokens.open(tokens), num_taps, hidden_size, contract, resolved
        )
        _require_space(dataset, layout, tokens.facts["total_tokens"])
    return dataset


def units(dataset: Dataset) -> list[int]:
    """All packs of the store."""
    return list(range(read_layout(dataset).num_packs))


def missing(dataset: Dataset) -> list[int]:
    """Packs without a commit record, in order."""
    done = dataset.committed()
    return [pack for pack in units(dataset) if pack_unit(pack) not in done]


def seal(dataset: Dataset) -> dict:
    """Writes the manifest once every pack is committed. Raises IncompleteError when one is not."""
    names = [pack_unit(pack) for pack in units(dataset)]
    if dataset.complete or missing(dataset):
        return dataset.seal(names, {})  # the manifest that stands, or which pack is missing
    layout, contract = read_layout(dataset), read_contract(dataset)
    records = dataset.records(names).values()
    facts = {
        "num_packs": layout.num_packs,
        "pack_tokens": layout.pack_tokens,
        "num_taps": layout.num_taps,
        "hidden_size": layout.hidden_size,
        "target_layer_ids": contract["target_layer_ids"],
        "num_tokens": sum(record["num_tokens"] for record in records),
        "num_samples": sum(record["num_samples"] for record in records),
        "size_bytes": sum(shard["size"] for record in records for shard in record["shards"]),
        "absmax": max(record["absmax"] for record in records),
        "contract": contract,
    }
    return dataset.seal(names, facts)


def _contract(tokens: Dataset, target: TargetConfig, config: ExtractConfig) -> dict:
    """What the states depend on, after checking that tokens, layers and target fit each other."""
    identity = identify(target).contract()
    made_with: dict = tokens.facts["contract"]
    shared = ("tokenizer_hash", "template_hash")
    require_same(
        f"target {target.id!r} and the tokens {tokens.path}",
        {key: identity[key] for key in shared},
        {key: made_with[key] for key in shared},
        "tokenize for this target, or extract with a target that has their tokenizer and template",
    )
    num_layers = text_config(target).num_hidden_layers
    layer_ids = config.target_layer_ids or default_target_layer_ids(num_layers)
    check_layer_ids(layer_ids, num_layers)
    return {
        **identity,
        "target_dtype": target.dtype,
        "target_layer_ids": layer_ids,
        "layer_convention": CONVENTION,
        "dtype": "bfloat16",
        "thinking": made_with["thinking"],
        "tokens": tokens.fingerprint,
    }


def _require_space(dataset: Dataset, layout: Layout, total_tokens: int) -> None:
    """Raises InputError when a local root has less free space than the missing packs will take."""
    folder = dataset.root.local_path
    if folder is None:
        return
    share = len(missing(dataset)) / layout.num_packs
    needed = total_tokens * layout.row_bytes * share
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise InputError(
            f"the hidden states need {needed / 2**30:.2f} GiB ({total_tokens} tokens of {layout.row_bytes} "
            f"bytes) and {folder} has {free / 2**30:.2f} GiB free; use fewer tokens or layers, or another root"
        )


# --- the engine --------------------------------------------------------------------------------


class Extractor:
    """A loaded target that fills packs of one store; made once for each GPU, used for many spans.

    Attributes:
        path: `packed` or `padded`, known after the first pack.
    """

    def __init__(
        self, dataset: Dataset, tokens: Dataset, target: TargetConfig, runtime: Runtime
    ) -> None:
        """Loads the target up to its last tap.

        Raises:
            MismatchError: target or tokens are not those that the store was planned with.
            InputError: the device is not there, or a GPU lacks the kernels of a hybrid target.
        """
        contract = read_contract(dataset)
        asked = ExtractConfig.model_validate(dataset.config["extract"])
        advice = "name the target and tokens it was planned with"
        require_same(f"store {dataset.path}", _contract(tokens, target, asked), contract, advice)
        began = time.perf_counter()
        self._dataset = dataset
        self._layout = read_layout(dataset)
        self._tokens = Tokens.open(tokens)
        self._runtime = runtime
        self._layer_ids: list[int] = contract["target_layer_ids"]
        self._num_rows: int = text_config(target).vocab_size
        self._dtype: torch.dtype = getattr(torch, target.dtype)
        self._device = resolve_device(runtime.device)
        self._body = load_body(target, self._layer_ids, self._device)
        require_fast_kernels(self._body, self._device, runtime.slow_kernels)
        self.path = ""
        self._buffer_TLH = None if self._device.type == "cpu" else self._new_buffer(self._device)
        self._seconds = {"load": time.perf_counter() - began}

    def extract(self, packs: Sequence[int], progress: Progress = silent) -> dict[str, float]:
        """Computes, writes and commits the packs, in order.

        Returns:
            tokens_per_s of this call, and the seconds spent so far by kind: load, check, read, forward,
            copy, wait (for a free buffer), and, summed over the writer threads, encode and upload.

        Raises:
            InputError: NaN or infinity, or a token id without an embedding row; the sample is named and its
                pack is not committed. Packs that are being written are finished first.
        """
        began, num_tokens, done = time.perf_counter(), 0, 0
        free = [self._new_buffer(torch.device("cpu")) for _ in range(self._num_buffers(packs))]
        writing: deque[tuple[Future[Written], Tensor]] = deque()
        numbers: dict[str, float] = {}

        def settle() -> None:
            nonlocal num_tokens, done, numbers
            written, buffer_TLH = writing[0][0].result(), writing[0][1]
            writing.popleft()
            free.append(buffer_TLH)
            num_tokens, done = num_tokens + written.record["num_tokens"], done + 1
            self._add("encode", written.encode_s)
            self._add("upload", written.upload_s)
            numbers = self._numbers(num_tokens / (time.perf_counter() - began))
            progress(done, len(packs), numbers)

        with ThreadPoolExecutor(self._runtime.writer_threads) as writers:
            for pack in self._read_ahead(packs):
                while writing and (not free or writing[0][0].done()):
                    waited = time.perf_counter()
                    settle()
                    self._add("wait", time.perf_counter() - waited)
                host_TLH = free.pop()
                absmax = self._fill(pack, host_TLH)
                writing.append((writers.submit(self._write, pack, host_TLH, absmax), host_TLH))
            while writing:
                settle()
        return numbers

    def _write(self, pack: Pack, host_TLH: Tensor, absmax: float) -> Written:
        facts = {"path": self.path, "device": self._device.type, "torch": str(torch.__version__)}
        return write_pack(self._dataset, self._layout, pack, host_TLH, absmax, facts)

    def _fill(self, pack: Pack, host_TLH: Tensor) -> float:
        """Computes the pack into `host_TLH` and returns its largest magnitude."""
        self._check_ids(pack)
        out_TLH = host_TLH if self._buffer_TLH is None else self._buffer_TLH
        began = time.perf_counter()
        with torch.inference_mode():
            if self.path:
                self._forward(self.path, pack, out_TLH)
            else:
                self.path = self._choose_path(pack, out_TLH)
            absmax = check_rows(pack, out_TLH)  # waits for the device
            computed = time.perf_counter()
            if out_TLH is not host_TLH:
                host_TLH.copy_(out_TLH)
        self._add("forward", computed - began)
        self._add("copy", time.perf_counter() - computed)
        return absmax

    def _forward(self, path: str, pack: Pack, out_TLH: Tensor) -> None:
        """The pack's states into `out_TLH`, zeros past its last sample."""
        out_TLH[pack.num_tokens :] = 0
        if path == "packed":

            def sink(tap: int, states_1NH: Tensor) -> None:
                out_TLH[: pack.num_tokens, tap] = states_1NH[0].to(torch.bfloat16)

            with tap_layers(self._body, self._layer_ids, sink):
                packed_forward(self._body, pack, self._device)
            return
        for ids_BS, rows_N, cells_N in padded_batches(pack, self._runtime.batch_tokens):
            self._forward_batch(ids_BS, rows_N, cells_N, out_TLH)

    def _forward_batch(
        self, ids_BS: Tensor, rows_N: Tensor, cells_N: Tensor, out_TLH: Tensor
    ) -> None:
        rows_N, cells_N = rows_N.to(self._device), cells_N.to(self._device)

        def sink(tap: int, states_BSH: Tensor) -> None:
            out_TLH[rows_N, tap] = states_BSH.flatten(0, 1)[cells_N].to(torch.bfloat16)

        # Causal layers never let a real token see the padding on its right, so no mask is needed.
        with tap_layers(self._body, self._layer_ids, sink):
            self._body(input_ids=ids_BS.to(self._device), use_cache=False)

    def _choose_path(self, pack: Pack, out_TLH: Tensor) -> str:
        """The fastest path whose states are those of one-sample forwards; leaves them in `out_TLH`."""
        paths = ["padded"]
        if can_pack(self._body, self._device, self._dtype):
            enable_packing(self._body)
            paths.insert(0, "packed")
        for path in paths:
            self._forward(path, pack, out_TLH)
            began = time.perf_counter()
            cosine = self._cosine_with_single_forwards(pack, out_TLH)
            self._add("check", time.perf_counter() - began)
            if cosine >= _LEAST_COSINE[self._dtype]:
                log.info("%s forward agrees with one-sample forwards: cosine %.6f", path, cosine)
                return path
            log.warning("%s forward differs from one-sample forwards: cosine %.6f", path, cosine)
        raise DFlashError(
            f"hidden states of pack {pack.index} differ from those of its samples alone (mean cosine "
            f"{cosine:.4f}, expected {_LEAST_COSINE[self._dtype]}); this target mixes the samples of a batch "
            "and cannot be extracted"
        )

    def _cosine_with_single_forwards(self, pack: Pack, out_TLH: Tensor) -> float:
        """The worst mean cosine, over samples spread over the pack and taps, at both ends of a sample."""
        count = min(_CHECK_SAMPLES, len(pack.samples))
        worst = 1.0
        for document in np.linspace(0, len(pack.samples) - 1, count).astype(int).tolist():
            start = int(pack.start[document])
            length = min(int(pack.length[document]), _CHECK_TOKENS)
            alone_SLH = self._single_forward(pack.input_ids[start : start + length])
            rows = torch.arange(length, device=self._device)
            rows = rows[(rows < _CHECK_ROWS) | (rows >= length - _CHECK_ROWS)]
            ours, alone = out_TLH[start + rows].float(), alone_SLH[rows].float()
            means_L = cosine_similarity(ours, alone, dim=-1).mean(dim=0)
            worst = min(worst, float(torch.nan_to_num(means_L, nan=-1.0).min()))
        return worst

    def _single_forward(self, input_ids: np.ndarray) -> Tensor:
        """Taps of one sample alone, [S, L, H], after checking which layers they come from."""
        ids = torch.from_numpy(input_ids.astype(np.int64))[None].to(self._device)
        with tap_layers(self._body, self._layer_ids) as taps:
            result = self._body(input_ids=ids, use_cache=False, output_hidden_states=True)
        taps_SLH = taps.stack()[0]
        for tap, layer in enumerate(self._layer_ids):
            if not torch.equal(
                taps_SLH[:, tap].nan_to_num(), result.hidden_states[layer + 1][0].nan_to_num()
            ):
                raise DFlashError(
                    f"tap {tap} is not the output of decoder layer {layer} as Transformers reports it "
                    f"(hidden_states[{layer + 1}]); {type(self._body).__name__} is not supported"
                )
        return taps_SLH

    def _check_ids(self, pack: Pack) -> None:
        row = int(pack.input_ids.argmax())
        if pack.input_ids[row] >= self._num_rows:
            document = int(np.searchsorted(pack.start, row, side="right")) - 1
            raise InputError(
                f"sample {pack.samples[document]} holds token id {pack.input_ids[row]}, but the target's "
                f"embedding has {self._num_rows} rows; the tokens belong to another target"
            )

    def _read_ahead(self, packs: Sequence[int]) -> Iterator[Pack]:
        """The packs' tokens, the next one being read while one is used."""
        with ThreadPoolExecutor(1) as reader:
            ahead = deque([reader.submit(self._tokens.read_pack, packs[0])] if packs else [])
            for following in [*packs[1:], None]:
                if not ahead:
                    return
                began = time.perf_counter()
                pack = ahead.popleft().result()
                self._add("read", time.perf_counter() - began)
                if following is not None:
                    ahead.append(reader.submit(self._tokens.read_pack, following))
                yield pack

    def _new_buffer(self, device: torch.device) -> Tensor:
        layout = self._layout
        shape = (layout.pack_tokens, layout.num_taps, layout.hidden_size)
        pinned = device.type == "cpu" and self._device.type == "cuda"
        return torch.empty(shape, dtype=torch.bfloat16, device=device, pin_memory=pinned)

    def _num_buffers(self, packs: Sequence[int]) -> int:
        """One for each writer and one to compute into."""
        return min(self._runtime.writer_threads + 1, len(packs))

    def _add(self, kind: str, seconds: float) -> None:
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds

    def _numbers(self, tokens_per_s: float) -> dict[str, float]:
        seconds = {f"{kind}_s": round(value, 3) for kind, value in self._seconds.items()}
        return {"tokens_per_s": round(tokens_per_s, 1), **seconds}


def padded_batches(pack: Pack, batch_tokens: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The pack's samples as right-padded batches of similar length, longest first.

    Yields:
        ids_BS: int64, zeros on the right; B * S is at most `batch_tokens`, or B is 1.
        rows_N: int64, the pack rows of the batch's tokens.
        cells_N: int64, where the same tokens lie in the flattened [B, S].
    """
    order = np.argsort(-pack.length, kind="stable")
    first = 0
    while first < len(order):
        longest = int(pack.length[order[first]])
        batch = order[first : first + max(1, batch_tokens // longest)]
        first += len(batch)
        ids = np.zeros((len(batch), longest), np.int64)
        rows, cells = [], []
        for line, document in enumerate(batch):
            start, length = int(pack.start[document]), int(pack.length[document])
            ids[line, :length] = pack.input_ids[start : start + length]
            rows.append(np.arange(start, start + length))
            cells.append(np.arange(length) + line * longest)
        yield (
            torch.from_numpy(ids),
            torch.from_numpy(np.concatenate(rows)),
            torch.from_numpy(np.concatenate(cells)),
        )
