"""Fused operators as plain functions of tensors, each with an eager oracle in `reference`."""

from __future__ import annotations

from armillary.kernels.attention import blocked_attention
from armillary.kernels.cross_entropy import linear_cross_entropy
from armillary.kernels.host_memory import tune_host_allocator
from armillary.kernels.norm import rms_norm
from armillary.kernels.partial_attention import attention_with_sinks, partial_attention
from armillary.kernels.rope import apply_rope
from armillary.kernels.swiglu import swiglu, swiglu_linear

__all__ = [
    "apply_rope",
    "attention_with_sinks",
    "blocked_attention",
    "linear_cross_entropy",
    "partial_attention",
    "rms_norm",
    "swiglu",
    "swiglu_linear",
    "tune_host_allocator",
]
