"""A process group of any size within one process, whose collectives do nothing.

The one place that touches torch's own test helper for it; `tests/parallel/test_parallel_mesh.py`
names the torch versions that it was tried on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from armillary.parallel import process


@contextmanager
def pretended(world_size: int, rank: int) -> Iterator[None]:
    """Makes this process believe that it is `rank` of `world_size`, until the block ends.

    Models can be built, cut and sharded as in the real run; what a collective returns is undefined.
    """
    assert not dist.is_initialized(), "this process has a process group already"
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        process.destroy()
