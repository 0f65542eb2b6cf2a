"""What a step of a run, or one of its samples, really sees: from the batch that training gets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from armillary.foundation.errors import Problem, UserError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from armillary.data.dataset import PackedDataset
    from armillary.data.packing import Sample
    from armillary.data.splits import Split
    from armillary.data.token_store import TokenStore
    from armillary.foundation.progress import Progress
    from armillary.recipe.recipe import Recipe
    from armillary.recipe.stages import Span

UNSCORED = ("⟦", "⟧")
"""Stand around what is only read: nothing predicts it, or the corpus's masks leave it out."""

Facts = dict[str, Any]


@dataclass(frozen=True)
class _View:
    """The samples that one stage of a run reads."""

    span: Span
    store: TokenStore
    dataset: PackedDataset
    first: int
    """Global position of the stage's first sample."""

    @property
    def sequences(self) -> int:
        """Samples of a step."""
        budget = self.span.recipe.budget
        return budget.batch_tokens // budget.seq_len


def build_stores(recipe: Recipe, progress: Progress) -> list[TokenStore]:
    """The token stores of a recipe's stages, each built where it is not yet; equal ones are one.

    Raises:
        UserError, RunError: as `build`.
    """
    from armillary.data.store import build
    from armillary.recipe.stages import spans_of

    stores: list[TokenStore] = []
    spans = spans_of(recipe)
    for span, before in zip(spans, [None, *spans], strict=False):
        if before is not None and before.recipe.data == span.recipe.data:
            stores.append(stores[-1])
        else:
            stores.append(build(span.recipe.data, progress))
    return stores


def inspect_step(recipe: Recipe, step: int, rows: int, progress: Progress) -> Facts:
    """What an optimizer step reads, with its first rows in words.

    Args:
        recipe: of the run, which is taken to be undisturbed.
        step: counting from 1.
        rows: how many rows are put in words.
        progress: shows a store being built.

    Raises:
        UserError: the run has no such step; or as `build`.
    """
    if not 1 <= step <= recipe.total_steps:
        raise UserError(Problem(f"--step {step}", f"1 to {recipe.total_steps}, the run's steps"))
    view = next(view for view in _views(recipe, progress) if step <= view.span.last)
    first = view.first + (step - 1 - view.span.first) * view.sequences
    batch = view.dataset.batch(first, first + view.sequences)
    samples = [view.dataset.sample(sample_id) for sample_id in batch.sample_ids]
    seen = sum(len(sample.scored) for _, sample in samples)
    return {
        "step": step,
        "stage": _stage(recipe, view),
        "positions": [first, first + view.sequences],
        "sequences": view.sequences,
        "seq_len": view.dataset.seq_len,
        "inputs": seen,
        "counted": int((batch.labels >= 0).sum()),
        "padding": view.sequences * view.dataset.seq_len - seen,
        "padding_share": 1 - seen / (view.sequences * view.dataset.seq_len),
        "shares": _shares(view, batch.sample_ids, samples),
        "sample_ids": list(batch.sample_ids),
        "rows": [_row(view, first + row) for row in range(min(rows, view.sequences))],
    }


def inspect_sample(recipe: Recipe, position: int, progress: Progress) -> Facts:
    """The sample at a global position of an undisturbed run, in words."""
    views = list(_views(recipe, progress))
    return _row([view for view in views if view.first <= position][-1], position)


def _views(recipe: Recipe, progress: Progress) -> Iterator[_View]:
    """What each stage reads, in turn."""
    from armillary.data.dataset import training_set
    from armillary.recipe.stages import spans_of
    from armillary.training.assembly import standing_at

    stores = build_stores(recipe, progress)
    borders: list[int] = []
    for span in spans_of(recipe):
        budget, store = span.recipe.budget, stores[span.index]
        dataset = training_set(
            store,
            span.recipe.data,
            seq_len=budget.seq_len,
            seed=span.recipe.seed,
            standing=standing_at(recipe, stores, borders),
        )
        view = _View(span, store, dataset, borders[-1] if borders else 0)
        yield view
        borders.append(view.first + (span.last - span.first) * view.sequences)


def _stage(recipe: Recipe, view: _View) -> Facts | None:
    """Which stage; none of a run without."""
    if not recipe.stages:
        return None
    span, wanted = view.span, recipe.stages[view.span.index].set
    return {
        "index": span.index,
        "name": span.name,
        "steps": [span.first + 1, span.last],
        "set": list(wanted),
    }


def _shares(
    view: _View, sample_ids: Sequence[int], samples: Sequence[tuple[Split, Sample]]
) -> list[Facts]:
    """By corpus of the mixture, what the step has of it and what the recipe gives it."""
    from armillary.data.dataset import ID_BITS

    corpora = [sample_id >> ID_BITS for sample_id in sample_ids]
    weights = view.store.weights
    shares = []
    for part, (facts, weight) in enumerate(zip(view.store.manifest["parts"], weights, strict=True)):
        inputs = [
            len(sample.scored)
            for (_, sample), corpus in zip(samples, corpora, strict=True)
            if corpus == part
        ]
        shares.append(
            {
                "part": part,
                "corpus": facts["corpus"],
                "samples": len(inputs),
                "inputs": sum(inputs),
                "of_step": len(inputs) / len(samples),
                "of_recipe": weight / sum(weights),
            }
        )
    return shares


# Rows ----------------------------------------------------------------------------------------


def _row(view: _View, position: int) -> Facts:
    """One sample: its inputs as batched, and the documents that they come from."""
    from armillary.data.dataset import ID_BITS

    batch = view.dataset.batch(position, position + 1)
    (sample_id,) = batch.sample_ids
    split, sample = view.dataset.sample(sample_id)
    tokens, labels = batch.tokens[0].numpy(), batch.labels[0].numpy()
    positions = batch.documents.positions[0].tolist()
    edges = [0, *itertools.accumulate(sample.lengths)]
    return {
        "position": position,
        "sample_id": sample_id,
        "part": sample_id >> ID_BITS,
        "inputs": edges[-1],
        "counted": int((labels >= 0).sum()),
        "padding": view.dataset.seq_len - edges[-1],
        "documents": [
            {
                **_source(split, sample, begin, end),
                "first_position": positions[begin],
                "last_position": positions[end - 1],
                **_text(view.store, tokens[begin:end], labels[begin:end]),
            }
            for begin, end in itertools.pairwise(edges)
        ],
    }


def _source(split: Split, sample: Sample, begin: int, end: int) -> Facts:
    """Which part of which document inputs [begin, end) of a row are."""
    import numpy as np

    inputs = sample.inputs
    at = inputs.start + begin if isinstance(inputs, slice) else int(inputs[begin])
    document = int(np.searchsorted(split.document_offsets, at, side="right")) - 1
    first, last = (int(offset) for offset in split.document_offsets[document : document + 2])
    return {
        "id": split.ids[document].encode("utf-8", "replace").decode("utf-8"),
        "begin": begin,
        "inputs": end - begin,
        "first_token": at - first,
        "document_tokens": last - first,
    }


def _text(store: TokenStore, tokens: NDArray[np.int64], labels: NDArray[np.int64]) -> Facts:
    """The inputs of a document in words, and in stretches of what counts and what is only read.

    An input counts where it is the label of the one before. The label of the last one is no input,
    but stands at the end of what is predicted.
    """
    import numpy as np

    counts = np.append(False, labels >= 0)[: len(tokens) + int(labels[-1] >= 0)]
    shown = np.append(tokens, labels[-1])[: len(counts)]
    edges = np.flatnonzero(np.diff(counts.astype(np.int8))) + 1
    bounds = [0, *edges.tolist(), len(shown)]

    def decoded(ids: NDArray[np.int64]) -> str:
        return store.tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    return {
        "counted": int((labels >= 0).sum()),
        "text": decoded(tokens),
        "stretches": [
            {"counted": bool(counts[begin]), "text": decoded(shown[begin:end])}
            for begin, end in itertools.pairwise(bounds)
        ],
    }


# For people ----------------------------------------------------------------------------------


def step_lines(facts: Facts) -> Iterator[str]:
    """What `inspect_step` found."""
    stage = facts["stage"]
    of_stage = f" (stage {stage['name']}: {', '.join(stage['set'])})" if stage else ""
    first, last = facts["positions"]
    yield (
        f"step {facts['step']:,}{of_stage}: samples [{first:,}, {last:,}), "
        f"{facts['sequences']:,} sequences of {facts['seq_len']:,}"
    )
    yield (
        f"{facts['inputs']:,} inputs, {facts['counted']:,} labels count, "
        f"{facts['padding']:,} of padding ({facts['padding_share']:.2%})"
    )
    if len(facts["shares"]) > 1:
        for share in facts["shares"]:
            yield (
                f"part {share['part']} ({share['corpus']}): {share['samples']:,} samples, "
                f"{share['of_step']:.2%} of the step, {share['of_recipe']:.2%} of the recipe"
            )
    opened, closed = UNSCORED
    yield f"{opened}...{closed} is only read; everything else is predicted"
    for row in facts["rows"]:
        yield ""
        yield from row_lines(row)
    if hidden := facts["sequences"] - len(facts["rows"]):
        yield f"\n... and {hidden:,} samples more: --rows N shows so many"


def row_lines(row: Facts) -> Iterator[str]:
    """One sample of `inspect_step`, or that of `inspect_sample`."""
    yield (
        f"sample at position {row['position']} (id {row['sample_id']}): "
        f"{row['inputs']} inputs, {row['counted']} labels count"
    )
    for number, piece in enumerate(row["documents"], 1):
        begin, end = piece["begin"], piece["begin"] + piece["inputs"]
        after = piece["first_token"] + piece["inputs"]
        yield (
            f"\n--- document {number} of {len(row['documents'])}: {piece['id']}"
            f"\n    inputs [{begin}, {end}) at positions {piece['first_position']} to "
            f"{piece['last_position']}; tokens [{piece['first_token']}, {after}) of "
            f"{piece['document_tokens']}; {piece['counted']} labels count\n"
            + _marked(piece["stretches"])
        )
    if row["padding"]:
        yield f"\n--- {row['padding']} inputs of padding"


def _marked(stretches: list[Facts]) -> str:
    opened, closed = UNSCORED
    return "".join(
        each["text"] if each["counted"] else f"{opened}{each['text']}{closed}" for each in stretches
    )
