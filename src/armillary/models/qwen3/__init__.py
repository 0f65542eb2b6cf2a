"""The dense Qwen3 family."""

from armillary.models.qwen3.config import QWEN3_SIZES, Qwen3, qwen3

__all__ = ["QWEN3_SIZES", "Qwen3", "qwen3"]
