"""Random states as bytes."""

from __future__ import annotations

import random

import numpy as np
import torch

from armillary.checkpoint import rng


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
