"""Models as plain single-device PyTorch: shared layers and one folder per family."""

from armillary.models.config import ModelConfig
from armillary.models.deepseek import DeepSeek, deepseek
from armillary.models.gpt_oss import GptOss, gpt_oss
from armillary.models.llama import Llama, llama3
from armillary.models.qwen3 import Qwen3, qwen3
from armillary.models.qwen3_moe import Qwen3MoE, qwen3_moe
from armillary.models.rope_scaling import Llama31RopeScaling, YarnRopeScaling
from armillary.models.routing import RouterConfig

__all__ = [
    "DeepSeek",
    "GptOss",
    "Llama",
    "Llama31RopeScaling",
    "ModelConfig",
    "Qwen3",
    "Qwen3MoE",
    "RouterConfig",
    "YarnRopeScaling",
    "deepseek",
    "gpt_oss",
    "llama3",
    "qwen3",
    "qwen3_moe",
]
