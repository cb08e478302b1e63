"""Acceptance on held-out prompts while a drafter is trained, without the target in the way.

Greedy decoding with a drafter emits the target's own greedy answer, whatever the drafter is. So the
target answers each prompt once, before training; how many verify steps a drafter would have needed for
that answer then follows from its drafts behind every token of it, all made in one forward.

Shape letters: T rows of an answered prompt, N anchors, K block slots, L taps, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_core.attention import tiles
from dflash_core.blocks import ranges_by_kind
from dflash_core.config import EvaluateConfig, Runtime, TargetConfig
from dflash_core.devices import resolve_device
from dflash_core.loss import CHUNK_ELEMENTS
from dflash_core.manifest import Dataset
from dflash_core.model import Drafter


@dataclass(frozen=True)
class Answer:
    """A held-out prompt and the target's greedy answer to it."""

    input_ids_T: Tensor
    """Prompt and answer, int64."""
    num_prompt: int
    taps_TLH: Tensor
    """The target's hidden states over them, bfloat16."""


@torch.no_grad()
def answers(
    corpus: Dataset,
    target: TargetConfig,
    layer_ids: tuple[int, ...],
    config: EvaluateConfig,
    runtime: Runtime,
) -> list[Answer]:
    """The target's answers to the held-out prompts that an evaluation with `config` would decode.

    Loads the whole target and drops it again.
    """
    from dflash_core.decode import greedy
    from dflash_core.evaluation_prompts import choose_prompts
    from dflash_core.target import load_causal_lm, require_fast_kernels, tap_layers

    device = resolve_device(runtime.device)
    chosen = choose_prompts(corpus, target, config)
    model = load_causal_lm(target, device)
    require_fast_kernels(model, device, runtime.slow_kernels)
    made = []
    for prompt in chosen["prompts"]:
        input_ids = prompt["input_ids"]
        tokens = greedy(model, input_ids, config.max_new_tokens, set(chosen["stop_ids"]))
        input_ids_T = torch.tensor([*input_ids, *tokens])
        with tap_layers(model, list(layer_ids)) as taps:
            model(input_ids=input_ids_T[None].to(device), use_cache=False, logits_to_keep=1)
            taps_TLH = taps.stack()[0].bfloat16().cpu()
        made.append(Answer(input_ids_T, len(input_ids), taps_TLH))
    return made


@dataclass(frozen=True)
class Acceptance:
    """Tokens that a verify step emits, the target's own one counted."""

    decoded: float
    """Pooled over the steps that decoding would take; `evaluation.summarise` defines it."""
    simulated: float
    """Mean over all tokens of the answers, as if a step began at each, like in training."""


def acceptance(
    drafter: Drafter, embedding_VH: Tensor, head_VH: Tensor, made: list[Answer]
) -> Acceptance:
    """How a drafter fares on answers.

    Args:
        drafter: on the device of embedding and head, computing in its own type.
        made: what `answers` returned; those of one token need no verify step and count nothing.
    """
    tokens = steps = 0
    everywhere: list[int] = []
    for answer in made:
        left = len(answer.input_ids_T) - answer.num_prompt - 1
        matching = num_matching(drafter, embedding_VH, head_VH, answer)
        everywhere += matching
        position = 0
        while position < left:
            position += min(matching[position] + 1, left - position)
            steps += 1
        tokens += left
    return Acceptance(
        decoded=tokens / max(steps, 1), simulated=1 + sum(everywhere) / max(len(everywhere), 1)
    )


@torch.no_grad()
def num_matching(
    drafter: Drafter, embedding_VH: Tensor, head_VH: Tensor, answer: Answer
) -> list[int]:
    """For each token of the answer but the last, how many drafts behind it are the target's tokens."""
    shape, device = drafter.shape, embedding_VH.device
    ids_T = answer.input_ids_T.to(device)
    num_rows = len(ids_T)
    anchors_N = torch.arange(answer.num_prompt, num_rows - 1, device=device)
    if not len(anchors_N):
        return []
    slots_K = torch.arange(shape.block_size, device=device)
    token_ids_NK = torch.full(
        (len(anchors_N), shape.block_size), shape.mask_token_id, device=device
    )
    token_ids_NK[:, 0] = ids_T[anchors_N]
    ranges = ranges_by_kind(shape, anchors_N, torch.zeros_like(anchors_N))
    masks = {kind: tiles(seen, num_rows, shape.block_size) for kind, seen in ranges.items()}
    taps_BTC = answer.taps_TLH.to(device).flatten(1)[None]
    context = drafter.project_context(taps_BTC, torch.arange(num_rows, device=device)[None])
    embeds = F.embedding(token_ids_NK.flatten(), embedding_VH).to(drafter.fc.weight.dtype)
    positions_NK = anchors_N[:, None] + slots_K
    out = drafter(embeds[None], positions_NK.flatten()[None], context, masks)[0]
    rows = max(1, CHUNK_ELEMENTS[device.type] // len(head_VH))
    drafts = [(part.to(head_VH.dtype) @ head_VH.T).argmax(-1) for part in out.split(rows)]
    drafts_NP = torch.cat(drafts).view(token_ids_NK.shape)[:, shape.first_slot :]
    behind_NP = anchors_N[:, None] + 1 + torch.arange(drafts_NP.shape[1], device=device)
    labels_NP = F.pad(ids_T, (0, shape.block_size), value=-1)[behind_NP]
    return (drafts_NP == labels_NP).long().cumprod(dim=1).sum(1).tolist()
