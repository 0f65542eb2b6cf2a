"""What does not go together with schedules that split the backward pass. No torch."""

from __future__ import annotations

from armillary.foundation.errors import Problem
from armillary.parallel.config import Parallel, Scale
from armillary.parallel.schedules import is_file, read_table

SPLITTING = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute gradients of activations first and those of weights when there is time."""


def splits_backward(parallel: Parallel) -> bool:
    """Whether gradients of activations and of weights are computed at different moments."""
    if parallel.pp == 1:
        return False
    if is_file(parallel.schedule):
        return any(cell.kind in "IW" for cell in read_table(parallel.schedule).cells)
    return parallel.schedule in SPLITTING


def split_backward_problems(scale: Scale, n_layers: int) -> list[Problem]:
    """Passes that do not go with a schedule which splits the backward pass.

    Mixtures of experts do, and so do recomputed blocks: each half recomputes them.

    Args:
        scale: with an arrangement that is resolved and without problems.
        n_layers: of the model.
    """
    if not splits_backward(scale.parallel):
        return []
    why = f"parallel.schedule = {scale.parallel.schedule} splits the backward pass"
    found = []
    if scale.compile.enabled:
        # A compiled block computes both halves at once, so each half would cost the whole; and
        # torch frees what it thinks is needed once ("compiled with non-empty donated buffers").
        found.append(
            Problem(
                f"{why}, which compile.enabled = true computes as one",
                allowed="compile.enabled = false, or a schedule that does not split it",
                fix="--parallel.schedule Interleaved1F1B",
            )
        )
    if any(scale.activation_checkpoint.kept(block) for block in range(n_layers)):
        found.append(
            Problem(
                f"{why}, and activations that are kept by operator are gone after its first half",
                allowed="activation_checkpoint none, full, every-k or offload, or another schedule",
                fix="--activation-checkpoint full",
            )
        )
    return found
