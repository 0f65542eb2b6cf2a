"""What each kind of parallelism has to send at the least, in closed form: `scaling.py` counts it.

All figures are bytes that one rank sends in one optimizer step of one microbatch. R ranks share an
axis, and f = (R - 1) / R is the part of anything spread evenly over them that is not here. For
n bytes of input a rank sends (R - 1) n in an all-gather, f n in a reduce-scatter and in an
all-to-all, 2 f n in an all-reduce (Chan et al. 2007, "Collective communication", table 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GRADIENT_BYTES = 4
"""Gradients are reduced in float32."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What of a model and its batch enters the formulas. Parameters are counted in elements."""

    layers: int
    dim: int
    query_width: int
    """Heads x head width."""
    key_width: int
    """Kv heads x head width."""
    block_weights: int
    """In all blocks, without experts."""
    experts: int
    """In all experts of all layers."""
    outside: int
    """Embedding, last norm, head."""
    uncut: int
    """Of all weights without experts, those that tensor parallelism leaves whole."""
    regions: int
    """Tensor-parallel regions of all layers: attention, feed-forward, shared experts."""
    mixtures: int
    """Layers with experts."""
    n_experts: int
    n_active: int
    """Experts of a token."""
    rows: int
    """Rows of the global batch."""
    length: int
    """Tokens of a row."""
    element_bytes: int
    """Of activations, and of gathered weights."""

    @classmethod
    def of(cls, config: Any, *, rows: int, length: int, element_bytes: int) -> Sizes:
        """Reads them off the modules of a model built on `meta`."""
        import torch

        from armillary.models.layers.moe import MoE

        with torch.device("meta"):
            model = config.build()
        parameters = {name: p.numel() for name, p in model.named_parameters()}
        experts = sum(n for name, n in parameters.items() if ".experts." in name)
        blocks = sum(n for name, n in parameters.items() if name.startswith("layers."))
        mixtures = [module for module in model.modules() if isinstance(module, MoE)]
        return cls(
            layers=len(model.layers),
            dim=config.dim,
            query_width=config.n_heads * config.head_width,
            key_width=config.n_kv_heads * config.head_width,
            block_weights=blocks - experts,
            experts=experts,
            outside=sum(parameters.values()) - blocks,
            uncut=sum(n for name, n in parameters.items() if "norm" in name or "router" in name),
            regions=sum(getattr(module, "tensor_region", False) for module in model.modules()),
            mixtures=len(mixtures),
            n_experts=mixtures[0].router.n_experts if mixtures else 0,
            n_active=mixtures[0].router.n_active if mixtures else 0,
            rows=rows,
            length=length,
            element_bytes=element_bytes,
        )


def minimum(parallel: Any, sizes: Sizes) -> dict[str, float]:
    """Bytes that a rank sends on each axis of a resolved mesh; of stages, the busiest rank."""
    grid = parallel.grid
    found = {}
    dense, own = grid.degree("fsdp"), grid.degree("expert_fsdp")
    if dense > 1:
        found["fsdp"] = data_sharding(dense, sizes, tp=parallel.tp, pp=parallel.pp)
    if own > 1 and sizes.experts:
        axis = (
            "fsdp" if grid.members(0, "fsdp") == grid.members(0, "expert_fsdp") else "expert_fsdp"
        )
        cut = parallel.ep * parallel.expert_tp * parallel.pp
        found[axis] = found.get(axis, 0.0) + expert_sharding(own, sizes, cut=cut)
    rows = sizes.rows // grid.data_size
    if parallel.tp > 1:
        found["tp"] = tensor(parallel.tp, sizes, rows=rows, fsdp=dense)
    if parallel.pp > 1:
        found["pp"] = pipeline(parallel.pp, sizes, rows=rows)
    if parallel.cp > 1:
        found["cp"] = context(parallel.cp, sizes, rows=rows, kind=parallel.context)
    if parallel.ep > 1:
        found["ep"] = experts(parallel.ep, sizes, rows=rows, split=parallel.cp * parallel.tp)
    return found


def data_sharding(ranks: int, sizes: Sizes, *, tp: int, pp: int) -> float:
    """FSDP that frees the weights of blocks after their forward pass.

    A rank has 1 / R of each weight. The weights of a block are needed by its forward pass and,
    because they were freed, by its backward pass again: two all-gathers, each of which sends every
    other rank this rank's part, (R - 1) b P / R = f b P with b bytes an element. What is outside
    the blocks is kept, in float32, and gathered once. Each gradient is reduce-scattered once in
    float32: f 4 P. In all f (2 b P_blocks + 4 P_outside + 4 P).

    Tensor parallelism leaves 1 / tp of what it cuts; a pipeline, about 1 / pp of the blocks, and
    here the half of what is outside them.
    """
    share = 1 / tp
    uncut = sizes.uncut * (1 - share)
    blocks = sizes.block_weights * share + uncut
    blocks, outside = blocks / pp, sizes.outside * share / min(pp, 2)
    gathered = 2 * sizes.element_bytes * blocks + 4 * outside
    return _off(ranks) * (gathered + GRADIENT_BYTES * (blocks + outside))


def expert_sharding(ranks: int, sizes: Sizes, *, cut: int) -> float:
    """FSDP of the experts of which ep, expert_tp and pp leave one part in `cut`.

    As for blocks: two gathers and a reduction, f (2 b + 4) P. Where the experts are sharded over
    the same ranks as all else, it is the same axis.
    """
    per_element = 2 * sizes.element_bytes + GRADIENT_BYTES
    return _off(ranks) * per_element * sizes.experts / cut


def tensor(ranks: int, sizes: Sizes, *, rows: int, fsdp: int) -> float:
    """Tensor parallelism with the sequence split between regions.

    Let A be the bytes of hidden states of the rank's rows, `[B, S, D]`. A region gathers its input
    (each rank sends its A / R to R - 1 others: f A) and reduce-scatters its output (f A); the
    gradients go the same ways back: 4 f A. The embedding's output is a sum over ranks, scattered
    (f A) and its gradient gathered (f A); the head's input the other way round: 4 f A together.
    The loss over vocabulary shards needs of each token the largest logit, the sum of exponentials
    and the label's logit, in float32: 2 f 4 x 3 B S. Weights that are whole on each rank see
    part of the tokens: their gradients, of which a rank has 1 / fsdp, are summed: 2 f 4 P_uncut.
    """
    hidden = rows * sizes.length * sizes.dim * sizes.element_bytes
    activations = (4 * sizes.regions + 4) * hidden
    loss = 2 * 4 * 3 * rows * sizes.length
    gradients = 2 * GRADIENT_BYTES * sizes.uncut / fsdp
    return _off(ranks) * (activations + loss + gradients)


def pipeline(ranks: int, sizes: Sizes, *, rows: int) -> float:
    """One stage a rank: hidden states go on, their gradients back.

    Each boundary passes `[B, S, D]` once in each direction. A rank in the middle sends to both
    sides, 2 A; the first sends only on and the last only back: A each.
    """
    hidden = rows * sizes.length * sizes.dim * sizes.element_bytes
    return hidden * (2 if ranks > 2 else 1)


def context(ranks: int, sizes: Sizes, *, rows: int, kind: str) -> float:
    """Attention over tokens of other ranks, by kind; n is the bytes of this rank's keys and values,
    `[B, S / R, K, 2 P]`, and m those of its queries and outputs, `[B, S / R, H, 2 P]`.

    all-gather: (R - 1) n; in backward the gradients of all keys are reduce-scattered, f R n, which
        is (R - 1) n too.
    ring: keys pass R - 1 hops forward and R - 1 backward, and their gradients, in float32, one hop
        for each rank that adds to them, R - 1 if they end at home.
    ulysses: queries, keys, values and outputs each to other heads or back, f (m + n), twice.
    """
    local = rows * sizes.length // ranks * sizes.element_bytes
    keys, queries = 2 * sizes.key_width * local, 2 * sizes.query_width * local
    if kind == "all-gather":
        layer = 2 * (ranks - 1) * keys
    elif kind == "ring":
        layer = (ranks - 1) * (2 * keys + keys * GRADIENT_BYTES / sizes.element_bytes)
    else:
        layer = 2 * _off(ranks) * (queries + keys)
    return sizes.layers * layer


def experts(ranks: int, sizes: Sizes, *, rows: int, split: int) -> float:
    """Dropless exchange with a row of D for each slot (token and one of its k experts).

    Of T tokens here there are T k slots. With even loads the share f of them belongs to experts of
    other ranks; each such row goes there and its output comes back, forward, and their gradients
    backward: 4 f T k D b. The counts that precede them are E integers of 8 bytes: f 8 E. (Loads of
    a router at random are not quite even: what is counted is off by that. Sending a token once to
    a rank where it has several experts would need less one way: UniEP, arXiv 2604.19241.)
    """
    slots = rows * sizes.length // split * sizes.n_active
    exchange = 4 * slots * sizes.dim * sizes.element_bytes
    return sizes.mixtures * _off(ranks) * (exchange + 8 * sizes.n_experts)


def _off(ranks: int) -> float:
    return (ranks - 1) / ranks
