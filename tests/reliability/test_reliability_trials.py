"""A few of the trials behind docs/reliability.md; all of them are `report.py`'s."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from reliability import corruption, faults, kills
from reliability.zygote import Zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as zygote:
        yield zygote


def test_two_ranks_that_are_killed_again_and_again_end_as_if_they_had_not_been(
    zygote: Zygote, tmp_path: Path
) -> None:
    chain = kills.run_chain(zygote, tmp_path / "chain", 2, "asynchronous", 5)
    assert not chain.wrong
    assert (chain.kills, chain.resumes) >= (5, 1)
    assert chain.inside_a_save and chain.checkpoints


def test_every_kind_of_damage_to_every_kind_of_file_is_named_and_the_older_one_used() -> None:
    lines, wrong = corruption.trials(0)
    assert not wrong
    assert any("trials" in line for line in lines)


@pytest.mark.full
@pytest.mark.parametrize("name", faults.GROUNDS)
def test_a_fault_of_half_a_minute_stops_no_training_and_harms_no_checkpoint(name: str) -> None:
    _, wrong = faults.trials([name])
    assert not wrong
