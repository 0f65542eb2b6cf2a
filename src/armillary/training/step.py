"""One optimizer step: the same answer for any split of the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from armillary.data.batch import Batch
from armillary.foundation.tell import seen_by_every_rank
from armillary.parallel.gradients import norms_by_group, norms_by_name, scale_and_clip
from armillary.parallel.model import LOSS_AXES, ParallelModel
from armillary.resilience.guard import require_finite
from armillary.telemetry.timing import StepTimer
from armillary.training.assembly import Assembly

_REPORTED: dict[str, Callable[[ParallelModel, float], dict[str, float]]] = {
    "none": lambda model, order: {},
    "groups": norms_by_group,
    "parameters": norms_by_name,
}
"""Norms for the log, by `telemetry.gradient_norms`."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step measured, equal on every rank."""

    loss: float
    """Nats per valid token over the whole global step."""
    gradient_norm: float
    """Global norm before clipping, of the order that the recipe asks for."""
    gradient_norms: dict[str, float]
    """The same by group or name of parameters, where the recipe asks for it."""
    learning_rate: float
    """Of the first parameter group."""
    statistics: dict[str, float]
    """What layers report of a step, by name: loads of experts."""


def optimizer_step(
    assembly: Assembly,
    microbatches: Sequence[Batch],
    *,
    weights: tuple[int, ...],
    step: int,
    samples: tuple[int, int],
    timer: StepTimer,
) -> StepResult:
    """Forward, backward and update over this rank's share of the global batch.

    Every gradient is that of (sum of the loss over the global step) / weight, so neither the
    accumulation split, nor ragged masks, nor the number of ranks enters the result.

    Args:
        weights: Of each term of the loss over the global step and all ranks; the first, its valid
            tokens, at least 1.
        step: The step about to be taken, counting from 1.
        samples: Its global sample positions [first, last).

    Raises:
        RunError: the loss or the gradient norm is not finite; parameters and optimizer untouched.
    """
    recipe, model, mesh = assembly.recipe, assembly.model, assembly.mesh
    optimizers = assembly.optimizers
    task, weight = assembly.task.within(weights), weights[0]
    with timer.phase("forward_backward"):
        loss = mesh.sum_over(model.forward_backward(task, microbatches), LOSS_AXES)
        order = recipe.gradient_norm_order
        norms = _REPORTED[recipe.telemetry.gradient_norms](model, order)
        norm = scale_and_clip(model, weight, recipe.max_gradient_norm, order)
        with seen_by_every_rank():
            values = require_finite(
                loss / weight,
                norm,
                step=step,
                samples=samples,
                gradients=((name, p.grad) for name, p in model.named_parameters()),
            )
    with timer.phase("optimizer"):
        optimizers.set_factor(assembly.schedule(step - 1))
        optimizers.step()
        optimizers.zero_grad()
        statistics = model.end_step()
    return StepResult(
        loss=values["loss"],
        gradient_norm=values["gradient_norm"],
        gradient_norms={name: value / weight for name, value in norms.items()},
        learning_rate=optimizers.learning_rate,
        statistics=statistics,
    )
