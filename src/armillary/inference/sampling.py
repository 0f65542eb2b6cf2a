"""Choosing the next token of each row, each from a random stream of its own."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def uniform_draws(prompts: Sequence[Sequence[int]], seed: int, count: int) -> Tensor:
    """`[B, count]` fp64 in [0, 1): what each row draws from, token by token.

    A row's stream follows from the seed, its prompt, and how many rows before it have the same
    prompt: neither the other rows nor their order play a part, and repeats differ.
    """
    seen: Counter[tuple[int, ...]] = Counter()
    rows = []
    for prompt in map(tuple, prompts):
        key = hashlib.sha256(repr((prompt, seen[prompt])).encode()).digest()
        seen[prompt] += 1
        entropy = [seed, *np.frombuffer(key, dtype=np.uint32).tolist()]
        rows.append(np.random.default_rng(entropy).random(count))
    return torch.from_numpy(np.stack(rows))


def choose(
    logits: Tensor, draws: Tensor, *, temperature: float, top_k: int, top_p: float
) -> list[int]:
    """One token for each row of logits `[B, V]`, by inverting the cumulative distribution.

    Args:
        logits: scores of the next token.
        draws: `[B]`, uniform in [0, 1).
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: only the k likeliest tokens stay; 0: all.
        top_p: only the smallest set of likeliest tokens with at least this probability stays.
            (Holtzman et al. 2020, arXiv 1904.09751, section 3.1)
    """
    if temperature == 0:
        return [int(token) for token in logits.argmax(dim=-1)]
    scores, tokens = logits.double().cpu().sort(dim=-1, descending=True, stable=True)
    if top_k:
        scores = scores[:, :top_k]
    probabilities = ((scores - scores[:, :1]) / temperature).softmax(dim=-1)
    cumulative = probabilities.cumsum(dim=-1)
    if top_p < 1:
        outside = cumulative - probabilities >= top_p
        cumulative = probabilities.masked_fill(outside, 0.0).cumsum(dim=-1)
    wanted = draws[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, wanted, right=True).clamp(max=scores.shape[1] - 1)
    return [int(token) for token in tokens.gather(1, index)]


def is_temperature(value: float) -> bool:
    """Whether logits can be divided by it, or it is 0."""
    return value >= 0 and math.isfinite(value)
