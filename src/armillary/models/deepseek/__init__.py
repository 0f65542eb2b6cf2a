"""The DeepSeek V2 and V3 family."""

from armillary.models.deepseek.config import DEEPSEEK_SIZES, DeepSeek, deepseek

__all__ = ["DEEPSEEK_SIZES", "DeepSeek", "deepseek"]
