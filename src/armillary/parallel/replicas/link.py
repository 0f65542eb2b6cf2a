"""The connections between ranks of the same number in all groups that are there.

The one adapter to the parts of torch that make a process group beside the default one:
`ProcessGroupGloo`, its options and its device. (torch 2.11 to 2.13; the test says which.)

Everything that fails here, because a peer is gone or silent, is a `LinkBroken`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from armillary.parallel.replicas.config import address
from armillary.parallel.replicas.lighthouse import Quorum

_torch: Any = dist  # its stubs do not export what is used of it here

_CONNECT = timedelta(seconds=15)
"""For peers that all come from the same quorum; one of them may be gone since."""

_BUCKET_BYTES = 64 << 20
"""Most that one exchange carries, and so what it needs beside the tensors themselves."""


class LinkBroken(Exception):
    """A peer was lost in an exchange, or was silent for too long."""


class Link:
    """This rank and those of the same number in the other groups.

    All take part in each exchange, in the same order. What travels goes through host memory.

    Args:
        host: address of this machine, at which connections are made.
        timeout_seconds: of one exchange.
    """

    def __init__(self, host: str, timeout_seconds: float) -> None:
        self._host = host
        self._timeout = timedelta(seconds=timeout_seconds)
        self._number: int | None = None
        self._group: Any = None
        self.size = 1

    def connect(self, quorum: Quorum, *, rank: int) -> None:
        """Connects to the members of a quorum, unless these are the connections that there are.

        Args:
            quorum: who.
            rank: of this process in its group.

        Raises:
            LinkBroken: a member went away meanwhile.
        """
        if self._number == quorum.number:
            return
        self.close()
        if quorum.size > 1:
            with _broken():
                self._group = self._connected(quorum, f"quorum-{quorum.number}/rank-{rank}")
        self._number, self.size = quorum.number, quorum.size

    def _connected(self, quorum: Quorum, name: str) -> Any:
        place = address(quorum.store)
        assert place is not None, quorum.store
        store = _torch.TCPStore(
            place[0], place[1], is_master=False, wait_for_workers=False, timeout=_CONNECT
        )
        options = _torch.ProcessGroupGloo._Options()
        options._timeout = _CONNECT
        options._devices = [_torch.ProcessGroupGloo.create_device(hostname=self._host)]
        prefixed = _torch.PrefixStore(name, store)
        return _torch.ProcessGroupGloo(prefixed, quorum.rank, quorum.size, options)

    def close(self) -> None:
        """Ends the connections, so that peers that wait notice."""
        self._group, self._number, self.size = None, None, 1

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sums tensors over the groups, in place; the same bits in each.

        Of dtypes that gloo sums. All groups give tensors of the same shapes.

        Raises:
            LinkBroken: then the tensors hold anything.
        """
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([each.detach().reshape(-1) for each in bucket]).cpu()
            with _broken():
                options = _torch.AllreduceOptions()
                options.timeout = self._timeout
                self._group.allreduce([flat], options).wait()
            parts = torch.split(flat, [each.numel() for each in bucket])
            for each, total in zip(bucket, parts, strict=True):
                each.copy_(total.view_as(each))

    def send(self, tensor: Tensor, to: int) -> None:
        """Sends a tensor's bytes to one group, which calls `receive_`.

        Raises:
            LinkBroken: the receiver is gone.
        """
        for piece in _bytes_of(tensor.detach().cpu().contiguous()):
            with _broken():
                self._group.send([piece], to, 0).wait(self._timeout)

    def receive_(self, tensor: Tensor, origin: int) -> None:
        """Fills a tensor with what a group sends.

        Raises:
            LinkBroken: the sender is gone; the tensor holds anything.
        """
        host = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        for piece in _bytes_of(host):
            with _broken():
                self._group.recv([piece], origin, 0).wait(self._timeout)
        tensor.copy_(host)


@contextlib.contextmanager
def _broken() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:  # what gloo and the store raise
        raise LinkBroken(str(error).partition("\n")[0]) from error


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one dtype and device together, each whole."""
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
        bucket: list[Tensor] = []
        size = 0
        for tensor in (each for each in tensors if (each.dtype, each.device) == kind):
            if bucket and size + tensor.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def _bytes_of(tensor: Tensor) -> Iterator[Tensor]:
    """Pieces of a contiguous tensor's memory, as bytes."""
    if tensor.numel() == 0:
        return
    raw = tensor.view(-1).view(torch.uint8)
    yield from torch.split(raw, _BUCKET_BYTES)
