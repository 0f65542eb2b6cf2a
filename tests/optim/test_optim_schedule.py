"""Schedules: first step above 0, peak reached, last step above the floor, for any W, S, D."""

import pickle

import pytest

from armillary.foundation.component import choices_of
from armillary.foundation.errors import UserError
from armillary.optim.schedule import (
    Constant,
    Cosine,
    InverseSqrt,
    Linear,
    ScheduleConfig,
    WarmupStableDecay,
)


def curve(config: ScheduleConfig, steps: int) -> list[float]:
    factor = config.build(steps)
    return [factor(step) for step in range(steps)]


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 40])
@pytest.mark.parametrize("warmup", [0, 1, 2, 5])
@pytest.mark.parametrize("decay", [0, 1, 2, 3])
@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_the_whole_curve_is_right_for_every_warmup_length_and_decay(
    steps: int, warmup: int, decay: int, floor: float
) -> None:
    config = WarmupStableDecay(
        warmup_steps=warmup, decay_fraction=min(1.0, (decay + 1e-9) / steps), floor=floor
    )
    decay = min(decay, steps)
    if warmup + decay > steps:
        with pytest.raises(UserError, match="do not fit"):
            config.build(steps)
        return
    factors = curve(config, steps)
    rise = [(step + 1) / warmup for step in range(warmup)]
    fall = [floor + (1 - floor) * (1 - k / decay) for k in range(decay)]
    assert factors == pytest.approx(rise + [1.0] * (steps - warmup - decay) + fall, abs=1e-15)
    assert factors[0] > 0
    assert max(factors) == 1.0
    assert factors[-1] > floor


@pytest.mark.parametrize(
    "config",
    [Constant, Linear, Cosine, InverseSqrt, WarmupStableDecay],
    ids=lambda c: c.__name__,
)
@pytest.mark.parametrize("steps", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("warmup", [None, 0, 1, 2])
def test_every_schedule_rises_to_the_peak_once_and_stays_in_range(config, steps, warmup) -> None:
    if warmup is not None and warmup > steps:
        with pytest.raises(UserError):
            config(warmup_steps=warmup).build(steps)
        return
    factors = curve(config(warmup_steps=warmup), steps)
    peak = factors.index(max(factors))
    assert max(factors) == 1.0
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert min(factors) > 0


def test_published_values() -> None:
    assert curve(Cosine(warmup_steps=0, floor=0.0), 4) == pytest.approx(
        [1.0, 0.8535533905932737, 0.5, 0.1464466094067262]
    )
    assert curve(Linear(warmup_steps=2), 6) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert curve(InverseSqrt(warmup_steps=4), 16)[3::4] == pytest.approx(
        [1.0, 0.7071067811865476, 0.5773502691896258, 0.5]
    )
    assert curve(InverseSqrt(warmup_steps=1, floor=0.5), 9)[-1] == 0.5
    assert curve(Constant(), 3) == [1.0, 1.0, 1.0]


def test_a_resumed_run_asks_the_same_function_again() -> None:
    config = WarmupStableDecay(warmup_steps=3, decay_fraction=0.4)
    again = pickle.loads(pickle.dumps(config))
    assert curve(config, 20)[11:] == [again.build(20)(step) for step in range(11, 20)]


def test_impossible_values_are_refused_all_at_once_with_a_fix() -> None:
    with pytest.raises(UserError) as caught:
        WarmupStableDecay(warmup_steps=-1, decay_fraction=1.5, floor=-0.1).build(0)
    assert len(caught.value.problems) == 4
    with pytest.raises(UserError) as caught:
        WarmupStableDecay(warmup_steps=15, decay_fraction=0.5).build(20)
    (problem,) = caught.value.problems
    assert problem.message == (
        "schedule: 15 steps of warm-up and 10 of decay do not fit in budget.steps = 20"
    )
    assert problem.fix == "--schedule.warmup-steps 1, or a longer run"


def test_schedules_can_be_chosen_by_name() -> None:
    names = ["constant", "linear", "cosine", "inverse-sqrt", "warmup-stable-decay"]
    assert list(choices_of(ScheduleConfig)) == names
