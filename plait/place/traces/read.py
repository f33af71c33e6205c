"""``read_trace``: whatever a file is, its jobs."""

from __future__ import annotations

import json
import lzma
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from plait.core.errors import DataError, JobError
from plait.place.traces import acme, columns, helios, openb, philly, spot
from plait.place.traces.table import Trace
from plait.place.traces.times import pandas

Reader = Callable[[Any, Path], Trace]
SCHEMAS: tuple[tuple[frozenset[str], Reader], ...] = (
    (openb.COLUMNS, openb.read),
    (spot.COLUMNS, spot.read),
    (helios.COLUMNS, helios.read),
    (acme.COLUMNS, acme.read),
)
"""The columns by which a table is known, and who reads it. Any other table is read by its columns' names."""


def read_trace(path: str | Path, mapping: Mapping[str, str] | None = None) -> Trace:
    """The jobs of a CSV table (also compressed; commas, semicolons, tabs or bars), or of Philly's JSON log.

    mapping: columns by field (``columns.USUAL``), which overrules what the file looks like. Raises DataError
    for a file that cannot be read and JobError for columns that are not there.
    """
    file = Path(path)
    if not file.exists():
        raise DataError(f"{file}: there is no such file.")
    if not file.is_file():  # a pipe can be read once only, and its form is found by looking
        raise DataError(f"{file} is no regular file: a trace is read several times. Write it to a file first.")
    if mapping is None and file.suffix.lower() == ".json":
        return _json(file)
    frame = _table(file)
    if mapping is None:
        names = {str(name) for name in frame.columns}
        for known, reader in SCHEMAS:
            if known <= names:
                return reader(frame, file)
    elif not mapping:
        raise JobError("no column is given", key="--columns")
    return columns.read(frame, file, mapping)


def _json(file: Path) -> Trace:
    try:
        value = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise DataError(f"{file} is no readable JSON: {error}") from None
    if not philly.is_it(value):
        keys = ", ".join(sorted(philly.KEYS))
        raise DataError(f"{file} is no Philly log: a list of jobs with {keys} is expected. Other traces are CSV.")
    return philly.read(value, file)


def _table(file: Path) -> Any:
    pd = pandas()
    try:
        columns = list(pd.read_csv(file, nrows=0, skipinitialspace=True).columns)
        mark = next((mark for mark in ";\t|" if len(columns) == 1 and mark in str(columns[0])), ",")
        decimal = "," if mark == ";" else "."  # spreadsheets write semicolons where a comma is decimal
        return pd.read_csv(file, low_memory=False, skipinitialspace=mark != "\t", sep=mark, decimal=decimal)
    except pd.errors.EmptyDataError:
        raise DataError(f"{file} is empty: it has not even a line of column names.") from None
    except (ValueError, OSError, EOFError, zlib.error, lzma.LZMAError, pd.errors.ParserError) as error:
        raise DataError(f"{file} is no readable table: {' '.join(str(error).split())}") from None
