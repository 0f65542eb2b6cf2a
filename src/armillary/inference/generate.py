"""Continues prompts with any decoder: many rows at once, each token read once.

A row does not depend on the batch it is in: shorter prompts are padded on the left, padding is a
document of its own that no other token sees, and every row has its own random stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from armillary.foundation.errors import Problem, UserError
from armillary.inference.sampling import choose, is_temperature, uniform_draws
from armillary.inference.undisturbed import uncompiled
from armillary.models.decoder import Decoder
from armillary.models.layers.cache import KeyValueCache
from armillary.models.layers.documents import Documents
from armillary.models.layers.embedding import Head
from armillary.parallel.model import ParallelModel

OnToken = Callable[[int, int], None]
"""Told (row, token) as soon as a token is chosen."""


@torch.no_grad()
def generate(
    model: Decoder | ParallelModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_id: int | Collection[int] | None = None,
    vocab_size: int | None = None,
    on_token: OnToken | None = None,
    ended: Callable[[Sequence[int]], bool] | None = None,
) -> list[list[int]]:
    """What follows each prompt: the new tokens only, without the end-of-text token.

    Args:
        model: decoder with its weights.
        prompts: token ids, at least one each.
        max_new_tokens: most tokens that a row gets.
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: choose among the k likeliest tokens only; 0: among all.
        top_p: choose among the likeliest tokens that hold this share of probability only.
        seed: of the random streams; the same seed and prompt give the same tokens.
        eos_id: token that ends a row, or several of them; None: rows end at their full length.
        vocab_size: only smaller ids are chosen: the tokenizer's size, where the head has rows to
            spare; None: all of the head's.
        on_token: hears of each token as it is chosen; not of the end-of-text token.
        ended: asked of a row's tokens after each, whether it ends with it; the same on every rank.

    Raises:
        UserError: arguments out of range, a prompt without tokens, or too long for the model.
    """
    limits: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    if found := generation_problems(
        prompts, max_seq_len=model.max_seq_len, max_new_tokens=max_new_tokens, seed=seed, **limits
    ):
        raise UserError(found)
    draws = uniform_draws(prompts, seed, max_new_tokens)

    def pick(logits: Tensor, index: int) -> list[int]:
        return choose(logits[:, :vocab_size], draws[:, index], **limits)

    rows: list[list[int]] = [[] for _ in prompts]
    ends = (eos_id,) if isinstance(eos_id, int) else eos_id or ()

    def goes_on(row: int, token: int) -> bool:
        if token in ends:
            return False
        rows[row].append(token)
        if on_token is not None:
            on_token(row, token)
        return ended is None or not ended(rows[row])

    _continue(model, prompts, max_new_tokens, pick, goes_on)
    return rows


def _continue(
    model: Decoder | ParallelModel,
    prompts: Sequence[Sequence[int]],
    most: int,
    pick: Callable[[Tensor, int], list[int]],
    goes_on: Callable[[int, int], bool],
) -> None:
    """Tells `goes_on` (row, token) of every new token, until each row has ended or has `most`."""
    device = model.device if isinstance(model, ParallelModel) else model.embedding.weight.device
    tokens, documents = _padded(prompts, device)
    cache = KeyValueCache(tokens.shape[1] + most)
    open_rows = list(range(len(prompts)))
    with uncompiled():
        logits = model(tokens, documents, cache=cache, output=_last_logits)
        for index in range(most):
            chosen = pick(logits, index)
            if isinstance(model, ParallelModel):
                chosen = model.agreed(chosen)
            open_rows = [row for row in open_rows if goes_on(row, chosen[row])]
            if not open_rows or index + 1 == most:
                return
            added = torch.tensor(chosen, device=device)[:, None]
            logits = model(added, cache=cache, output=_last_logits)


def generation_problems(
    prompts: Sequence[Sequence[int]],
    *,
    max_seq_len: int,
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
) -> list[Problem]:
    """What is wrong with the arguments of `generate`, all at once."""
    checks = (
        (max_new_tokens >= 1, f"max_new_tokens = {max_new_tokens}", "numbers from 1", "128"),
        (is_temperature(temperature), f"temperature = {temperature}", "0 (greedy) and up", "0.8"),
        (top_k >= 0, f"top_k = {top_k}", "0 (all tokens) and up", "50"),
        (0 < top_p <= 1, f"top_p = {top_p}", "above 0, up to 1", "0.95"),
        (seed >= 0, f"seed = {seed}", "numbers from 0", "0"),
        (len(prompts) > 0, "prompts = []", "one prompt or more", None),
    )
    found = [
        Problem(f"{message} is out of range", allowed, fix and _option(message, fix))
        for is_right, message, allowed, fix in checks
        if not is_right
    ]
    for row, prompt in enumerate(prompts):
        if not prompt:
            found.append(Problem(f"prompt {row} has no tokens", "one token or more"))
        elif len(prompt) + max(max_new_tokens, 1) > max_seq_len:
            message = (
                f"prompt {row} of {len(prompt)} tokens and max_new_tokens = {max_new_tokens} go"
                f" beyond the model's context, model.max_seq_len = {max_seq_len}"
            )
            room = max_seq_len - len(prompt)
            fix = f"--max-new-tokens {room}" if room > 0 else "a shorter prompt"
            found.append(Problem(message, f"{max_seq_len} tokens in all", fix))
    return found


def _option(message: str, value: str) -> str:
    return f"--{message.split(' ', maxsplit=1)[0].replace('_', '-')} {value}"


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Documents]:
    """Prompts side by side, ending in the same column; what is left of one is another document."""
    width = max(len(prompt) for prompt in prompts)
    padding = [width - len(prompt) for prompt in prompts]
    rows = [[0] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    lengths = [[pad, width - pad] if pad else [width] for pad in padding]
    return torch.tensor(rows, device=device), Documents.from_lengths(lengths, device)


def _last_logits(hidden: Tensor, head: Head) -> Tensor:
    """Logits `[B, V]` of the last column only."""
    return head.logits(hidden[:, -1])
