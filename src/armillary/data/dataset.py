"""Packed samples by global position. Batches are pure functions of positions; there is no state.

Training runs over positions 0, 1, 2, ... for ever. Which sample stands at a position follows from
(seed, epoch, position) alone (see order.py), so the whole data state of a run is one cursor, the
next position, and a fingerprint that says over what it counts. World size, microbatches and
prefetching decide who reads a position and when, never what stands there. A later stage of a run
counts on, over a dataset of its own: see standing.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from armillary.data import order
from armillary.data.batch import IGNORED, Batch
from armillary.data.mixture import Interleaving
from armillary.data.packing import Concatenate, Flags, Packing, PackingConfig, PieceRows, Sample
from armillary.data.splits import Bits, Split
from armillary.data.standing import Standing, Start, order_seed, readings
from armillary.foundation.errors import Problem, UserError
from armillary.models.layers.documents import Documents

if TYPE_CHECKING:
    from armillary.data.config import Data
    from armillary.data.token_store import TokenStore

Integers = NDArray[np.int64]

ID_BITS = 40
"""A sample's id is corpus * 2**ID_BITS + its index in the corpus' packing."""

_PADDING_ID = -1
_VALIDATION_SEED = 0x5EED


class PackedDataset:
    """The training samples of one corpus, or of a mixture of corpora.

    Args:
        splits: the tokens of each corpus.
        packing: how documents become samples.
        seq_len: inputs in a sample.
        seed: of the order; each epoch of each corpus has an order of its own.
        shuffle: False keeps the order of the packing, in every epoch.
        weights: how often each corpus is sampled, in proportion; None is by number of samples.
        source: fingerprint of the stores that the splits come from.
        starts: where each corpus is begun; None: each at its first sample, in an order of its own.
        begin: the first global position, where the dataset is that of a later stage.

    Raises:
        UserError: a corpus does not hold one sample, or a weight is impossible.
    """

    def __init__(
        self,
        splits: Split | Sequence[Split],
        packing: PackingConfig | None = None,
        *,
        seq_len: int,
        seed: int = 0,
        shuffle: bool = True,
        weights: Sequence[float] | None = None,
        source: str = "",
        starts: Sequence[Start] | None = None,
        begin: int = 0,
    ) -> None:
        self._splits = [splits] if isinstance(splits, Split) else list(splits)
        config = packing or Concatenate()
        self._plans = [_plan(config, split, seq_len) for split in self._splits]
        self._shuffle, self.seq_len, self._begin = shuffle, seq_len, begin
        plain = tuple(Start(order_seed(seed, corpus)) for corpus in range(len(self._splits)))
        self._starts = plain if starts is None else tuple(starts)
        sizes = [plan.n_samples for plan in self._plans]
        self._mixture = Interleaving(weights if weights is not None else sizes)
        assert len(self._mixture.counts) == len(self._splits), "one weight for each corpus"
        assert len(self._starts) == len(self._splits), "one start for each corpus"
        self.samples_per_epoch = sum(sizes)
        """Samples of all corpora together. In a mixture each corpus has epochs of its own."""
        self.fingerprint = _digest(
            "training", source, seq_len, seed, shuffle, self._mixture.counts, config,
            *(part for s, p in zip(self._splits, self._plans, strict=True)
              for part in (s.n_tokens, s.n_documents, p.fingerprint)),
            *(() if (begin, self._starts) == (0, plain) else (begin, self._starts)),
        )  # fmt: skip
        """SHA-256 of all that decides which tokens stand at a position."""

    def sample_ids(self, positions: Sequence[int] | Integers) -> tuple[int, ...]:
        """The ids of the samples at global positions."""
        corpora, samples = self._locate(np.asarray(positions, dtype=np.int64))
        return tuple(((corpora << ID_BITS) + samples).tolist())

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a person should know of documents that the packing does not use."""
        found = (getattr(plan, "remark", "") for plan in self._plans)  # a packing may be anyone's
        return tuple(filter(None, found))

    def epochs(self, position: int) -> tuple[float, ...]:
        """How many times each corpus has been read when the cursor stands at `position`."""
        return tuple(
            (start.position + self._mixture.count_before(position - self._begin, corpus))
            / plan.n_samples
            for corpus, (plan, start) in enumerate(zip(self._plans, self._starts, strict=True))
        )

    def batch(self, first: int, last: int, rows: Sequence[int] | None = None) -> Batch:
        """The samples at global positions [first, last), or those of `rows` counted from `first`.

        A rank of many asks for its own rows; all ranks' rows together are the same global batch.
        Rows from `last` on are padding that weighs nothing, so that ranks can have equally many.
        """
        assert self._begin <= first < last
        chosen = range(last - first) if rows is None else rows
        positions = np.fromiter((first + row for row in chosen), np.int64, len(chosen))
        assert positions.size == 0 or positions.min() >= first
        corpora, samples = self._locate(positions)
        there = (positions < last).tolist()
        return _assemble(
            [
                (self._splits[corpus], self._plans[corpus].sample(sample)) if is_there else None
                for corpus, sample, is_there in zip(
                    corpora.tolist(), samples.tolist(), there, strict=True
                )
            ],
            np.where(positions < last, (corpora << ID_BITS) + samples, _PADDING_ID).tolist(),
            self.seq_len,
        )

    def sample(self, sample_id: int) -> tuple[Split, Sample]:
        """The split that a sample is of, and where in its tokens it stands."""
        corpus, index = sample_id >> ID_BITS, sample_id & ((1 << ID_BITS) - 1)
        return self._splits[corpus], self._plans[corpus].sample(index)

    def _locate(self, positions: Integers) -> tuple[Integers, Integers]:
        """(corpus, sample of its packing) at each global position."""
        corpora, local = self._mixture.locate(positions - self._begin)
        samples = np.empty_like(local)
        for corpus, (plan, start) in enumerate(zip(self._plans, self._starts, strict=True)):
            here = corpora == corpus
            epochs, within = np.divmod(start.position + local[here], plan.n_samples)
            samples[here] = (
                order.index(start.seed, epochs, within, plan.n_samples) if self._shuffle else within
            )
        return corpora, samples


def _plan(config: PackingConfig, split: Split, seq_len: int) -> Packing:
    """The packing of a split; where tokens are only read, without samples that teach nothing."""
    plan = config.build(split.document_offsets, seq_len)
    return plan if split.scored is None else _Learned(plan, split)


class _Learned:
    """The samples of a packing that have a label."""

    def __init__(self, plan: Packing, split: Split) -> None:
        found = (_counted(split, plan.sample(index)).any() for index in range(plan.n_samples))
        self._kept = np.flatnonzero(np.fromiter(found, np.bool_, plan.n_samples))
        self._plan = plan
        self.n_samples = len(self._kept)
        self.fingerprint = _digest("learned", plan.fingerprint, self._kept.tolist())
        self.remark: str = getattr(plan, "remark", "")
        if not self.n_samples:
            message = "data.corpus: no sample holds a token to learn"
            raise UserError(Problem(message, fix="a longer --budget.seq-len, or another corpus"))

    def sample(self, index: int) -> Sample:
        """See `Packing.sample`."""
        return self._plan.sample(int(self._kept[index]))


def training_set(
    store: TokenStore, data: Data, *, seq_len: int, seed: int, standing: Standing | None = None
) -> PackedDataset:
    """The training samples that a recipe's `data` makes of its token store.

    Args:
        standing: where the run stands when the stage begins that reads them; None: at its start.
    """
    standing = standing or Standing()
    return PackedDataset(
        store.train,
        data.packing,
        seq_len=seq_len,
        seed=seed,
        shuffle=data.shuffle,
        weights=store.weights if len(store.train) > 1 else None,
        source=store.fingerprint,
        starts=standing.starts(readings(store, data, seq_len), seed),
        begin=standing.position,
    )


class ValidationDataset:
    """Held-out documents, every token of them (but each document's first) scored exactly once.

    Rows do not depend on the packing of the training data, nor on seed, mesh or batch: the same
    documents and the same sum of losses for everyone. Documents longer than a row are read in
    windows that begin every `stride` inputs and score only what no earlier window scored, so that
    seq_len - stride inputs of context come before what is scored.

    Args:
        split: the held-out split.
        seq_len: inputs in a row.
        stride: inputs between windows of one document; None is seq_len, no context.
        limit: rows' worth of tokens at most: whole documents, a fixed pseudo-random choice among
            those that fit, at least one; 0 is the whole split.
        source: fingerprint of the store that the split comes from.

    Raises:
        UserError: nothing in the split can be scored, or the stride is not in [1, seq_len].
    """

    def __init__(
        self,
        split: Split,
        *,
        seq_len: int,
        stride: int | None = None,
        limit: int = 0,
        source: str = "",
    ) -> None:
        stride = seq_len if stride is None else stride
        if not 1 <= stride <= seq_len:
            raise UserError(
                Problem(
                    f"validation windows begin every {stride} tokens and are "
                    f"budget.seq_len = {seq_len} long, so some tokens would not be read",
                    f"1 to {seq_len}",
                    f"--validation.final-stride {seq_len // 2 or 1}",
                )
            )
        self._split, self.seq_len = split, seq_len
        documents = _choose_documents(split, limit * seq_len)
        self._plan = PieceRows(split.document_offsets, seq_len, stride=stride, documents=documents)
        self.n_rows = self._plan.n_samples
        """Rows that hold something to score."""
        self.n_tokens = (
            self._plan.n_scored if split.scored is None else _scored_labels(split, documents)
        )
        """Labels that are scored, the denominator of the loss."""
        self.n_bytes = int(split.document_bytes[documents].sum()) - split.unscored_bytes(documents)
        """Bytes of the text that is scored, the denominator of bits per byte."""
        self.documents = documents
        """Indices of the documents in the split."""
        self.fingerprint = _digest("validation", source, split.n_tokens, self._plan.fingerprint)
        """SHA-256 of all that decides what is scored."""

    def batch(self, first: int, last: int, rows: Sequence[int] | None = None) -> Batch:
        """Rows [first, last), or those of `rows` counted from `first`.

        Rows from n_rows on are padding that scores nothing, so that all ranks can make the same
        number of calls.
        """
        assert 0 <= first < last
        chosen = [first + row for row in (range(last - first) if rows is None else rows)]
        return _assemble(
            [
                (self._split, self._plan.sample(row)) if row < self.n_rows else None
                for row in chosen
            ],
            [row if row < self.n_rows else _PADDING_ID for row in chosen],
            self.seq_len,
        )


def _assemble(
    samples: Sequence[tuple[Split, Sample] | None], sample_ids: list[int], seq_len: int
) -> Batch:
    """Reads the tokens of the samples; None is a row of padding."""
    tokens = np.zeros((len(samples), seq_len), dtype=np.int64)  # [B, S]
    labels = np.full((len(samples), seq_len), IGNORED, dtype=np.int64)  # [B, S]
    lengths: list[tuple[int, ...]] = []
    for row, entry in enumerate(samples):
        if entry is None:
            lengths.append((seq_len,))
            continue
        split, sample = entry
        size = len(sample.scored)
        tokens[row, :size] = split.tokens[sample.inputs]
        following = _following(split.tokens, sample.inputs)
        labels[row, : len(following)] = following
        labels[row, :size][~_counted(split, sample)] = IGNORED
        padding = seq_len - size
        lengths.append((*sample.lengths, padding) if padding else sample.lengths)
    return Batch(
        tokens=torch.from_numpy(tokens),
        labels=torch.from_numpy(labels),
        documents=Documents.from_lengths(tuple(lengths)),
        sample_ids=tuple(sample_ids),
    )


def _counted(split: Split, sample: Sample) -> Flags:
    """[inputs] which labels count: those that the packing scores and that are to be predicted."""
    if split.scored is None:
        return sample.scored
    predicted = _following(split.scored, sample.inputs)
    counted = sample.scored.copy()
    counted[: len(predicted)] &= predicted
    return counted


def _following(stream: NDArray[Any] | Bits, inputs: slice | Integers) -> NDArray[Any]:
    """What stands after each input; shorter by one where the stream ends with the last input."""
    following: NDArray[Any] = (
        stream[inputs.start + 1 : inputs.stop + 1]
        if isinstance(inputs, slice)
        else stream[inputs + 1]
    )
    return following


def _scored_labels(split: Split, documents: Integers) -> int:
    """How many tokens of some documents are predicted, where parts of them are only read."""
    assert split.scored is not None
    offsets = split.document_offsets
    firsts, ends = (offsets[documents] + 1).tolist(), offsets[documents + 1].tolist()
    return sum(int(split.scored[first:end].sum()) for first, end in zip(firsts, ends, strict=True))


def _choose_documents(split: Split, inputs: int) -> Integers:
    """Documents with something to score, at most `inputs` of it (0: all), in order."""
    sizes = np.diff(split.document_offsets) - 1
    documents = np.flatnonzero((sizes > 0) & (split.document_bytes > 0))
    if not documents.size:
        raise UserError(
            Problem(
                f"the validation split has {split.n_tokens} tokens in {split.n_documents} "
                "documents: nothing to score",
                "at least one document with text and 2 tokens",
                "--data.validation-fraction 0.1, or a larger corpus",
            )
        )
    if inputs:
        mixed = documents[
            order.index(_VALIDATION_SEED, 0, np.arange(len(documents)), len(documents))
        ]
        fit = mixed[sizes[mixed] <= inputs]  # or one large document would end the choice
        chosen = fit[np.cumsum(sizes[fit]) <= inputs]
        if not chosen.size:
            chosen = mixed[[np.argmin(sizes[mixed])]]
        documents = np.sort(chosen)
    return documents


def _digest(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()
