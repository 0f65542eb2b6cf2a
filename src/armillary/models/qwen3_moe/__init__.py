"""The Qwen3 family, mixtures of experts."""

from armillary.models.qwen3_moe.config import QWEN3_MOE_SIZES, Qwen3MoE, qwen3_moe

__all__ = ["QWEN3_MOE_SIZES", "Qwen3MoE", "qwen3_moe"]
