"""``read_trace``: whatever a file is, its jobs.

===========  =====================================================================================
known        published schemas by their columns (``SCHEMAS``), Philly's JSON log, any other CSV
             table by its columns' names (``columns``); packed by gzip, bzip2 or xz
passed over  rows that are no jobs, or whose times are in another unit than those of most rows, counted
             by reason (``Trace.dropped``); values read otherwise
             than written (``Trace.changed``) and what had to be decided (``Trace.how``) are said
refused      a table without a line of column names, or with rows of more cells than that; other
             compression, more rows or bytes than a replay has use for, lines of more than a MiB
===========  =====================================================================================
"""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from plait.core.base.codec.json_text import Most, open_unpacked, parse_json, read_unpacked
from plait.core.base.errors import DataError, JobError
from plait.core.base.files import reason_of
from plait.core.base.uncollected import uncollected
from plait.place.traces import columns
from plait.place.traces.published import PAI_HEADER, PHILLY_KEYS, SCHEMAS, is_philly, read_philly
from plait.place.traces.table import Trace
from plait.place.traces.times import pandas

MOST = Most(size=256 << 20)
"""Of a file, unpacked."""
MOST_ROWS, MOST_CELLS, MOST_COLUMNS = 2_000_000, 24_000_000, 500
MOST_VALUES = 6_000_000
"""Of a JSON log."""
_PACKED_OTHERWISE = {b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"7z\xbc\xaf": "7z"}
_NUMBER = re.compile(r"\s*[-+]?[0-9]+(?:\.[0-9]*)?(?:e[-+]?[0-9]+)?\s*", re.IGNORECASE)


@uncollected()
def read_trace(path: str | Path, mapping: Mapping[str, str] | None = None) -> Trace:
    """The jobs of a CSV table (also packed; commas, semicolons, tabs or bars), or of Philly's JSON log.

    mapping: columns by field (``columns.USUAL``), which overrules what the file looks like. Raises DataError
    for a file that cannot be read and JobError for columns that are not there.
    """
    file = Path(path)
    if not file.exists():
        raise DataError(f"{file}: there is no such file.")
    if not file.is_file():  # a pipe can be read once only, and its form is found by looking
        raise DataError(f"{file} is no regular file: a trace is read several times. Write it to a file first.")
    if mapping is None and ".json" in map(str.lower, file.suffixes):
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
        value = parse_json(read_unpacked(file, MOST.size), most=MOST_VALUES)
    except (ValueError, OSError) as error:
        problem = f"{file} is no readable JSON: {reason_of(error)}"
        raise DataError(
            f"{problem}. A Philly log is one list, [JOB, JOB, ...]: jq -s . makes one of jobs in lines."
        ) from None
    if not is_philly(value):
        keys = ", ".join(sorted(PHILLY_KEYS))
        raise DataError(f"{file} is no Philly log: a list of jobs with {keys} is expected. Other traces are CSV.")
    return read_philly(value, file)


def _table(file: Path) -> Any:
    pd = pandas()
    try:
        mark, count = _header(file)
        decimal = "," if mark == ";" else "."  # spreadsheets write semicolons where a comma is decimal
        most = min(MOST_ROWS, MOST_CELLS // count)
        with open_unpacked(file, MOST) as stream, warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # cells beyond those of the first line
            frame = pd.read_csv(
                stream, low_memory=False, skipinitialspace=mark != "\t", sep=mark, decimal=decimal, nrows=most + 1,
                index_col=False,  # else pandas takes a row's first cells for its name, and moves the others
            )  # fmt: skip
    except pd.errors.ParserWarning:
        raise DataError(
            f"{file}: rows have more cells than the first line has names of columns. Name all of them."
        ) from None
    except (ValueError, OSError, RuntimeError, csv.Error, pd.errors.ParserError) as error:
        raise DataError(f"{file} is no readable table: {' '.join(reason_of(error).split())}") from None
    if len(frame) > most:
        raise DataError(
            f"{file} has more than {most:,} rows of {count} columns, the most that is read. Give a part of it."
        )
    return frame


def _header(file: Path) -> tuple[str, int]:
    """What stands between columns, and how many there are. Raises DataError where the first line is a job."""
    with open_unpacked(file, MOST) as stream:
        start = stream.read(MOST.line)
    if packed := next((name for sign, name in _PACKED_OTHERWISE.items() if start.startswith(sign)), ""):
        raise DataError(f"{file} is packed with {packed}. Unpack it, or pack it with gzip, bzip2 or xz.")
    line = next((line for line in start.splitlines() if line.strip()), b"").decode("utf-8-sig")
    if not line:
        raise DataError(f"{file} is empty: it has not even a line of column names.")
    mark = next((mark for mark in ";\t|" if "," not in line and mark in line), ",")
    names = next(csv.reader([line], delimiter=mark, skipinitialspace=True))
    if len(names) > MOST_COLUMNS:
        raise DataError(f"{file} has {len(names)} columns; at most {MOST_COLUMNS} are read.")
    numbers = [name for name in names if _NUMBER.fullmatch(name)]
    if len(numbers) > 1:
        example = PAI_HEADER if len(names) == len(PAI_HEADER.split(",")) else "submit_time,duration,num_gpus"
        raise DataError(
            f"{file}: the first line is a job, not the names of columns ('{numbers[0].strip()}' is none). Write them "
            f"above it, such as {example}"
        )
    return mark, len(names)
