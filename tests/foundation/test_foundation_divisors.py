"""Divisors of any number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armillary.foundation.divisors import divisors
from armillary.models.gpt_oss import GptOss
from armillary.models.llama import Llama
from armillary.models.routing import RouterConfig
from armillary.recipe.problems import problems
from armillary.recipe.recipe import Budget, Recipe


@given(st.integers(1, 5000))
def test_divisors_are_all_numbers_that_divide(number: int) -> None:
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


HUGE = 10**30 + 57


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(model=Llama(n_heads=HUGE, n_kv_heads=4)),
        Recipe(model=Llama(dim=HUGE, n_heads=7)),
        Recipe(model=GptOss(n_experts=HUGE, router=RouterConfig(n_groups=4))),
        Recipe(budget=Budget(batch_tokens=HUGE, seq_len=1)),
        Recipe(budget=Budget(tokens=10**400, steps=None)),
    ],
    ids=["heads", "dim", "experts", "batch", "tokens"],
)
def test_a_number_of_thirty_digits_is_refused_with_words_and_soon(recipe: Recipe) -> None:
    assert problems(recipe, 6, data=False)


def test_steps_are_counted_exactly() -> None:
    assert Budget(tokens=1e15 + 1, batch_tokens=1, seq_len=1).total_steps == 10**15 + 1
    assert Budget(tokens=0.1, batch_tokens=3, seq_len=3).total_steps == 1
