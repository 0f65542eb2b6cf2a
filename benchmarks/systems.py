"""The systems that `speed.py` compares: each returns a function that takes one training step.

All train the same Llama from the same weights on the same tokens: AdamW (fused, no weight decay,
rate 1e-4, betas 0.9 and 0.95), gradients clipped at a global norm of 1, loss averaged over valid
tokens. In bfloat16, Armillary keeps its residual stream in bfloat16; the others run under autocast.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], float]
"""Takes one optimizer step and returns its loss, in nats per valid token."""

LEARNING_RATE = 1e-4
BETAS = (0.9, 0.95)
EPS = 1e-8


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every system trains, and on what."""

    layers: int = 8
    dim: int = 512
    heads: int = 8
    kv_heads: int = 8
    ffn: int = 1536
    vocabulary: int = 2048
    rows: int = 8
    length: int = 512
    precision: str = "float32"
    theta: float = 500_000.0
    norm_eps: float = 1e-5

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.rows * self.length

    def batch(self) -> tuple[Tensor, Tensor]:
        """Tokens `[B, S]` with few frequent and many rare ids, and labels; the last has none."""
        generator = torch.Generator().manual_seed(1)
        uniform = torch.rand(self.rows, self.length, generator=generator)
        tokens = (uniform.pow(3) * self.vocabulary).long()
        labels = torch.full_like(tokens, -100)
        labels[:, :-1] = tokens[:, 1:]
        return tokens, labels

    def recipe(self, *, compiled: bool = False) -> Any:
        """The same as a recipe."""
        from armillary.models.llama import Llama
        from armillary.optim.adamw import AdamW
        from armillary.optim.schedule import Constant
        from armillary.parallel.config import Compile
        from armillary.precision import Precision
        from armillary.recipe.budget import Budget
        from armillary.recipe.recipe import Recipe

        return Recipe(
            model=Llama(
                vocab_size=self.vocabulary,
                dim=self.dim,
                n_layers=self.layers,
                n_heads=self.heads,
                n_kv_heads=self.kv_heads,
                ffn_dim=self.ffn,
                norm_eps=self.norm_eps,
                rope_theta=self.theta,
            ),
            budget=Budget(steps=10_000, batch_tokens=self.tokens, seq_len=self.length),
            optimizer=AdamW(lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=0.0),
            schedule=Constant(warmup_steps=0),
            precision=Precision(compute=self.precision),
            compile=Compile(enabled=compiled),
        )


def armillary(setting: Setting, _weights: dict[str, Tensor], *, compiled: bool = False) -> Step:
    """The trainer's own assembly and step; its initial weights are the ones others copy."""
    from armillary.data.batch import Batch
    from armillary.kernels import tune_host_allocator
    from armillary.models.layers.documents import Documents
    from armillary.parallel.mesh import Mesh
    from armillary.resilience.guard import Detector
    from armillary.telemetry.timing import StepTimer
    from armillary.training.assembly import assemble
    from armillary.training.step import optimizer_step

    tune_host_allocator()
    recipe = setting.recipe(compiled=compiled)
    mesh = Mesh.create(recipe.parallel, torch.device("cpu"))
    assembly = assemble(recipe, mesh, cast(Any, None))  # the data is the benchmark's own
    tokens, labels = setting.batch()
    batch = Batch(
        tokens=tokens,
        labels=labels,
        documents=Documents.from_lengths([(setting.length,)] * setting.rows),
        sample_ids=tuple(range(setting.rows)),
    )
    weights = recipe.task.weights(batch)
    timer, detector = StepTimer(mesh.device), Detector(recipe.guard, mesh.device)
    taken = 0

    def step() -> float:
        nonlocal taken
        taken += 1
        enqueued = optimizer_step(
            assembly,
            [batch],
            weights=weights,
            step=taken,
            timer=timer,
            detector=detector,
            asks=True,
        )
        return enqueued.result().health.loss

    return step


def transformers(setting: Setting, weights: dict[str, Tensor], *, compiled: bool = False) -> Step:
    """Hugging Face's LlamaForCausalLM with its own loss; SDPA attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=setting.vocabulary,
            hidden_size=setting.dim,
            intermediate_size=setting.ffn,
            num_hidden_layers=setting.layers,
            num_attention_heads=setting.heads,
            num_key_value_heads=setting.kv_heads,
            max_position_embeddings=setting.length,
            rms_norm_eps=setting.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": setting.theta},
            attn_implementation="sdpa",
            use_cache=False,
            tie_word_embeddings=False,
        )
    )
    model.load_state_dict({_transformers_name(name): w for name, w in weights.items()})
    model.train()
    if compiled:
        for layer in model.model.layers:
            layer.compile()
    tokens, _ = setting.batch()

    def loss() -> Tensor:
        return cast(Tensor, model(input_ids=tokens, labels=tokens).loss)

    return _plain_step(setting, model, loss)


def _transformers_name(name: str) -> str:
    if name == "head.weight":
        return "lm_head.weight"
    for ours, theirs in (
        ("embedding.", "embed_tokens."),
        ("attention_norm.", "input_layernorm."),
        ("feed_forward_norm.", "post_attention_layernorm."),
        ("attention.query.", "self_attn.q_proj."),
        ("attention.key.", "self_attn.k_proj."),
        ("attention.value.", "self_attn.v_proj."),
        ("attention.output.", "self_attn.o_proj."),
        ("feed_forward.", "mlp."),
        ("gate.", "gate_proj."),
        ("up.", "up_proj."),
        ("down.", "down_proj."),
    ):
        name = name.replace(ours, theirs)
    return "model." + name


class _PlainBlock(nn.Module):
    """A Llama block as one writes it in an afternoon."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        dim, width = setting.dim, setting.dim // setting.heads
        self.width = width
        self.attention_norm = nn.RMSNorm(dim, setting.norm_eps)
        self.query = nn.Linear(dim, setting.heads * width, bias=False)
        self.key = nn.Linear(dim, setting.kv_heads * width, bias=False)
        self.value = nn.Linear(dim, setting.kv_heads * width, bias=False)
        self.output = nn.Linear(setting.heads * width, dim, bias=False)
        self.feed_forward_norm = nn.RMSNorm(dim, setting.norm_eps)
        self.gate = nn.Linear(dim, setting.ffn, bias=False)
        self.up = nn.Linear(dim, setting.ffn, bias=False)
        self.down = nn.Linear(setting.ffn, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.width)).transpose(1, 2)

        def rotate(y: Tensor) -> Tensor:
            first, second = y.chunk(2, dim=-1)
            return y * cos + torch.cat((-second, first), dim=-1) * sin

        h = self.attention_norm(x)
        query, key, value = heads(self.query(h)), heads(self.key(h)), heads(self.value(h))
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        h = self.feed_forward_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class _PlainModel(nn.Module):
    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.embedding = nn.Embedding(setting.vocabulary, setting.dim)
        self.layers = nn.ModuleList(_PlainBlock(setting) for _ in range(setting.layers))
        self.norm = nn.RMSNorm(setting.dim, setting.norm_eps)
        self.head = nn.Linear(setting.dim, setting.vocabulary, bias=False)
        width = setting.dim // setting.heads
        frequencies = setting.theta ** -(torch.arange(0, width, 2) / width)
        angles = torch.arange(setting.length)[:, None] * frequencies.repeat(2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return cast(Tensor, self.head(self.norm(x)))


def plain(setting: Setting, weights: dict[str, Tensor]) -> Step:
    """A plain PyTorch loop: SDPA, full logits, `F.cross_entropy`."""
    model = _PlainModel(setting)
    model.load_state_dict(
        {
            name.replace("attention.", "").replace("feed_forward.", ""): weight
            for name, weight in weights.items()
        }
    )
    tokens, labels = setting.batch()

    def loss() -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    return _plain_step(setting, model, loss)


def _plain_step(setting: Setting, model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    """Forward, backward, clip, fused AdamW: the loop of a tutorial."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True
    )
    low = setting.precision == "bfloat16"

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext():
            value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return value.item()

    return step


def initial_weights(setting: Setting) -> dict[str, Tensor]:
    """Armillary's initial weights, by its names."""
    from armillary.parallel.materialise import materialise

    with torch.device("meta"):
        model = setting.recipe().model.build()
    materialise(model, torch.device("cpu"), seed=0)
    return cast(dict[str, Tensor], model.state_dict())


SYSTEMS: dict[str, Callable[[Setting, dict[str, Tensor]], Step]] = {
    "armillary": armillary,
    "armillary compiled": lambda s, w: armillary(s, w, compiled=True),
    "transformers": transformers,
    "transformers compiled": lambda s, w: transformers(s, w, compiled=True),
    "plain loop": plain,
}
