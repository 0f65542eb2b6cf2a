"""One miniature of each family that learns Python on a laptop's CPU from what is installed there.

Each keeps what makes its family: ratios of widths and heads, positions, norms, ties, experts and
how they are balanced, from the size that its docstring names. Widths and depth are ours, as are
rates and lengths; data and tokenizer are those of `starter`.
"""

from __future__ import annotations

from dataclasses import replace

from armillary.checkpoint.config import Checkpoint
from armillary.data.config import Data
from armillary.data.tokenizer_subword import Bpe
from armillary.models.deepseek import DeepSeek
from armillary.models.dense import DenseDecoder
from armillary.models.gpt_oss import GptOss
from armillary.models.llama import Llama
from armillary.models.qwen3 import Qwen3
from armillary.models.qwen3_moe import Qwen3MoE
from armillary.models.routing import RouterConfig
from armillary.optim.adamw import AdamW
from armillary.optim.schedule import Cosine
from armillary.recipe.budget import Budget, Sampling, Validation
from armillary.recipe.recipe import Recipe
from armillary.recipe.registry import recipe
from armillary.telemetry.config import Telemetry

VOCABULARY = 4096
SOURCES = {
    "budget": "ours: a few minutes on two cores",
    "optimizer.lr": "ours: the Llama miniature ends at 1.930, 1.911 and 2.004 bits per byte with "
    "1e-3, 3e-3 and 1e-2",
    "schedule": "ours: a cosine to a tenth after a short rise",
    "validation.every": "ours: a few looks on the way",
    "checkpoint.every": "ours: as often as a look at validation",
    "telemetry.log_every": "ours: a line every few seconds",
    "sampling.prompts": "ours: how Python files go on",
}


def build(model: DenseDecoder) -> Recipe:
    """A miniature's run; the model gets the vocabulary and the context."""
    return Recipe(
        model=replace(model, vocab_size=VOCABULARY, max_seq_len=1024),
        data=Data(tokenizer=Bpe(vocab_size=VOCABULARY)),
        budget=Budget(tokens=1.2e6, batch_tokens=4096, seq_len=256),
        optimizer=AdamW(lr=3e-3),
        schedule=Cosine(warmup_fraction=0.05, floor=0.1),
        validation=Validation(every=100),
        checkpoint=Checkpoint(every=100),
        telemetry=Telemetry(log_every=10),
        sampling=Sampling(prompts=("def ", "import ", "class Test")),
    )


def shape(text: str) -> dict[str, str]:
    """The sources of a miniature whose model keeps what `text` says."""
    return SOURCES | {"model": f"ours: {text}, at a width for a CPU"}


@recipe(
    "llama3-cpu",
    family="llama3",
    gpus=0,
    sources=shape("8B's feed-forward of 3.5 D, four query heads a key (config.json)"),
)
def llama3_cpu() -> Recipe:
    """A miniature of Llama 3 8B on the Python standard library, in minutes."""
    return build(Llama(dim=192, n_layers=4, n_heads=8, n_kv_heads=2, head_dim=24, ffn_dim=672))


@recipe(
    "qwen3-cpu",
    family="qwen3",
    gpus=0,
    sources=shape("0.6B's two query heads a key, heads twice as wide together as D, tied, a feed-"
                  "forward of 3 D (config.json), rotary base 10,000 (arXiv 2505.09388, 3.2)"),
)  # fmt: skip
def qwen3_cpu() -> Recipe:
    """A miniature of Qwen3 0.6B on the Python standard library, in minutes."""
    return build(
        Qwen3(
            dim=192, n_layers=4, n_heads=6, n_kv_heads=3, head_dim=64, ffn_dim=576,
            tied_embeddings=True, rope_theta=1e4,
        )
    )  # fmt: skip


@recipe(
    "qwen3-moe-cpu",
    family="qwen3",
    gpus=0,
    sources=shape("30B-A3B's one expert in sixteen a token, eight query heads a key, experts of "
                  "0.375 D (config.json), rotary base 10,000 (arXiv 2505.09388, 3.2)"),
)  # fmt: skip
def qwen3_moe_cpu() -> Recipe:
    """A miniature of Qwen3 30B-A3B, 32 experts, on the Python standard library, in minutes."""
    return build(
        Qwen3MoE(
            dim=192, n_layers=4, n_heads=8, n_kv_heads=1, head_dim=48, n_experts=32, n_active=2,
            expert_dim=72, rope_theta=1e4,
        )
    )  # fmt: skip


@recipe(
    "deepseek-cpu",
    family="deepseek",
    gpus=0,
    sources=shape("V3's latent queries and keys, a shared expert, a first dense layer, half of the "
                  "groups of experts, selection biases, the token after the next (config.json)"),
)  # fmt: skip
def deepseek_cpu() -> Recipe:
    """A miniature of DeepSeek-V3, 16 experts, on the Python standard library, in minutes."""
    return build(
        DeepSeek(
            dim=192, n_layers=4, n_heads=6, n_kv_heads=6, ffn_dim=480, query_rank=96,
            key_value_rank=48, plain_head_dim=32, rope_head_dim=16, value_head_dim=32,
            n_experts=16, n_active=2, expert_dim=96, predict_ahead=True,
            router=RouterConfig(
                score="sigmoid", scale=2.5, n_groups=4, n_top_groups=2, balance_rate=1e-3,
                sequence_loss=1e-4,
            ),
        )
    )  # fmt: skip


@recipe(
    "gpt-oss-cpu",
    family="gpt-oss",
    gpus=0,
    sources=shape("20B's one expert in eight a token, eight query heads a key, experts as wide as "
                  "D (config.json), a window of a thirty-second of the context (128 of 4,096)"),
)  # fmt: skip
def gpt_oss_cpu() -> Recipe:
    """A miniature of GPT-OSS 20B, 16 experts, on the Python standard library, in minutes."""
    return build(
        GptOss(
            dim=192, n_layers=4, n_heads=8, n_kv_heads=1, head_dim=32, n_experts=16, n_active=2,
            expert_dim=192, window=8, rope_scaling=None,
        )
    )  # fmt: skip
