"""Corpora of tables: Parquet files, and data sets of the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from armillary.data.corpus import CorpusConfig, Document, Source, clean_text, decode_text
from armillary.data.files import look_up
from armillary.data.tables import column_values, read_rows, table_sources
from armillary.foundation.component import component
from armillary.foundation.errors import Problem, UserError, missing_extra

_ROWS_PER_SOURCE = 1_000
_ASSUMED_ROW_BYTES = 2_000
_WRITTEN_BY_SAVE_TO_DISK = ("state.json", "dataset_dict.json")


@component("parquet")
@dataclass(frozen=True, kw_only=True, slots=True)
class Parquet(CorpusConfig):
    """Parquet files: each row of one column is a document (extra `parquet`)."""

    files: tuple[str, ...] = ()
    """Globs of paths, or of s3://, gs://, az:// or hf:// addresses; ** also matches folders."""
    column: str = "text"
    """Column that holds the text."""
    on_bad_text: str = "error"
    """What to do with a row that is not UTF-8: error, replace (with U+FFFD) or skip."""

    def sources(self) -> list[Source]:
        """See `CorpusConfig.sources`."""
        return table_sources(self.files, (self.column,))

    def read(self, source: Source) -> Iterator[Document | Problem]:
        """See `CorpusConfig.read`."""
        for found in read_rows(source, (self.column,)):
            if isinstance(found, Problem):
                yield found
                continue
            row, values = found
            where = f"{source.path} row {row}"
            yield from _row(f"{source.name}:{row}", where, values[self.column], self)


@component("hugging-face")
@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFace(CorpusConfig):
    """A data set of the Hugging Face hub, of its cache, or of a folder (extra `hub`).

    Each row of one column is a document. Offline, or with HF_HUB_OFFLINE=1, the library's cache is
    read. A folder is one that `save_to_disk` wrote, or one of data files.
    """

    name: str = ""
    """Name of the data set, for example allenai/c4, or a folder."""
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
        rows = _dataset(self.name, self.config, self.split)
        if self.column not in rows.column_names:
            raise UserError(
                Problem(
                    f"data.corpus.column = {self.column!r} is not in {self.name}",
                    ", ".join(rows.column_names),
                    "--data.corpus.column NAME",
                )
            )
        files = [look_up(Path(file["filename"])) for file in rows.cache_files]
        stamp = " ".join([rows._fingerprint, str(len(rows)), *(stamp for _, stamp, _ in files)])
        changed = max((changed for _, _, changed in files), default=0)
        ends = [*range(_ROWS_PER_SOURCE, len(rows), _ROWS_PER_SOURCE), len(rows)]
        return [
            Source(
                name=self.split,
                start=start,
                end=end,
                size=(end - start) * _ASSUMED_ROW_BYTES,
                stamp=stamp,
                changed_ns=changed,
            )
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]

    def read(self, source: Source) -> Iterator[Document | Problem]:
        """See `CorpusConfig.read`."""
        rows = _dataset(self.name, self.config, self.split)
        try:
            values = column_values(rows, self.column, source.start, source.end)
        except Exception as error:  # of the library that reads files which others wrote
            where = f"{self.name}, rows {source.start} to {source.end}"
            yield Problem(f"{where}, cannot be read: {error}", fix="fetch or write it again")
            return
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


@lru_cache(maxsize=4)
def _dataset(name: str, config: str, split: str) -> Any:
    """The rows of a split.

    Raises:
        UserError: there are none, or the library is not installed.
    """
    os.environ["HF_DATASETS_TRUST_REMOTE_CODE"] = "0"  # some versions would run it
    try:
        import datasets
    except ImportError:
        raise missing_extra("hub", "data.corpus hugging-face") from None
    folder = Path(name).expanduser()
    try:
        if any((folder / file).is_file() for file in _WRITTEN_BY_SAVE_TO_DISK):
            return _saved(datasets.load_from_disk(str(folder)), name, split)
        where = str(folder) if folder.is_dir() else name
        return datasets.load_dataset(where, config or None, split=split)
    except UserError:
        raise
    except Exception as error:  # the library raises whatever its own libraries do
        raise UserError(
            Problem(
                f"data.corpus: cannot load {name} ({config or 'default'}, split {split}): {error}",
                fix="check the name, the configuration and the network",
            )
        ) from error


def _saved(found: Any, name: str, split: str) -> Any:
    """The split of what `load_from_disk` found: a data set, which has none, or several by name."""
    if not isinstance(found, dict):
        return found
    if split not in found:
        raise UserError(
            Problem(
                f"data.corpus.split = {split!r} is not in {name}",
                ", ".join(found),
                "--data.corpus.split NAME",
            )
        )
    return found[split]
