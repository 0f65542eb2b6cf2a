"""Generation: the cache changes nothing, the batch changes nothing, the seed decides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from armillary.foundation.errors import UserError
from armillary.inference.generate import generate
from armillary.inference.sampling import choose, uniform_draws
from armillary.models.decoder import Decoder
from armillary.models.layers.cache import KeyValueCache
from armillary.models.layers.documents import Documents
from model_cases import FAMILIES, build, random_tokens, relative_difference

PROMPTS = [random_tokens(length, seed=length).tolist() for length in (3, 11, 1, 7)]


def greedy_without_cache(model: Decoder, prompt: list[int], count: int) -> list[int]:
    row = list(prompt)
    for _ in range(count):
        row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    return row[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_cache_gives_the_logits_of_reading_all_at_once(family: str) -> None:
    model, tokens = build(FAMILIES[family]), random_tokens(2, 30)
    documents = Documents.from_lengths([[4, 16], [20]])
    continued = Documents.from_lengths([[4, 26], [30]])
    cache = KeyValueCache(30)
    parts = [model(tokens[:, :20], documents, cache=cache)]
    parts += [model(tokens[:, 20:23], cache=cache), model(tokens[:, 23:24], cache=cache)]
    parts += [model(tokens[:, 24:], cache=cache)]
    assert relative_difference(torch.cat(parts, dim=1), model(tokens, continued)) <= 2e-6
    with pytest.raises(ValueError, match="cache of 30 tokens cannot hold 31"):
        model(tokens[:, :1], cache=cache)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_batch_of_ragged_prompts_continues_each_as_alone_and_as_without_cache(
    family: str,
) -> None:
    model = build(FAMILIES[family])
    batched = generate(model, PROMPTS, max_new_tokens=12, temperature=0)
    alone = [generate(model, [p], max_new_tokens=12, temperature=0)[0] for p in PROMPTS]
    assert batched == alone
    assert batched == [greedy_without_cache(model, prompt, 12) for prompt in PROMPTS]


def test_samples_follow_seed_and_prompt_and_not_the_batch() -> None:
    model = build(FAMILIES["llama"])
    options = {"max_new_tokens": 10, "temperature": 0.9, "top_k": 20, "top_p": 0.9}
    first = generate(model, PROMPTS, seed=3, **options)
    assert generate(model, PROMPTS, seed=3, **options) == first
    assert generate(model, PROMPTS[::-1], seed=3, **options) == first[::-1]
    assert [generate(model, [p], seed=3, **options)[0] for p in PROMPTS] == first
    assert generate(model, PROMPTS, seed=4, **options) != first
    twice = generate(model, [PROMPTS[0]] * 2, seed=3, **options)
    assert twice[0] == first[0] != twice[1]


def test_a_row_ends_before_its_end_token_and_others_go_on() -> None:
    model = build(FAMILIES["qwen3"])
    rows = generate(model, PROMPTS, max_new_tokens=8, temperature=0)
    end = rows[0][-1]
    heard: list[tuple[int, int]] = []
    ended = generate(
        model, PROMPTS, max_new_tokens=8, temperature=0, eos_id=end,
        on_token=lambda row, token: heard.append((row, token)),
    )  # fmt: skip
    cut = [row[: row.index(end)] if end in row else row for row in rows]
    assert ended == cut
    assert [[token for row, token in heard if row == i] for i in range(len(rows))] == cut


def test_ids_that_the_tokenizer_does_not_have_are_never_chosen() -> None:
    model = build(FAMILIES["llama"])
    rows = generate(model, PROMPTS, max_new_tokens=20, temperature=5.0, vocab_size=4)
    assert {token for row in rows for token in row} == {0, 1, 2, 3}


def test_compiled_blocks_generate_as_plain_ones_do() -> None:
    model = build(FAMILIES["llama"])
    plain = generate(model, PROMPTS, max_new_tokens=4, temperature=0)
    for layer in model.layers.values():
        layer.compile(backend="eager", fullgraph=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert generate(model, PROMPTS, max_new_tokens=4, temperature=0) == plain
    torch._dynamo.reset()


def test_choice_inverts_the_cumulative_distribution_of_what_stays() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()  # likeliest first: 1, 3, 2, 0
    cases = (
        ({}, {0.0: 1, 0.39: 1, 0.41: 3, 0.69: 3, 0.71: 2, 0.91: 0, 1 - 1e-16: 0}),
        ({"top_k": 2}, {0.0: 1, 0.56: 1, 0.58: 3, 1 - 1e-16: 3}),
        ({"top_p": 0.6}, {0.56: 1, 0.58: 3, 1 - 1e-16: 3}),
        ({"top_p": 0.1}, {0.0: 1, 1 - 1e-16: 1}),
        ({"temperature": 1e-3}, {0.999: 1}),
        ({"temperature": 0}, {0.999: 1}),
    )
    for options, expected in cases:
        settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, **options}
        for draw, token in expected.items():
            drawn = torch.tensor([draw], dtype=torch.float64)
            assert choose(logits, drawn, **settings) == [token], (options, draw)


def test_draws_are_uniform_and_a_longer_stream_begins_like_a_shorter() -> None:
    long, short = (uniform_draws([[1], [2], [1]], 5, count) for count in (2000, 3))
    assert torch.equal(long[:, :3], short)
    assert abs(float(long.mean()) - 0.5) < 0.02
    assert len(np.unique(long)) == long.numel()


def test_all_wrong_arguments_are_reported_at_once() -> None:
    model = build(FAMILIES["llama"])
    with pytest.raises(UserError) as caught:
        generate(
            model, [[1], [], [2] * 600], max_new_tokens=0, temperature=-1.0, top_k=-2, top_p=0.0,
            seed=-1,
        )  # fmt: skip
    text = str(caught.value)
    for part in (
        "max_new_tokens = 0 is out of range", "temperature = -1.0 is out", "top_k = -2 is out",
        "top_p = 0.0 is out", "seed = -1 is out", "prompt 1 has no tokens",
        "prompt 2 of 600 tokens", "model.max_seq_len = 512", "try: --temperature 0.8",
    ):  # fmt: skip
        assert part in text
    with pytest.raises(UserError, match="temperature = nan"):
        generate(model, [[1]], max_new_tokens=1, temperature=float("nan"))
    with pytest.raises(UserError, match=r"try: --max-new-tokens 2"):
        generate(model, [[1] * 510], max_new_tokens=3)
