"""The parity gate of extraction: states of a pack against those of its samples alone, before any commit.

Two comparisons. Like with like: the same forward once more with every second sample replaced by other
tokens. Shapes and kernels are the same, so the samples that stayed must not change: what crosses samples, by
attention, recurrence or convolution, shows at once, and rounding does not. And against the family's own
forward of one sample in Transformers: other kernels, whose rounding adds up over the layers, so the limit is
wide; it catches a wrong scale, window, position or layer.

Shape letters: S tokens of a sample, T rows of a pack, L taps, H hidden size.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from dflash_core.errors import DFlashError
from dflash_core.packing import Pack
from dflash_core.target import tap_layers

_NATIVE_TOKENS = 512
_SHOWN = 8  # rows of the table, worst first


class Limits(NamedTuple):
    """Least cosines: the mean over the rows of a sample and tap, and any row."""

    mean: float
    row: float


SAME_KERNELS = Limits(0.9999, 0.998)
NATIVE = Limits(0.99, -1.0)


@dataclass(frozen=True)
class Row:
    """One sample at one tap."""

    sample: str
    tap: int
    mean: float
    worst: float
    limits: Limits

    @property
    def passes(self) -> bool:
        # Not `<`, so that NaN fails.
        return self.mean >= self.limits.mean and self.worst >= self.limits.row


@dataclass(frozen=True)
class Table:
    """What was compared."""

    rows: list[Row]

    def summary(self) -> str:
        """Least mean and least row of either comparison."""
        parts = []
        for name, limits in (("neighbours replaced", SAME_KERNELS), ("Transformers", NATIVE)):
            rows = [row for row in self.rows if row.limits is limits]
            if rows:
                mean, worst = min(row.mean for row in rows), min(row.worst for row in rows)
                parts.append(f"{name}: mean cosine {mean:.6f}, least {worst:.6f}")
        return "; ".join(parts)

    def __str__(self) -> str:
        lines = [f"{'sample':>16} {'tap':>4} {'mean':>9} {'least':>9}"]
        for row in sorted(self.rows, key=lambda row: (row.passes, row.mean))[:_SHOWN]:
            mark = "" if row.passes else f"   < {row.limits.mean} / {row.limits.row}"
            lines.append(f"{row.sample:>16} {row.tap:>4} {row.mean:>9.6f} {row.worst:>9.6f}{mark}")
        return "\n".join(lines)


def native_states(
    body: Any, layer_ids: list[int], pack: Pack, device: torch.device
) -> tuple[int, Tensor]:
    """States of one sample of the pack by Transformers' own forward: its document, and [S, L, H].

    To be called before anything is packed or compiled.

    Raises:
        DFlashError: a tap is not what Transformers calls hidden_states[k + 1].
    """
    document = int(np.argmin(np.abs(pack.length - _NATIVE_TOKENS)))
    start = int(pack.start[document])
    length = min(int(pack.length[document]), _NATIVE_TOKENS)
    ids = torch.from_numpy(pack.input_ids[start : start + length].astype(np.int64))
    with tap_layers(body, layer_ids) as taps:
        result = body(input_ids=ids[None].to(device), use_cache=False, output_hidden_states=True)
    states_SLH = taps.stack()[0]
    for tap, layer in enumerate(layer_ids):
        theirs_SH = result.hidden_states[layer + 1][0].to(states_SLH.device)
        if not torch.equal(states_SLH[:, tap].nan_to_num(), theirs_SH.nan_to_num()):
            raise DFlashError(
                f"tap {tap} is not the output of decoder layer {layer} as Transformers reports it "
                f"(hidden_states[{layer + 1}]); {type(body).__name__} is not supported"
            )
    return document, states_SLH


def replace_every_second(pack: Pack) -> Pack:
    """The pack with documents 1, 3, 5, ... holding the tokens of the pack's other end."""
    ids = pack.input_ids.copy()
    others = ids[: pack.num_tokens][::-1]
    for start, length in zip(pack.start[1::2].tolist(), pack.length[1::2].tolist(), strict=True):
        ids[start : start + length] = others[start : start + length]
    return dataclasses.replace(pack, input_ids=ids)


def compare(
    pack: Pack, ours_TLH: Tensor, replaced_TLH: Tensor, native: tuple[int, Tensor]
) -> Table:
    """Holds a pack's states against those with every second sample replaced, and against Transformers'.

    Args:
        ours_TLH: states of the pack.
        replaced_TLH: states of `replace_every_second(pack)`, by the same path.
        native: what `native_states` returned.

    Raises:
        DFlashError: below a limit, with the table.
    """
    rows = []
    for document in range(0, len(pack.length), 2):
        first = int(pack.start[document])
        theirs = replaced_TLH[first : first + int(pack.length[document])]
        rows += _rows(pack, document, ours_TLH, theirs, SAME_KERNELS, "")
    document, states_SLH = native
    rows += _rows(pack, document, ours_TLH, states_SLH, NATIVE, " native")
    table = Table(rows)
    if not all(row.passes for row in rows):
        raise DFlashError(
            f"hidden states of pack {pack.index} depend on what its samples are packed with, or are not "
            "those of Transformers (native); nothing was committed. If the packed forward is at fault, "
            f"runtime.forward=padded goes without it. Cosine by sample and tap, worst first:\n{table}"
        )
    return table


def _rows(
    pack: Pack, document: int, out_TLH: Tensor, alone_SLH: Tensor, limits: Limits, note: str
) -> list[Row]:
    start = int(pack.start[document])
    ours_SLH = out_TLH[start : start + len(alone_SLH)].float()
    cosine_SL = cosine_similarity(ours_SLH, alone_SLH.float(), dim=-1)
    cosine_SL = torch.nan_to_num(cosine_SL, nan=-1.0)
    means, worst = cosine_SL.mean(0).tolist(), cosine_SL.min(0).values.tolist()
    name = f"{pack.samples[document]}{note}"
    return [Row(name, tap, means[tap], worst[tap], limits) for tap in range(len(means))]
