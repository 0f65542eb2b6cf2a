"""The speed benchmark's systems still take the same step, at a size that takes no time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


def test_armillary_transformers_and_the_plain_loop_agree_on_three_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import systems

    setting = systems.Setting(
        layers=2, dim=32, heads=4, kv_heads=4, ffn=64, vocabulary=64, rows=2, length=16
    )
    weights = systems.initial_weights(setting)
    makers = (systems.armillary, systems.transformers, systems.plain)
    losses = []
    for make in makers:
        step = make(setting, weights)
        losses.append([step() for _ in range(3)])
    assert losses[0][0] > losses[0][2]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-5)
    sys.modules.pop("systems")
