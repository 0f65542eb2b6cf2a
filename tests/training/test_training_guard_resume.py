"""Bad steps and stops, resumes and meshes together: always the run that nobody disturbed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from guarded_runs import (
    BAD,
    equal,
    lagging,
    measured,
    poisoned,
    run,
    saved_steps,
    saving_every_step,
    weights_of,
)

from armillary.checkpoint.config import Checkpoint
from armillary.foundation.errors import RunError
from armillary.models import DeepSeek
from armillary.optim.muon import Muon
from armillary.parallel.config import Parallel
from armillary.resilience.guard_config import GuardPolicy, Rewind, Skip, Stop
from armillary.training.feed import StepInput
from armillary.training.steps import Steps
from moe_cases import LATENT, TINY, V3_ROUTER
from ranks import run_ranks
from tiny_runs import accumulating, events_of, steps_of, tiny_recipe, write_corpus


@contextmanager
def asked_to_stop(when: Callable[[Steps], bool]) -> Iterator[None]:
    """SIGTERM right before a step is enqueued."""
    take = Steps.take

    def taking(self: Steps, mine: StepInput) -> None:
        if when(self):
            os.kill(os.getpid(), signal.SIGTERM)
        take(self, mine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steps, "take", taking)
        yield


def final_steps(folder: Path) -> dict[int, tuple[int, list[int], float | None]]:
    """What counts in the end of each step."""
    return {one[0]: one for one in measured(folder)}


@pytest.mark.parametrize("policy", [Stop(), Skip(), Rewind()])
def test_a_stop_that_comes_while_a_verdict_is_pending_saves_no_poison(
    policy: GuardPolicy, tmp_path: Path
) -> None:
    recipe, bad = saving_every_step(tmp_path)
    chosen = poisoned(replace(recipe, checkpoint=Checkpoint(every=3, keep_last=9)), bad, policy)

    def pending(steps: Steps) -> bool:  # the bad step is enqueued, and nobody has read it
        return steps.begun == BAD == steps.position.step + 1

    with lagging(), asked_to_stop(pending):
        if isinstance(policy, Stop):
            with pytest.raises(RunError, match=f"step {BAD - 1}, which is saved"):
                run(chosen, tmp_path / "run")
        else:
            assert run(chosen, tmp_path / "run") == 75
    assert saved_steps(tmp_path / "run") == {Stop: [3, 4], Skip: [3, 5], Rewind: [3]}[type(policy)]
    newest = weights_of(tmp_path / "run", saved_steps(tmp_path / "run")[-1])
    assert all(tensor.isfinite().all() for tensor in newest.values())
    if isinstance(policy, Stop):
        assert equal(newest, weights_of(tmp_path / "whole", BAD - 1))
        return
    with lagging():
        assert run(chosen, tmp_path / "run") == 0
    assert run(chosen, tmp_path / "undisturbed") == 0
    assert final_steps(tmp_path / "run") == final_steps(tmp_path / "undisturbed")
    last = [weights_of(tmp_path / name, 9) for name in ("run", "undisturbed")]
    assert equal(*last)


def test_bad_steps_in_a_row_are_counted_across_a_resume(tmp_path: Path) -> None:
    recipe, _ = saving_every_step(tmp_path)
    ids = tuple(step["sample_ids"][0] for step in steps_of(tmp_path / "whole")[4:7])
    chosen = poisoned(recipe, ids, Skip(max_in_a_row=2))
    with asked_to_stop(lambda steps: steps.begun == 6):
        assert run(chosen, tmp_path / "run") == 75
    for _ in range(2):  # nor does the same command once more get any further
        with pytest.raises(RunError, match=r"at step 7, .* 3 in a row"):
            run(chosen, tmp_path / "run")
    assert saved_steps(tmp_path / "run")[-1] == 6


def test_a_run_whose_first_step_was_left_out_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    recipe, _ = saving_every_step(tmp_path)
    bad = tuple(steps_of(tmp_path / "whole")[0]["sample_ids"][:1])
    chosen = poisoned(recipe, bad, Skip())
    assert run(chosen, tmp_path / "undisturbed") == 0
    with asked_to_stop(lambda steps: steps.begun == 1):
        assert run(chosen, tmp_path / "run") == 75
    assert saved_steps(tmp_path / "run") == [1]
    with lagging():
        assert run(chosen, tmp_path / "run") == 0
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "undisturbed")
    last = [weights_of(tmp_path / name, 9) for name in ("run", "undisturbed")]
    assert equal(*last)


def test_steps_before_a_bad_one_are_those_that_were_taken(tmp_path: Path) -> None:
    """And not the samples right before its own, which the run may have jumped over."""
    recipe, _ = saving_every_step(tmp_path)
    ids = tuple(step["sample_ids"][0] for step in steps_of(tmp_path / "whole")[6:8])
    recipe = replace(recipe, checkpoint=Checkpoint(every=4, keep_last=9))
    assert run(poisoned(recipe, ids, Rewind(skip_steps_before=1)), tmp_path / "run") == 0
    rewinds = events_of(tmp_path / "run", "rewind")
    # Step 6 is [112, 128) the second time, and step 5 before it [64, 80).
    assert [(e["to_step"], e["samples"]) for e in rewinds] == [(4, [80, 112]), (4, [64, 128])]


def host_and_device_agree(folder: str, parallel: Parallel) -> None:
    torch.set_num_threads(1)
    path = Path(folder)
    recipe = accumulating(tiny_recipe(path, steps=6, parallel=parallel), 2)
    sizes = TINY | {"vocab_size": 260, "max_seq_len": 64}
    recipe = replace(
        recipe,
        model=DeepSeek(**sizes, **LATENT, router=V3_ROUTER),  # with biases that move once a step
        optimizer=Muon(lr=1e-3),
        checkpoint=Checkpoint(every=3, keep_last=9),
    )
    assert run(recipe, path / "whole") == 0
    bad = tuple(steps_of(path / "whole")[4]["sample_ids"][-1:])
    for policy in (Skip(), Rewind()):
        name = type(policy).__name__
        assert run(poisoned(recipe, bad, policy), path / name) == 0
        with lagging():
            assert run(poisoned(recipe, bad, policy), path / f"{name}-lag") == 0
        assert steps_of(path / name) == steps_of(path / f"{name}-lag")
        assert saved_steps(path / name) == [3, 6]
        assert equal(weights_of(path / name, 6), weights_of(path / f"{name}-lag", 6))


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(device="cpu", dp_shard=2, ep=2),
        pytest.param(Parallel(device="cpu", tp=2), marks=pytest.mark.full),
        pytest.param(Parallel(device="cpu", pp=2), marks=pytest.mark.full),
    ],
    ids=["ep", "tp", "pp"],
)
def test_on_any_mesh_the_device_leaves_out_what_the_host_would(
    parallel: Parallel, tmp_path: Path
) -> None:
    write_corpus(tmp_path)
    run_ranks(host_and_device_agree, 2, str(tmp_path), parallel)
