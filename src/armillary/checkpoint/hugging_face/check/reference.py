"""The families' formulas on published tensors, in float64 and as the papers have them.

Written from: rotary positions, Su et al. 2021 (arXiv 2104.09864, eq. 15, 34); grouped queries,
Ainslie et al. 2023 (2305.13245); the stretching of Llama 3.1 (2407.21783, section 3.1, and the
model card) and YaRN (Peng et al. 2023, 2309.00071, eq. 17-22 and appendix A.2); latent attention,
DeepSeek-V2 (2405.04434, eq. 9-19); SwiGLU, Shazeer 2020 (2002.05202, eq. 6); routers, DeepSeek-V3
(2412.19437, eq. 12-16), Qwen3 (2505.09388, section 2) and GPT-OSS (2508.10925, section 2).
Nothing here comes from our models: that is its use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from armillary.checkpoint.hugging_face.check.raw import Raw
from armillary.checkpoint.hugging_face.files import Config


class Mixed(NamedTuple):
    """What attention goes through, of one row of S tokens."""

    query: Tensor
    """`[H, S, P]`, rotated, pairs as halves."""
    key: Tensor
    """`[K, S, P]`, the same."""
    value: Tensor
    """`[K, S, P_v]`."""
    output: Tensor
    """`[S, D]`."""


def rms_norm(x: Tensor, gain: Tensor, config: Config) -> Tensor:
    """x over the root of its mean square, times a gain."""
    eps = float(config["rms_norm_eps"])
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def rope_of(config: Config) -> Mapping[str, Any]:
    """What a config.json says of rotary positions, in either spelling."""
    told = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = told.get("rope_theta", config.get("rope_theta", 10_000.0))
    return {"rope_type": told.get("type", "default"), **told, "rope_theta": base}


def angles(config: Config, width: int, length: int) -> tuple[Tensor, float]:
    """Angles `[S, P / 2]` of pair i at position m, and what cosines and sines are multiplied by."""
    rope = rope_of(config)
    pair = torch.arange(width // 2, dtype=torch.float64)
    turn = rope["rope_theta"] ** (-2 * pair / width)  # radians a token
    size = 1.0
    if rope["rope_type"] == "llama3":
        turn = _llama3(turn, rope)
    elif rope["rope_type"] == "yarn":
        turn = _yarn(turn, rope, width, config)
        tables, scores = rope.get("mscale"), rope.get("mscale_all_dim")
        size = _temperature(rope, tables or 1.0)
        if tables and scores:
            size /= _temperature(rope, scores)
    return torch.arange(length, dtype=torch.float64)[:, None] * turn, size


def _llama3(turn: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Long wavelengths are stretched, short ones are not, and those between in part."""
    context = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    out = []
    for each in turn.tolist():
        wavelength = 2 * math.pi / each
        smooth = (context / wavelength - low) / (high - low)
        if wavelength < context / high:
            out.append(each)
        elif wavelength > context / low:
            out.append(each / rope["factor"])
        else:
            out.append((1 - smooth) * each / rope["factor"] + smooth * each)
    return torch.tensor(out, dtype=torch.float64)


def _yarn(turn: Tensor, rope: Mapping[str, Any], width: int, config: Config) -> Tensor:
    """The same by the index of the pair, between the pairs of beta_fast and beta_slow turns."""
    context = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]

    def pair_of(turns: float) -> float:
        base = math.log(rope["rope_theta"])
        return width * math.log(context / (turns * 2 * math.pi)) / (2 * base)

    low, high = pair_of(rope.get("beta_fast", 32)), pair_of(rope.get("beta_slow", 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    out = []
    for index, each in enumerate(turn.tolist()):
        stretched = min(max((index - low) / max(high - low, 1e-3), 0.0), 1.0)
        out.append(each * (1 - stretched) + each / rope["factor"] * stretched)
    return torch.tensor(out, dtype=torch.float64)


def _temperature(rope: Mapping[str, Any], coefficient: float) -> float:
    return 0.1 * coefficient * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0


def rotate(x: Tensor, config: Config, *, neighbours: bool) -> Tensor:
    """Turns the pairs of x `[heads, S, P]` by position; the result has pairs as halves."""
    width, length = x.shape[-1], x.shape[-2]
    angle, size = angles(config, width, length)
    pairs = (x[..., ::2], x[..., 1::2]) if neighbours else torch.split(x, width // 2, dim=-1)
    turned = torch.complex(*(part.contiguous() for part in pairs)) * torch.polar(
        torch.full_like(angle, size), angle
    )
    return torch.cat((turned.real, turned.imag), dim=-1)


def _heads(x: Tensor, width: int) -> Tensor:
    """`[S, heads * width]` -> `[heads, S, width]`."""
    return x.reshape(len(x), -1, width).transpose(0, 1)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention `[H, S, P_v]` of queries that share keys and values in groups."""
    shared = query.shape[0] // key.shape[0]
    key, value = (each.repeat_interleave(shared, dim=0) for each in (key, value))
    at = torch.arange(query.shape[1])
    distance = at[:, None] - at[None, :]
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    scores = (query @ key.mT * scale).masked_fill(hidden, -torch.inf)
    if sinks is not None:  # a key that everybody sees and that has no value
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(at), 1)), dim=-1)
    return scores.softmax(-1)[..., : len(at)] @ value


def grouped_attention(x: Tensor, raw: Raw, layer: str, config: Config) -> Mixed:
    """Llama, Qwen3 and GPT-OSS, of normalised x `[S, D]`."""
    at = f"{layer}.self_attn"
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads

    def projected(name: str, x: Tensor) -> Tensor:
        y = raw.product(x, f"{at}.{name}.weight")
        bias = f"{at}.{name}.bias"
        return y + raw.vector(bias) if bias in raw else y

    query, key, value = (_heads(projected(f"{n}_proj", x), width) for n in "qkv")
    if f"{at}.q_norm.weight" in raw:
        query = rms_norm(query, raw.vector(f"{at}.q_norm.weight"), config)
        key = rms_norm(key, raw.vector(f"{at}.k_norm.weight"), config)
    query, key = (rotate(each, config, neighbours=False) for each in (query, key))
    sinks = raw.vector(f"{at}.sinks") if f"{at}.sinks" in raw else None
    window = config.get("sliding_window", 128) if config["model_type"] == "gpt_oss" else None
    mixed = _attend(query, key, value, width**-0.5, window=window, sinks=sinks)
    return Mixed(query, key, value, projected("o_proj", mixed.transpose(0, 1).flatten(1)))


def latent_attention(x: Tensor, raw: Raw, layer: str, config: Config) -> Mixed:
    """DeepSeek, of normalised x `[S, D]`."""
    at = f"{layer}.self_attn"
    plain, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    is_v2 = config["model_type"] == "deepseek_v2"
    neighbours = is_v2 or config.get("rope_interleave", True)
    if config.get("q_lora_rank"):
        latent = raw.product(x, f"{at}.q_a_proj.weight")
        latent = rms_norm(latent, raw.vector(f"{at}.q_a_layernorm.weight"), config)
        query = raw.product(latent, f"{at}.q_b_proj.weight")
    else:
        query = raw.product(x, f"{at}.q_proj.weight")
    query = _heads(query, plain + rotated)
    both = raw.product(x, f"{at}.kv_a_proj_with_mqa.weight")
    latent, shared = both[:, : config["kv_lora_rank"]], both[:, config["kv_lora_rank"] :]
    latent = rms_norm(latent, raw.vector(f"{at}.kv_a_layernorm.weight"), config)
    expanded = _heads(raw.product(latent, f"{at}.kv_b_proj.weight"), plain + config["v_head_dim"])
    key, value = expanded[..., :plain], expanded[..., plain:]
    shared = rotate(shared[None], config, neighbours=neighbours).expand(len(key), -1, -1)
    key = torch.cat((key, shared), dim=-1)
    turned = rotate(query[..., plain:], config, neighbours=neighbours)
    query = torch.cat((query[..., :plain], turned), dim=-1)
    rope = rope_of(config)
    sharper = rope.get("mscale_all_dim") if rope["rope_type"] == "yarn" else None
    scale = (_temperature(rope, sharper) ** 2 if sharper else 1.0) * (plain + rotated) ** -0.5
    mixed = _attend(query, key, value, scale).transpose(0, 1).flatten(1)
    return Mixed(query, key, value, raw.product(mixed, f"{at}.o_proj.weight"))


class Gated(NamedTuple):
    """What a feed-forward goes through, of T tokens."""

    gate: Tensor
    """`[T, F]`."""
    up: Tensor
    """`[T, F]`."""
    output: Tensor
    """`[T, D]`."""


def feed_forward(x: Tensor, raw: Raw, at: str) -> Gated:
    """SwiGLU of x `[T, D]`, with the three matrices below a name."""
    gate, up = (raw.product(x, f"{at}.{name}_proj.weight") for name in ("gate", "up"))
    hidden = gate * torch.sigmoid(gate) * up
    return Gated(gate, up, raw.product(hidden, f"{at}.down_proj.weight"))


def fused_expert(x: Tensor, raw: Raw, at: str, expert: int, config: Config) -> Gated:
    """One expert of GPT-OSS, of x `[T, D]`."""
    both = x @ raw.expert(f"{at}.gate_up_proj", expert)
    both = both + raw.rows(f"{at}.gate_up_proj_bias", expert, expert + 1)
    limit = config.get("swiglu_limit", 7.0)
    gate, up = both[:, 0::2], both[:, 1::2]
    held, kept = gate.clamp(max=limit), up.clamp(-limit, limit)
    hidden = (kept + 1) * held * torch.sigmoid(1.702 * held)
    output = hidden @ raw.expert(f"{at}.down_proj", expert)
    return Gated(gate, up, output + raw.rows(f"{at}.down_proj_bias", expert, expert + 1))


def routing(x: Tensor, raw: Raw, layer: str, config: Config) -> Tensor:
    """How much each expert counts for each token of x `[T, D]`: `[T, E]`, zeros for most."""
    is_oss = config["model_type"] == "gpt_oss"
    at = f"{layer}.mlp.{'router' if is_oss else 'gate'}"
    logits = raw.product(x, f"{at}.weight")
    if is_oss:
        logits = logits + raw.vector(f"{at}.bias")
    is_v3 = config["model_type"] == "deepseek_v3"
    scores = logits.sigmoid() if is_v3 else logits.softmax(-1)
    choice = scores + raw.vector(f"{at}.e_score_correction_bias") if is_v3 else scores
    choice = _within_groups(choice, config)
    chosen = choice.topk(config.get("num_experts_per_tok") or 4, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if is_oss or config.get("norm_topk_prob", is_v3):
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * config.get("routed_scaling_factor", 1.0)
    return torch.zeros_like(scores).scatter(-1, chosen, weights)


def _within_groups(choice: Tensor, config: Config) -> Tensor:
    """Scores of experts outside of a token's best groups become -inf."""
    groups, most = config.get("n_group") or 1, config.get("topk_group") or 1
    is_v3 = config["model_type"] == "deepseek_v3"
    if groups == 1 or not (is_v3 or config.get("topk_method") == "group_limited_greedy"):
        return choice
    grouped = choice.reshape(len(choice), groups, -1)
    best = grouped.topk(2, dim=-1).values.sum(-1) if is_v3 else grouped.amax(-1)
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(most).indices, True)
    return grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
