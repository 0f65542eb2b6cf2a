"""Which steps the guard finds bad, what its policies ask for, and what it writes down."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from armillary.data.batch import IGNORED, Batch
from armillary.foundation.errors import UserError
from armillary.models.layers.documents import Documents
from armillary.parallel import process
from armillary.parallel.config import Parallel
from armillary.parallel.mesh import Mesh
from armillary.resilience.guard import (
    HEALTHY,
    NOT_FINITE,
    SPIKING,
    Detector,
    Health,
    gradients_at_fault,
)
from armillary.resilience.guard_config import Guard, GuardPolicy, Rewind, Skip, Stop
from armillary.resilience.guard_dump import (
    REPLAY_FILE,
    Replay,
    Rows,
    clear_dump,
    dump_folder,
    dumped_steps,
    read_replay,
    write_replay,
    write_rows,
)
from ranks import run_ranks

CPU = torch.device("cpu")
VALUES = [math.nan, math.inf, -math.inf]


def judged(detector: Detector, loss: float, norm: float = 1.0) -> Health:
    verdict = detector.judge(torch.tensor(loss, dtype=torch.float64), torch.tensor(norm))
    health, more = verdict.read_later(torch.tensor([0.5, -math.inf])).wait()
    assert more == [0.5, -math.inf] and bool(verdict.skipped) == health.skipped
    return health


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("where", ["loss", "gradient_norm"])
def test_every_value_that_is_not_finite_is_found_wherever_it_is(value: float, where: str) -> None:
    detector = Detector(Guard(policy=Skip(max_in_a_row=2)), CPU)
    assert judged(detector, 1 + 2**-40) == Health(
        loss=1 + 2**-40,
        gradient_norm=1.0,
        kind=HEALTHY,
        skipped=False,
        frozen=False,
        in_a_row=0,
        limits=pytest.approx((math.nan, math.nan), nan_ok=True),
    )
    bad = judged(detector, *((value, 1.0) if where == "loss" else (1.0, value)))
    assert (bad.kind, bad.skipped, bad.frozen, bad.in_a_row) == (NOT_FINITE, True, False, 1)


@pytest.mark.parametrize(
    ("policy", "tolerated"), [(Stop(), 0), (Rewind(), 0), (Skip(max_in_a_row=3), 3)]
)
def test_after_more_bad_steps_than_the_policy_bears_nothing_changes_any_more(
    policy: GuardPolicy, tolerated: int
) -> None:
    detector = Detector(Guard(policy=policy), CPU)
    for row in range(1, tolerated + 1):
        assert judged(detector, math.nan).in_a_row == row
        assert not detector._frozen
    if tolerated:  # a healthy step between them starts the count anew
        assert not judged(detector, 1.0).skipped
        for _ in range(tolerated):
            assert not judged(detector, math.nan).frozen
    assert judged(detector, math.nan).frozen
    after = judged(detector, 1.0)
    assert after.kind == HEALTHY and after.skipped and after.frozen


def judged_on_this_rank() -> tuple[int, int]:
    """The kind of a step that is bad on rank 1 alone, as a fault of its machine would be."""
    mesh = Mesh.create(Parallel(dp_shard=2), CPU)
    detector = Detector(Guard(), CPU, agree=mesh.largest)
    own = judged(detector, math.nan if process.rank() == 1 else 1.0)
    return own.kind, own.in_a_row


def test_all_ranks_agree_about_a_step_that_is_bad_on_one() -> None:
    assert run_ranks(judged_on_this_rank, 2) == [(NOT_FINITE, 1)] * 2


def spiking(window: int = 8, **options: Any) -> Guard:
    return Guard(policy=Skip(), spike_factor=6.0, spike_window=window, **options)


def test_a_spike_is_told_from_noise_by_the_median_of_recent_healthy_steps() -> None:
    noise = torch.Generator().manual_seed(0)
    losses = (3 + 0.1 * torch.randn(60, generator=noise, dtype=torch.float64)).tolist()
    detector = Detector(spiking(16), CPU)
    found = [judged(detector, loss) for loss in losses]
    assert not any(health.skipped for health in found)
    assert all(math.isnan(health.limits[0]) for health in found[:16])  # too few to tell
    limit = found[-1].limits[0]
    recent = torch.tensor(losses[-17:-1], dtype=torch.float64).sort().values
    deviation = 1.4826 * (recent - recent[8]).abs().sort().values[8]
    assert limit == pytest.approx(float(recent[8] + 6 * deviation), rel=1e-12)
    assert judged(detector, 5.0).kind == SPIKING
    assert judged(detector, 3.0, norm=1.2).kind == SPIKING  # of norms that were all the same
    assert judged(detector, 3.0, norm=1.05).kind == HEALTHY  # within a percent, six times
    assert judged(detector, 0.1).kind == HEALTHY  # lower is no spike


def test_spikes_do_not_become_what_spikes_are_measured_by() -> None:
    detector = Detector(spiking(8), CPU)
    for _ in range(8):
        judged(detector, 2.0)
    assert [judged(detector, 9.0).kind for _ in range(9)] == [SPIKING] * 9
    assert judged(detector, 2.0).kind == HEALTHY


def test_a_resumed_detector_goes_on_as_if_it_had_never_stopped() -> None:
    whole = Detector(spiking(4), CPU)
    losses = [3.0, 2.9, 2.95, 2.8, 2.7, 2.85, 8.0, 2.75]
    oracle = [judged(whole, loss) for loss in losses]
    first = Detector(spiking(4), CPU)
    for loss in losses[:5]:
        judged(first, loss)
    kept = json.loads(json.dumps(first.recent()))
    second = Detector(spiking(4), CPU, recent=kept)
    assert [judged(second, loss) for loss in losses[5:]] == oracle[5:]
    assert Detector(Guard(), CPU, recent=kept).recent() == []


def test_gradients_at_fault_are_named() -> None:
    bad = torch.ones(4).index_fill_(0, torch.tensor([2]), math.inf)
    named = [("a", torch.ones(2)), ("b", bad), ("c", None), ("d", torch.zeros(0))]
    assert gradients_at_fault(named) == ["b"]


class Asked(Exception):
    pass


class OneBad:
    """A bad step that only says what it is asked for."""

    def __init__(self, in_a_row: int = 1, rewinds: int = 0) -> None:
        self.in_a_row, self.rewinds, self.skipped = in_a_row, rewinds, False

    def stop(self, why: str = "") -> NoReturn:
        raise Asked(f"stop: {why}")

    def skip(self) -> None:
        self.skipped = True

    def rewind(self, *, steps_before: int) -> NoReturn:
        raise Asked(f"rewind {steps_before}")


def test_policies_ask_for_what_they_are_called_and_stop_at_their_limits() -> None:
    def asked(policy: GuardPolicy, bad: OneBad) -> str:
        with pytest.raises(Asked) as found:
            policy.react(bad)
        return str(found.value)

    assert asked(Stop(), OneBad()) == "stop: "
    assert asked(Rewind(skip_steps_before=2), OneBad(rewinds=2)) == "rewind 2"
    assert "3 times" in asked(Rewind(max_rewinds=3), OneBad(rewinds=3))
    bad = OneBad(in_a_row=4)
    Skip(max_in_a_row=4).react(bad)
    assert bad.skipped
    assert "5 in a row" in asked(Skip(max_in_a_row=4), OneBad(in_a_row=5))


@pytest.mark.parametrize(
    "guard",
    [
        Guard(spike_factor=-1.0),
        Guard(spike_factor=math.nan),
        Guard(spike_window=1),
        Guard(policy=Skip(max_in_a_row=0)),
        Guard(policy=Rewind(max_rewinds=0)),
        Guard(policy=Rewind(skip_steps_before=-1)),
    ],
)
def test_values_out_of_range_are_refused(guard: Guard) -> None:
    (problem,) = guard.problems()
    assert problem.fix is not None and problem.fix.startswith("--guard.")


# The dump.

FOUND = Replay(
    step=12,
    samples=(88, 92),
    kind="not finite",
    loss=math.nan,
    gradient_norm=math.inf,
    sample_ids=[5, 2**40, 0, 7],
    gradients={"0": [], "1": ["head.weight"]},
    checkpoint_step=10,
    begun_from="/runs/other/checkpoints/step-00000003",
    jumped=[[8, 16]],
    recipe_sha256="ab" * 32,
    world_size=2,
)


def batch_of(rows: list[int]) -> Batch:
    lengths = [[3, 5] if row % 2 else [8] for row in rows]
    tokens = torch.stack([torch.arange(8) + 10 * row for row in rows])
    labels = tokens.roll(-1, dims=1)
    return Batch(tokens, labels, Documents.from_lengths(lengths), tuple(100 + r for r in rows))


def written(run: Path) -> Path:
    """Two ranks, two microbatches of a row each; the last row of rank 1 is padding."""
    folder = dump_folder(run, FOUND.step)
    write_rows(folder, 0, [batch_of([0]), batch_of([2])], [[0], [2]])
    write_rows(folder, 1, [batch_of([1]), batch_of([3])], [[1], [3]])
    write_replay(run, FOUND)
    return folder


def test_a_dump_comes_back_as_it_was_and_in_any_arrangement(tmp_path: Path) -> None:
    folder = written(tmp_path)
    again = read_replay(tmp_path)
    assert replace(again, loss=0.0) == replace(FOUND, loss=0.0) and math.isnan(again.loss)
    assert read_replay(tmp_path, 12).step == 12 and dumped_steps(tmp_path) == [12]
    found, wanted = Rows(folder, 4).batch([3, 0, 1]), batch_of([3, 0, 1])
    assert found.documents.lengths == wanted.documents.lengths
    assert found.sample_ids == wanted.sample_ids
    for first, second in (
        (found.tokens, wanted.tokens),
        (found.labels, wanted.labels),
        (found.documents.starts, wanted.documents.starts),
    ):
        assert torch.equal(first, second)
    padding = Rows(folder, 4).batch([2, 9])
    assert padding.labels[1].unique().tolist() == [IGNORED] and padding.sample_ids[1] == -1


def test_a_dump_does_not_mix_with_an_earlier_one_of_the_same_step(tmp_path: Path) -> None:
    folder = written(tmp_path)  # by two ranks, and now by one
    clear_dump(folder)
    write_rows(folder, 0, [batch_of([0, 1, 2, 3])], [[0, 1, 2, 3]])
    write_replay(tmp_path, FOUND)
    assert Rows(folder, 4).batch([1, 3]).sample_ids == batch_of([1, 3]).sample_ids


def test_only_the_newest_dumps_stay(tmp_path: Path) -> None:
    for step in range(1, 24):
        write_rows(dump_folder(tmp_path, step), 0, [batch_of([0])], [[0]])
        write_replay(tmp_path, replace(FOUND, step=step))
    assert dumped_steps(tmp_path) == list(range(4, 24))
    assert not dump_folder(tmp_path, 3).exists()
    clear_dump(dump_folder(tmp_path, 2))  # none is there
    write_rows(dump_folder(tmp_path, 2), 0, [batch_of([0])], [[0]])
    write_replay(tmp_path, replace(FOUND, step=2))  # of a run that went back
    assert dumped_steps(tmp_path) == [2, *range(5, 24)]


def changed(**fields: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / REPLAY_FILE
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def cut(folder: Path) -> None:
    path = folder / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.parametrize(
    "harm",
    [
        changed(step="12"),
        changed(step=-1),
        changed(format=2),
        changed(further=1),
        changed(loss=[]),
        changed(loss="many"),
        changed(samples=[1, 2, 3]),
        changed(samples=[True, 2]),
        changed(jumped=[[1]]),
        changed(gradients={"0": [3]}),
        changed(gradients=[]),
        changed(begun_from=3),
        changed(sample_ids={}),
        changed(world_size=10**12),
        lambda folder: (folder / REPLAY_FILE).write_bytes(b"\xff\xfe"),
        lambda folder: (folder / REPLAY_FILE).write_text("[" * 100_000),
        lambda folder: (folder / REPLAY_FILE).write_text("[]"),
        lambda folder: (folder / REPLAY_FILE).unlink(),
        cut,
        lambda folder: (folder / "rank-00001.safetensors").unlink(),
        lambda folder: (folder / "rank-00002.safetensors").write_bytes(b"\0" * 64),
        lambda folder: write_rows(folder, 5, [batch_of([1])], [[1]]),
    ],
)
def test_a_damaged_dump_is_refused_in_words(harm: Callable[[Path], object], tmp_path: Path) -> None:
    folder = written(tmp_path)
    harm(folder)
    with pytest.raises(UserError) as error:
        Rows(folder, read_replay(tmp_path).samples[1] - read_replay(tmp_path).samples[0])
    assert str(tmp_path) in str(error.value)
