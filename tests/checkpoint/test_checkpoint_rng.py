"""Random states as bytes."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from armillary.checkpoint import rng
from armillary.foundation.errors import UserError


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        torch.rand(()).item(),
        torch.randn(()).item(),
    ]


def test_draws_after_a_restore_equal_those_after_the_capture() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()  # leaves half a gaussian pair in python's and numpy's generators
    states = rng.capture()
    expected = [draw() for _ in range(3)]
    assert [draw() for _ in range(3)] != expected
    rng.restore(states)
    assert [draw() for _ in range(3)] == expected
    rng.restore(states)
    assert rng.capture() == states


@pytest.mark.parametrize(
    "states",
    [
        b"",
        b"[]",
        b"{}",
        b'{"python": [3, [1, 2], null]}',
        b'{"python": 3}',
        b'{"python": [3, ["x"], null]}',
        b"\xff",
    ],
)
def test_what_are_no_random_states_is_an_error_in_words(states: bytes) -> None:
    with pytest.raises(UserError, match="no random states"):
        rng.restore(states)


def test_random_states_with_odd_parts_are_an_error_in_words() -> None:
    right = json.loads(rng.capture())
    for changes in (
        {"torch": "AAAA"},
        {"torch": "not base 64!"},
        {"numpy": {**right["numpy"], "key": "AAAA"}},
        {"numpy": {**right["numpy"], "bit_generator": "Other"}},
        {"numpy": {**right["numpy"], "pos": "x"}},
        {"numpy": []},
    ):
        with pytest.raises(UserError, match="no random states"):
            rng.restore(json.dumps(right | changes).encode())
    rng.restore(json.dumps(right).encode())
