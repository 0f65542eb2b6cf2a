"""What a recipe says about checkpoints, as a run does it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from armillary.checkpoint.config import Checkpoint
from armillary.checkpoint.places.local import LocalPlace
from armillary.checkpoint.places.place import Draft
from armillary.checkpoint.retention import shelved_in
from armillary.checkpoint.store import CheckpointStore
from armillary.foundation.errors import UserError
from armillary.inference.load import find_saved
from armillary.recipe.recipe import Recipe
from armillary.resilience.claim import claim_checkpoints
from armillary.training import session
from armillary.training.company import Alone
from armillary.training.state import Position
from armillary.training.train import train
from tiny_runs import events_of, steps_of, tiny_recipe, write_corpus


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    write_corpus(tmp_path)
    return tiny_recipe(tmp_path, steps=8)


def saving(recipe: Recipe, **values: object) -> Recipe:
    return replace(recipe, checkpoint=Checkpoint(**values))


def test_checkpoints_elsewhere_are_found_from_the_run_and_held_by_it(
    recipe: Recipe, tmp_path: Path
) -> None:
    elsewhere, run = tmp_path / "big disk", tmp_path / "run"
    recipe = replace(recipe, validation=replace(recipe.validation, every=2))
    recipe = saving(recipe, folder=str(elsewhere), every=2, keep_last=1, keep_best=1)
    with claim_checkpoints(elsewhere), pytest.raises(UserError, match=r"checkpoints folder .* use"):
        train(recipe, name="tiny", folder=run)
    assert train(recipe, name="tiny", folder=run) == 0
    assert not (run / "checkpoints").exists()
    scores = {
        each.step: each.manifest["scores"]["validation"]
        for each in shelved_in(LocalPlace(elsewhere))
        if each.manifest["scores"]
    }
    looked = {e["step"]: e["bits_per_byte"] for e in events_of(run, "validation")[:3]}
    best = min(looked, key=looked.__getitem__)
    assert scores[best] == looked[best]
    _, found = find_saved(run)
    assert (found.step, found.path) == (8, f"{elsewhere}/step-00000008")
    longer = replace(recipe, budget=replace(recipe.budget, steps=10))
    assert train(longer, name="tiny", folder=run) == 0
    assert [event["resumed_from"] for event in events_of(run, "start")] == [None, 8]


def test_who_may_change_the_weights_hears_of_a_position_only_once_the_copy_is_made(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[CheckpointStore] = []
    wait = CheckpointStore.wait_until_staged

    def noted(self: CheckpointStore) -> None:
        wait(self)
        waits.append(self)

    class Peers(Alone):
        """Sends its state whenever it hears of a position."""

        def begin_step(self, at: Callable[[], Position]) -> None:
            before = len(waits)
            at()
            assert len(waits) > before, "a peer's weights would come into the checkpoint"

        end_step = begin_step

    monkeypatch.setattr(CheckpointStore, "wait_until_staged", noted)
    monkeypatch.setattr(session, "company_of", lambda assembly, stop, log: Peers(stop))
    assert train(saving(recipe, every=2), name="tiny", folder=tmp_path / "run") == 0
    assert waits


def test_what_fits_of_another_model_is_loaded_where_asked_and_the_rest_is_told(
    recipe: Recipe, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(recipe, name="tiny", folder=first) == 0
    wider = replace(recipe, model=replace(recipe.model, ffn_dim=96))
    with pytest.raises(UserError, match=r"holds tensors of other shapes: .*feed_forward"):
        train(wider, name="tiny", folder=second, resume=str(first))
    wider = saving(replace(wider, budget=replace(wider.budget, steps=4)), partial=True)
    assert train(wider, name="tiny", folder=second, resume=str(first)) == 0
    told = [e["message"] for e in events_of(second, "warning") if e["where"] == "resume"]
    assert any("loaded what fits" in text and "begin at 0" in text for text in told)
    assert any("other shapes" in text and "feed_forward" in text for text in told)
    assert not any("attention" in text for text in told)
    steps = steps_of(second)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert steps[0]["samples"][0] == 0
    assert steps[0]["loss"] < steps_of(first)[0]["loss"]  # it has learned something
    (saved,) = shelved_in(LocalPlace(second / "checkpoints"))
    assert saved.manifest["provenance"]["from"] == f"{first}/checkpoints/step-00000008"


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_is_full_for_some_steps_costs_no_step_and_no_older_checkpoint(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    original, run = LocalPlace.begin, tmp_path / "run"

    def begin(self: LocalPlace, final: str) -> Draft:
        if "step-00000003" <= final <= "step-00000006":
            assert (run / "checkpoints" / "step-00000002").is_dir()
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, final)

    monkeypatch.setattr(LocalPlace, "begin", begin)
    recipe = saving(recipe, every=1, keep_last=1, asynchronous=asynchronous)
    assert train(recipe, name="tiny", folder=run) == 0
    assert [step["step"] for step in steps_of(run)] == list(range(1, 9))
    states = [(e["state"], e["step"]) for e in events_of(run, "checkpoint")]
    assert {step for state, step in states if state == "failed"} == {3, 4, 5, 6}
    assert {step for state, step in states if state == "durable"} == {1, 2, 7, 8}
    hints = [e["hint"] for e in events_of(run, "warning") if e["where"] == "checkpoint"]
    assert hints and all("the disk is full" in hint for hint in hints)
    (left,) = shelved_in(LocalPlace(run / "checkpoints"))
    assert (left.step, left.manifest["kind"]) == (8, "final")
