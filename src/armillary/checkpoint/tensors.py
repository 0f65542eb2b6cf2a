"""Tensors to and from disk through torch's distributed checkpoint (DCP), and their staged copy.

The one place that talks to DCP. Tensors are plain or DTensors, flat, by dotted name; what ranks
hold in common is written once, and any mesh can read what any other wrote.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from armillary.checkpoint.ranks import Failure, Ranks
from armillary.foundation.errors import Problem, RunError, UserError

# DCP warns whenever it runs without a process group; one process is a mesh, not a mistake.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)

_NAMES_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as a checkpoint knows it, whole."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def held_by_all(tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Stored]:
    """Names, global shapes and dtypes of the tensors that any rank holds, on every rank.

    Stages of a pipeline hold different ones; of ranks that hold the same, one speaks.
    """
    own = {name: Stored(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    digest = hashlib.sha256(repr(sorted((n, s.shape, s.dtype) for n, s in own.items())).encode())
    digests = ranks.together(digest.hexdigest)
    speaks = digests.index(digests[ranks.rank]) == ranks.rank
    tables = ranks.together(lambda: own if speaks else {})
    return {name: stored for table in tables for name, stored in table.items()}


def flatten(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    """Nested dictionaries of tensors as one, keyed by dotted names; shares memory."""
    flat: dict[str, Tensor] = {}
    for name, value in tensors.items():
        below = flatten(value) if isinstance(value, Mapping) else {"": value}
        for rest, tensor in below.items():
            key = f"{name}.{rest}" if rest else name
            assert isinstance(tensor, Tensor), f"{key} is a {type(tensor).__name__}, not a tensor"
            assert key not in flat, f"two tensors are called {key}"
            flat[key] = tensor.detach()
    return flat


def logical_bytes(tensors: Mapping[str, Stored]) -> int:
    """Bytes of all tensors at their global shapes: the size of a checkpoint, headers aside."""
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in tensors.values())


def stage(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A copy in host memory that later training steps do not touch."""
    # A fresh one each time: it would keep its buffers, a second copy of the state, between saves.
    options = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    stager = DefaultStager(options)
    try:
        staged = stager.stage(dict(tensors))
    finally:
        stager.close()
    assert isinstance(staged, dict)
    return staged


def write_tensors(
    tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None
) -> None:
    """Writes each rank's shards into `folder`, files fsynced.

    Raises:
        Failure: some rank could not write.
    """
    writer = FileSystemWriter(folder, sync_files=True, thread_count=1)
    try:
        save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise Failure(_summary(error)) from error


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Names, global shapes and dtypes of the tensors in a checkpoint."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: Stored(tuple(entry.size), entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def read_tensors(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fills the given tensors in place, each rank reading what its own shards need.

    Raises:
        RunError: some rank could not read.
    """
    try:
        load(
            tensors,
            storage_reader=FileSystemReader(folder),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        raise RunError(Problem(f"cannot read checkpoint {folder}: {_summary(error)}")) from error


def require_match(
    folder: Path,
    wanted: Mapping[str, Stored],
    stored: Mapping[str, Stored],
    ignore: tuple[str, ...] = (),
) -> None:
    """Checks names, shapes and dtypes both ways; stored names that start with one in `ignore` may
    stay unread. What is wanted is what all ranks together hold, see `held_by_all`.

    Raises:
        UserError: one problem for each kind of mismatch, naming the tensors.
    """
    missing = [name for name in wanted if name not in stored]
    unread = [name for name in stored if name not in wanted and not name.startswith(ignore)]
    both = [(name, own, stored[name]) for name, own in wanted.items() if name in stored]
    shapes = [
        f"{name} (checkpoint {list(disk.shape)}, model {list(own.shape)})"
        for name, own, disk in both
        if own.shape != disk.shape
    ]
    dtypes = [
        f"{name} (checkpoint {disk.dtype}, model {own.dtype})"
        for name, own, disk in both
        if own.dtype != disk.dtype
    ]
    kinds = {
        "lacks tensors that this recipe needs": missing,
        "holds tensors that this recipe has no place for": unread,
        "holds tensors of other shapes": shapes,
        "holds tensors of other dtypes": dtypes,
    }
    problems = [
        Problem(
            f"checkpoint {folder} {what}: {_shorten(names)}",
            "the model and optimizer that the checkpoint was written with",
            "take the model and optimizer from the recipe.toml of its run, or --resume never",
        )
        for what, names in kinds.items()
        if names
    ]
    if problems:
        raise UserError(problems)


def _shorten(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _summary(error: CheckpointException) -> str:
    """DCP's report without its tracebacks."""
    failures = {rank: cause for rank, (cause, _) in error.failures.items()}
    return "; ".join(
        f"rank {rank}: {type(cause).__name__}: {cause}" for rank, cause in sorted(failures.items())
    )
