"""A small model with the parameter names of a decoder, and its shardings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from armillary.parallel.config import Parallel
from armillary.parallel.data_sharding import shard_over_data
from armillary.parallel.execution import InTurn
from armillary.parallel.layout import Layouts
from armillary.parallel.mesh import Mesh
from armillary.parallel.model import ParallelModel, WholeModel


class Experts(nn.Module):
    """Three matrices side by side, each with a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, width, width) / width)
        self.up_bias = nn.Parameter(torch.zeros(3, width))

    def forward(self, x: Tensor) -> Tensor:
        up = torch.einsum("bsd,efd->ebsf", x, self.up) + self.up_bias[:, None, None]
        return up.tanh().mean(0)


class Block(nn.Module):
    """A tall, a wide and a square matrix, a stack of matrices, a norm and biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 3 * width + 1, bias=False)  # an uneven shard on every mesh
        self.down = nn.Linear(3 * width + 1, width)
        self.mix = nn.Linear(width, width, bias=False)
        self.experts = Experts(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.down(self.up(self.norm(x)).relu()))
        return x + self.experts(x)


class Toy(nn.Module):
    """embedding.weight, layers.{i}.*, norm.weight, head.weight."""

    def __init__(self, width: int = 12, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(21, width)
        self.layers = nn.ModuleDict({str(i): Block(width) for i in range(2)})
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 21, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.layers.values():
            x = block(x)
        return self.head(self.norm(x))


def shard(model: Toy, replicate: int) -> ParallelModel:
    """FSDP over the ranks of the process group, or HSDP for replicate > 1."""
    mesh = Mesh.create(Parallel(dp_replicate=replicate), torch.device("cpu"))
    layouts = Layouts.of(model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    shard_over_data(model, mesh, layouts, torch.float32)
    whole = WholeModel(shapes=shapes, initializers={}, max_seq_len=5)
    return ParallelModel(
        [model], layouts=layouts, mesh=mesh, whole=whole, executor=InTurn(model, mesh)
    )


def backward(model: Toy | ParallelModel, rows: slice, seed: int = 1) -> None:
    """The gradient of the summed loss of some rows of a fixed batch of eight."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 21, (8, 6), generator=generator)[rows]
    (module,) = model.parts if isinstance(model, ParallelModel) else [model]
    logits = module(tokens[:, :-1]).flatten(0, 1)
    nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum").backward()


def rows_of(rank: int, world_size: int) -> slice:
    """This rank's share of the batch of eight."""
    share = 8 // world_size
    return slice(rank * share, (rank + 1) * share)
