"""The extraction engine: from packs of tokens to committed hidden states, one of it for each GPU.

    main thread    read tokens | launch forward of pack i + 1 ...        (never waits for the device)
    GPU            forward i, taps into a device buffer, least and greatest value
    copy stream    device buffer of pack i - 1 to a pinned host slot
    writers        encode, upload, commit packs i - 2, i - 3, ...

A fixed number of slots bounds the memory: when none is free the main thread waits, so nothing piles up when
the network is slow. A pack counts when its commit record exists. On a CPU the taps go straight into the slot.

Shape letters: B sequences of a batch, S tokens of its longest, T rows of a pack, N tokens of a batch, L taps,
H hidden size.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dflash_core import float8, parity
from dflash_core.config import ExtractConfig, Runtime, TargetConfig
from dflash_core.devices import resolve_devices
from dflash_core.errors import InputError
from dflash_core.extraction import KERNELS, contract_of, read_kernels, tapped_layer_ids
from dflash_core.flops import flops_per_token, matmul_flops_per_s
from dflash_core.hidden_states import Written, check_rows, read_contract, read_layout, write_pack
from dflash_core.layer_split import LayerSplit
from dflash_core.manifest import Dataset, canonical_json, require_same
from dflash_core.packed_forward import can_pack, compile_parts, enable_packing, packed_forward
from dflash_core.packing import Pack
from dflash_core.progress import Progress, silent
from dflash_core.target import (
    decoder_layers,
    gdn_backend,
    gdn_modules,
    load_body,
    require_fast_kernels,
    tap_layers,
    text_config,
)
from dflash_core.teacher import Teacher
from dflash_core.tokenization import Tokens

log = logging.getLogger(__name__)


@dataclass
class _Slot:
    """Host memory of one pack on its way out.

    On a GPU the events say when its forward began and ended and when its bytes are here.
    """

    hidden_TLH: Tensor
    range_2: Tensor
    extras: dict[str, Tensor]
    events: tuple[torch.cuda.Event, ...] = ()

    def wait(self) -> None:
        """Returns when the pack's bytes are in `hidden_TLH`."""
        if self.events:
            self.events[2].synchronize()

    def states(self) -> Tensor:
        """The states as numbers, whatever type they are stored in."""
        if self.hidden_TLH.dtype == float8.DTYPE:
            return float8.dequantize(self.hidden_TLH, self.extras["scale"])
        return self.hidden_TLH

    def seconds(self) -> tuple[float, float]:
        """Of the forward and of the copy to the host, on the device's clock."""
        if not self.events:
            return 0.0, 0.0
        began, ended, copied = self.events
        return began.elapsed_time(ended) / 1e3, ended.elapsed_time(copied) / 1e3


class _Writing(NamedTuple):
    future: Future[Written]
    slot: _Slot


class Extractor:
    """A loaded target that fills packs of one store; made once for each GPU, used for many spans.

    Attributes:
        path: `packed` or `padded`, known after the first pack.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokens: Dataset,
        target: TargetConfig,
        runtime: Runtime,
        body: nn.Module | None = None,
    ) -> None:
        """Loads the target up to its last tap, unless `body` is it already.

        Raises:
            MismatchError: target or tokens are not those that the store was planned with.
            InputError: the device is not there, or a GPU lacks the kernels of a hybrid target.
        """
        contract = read_contract(dataset)
        asked = ExtractConfig.model_validate(dataset.config["extract"])
        advice = "name the target and tokens it was planned with"
        require_same(f"store {dataset.path}", contract_of(tokens, target, asked), contract, advice)
        began = time.perf_counter()
        if runtime.kernel_cache:
            for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
                os.environ[name] = os.path.join(runtime.kernel_cache, name.split("_")[0].lower())
        self.path = ""
        self._dataset = dataset
        self._layout = read_layout(dataset)
        self._tokens = Tokens.open(tokens)
        self._runtime = runtime
        self._layer_ids = tapped_layer_ids(contract)
        self._num_rows: int = text_config(target).vocab_size
        self._dtype: torch.dtype = getattr(torch, target.dtype)
        self._devices = resolve_devices(runtime.device, runtime.gpus_per_target)
        self._device = self._devices[0]
        if self._device.index is not None:
            # Else pinned memory opens a context on the first GPU.
            torch.cuda.set_device(self._device)
        self._body = body or load_body(target, self._layer_ids, *self._devices)
        layers = decoder_layers(self._body)
        if len(self._devices) > len(layers):
            raise InputError(
                f"gpus_per_target is {len(self._devices)} and {len(layers)} layers are loaded, up to the last tap; "
                "expected a layer or more for each GPU"
            )
        self._split = LayerSplit(layers, self._devices)
        require_fast_kernels(self._body, self._device, runtime.slow_kernels)
        self._teacher = Teacher(target, self._body) if self._layout.teacher_top_k else None
        self._most_tokens = runtime.batch_tokens
        self._stop = threading.Event()
        self._slots: list[_Slot] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._gpu = _Gpu(self._new_buffers(2), self._body) if self._on_gpu else None
        self._seconds["load"] = time.perf_counter() - began

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def stop(self) -> None:
        """Takes no further packs; `extract` commits those under way and returns. For any thread."""
        self._stop.set()

    def extract(self, packs: Sequence[int], progress: Progress = silent) -> dict[str, float]:
        """Computes, writes and commits the packs, in order.

        The first call checks the forward against one-sample forwards and compiles, before it counts. In a
        process's main thread SIGTERM has the packs under way committed before it ends the process.

        Returns:
            tokens_per_s of this call; slots_in_use; on a GPU also mfu (share of the measured speed of a
            large matrix product), busy (share of the time with a forward on the device) and gpu_gib; and
            the seconds spent so far by kind: load, check, read (waiting for tokens), wait (for a free slot),
            forward, copy, and, summed over the writer threads, encode and upload.

        Raises:
            InputError: NaN or infinity, or a token id without an embedding row; the sample is named and its
                pack is not committed. Packs that are being written are finished first.
            DFlashError: the states are not those of one-sample forwards; the message holds the table.
        """
        if not packs:
            return {}
        if not self.path:
            self._prepare(self._tokens.read_pack(packs[0]))
        self._allot_slots(len(packs))
        tally = _Tally(len(packs), progress)
        writing: deque[_Writing] = deque()
        free = deque(self._slots)

        def settle() -> None:
            written = writing[0].future.result()
            slot = writing.popleft().slot
            free.append(slot)
            forward_s, copy_s = slot.seconds()
            self._seconds["forward"] += forward_s
            self._seconds["copy"] += copy_s
            self._seconds["encode"] += written.encode_s
            self._seconds["upload"] += written.upload_s
            tally.add(written.record["num_tokens"], forward_s)
            tally.report(self._numbers(tally, len(writing)))

        with self._drain_on_sigterm(), ThreadPoolExecutor(self._runtime.writer_threads) as writers:
            for pack in self._read_ahead(packs):
                while writing and (not free or writing[0].future.done()):
                    began = time.perf_counter()
                    settle()
                    self._seconds["wait"] += time.perf_counter() - began
                slot = free.popleft()
                self._compute(pack, slot)
                writing.append(_Writing(writers.submit(self._write, pack, slot), slot))
            while writing:
                settle()
        return tally.numbers

    # --- preparation ---

    def _prepare(self, pack: Pack) -> None:
        """Chooses the forward, compiles it, and checks its states of one pack before any is believed."""
        began = time.perf_counter()
        self._check_ids(pack)
        with torch.inference_mode():
            native = parity.native_states(self._body, self._layer_ids, pack, self._device)
            self.path = self._choose_path()
            ours_TLH, replaced_TLH = self._gpu.buffers if self._gpu else self._new_buffers(2)
            try:
                self._forward(pack, ours_TLH)
                check_rows(pack, ours_TLH)
                self._forward(parity.replace_every_second(pack), replaced_TLH)
                table = parity.compare(pack, ours_TLH, replaced_TLH, native)
            except Exception:
                self.path = ""  # the next call checks again
                raise
        log.info("%s forward: %s", self.path, table.summary())
        self._agree_on_kernels()
        self._seconds["check"] += time.perf_counter() - began

    def _choose_path(self) -> str:
        if self._runtime.forward == "padded" or not can_pack(self._body, self._device, self._dtype):
            return "padded"
        enable_packing(self._body)
        if self._runtime.compile and self._on_gpu:
            compile_parts(self._body)
        self._most_tokens = self._layout.pack_tokens
        return "packed"

    def _agree_on_kernels(self) -> None:
        """Refuses to fill a store with other Gated DeltaNet kernels than those it was begun with.

        Two implementations of the short convolution differ more than two runs of one (0.996 in cosine).
        """
        modules = gdn_modules(self._body)
        if not modules:
            return
        rule, convolution = "torch", "torch"  # all that a CPU has
        if self._on_gpu:
            backend = gdn_backend(modules[0])
            rule, convolution = backend["torch_chunk_gated_delta_rule"], backend["causal_conv1d_fn"]
        if self.path == "packed":
            convolution = "fla.modules.causal_conv1d"
        ours = {"gated_delta_rule": rule, "convolution": convolution}
        if not self._dataset.storage.put_new(KERNELS, canonical_json(ours).encode()):
            theirs = read_kernels(self._dataset)
            advice = (
                "extract where the same kernels are installed, or into a new store (another name)"
            )
            require_same(f"store {self._dataset.path} and this machine", ours, theirs, advice)

    # --- a pack ---

    def _compute(self, pack: Pack, slot: _Slot) -> None:
        """The pack's states on their way into the slot; on a GPU this returns before they are there."""
        self._check_ids(pack)
        with torch.inference_mode():
            if self._gpu is None:
                began = time.perf_counter()
                self._forward(pack, slot.hidden_TLH)
                slot.range_2.copy_(_range(slot.hidden_TLH))
                slot.extras.update(self._teacher_arrays(pack, slot.hidden_TLH))
                self._seconds["forward"] += time.perf_counter() - began
            else:
                with self._gpu.next_buffer(slot, partial(self._stored, pack)) as buffer_TLH:
                    self._forward(pack, buffer_TLH)

    def _stored(self, pack: Pack, states_TLH: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What the store keeps of a pack, on the device: states in their stored type, and other arrays."""
        extras = self._teacher_arrays(pack, states_TLH)
        states_TLH = states_TLH[:, : self._layout.num_taps]
        if self._layout.torch_dtype == float8.DTYPE:
            extras["scale"] = float8.scales(states_TLH)
            states_TLH = float8.quantize(states_TLH, extras["scale"])
        return states_TLH, extras

    def _teacher_arrays(self, pack: Pack, states_TLH: Tensor) -> dict[str, Tensor]:
        if self._teacher is None:
            return {}
        return self._teacher.arrays(states_TLH[:, -1], pack.num_tokens, self._layout.teacher_top_k)

    def _write(self, pack: Pack, slot: _Slot) -> Written:
        slot.wait()
        low, high = slot.range_2.tolist()
        absmax = max(-low, high)
        if not np.isfinite(absmax):
            check_rows(pack, slot.states())  # raises, and names the sample
            raise InputError(
                f"the target's last layer gives NaN or infinity in pack {pack.index}, and the teacher's most likely "
                "tokens come of it; set the target's dtype to bfloat16 or float32"
            )
        facts = {
            "path": self.path,
            "device": self._device.type,
            "torch": str(torch.__version__),
        }
        stored_TLH = slot.hidden_TLH[:, : self._layout.num_taps]
        return write_pack(self._dataset, self._layout, pack, stored_TLH, absmax, facts, slot.extras)

    def _forward(self, pack: Pack, out_TLH: Tensor) -> None:
        """The pack's states into `out_TLH`, zeros past its last sample.

        Where the device's memory is too small, fewer tokens go into a forward, from then on.
        """
        out_TLH[pack.num_tokens :] = 0
        while True:
            try:
                return self._forward_within(self._most_tokens, pack, out_TLH)
            except torch.OutOfMemoryError:
                if self._most_tokens <= pack.length.max():
                    raise
                torch.cuda.empty_cache()
                self._most_tokens //= 2
                log.warning("out of device memory; %d tokens a forward now", self._most_tokens)

    def _forward_within(self, most_tokens: int, pack: Pack, out_TLH: Tensor) -> None:
        if self.path == "packed":
            for first_row, part in split_pack(pack, most_tokens):
                self._forward_row(part, out_TLH[first_row : first_row + part.num_tokens])
        else:
            for ids_BS, rows_N, cells_N in padded_batches(pack, most_tokens):
                self._forward_batch(ids_BS, rows_N, cells_N, out_TLH)

    def _forward_row(self, pack: Pack, out_NLH: Tensor) -> None:
        def put(tap: int, states_1NH: Tensor) -> None:
            out_NLH[:, tap] = states_1NH[0]

        with tap_layers(self._body, self._layer_ids, self._sink(put)):
            packed_forward(self._body, pack, self._device)

    def _forward_batch(
        self, ids_BS: Tensor, rows_N: Tensor, cells_N: Tensor, out_TLH: Tensor
    ) -> None:
        rows_N, cells_N = rows_N.to(out_TLH.device), cells_N.to(out_TLH.device)

        def put(tap: int, states_BSH: Tensor) -> None:
            out_TLH[rows_N, tap] = states_BSH.flatten(0, 1)[cells_N].to(torch.bfloat16)

        # Causal layers never let a real token see the padding on its right, so no mask is needed.
        with tap_layers(self._body, self._layer_ids, self._sink(put)):
            self._body(input_ids=ids_BS.to(self._device), use_cache=False)

    def _sink(self, put: Callable[[int, Tensor], None]) -> Callable[[int, Tensor], None]:
        """Calls `put` with a tap and its states on the device of the buffers, the last one."""
        return lambda tap, states: self._split.deliver(states, partial(put, tap))

    def _check_ids(self, pack: Pack) -> None:
        row = int(pack.input_ids.argmax())
        if pack.input_ids[row] >= self._num_rows:
            document = int(np.searchsorted(pack.start, row, side="right")) - 1
            raise InputError(
                f"sample {pack.samples[document]} holds token id {pack.input_ids[row]}, but the target's "
                f"embedding has {self._num_rows} rows; the tokens belong to another target"
            )

    # --- around it ---

    def _read_ahead(self, packs: Sequence[int]) -> Iterator[Pack]:
        """The packs' tokens, the next one being read while one is used; ends early after `stop`."""
        with ThreadPoolExecutor(1) as reader:
            ahead = reader.submit(self._tokens.read_pack, packs[0])
            for following in [*packs[1:], None]:
                if self._stop.is_set():
                    return
                began = time.perf_counter()
                pack = ahead.result()
                self._seconds["read"] += time.perf_counter() - began
                if following is not None:
                    ahead = reader.submit(self._tokens.read_pack, following)
                yield pack

    @contextmanager
    def _drain_on_sigterm(self) -> Generator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        arrived = threading.Event()

        def handle(*_: object) -> None:
            arrived.set()
            self.stop()

        before = signal.signal(signal.SIGTERM, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
            if arrived.is_set():
                log.warning("terminated: the packs under way are committed")
                signal.raise_signal(signal.SIGTERM)

    def _allot_slots(self, num_packs: int) -> None:
        """One slot for each writer and two to compute into, within `Runtime.slot_bytes`."""
        layout = self._layout
        size = layout.pack_tokens * layout.row_bytes
        most = max(2, min(self._runtime.writer_threads + 2, self._runtime.slot_bytes // size))
        while len(self._slots) < min(most, num_packs):
            self._slots.append(self._new_slot())

    def _new_slot(self) -> _Slot:
        """On a GPU with room for what is stored; on a CPU for the states of every tap, as computed."""
        if not self._on_gpu:
            return _Slot(self._new_buffers(1)[0], torch.empty(2), {})
        layout, pinned = self._layout, partial(torch.empty, pin_memory=True)
        rows, extras = layout.pack_tokens, {}
        if layout.torch_dtype == float8.DTYPE:
            extras["scale"] = pinned(rows, layout.num_taps)
        if layout.teacher_top_k:
            extras["teacher_ids"] = pinned(rows, layout.teacher_top_k, dtype=torch.int32)
            extras["teacher_logprobs"] = pinned(rows, layout.teacher_top_k, dtype=torch.float16)
        shape = (rows, layout.num_taps, layout.hidden_size)
        return _Slot(pinned(shape, dtype=layout.torch_dtype), pinned(2), extras)

    def _new_buffers(self, count: int) -> list[Tensor]:
        layout = self._layout
        shape = (layout.pack_tokens, len(self._layer_ids), layout.hidden_size)
        return [
            torch.empty(shape, dtype=torch.bfloat16, device=self._devices[-1]) for _ in range(count)
        ]

    def _numbers(self, tally: _Tally, slots_in_use: int) -> dict[str, float]:
        elapsed = tally.elapsed()
        numbers = {"tokens_per_s": tally.num_tokens / elapsed, "slots_in_use": slots_in_use}
        if self._gpu is not None:
            at_peak = len(self._devices) * self._gpu.tokens_per_s_at_peak
            numbers["mfu"] = numbers["tokens_per_s"] / at_peak
            numbers["busy"] = tally.forward_s / elapsed
            numbers["gpu_gib"] = max(map(torch.cuda.max_memory_allocated, self._devices)) / 2**30
        seconds = {f"{kind}_s": value for kind, value in self._seconds.items()}
        return {key: round(value, 3) for key, value in (numbers | seconds).items()}


class _Tally:
    """What one call of `extract` has done so far."""

    def __init__(self, num_packs: int, progress: Progress) -> None:
        self.numbers: dict[str, float] = {}
        self.num_tokens = 0
        self.forward_s = 0.0
        self._began = time.perf_counter()
        self._num_packs = num_packs
        self._done = 0
        self._progress = progress

    def add(self, num_tokens: int, forward_s: float) -> None:
        self.num_tokens += num_tokens
        self.forward_s += forward_s
        self._done += 1

    def elapsed(self) -> float:
        return time.perf_counter() - self._began

    def report(self, numbers: dict[str, float]) -> None:
        self.numbers = numbers
        self._progress(self._done, self._num_packs, numbers)


class _Gpu:
    """Two device buffers that take turns, and the stream that empties them."""

    def __init__(self, buffers: list[Tensor], body: nn.Module) -> None:
        self.buffers = buffers
        self._device = buffers[0].device
        self._copies = torch.cuda.Stream(self._device)
        self._emptied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        rate = matmul_flops_per_s(self._device, next(body.parameters()).dtype)
        self.tokens_per_s_at_peak = rate / flops_per_token(body)

    @contextmanager
    def next_buffer(
        self, slot: _Slot, stored: Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]
    ) -> Generator[Tensor]:
        """A buffer to compute a pack into; what `stored` makes of it at the end goes to the slot, later."""
        began, ended, copied = (
            # Blocking: a writer that waits must not spin on a core.
            torch.cuda.Event(enable_timing=True, blocking=True)
            for _ in range(3)
        )
        compute, buffer_TLH = torch.cuda.current_stream(self._device), self.buffers[self._turn]
        if (emptied := self._emptied[self._turn]) is not None:
            compute.wait_event(emptied)
        began.record(compute)
        yield buffer_TLH
        hidden_TLH, extras = stored(buffer_TLH)
        pairs = [(slot.hidden_TLH, hidden_TLH), (slot.range_2, _range(buffer_TLH))]
        pairs += [(slot.extras[name], values) for name, values in extras.items()]
        ended.record(compute)
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(ended)
            for host, device in pairs:
                host.copy_(device, non_blocking=True)
                device.record_stream(self._copies)
            copied.record(self._copies)
        slot.events = (began, ended, copied)
        self._emptied[self._turn] = copied
        self._turn = 1 - self._turn


def _range(hidden_TLH: Tensor) -> Tensor:
    """Least and greatest value, float32 [2]; both NaN when any value is."""
    return torch.stack(torch.aminmax(hidden_TLH)).float()


def split_pack(pack: Pack, most_tokens: int) -> Iterator[tuple[int, Pack]]:
    """The pack in runs of whole samples of at most `most_tokens` each, or of one sample; one where it fits.

    Yields:
        The first row of the run in the pack, and the run as a pack without rows past its end.
    """
    ends = pack.start + pack.length
    first = 0
    while first < len(ends):
        start = int(pack.start[first])
        last = int(np.searchsorted(ends, start + most_tokens, side="right"))
        run, rows = (
            slice(first, max(first + 1, last)),
            slice(start, int(ends[max(first, last - 1)])),
        )
        yield (
            start,
            Pack(
                index=pack.index,
                input_ids=pack.input_ids[rows],
                loss_mask=pack.loss_mask[rows],
                start=pack.start[run] - pack.start[first],
                length=pack.length[run],
                samples=pack.samples[run],
            ),
        )
        first = run.stop


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
