"""How likely a model finds texts: packed rows through the live model, on any mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from armillary.checkpoint.ranks import Ranks
from armillary.evaluation.items import Likelihood, Request
from armillary.foundation.progress import Progress
from armillary.inference.rows import Reading, Rows
from armillary.inference.undisturbed import Mishaps
from armillary.models.layers.embedding import Head
from armillary.parallel.grid import DATA_AXES
from armillary.parallel.model import ParallelModel

Sums = Callable[[Sequence[int]], tuple[int, ...]]
"""The sums of numbers over all ranks; may raise to leave early, on all ranks alike."""

_DEALT_AXES = (*DATA_AXES, "cp")
"""Axes over which rows are dealt. Of whole rows nothing is exchanged over cp."""

_LOGITS_AT_ONCE = 256
"""Tokens whose logits exist at one time."""


class ScoringFailed(Exception):
    """Some rank could not score, in words; raised on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer:
    """Asks one model. Every rank has one and calls it alike, inside `undisturbed`."""

    model: ParallelModel
    row_length: int
    """Tokens of a row; what is longer is cut, or read in windows, see `rows.pieces_of`."""
    stride: int
    """Inputs between windows of a text that is longer than a row."""
    rows_at_once: int
    """Rows that a rank reads in one forward pass."""
    vocab_size: int
    """Tokens that the tokenizer has; the likeliest is sought among them."""
    ranks: Ranks
    sums: Sums
    progress: Progress

    def score(self, requests: Sequence[Request], label: str) -> list[Likelihood]:
        """One answer to each request, in order; the same on all ranks of a replica of the data.

        Each token is scored by one rank. A request's sum is made in float64, in one order, whatever
        the mesh.

        Raises:
            ScoringFailed: some rank failed, or there is a token that the tokenizer does not have;
                on every rank.
        """
        self._require_tokens(requests)
        rows = Rows(requests, length=self.row_length, stride=self.stride, at_once=self.rows_at_once)
        mesh, mishaps = self.model.mesh, Mishaps()
        dealt = mesh.data_size * mesh.degree("cp")
        place = mesh.data_rank * mesh.degree("cp") + mesh.coordinate("cp")
        found = np.zeros((2, len(rows.pieces)))
        with (
            mishaps.watching(self.model),
            self.progress.task(label, total=rows.n_rows, unit="rows") as advance,
        ):
            for first in range(0, rows.n_readings, dealt):
                self._read(rows, first + place, found, mishaps)
                self._agree(mishaps)
                advance(min(dealt * rows.at_once, rows.n_rows - first * rows.at_once))
        everywhere = mesh.sum_over(torch.from_numpy(found).to(mesh.device), _DEALT_AXES)
        return _answers(requests, rows, everywhere.cpu().numpy())

    def _require_tokens(self, requests: Sequence[Request]) -> None:
        """A row that the embedding does not have would be the end of a GPU's process."""
        for request in requests:
            for token in (*request.context, *request.continuation):
                if not 0 <= token < self.vocab_size:
                    raise ScoringFailed(f"the tokenizer has no token {token}")

    def _read(self, rows: Rows, index: int, found: NDArray[np.float64], mishaps: Mishaps) -> None:
        """Adds what one forward pass finds of each piece: nats, and tokens that are not likeliest.

        Also where it fails this rank takes part in the forward pass.
        """
        device, padding = self.model.device, rows.n_readings
        reading = mishaps.attempt(
            lambda: rows.reading(index).to(device), lambda: rows.reading(padding).to(device)
        )
        values = self.model(
            reading.tokens,
            reading.documents,
            output=lambda hidden, head: mishaps.attempt(
                lambda: self._values(hidden, head, reading),
                lambda: hidden.new_full((2, *hidden.shape[:2]), math.nan, dtype=torch.float64),
            ),
        )

        def add() -> None:
            own = values.flatten(1)[:, reading.places].double().cpu().numpy()
            for total, each in zip(found, own, strict=True):
                np.add.at(total, reading.pieces, each)

        mishaps.attempt(add, lambda: None)

    def _values(self, hidden: Tensor, head: Head, reading: Reading) -> Tensor:
        """`[2, B, S]` fp64 at scored inputs: nats of the label, and whether another is likelier."""
        values = hidden.new_zeros((2, hidden.shape[0] * hidden.shape[1]), dtype=torch.float64)
        flat = hidden.flatten(0, 1)
        for begin in range(0, len(reading.places), _LOGITS_AT_ONCE):
            some = slice(begin, begin + _LOGITS_AT_ONCE)
            places, labels = reading.places[some], reading.labels[some]
            logits = head.logits(flat[places][None])[0]  # [C, V]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            chosen = logits.gather(1, labels[:, None])[:, 0]
            values[0, places] = (logits.logsumexp(dim=-1) - chosen).double()
            likeliest = logits[:, : self.vocab_size].argmax(dim=-1)
            values[1, places] = (likeliest != labels).double()
        return values.view(2, *hidden.shape[:2])

    def _agree(self, mishaps: Mishaps) -> None:
        """Between forward passes: whether all ranks go on."""
        (failed,) = self.sums((int(bool(mishaps.words)),))
        if failed:
            words = self.ranks.together(lambda: mishaps.words)
            told = [f"rank {rank}: {each}" for rank, each in enumerate(words) if each]
            raise ScoringFailed("; ".join(told) if len(words) > 1 else words[0])


def _answers(
    requests: Sequence[Request], rows: Rows, found: NDArray[np.float64]
) -> list[Likelihood]:
    """Sums over the pieces of each request, in their order."""
    nats, misses, tokens = ([0.0] * len(requests) for _ in range(3))
    for piece, cost, missed in zip(rows.pieces, *found.tolist(), strict=True):
        nats[piece.request] += cost
        misses[piece.request] += missed
        tokens[piece.request] += piece.scored
    return [
        Likelihood(cost, missed == 0, int(count))
        for cost, missed, count in zip(nats, misses, tokens, strict=True)
    ]
