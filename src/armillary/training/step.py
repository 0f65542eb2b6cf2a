"""One optimizer step: the same answer for any split of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from armillary.data.batch import Batch
from armillary.foundation.tell import seen_by_every_rank
from armillary.optim.clipping import clip_by_global_norm
from armillary.parallel.data_sharding import set_accumulation
from armillary.resilience.guard import require_finite
from armillary.telemetry.timing import StepTimer
from armillary.training.assembly import Assembly


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step measured, equal on every rank."""

    loss: float
    """Nats per valid token over the whole global step."""
    gradient_norm: float
    """Global 2-norm before clipping."""
    learning_rate: float
    """Of the first parameter group."""


def optimizer_step(
    assembly: Assembly,
    microbatches: Sequence[Batch],
    *,
    weight: int,
    step: int,
    samples: tuple[int, int],
    timer: StepTimer,
) -> StepResult:
    """Forward, backward and update over this rank's share of the global batch.

    Every gradient is that of (sum of the loss over the global step) / `weight`, so neither the
    accumulation split, nor ragged masks, nor the number of ranks enters the result.

    Args:
        weight: Valid tokens of the global step, over all ranks; at least 1.
        step: The step about to be taken, counting from 1.
        samples: Its global sample positions [first, last).

    Raises:
        RunError: the loss or the gradient norm is not finite; parameters and optimizer untouched.
    """
    model, mesh, optimizers = assembly.model, assembly.mesh, assembly.optimizers
    loss_sum = torch.zeros((), dtype=torch.float64, device=mesh.device)
    with timer.phase("forward_backward"):
        for index, batch in enumerate(microbatches):
            set_accumulation(model, mesh, last=index == len(microbatches) - 1)
            loss = assembly.task.loss(model, batch)
            (loss.sum / weight).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.sum.detach()
        total = mesh.sum_over_data(loss_sum)
        norm = clip_by_global_norm(model.parameters(), assembly.recipe.max_gradient_norm)
        with seen_by_every_rank():
            values = require_finite(
                total / weight,
                norm,
                step=step,
                samples=samples,
                gradients=((name, p.grad) for name, p in model.named_parameters()),
            )
    with timer.phase("optimizer"):
        optimizers.set_factor(assembly.schedule(step - 1))
        optimizers.step()
        optimizers.zero_grad()
    return StepResult(values["loss"], values["gradient_norm"], optimizers.learning_rate)
