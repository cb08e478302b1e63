"""The target's most likely next tokens, from its final hidden states: a teacher's signal for distillation.

Shape letters: N rows, H hidden size, V vocabulary, K most likely tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dflash_core.config import TargetConfig
from dflash_core.errors import InputError
from dflash_core.target import load_embedding_and_head, text_config

_ROWS = 1024  # logits of this many rows at once: 1 GB in float32 for a vocabulary of 250,000


class Teacher:
    """Final norm and output head of a target, on the device of its body.

    Raises:
        InputError: the family changes its logits in a way that is not known here.
    """

    def __init__(self, target: TargetConfig, body: Any) -> None:
        config = text_config(target)
        for name in ("logit_scale", "logits_scaling"):
            if getattr(config, name, None) not in (None, 1, 1.0):
                raise InputError(
                    f"target {target.id!r} scales its logits ({name}), which extract.teacher_top_k does not "
                    "know; set it to 0, or extract.last=true and compute them in training"
                )
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)
        self._norm: nn.Module = body.final_norm
        device = next(self._norm.parameters()).device
        self._head_VH = load_embedding_and_head(target)[1].to(device)

    @torch.inference_mode()
    def top_k(self, last_NH: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The most likely tokens of each row and their log-probabilities, most likely first.

        Args:
            last_NH: final hidden states before the norm, on the device.

        Returns:
            ids_NK int32, logprobs_NK float16; the probabilities are of the whole vocabulary.
        """
        ids, logprobs = [], []
        for rows_NH in last_NH.split(_ROWS):
            normed_NH = self._norm(rows_NH.to(self._head_VH.dtype))
            logits_NV = (normed_NH @ self._head_VH.T).float()
            if self._cap:
                logits_NV = self._cap * torch.tanh(logits_NV / self._cap)
            top_NK, ids_NK = logits_NV.topk(count, dim=-1)
            ids.append(ids_NK.int())
            logprobs.append((top_NK - logits_NV.logsumexp(-1, keepdim=True)).half())
        return torch.cat(ids), torch.cat(logprobs)

    def arrays(self, last_TH: Tensor, num_tokens: int, count: int) -> dict[str, Tensor]:
        """`teacher_ids` and `teacher_logprobs` [T, K] of a pack, zeros from row `num_tokens` on."""
        shape, device = (len(last_TH), count), last_TH.device
        ids_TK = torch.zeros(shape, dtype=torch.int32, device=device)
        logprobs_TK = torch.zeros(shape, dtype=torch.float16, device=device)
        rows = slice(num_tokens)
        ids_TK[rows], logprobs_TK[rows] = self.top_k(last_TH[rows], count)
        return {"teacher_ids": ids_TK, "teacher_logprobs": logprobs_TK}
