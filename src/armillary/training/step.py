"""One optimizer step: the same answer for any split of the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from armillary.data.batch import Batch
from armillary.parallel.gradients import norms_by_group, norms_by_name, scale_and_clip
from armillary.parallel.model import LOSS_AXES, ParallelModel
from armillary.resilience.guard import Detector, Health, Reading, gradients_at_fault
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
    """What one optimizer step measured, equal on every rank but for `gradients_at_fault`."""

    health: Health
    """Among it the loss, nats per valid token over the whole global step, and the gradient norm
    before clipping, of the order that the recipe asks for."""
    gradient_norms: dict[str, float]
    """The same by group or name of parameters, where the recipe asks for it."""
    learning_rate: float
    """Of the first parameter group."""
    statistics: dict[str, float]
    """What layers report of a step, by name: loads of experts."""
    gradients_at_fault: list[str] | None
    """Of a bad step, names of this rank's gradients that are not finite; None: nobody looked."""


@dataclass(frozen=True, slots=True)
class Enqueued:
    """A step that the device may still be busy with."""

    reading: Reading
    model: ParallelModel
    gradient_norms: dict[str, float]
    learning_rate: float
    gradients_at_fault: list[str] | None

    def result(self) -> StepResult:
        """What it measured; waits for the device."""
        health, figures = self.reading.wait()
        return StepResult(
            health=health,
            gradient_norms=self.gradient_norms,
            learning_rate=self.learning_rate,
            statistics=self.model.statistics(figures),
            gradients_at_fault=self.gradients_at_fault,
        )


def optimizer_step(
    assembly: Assembly,
    microbatches: Sequence[Batch],
    *,
    weights: tuple[int, ...],
    step: int,
    timer: StepTimer,
    detector: Detector,
    asks: bool,
    before_update: Callable[[], None] = lambda: None,
    sum_step: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> Enqueued:
    """Forward, backward and update over this rank's share of the global batch.

    Every gradient is that of (sum of the loss over the global step) / weight, so neither the
    accumulation split, nor ragged masks, nor the number of ranks enters the result. A step that the
    detector finds bad leaves parameters, buffers and optimizers as they are.

    Args:
        weights: Of each term of the loss over the global step and all ranks; the first, its valid
            tokens, at least 1.
        step: The step about to be taken, counting from 1.
        timer: Hears of the phases.
        detector: Judges the step.
        asks: Whether the host asks for the verdict before the update, and waits for it; else the
            device leaves the update out.
        before_update: Called right before anything changes that a checkpoint holds.
        sum_step: Adds what others than the ranks of the mesh contribute; see `Company`.
    """
    recipe, model, mesh = assembly.recipe, assembly.model, assembly.mesh
    optimizers = assembly.optimizers
    task, weight = assembly.task.within(weights), weights[0]
    with timer.phase("forward_backward"):
        loss = mesh.sum_over(model.forward_backward(task, microbatches), LOSS_AXES)
        loss = sum_step(loss)
        order = recipe.gradient_norm_order
        norms = _REPORTED[recipe.telemetry.gradient_norms](model, order)
        norm = scale_and_clip(model, weight, recipe.max_gradient_norm, order)
        verdict = detector.judge(loss / weight, norm)
    at_fault = None
    with timer.phase("optimizer"):
        before_update()
        optimizers.set_factor(assembly.schedule(step - 1))
        if not asks:
            optimizers.step(verdict.skipped)
        elif not bool(verdict.skipped):
            optimizers.step()
        else:
            at_fault = gradients_at_fault((name, p.grad) for name, p in model.named_parameters())
        optimizers.zero_grad()
        figures = model.end_step(verdict.skipped)
    return Enqueued(
        reading=verdict.read_later(figures),
        model=model,
        gradient_norms={name: value / weight for name, value in norms.items()},
        learning_rate=optimizers.learning_rate,
        gradients_at_fault=at_fault,
    )
