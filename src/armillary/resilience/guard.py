"""Finds steps that would poison a run, on the device and without waiting for it.

Each step's loss and gradient norm are judged where they are, and the verdict masks the update
there (`Optimizers.step`). The host reads all of it later, in one transfer; what was enqueued in the
meantime has changed nothing where the policy does not go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from armillary.resilience.guard_config import Guard

HEALTHY, SPIKING, NOT_FINITE = 0, 1, 2
"""What a step can be; the largest over all ranks counts."""

_NORMAL = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation."""
_LEAST_DEVIATION = 0.01
"""Share of the median that counts as its deviation at least, so that flat stretches do not turn
the next ripple into a spike."""

Agree = Callable[[Tensor], Tensor]
"""The largest of a scalar over all ranks."""


@dataclass(frozen=True, slots=True)
class Health:
    """What was found of a step, on the host."""

    loss: float
    gradient_norm: float
    kind: int
    """HEALTHY, SPIKING or NOT_FINITE."""
    skipped: bool
    """Whether its update was left out: it was bad, or came after one that ends the run."""
    frozen: bool
    """Whether nothing is changed any more, until the run has gone back."""
    in_a_row: int
    """Bad steps up to this one, without a healthy one between them."""
    limits: tuple[float, float]
    """Above which a loss and a gradient norm were spikes; NaN: no such limit."""


class Verdict:
    """What was found of a step, still on the device. Numbers of one's own travel with it."""

    def __init__(self, row: Tensor, skipped: Tensor) -> None:
        self.skipped = skipped
        """[] bool: the update changes nothing."""
        self._row = row

    def read_later(self, more: Tensor) -> Reading:
        """Begins the one transfer to the host, of this and of `more`, `[n]`."""
        return Reading(torch.cat([self._row, more.to(self._row)]))


class Reading:
    """A transfer to the host that nobody has to wait for yet."""

    def __init__(self, row: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._host = row
        if row.device.type == "cuda":
            self._host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
            self._host.copy_(row, non_blocking=True)
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record(torch.cuda.current_stream(row.device))

    def wait(self) -> tuple[Health, list[float]]:
        """What was found, and the numbers that travelled with it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        loss, norm, loss_limit, norm_limit, kind, skipped, frozen, in_a_row, *more = (
            self._host.tolist()
        )
        health = Health(
            loss=loss,
            gradient_norm=norm,
            kind=int(kind),
            skipped=bool(skipped),
            frozen=bool(frozen),
            in_a_row=int(in_a_row),
            limits=(loss_limit, norm_limit),
        )
        return health, more


class Detector:
    """Judges step after step; its state is on the device, but for what `recent` tells.

    A loss or gradient norm spikes if it lies more than `spike_factor` robust standard deviations
    above the median of the last `spike_window` healthy steps. The deviation is 1.4826 times the
    median absolute deviation, which a few wild values cannot move, as they would a mean and a
    standard deviation (Hampel 1974, "The influence curve and its role in robust estimation", JASA
    69; Leys et al. 2013, "Detecting outliers", J. Exp. Soc. Psychol. 49).

    Args:
        guard: the recipe's part.
        device: where losses and norms are.
        recent: loss and gradient norm of healthy steps before, oldest first; see `recent`.
        in_a_row: bad steps right before.
        agree: makes all ranks judge alike, whatever a single one has computed.
    """

    def __init__(
        self,
        guard: Guard,
        device: torch.device,
        *,
        recent: Sequence[Sequence[float]] = (),
        in_a_row: int = 0,
        agree: Agree = lambda kind: kind,
    ) -> None:
        self._factor, self._tolerated, self._agree = (
            guard.spike_factor,
            guard.policy.tolerated,
            agree,
        )
        self._in_a_row = torch.tensor(in_a_row, dtype=torch.int64, device=device)
        self._frozen = torch.zeros((), dtype=torch.bool, device=device)
        window = guard.spike_window if self._factor else 0
        kept = list(recent)[-window:] if window else []
        missing = [[float("nan")] * 2] * (window - len(kept))
        # [W, 2], oldest first; NaN where no step has been yet.
        self._recent = torch.tensor(missing + kept, dtype=torch.float64, device=device)
        self._no_limits = torch.full((2,), float("nan"), dtype=torch.float64, device=device)

    def recent(self) -> list[list[float]]:
        """Loss and gradient norm of recent healthy steps, oldest first. Waits for the device."""
        return [pair for pair in self._recent.tolist() if pair[0] == pair[0]]

    @torch.no_grad()
    def judge(self, loss: Tensor, gradient_norm: Tensor) -> Verdict:
        """Whether a step may change anything; scalars, the same on every rank.

        Any gradient that is not finite makes the norm so.
        """
        device = self._frozen.device
        values = torch.stack([loss.to(device).double(), gradient_norm.to(device).double()])
        limits = self._limits()
        spiking = (values > limits).any()  # never of a NaN
        kind = torch.where(values.isfinite().all(), spiking * SPIKING, NOT_FINITE)
        kind = self._agree(kind)
        bad = kind != HEALTHY
        self._in_a_row = torch.where(bad, self._in_a_row + 1, 0)
        self._frozen = self._frozen | (self._in_a_row > self._tolerated)
        skipped = bad | self._frozen
        if self._recent.numel():
            newer = torch.cat([self._recent[1:], values[None]])
            self._recent = torch.where(skipped, self._recent, newer)
        found = torch.stack([kind, skipped, self._frozen, self._in_a_row]).double()
        return Verdict(torch.cat([values, limits, found]), skipped)

    def _limits(self) -> Tensor:
        """`[2]`: above which loss and norm are spikes; NaN before there were enough steps."""
        if not self._recent.numel():
            return self._no_limits
        median = _median(self._recent)
        deviation = _NORMAL * _median((self._recent - median).abs())
        least = _LEAST_DEVIATION * median.abs()
        limits = median + self._factor * torch.maximum(deviation, least)
        return torch.where(self._recent.isfinite().all(), limits, self._no_limits)


def _median(values: Tensor) -> Tensor:
    """Of each column of `[W, 2]`; the larger one of two."""
    return values.sort(dim=0).values[values.shape[0] // 2]


def gradients_at_fault(gradients: Iterable[tuple[str, Tensor | None]]) -> list[str]:
    """Names of the gradients that have a value that is not finite, in this rank's part."""
    return [name for name, gradient in gradients if gradient is not None and _is_bad(gradient)]


def _is_bad(gradient: Tensor) -> bool:
    to_local = getattr(gradient, "to_local", None)  # DTensor: this rank's shard, no communication
    local: Tensor = to_local() if to_local is not None else gradient
    return not bool(torch.isfinite(local.detach()).all())
