"""A small model with the parameter names of a decoder, and its shardings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    """A tall, a wide and a square matrix, a norm and a bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 3 * width + 1, bias=False)  # an uneven shard on every mesh
        self.down = nn.Linear(3 * width + 1, width)
        self.mix = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.down(self.up(self.norm(x)).relu()))


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


def shard(model: Toy, replicate: int, shards: int) -> None:
    """FSDP2 for replicate = 1, HSDP otherwise; gradients are sums over ranks."""
    if replicate == 1:
        mesh = init_device_mesh("cpu", (shards,), mesh_dim_names=("dp_shard",))
    else:
        mesh = init_device_mesh(
            "cpu", (replicate, shards), mesh_dim_names=("dp_replicate", "dp_shard")
        )
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def backward(model: Toy, rows: slice, seed: int = 1) -> None:
    """The gradient of the summed loss of some rows of a fixed batch of eight."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 21, (8, 6), generator=generator)[rows]
    logits = model(tokens[:, :-1]).flatten(0, 1)
    nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum").backward()


def rows_of(rank: int, world_size: int) -> slice:
    """This rank's share of the batch of eight."""
    share = 8 // world_size
    return slice(rank * share, (rank + 1) * share)
