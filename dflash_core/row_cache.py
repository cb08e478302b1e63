"""A target's cache for verifying drafts, in which taking rejected rows back costs nothing.

A verify forward runs a few rows for each of several sequences: the last token of each answer and its
drafts, a chain or a tree. Then some rows stay and the others are as if they had never been run. A cache
that grows by every row it sees cannot do that; this one keeps what has been decided apart from what is
being tried:

    attention        keys and values lie at the slot of their position. New rows are written behind the
                     committed ones and are overwritten by the next forward unless they are committed; only
                     a branch that does not lie in order is moved. Windows are a matter of the mask.
    Gated DeltaNet   the state stays at the last committed row. The rows of a forward are solved against
                     it all at once, along the branches of the tree, and leave their keys, corrected
                     values and decays; a commit folds one branch of them into the state. No row is run
                     twice and no state is copied.

Sequences may have different lengths, join the batch and leave it. Rows of other kinds of layers cannot be
taken back like this; see `target_cache` for them.

Shape letters: B sequences, R rows of a forward, T slots, P rows of the longest path, h heads, D head width,
K key width and V value width of a recurrent state, C channels and W taps of a short convolution.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_SPARE_SLOTS = 256  # buffers grow by this much at a time


# --- rows --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rows:
    """Rows of a verify forward, for each sequence a tree whose row 0 is the root.

    A parent comes before its children. Sequences with fewer rows than R are filled up with rows that
    nobody asks for.
    """

    tokens_BR: Tensor
    """Token ids, int64."""
    parents_BR: Tensor
    """Index of each row's parent, int64; -1 for the root."""
    depth_BR: Tensor
    """Distance from the root, int64."""
    ancestors_BRR: Tensor
    """bool: entry [i, j] says that row j is row i or above it."""

    @classmethod
    def chains(cls, tokens: list[list[int]], device: torch.device) -> Rows:
        """One chain a sequence: every row follows the one before it."""
        tokens_BR = _padded(tokens, device)
        num_sequences, num_rows = tokens_BR.shape
        depth_R = torch.arange(num_rows, device=device)
        depth_BR = depth_R.expand(num_sequences, -1)
        ancestors_RR = depth_R[:, None] >= depth_R
        return cls(tokens_BR, depth_BR - 1, depth_BR, ancestors_RR.expand(num_sequences, -1, -1))

    @classmethod
    def trees(cls, tokens: list[list[int]], parents: list[list[int]], device: torch.device) -> Rows:
        """Any trees; `parents` begins with -1 for the root."""
        parents_BR = _padded(parents, torch.device("cpu"))
        num_sequences, num_rows = parents_BR.shape
        depth_BR = torch.zeros_like(parents_BR)
        # The column before row 0 takes what has gone past the root.
        found = torch.zeros(num_sequences, num_rows, num_rows + 1, dtype=torch.bool)
        at_BR = torch.arange(num_rows).expand(num_sequences, -1)
        while (at_BR >= 0).any():
            found.scatter_(2, at_BR[..., None] + 1, True)
            at_BR = parents_BR.gather(1, at_BR.clamp(min=0)).where(at_BR >= 0, -1)
            depth_BR += at_BR >= 0
        ancestors_BRR = found[..., 1:]
        return cls(
            _padded(tokens, device), *(x.to(device) for x in (parents_BR, depth_BR, ancestors_BRR))
        )

    @functools.cached_property
    def ancestors_as_float_BRR(self) -> Tensor:
        return self.ancestors_BRR.float()

    def lineage_BRW(self, width: int) -> Tensor:
        """What a convolution of that width reads for each row: itself and the rows above it.

        Returns:
            Columns of `width - 1` older entries followed by the R rows, int64, oldest first.
        """
        older = torch.arange(-1, width - 2, device=self.parents_BR.device).clamp(min=0)
        above = torch.cat(
            (older.expand(len(self.parents_BR), -1), self.parents_BR + width - 1), dim=1
        )
        columns = [torch.arange(self.parents_BR.shape[1], device=older.device) + width - 1]
        columns[0] = columns[0].expand_as(self.parents_BR)
        while len(columns) < width:
            columns.append(above.gather(1, columns[-1]))
        return torch.stack(columns[::-1], dim=2)


def _padded(lists: list[list[int]], device: torch.device) -> Tensor:
    longest = max(map(len, lists))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in lists], device=device)


# --- keys and values ---------------------------------------------------------------------------


class KeyValues:
    """Keys and values of several sequences, [B, h, T, D] each, with room behind the last one."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._buffers = [keys, values]

    def view(self, num_slots: int) -> tuple[Tensor, Tensor]:
        """The first slots, keys and values."""
        keys, values = self._buffers
        return keys[:, :, :num_slots], values[:, :, :num_slots]

    def write(self, keys: Tensor, values: Tensor, starts: list[int]) -> None:
        """Puts rows [B, h, R, D] of each sequence at its slots from `starts` on."""
        end = max(starts) + keys.shape[2]
        if end > self._num_slots:
            self._resize(end + _SPARE_SLOTS)
        for buffer, new in zip(self._buffers, (keys, values), strict=True):
            if min(starts) == max(starts):
                buffer[:, :, starts[0] : end] = new
            else:
                sequences_B1, slots_BR = _places(starts, new.shape[2], new.device)
                buffer.transpose(1, 2)[sequences_B1, slots_BR] = new.transpose(1, 2)

    def move(self, starts: list[int], paths_BP: Tensor) -> None:
        """Slot `start + paths[p]` of each sequence goes to slot `start + p`."""
        sequences_B1, slots_BP = _places(starts, paths_BP.shape[1], paths_BP.device)
        for buffer in self._buffers:
            by_slot = buffer.transpose(1, 2)
            by_slot[sequences_B1, slots_BP] = by_slot[sequences_B1, slots_BP[:, :1] + paths_BP]

    def add(self, other: KeyValues) -> None:
        """Its sequences join at the end of the batch."""
        size = max(self._num_slots, other._num_slots)
        for part in (self, other):
            part._resize(size)
        self._buffers = [
            torch.cat(pair) for pair in zip(self._buffers, other._buffers, strict=True)
        ]

    def keep(self, sequences_B: Tensor) -> None:
        self._buffers = [buffer.index_select(0, sequences_B) for buffer in self._buffers]

    @property
    def _num_slots(self) -> int:
        return self._buffers[0].shape[2]

    def _resize(self, num_slots: int) -> None:
        missing = num_slots - self._num_slots
        if missing:
            self._buffers = [F.pad(buffer, (0, 0, 0, missing)) for buffer in self._buffers]


def _places(starts: list[int], num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Index of each sequence [B, 1], and its slots from its start on [B, num_rows]."""
    starts_B1 = torch.tensor(starts, device=device)[:, None]
    sequences_B1 = torch.arange(len(starts), device=device)[:, None]
    return sequences_B1, starts_B1 + torch.arange(num_rows, device=device)


# --- Gated DeltaNet ----------------------------------------------------------------------------


class DeltaState:
    """Convolution and recurrent state of a Gated DeltaNet layer, and the rows that are being tried.

    Transformers hands whatever a cache returns to its convolution and to its delta rule; given one of
    these, both are computed here (`teach_rows`), along the branches of the tree.
    """

    record_past = True  # asked by Transformers 5.17; later `RowCache.is_recording_past` is
    _rows: Rows
    _lineage_BRW: Tensor

    def __init__(self, inputs_BCW: Tensor, state_BhKV: Tensor) -> None:
        """
        Args:
            inputs_BCW: the last W inputs of the convolution.
            state_BhKV: float32.
        """
        self._older = inputs_BCW[..., 1:]
        self._width = inputs_BCW.shape[-1]
        self._state = state_BhKV.float()

    @property
    def recurrent_states(self) -> dict[int, DeltaState]:
        """What Transformers 5.17 passes on as the state; later versions ask the cache."""
        return {0: self}

    def begin(self, rows: Rows, lineages: dict[int, Tensor]) -> None:
        """The rows that the next forward will run; `lineages` is shared by the layers."""
        self._rows = rows
        if self._width not in lineages:
            lineages[self._width] = rows.lineage_BRW(self._width)
        self._lineage_BRW = lineages[self._width]

    def take(self, inputs_BCR: Tensor) -> DeltaState:
        self._columns = torch.cat((self._older, inputs_BCR), dim=2)
        return self

    def convolve(
        self, weight_CW: Tensor, bias: Tensor | None, activation: str | None, **options: Any
    ) -> Tensor:
        """The causal convolution [B, C, R] of each row over itself and the rows above it."""
        from transformers.activations import ACT2FN

        seen_BCRW = _columns(self._columns, self._lineage_BRW)
        out_BCR = torch.einsum("bcrw,cw->bcr", seen_BCRW.float(), weight_CW.float())
        if bias is not None:
            out_BCR = out_BCR + bias.float()[:, None]
        if activation is not None:
            out_BCR = ACT2FN[activation](out_BCR)
        return out_BCR.to(self._columns.dtype)

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """The gated delta rule for all rows at once, each after the rows above it.

        With S the state after a row's parent, a row does S <- exp(g) S + k u^T, where
        u = beta (v - exp(g) S^T k), and answers S^T q. Written out along a branch, the u of all rows
        solve one triangular system, because parents come first: the chunked form of the rule with
        "is above" in place of "comes before".

        Args:
            query, key: [B, R, key heads, K]. value: [B, R, heads, V]. g, beta: [B, R, heads].

        Returns:
            [B, R, heads, V] in the type of the query, and None for the state, which stays here.
        """
        groups = value.shape[2] // key.shape[2]
        query, key = (x.repeat_interleave(groups, dim=2) for x in (query, key))
        q, k, v = (x.transpose(1, 2).float() for x in (query, key, value))
        g_BhR, beta_BhR = (x.transpose(1, 2).float() for x in (g, beta))
        if use_qk_l2norm_in_kernel:
            q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q = q * q.shape[-1] ** -0.5
        above = self._rows.ancestors_BRR[:, None]
        # Logarithm of the decay from the committed state to each row, and from row j to row i.
        total_BhR = g_BhR @ self._rows.ancestors_as_float_BRR.mT
        between = total_BhR[..., :, None] - total_BhR[..., None, :]
        decay_BhRR = between.masked_fill(~above, -torch.inf).exp()
        from_state = total_BhR.exp()[..., None]
        system = (k @ k.mT) * decay_BhRR * beta_BhR[..., None]
        wanted = (v - from_state * (k @ self._state)) * beta_BhR[..., None]
        u = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        out = from_state * (q @ self._state) + ((q @ k.mT) * decay_BhRR) @ u
        self._tried = total_BhR, decay_BhRR, k, u
        return out.transpose(1, 2).to(query.dtype), None

    def commit(self, last_B: Tensor) -> None:
        """Keeps, for each sequence, the branch that ends at this row."""
        total_BhR, decay_BhRR, k, u = self._tried
        num_sequences, heads = k.shape[:2]
        last_BhR = last_B[:, None, None].expand(-1, heads, -1)
        total = total_BhR.gather(2, last_BhR)[..., None].exp()
        branch = last_BhR[..., None].expand(-1, -1, 1, k.shape[2])
        decay = decay_BhRR.gather(2, branch).mT
        self._state = total * self._state + (k * decay).mT @ u
        own_B1W = self._lineage_BRW[torch.arange(num_sequences, device=last_B.device), last_B, None]
        self._older = _columns(self._columns, own_B1W)[:, :, 0, 1:]

    def add(self, other: DeltaState) -> None:
        self._older = torch.cat((self._older, other._older))
        self._state = torch.cat((self._state, other._state))

    def keep(self, sequences_B: Tensor) -> None:
        self._older = self._older.index_select(0, sequences_B)
        self._state = self._state.index_select(0, sequences_B)


def _columns(values_BCN: Tensor, index_BRW: Tensor) -> Tensor:
    """Columns of each sequence, [B, C, R, W]."""
    channels = values_BCN.shape[1]
    flat = index_BRW.flatten(1)[:, None].expand(-1, channels, -1)
    return values_BCN.gather(2, flat).unflatten(2, index_BRW.shape[1:])


def teach_rows(module: Any) -> None:
    """Sends the convolution and the delta rule of a Gated DeltaNet module to `DeltaState` where one is given."""
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        _replace(module, name, _delta_rule)
    _replace(module, "causal_conv1d_fn", _convolution)


def _replace(module: Any, name: str, wrap: Callable[[Callable], Callable]) -> None:
    from dflash_core.target import unwrapped

    original = getattr(module, name)
    if not hasattr(original, "takes_rows"):
        wrapped: Any = functools.wraps(original)(wrap(original))
        wrapped.takes_rows = True
        # What `target.gdn_backend` looks through to name the implementation.
        wrapped.by_device = unwrapped(original)
        setattr(module, name, wrapped)


def _convolution(original: Callable) -> Callable:
    def call(first: Any, *args: Any, **options: Any) -> Any:
        own = isinstance(first, DeltaState)
        return (first.convolve if own else functools.partial(original, first))(*args, **options)

    return call


def _delta_rule(original: Callable) -> Callable:
    def call(*args: Any, initial_state: Any = None, **options: Any) -> Any:
        if isinstance(initial_state, DeltaState):
            return initial_state.delta_rule(*args, **options)
        return original(*args, initial_state=initial_state, **options)

    return call


# --- the cache ---------------------------------------------------------------------------------


class RowCache:
    """What a Transformers model takes for its cache during verify forwards; see the top of the file.

    A forward goes `begin`, the model, `commit`. The model needs `masks()` and `positions_BR` of it.
    """

    is_compileable = False
    positions_BR: Tensor
    """Position of each row of the forward."""
    _rows: Rows
    _device: torch.device

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.layers: list[KeyValues | DeltaState] = []
        self._window: int | None = None
        self._has_full = False

    def __len__(self) -> int:
        return len(self.layers)

    # --- the batch -------------------------------------------------------------------------

    def admit(self, prefilled: Any) -> None:
        """Adds a sequence at the end of the batch.

        Args:
            prefilled: Transformers' cache of batch 1 after the prompt of a model for which
                `takes_rows_back` holds.
        """
        length = int(prefilled.get_seq_length())
        new = [self._convert(layer, length) for layer in prefilled.layers]
        self.lengths.append(length)
        if not self.layers:
            self.layers = new
            return
        for layer, other in zip(self.layers, new, strict=True):
            layer.add(other)  # ty: ignore[invalid-argument-type]

    def keep(self, sequences: list[int]) -> None:
        """Only these sequences stay, in this order."""
        self.lengths = [self.lengths[sequence] for sequence in sequences]
        if not sequences:
            self.layers = []
        for layer in self.layers:
            layer.keep(torch.tensor(sequences, device=self._device))

    def _convert(self, layer: Any, length: int) -> KeyValues | DeltaState:
        if hasattr(layer, "recurrent_states"):
            return DeltaState(layer.conv_states[0], layer.recurrent_states[0])
        self._device = layer.keys.device
        if hasattr(layer, "sliding_window"):
            self._window = layer.sliding_window
        else:
            self._has_full = True
        # A sliding layer has kept the last rows only; the slots of the others are outside its window.
        dropped = length - layer.keys.shape[2]
        pad = (0, 0, dropped, _SPARE_SLOTS)
        return KeyValues(F.pad(layer.keys, pad), F.pad(layer.values, pad))

    # --- a forward -------------------------------------------------------------------------

    def begin(self, rows: Rows) -> None:
        """Says what the next forward runs."""
        assert len(rows.tokens_BR) == len(self.lengths)
        self._rows = rows
        self._device = rows.tokens_BR.device
        lengths_B1 = torch.tensor(self.lengths, device=self._device)[:, None]
        self.positions_BR = lengths_B1 + rows.depth_BR
        self._lengths_B1 = lengths_B1
        lineages: dict[int, Tensor] = {}
        for layer in self.layers:
            if isinstance(layer, DeltaState):
                layer.begin(rows, lineages)

    def commit(self, paths: list[list[int]]) -> None:
        """Keeps one branch of each sequence and forgets the other rows.

        Args:
            paths: rows from the root (0) to the last that stays; an empty path keeps nothing.
        """
        longest = max(map(len, paths))
        in_order = all(path == list(range(len(path))) for path in paths)
        filled = [[*path, *range(len(path), longest)] for path in paths]
        paths_BP = torch.tensor(filled, device=self._device)
        last_B = torch.tensor([path[-1] for path in paths], device=self._device)
        for layer in self.layers:
            if isinstance(layer, DeltaState):
                layer.commit(last_B)
            elif not in_order:
                layer.move(self.lengths, paths_BP)
        self.lengths = [n + len(path) for n, path in zip(self.lengths, paths, strict=True)]

    def masks(self, dtype: torch.dtype) -> Any:
        """What rows may attend to, added to the scores: [B, 1, R, T] of 0 and the least number.

        Returns:
            The mask where all layers attend alike, else one for each kind of layer by the name that
            Transformers gives it.
        """
        num_rows = self._rows.tokens_BR.shape[1]
        slots_T = torch.arange(self._num_slots, device=self._device)
        place_BT = slots_T - self._lengths_B1  # below 0: committed; else the row's index
        row_B1T = place_BT.clamp(0, num_rows - 1)[:, None]
        above_BRT = self._rows.ancestors_BRR.gather(2, row_B1T.expand(-1, num_rows, -1))
        tried_B1T = ((place_BT >= 0) & (place_BT < num_rows))[:, None]
        seen_BRT = (place_BT < 0)[:, None] | (tried_B1T & above_BRT)
        if self._window is None:
            full = _additive(seen_BRT, dtype)
            if all(isinstance(layer, KeyValues) for layer in self.layers):
                return full
            return {"full_attention": full, "linear_attention": None}
        position_B1T = torch.where(
            place_BT < 0, slots_T, self.positions_BR.gather(1, row_B1T[:, 0])
        )[:, None]
        near_BRT = self.positions_BR[..., None] - position_B1T < self._window
        sliding = _additive(seen_BRT & near_BRT, dtype)
        if not self._has_full and all(isinstance(layer, KeyValues) for layer in self.layers):
            return sliding
        return {
            "full_attention": _additive(seen_BRT, dtype),
            "sliding_attention": sliding,
            "linear_attention": None,
        }

    @property
    def _num_slots(self) -> int:
        return max(self.lengths) + self._rows.tokens_BR.shape[1]

    # --- what the model's layers call -------------------------------------------------------

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        layer = self.layers[layer_idx]
        assert isinstance(layer, KeyValues)
        layer.write(keys, values, self.lengths)
        return layer.view(self._num_slots)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths, default=0)

    def is_recording_past(self, layer_idx: int) -> bool:
        """True, so that a single row takes the way of several and no state is changed in place."""
        return True

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        return self.layers[layer_idx]

    def update_conv_state(
        self, inputs_BCR: Tensor, layer_idx: int, state_idx: int = 0, **options: Any
    ) -> Any:
        layer = self.layers[layer_idx]
        assert isinstance(layer, DeltaState)
        return layer.take(inputs_BCR)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        return self.layers[layer_idx]

    def update_recurrent_state(self, state: None, layer_idx: int, state_idx: int = 0) -> None:
        """Nothing: the state moves at the commit."""


def _additive(seen_BRT: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(seen_BRT.shape, dtype=dtype, device=seen_BRT.device)
    return mask.masked_fill_(~seen_BRT, torch.finfo(dtype).min)[:, None]


def takes_rows_back(model: Any) -> bool:
    """Whether every layer of the model is of a kind that `RowCache` knows."""
    from transformers import DynamicCache, cache_utils

    from dflash_core.target import gdn_modules

    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if not kinds <= {"full_attention", "sliding_attention", "linear_attention"}:
        return False
    windows = set()
    for layer in DynamicCache(config=model.config).layers:
        if type(layer) is cache_utils.LinearAttentionLayer:
            if not gdn_modules(model) or layer.number_of_states != 1:
                return False
        elif type(layer) is cache_utils.DynamicSlidingWindowLayer:
            windows.add(layer.sliding_window)
        elif type(layer) is not cache_utils.DynamicLayer:
            return False
    return len(windows) < 2
