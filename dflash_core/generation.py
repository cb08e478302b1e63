"""Batched answers of a local target, for regenerating a corpus.

Shape letters: B sequences, T tokens of the longest prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dflash_core.answers import Answer, Prompt, read_answer
from dflash_core.chat import Chat, Unrenderable
from dflash_core.config import RegenerateConfig, Runtime, TargetConfig
from dflash_core.devices import resolve_device
from dflash_core.errors import InputError
from dflash_core.manifest import sha256
from dflash_core.target import (
    load_causal_lm,
    load_tokenizer,
    require_fast_kernels,
    text_config,
)
from dflash_core.target_cache import cache_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# A batch is narrowed once this share of it has ended; selecting rows copies the cache.
_NARROW_AT = 0.25
_RAGGED = 1.5  # longest prompt of a batch over its shortest, where padding is expensive
_PROMPT_TOKENS = 2**16  # padded prompt tokens of a batch; bounds the memory of its first forward


class LocalAnswerer:
    """Answers prompts with a target loaded into this process."""

    def __init__(self, target: TargetConfig, config: RegenerateConfig, runtime: Runtime) -> None:
        """Loads tokenizer and weights.

        Raises:
            InputError: the target cannot be loaded or lacks its fast kernels on a GPU, or is to be sampled in
                a way that only servers know.
        """
        if config.presence_penalty:
            raise InputError(
                f"presence_penalty is {config.presence_penalty}, which a target in this process does not "
                "apply; set it to 0 or name the servers to ask in endpoints.urls"
            )
        device = resolve_device(runtime.device)
        tokenizer = load_tokenizer(target)
        options = target.template_options
        self.chats = {mode: Chat(tokenizer, mode, options) for mode in (False, True)}
        self.model = load_causal_lm(target, device)
        require_fast_kernels(self.model, device, runtime.slow_kernels)
        self.config = config
        self.batch = runtime.generate_batch
        self.pad_id: int = tokenizer.pad_token_id or 0
        self.stop_ids = stop_ids(self.model, self.chats[config.thinking])
        self.max_tokens: int = getattr(text_config(target), "max_position_embeddings", 2**31)

    def answer(self, prompts: list[Prompt]) -> list[Answer]:
        """One answer for each prompt, whatever the batches; see `regeneration.Answerer`."""
        answers: dict[int, Answer] = {}
        encoded: dict[int, tuple[str, list[int]]] = {}
        for index, prompt in enumerate(prompts):
            chat = self.chats[prompt.thinking]
            try:
                text = chat.render(prompt.messages, prompt.tools, prompt=True)
            except Unrenderable as error:
                answers[index] = Answer(None, reason="template cannot print it", detail=str(error))
                continue
            ids = chat.encode(text)
            if len(ids) + self.config.max_new_tokens > self.max_tokens:
                answers[index] = Answer(None, reason="longer than the target's context")
            else:
                encoded[index] = (text, ids)
        for some in self._batches({index: len(ids) for index, (_, ids) in encoded.items()}):
            picks = _picker(self.config, [prompts[index].key for index in some], self.model.device)
            written = generate(
                self.model,
                [encoded[index][1] for index in some],
                self.config.max_new_tokens,
                self.stop_ids,
                self.pad_id,
                picks,
            )
            for index, tokens in zip(some, written, strict=True):
                prompt, text = prompts[index], encoded[index][0]
                chat = self.chats[prompt.thinking]
                answers[index] = read_answer(chat, prompt, text, tokens, self.stop_ids)
        return [answers[index] for index in range(len(prompts))]

    def _batches(self, lengths: dict[int, int]) -> Iterator[list[int]]:
        """Keys in batches of similar length."""
        batch: list[int] = []
        shortest = 0
        for index, length in sorted(lengths.items(), key=lambda item: item[1]):
            full = len(batch) == self.batch or (len(batch) + 1) * length > _PROMPT_TOKENS
            # On a CPU time goes with padded tokens; on a GPU a step costs the same for any batch.
            ragged = self.model.device.type == "cpu" and length > _RAGGED * shortest + 32
            if batch and (full or ragged):
                yield batch
                batch = []
            shortest = shortest if batch else length
            batch.append(index)
        if batch:
            yield batch


def stop_ids(model: PreTrainedModel, chat: Chat) -> set[int]:
    """Ids that end an answer: the template's end of turn, and what tokenizer and checkpoint name."""
    named: Any = model.generation_config.eos_token_id if model.generation_config else None
    named = named if isinstance(named, list) else [named]
    ids = {*chat.ends_of_turn, chat.tokenizer.eos_token_id, *named}
    return {index for index in ids if index is not None}


# --- tokens ------------------------------------------------------------------------------------

Pick = Callable[[Tensor, list[int], int], Tensor]
"""Takes logits_BV, which sequence each row is, and the step; returns the next ids, int64 [B]."""


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    stop_ids: Collection[int],
    pad_id: int,
    pick: Pick,
) -> list[list[int]]:
    """Continues each prompt until a stop id (included) or `max_new_tokens`.

    Prompts are padded on the left and masked: right padding would decay the recurrent states of Gated
    DeltaNet layers, left padding without a mask would enter them. Sequences that have ended leave the
    batch.
    """
    device = model.device
    width = max(map(len, prompts))
    padded = [[pad_id] * (width - len(ids)) + ids for ids in prompts]
    ids_BT = torch.tensor(padded, device=device)
    mask_BT = torch.tensor(
        [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts], device=device
    )
    positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)
    written: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    alive = list(range(len(prompts)))  # which prompt each row of the batch is
    cache: Any = None
    name = cache_name(type(model))
    for step in range(max_new_tokens):
        output = model(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            position_ids=positions_BT,
            use_cache=True,
            logits_to_keep=1,
            **{name: cache},
        )
        cache = getattr(output, name)
        next_B = pick(output.logits[:, -1], alive, step)
        for sequence, token in zip(alive, next_B.tolist(), strict=True):
            if not ended[sequence]:
                written[sequence].append(token)
                ended[sequence] = token in stop_ids
        if all(ended):
            break
        ids_BT, positions_BT = next_B[:, None], positions_BT[:, -1:] + 1
        rows = [row for row, sequence in enumerate(alive) if not ended[sequence]]
        if len(rows) <= len(alive) * (1 - _NARROW_AT):
            rows_B = torch.tensor(rows, device=device)
            cache.reorder_cache(rows_B)
            ids_BT, mask_BT, positions_BT = ids_BT[rows_B], mask_BT[rows_B], positions_BT[rows_B]
            alive = [alive[row] for row in rows]
        mask_BT = torch.cat([mask_BT, mask_BT.new_ones(len(alive), 1)], dim=1)
    return written


def _picker(config: RegenerateConfig, keys: list[str], device: torch.device) -> Pick:
    """Greedy, or nucleus sampling with a random stream for each sequence.

    A stream follows from seed and key alone, so what a prompt is batched with has no influence.
    """
    if config.temperature == 0:
        return lambda logits_BV, alive, step: logits_BV.argmax(-1)
    streams = []
    for key in keys:
        seed = int(sha256(f"{config.seed}:{key}")[:15], 16)
        generator = torch.Generator().manual_seed(seed)
        streams.append(torch.rand(config.max_new_tokens, generator=generator))
    uniform = torch.stack(streams).to(device)
    return lambda logits_BV, alive, step: sample(logits_BV, uniform[alive, step], config)


def sample(logits_BV: Tensor, uniform_B: Tensor, config: RegenerateConfig) -> Tensor:
    """Samples by inverting the cumulative distribution at `uniform_B` in [0, 1).

    Temperature first; of the `top_k` most probable tokens, those with at least `min_p` of the greatest
    probability; of these the smallest set of most probable ones with at least `top_p` of what is left.
    """
    probability_BV = (logits_BV.float() / config.temperature).softmax(-1)
    sorted_BV, order_BV = probability_BV.sort(-1, descending=True)
    if config.top_k:
        sorted_BV[:, config.top_k :] = 0
    sorted_BV = sorted_BV.masked_fill(sorted_BV < config.min_p * sorted_BV[:, :1], 0)
    sorted_BV = sorted_BV / sorted_BV.sum(-1, keepdim=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    sorted_BV = sorted_BV.masked_fill(before_BV >= config.top_p, 0)
    cumulative_BV = sorted_BV.cumsum(-1)
    target_B1 = uniform_B[:, None] * cumulative_BV[:, -1:]
    # The first token whose cumulative probability exceeds the target; never one that was left out.
    rank_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
    last_B1 = (sorted_BV > 0).sum(-1, keepdim=True) - 1
    return order_BV.gather(1, torch.minimum(rank_B1, last_B1))[:, 0]
