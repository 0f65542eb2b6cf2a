"""Counts of a model of which a part is trained."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence

from armillary.models.config import ModelConfig
from armillary.models.layers.low_rank import is_factor
from armillary.models.moe import MoEDecoder

Shapes = Mapping[str, Sequence[int]]
"""By name, of all parameters of a whole model; a tied one once."""

_KINDS = (
    (re.compile(r"layers\.\d+\.attention\.(\w+)\.(weight|lora_[ab])"), "attention.projections"),
    (re.compile(r"layers\.\d+\.feed_forward\.\w+\.(weight|lora_[ab])"), "feed_forward"),
    (re.compile(r"layers\.\d+\.feed_forward\.router\.weight"), "router"),
    (re.compile(r"layers\.\d+\.feed_forward\.experts\.\w+"), "experts"),
    (re.compile(r"layers\.\d+\.feed_forward\.shared\.\w+\.(weight|lora_[ab])"), "shared_experts"),
    (re.compile(r"layers\.\d+\.projection\.(weight|lora_[ab])"), "ahead"),
    (re.compile(r"head\.weight"), "head"),
)
"""Which names multiply activations, and the kind of layer that `flops_breakdown` counts them as."""

FORWARD, BACKWARD = 2.0, 4.0
"""Operations for each parameter that multiplies a token; of the second, half are for the gradient
of the input and half for that of the weight."""

_HEAD = 1e9
_ENDS = {"embedding": -1.0, "norm": _HEAD - 1, "head": _HEAD}
"""Where what is outside of the blocks stands, see `_place`."""


def trained_parameters(shapes: Shapes, frozen: Collection[str]) -> int:
    """Numbers that training moves."""
    return sum(math.prod(shape) for name, shape in shapes.items() if name not in frozen)


def flops_breakdown(
    model: ModelConfig, shapes: Shapes, frozen: Collection[str], *, seq_len: int, causal: bool
) -> dict[str, float]:
    """`ModelConfig.flops_breakdown` of a tuned model.

    A frozen weight costs 4 operations a token instead of 6, as its own gradient is not computed,
    and 2 where nothing below it is trained, so that its input needs none either. Low-rank factors
    cost 6, of experts as often as the expert is used. See docs/conventions.md.

    Args:
        model: the plain model.
        shapes: of the tuned model, low-rank factors among them.
        frozen: names of what is not trained.
        seq_len: tokens of a row.
        causal: see `ModelConfig.flops_breakdown`.
    """
    flops = model.flops_breakdown(seq_len, causal=causal)
    if not frozen:
        return flops
    lowest = _lowest_trained(shapes, frozen)
    plain, tuned = dict.fromkeys(flops, 0.0), dict.fromkeys(flops, 0.0)
    for name, kind in _kinds(shapes, flops).items():
        count = math.prod(shapes[name]) * _use(model, name)
        plain[kind] += 0.0 if is_factor(name) else (FORWARD + BACKWARD) * count
        has_input_gradient = lowest <= (_HEAD if kind == "head" else _place(name))
        backward = has_input_gradient + (name not in frozen)
        tuned[kind] += (FORWARD + backward * BACKWARD / 2) * count
    blocks = {_place(name) for name in shapes if name.startswith("layers.")}
    scores = "attention.scores"
    plain[scores] = (FORWARD + BACKWARD) * len(blocks)
    tuned[scores] = sum(FORWARD + BACKWARD * (lowest <= block) for block in blocks)
    return {kind: count * (tuned[kind] / plain[kind]) for kind, count in flops.items()}


def _lowest_trained(shapes: Shapes, frozen: Collection[str]) -> float:
    """Where the first parameter stands that is trained and has others after it; inf: none does."""
    trained = [_place(name) for name in shapes if name not in frozen]
    return min((place for place in trained if place < _HEAD), default=math.inf)


def _place(name: str) -> float:
    """Where a parameter stands on the way from tokens to the loss; a block by its number."""
    first, *rest = name.split(".")
    return int(rest[0]) if first == "layers" else _ENDS[first]


def _use(model: ModelConfig, name: str) -> float:
    """The share of tokens that a parameter multiplies."""
    if isinstance(model, MoEDecoder) and ".experts." in name:
        return model.n_active / model.n_experts
    return 1.0


def _kinds(shapes: Shapes, flops: Mapping[str, float]) -> dict[str, str]:
    """The kind of each parameter that multiplies activations."""
    last = max(_place(name) for name in shapes if name.startswith("layers."))
    found = {}
    for name in shapes:
        for pattern, kind in _KINDS:
            is_bias_or_gain = name.endswith(("_bias", "norm.weight"))
            if pattern.fullmatch(name) and not is_bias_or_gain:
                ahead = "ahead" in flops and _place(name) == last
                found[name] = "ahead" if ahead else kind
    if "head.weight" not in shapes:
        found["embedding.weight"] = "head"  # tied
    return found
