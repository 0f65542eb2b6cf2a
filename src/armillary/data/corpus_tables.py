"""Corpora of tables: Parquet files, and data sets of the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from armillary.data.corpus import (
    CorpusConfig,
    Document,
    Source,
    clean_text,
    decode_text,
    find_files,
    unreadable,
)
from armillary.foundation.component import component
from armillary.foundation.errors import Problem, UserError, missing_extra

_ROWS_PER_SOURCE = 1_000
_ASSUMED_ROW_BYTES = 2_000


@component("parquet")
@dataclass(frozen=True, kw_only=True, slots=True)
class Parquet(CorpusConfig):
    """Parquet files: each row of one column is a document (extra `parquet`)."""

    files: tuple[str, ...] = ()
    """Globs; ** also matches folders below, ~ is the home folder."""
    column: str = "text"
    """Column that holds the text."""
    on_bad_text: str = "error"
    """What to do with a row that is not UTF-8: error, replace (with U+FFFD) or skip."""

    def sources(self) -> list[Source]:
        """See `CorpusConfig.sources`."""
        parquet = _pyarrow_parquet()
        sources, problems = [], []
        for file in find_files(self.files):
            try:
                with parquet.ParquetFile(file.path) as table:
                    names, metadata = table.schema_arrow.names, table.metadata
                    sizes = [
                        metadata.row_group(index).total_byte_size
                        for index in range(metadata.num_row_groups)
                    ]
            except OSError as error:
                problems.append(unreadable(str(file.path), error))
                continue
            except ValueError as error:  # pyarrow.ArrowInvalid
                problems.append(Problem(f"{file.path} is not a Parquet file: {error}"))
                continue
            if self.column not in names:
                problems.append(
                    Problem(
                        f"{file.path} has no column {self.column!r}",
                        ", ".join(names),
                        "--data.corpus.column NAME",
                    )
                )
            sources += [file.source(index, index + 1, size) for index, size in enumerate(sizes)]
        if problems:
            raise UserError(problems)
        return sources

    def read(self, source: Source) -> Iterator[Document | Problem]:
        """See `CorpusConfig.read`."""
        try:
            with _pyarrow_parquet().ParquetFile(source.path) as table:
                metadata = table.metadata
                first = sum(metadata.row_group(index).num_rows for index in range(source.start))
                values = table.read_row_group(source.start, columns=[self.column])
                rows = values.column(self.column).to_pylist()
        except OSError as error:
            yield unreadable(source.path, error)
            return
        except ValueError as error:  # pyarrow.ArrowInvalid
            yield Problem(f"{source.path} is not a whole Parquet file: {error}")
            return
        for row, value in enumerate(rows, first):
            yield from _row(f"{source.name}:{row}", f"{source.path} row {row}", value, self)


@component("hugging-face")
@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFace(CorpusConfig):
    """A data set of the Hugging Face hub: each row of one column is a document (extra `hub`)."""

    name: str = ""
    """Name of the data set, for example allenai/c4."""
    config: str = ""
    """Configuration of the data set, for example en; empty is its default."""
    split: str = "train"
    """Split of the data set that is read."""
    column: str = "text"
    """Column that holds the text."""
    on_bad_text: str = "error"
    """What to do with a row that is not proper text: error, replace (with U+FFFD) or skip."""

    def source_problems(self) -> list[Problem]:
        """See `CorpusConfig.source_problems`: without the hub, which may have much to send."""
        if self.name:
            return []
        return [Problem("data.corpus.name is empty", fix="--data.corpus.name OWNER/NAME")]

    def sources(self) -> list[Source]:
        """See `CorpusConfig.sources`."""
        if found := self.source_problems():
            raise UserError(found)
        rows = _hub_dataset(self.name, self.config, self.split)
        if self.column not in rows.column_names:
            raise UserError(
                Problem(
                    f"data.corpus.column = {self.column!r} is not in {self.name}",
                    ", ".join(rows.column_names),
                    "--data.corpus.column NAME",
                )
            )
        stamp = f"{getattr(rows, '_fingerprint', '')} {len(rows)}"
        ends = [*range(_ROWS_PER_SOURCE, len(rows), _ROWS_PER_SOURCE), len(rows)]
        return [
            Source(
                name=self.split,
                start=start,
                end=end,
                size=(end - start) * _ASSUMED_ROW_BYTES,
                stamp=stamp,
            )
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]

    def read(self, source: Source) -> Iterator[Document | Problem]:
        """See `CorpusConfig.read`."""
        rows = _hub_dataset(self.name, self.config, self.split)
        values = rows.select_columns([self.column])[source.start : source.end][self.column]
        for row, value in enumerate(values, source.start):
            yield from _row(f"{source.name}:{row}", f"{self.name} row {row}", value, self)


def _row(
    identifier: str, where: str, value: object, corpus: Parquet | HuggingFace
) -> Iterator[Document | Problem]:
    if value is None:
        return
    if isinstance(value, bytes):
        text = decode_text(value, where, corpus.on_bad_text)
    elif isinstance(value, str):
        text = clean_text(value, lambda: where, corpus.on_bad_text)
    else:
        text = Problem(
            f"{where}: column {corpus.column!r} holds a {type(value).__name__}",
            "text",
            "--data.corpus.column NAME",
        )
    if isinstance(text, Problem):
        yield text
    elif text is not None:
        yield Document(identifier, text)


def _pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_extra("parquet", "data.corpus parquet") from None
    return pyarrow.parquet


@lru_cache(maxsize=4)
def _hub_dataset(name: str, config: str, split: str) -> Any:
    os.environ["HF_DATASETS_TRUST_REMOTE_CODE"] = "0"  # some versions would run it
    try:
        import datasets
    except ImportError:
        raise missing_extra("hub", "data.corpus hugging-face") from None
    try:
        return datasets.load_dataset(name, config or None, split=split)
    except (OSError, ValueError) as error:
        raise UserError(
            Problem(
                f"data.corpus: cannot load {name} ({config or 'default'}, split {split}): {error}",
                fix="check the name, the configuration and the network",
            )
        ) from error
