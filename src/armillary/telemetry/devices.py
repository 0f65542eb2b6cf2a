"""The peak of the device that a run computes on."""

from __future__ import annotations

import torch

from armillary.telemetry.measured_peaks import measured_peak
from armillary.telemetry.peaks import peak_flops


def device_name(device: torch.device) -> str:
    """The device's name as its driver, or the operating system, gives it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        from armillary.telemetry.machine.host import cpu_model

        return cpu_model() or "cpu"
    return device.type


def device_peak_flops(
    device: torch.device,
    dtype: torch.dtype,
    *,
    ranks_on_host: int = 1,
    override: float | None = None,
) -> float | None:
    """Peak FLOP/s of one rank's device for matrix products of `dtype`; None when unknown.

    GPUs are looked up in the table. On the CPU the peak is the rate that `armillary doctor`
    measured with all cores, shared evenly by the ranks of this host.

    Args:
        device: Where the model is.
        dtype: What products are computed in. float32 counts as tf32 where torch may use it.
        ranks_on_host: Ranks that share this host's cores.
        override: `telemetry.peak_flops` of the recipe.
    """
    if override is not None:
        return override
    number_format = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        if dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest":
            number_format = "tf32"
        properties = torch.cuda.get_device_properties(device)
        return peak_flops(
            properties.name, number_format, processors=properties.multi_processor_count
        )
    if device.type == "cpu":
        measured = measured_peak(number_format)
        return None if measured is None else measured / ranks_on_host
    return None
