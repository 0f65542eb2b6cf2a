"""Whether a model, a sequence and a step can be divided as the recipe's mesh asks. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from math import lcm, prod
from typing import Any

from armillary.foundation.divisors import divisors, listed
from armillary.foundation.errors import Problem
from armillary.parallel.arrangement import (
    arrangement_problems,
    closest,
    count_of_ranks,
    option,
)
from armillary.parallel.config import Parallel, Scale
from armillary.parallel.grid import DENSE_AXES
from armillary.parallel.pipeline.rules import split_backward_problems
from armillary.parallel.schedules import SCHEDULES, deal, read_table, rows_at_once, takes
from armillary.recipe.recipe import Recipe

_NEEDS_EXPERTS = ("ep", "expert_tp")

_WHOLE_ROWS = {"all-gather": ("varlen",), "ring": ("flex", "varlen"), "ulysses": ()}
"""By kind of context parallelism, the attention backends that need whole rows."""


def rank_problems(recipe: Recipe, world_size: int) -> list[Problem]:
    """What keeps the mesh from covering the ranks; proposes what the model allows too."""
    base = _readable(recipe.parallel, world_size)

    def fits(axis: str, degree: int) -> bool:
        changes: dict[str, Any] = {axis: degree}
        return not any(_axis_faults(recipe, dataclasses.replace(base, **changes), axis))

    return arrangement_problems(recipe.parallel, world_size, fits)


def ranks_wanted(recipe: Recipe) -> int:
    """As few ranks as the degrees ask for; 1 if the model cannot be split so either."""
    fixed = [degree for degree in recipe.parallel.degrees.values() if degree != -1]
    wanted = prod(fixed) if min(fixed, default=1) > 0 else 1
    if recipe.parallel.problems(wanted) or _faults(recipe, recipe.parallel.resolve(wanted)):
        return 1
    return wanted


def too_few_ranks(parallel: Parallel, wanted: int, more_ranks: str) -> Problem:
    """What is wrong with one rank, where the option `more_ranks` was not given."""
    written = {axis: degree for axis, degree in parallel.degrees.items() if degree > 1}
    more = " or a multiple" if -1 in parallel.degrees.values() else ""
    return Problem(
        ", ".join(f"parallel.{axis} = {degree}" for axis, degree in written.items())
        + f" need{'s' if len(written) == 1 else ''} {wanted} ranks, and there is 1",
        allowed=f"{more_ranks} {wanted}{more}",
        fix=f"{more_ranks} {wanted}",
    )


def mesh_problems(recipe: Recipe, world_size: int) -> list[Problem]:
    """What of the model and the sequence the degrees do not divide, all at once.

    Degrees are looked at as they are written where they do not fit the ranks either.
    """
    parallel = _readable(recipe.parallel, world_size)
    told = " ".join(problem.fix or "" for problem in rank_problems(recipe, world_size))
    found = []
    for axis, faults in _faults(recipe, parallel).items():
        degree = getattr(parallel, axis)
        legal = _legal(recipe, axis, world_size)
        change = _change_of_model(recipe, axis)
        allowed = [f"on {count_of_ranks(world_size)}: {listed(legal)}"] if legal else []
        fix = _fix(recipe.parallel, axis, closest(degree, legal or [1]))
        if change is not None:
            allowed, fix = [f"{change}, or parallel.{axis} = 1"], change
        found.append(
            Problem(
                f"parallel.{axis} = {degree} {'; '.join(faults)}",
                allowed=" ".join(allowed) or None,
                fix=None if change is None and f"{option(axis)} " in told else fix,
            )
        )
    found += _stage_layers(recipe, parallel)
    found += _attention(recipe, parallel)
    found += _split_backward(recipe, parallel)
    return found


def _change_of_model(recipe: Recipe, axis: str) -> str | None:
    """What changes a model that cannot be split along an axis into one that can."""
    refusal = recipe.model.refusals().get(axis)
    return refusal.fix if refusal is not None else None


def microbatch_problems(recipe: Recipe, world_size: int) -> Iterator[Problem]:
    """Whether a pipeline can be fed; only for a step that the data ranks can share."""
    parallel = recipe.parallel.resolve(world_size)
    budget, ranks = recipe.budget, parallel.grid.data_size * max(1, recipe.replicas.groups)
    if budget.uneven:
        yield from _padding(recipe, parallel)
        return
    share = budget.batch_tokens // budget.seq_len // ranks
    at_once = rows_at_once(parallel, share, budget.microbatch_sequences)
    if takes(parallel, share // at_once):
        return
    legal = [many for many in divisors(share) if takes(parallel, share // many)]
    if legal:
        allowed = f"budget.microbatch_sequences of 0 (as large as can be), {listed(legal)}"
        fix = f"--budget.microbatch-sequences {closest(at_once, legal)}"
    else:
        wanted = next(many for many in range(1, 10**6) if takes(parallel, many))
        tokens = wanted * ranks * budget.seq_len
        least = " or more" if parallel.schedule in SCHEDULES else " or a multiple"
        allowed = f"budget.batch_tokens of {tokens}{least}, in {wanted} microbatches"
        fix = f"--budget.batch-tokens {tokens}"
        if budget.microbatch_sequences > 1:
            fix += " --budget.microbatch-sequences 0"
    yield Problem(
        f"parallel.schedule = {parallel.schedule} on {parallel.stages} stages takes "
        f"{_rule(parallel)}, and a step has {share // at_once}: {share} sequences of a data rank, "
        f"{at_once} at once",
        allowed,
        fix,
    )


def _padding(recipe: Recipe, parallel: Parallel) -> Iterator[Problem]:
    """Rows that weigh nothing must not count in anything else either."""
    budget, ranks = recipe.budget, parallel.grid.data_size * max(1, recipe.replicas.groups)
    sequences, wanted = budget.batch_tokens // budget.seq_len, budget.microbatch_sequences
    dealt = deal(parallel, sequences, ranks, wanted, uneven=True)
    if not dealt.padding or "ep" not in recipe.model.divisors():
        return
    tokens = (sequences + dealt.padding) * budget.seq_len
    yield Problem(
        f"budget.uneven = true pads the {sequences} sequences of a step with {dealt.padding} rows"
        f" on {ranks} data ranks, and the loads of the experts would count them",
        allowed=f"steps that {ranks} data ranks share evenly, such as {tokens} tokens",
        fix=f"--budget.batch-tokens {tokens}",
    )


def _readable(parallel: Parallel, world_size: int) -> Parallel:
    """Resolved where it fits, else with 1 for what is open or no number of ranks."""
    if not parallel.problems(world_size):
        return parallel.resolve(world_size)
    axes = (*DENSE_AXES, *_NEEDS_EXPERTS)
    degrees: dict[str, Any] = {axis: max(1, getattr(parallel, axis)) for axis in axes}
    known = parallel.schedule in SCHEDULES
    return dataclasses.replace(
        parallel,
        **degrees,
        stages_per_rank=0,
        stage_layers=(),
        schedule=parallel.schedule if known else "1F1B",
    )


def _faults(recipe: Recipe, parallel: Parallel) -> dict[str, list[str]]:
    """By axis, what its degree does not divide, in words that follow the axis and its degree."""
    found = {axis: list(_axis_faults(recipe, parallel, axis)) for axis in _AXES}
    return {axis: faults for axis, faults in found.items() if faults}


_AXES = ("pp", "cp", "tp", "ep", "expert_tp")


def _axis_faults(recipe: Recipe, parallel: Parallel, axis: str) -> Iterator[str]:
    degree = getattr(parallel, axis)
    if degree == 1:
        return
    model, ulysses = recipe.model, axis == "cp" and parallel.context == "ulysses"
    refusals, fields = model.refusals(), model.divisors()
    for name in (axis, "ulysses" if ulysses else axis):
        if name in refusals:
            yield f"cannot be had: {refusals[name].reason}"
            return
    if axis in _NEEDS_EXPERTS and "ep" not in fields:
        yield "cannot be had: the model has no experts"
        return
    if axis == "pp":
        for name, most in fields.get(axis, {}).items():
            if parallel.stages > most:
                yield f"makes {parallel.stages} stages, more than {name} = {most}"
        return
    shares = parallel.tp if ulysses else 1
    values = fields.get("ulysses" if ulysses else axis, {}).items()
    undivided = [f"{name} = {value}" for name, value in values if value % (degree * shares)]
    if undivided:
        times = f"times parallel.tp = {shares} " if shares > 1 else ""
        yield f"{times}does not divide {', '.join(undivided)}"
    yield from _sequence(recipe, parallel, axis)


def _sequence(recipe: Recipe, parallel: Parallel, axis: str) -> Iterator[str]:
    """The tokens of a row are shared by cp, and each share by tp."""
    length, cp, tp = recipe.budget.seq_len, parallel.cp, parallel.tp
    name = f"budget.seq_len = {length}"
    pieces = 2 * cp if _is_balanced(parallel) else cp
    if axis == "cp" and length % pieces:
        parts = f" into {pieces} parts, a head and a tail for each" if pieces != cp else ""
        yield f"does not divide {name}{parts}"
    if axis == "tp":
        shares = 1 if length % cp else cp  # what cp alone does not divide is told of cp
        if length % (shares * tp):
            times = f"times parallel.cp = {shares} " if shares > 1 else ""
            yield f"{times}does not divide {name} (multiples of {lcm(pieces, cp * tp)} fit)"


def _is_balanced(parallel: Parallel) -> bool:
    balanced = parallel.context_balance == "head-tail" and parallel.context != "ulysses"
    return balanced and parallel.cp > 1


def _legal(recipe: Recipe, axis: str, world_size: int) -> list[int]:
    """Degrees of one axis that the ranks and the model allow, dp_shard giving way."""
    fits = not recipe.parallel.problems(world_size)
    base = recipe.parallel if fits else _readable(recipe.parallel, world_size)
    legal = []
    for degree in divisors(world_size):
        variant = _with(base, axis, degree)
        if fits and variant.problems(world_size):
            continue
        if not any(_axis_faults(recipe, variant, axis)):
            legal.append(degree)
    return legal


def _with(parallel: Parallel, axis: str, degree: int) -> Parallel:
    changes: dict[str, Any] = {axis: degree}
    if _must_open(parallel, axis):
        changes["dp_shard"] = -1
    return dataclasses.replace(parallel, **changes)


def _must_open(parallel: Parallel, axis: str) -> bool:
    """Whether another axis has to give way when this one changes."""
    others = [degree for name, degree in parallel.degrees.items() if name != axis]
    return axis in DENSE_AXES and -1 not in others


def _fix(parallel: Parallel, axis: str, degree: int) -> str:
    more = f" {option('dp_shard')} -1" if _must_open(parallel, axis) else ""
    return f"{option(axis)} {degree}{more}"


def _stage_layers(recipe: Recipe, parallel: Parallel) -> Iterator[Problem]:
    layers = parallel.stage_layers
    if len(layers) != parallel.stages:  # none, or told of the stages
        return
    for name, wanted in recipe.model.divisors().get("pp", {}).items():
        if sum(layers) != wanted:
            yield Problem(
                f"parallel.stage_layers = {listed(layers)} has {sum(layers)} layers, and "
                f"{name} = {wanted}",
                allowed=f"numbers whose sum is {wanted}",
                fix=f"{option('stage_layers')} ''",
            )


def _attention(recipe: Recipe, parallel: Parallel) -> Iterator[Problem]:
    attention = getattr(recipe.model, "attention", "auto")
    if parallel.cp > 1 and attention in _WHOLE_ROWS.get(parallel.context, ()):
        yield Problem(
            f"model.attention = {attention} needs whole rows, and with parallel.context = "
            f"{parallel.context} each of parallel.cp = {parallel.cp} ranks has a part",
            allowed="model.attention = auto, or parallel.context = ulysses",
            fix="--model.attention auto",
        )


def _split_backward(recipe: Recipe, parallel: Parallel) -> list[Problem]:
    """What is computed at one moment, where the schedule wants it at two."""
    scale = Scale(
        parallel=parallel,
        activation_checkpoint=recipe.activation_checkpoint,
        compile=recipe.compile,
    )
    return split_backward_problems(
        scale, max(recipe.model.divisors().get("pp", {}).values(), default=1)
    )


def _rule(parallel: Parallel) -> str:
    if parallel.schedule not in SCHEDULES:
        many = read_table(parallel.schedule).microbatches
        return f"{many} microbatch{'es' if many > 1 else ''}"
    if SCHEDULES[parallel.schedule].rule == "stages":
        return f"{parallel.stages} microbatches or more"
    return f"as many microbatches in each round of its {parallel.pp} ranks"
