"""What makes a recipe impossible, found before anything starts, all of it at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from armillary.data.corpus import problems_of
from armillary.foundation.divisors import divisors
from armillary.foundation.errors import Problem
from armillary.foundation.secrets import holds_a_secret
from armillary.parallel.config import Parallel
from armillary.parallel.schedules import rows_at_once, takes
from armillary.recipe.problems_followed import followed
from armillary.recipe.problems_mesh import (
    mesh_problems,
    microbatch_problems,
    rank_problems,
    ranks_wanted,
    too_few_ranks,
)
from armillary.recipe.problems_replicas import replica_problems
from armillary.recipe.problems_scores import score_problems
from armillary.recipe.problems_stages import stage_problems
from armillary.recipe.recipe import Recipe
from armillary.recipe.tree import leaves

_OWN = ("max_gradient_norm", "budget.", "validation.", "sampling.")
_MAY_BE_INFINITE = ("max_gradient_norm", "gradient_norm_order")
_POSITIVE = (
    "budget.steps",
    "budget.tokens",
    "budget.batch_tokens",
    "budget.seq_len",
    "max_gradient_norm",
)
_LARGEST = 2**63 - 1


def problems(
    recipe: Recipe, world_size: int = 1, *, data: bool = True, more_ranks: str = ""
) -> list[Problem]:
    """Everything that would keep a recipe from being trained on `world_size` ranks.

    What is proposed for the mesh and the batch, taken together, is not refused in turn.

    Args:
        data: also ask for what only a machine that reads the data needs, such as files that exist.
        more_ranks: the option that asks for more than 1 rank, where none was given.
    """
    if too_large := list(_too_large(recipe)):
        return too_large  # of the rest, sums of such numbers would be asked
    if recipe.stages:
        return stage_problems(
            recipe, lambda each: problems(each, world_size, data=data, more_ranks=more_ranks)
        )
    budgeted = not any(_ranges(recipe))
    if more_ranks and world_size == 1 and budgeted and (wanted := ranks_wanted(recipe)) > 1:
        few = too_few_ranks(recipe.parallel, wanted, more_ranks)
        return [few, *problems(recipe, wanted, data=data)]

    def ask(changed: Recipe) -> list[Problem]:
        return _problems(changed, world_size, data=False)

    return followed(recipe, _problems(recipe, world_size, data=data), ask)


def _problems(recipe: Recipe, world_size: int, *, data: bool) -> list[Problem]:
    found = [*_ranges(recipe), *_sampling(recipe)]
    budget = recipe.budget
    countable = not any(problem.message.startswith("budget.") for problem in found)
    no_length = _length(recipe) if countable else []
    found += no_length
    found += recipe.model.problems(budget.seq_len)
    parts: list[Any] = [recipe.tuning, recipe.task, recipe.optimizer, recipe.precision]
    parts += [recipe.compile, recipe.activation_checkpoint, recipe.checkpoint, recipe.guard]
    parts += [recipe.telemetry, recipe.watchdog, recipe.replicas]
    for part in parts:
        found += getattr(part, "problems", list)()
    saves = recipe.checkpoint
    found += recipe.export.problems((saves.every, saves.keep_every, saves.ephemeral_every))
    found += _compiled_only(recipe)
    found += _on_the_device(recipe)
    found += _nowhere_to_go_back_to(recipe)
    if countable and not no_length:
        found += recipe.schedule.problems(budget.total_steps)
        found += _beyond(recipe)
        found += score_problems(recipe)
    misfits = (
        rank_problems(recipe, world_size) if countable else recipe.parallel.problems(world_size)
    )
    found += misfits
    if countable:
        misplaced = mesh_problems(recipe, world_size)
        parallel = Parallel(dp_shard=1) if misfits else recipe.parallel.resolve(world_size)
        undealt = list(_batch(recipe, parallel))
        found += [*misplaced, *undealt]
        if not misfits and not misplaced and not undealt:
            found += microbatch_problems(recipe, world_size)
            found += replica_problems(recipe, parallel)
    found += recipe.data.problems()
    found += recipe.evaluation.problems(budget.seq_len, getattr(recipe.model, "max_seq_len", None))
    if data:
        found += recipe.evaluation.missing()
        found += [problem for problem in _data(recipe) if problem not in found]
    found += _secrets(recipe)
    told = "\n".join(problem.message for problem in found)
    return found + [problem for name, problem in _not_finite(recipe) if name not in told]


def _ranges(recipe: Recipe) -> Iterator[Problem]:
    """The recipe's own numbers; components answer for theirs."""
    if not 0 <= recipe.seed <= _LARGEST:
        yield Problem(f"seed = {recipe.seed} is out of range", "0 to 2^63 - 1", "--seed 0")
    defaults = {leaf.name: leaf.value for leaf in leaves(Recipe())}
    if not recipe.gradient_norm_order >= 1:  # nor is NaN
        yield Problem(
            f"gradient_norm_order = {recipe.gradient_norm_order} is out of range",
            "1 or more, or inf",
            f"--gradient-norm-order {defaults['gradient_norm_order']}",
        )
    for leaf in leaves(recipe):
        if not leaf.name.startswith(_OWN) or isinstance(leaf.value, bool | str | tuple):
            continue
        least = "above 0" if leaf.name in _POSITIVE else "0 or more"
        if leaf.value is None or leaf.value > 0 or (leaf.value == 0 and least == "0 or more"):
            if leaf.value != math.inf or leaf.name in _MAY_BE_INFINITE:
                continue
            least += ", and finite"
        default = defaults[leaf.name]
        yield Problem(
            f"{leaf.name} = {leaf.value} is out of range",
            least,
            f"--{_option(leaf.name)} {default if default is not None else 1000}",
        )


def _sampling(recipe: Recipe) -> Iterator[Problem]:
    """Found out at the end of a long run otherwise."""
    tokens, context = recipe.sampling.tokens, getattr(recipe.model, "max_seq_len", None)
    if not recipe.sampling.prompts or (tokens > 0 and (context is None or tokens < context)):
        return
    if tokens >= 0:  # `_ranges` tells of those below
        most = "" if context is None else f", below model.max_seq_len = {context}"
        fitting = 64 if context is None else max(1, min(64, context // 2))
        yield Problem(
            f"sampling.tokens = {tokens} is out of range",
            f"1 or more{most}",
            f"--sampling.tokens {fitting}",
        )


def _compiled_only(recipe: Recipe) -> Iterator[Problem]:
    if recipe.activation_checkpoint.memory_budget is not None and not recipe.compile.enabled:
        yield Problem(
            "activation_checkpoint = memory-budget is the compiler's choice, and "
            "compile.enabled = false",
            "compile.enabled = true, or another way to checkpoint",
            "--compile.enabled",
        )


def _on_the_device(recipe: Recipe) -> Iterator[Problem]:
    """What needs weights where they are computed with, not on the host."""
    if recipe.parallel.cpu_offload and getattr(
        recipe.precision.linears, "float8_all_gather", False
    ):
        yield Problem(
            "parallel.cpu_offload = true and precision.linears.float8_all_gather = true",
            "one of them",
            "--precision.linears.float8-all-gather false",
        )


def _nowhere_to_go_back_to(recipe: Recipe) -> Iterator[Problem]:
    saves = recipe.checkpoint
    if recipe.guard.policy.needs_checkpoints and not (
        saves.every or saves.keep_every or saves.ephemeral_every
    ):
        yield Problem(
            "guard.policy goes back to checkpoints, and checkpoint.every = 0 makes none on the way",
            "checkpoints every so many steps, or another policy",
            "--checkpoint.every 100",
        )


def _secrets(recipe: Recipe) -> Iterator[Problem]:
    """A recipe is written into every run folder and log."""
    for leaf in leaves(recipe):
        values = leaf.value if isinstance(leaf.value, tuple) else (leaf.value,)
        if any(isinstance(value, str) and holds_a_secret(value) for value in values):
            yield Problem(
                f"{leaf.name} holds a URL with a user or a password",
                "a URL without; credentials come from the environment",
            )


def _not_finite(recipe: Recipe) -> Iterator[tuple[str, Problem]]:
    for leaf in leaves(recipe):
        values = leaf.value if isinstance(leaf.value, tuple) else (leaf.value,)
        if leaf.name in _MAY_BE_INFINITE or all(
            not isinstance(value, float) or math.isfinite(value) for value in values
        ):
            continue
        yield leaf.name, Problem(f"{leaf.name} = {leaf.value} is not finite", "finite numbers")


def _too_large(recipe: Recipe) -> Iterator[Problem]:
    """Whole numbers that no tensor could hold; TOML and Python know no limit."""
    for leaf in leaves(recipe):
        values = leaf.value if isinstance(leaf.value, tuple) else (leaf.value,)
        if any(isinstance(value, int) and abs(value) > _LARGEST for value in values):
            yield Problem(f"{leaf.name} = {leaf.value} is out of range", "up to 2^63 - 1")


def _length(recipe: Recipe) -> list[Problem]:
    budget = recipe.budget
    if budget.steps is None and budget.tokens is None:
        message = "budget.steps and budget.tokens are both none: the run has no length"
        return [Problem(message, "one of them", "--budget.steps 1000")]
    if budget.steps is not None and budget.tokens is not None:
        message = (
            f"budget.steps = {budget.steps} and budget.tokens = {budget.tokens:g} are both set"
        )
        return [Problem(message, "one of them", "--budget.tokens none")]
    return []


def _beyond(recipe: Recipe) -> Iterator[Problem]:
    """What lies past the end of a sequence, or of the run."""
    stride, length = recipe.validation.final_stride, recipe.budget.seq_len
    if stride > length:
        yield Problem(
            f"validation.final_stride = {stride} is above budget.seq_len = {length}",
            f"0 (seq_len) to {length}",
            f"--validation.final-stride {length}",
        )
    first, steps = recipe.telemetry.profile_from, recipe.budget.total_steps
    if first > steps:
        yield Problem(
            f"telemetry.profile_from = {first} is beyond the {steps} steps of the run",
            f"0 (no profile) to {steps}",
            f"--telemetry.profile-from {steps}",
        )


def _batch(recipe: Recipe, parallel: Parallel) -> Iterator[Problem]:
    """Whole sequences in a step, and as many for each rank and microbatch."""
    budget, ranks = recipe.budget, parallel.grid.data_size * max(1, recipe.replicas.groups)
    tokens, length, micro = budget.batch_tokens, budget.seq_len, budget.microbatch_sequences
    at_once = max(1, micro)
    sequences, rest = divmod(tokens, length)
    if not rest and sequences and (budget.uneven or sequences % (ranks * at_once) == 0):
        return
    where = f" on {ranks} data ranks" if ranks > 1 else ""
    if not rest and sequences % ranks == 0:
        share = sequences // ranks
        legal = [count for count in divisors(share) if takes(parallel, share // count)]
        best = min(legal or [0], key=lambda count: abs(count - micro))
        yield Problem(
            f"budget.microbatch_sequences = {micro} does not divide the {share} sequences of a "
            f"rank in a step of budget.batch_tokens = {tokens}{where}",
            ", ".join(["0 (as large as can be)", *map(str, _some(legal, best) if legal else [])]),
            f"--budget.microbatch-sequences {best}",
        )
        return
    unit = length * ranks * at_once
    multiples = list(_multiples(parallel, tokens // unit, micro))
    legal = [multiple * unit for multiple in multiples]
    best = min(legal, key=lambda total: (abs(total - tokens), total))
    if rest:
        what = f"is no multiple of budget.seq_len = {length}"
    else:
        many = "1 sequence" if sequences == 1 else f"{sequences} sequences"
        what = f"holds {many}, which {ranks} data ranks cannot share evenly"
    in_micro = f" in microbatches of {micro}" if micro > 1 else ""
    padded = "" if rest or "ep" in recipe.model.divisors() else "; or budget.uneven = true"
    yield Problem(
        f"budget.batch_tokens = {tokens} {what}",
        f"multiples of {unit}{where}{in_micro}: {', '.join(map(str, legal))}{padded}",
        f"--budget.batch-tokens {best}",
    )


def _multiples(parallel: Parallel, near: int, micro: int) -> Iterator[int]:
    """How often a rank's least share can be had: the next below, if any, and above `near`."""

    def can_be(multiple: int) -> bool:
        many = multiple if micro else multiple // rows_at_once(parallel, multiple)
        return takes(parallel, many)

    below = next((multiple for multiple in range(near, 0, -1) if can_be(multiple)), None)
    if below is not None:
        yield below
    yield next(multiple for multiple in range(near + 1, near + 10**6) if can_be(multiple))


def _some(legal: list[int], best: int, most: int = 8) -> list[int]:
    """At most `most` of the values, those around the best."""
    start = max(0, min(legal.index(best) - most // 2, len(legal) - most))
    return legal[start : start + most]


def _data(recipe: Recipe) -> list[Problem]:
    found = recipe.data.corpus.source_problems()
    vocabulary = 0

    def ask() -> None:
        nonlocal vocabulary
        vocabulary = recipe.data.tokenizer.expected_vocab_size()

    found += problems_of(ask)
    if vocabulary > recipe.model.vocab_size:
        fitting = math.ceil(vocabulary / 64) * 64
        found.append(
            Problem(
                f"model.vocab_size = {recipe.model.vocab_size} is smaller than the tokenizer's "
                f"{vocabulary} tokens",
                f"{vocabulary} or more",
                f"--model.vocab-size {fitting}",
            )
        )
    return found


def _option(name: str) -> str:
    return name.replace("_", "-")
