"""Stops a run before an update that would poison it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from armillary.foundation.errors import Problem, RunError

_NAMES_SHOWN = 6


def require_finite(
    loss: Tensor,
    gradient_norm: Tensor,
    *,
    step: int,
    samples: tuple[int, int],
    gradients: Iterable[tuple[str, Tensor | None]] = (),
) -> dict[str, float]:
    """Reads the step's values on the host, once, and checks them; call before `optimizer.step()`.

    Args:
        loss: scalar, the same on every rank.
        gradient_norm: scalar before clipping, the same on every rank. Any gradient that is not
            finite makes it so.
        step: the optimizer step about to be taken, counting from 1.
        samples: global sample positions [first, last) behind this step.
        gradients: names and gradients, e.g. `((n, p.grad) for n, p in model.named_parameters())`;
            looked at only after a failure, to say which of them are not finite on this rank.

    Returns:
        `loss` and `gradient_norm` by name.

    Raises:
        RunError: loss or gradient norm is infinite or not a number. Nothing was changed.
    """
    named = {"loss": loss, "gradient_norm": gradient_norm}
    # The step's one host synchronisation: the values go to the log, so they are needed here anyway.
    row = torch.stack([t.detach().to(loss.device, torch.float64) for t in named.values()])
    values = dict(zip(named, row.tolist(), strict=True))
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if not bad:
        return values
    first, last = samples
    what = " and ".join(f"{name.replace('_', ' ')} {values[name]}" for name in bad)
    problems = [
        Problem(
            f"{what} at step {step}, samples [{first}, {last}); weights and optimizer state are"
            f" those of step {step - 1}",
            "finite values",
            "a lower --optimizer.lr, a longer warm-up or a smaller --max-gradient-norm; resume with"
            " --resume auto once changed",
        )
    ]
    names = [name for name, gradient in gradients if gradient is not None and _is_bad(gradient)]
    if names:
        more = len(names) - _NAMES_SHOWN
        rest = f" and {more} more" if more > 0 else ""
        problems.append(Problem(f"gradients not finite: {', '.join(names[:_NAMES_SHOWN])}{rest}"))
    raise RunError(problems)


def _is_bad(gradient: Tensor) -> bool:
    """Whether this rank's part of a gradient has a value that is not finite."""
    to_local = getattr(gradient, "to_local", None)  # DTensor: this rank's shard, no communication
    local: Tensor = to_local() if to_local is not None else gradient
    return not bool(torch.isfinite(local.detach()).all())
