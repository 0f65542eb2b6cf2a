"""Parquet files as rows, in any place: read by groups of rows, the columns asked for only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from armillary.data.corpus import Source
from armillary.data.files import find_files, open_file, unreadable
from armillary.foundation.errors import Problem, UserError, missing_extra

_ROWS_AT_ONCE = 1_024


def table_sources(
    patterns: tuple[str, ...], columns: Sequence[str], leaf: str = "column"
) -> list[Source]:
    """The groups of rows of Parquet files; the ends of the files are read for it.

    Args:
        patterns: globs of the files.
        columns: each file must have one of these.
        leaf: which leaf of the corpus names the column, for messages.

    Raises:
        UserError: a pattern matches no file, a file cannot be read, is no Parquet file, or has no
            such column; or the library is not installed.
    """
    _library()
    sources, problems = [], []
    for file in find_files(patterns):
        try:
            with _opened(file.path) as table:
                names, metadata = table.schema_arrow.names, table.metadata
                groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
                sizes = [group.total_byte_size for group in groups]
        except OSError as error:
            problems.append(unreadable(file.path, error))
            continue
        except _damage() as error:
            problems.append(Problem(f"{file.path} is not a Parquet file: {error}"))
            continue
        if not set(columns) & set(names):
            problems.append(
                Problem(
                    f"{file.path} has no column {' or '.join(map(repr, columns))}",
                    ", ".join(names),
                    f"--data.corpus.{leaf} NAME",
                )
            )
        sources += [file.source(index, index + 1, size) for index, size in enumerate(sizes)]
    if problems:
        raise UserError(problems)
    return sources


def read_rows(
    source: Source, columns: Sequence[str]
) -> Iterator[tuple[int, dict[str, Any]] | Problem]:
    """The rows of a group with their numbers in the file: of those columns that are there.

    Text comes as bytes: whether it is UTF-8 is for the reader to look at.
    """
    group = source.start
    try:
        with _opened(source.path) as table:
            row = sum(table.metadata.row_group(index).num_rows for index in range(group))
            there = [name for name in columns if name in table.schema_arrow.names]
            for batch in table.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=there):
                values = [_as_bytes(batch.column(name)).to_pylist() for name in there]
                for found in zip(*values, strict=True):
                    yield row, dict(zip(there, found, strict=True))
                    row += 1
    except OSError as error:
        yield unreadable(source.path, error)
    except _damage() as error:
        where = f"{source.path}, group of rows {group}"
        yield Problem(f"{where}: not a whole Parquet file: {error}", fix="fetch the file again")


def column_values(rows: Any, column: str, start: int, end: int) -> list[Any]:
    """Some values of a column of a `datasets` data set; text comes as bytes.

    Raises:
        Exception: of whatever kind the libraries below raise for damaged files.
    """
    table = rows.select_columns([column]).with_format("arrow")[start:end]
    values = _as_bytes(table.column(column))
    values.validate(full=True)  # the files are mapped, and what they say of themselves trusted
    found: list[Any] = values.to_pylist()
    return found


def _as_bytes(values: Any) -> Any:
    import pyarrow

    if pyarrow.types.is_string(values.type):
        return values.cast(pyarrow.binary())
    if pyarrow.types.is_large_string(values.type):
        return values.cast(pyarrow.large_binary())
    return values


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    with open_file(path) as file, _library().ParquetFile(file) as table:
        yield table


def _damage() -> tuple[type[Exception], ...]:
    """What the library raises for damaged files, besides OSError."""
    import pyarrow

    return pyarrow.ArrowException, ValueError, KeyError, NotImplementedError, MemoryError


def _library() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise missing_extra("parquet", "data.corpus parquet") from None
    return pyarrow.parquet
