"""Proposers that need no drafter, for tests of decoding."""

from __future__ import annotations

import random

import torch

VOCAB = 272
_MOST_DRAFTS = 16


class Oracle:
    """Drafts the true continuation of each prompt and errs at random places; checks what it is told.

    Args:
        continuations: for each prompt, in the order in which they join the batch, the target's own
            answer and at least as many tokens more as there are drafts in a step.
        accuracy: probability that a draft is right.
        strict: false where answers may leave the continuation (coarse rounding, sampling).
    """

    def __init__(self, prompts, continuations, rng: random.Random, accuracy: float, strict=True):
        self.waiting = [
            {"prompt": prompt, "whole": whole, "taps": []}
            for prompt, whole in zip(prompts, continuations, strict=True)
        ]
        self.active, self.seen = [], []
        self.rng, self.accuracy, self.strict = rng, accuracy, strict

    def admit(self, taps_TC):
        self.active.append(self.waiting.pop(0))
        self.seen.append(self.active[-1])
        assert len(taps_TC) == len(self.active[-1]["prompt"])
        self.active[-1]["taps"].append(taps_TC)

    def append(self, taps_BPC, counts):
        for one, taps_PC, count in zip(self.active, taps_BPC, counts, strict=True):
            one["taps"].append(taps_PC[:count])

    def keep(self, sequences):
        self.active = [self.active[index] for index in sequences]

    def propose(self, bonus, num_drafts):
        logits_BDV = torch.zeros(len(bonus), num_drafts, VOCAB)
        for row, one in enumerate(self.active):
            emitted = sum(map(len, one["taps"])) - len(one["prompt"]) + 1
            assert bonus[row] == one["whole"][emitted - 1] or not self.strict
            for slot in range(num_drafts):
                right = self.rng.random() < self.accuracy
                true = one["whole"][emitted + slot] if right else self.rng.randrange(256)
                logits_BDV[row, slot, self.rng.randrange(256)] = 8.0  # a rival for trees
                logits_BDV[row, slot, true] = 9.0
        return logits_BDV


class Waverer:
    """Random logits, the same ones for a prefix of the same length."""

    def __init__(self, seed: int, vocab: int = VOCAB, scale: float = 1.0):
        self.seed, self.vocab, self.scale, self.lengths = seed, vocab, scale, []

    def admit(self, taps_TC):
        self.lengths.append(len(taps_TC))

    def append(self, taps_BPC, counts):
        self.lengths = [n + more for n, more in zip(self.lengths, counts, strict=True)]

    def keep(self, sequences):
        self.lengths = [self.lengths[index] for index in sequences]

    def propose(self, bonus, num_drafts):
        rows = []
        for length in self.lengths:
            generator = torch.Generator().manual_seed(1000 * self.seed + length)
            rows.append(torch.randn(_MOST_DRAFTS, self.vocab, generator=generator) * self.scale)
        return torch.stack(rows)[:, :num_drafts]


def cut(whole: list[int], max_new_tokens: int, stop_ids) -> list[int]:
    """What of a long enough greedy answer is the answer under this budget and these stop tokens."""
    whole = whole[:max_new_tokens]
    stop = next((i for i, token in enumerate(whole) if token in stop_ids), len(whole) - 1)
    return whole[: stop + 1]
