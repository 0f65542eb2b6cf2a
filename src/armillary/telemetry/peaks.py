"""Peak FLOP/s of devices, dense, from their makers' data sheets. An unknown device has no peak."""

from __future__ import annotations

import re
from dataclasses import dataclass

TERA = 1e12

# Words of a device name that do not change its arithmetic peak.
_SILENT = re.compile(r"nvidia|amd|instinct|geforce|tesla|oam|hbm3e?|\d+gb?|graphics|sxm5")


@dataclass(frozen=True, slots=True)
class Peak:
    """One device: dense FLOP/s per number format in units of 10^12; None where it has no such unit.

    Sheets that give figures "with sparsity" are halved here.
    """

    bfloat16: float | None
    float16: float | None
    float32: float | None
    """IEEE float32, outside the tensor cores where a device has both."""
    tf32: float | None
    float8: float | None
    processors: int | None
    """Streaming multiprocessors or compute units that the figures are for; None is not checked."""
    source: str


def _hopper(half: float, fp32: float, processors: int | None, source: str) -> Peak:
    """Hopper tensor cores: tf32 at half the rate of bf16, float8 at twice."""
    return Peak(half, half, fp32, half / 2, half * 2, processors, source)


_A100 = "NVIDIA A100 data sheet"
_H100 = "NVIDIA H100 data sheet, 2023, halved from sparse"
_H200 = "NVIDIA H200 data sheet, 2024, halved from sparse"
_HGX = "NVIDIA HGX platform page, 2025, per GPU, halved from sparse"
_GB200 = "NVIDIA GB200 NVL72 data sheet, 2024, per GPU, halved from sparse"
_GB300 = "NVIDIA GB300 NVL72 data sheet, 2025, per GPU, halved from sparse"
_VOLTA = "NVIDIA V100 data sheet"
_ADA = "NVIDIA Ada GPU architecture white paper, appendix A, FP32 accumulation"

PEAKS: dict[str, Peak] = {
    "v100 sxm2": Peak(None, 125, 15.7, None, None, 80, _VOLTA),
    "v100 sxm3": Peak(None, 125, 15.7, None, None, 80, _VOLTA),
    "v100 pcie": Peak(None, 112, 14, None, None, 80, _VOLTA),
    "t4": Peak(None, 65, 8.1, None, None, 40, "NVIDIA T4 data sheet"),
    "a100 sxm4": Peak(312, 312, 19.5, 156, None, 108, _A100),
    "a100 pcie": Peak(312, 312, 19.5, 156, None, 108, _A100),
    "a800 sxm4": Peak(312, 312, 19.5, 156, None, 108, _A100 + " (same chip)"),
    "a800 pcie": Peak(312, 312, 19.5, 156, None, 108, _A100 + " (same chip)"),
    "a30": Peak(165, 165, 10.3, 82, None, 56, "NVIDIA A30 data sheet"),
    "a40": Peak(149.7, 149.7, 37.4, 74.8, None, 84, "NVIDIA A40 data sheet"),
    "a10": Peak(125, 125, 31.2, 62.5, None, 72, "NVIDIA A10 data sheet"),
    "rtx a6000": Peak(154.8, 154.8, 38.7, 77.4, None, 84, "NVIDIA GA102 white paper, appendix"),
    "rtx 3090": Peak(
        71, 71, 35.6, 35.6, None, 82, "NVIDIA GA102 white paper, table of GeForce GPUs"
    ),
    "h100": _hopper(989, 67, 132, _H100),
    "h100 pcie": _hopper(756, 51, 114, _H100),
    "h100 nvl": _hopper(835, 60, 132, _H100),
    "h800": _hopper(989, 67, 132, _H100 + " (same chip)"),
    "gh200": _hopper(989, 67, 132, "NVIDIA GH200 data sheet, 2023, halved from sparse"),
    "h200": _hopper(989, 67, 132, _H200),
    "h200 nvl": _hopper(835, 60, 132, _H200),
    "h20": _hopper(
        148, 44, 78, "figures published by integrators, 2023; there is no public data sheet"
    ),
    "b200": _hopper(2250, 75, 148, _HGX),
    "gb200": _hopper(2500, 80, None, _GB200),
    "b300": _hopper(2250, 75, None, _HGX),
    "gb300": _hopper(2500, 80, None, _GB300),
    "l4": Peak(121, 121, 30.3, 60, 242, 58, "NVIDIA L4 data sheet, 2023, halved from sparse"),
    "l40": Peak(181.05, 181.05, 90.5, 90.5, 362, 142, "NVIDIA L40 data sheet, 2023"),
    "l40s": Peak(362.05, 362.05, 91.6, 183, 733, 142, "NVIDIA L40S data sheet, 2023"),
    "rtx 4090": Peak(165.2, 165.2, 82.6, 82.6, 330.3, 128, _ADA),
    "rtx 5090": Peak(
        209.5,
        209.5,
        104.8,
        104.8,
        419,
        170,
        "NVIDIA RTX Blackwell white paper, appendix, FP32 accumulation",
    ),
    "mi210": Peak(181, 181, 45.3, None, None, 104, "AMD Instinct MI210 data sheet, 2022"),
    "mi250x": Peak(
        191.5, 191.5, 47.9, None, None, 110, "AMD Instinct MI250X data sheet, 2021, one of two dies"
    ),
    "mi250": Peak(
        181, 181, 45.3, None, None, 104, "AMD Instinct MI250 data sheet, 2021, one of two dies"
    ),
    "mi300a": Peak(980.6, 980.6, 122.6, 490.3, 1961.2, 228, "AMD Instinct MI300A data sheet, 2023"),
    "mi300x": Peak(
        1307.4, 1307.4, 163.4, 653.7, 2614.9, 304, "AMD Instinct MI300X data sheet, 2023"
    ),
    "mi325x": Peak(
        1307.4, 1307.4, 163.4, 653.7, 2614.9, 304, "AMD Instinct MI325X data sheet, 2024"
    ),
    "mi350x": Peak(
        2306.9, 2306.9, 144.2, None, 4613.7, 256, "AMD Instinct MI350X data sheet, 2025"
    ),
    "mi355x": Peak(
        2516.6, 2516.6, 157.3, None, 5033.2, 256, "AMD Instinct MI355X data sheet, 2025"
    ),
}
"""Rows by the words of a device's name that matter, as `row_name` leaves them."""

FORMATS = ("bfloat16", "float16", "float32", "tf32", "float8")


def row_name(device_name: str) -> str:
    """The words of a device name that decide its peak: `NVIDIA A100-SXM4-80GB` -> `a100 sxm4`."""
    words = re.split(r"[\s\-_/()]+", device_name.lower().strip())
    return " ".join(word for word in words if word and not _SILENT.fullmatch(word))


def peak_flops(
    device_name: str, number_format: str, *, processors: int | None = None
) -> float | None:
    """Dense peak FLOP/s of one device, or None when it is not known for certain.

    All words of the name must match a row: a laptop part, a cut-down variant or a slice of a
    device (MIG) is another device, not a similar one.

    Args:
        device_name: As the driver reports it.
        number_format: One of `FORMATS`; a leading `torch.` is ignored.
        processors: Multiprocessors or compute units that the device reports, checked if given.
    """
    name = number_format.removeprefix("torch.")
    name = "float8" if name.startswith("float8") else name
    if name not in FORMATS:
        return None
    row = PEAKS.get(row_name(device_name))
    if row is None:
        return None
    if None not in (processors, row.processors) and processors != row.processors:
        return None
    value: float | None = getattr(row, name)
    return None if value is None else value * TERA


def mfu(
    flops_per_token: float, tokens_per_second: float, total_peak_flops: float | None
) -> float | None:
    """Model FLOP/s utilisation: a share in (0, 1], or None where it would not be true.

    Chowdhery et al. 2022 (arXiv 2204.02311), appendix B: the FLOP/s that the model's own
    arithmetic needs at this rate, recomputation not counted, over the peak of all devices.

    A share above 1 proves that the peak or the count is wrong, so none is given; callers warn with
    `mfu_warning`.
    """
    share = _share(flops_per_token, tokens_per_second, total_peak_flops)
    return share if share is not None and 0.0 < share <= 1.0 else None


def mfu_warning(
    flops_per_token: float, tokens_per_second: float, total_peak_flops: float | None
) -> str | None:
    """Why `mfu` gave nothing although a peak is known; None when nothing is wrong."""
    share = _share(flops_per_token, tokens_per_second, total_peak_flops)
    if share is None or share <= 1.0:
        return None
    return (
        f"{flops_per_token:.3g} FLOP a token at {tokens_per_second:.3g} tokens/s is "
        f"{share:.0%} of the assumed peak of {total_peak_flops:.3g} FLOP/s, so that peak is wrong"
    )


def _share(rate: float, tokens_per_second: float, peak: float | None) -> float | None:
    if peak is None or not peak > 0:
        return None
    share = rate * tokens_per_second / peak
    return share if share == share else None  # noqa: PLR0124 (NaN)
