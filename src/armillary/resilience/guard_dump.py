"""A bad step on disk, whole enough to be repeated: RUN/guard/step-00000012/.

    replay.json             what was found, and where the step comes in the run
    rank-00003.safetensors  the rows that this rank computed; ranks that shared them left none

Rows are kept by their place in the global step, so that any mesh can repeat it. Nothing in it is
executed when it is read.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from armillary.data.batch import IGNORED, Batch
from armillary.foundation.errors import Problem, UserError
from armillary.foundation.files import write_atomically
from armillary.models.layers.documents import Documents

GUARD_FOLDER = "guard"
"""In a run folder."""
REPLAY_FILE = "replay.json"
FORMAT = 1
KEPT = 20
"""Dumps that stay, those of the latest steps; a batch may be large, and bad steps many."""

_MOST_STEP = 99_999_999


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """What is known of a bad step."""

    step: int
    """The step that would have been taken, counting from 1."""
    samples: tuple[int, int]
    """Its global sample positions [first, last)."""
    kind: str
    """`not finite` or `spike`."""
    loss: float
    gradient_norm: float
    sample_ids: list[int] = field(default_factory=list)
    """Ids of its samples, in the order of their positions."""
    gradients: dict[str, list[str]] | None = None
    """By rank, names of the gradients that are not finite there; None: nobody looked."""
    checkpoint_step: int = 0
    """Of the newest checkpoint that led to the step; 0: none did."""
    begun_from: str | None = None
    """The other run's checkpoint from which this run began; None: from first weights."""
    jumped: list[list[int]] = field(default_factory=list)
    """Sample positions that the run had jumped over by then."""
    recipe_sha256: str = ""
    world_size: int = 1

    def render(self) -> str:
        """As JSON; a number that JSON cannot say is a word."""
        plain = {"format": FORMAT, **asdict(self)}
        plain["loss"], plain["gradient_norm"] = _plain(self.loss), _plain(self.gradient_norm)
        return json.dumps(plain, indent=1) + "\n"


def dump_folder(run: Path, step: int) -> Path:
    """Where the dump of a step lies in a run folder."""
    return run / GUARD_FOLDER / f"step-{step:08d}"


def dumped_steps(run: Path) -> list[int]:
    """Steps of which there is a whole dump, in order."""
    found = (run / GUARD_FOLDER).glob(f"step-????????/{REPLAY_FILE}")
    words = (path.parent.name.removeprefix("step-") for path in found)
    return sorted(int(word) for word in words if word.isascii() and word.isdecimal())


def clear_dump(folder: Path) -> None:
    """Before any rank writes: files of an earlier dump of the same step would mix with this one's,
    which perhaps other ranks wrote."""
    if folder.is_dir():
        shutil.rmtree(folder)


def write_rows(
    folder: Path, rank: int, microbatches: Sequence[Batch], rows: Sequence[Sequence[int]]
) -> None:
    """Writes this rank's microbatches; `rows` are the places of theirs in the global step."""
    documents = [row for batch in microbatches for row in batch.documents.lengths]
    tensors = {
        "tokens": torch.cat([batch.tokens for batch in microbatches]).int().cpu(),  # [N, S]
        "labels": torch.cat([batch.labels for batch in microbatches]).int().cpu(),  # [N, S]
        "rows": _integers([row for batch in rows for row in batch]),  # [N]
        "sample_ids": _integers([i for batch in microbatches for i in batch.sample_ids]),  # [N]
        "documents": _integers([len(row) for row in documents]),  # [N], how many in each row
        "lengths": _integers([length for row in documents for length in row]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / f"rank-{rank:05d}.safetensors", safetensors.torch.save(tensors))


def write_replay(run: Path, replay: Replay) -> None:
    """Written after all rows: a dump without it is none. Old dumps make room."""
    write_atomically(dump_folder(run, replay.step) / REPLAY_FILE, replay.render())
    others = [step for step in dumped_steps(run) if step != replay.step]
    for step in others[: -(KEPT - 1)]:
        shutil.rmtree(dump_folder(run, step))


def read_replay(run: Path, step: int | None = None) -> Replay:
    """The dump of a step in a run folder; None: of the latest step.

    Raises:
        UserError: there is none, or it is damaged.
    """
    steps = dumped_steps(run)
    if not steps or (step is not None and step not in steps):
        what = "no bad step was dumped" if step is None else f"no step {step} was dumped"
        shown = ", ".join(map(str, steps[-20:]))
        raise UserError(
            Problem(f"{run / GUARD_FOLDER}: {what}", allowed=f"--step {shown}" if steps else None)
        )
    path = dump_folder(run, steps[-1] if step is None else step) / REPLAY_FILE
    try:
        return _replay_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(Problem(f"{path} is damaged: {error}"[:500])) from error


class Rows:
    """The rows of a dumped step.

    Raises:
        UserError: a file is missing or damaged.
    """

    def __init__(self, folder: Path, count: int) -> None:
        """`count`: of the step, padding aside; at least 1."""
        self._rows: dict[int, tuple[Tensor, Tensor, tuple[int, ...], int]] = {}
        for path in sorted(folder.glob("rank-*.safetensors")):
            try:
                self._take(safetensors.torch.load(path.read_bytes()))
            except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
                raise UserError(Problem(f"{path} is damaged: {error}"[:500])) from error
        missing = count - sum(row < count for row in self._rows)
        if missing:
            raise UserError(
                Problem(
                    f"{folder}: {missing} of the step's {count} rows are missing",
                    "the files of all ranks, and of all groups of replicas",
                )
            )
        length = self._rows[0][0].shape[0]
        nothing = torch.full((length,), IGNORED)
        self._padding = torch.zeros_like(nothing), nothing, (length,), -1

    def batch(self, rows: Sequence[int]) -> Batch:
        """The rows at these places of the global step as one batch; past its end, padding."""
        found = [self._rows.get(row, self._padding) for row in rows]
        tokens, labels, lengths, ids = zip(*found, strict=True)
        return Batch(
            tokens=torch.stack(tokens),
            labels=torch.stack(labels),
            documents=Documents.from_lengths(lengths),
            sample_ids=tuple(ids),
        )

    def _take(self, tensors: dict[str, Tensor]) -> None:
        tokens, labels = tensors["tokens"], tensors["labels"]
        rows, ids, documents, lengths = (
            tensors[name].tolist() for name in ("rows", "sample_ids", "documents", "lengths")
        )
        if tokens.dtype != torch.int32 or labels.dtype != torch.int32 or tokens.ndim != 2:
            raise ValueError("tokens and labels are no rows of int32")
        if tokens.shape != labels.shape or min(documents, default=0) < 0:
            raise ValueError("tokens, labels and documents do not fit together")
        cuts = iter(lengths)
        for index, (row, sample, many) in enumerate(zip(rows, ids, documents, strict=True)):
            own = tuple(itertools.islice(cuts, many))
            if sum(own) != tokens.shape[1] or min(own, default=0) < 1:
                raise ValueError(f"the documents of row {row} do not fill it")
            if row < 0 or row in self._rows:
                raise ValueError(f"row {row} is there twice")
            self._rows[row] = tokens[index].long(), labels[index].long(), own, sample


def _integers(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _plain(number: float) -> float | str:
    return number if math.isfinite(number) else repr(number)


def _replay_of(plain: Any) -> Replay:
    """Raises ValueError for what `Replay.render` does not write."""
    if not isinstance(plain, dict) or plain.pop("format", None) != FORMAT:
        raise ValueError(f"not of format {FORMAT}")
    names = {each.name for each in fields(Replay)}
    if set(plain) != names:
        raise ValueError(f"fields {', '.join(sorted(map(str, set(plain) ^ names)))}")
    for name in ("loss", "gradient_norm"):
        plain[name] = _number(plain[name])
    for name in ("step", "checkpoint_step", "world_size"):
        if not _is_whole(plain[name]) or plain[name] > _MOST_STEP:
            raise ValueError(f"{name} is no number of steps or ranks")
    for interval in (plain["samples"], *_list(plain["jumped"])):
        if len(_list(interval)) != 2 or not all(map(_is_whole, interval)):
            raise ValueError("samples are no interval")
    if not all(type(number) is int for number in _list(plain["sample_ids"])):
        raise ValueError("sample_ids are no numbers")
    gradients = plain["gradients"]
    if gradients is not None and not (
        isinstance(gradients, dict)
        and all(isinstance(name, str) for names in gradients.values() for name in _list(names))
    ):
        raise ValueError("gradients are no names by rank")
    if not all(isinstance(plain[name], str) for name in ("kind", "recipe_sha256")):
        raise ValueError("kind or recipe_sha256 is no word")
    if not isinstance(plain["begun_from"], str | None):
        raise ValueError("begun_from is no path")
    return Replay(**plain | {"samples": tuple(plain["samples"])})


def _number(value: Any) -> float:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("loss or gradient_norm is no number")
    return float(value)


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is no list"[:200])
    return value
