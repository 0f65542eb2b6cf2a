"""The mesh: named axes over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from armillary.foundation.errors import UserError
from armillary.parallel import process
from armillary.parallel.config import DATA_AXES, Parallel


@dataclass(frozen=True, eq=False)
class Mesh:
    """Which group, which rank, how many. A mesh of one rank is a mesh, without a process group."""

    parallel: Parallel
    """The arrangement, with every degree resolved."""
    device: torch.device
    """Where this rank computes."""
    device_mesh: DeviceMesh | None
    """The axes as torch knows them; None without a process group."""

    @classmethod
    def create(cls, parallel: Parallel, device: torch.device) -> Mesh:
        """Arranges all ranks of the process group; to be called by all of them together.

        Raises:
            UserError: the degrees do not fit the number of ranks.
        """
        if problems := parallel.problems(process.world_size()):
            raise UserError(problems)
        resolved = parallel.resolve(process.world_size())
        if not dist.is_initialized():
            assert process.world_size() == 1, "a run of many ranks joins its process group first"
            return cls(resolved, device, None)
        device_mesh = init_device_mesh(
            device.type, tuple(resolved.degrees.values()), mesh_dim_names=DATA_AXES
        )
        return cls(resolved, device, device_mesh)

    @property
    def axes(self) -> dict[str, int]:
        """Degree of each axis, outermost first."""
        return self.parallel.degrees

    @property
    def data_size(self) -> int:
        """Into how many parts each batch is split."""
        return self.parallel.dp_replicate * self.parallel.dp_shard

    @property
    def data_rank(self) -> int:
        """Which part of each batch is this rank's."""
        if self.device_mesh is None:
            return 0
        replica = self.device_mesh.get_local_rank("dp_replicate")
        return replica * self.parallel.dp_shard + self.device_mesh.get_local_rank("dp_shard")

    @property
    def is_main(self) -> bool:
        """Whether this is the one rank that speaks."""
        return process.is_main()

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of the tensor over all parts of the batch, equal on every rank; a new tensor."""
        total = tensor.detach().clone()
        if self.device_mesh is not None:
            for axis in reversed(DATA_AXES):
                if self.axes[axis] > 1:
                    dist.all_reduce(total, group=self.device_mesh.get_group(axis))
        return total
