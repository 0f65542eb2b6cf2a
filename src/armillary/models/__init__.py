"""Models as plain single-device PyTorch: shared layers and one folder per family."""

from armillary.models.config import ModelConfig
from armillary.models.llama import Llama, llama3
from armillary.models.qwen3 import Qwen3, qwen3
from armillary.models.rope_scaling import Llama31RopeScaling

__all__ = ["Llama", "Llama31RopeScaling", "ModelConfig", "Qwen3", "llama3", "qwen3"]
