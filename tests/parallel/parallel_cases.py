"""One step of a tiny model on any arrangement of ranks, for comparison with one process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from armillary.kernels import linear_cross_entropy
from armillary.models.layers.documents import Documents
from armillary.models.llama.config import Llama
from armillary.parallel import Scale, process
from armillary.parallel.data_sharding import set_accumulation
from armillary.parallel.materialise import materialise
from armillary.parallel.mesh import Mesh
from armillary.parallel.parallelize import parallelize

ROWS, LENGTH, VOCABULARY = 8, 16, 67  # 67 rows divide by no number of ranks
SEED = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a run of the tiny model varies."""

    scale: Scale = field(default_factory=Scale)
    microbatches: int = 1
    tied: bool = False


@dataclass(frozen=True)
class Trace:
    """What must not depend on the arrangement; whole tensors, on every rank."""

    names: list[str]
    initial: str
    losses: list[float]
    gradients: dict[str, Tensor]


def traces(cases: list[Case]) -> list[Trace]:
    """The cases in turn, in this process or over the ranks of its group."""
    return [_trace(case) for case in cases]


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be split over ranks."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def tiny(*, tied: bool = False) -> Llama:
    """Two blocks, odd widths; all parameters together below 20 thousand."""
    return Llama(
        vocab_size=VOCABULARY,
        dim=24,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        head_dim=12,
        ffn_dim=37,
        max_seq_len=LENGTH,
        tied_embeddings=tied,
    )


def _trace(case: Case) -> Trace:
    mesh = Mesh.create(case.scale.parallel, process.choose_device("cpu"))
    with torch.device("meta"):
        model = tiny(tied=case.tied).build()
    parallelize(model, mesh, case.scale)
    materialise(model, mesh.device, SEED)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(full(parameter).numpy().tobytes())

    generator = torch.Generator().manual_seed(1)
    _randomise_gains(model, generator)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    for row in range(ROWS):
        labels[row, LENGTH - row :] = -100  # ragged: ranks hold different numbers of valid labels
    lengths = [(3 + row % 4, LENGTH - 3 - row % 4) for row in range(ROWS)]
    weight = int((labels != -100).sum())
    losses = []
    for _ in range(2):  # the second step shows state that the first one left behind
        model.zero_grad()
        loss = torch.zeros(())
        own = ROWS // mesh.data_size
        part = own // case.microbatches
        first = mesh.data_rank * own
        for index in range(case.microbatches):
            set_accumulation(model, mesh, last=index == case.microbatches - 1)
            rows = slice(first + index * part, first + (index + 1) * part)
            output = partial(_loss, labels=labels[rows])
            documents = Documents.from_lengths(lengths[rows])
            term = model(tokens[rows], documents, output=output) / weight
            term.backward()
            loss += term.detach()
        losses.append(float(mesh.sum_over_data(loss)))
        with torch.no_grad():  # validation between steps leaves nothing behind
            model(tokens[:2], output=partial(_loss, labels=labels[:2]))
    gradients = {
        name: full(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return Trace(names, digest.hexdigest(), losses, gradients)


@torch.no_grad()
def _randomise_gains(model: nn.Module, generator: torch.Generator) -> None:
    """Gains that no format holds exactly: where one is rounded and another is not, it shows."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            gain = 1 + 0.3 * torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                gain = distribute_tensor(
                    gain, parameter.device_mesh, parameter.placements, src_data_rank=None
                )
            parameter.copy_(gain)


def _loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return linear_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten())
