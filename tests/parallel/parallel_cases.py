"""One step of a tiny model on any arrangement of ranks, for comparison with one process."""

from __future__ import annotations

import hashlib
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.data.batch import Batch
from armillary.models.layers.documents import Documents
from armillary.models.llama.config import Llama
from armillary.models.moe import MoEDecoder
from armillary.models.routing import RouterConfig
from armillary.parallel import Scale, process
from armillary.parallel.gradients import norms_by_name, scale_and_clip
from armillary.parallel.layout import local_tensor
from armillary.parallel.materialise import materialise
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import LOSS_AXES, ParallelModel
from armillary.parallel.parallelize import parallelize
from armillary.tasks.next_token import NextToken

ROWS, LENGTH, VOCABULARY = 8, 16, 67  # 67 rows divide by no number of ranks
SEED = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a run of the tiny model varies."""

    scale: Scale = field(default_factory=Scale)
    microbatches: int = 1
    tied: bool = False
    experts: bool = False


@dataclass(frozen=True)
class Trace:
    """What must not depend on the arrangement; whole tensors, on every rank."""

    names: list[str]
    initial: dict[str, str]
    losses: list[float]
    norm: float
    norms: dict[str, float]
    gradients: dict[str, Tensor]
    statistics: dict[str, float]


def traces(cases: list[Case]) -> list[Trace]:
    """The cases in turn, in this process or over the ranks of its group."""
    return [_trace(case) for case in cases]


def tiny(*, tied: bool = False) -> Llama:
    """Two blocks, odd widths; all parameters together below 20 thousand."""
    return Llama(
        vocab_size=VOCABULARY,
        dim=24,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=6,
        ffn_dim=38,
        max_seq_len=LENGTH,
        tied_embeddings=tied,
    )


def tiny_experts() -> MoEDecoder:
    """A dense block, then one of four experts, two of them for each token, balanced by a bias."""
    return MoEDecoder(
        vocab_size=VOCABULARY,
        dim=24,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=6,
        ffn_dim=36,
        max_seq_len=LENGTH,
        n_experts=4,
        n_active=2,
        expert_dim=20,
        n_shared_experts=1,
        n_dense_layers=1,
        router=RouterConfig(balance_rate=0.01),
    )


def built(case: Case) -> ParallelModel:
    """The model of a case on this rank, with its first weights."""
    mesh = Mesh.create(case.scale.parallel, process.choose_device("cpu"))
    with torch.device("meta"):
        model = (tiny_experts() if case.experts else tiny(tied=case.tied)).build()
    parallel = parallelize(model, mesh, case.scale)
    materialise(parallel, mesh.device, SEED)
    return parallel


def wholes(model: ParallelModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole of tensors that are cut as parameters are, of all stages, on every rank."""
    own = {name: model.gather(name, tensor.detach()).clone() for name, tensor in tensors.items()}
    stages = [own]
    if (group := model.mesh.group("pp")) is not None:
        stages = [{} for _ in range(group.size())]
        dist.all_gather_object(stages, own, group=group)
    merged: dict[str, Tensor] = {}
    for stage in stages:
        for name, tensor in stage.items():
            assert torch.equal(merged.setdefault(name, tensor), tensor), f"stages differ: {name}"
    return merged


def batches(model: ParallelModel, microbatches: int) -> tuple[list[Batch], int]:
    """This rank's microbatches of a step with ragged masks and packed documents, and its weight."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    for row in range(ROWS):
        labels[row, LENGTH - row :] = -100  # ragged: ranks hold different numbers of valid labels
    lengths = [(3 + row % 4, LENGTH - 3 - row % 4) for row in range(ROWS)]
    own = ROWS // model.mesh.data_size
    part = own // microbatches
    first = model.mesh.data_rank * own
    found = []
    for index in range(microbatches):
        rows = slice(first + index * part, first + (index + 1) * part)
        documents = Documents.from_lengths(lengths[rows])
        found.append(Batch(tokens[rows], labels[rows], documents, tuple(range(ROWS)[rows])))
    return found, int((labels != -100).sum())


def _trace(case: Case) -> Trace:
    model = built(case)
    initial = {
        name: hashlib.sha256(whole.numpy().tobytes()).hexdigest()
        for name, whole in wholes(model, model.state_dict()).items()
    }
    _randomise_gains(model)
    microbatches, weight = batches(model, case.microbatches)
    losses, statistics = [], {}
    for _ in range(2):  # the second step shows state that the first one left behind
        for parameter in model.parameters():
            parameter.grad = None
        with nothing_pickled():
            loss = model.forward_backward(NextToken(), microbatches)
            losses.append(float(model.mesh.sum_over(loss, LOSS_AXES)) / weight)
            statistics = model.statistics(model.end_step().tolist())
        model.eval().evaluate(NextToken(), microbatches[0])  # leaves nothing behind
        model.train()
    norm = float(scale_and_clip(model, weight, math.inf))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(local_tensor(gradient).dtype == torch.float32 for gradient in gradients.values())
    return Trace(
        names=sorted(initial),
        initial=initial,
        losses=losses,
        norm=norm,
        norms=norms_by_name(model),
        gradients=wholes(model, gradients),
        statistics=statistics,
    )


def nothing_pickled() -> AbstractContextManager[object]:
    """Refuses collectives of objects: a step has none."""
    refusal = AssertionError("an object on its way to other ranks")
    return mock.patch.object(dist.distributed_c10d, "_object_to_tensor", side_effect=refusal)


@torch.no_grad()
def _randomise_gains(model: ParallelModel) -> None:
    """Gains that no format holds exactly: where one is rounded and another is not, it shows."""
    parameters = dict(model.named_parameters())
    for index, name in enumerate(name for name in model.whole.shapes if "norm.weight" in name):
        generator = torch.Generator().manual_seed(index)
        gain = 1 + 0.3 * torch.randn(model.whole.shapes[name], generator=generator)
        if name in parameters:
            local_tensor(parameters[name]).copy_(model.own_part(name, gain))
