"""Whether an arrangement fits a number of ranks, and what would. Arithmetic only, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from armillary.foundation.divisors import divisors, listed
from armillary.foundation.errors import Problem, UserError, nearest
from armillary.parallel import schedules
from armillary.parallel.grid import DENSE_AXES

if TYPE_CHECKING:
    from armillary.parallel.config import Parallel

CHOICES = {
    "device": ("auto", "cpu", "cuda"),
    "context": ("all-gather", "ring", "ulysses"),
    "context_balance": ("head-tail", "none"),
}
"""Fields that take one of a few words."""

_WHAT = {"device": "kind of device", "context": "kind of context parallelism"}


Fits = Callable[[str, int], bool]
"""Whether something else, such as a model, allows an axis a degree."""


def arrangement_problems(
    parallel: Parallel, world_size: int, fits: Fits | None = None
) -> list[Problem]:
    """What keeps an arrangement from covering `world_size` ranks exactly, all at once.

    Args:
        parallel: as it is written.
        world_size: ranks.
        fits: what else a degree has to suit for it to be proposed.
    """
    malformed = list(_malformed(parallel))
    problems = malformed or list(_misfit(parallel, world_size, fits or (lambda *_: True)))
    if not problems:
        resolved = parallel.resolve(world_size)
        problems = [*_experts(resolved), *_pipeline(resolved)]
    return [*problems, *_words(parallel), *_host_memory(parallel, world_size)]


def option(field: str) -> str:
    """How a field of the arrangement is set on the command line."""
    return f"--parallel.{field.replace('_', '-')}"


def closest(wanted: int, allowed: Sequence[int]) -> int:
    """The allowed value nearest by ratio; of two as near, the larger."""
    # No quotient of the two: numbers of hundreds of digits have logarithms, but no ratio.
    of_wanted = math.log(max(1, wanted))
    return min(allowed, key=lambda value: (round(abs(math.log(value) - of_wanted), 12), -value))


def count_of_ranks(number: int) -> str:
    """As people say it."""
    return "1 rank" if number == 1 else f"{number} ranks"


def _malformed(parallel: Parallel) -> Iterator[Problem]:
    for axis, degree in parallel.degrees.items():
        if degree < 1 and degree != -1:
            yield Problem(
                f"parallel.{axis} = {degree} is not a number of ranks",
                allowed="1 or more, or -1 for the ranks that the other axes leave",
                fix=f"{option(axis)} {-1 if axis == 'dp_shard' else 1}",
            )
    for axis in ("ep", "expert_tp"):
        if getattr(parallel, axis) < 1:
            yield Problem(
                f"parallel.{axis} = {getattr(parallel, axis)} is not a number of ranks",
                allowed="1 or more",
                fix=f"{option(axis)} 1",
            )
    free = [axis for axis, degree in parallel.degrees.items() if degree == -1]
    if len(free) > 1:
        others = [axis for axis in free if axis != "dp_shard"][: len(free) - 1]
        yield Problem(
            " and ".join(f"parallel.{axis} = -1" for axis in free) + " leave the arrangement open",
            allowed="one axis with -1",
            fix=" ".join(f"{option(axis)} 1" for axis in others),
        )


def _misfit(parallel: Parallel, world_size: int, fits: Fits) -> Iterator[Problem]:
    fixed = {axis: degree for axis, degree in parallel.degrees.items() if degree != -1}
    product = math.prod(fixed.values())
    is_open = len(fixed) < len(DENSE_AXES)
    if product == world_size or (is_open and world_size % product == 0):
        return
    # Blame the largest degree whose change alone can make it right.
    for axis in sorted(fixed, key=lambda axis: (fixed[axis], axis == "dp_shard"), reverse=True):
        others = product // fixed[axis]
        if world_size % others:
            continue
        room = world_size // others
        allowed = [each for each in (divisors(room) if is_open else [room]) if fits(axis, each)]
        if not allowed:
            continue
        verb = "does not divide the ranks" if is_open else "does not cover the ranks"
        yield Problem(
            f"parallel.{axis} = {fixed[axis]} {verb}: world size {world_size}"
            + (f", other axes take {others}" if others > 1 else ""),
            allowed=f"on {count_of_ranks(world_size)}: {listed(allowed)}",
            fix=f"{option(axis)} {closest(fixed[axis], allowed)}",
        )
        return
    written = {axis: degree for axis, degree in fixed.items() if degree > 1}
    text = ", ".join(f"parallel.{axis} = {degree}" for axis, degree in written.items())
    yield Problem(
        f"{text}: together {product} ranks, which does not fit a world size of {world_size}",
        allowed=f"degrees whose product {'divides' if is_open else 'is'} {world_size}",
        fix=_proposal(parallel, world_size, fits),
    )


def _proposal(parallel: Parallel, world_size: int, fits: Fits) -> str:
    """Degrees near the written ones that fit: inner axes keep theirs first, dp_shard gives way."""
    free = next((axis for axis, degree in parallel.degrees.items() if degree == -1), "dp_shard")
    left, changes = world_size, []
    for axis in reversed(DENSE_AXES):
        degree = parallel.degrees[axis]
        if axis == free:
            continue
        fitting = closest(degree, [each for each in divisors(left) if fits(axis, each)] or [1])
        left //= fitting
        if fitting != degree:
            changes.append(f"{option(axis)} {fitting}")
    if parallel.degrees[free] != -1:
        changes.append(f"{option(free)} -1")
    return " ".join(changes)


def _experts(resolved: Parallel) -> Iterator[Problem]:
    """The second arrangement of dp_shard x cp x tp."""
    tp, ep, expert_tp = resolved.tp, resolved.ep, resolved.expert_tp
    inner = resolved.dp_shard * resolved.cp * tp
    if expert_tp not in (1, tp):
        legal = sorted({1, tp})
        yield Problem(
            f"parallel.expert_tp = {expert_tp} is neither 1 nor parallel.tp = {tp}",
            allowed=listed(legal),
            fix=f"{option('expert_tp')} {closest(expert_tp, legal)}",
        )
        return
    room = inner // expert_tp
    if room % ep:
        over = "dp_shard x cp" if expert_tp == tp and tp > 1 else "dp_shard x cp x tp"
        yield Problem(
            f"parallel.ep = {ep} does not divide {over} = {room} ranks",
            allowed=listed(divisors(room)),
            fix=f"{option('ep')} {closest(ep, divisors(room))}",
        )


def _pipeline(resolved: Parallel) -> Iterator[Problem]:
    """Stages and the schedule that drives them; without a pipeline both stand idle."""
    name, layers = resolved.schedule, resolved.stage_layers
    if resolved.pp == 1 and len(layers) > 1:
        yield Problem(
            f"parallel.stage_layers names {len(layers)} stages, and there is 1: parallel.pp = 1",
            allowed="none without a pipeline",
            fix=f"{option('stage_layers')} ''",
        )
    if resolved.pp == 1 or (name not in schedules.SCHEDULES and not schedules.is_file(name)):
        return
    stages = list(_stage_counts(resolved))
    yield from stages
    if stages or not layers:
        return
    if len(layers) != resolved.stages:
        yield Problem(
            f"parallel.stage_layers names {len(layers)} stages, and there are {resolved.stages}: "
            f"pp = {resolved.pp} ranks of {resolved.stages // resolved.pp}",
            allowed=f"{resolved.stages} numbers of layers, or none of them: cut by estimated cost",
            fix=f"{option('stage_layers')} ''",
        )
    if min(layers) < 1:
        yield Problem(
            f"parallel.stage_layers = {listed(layers)} leaves a stage without layers",
            allowed="1 or more for each stage",
            fix=f"{option('stage_layers')} ''",
        )


def _stage_counts(resolved: Parallel) -> Iterator[Problem]:
    name, wanted = resolved.schedule, resolved.stages_per_rank
    if schedules.is_file(name):
        yield from _table(resolved)
        return
    schedule = schedules.SCHEDULES[name]
    least, most = schedule.least_stages, schedule.most_stages
    if wanted == 0 or (wanted >= least and (most is None or wanted <= most)):
        return
    many = f"{least}" if most == least else f"{least} or more"
    yield Problem(
        f"parallel.stages_per_rank = {wanted} does not go with parallel.schedule = {name}",
        allowed=f"0 (as the schedule needs), {many}",
        fix=f"{option('stages_per_rank')} {least}",
    )


def _table(resolved: Parallel) -> Iterator[Problem]:
    try:
        table = schedules.read_table(resolved.schedule)
    except UserError as error:
        yield from error.problems
        return
    another = f"{option('schedule')} 1F1B"
    if table.ranks != resolved.pp:
        fits = resolved.grid.world_size % table.ranks == 0
        yield Problem(
            f"parallel.schedule = {resolved.schedule} is for {table.ranks} ranks, and "
            f"parallel.pp = {resolved.pp}",
            allowed="one line per rank of pp",
            fix=f"{option('pp')} {table.ranks}" if fits else another,
        )
    elif table.stages % resolved.pp or resolved.stages_per_rank not in (
        0,
        table.stages // resolved.pp,
    ):
        uneven = table.stages % resolved.pp
        yield Problem(
            f"parallel.schedule = {resolved.schedule} has {table.stages} stages, which is not "
            f"{resolved.stages_per_rank or 'as many'} for each of parallel.pp = {resolved.pp}",
            allowed="as many stages for each rank",
            fix=another if uneven else f"{option('stages_per_rank')} 0",
        )
    else:
        yield from _cells(resolved)


def _cells(resolved: Parallel) -> Iterator[Problem]:
    from armillary.parallel.pipeline.placement import rank_of_stages  # it knows this room
    from armillary.parallel.pipeline.table import table_problems

    try:
        ranks = rank_of_stages(resolved)
    except UserError as error:
        yield from error.problems
        return
    if len({ranks.count(rank) for rank in range(resolved.pp)}) > 1:
        held = listed(ranks.count(rank) for rank in range(resolved.pp))
        yield Problem(
            f"parallel.schedule = {resolved.schedule} has {held} stages in its lines",
            allowed="as many stages for each rank",
            fix=f"{option('schedule')} 1F1B",
        )
        return
    yield from table_problems(resolved.schedule)


def _words(parallel: Parallel) -> Iterator[Problem]:
    for field, choices in CHOICES.items():
        value = getattr(parallel, field)
        if value not in choices:
            near = None if field == "device" else nearest(value, choices)  # gpu is not cpu
            yield Problem(
                f"parallel.{field} = {value} is no {_WHAT.get(field, 'way to balance context')}",
                allowed=", ".join(choices),
                fix=f"{option(field)} {near or choices[0]}",
            )
    name = parallel.schedule
    if name not in schedules.SCHEDULES and not schedules.is_file(name):
        yield Problem(
            f"parallel.schedule = {name} is no schedule",
            allowed=", ".join(schedules.SCHEDULES) + ", or the path of a .csv",
            fix=f"{option('schedule')} {nearest(name, schedules.SCHEDULES) or '1F1B'}",
        )
    for field, least in (("stages_per_rank", 0), ("prefetch", 0)):
        if getattr(parallel, field) < least:
            yield Problem(
                f"parallel.{field} = {getattr(parallel, field)} is out of range",
                allowed=f"{least} or more",
                fix=f"{option(field)} {least}",
            )


def _host_memory(parallel: Parallel, world_size: int) -> Iterator[Problem]:
    if parallel.cpu_offload and world_size == 1:
        yield Problem(
            "parallel.cpu_offload = true keeps shards in host memory, and one rank has no shards",
            allowed="2 ranks or more",
            fix=f"{option('cpu_offload')} false",
        )
