"""What one device needs in memory, estimated by arithmetic: `memory_of(recipe, ranks)`. No torch.

The formula, for the rank that needs most. R = dp_shard x cp x tp ranks share what a stage of the
pipeline holds; N are the parameters of the largest stage; c are the bytes of a number in the
compute format; T are the tokens of a microbatch, divided by cp and tp:

    state        N / R x (4 weight + 4 gradient + 4 for each moment), float32 always
    gathered     parameters of the blocks that are whole at one time x c, and of one block its
                 gradient in c and, before it is reduced, in float32; with a pipeline, all of the
                 stage x (c + 4), gradients adding up in float32; on one rank, the casts to c, of
                 one block, or of all that are not checkpointed
    head         V D / tp x 4 x (gathered weight, gradient, scaled gradient), and the hidden states
    logits       tokens of a chunk x V / tp x (c logits + 4 in float32 + 4 softmax)
    kept         T x c x what blocks keep for the backward pass x microbatches in flight
    block        T x c x what one block makes when it is computed again and walked back
    reserved     5 GB: CUDA and NCCL, buffers of collectives, what the allocator cannot use

It is the peak at the beginning of the backward pass, when everything is kept and the head has its
gradient. With low-rank tuning the state is the weights alone. Left out: uneven loads of experts,
and what a compiler saves.
GB is 10^9 bytes. How near it comes to what others measured is in docs/recipes.md.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from armillary.models.deepseek import DeepSeek
from armillary.models.dense import DenseDecoder
from armillary.models.gpt_oss import GptOss
from armillary.models.moe import MoEDecoder
from armillary.optim.muon import Muon
from armillary.parallel.config import Parallel
from armillary.parallel.schedules import rows_at_once, stages_per_rank
from armillary.recipe.recipe import Recipe
from armillary.recipe.stages import spans_of

GPU_BYTES = 80e9
"""Memory of the GPUs that curated recipes are made for."""
RESERVED_BYTES = 5e9
"""CUDA's context, NCCL, buffers of collectives, fragments: ours, a round number."""
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device, by what they are for; see the formula of the module."""

    state: float
    gathered: float
    head: float
    logits: float
    kept: float
    block: float
    reserved: float = RESERVED_BYTES

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(getattr(self, part.name) for part in fields(self)))


@dataclass(frozen=True, slots=True)
class Activations:
    """Numbers that a block has for each token, in the compute format; one in float32 is two."""

    entry: float
    """What goes in: all that full checkpointing keeps."""
    costly: float
    """Results of products and of attention, which selective checkpointing keeps as well."""
    kept: float
    """What autograd keeps where nothing is checkpointed, the entry included."""

    def __add__(self, other: Activations) -> Activations:
        return Activations(
            self.entry + other.entry, self.costly + other.costly, self.kept + other.kept
        )


def peak_of(recipe: Recipe, ranks: int) -> Memory:
    """The largest that a stage needs, for a recipe without problems on so many ranks."""
    needs = [memory_of(span.recipe, ranks) for span in spans_of(recipe)]
    return max(needs, key=lambda need: need.total)


def memory_of(recipe: Recipe, ranks: int) -> Memory:
    """What the rank that needs most needs, for a recipe without problems and stages."""
    model, parallel = recipe.model, recipe.parallel.resolve(ranks)
    assert isinstance(model, DenseDecoder), "the formula is that of decoders"
    number = 2 if recipe.precision.compute == "bfloat16" else _FLOAT32
    vocabulary = model.vocab_size * model.dim
    tables = 1 if model.tied_embeddings or parallel.pp > 1 else 2
    blocks = model.parameter_count() - vocabulary * (1 if model.tied_embeddings else 2)
    held, shards = blocks / parallel.pp, parallel.dp_shard * parallel.cp
    moments = 1 if isinstance(recipe.optimizer, Muon) else 2
    is_full = recipe.tuning.low_rank_scale is None
    state = (
        held * (2 + moments) + tables * vocabulary * 4 if is_full else held + tables * vocabulary
    )
    whole = _rows(recipe, parallel) * recipe.budget.seq_len / parallel.cp  # tokens
    tokens, chunk = whole / parallel.tp, min(whole, getattr(recipe.task, "chunk_tokens", whole))
    head = vocabulary / parallel.tp * _FLOAT32 * (3 if shards > 1 else 2)
    one = max((_block(model, index) for index in range(model.n_layers)), key=lambda it: it.kept)
    return Memory(
        state=state * _FLOAT32 / (shards * parallel.tp),
        gathered=_gathered(recipe, model, parallel, number),
        head=head + 2 * whole * model.dim * number,
        logits=chunk * model.vocab_size / parallel.tp * (number + 2 * _FLOAT32),
        kept=tokens * number * _kept(recipe, model, parallel),
        block=tokens * number * 2 * one.kept,
    )


def _rows(recipe: Recipe, parallel: Parallel) -> int:
    """Sequences of a microbatch."""
    budget = recipe.budget
    share = budget.batch_tokens // budget.seq_len // parallel.grid.data_size
    return rows_at_once(parallel, share, budget.microbatch_sequences)


def _gathered(recipe: Recipe, model: DenseDecoder, parallel: Parallel, number: int) -> float:
    """Bytes of weights and gradients of blocks beyond the shards."""
    products = model.matmul_parameters()
    experts = products.get("experts", 0) / max(1, getattr(model, "n_expert_layers", 1))
    rest = sum(products.values()) - products.get("experts", 0) - products["head"]
    here = experts / (parallel.ep * parallel.expert_tp) + rest / model.n_layers / parallel.tp
    if parallel.pp > 1:
        return here * model.n_layers / parallel.pp * (number + _FLOAT32)
    if parallel.dp_shard * parallel.cp == 1:
        slot = recipe.activation_checkpoint
        whole = sum(slot.kept(index) is None for index in range(model.n_layers))
        return here * max(1, whole) * number
    ahead = 1 + parallel.prefetch if parallel.reshard_after_forward else model.n_layers
    return here * (ahead * number + number + _FLOAT32)


def _kept(recipe: Recipe, model: DenseDecoder, parallel: Parallel) -> float:
    """Numbers that wait for the backward pass, for each token of a microbatch, on one rank."""
    slot, total = recipe.activation_checkpoint, 0.0
    if slot.offloads:
        return 0.0
    layers = model.n_layers + (isinstance(model, DeepSeek) and model.predict_ahead)
    for index in range(layers):
        has, keeps = _block(model, index), slot.kept(index)
        if keeps is None:
            total += has.kept * (1.0 if slot.memory_budget is None else slot.memory_budget)
        else:
            total += has.entry + (has.costly if keeps else 0.0)
    return total / parallel.pp * _in_flight(recipe, parallel)


def _in_flight(recipe: Recipe, parallel: Parallel) -> float:
    """Microbatches whose activations the first rank of a pipeline holds at once, all its stages.

    (1F1B and its interleaving: Narayanan et al. 2021, arXiv 2104.04473, section 2.2; V-shaped: Qi
    et al. 2024, arXiv 2405.15362, table 1; DualPipe: arXiv 2412.19437, table 2.)
    """
    pp = parallel.pp
    if pp == 1:
        return 1.0
    share = recipe.budget.batch_tokens // recipe.budget.seq_len // parallel.grid.data_size
    many = share / _rows(recipe, parallel)
    pieces = stages_per_rank(parallel)
    interleaved = ((pieces - 1) * pp + 2 * pp - 1) / pieces
    held = {
        "1F1B": pp,
        "Interleaved1F1B": interleaved,
        "InterleavedZeroBubble": interleaved,
        "ZBVZeroBubble": pp,
        "DualPipeV": pp + 0.5,
    }
    return min(many, held.get(parallel.schedule, many))


def _block(model: DenseDecoder, index: int) -> Activations:
    """What block `index` has for each token: attention and feed-forward, with their norms."""
    if isinstance(model, MoEDecoder) and index >= model.n_dense_layers:
        return _attention(model) + _experts(model)
    return _attention(model) + _feed_forward(model)


def _attention(model: DenseDecoder) -> Activations:
    """Norm, projections, positions, attention with its log-sums in float32, projection."""
    dim, heads, head = model.dim, model.n_heads, model.head_width
    if isinstance(model, DeepSeek):
        latents = (model.query_rank or 0) + model.key_value_rank + model.rope_head_dim
        expanded = heads * (model.plain_head_dim + model.value_head_dim)
        mixed = heads * model.value_head_dim
        projected = latents + heads * head + expanded
        normed = (model.query_rank or 0) + model.key_value_rank
        inside = latents + normed + 2 * heads * head + expanded
    else:
        keys = model.n_kv_heads * head
        mixed = heads * head
        projected = mixed + 2 * keys
        inside = mixed + 2 * keys + (mixed + keys if model.qk_norm else 0)
    sums = 2 * heads
    return Activations(dim, projected + mixed + sums + dim, 2 * dim + inside + 2 * mixed + sums)


def _feed_forward(model: DenseDecoder) -> Activations:
    """Norm, gate and up; their product is not kept (see `kernels.swiglu`)."""
    return Activations(0, 2 * model.ffn_dim + model.dim, 2 * model.dim + 2 * model.ffn_dim)


def _experts(model: MoEDecoder) -> Activations:
    """The same for the k experts of a token, whose rows and product are kept; shared ones beside.

    GPT-OSS's biases and clamped gate are plain operators, each of which keeps what it was given.
    """
    k, dim, width = model.n_active, model.dim, model.expert_dim
    plain = 8 if isinstance(model, GptOss) else 3  # products of k F
    shared = 2 * model.n_shared_experts * width
    return Activations(
        0,
        k * (2 * width + dim) + shared + (dim if shared else 0) + 2 * model.n_experts,
        2 * dim + k * (plain * width + 2 * dim) + shared + 4 * model.n_experts,
    )
