"""How fast, and how near the machine's limit: FLOPs of the recipe over the peak of its devices."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from armillary.models.tuning.counting import flops_breakdown, trained_parameters
from armillary.parallel import process
from armillary.telemetry.devices import device_name, device_peak_flops
from armillary.telemetry.peaks import mfu, mfu_warning
from armillary.training.assembly import Assembly
from armillary.version import __version__


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """What turns tokens a second into model FLOP/s utilisation."""

    device: str
    flops_per_token: float
    """Forward and backward, attention counted causally."""
    flops_per_token_noncausal: float
    trained_parameters: int
    peak_flops: float | None
    """Of all ranks' devices together; None when it is not known."""

    @classmethod
    def of(cls, assembly: Assembly) -> Speed:
        """For an assembled recipe on the devices of this run."""
        recipe, device = assembly.recipe, assembly.mesh.device
        whole = assembly.model.whole

        def flops(*, causal: bool) -> float:
            breakdown = flops_breakdown(
                recipe.model,
                whole.shapes,
                whole.frozen,
                seq_len=recipe.budget.seq_len,
                causal=causal,
            )
            return sum(breakdown.values())

        peak = device_peak_flops(
            device,
            recipe.precision.compute_dtype,
            ranks_on_host=process.local_world_size(),
            override=recipe.telemetry.peak_flops,
        )
        return cls(
            device=device_name(device),
            flops_per_token=flops(causal=True),
            flops_per_token_noncausal=flops(causal=False),
            trained_parameters=trained_parameters(whole.shapes, whole.frozen),
            peak_flops=None if peak is None else peak * process.world_size(),
        )

    def start_fields(self) -> dict[str, Any]:
        """Fields of the `start` event."""
        return {
            "device": self.device,
            "flops_per_token": self.flops_per_token,
            "flops_per_token_noncausal": self.flops_per_token_noncausal,
            "trained_parameters": self.trained_parameters,
            "peak_flops": self.peak_flops,
            "versions": {
                "armillary": __version__,
                "python": platform.python_version(),
                "torch": torch.__version__,
                "numpy": np.__version__,
            },
        }

    def step_fields(self, tokens_per_second: float) -> dict[str, Any]:
        """Fields of a `step` event. Only valid tokens count, so padding never looks like work."""
        return {
            "tokens_per_second": tokens_per_second,
            "mfu": mfu(self.flops_per_token, tokens_per_second, self.peak_flops),
            "mfu_noncausal": mfu(
                self.flops_per_token_noncausal, tokens_per_second, self.peak_flops
            ),
        }

    def warning(self, tokens_per_second: float) -> str | None:
        """Why there is no utilisation although a peak is known; None when nothing is wrong."""
        return mfu_warning(self.flops_per_token, tokens_per_second, self.peak_flops)
