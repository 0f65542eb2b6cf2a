"""The GPT-OSS family."""

from armillary.models.gpt_oss.config import GPT_OSS_SIZES, GptOss, gpt_oss

__all__ = ["GPT_OSS_SIZES", "GptOss", "gpt_oss"]
